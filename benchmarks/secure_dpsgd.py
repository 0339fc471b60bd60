"""DP-SGD on shares of many holders, beside the same training in clear.

MNIST, each picture as means of four pixels, a part of the rows at each holder; where no folder of
data sets is, handwritten digits of 64 pixels. All parties are threads of this process, so its
seconds are those of all of them. The line is computed (docs/wan.md), without compute.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import cast

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks import harness
from benchmarks.emulation import LinkModel, Wan
from vfl.config.toml import Settings
from vfl.core.errors import MissingDataError
from vfl.core.seeds import Secret, generator, use_one_thread
from vfl.datasets.picture_sources import read_mnist
from vfl.mpc.channel import bytes_by_phase
from vfl.mpc.many_parties import LocalMembers
from vfl.mpc.rules import name_of
from vfl.mpc.secure_dpsgd import Form, SecureSgd, prepared, record, train
from vfl.privacy.accountants import noise_for
from vfl.transport import TransportLink

HOLDERS = (2, 3, 5)
FORMS: tuple[Form, ...] = ("polynomial", "permuted")
ROWS, STEPS, BATCH_SIZE, DELTA = 12_000, 120, 512, 1e-5
_RATE, _CLIP, _LONGEST = 8.0, 1.0, 8.0


class SecureRow(Settings):
    """One training, all figures a step unless said otherwise.

    Attributes:
        holders: how many there are; 0 is the training in clear, with all rows in one place.
        form: of the inverse square root.
        ms: of this process, which plays all parties.
        cpu_ms: likewise.
        online, offline: bytes of all parties, headers of frames included.
        hops: messages one after the other.
        line_ms: over the computed line.
        epsilon: of the whole training, at delta 1e-5; the noise is that of `vfl.privacy`.
        accuracy: on test rows, of the whole training; mean over the seeds.
        deviation: between the seeds.
    """

    holders: int
    form: str
    ms: float
    cpu_ms: float
    online: int
    offline: int
    hops: float
    line_ms: float
    epsilon: float
    accuracy: float
    deviation: float


Rows = tuple[Tensor, Tensor]


def pictures(rows: int) -> tuple[Rows, Rows]:
    """Training and test rows, centred by a constant; inputs of axes (rows, columns), labels."""
    try:
        found, labels, count = read_mnist("mnist", tuple(range(10))).read(limit=rows * 7 // 6)
        tensor = torch.from_numpy(found).double().div(255)
        inputs = torch.nn.functional.avg_pool2d(tensor, 2).flatten(1)
        truth = torch.from_numpy(labels)
    except MissingDataError:
        digits, plain = load_digits(return_X_y=True)
        order = torch.randperm(len(plain), generator=generator(0, "benchmark rows"))
        inputs, truth = torch.from_numpy(digits).div(16)[order], torch.from_numpy(plain)[order]
        count = len(plain) * 4 // 5
    inputs = inputs - 0.13
    return (inputs[:count], truth[:count]), (inputs[count:], truth[count:])


def accuracy(weights: Tensor, rows: Rows) -> float:
    """The share of rows whose class gets the largest output."""
    inputs, labels = rows
    found = (inputs @ weights[:-1] + weights[-1]).argmax(1)
    return float((found == labels).double().mean())


def in_clear(terms: SecureSgd, rows: Rows, secret: Secret) -> Tensor:
    """The same training by one who sees all rows and adds the noise that is asked for."""
    inputs, truth, _ = prepared(terms, *rows)
    weights = torch.zeros(terms.columns + 1, terms.classes, dtype=torch.float64)
    for step in range(terms.steps):
        batch = terms.batch(step)
        errors = (inputs[batch] @ weights / 4 + 0.5).clamp(0, 1) - truth[batch]
        norms = errors.norm(dim=1, keepdim=True) * inputs[batch].norm(dim=1, keepdim=True)
        total = inputs[batch].T @ (errors * (terms.clip / norms.clamp_min(1e-12)).clamp(max=1))
        noise = torch.from_numpy(secret.normal(tuple(weights.shape), "noise", step))
        total += terms.clip * terms.noise * noise
        weights -= terms.learning_rate / terms.batch_size * total
    return weights


def bench_secure_dpsgd(
    holders: Sequence[int] = HOLDERS,
    forms: Sequence[Form] = FORMS,
    epsilons: Sequence[float] = (1.0,),
    *,
    rows: int = ROWS,
    steps: int = STEPS,
    seeds: int = 3,
    wan: Wan | None = None,
    say: Callable[[str], None] = harness.silent,
) -> list[SecureRow]:
    """Train in clear and on shares.

    Args:
        holders: how many, one training each.
        forms: of the inverse square root.
        epsilons: of a training.
        rows: for training, of MNIST.
        steps: of a training.
        seeds: trainings of each kind, of other batches and noise.
        wan: every party's line.
        say: told a line about each kind.
    """
    use_one_thread()
    known, test = pictures(rows)
    count, columns = known[0].shape
    size = min(BATCH_SIZE, count // 4)
    found = []
    for epsilon in epsilons:
        noise = noise_for(epsilon, DELTA, steps, size / count)
        kinds: list[tuple[int, Form]] = [(0, "polynomial")]
        kinds += [(each, form) for each in holders for form in forms]
        for many, form in kinds:
            among = many or 2  # in clear it does not matter
            parts = [count // among] * among
            parts[-1] += count % among
            terms = SecureSgd(
                tuple(parts), columns, 10, steps, size, _RATE, _CLIP, noise, _LONGEST, form
            )
            say(f"{many or 'no'} holders, {form}, epsilon {epsilon:g}: {seeds} x {steps} steps")
            found.append(_row(many, terms, known, test, epsilon, seeds, wan or Wan()))
    return found


def _row(
    holders: int,
    terms: SecureSgd,
    known: Rows,
    test: Rows,
    epsilon: float,
    seeds: int,
    wan: Wan,
) -> SecureRow:
    accuracies, taken, busy = [], 0.0, 0.0
    sent, hops, line_s = {"online": 0, "offline": 0}, 0, 0.0
    for seed in range(seeds):
        again = replace(terms, seed=seed)
        began, cpu = time.monotonic(), time.process_time()
        if holders:
            weights, sent, hops, line_s = _on_shares(again, known, wan)
        else:
            weights = in_clear(again, known, Secret.fresh())
        taken += time.monotonic() - began
        busy += time.process_time() - cpu
        accuracies.append(accuracy(weights, test))
    of_all, steps = torch.tensor(accuracies, dtype=torch.float64), terms.steps
    return SecureRow(
        holders=holders,
        form=terms.form if holders else "in clear",
        ms=1000 * taken / seeds / steps,
        cpu_ms=1000 * busy / seeds / steps,
        online=round(sent["online"] / steps),
        offline=round(sent["offline"] / steps),
        hops=hops / steps,
        line_ms=1000 * line_s / steps,
        epsilon=epsilon,
        accuracy=float(of_all.mean()),
        deviation=float(of_all.std()) if seeds > 1 else 0.0,
    )


def _on_shares(
    terms: SecureSgd, known: Rows, wan: Wan
) -> tuple[Tensor, dict[str, int], int, float]:
    """The model, bytes by phase, messages one after the other, and seconds on the line."""
    parts = zip(*(torch.split(each, list(terms.rows)) for each in known), strict=True)
    own: list[tuple[Tensor, Tensor] | None] = [*parts, None]
    secrets = [Secret.fresh() for _ in own]
    with LocalMembers(len(terms.rows), terms=record(terms), timeout_s=600) as members:
        model = LinkModel([name_of(one.role) for one in members.parties], wan)
        for one, other in combinations(members.parties, 2):
            there, back = one.channels[other.role], other.channels[one.role]
            ends = cast("tuple[TransportLink, TransportLink]", (there.link, back.link))
            there.link, back.link = model.between(name_of(one.role), name_of(other.role), ends)
        weights = members.run(lambda m: train(m, terms, own[m.role], secrets[m.role]))[0]
        assert weights is not None, "a holder has the model"
        return weights, bytes_by_phase(members.traffic()), model.hops, model.seconds


def format_secure_dpsgd(rows: Sequence[SecureRow]) -> str:
    """One line a row."""
    head = (
        f"{'holders':<8}{'form':<12}{'epsilon':>8}{'ms':>8}{'CPU ms':>8}{'online':>11}"
        f"{'offline':>11}{'hops':>6}{'line ms':>9}{'accuracy':>10}{'+-':>7}"
    )
    lines = [
        f"{row.holders or '-':<8}{row.form:<12}{row.epsilon:>8g}{row.ms:>8.2f}{row.cpu_ms:>8.2f}"
        f"{row.online:>11}{row.offline:>11}{row.hops:>6.1f}{row.line_ms:>9.0f}{row.accuracy:>10.4f}"
        f"{row.deviation:>7.4f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    """The command line."""
    options = harness.parser("secure_dpsgd", "DP-SGD on shares of many holders, beside clear.")
    add = options.add_argument
    add("--holders", default="2,3,5", help="how many; %(default)s")
    add("--form", default="polynomial,permuted", help="of the inverse root; %(default)s")
    add("--epsilon", default="1", help="of a training; %(default)s")
    add("--steps", type=int, default=STEPS, help="of a training; %(default)s")
    add("--rows", type=int, default=ROWS, help="for training, of MNIST; %(default)s")
    add("--seeds", type=int, default=3, help="trainings of each kind; %(default)s")
    add("--wan", default="80mbps,40ms", help="every party's line; %(default)s")

    def measure(asked: Namespace) -> list[SecureRow]:
        return bench_secure_dpsgd(
            harness.numbers(asked.holders),
            asked.form.split(","),
            [float(each) for each in asked.epsilon.split(",")],
            rows=asked.rows,
            steps=asked.steps,
            seeds=asked.seeds,
            wan=Wan.parse(asked.wan),
            say=harness.say,
        )

    harness.run(options, measure, format_secure_dpsgd)


if __name__ == "__main__":
    main()
