"""The decoder of pretrain.py fine-tuned on reviews, in one place and in three parts.

    python examples/language/fine_tune.py --out fine_tuning.csv

In one place it is a plain loop of PyTorch over the same rows. Without a codec the parts end in its
weights bit for bit, and the program stops if they do not.
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
from vfl.training.run import load_data
from vfl.training.u_shape import UShapedSession

#: Codecs of the user's cut and of the server's output.
CODECS = (
    ("none", "none"),
    ("quantise:values=8", "quantise:values=8"),
    ("quantise:values=4", "quantise:values=4"),
    ("topk:k=256,values=8", "quantise:values=8"),
)


def parts_of(experiment: Experiment, words: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Front, middle and head with the same first weights every time."""
    user, middle = experiment.parties["user"], experiment.middle
    with scoped(experiment.seed):
        return (
            models.make_bottom(user.bottom).build((words,), user.width),
            models.make_bottom(middle.model).build((user.width,), middle.width),
            models.make_top(experiment.label.top).build(middle.width, 2),
        )


def centrally(session: UShapedSession, inputs: Tensor, labels: Tensor, whole: nn.Module) -> None:
    """Train as one model, over the rows of that session's schedule."""
    learned = [one for one in whole.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=session.terms.train.learning_rate)
    for exchange in session.terms.schedule(session.label.data.split):
        if exchange.trains:
            rows = torch.from_numpy(exchange.rows)
            optimizer.zero_grad()
            F.cross_entropy(whole(inputs[rows]), labels[rows]).backward()
            optimizer.step()


def main() -> None:
    """A line for each training, written when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("fine_tuning.csv"))
    parser.add_argument("-s", "--set", action="append", default=[], help="a setting's change")
    arguments = parser.parse_args()
    asked = read_experiment(Path(__file__).parent / "reviews.toml", arguments.set)
    data = load_data(asked)
    user, owner = data["user"], data["user_head"]
    test = torch.from_numpy(owner.split.test)
    truth = owner.labels[test]
    lines = []

    def tell(where: str, codecs: tuple[str, str], logits: Tensor, *rest: float) -> None:
        accuracy = float((logits.argmax(1) == truth).double().mean())
        area = auc(logits[:, 1] - logits[:, 0], truth == 1)
        guess = float(truth.bincount().max()) / len(truth)
        lines.append((where, *codecs, *(f"{one:.4g}" for one in (accuracy, area, guess, *rest))))
        print(*lines[-1], flush=True)
        with arguments.out.open("w", newline="") as file:
            names = ["trained", "codec", "middle_codec", "accuracy", "auc", "guess"]
            csv.writer(file).writerows(
                [[*names, "cut_bytes", "output_bytes", "gradient_bytes", "seconds"], *lines]
            )

    for codec, middle_codec in CODECS:
        middle = asked.middle.model_copy(update={"codec": middle_codec})
        experiment = asked.model_copy(update={"codec": codec, "middle": middle})
        front, between, head = parts_of(experiment, user.inputs.shape[1])
        started = time.perf_counter()
        session = UShapedSession(
            experiment, data, outputs=2, bottoms={"user": front, "server": between}, top=head
        ).run()
        seconds = time.perf_counter() - started
        up, down = (session.ledger.bytes_by_party(way) for way in ("up", "down"))
        weights = session.weights()
        answers = UShapedSession(
            experiment, data, mode="predict", outputs=2, weights=weights,
            bottoms={"user": front, "server": between}, top=head,
        ).run()  # fmt: skip
        tell("split", (codec, middle_codec), answers.outputs(), up["user"], up["server"],
             down["user"] + down["server"], seconds)  # fmt: skip
        if codec == "none":
            whole = nn.Sequential(*parts_of(experiment, user.inputs.shape[1]))
            started = time.perf_counter()
            centrally(session, user.inputs, owner.labels, whole)
            seconds = time.perf_counter() - started
            ours = nn.Sequential(front, between, head).parameters()
            equal = all(map(torch.equal, whole.parameters(), ours))
            if not equal:
                raise SystemExit("split and central training differ")
            with torch.no_grad():
                logits = whole.eval()(user.inputs[test])
            tell("central", ("none", "none"), logits, 0, 0, 0, seconds)


if __name__ == "__main__":
    main()
