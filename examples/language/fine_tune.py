"""Fine-tune the decoder of pretrain.py on reviews, in one process and split into three parts.

    python examples/language/fine_tune.py --out fine_tuning.csv

In one process, the training is an ordinary PyTorch training loop over the same rows. Without a
codec, both trainings must end with the same weights bit for bit; otherwise the program stops with
an error.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl import models
from vfl.attacks.scoring import auc
from vfl.config import Experiment, read_experiment
from vfl.core.seeds import scoped
from vfl.session import rules
from vfl.training.local import LocalSession
from vfl.training.run import load_data

NAMES = ["trained", "codec", "middle_codec", "accuracy", "auc", "guess", "cut_bytes",
         "output_bytes", "cut_gradient_bytes", "output_gradient_bytes", "seconds"]  # fmt: skip
#: Codecs to measure, applied to the user's cut and to the server's output.
CODECS = (
    ("none", "none"),
    ("quantise:values=8", "quantise:values=8"),
    ("quantise:values=4", "quantise:values=4"),
    ("topk:k=256,values=8,packer=index", "quantise:values=8"),
)


def parts_of(experiment: Experiment, words: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return front, middle and head models; every call returns the same initial weights."""
    user, middle = experiment.parties["user"], experiment.middle
    with scoped(experiment.seed):
        return (
            models.make_bottom(user.bottom).build((words,), user.width),
            models.make_bottom(middle.model).build((user.width,), middle.width),
            models.make_top(experiment.label.top).build(middle.width, 2),
        )


def centrally(session: LocalSession, inputs: Tensor, labels: Tensor, whole: nn.Module) -> None:
    """Train the whole network as one model, on the batches of a split session's schedule."""
    learned = [one for one in whole.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=session.terms.train.learning_rate)
    for exchange in rules.schedule(session.terms, session.label.data.split):
        if exchange.trains:
            rows = torch.from_numpy(exchange.rows)
            optimizer.zero_grad()
            F.cross_entropy(whole(inputs[rows]), labels[rows]).backward()
            optimizer.step()


def main() -> None:
    """Write one line for each finished training; skip trainings with a line in the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("fine_tuning.csv"))
    parser.add_argument("-s", "--set", action="append", default=[], help="change of a setting")
    parser.add_argument("--most", type=int, help="largest number of codec pairs; rerun to go on")
    arguments = parser.parse_args()
    asked = read_experiment(Path(__file__).parent / "reviews.toml", arguments.set)
    data = load_data(asked)
    user, owner = data["user"], data["user_head"]
    test = torch.from_numpy(owner.split.test)
    truth = owner.labels[test]
    done = set()
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            done = {(line["codec"], line["middle_codec"]) for line in csv.DictReader(file)}

    def tell(where: str, codecs: tuple[str, str], logits: Tensor, *rest: float) -> None:
        accuracy = float((logits.argmax(1) == truth).double().mean())
        area = auc(logits[:, 1] - logits[:, 0], truth == 1)
        guess = float(truth.bincount().max()) / len(truth)
        line = [where, *codecs, *(f"{one:.7g}" for one in (accuracy, area, guess, *rest))]
        print(*line, flush=True)
        with arguments.out.open("a", newline="") as file:
            if not file.tell():
                csv.writer(file).writerow(NAMES)
            csv.writer(file).writerow(line)

    for codec, middle_codec in [pair for pair in CODECS if pair not in done][: arguments.most]:
        middle = asked.middle.model_copy(update={"codec": middle_codec})
        experiment = asked.model_copy(update={"codec": codec, "middle": middle})
        front, between, head = parts_of(experiment, user.inputs.shape[1])
        given = {"bottoms": {"user": front, "server": between}, "top": head, "outputs": 2}
        started = time.perf_counter()
        session = LocalSession(experiment, data, **given).run()
        seconds = time.perf_counter() - started
        up, down = (session.ledger.bytes_by_party(way) for way in ("up", "down"))
        asking = LocalSession(experiment, data, mode="predict", weights=session.weights(), **given)
        received = down["user"], down["server"]
        sent = up["user"], up["server"]
        tell("split", (codec, middle_codec), asking.run().outputs(), *sent, *received, seconds)
        if (codec, middle_codec) == ("none", "none"):
            whole = nn.Sequential(*parts_of(experiment, user.inputs.shape[1]))
            started = time.perf_counter()
            centrally(session, user.inputs, owner.labels, whole)
            seconds = time.perf_counter() - started
            ours = nn.Sequential(front, between, head).parameters()
            if not all(map(torch.equal, whole.parameters(), ours)):
                raise SystemExit("split and central training differ")
            with torch.no_grad():
                logits = whole.eval()(user.inputs[test])
            tell("central", ("none", "none"), logits, 0, 0, 0, 0, seconds)


if __name__ == "__main__":
    main()
