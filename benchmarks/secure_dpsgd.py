"""DP-SGD on secret shares among many holders, compared with the same training in plaintext.

The rows are pictures of MNIST, divided among the holders; a row has the means of four pixels each,
or other features of a picture. Without a folder of data sets, the rows are handwritten digits of 64
pixels. All parties are threads of this process, so the measured seconds are the sum over all
parties. The time over a network link is computed (docs/results/wan.md), without computation time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Literal, cast

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks import harness
from benchmarks.emulation import LinkModel, Wan
from vfl import models
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError, MissingDataError
from vfl.core.seeds import Secret, generator, use_one_thread
from vfl.datasets.sources.pictures import read_mnist
from vfl.mpc.channel import bytes_by_phase
from vfl.mpc.many.members import LocalMembers
from vfl.mpc.rules import name_of
from vfl.mpc.secure_dpsgd import Form, LocalStart, Rows, SecureSgd, train, train_alone
from vfl.privacy.accountants import noise_for
from vfl.transport import TransportLink

HOLDERS = (2, 3, 5)
_PUBLIC = 500
FORMS: tuple[Form, ...] = ("polynomial", "permuted")
ROWS, STEPS, BATCH_SIZE, DELTA = 12_000, 120, 512, 1e-5
_RATE, _CLIP, _LONGEST = 8.0, 1.0, 8.0


class SecureRow(Settings):
    """Result of one training; costs are per step unless stated otherwise.

    Attributes:
        holders: number of holders; 0 is the training in plaintext with all rows in one process.
        form: form in which the inverse square root is computed.
        split: division of the rows among holders: "even", or "sorted" by label.
        start: initial weights: "zero", or the "average" or "best" of models that holders train
            separately with half of epsilon; 500 public rows select the best.
        ms: wall time of this process, which runs all parties.
        cpu_ms: CPU time of this process.
        online, offline: bytes that all parties send, headers of frames included.
        hops: number of sequential messages.
        line_ms: time over the computed network link.
        epsilon: epsilon of the whole training, at delta 1e-5; `vfl.privacy` computes the noise.
        accuracy: accuracy on the test rows after the whole training; mean over the seeds.
        deviation: standard deviation over the seeds.
    """

    holders: int
    form: str
    split: str
    start: str
    ms: float
    cpu_ms: float
    online: int
    offline: int
    hops: float
    line_ms: float
    epsilon: float
    accuracy: float
    deviation: float


def pictures(rows: int, features: str = "means") -> tuple[Rows, Rows]:
    """Return training rows and test rows: inputs, axes (rows, columns), and labels.

    Args:
        rows: number of training rows of MNIST.
        features: "means" of four pixels, centred by a constant, or the spec of a bottom model
            without weights.
    """
    try:
        found, labels, count = read_mnist("MNIST", tuple(range(10))).read(limit=rows * 7 // 6)
        tensor = torch.from_numpy(found).double().div(255)
        inputs = torch.nn.functional.avg_pool2d(tensor, 2) if features == "means" else tensor
        truth = torch.from_numpy(labels)
    except MissingDataError:
        digits, plain = load_digits(return_X_y=True)
        order = torch.randperm(len(plain), generator=generator(0, "benchmark rows"))
        inputs, truth = torch.from_numpy(digits).div(16)[order], torch.from_numpy(plain)[order]
        inputs = inputs.view(-1, 1, 8, 8)
        count = len(plain) * 4 // 5
    inputs = inputs.flatten(1) - 0.13 if features == "means" else _features(features, inputs)
    return (inputs[:count], truth[:count]), (inputs[count:], truth[count:])


def _features(spec: str, inputs: Tensor) -> Tensor:
    bottom = models.make_bottom(spec)
    if not isinstance(bottom, models.FixedBottom):
        raise BadOptionError("features have no weights", got=spec, want="means, or hog:cell=7")
    return bottom.features(inputs).double()


def accuracy(weights: Tensor, rows: Rows) -> float:
    """Return the fraction of rows whose largest output is that of their class."""
    inputs, labels = rows
    found = (inputs @ weights[:-1] + weights[-1]).argmax(1)
    return float((found == labels).double().mean())


def bench_secure_dpsgd(
    holders: Sequence[int] = HOLDERS,
    form: Sequence[Form] = FORMS,
    epsilon: Sequence[float] = (1.0,),
    *,
    start: Sequence[Literal["zero", "average", "best"]] = ("zero",),
    split: Sequence[Literal["even", "sorted"]] = ("even",),
    features: str = "means",
    rows: int = ROWS,
    steps: int = STEPS,
    seeds: int = 3,
    wan: Wan | None = Wan(80, 40),  # noqa: B008 (it does not change)
) -> list[SecureRow]:
    """Measure DP-SGD on shares of many holders, and the same training in plaintext.

    Args:
        holders: numbers of holders; there is a training for each number.
        form: form in which the inverse square root is computed.
        epsilon: epsilon of a training.
        start: initial weights: zero, or the average or best of models that holders train
            separately.
        split: division of the rows among holders.
        features: means of four pixels, or hog:cell=7.
        rows: number of training rows of MNIST.
        steps: number of steps of a training.
        seeds: number of trainings of each kind, each with different batches and noise.
        wan: network link of every party.
    """
    use_one_thread()
    known, test = pictures(rows, features)
    kinds = [Kind(0, "polynomial", "even", "zero", each, steps, seeds) for each in epsilon] + [
        Kind(many, root, dealt, begin, each, steps, seeds)
        for each, many, root, dealt, begin in product(epsilon, holders, form, split, start)
    ]
    found = []
    for kind in kinds:
        harness.say(str(kind))
        found.append(_row(kind, known, test, wan or Wan()))
    return found


@dataclass(frozen=True, slots=True)
class Kind:
    """Settings of a training; see `SecureRow`."""

    holders: int
    form: Form
    split: str
    start: str
    epsilon: float
    steps: int
    seeds: int

    def terms(self, count: int, columns: int) -> SecureSgd:
        """Return the terms of a training on this number of rows and columns."""
        among = self.holders or 2  # has no effect in plaintext
        parts = [count // among] * among
        parts[-1] += count % among
        size, epsilon, delta = min(BATCH_SIZE, count // 4), self.epsilon, DELTA
        if self.start != "zero":
            epsilon, delta = epsilon / 2, delta / 2
        noise = noise_for(epsilon, delta, self.steps, size / count)
        return SecureSgd(
            tuple(parts), columns, 10, self.steps, size, _RATE, _CLIP, noise, _LONGEST, self.form
        )

    def beginning(self, terms: SecureSgd, public: int) -> LocalStart | None:
        """Return the start from models trained separately, for as many epochs as the joint one.

        The start from the best model also needs public rows.
        """
        if self.start == "zero":
            return None
        size = max(1, min(terms.rows) * terms.batch_size // sum(terms.rows))
        rate = size / min(terms.rows)
        noise = noise_for(self.epsilon / 2, DELTA / 2, self.steps, rate)
        choice: Literal["average", "best"] = "best" if self.start == "best" else "average"
        return LocalStart(self.steps, size, _RATE, noise, choice, public_rows=public)


def _row(kind: Kind, known: Rows, test: Rows, wan: Wan) -> SecureRow:
    terms = kind.terms(*known[0].shape)
    if kind.split == "sorted":
        order = known[1].argsort(stable=True)
        known = (known[0][order], known[1][order])
    # Public rows are not among the training rows or the test rows.
    few = min(_PUBLIC, len(test[1]) // 4)
    public, judged = (test[0][:few], test[1][:few]), (test[0][few:], test[1][few:])
    start = kind.beginning(terms, few)
    accuracies, taken, busy = [], 0.0, 0.0
    sent, hops, line_s = {"online": 0, "offline": 0}, 0, 0.0
    for seed in range(kind.seeds):
        again = replace(terms, seed=seed)
        with harness.measured() as cost:
            if kind.holders:
                weights, sent, hops, line_s = _on_shares(again, known, wan, start, public)
            else:
                alone = LocalStart(again.steps, again.batch_size, again.learning_rate, again.noise)
                weights = train_alone(again, alone, known, Secret.fresh())
        taken += cost.wall_s
        busy += cost.cpu_s
        accuracies.append(accuracy(weights, judged))
    of_all, steps = torch.tensor(accuracies, dtype=torch.float64), kind.steps
    return SecureRow(
        holders=kind.holders,
        form=kind.form if kind.holders else "in clear",
        split=kind.split,
        start=kind.start,
        ms=1000 * taken / kind.seeds / steps,
        cpu_ms=1000 * busy / kind.seeds / steps,
        online=round(sent["online"] / steps),
        offline=round(sent["offline"] / steps),
        hops=hops / steps,
        line_ms=1000 * line_s / steps,
        epsilon=kind.epsilon,
        accuracy=float(of_all.mean()),
        deviation=float(of_all.std()) if kind.seeds > 1 else 0.0,
    )


def _on_shares(
    terms: SecureSgd, known: Rows, wan: Wan, start: LocalStart | None, public: Rows
) -> tuple[Tensor, dict[str, int], int, float]:
    """Return the model, bytes by phase, sequential messages, and seconds on the network link."""
    parts = zip(*(torch.split(each, list(terms.rows)) for each in known), strict=True)
    own: list[Rows | None] = [*parts, None]
    secrets = [Secret.fresh() for _ in own]
    with LocalMembers(len(terms.rows), terms=asdict(terms), timeout_s=600) as members:
        model = LinkModel([name_of(one.role) for one in members.parties], wan)
        for one, other in combinations(members.parties, 2):
            there, back = one.channels[other.role], other.channels[one.role]
            ends = cast("tuple[TransportLink, TransportLink]", (there.link, back.link))
            there.link, back.link = model.between(name_of(one.role), name_of(other.role), ends)
        weights = members.run(
            lambda m: train(m, terms, own[m.role], secrets[m.role], start, public)
        )[0]
        assert weights is not None, "a holder has the model"
        return weights, bytes_by_phase(members.traffic()), model.hops, model.seconds


TABLE = harness.table(
    ("holders", "<8", lambda row: row.holders or "-"),
    ("form", "<12", "form"),
    ("split", "<8", "split"),
    ("start", "<9", "start"),
    ("epsilon", ">8g", "epsilon"),
    ("ms", ">8.2f", "ms"),
    ("CPU ms", ">8.2f", "cpu_ms"),
    ("online", ">11", "online"),
    ("offline", ">11", "offline"),
    ("hops", ">6.1f", "hops"),
    ("line ms", ">9.0f", "line_ms"),
    ("accuracy", ">10.4f", "accuracy"),
    ("+-", ">7.4f", "deviation"),
)


main = harness.command(bench_secure_dpsgd, TABLE)


if __name__ == "__main__":
    main()
