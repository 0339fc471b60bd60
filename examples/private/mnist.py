"""Train on MNIST with DP-SGD in one process, as in Abadi et al. 2016, section 5.2.

    python examples/private/mnist.py --level medium --seeds 0 1 2 --out medium.jsonl

MNIST is read from the folder in the environment variable VFL_DATA. Each epoch is one line of the
file --out; an interrupted training continues from its last epoch in the folder --state. The
settings are those of the paper unless options change them. With --choose, the program trains on
50,000 of the training rows and tests on the other 10,000, so that settings can be chosen without
test rows.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vfl.core.seeds import Secret, generator, use_one_thread
from vfl.datasets.sources import read_bundled
from vfl.privacy.accountants import GaussianSteps, epsilon_by
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import prove
from vfl.privacy.projection import private_projection

#: Noise multipliers of the training and of the projection (section 5.2), by level; "none" adds no
#: noise.
LEVELS = {"small": (2.0, 4.0), "medium": (4.0, 7.0), "large": (8.0, 16.0), "none": (0.0, 0.0)}
DELTA = 1e-5


@dataclass
class Setting:
    """Settings of one training; the defaults are those of the paper."""

    level: str = "medium"
    width: int = 60
    hidden: int = 1000
    layers: int = 1  # hidden ones
    lot: int = 600
    clip: float = 4.0  # clipping norm of each layer
    first_rate: float = 0.1
    last_rate: float = 0.052
    decay_epochs: int = 10
    by: str = "layer"
    median: bool = False
    noise: float | None = None
    projection: str = "pca"  # "random" or "none" are alternatives that cost no privacy
    choose: bool = False

    def rate(self, epoch):
        """Return an epoch's learning rate: first linearly falling, then constant."""
        left = max(0.0, 1 - epoch / self.decay_epochs)
        return self.last_rate + left * (self.first_rate - self.last_rate)

    @property
    def noises(self):
        """Return the noise multipliers of the training and of the projection."""
        training, projection = LEVELS[self.level]
        return training if self.noise is None else self.noise, projection


def mnist(choose=False):
    """Return rows of 784 pixels from 0 to 1 with labels: training rows, and 10,000 for tests."""
    found = read_bundled("mnist")
    rows = torch.from_numpy(found.cells.reshape(len(found.labels), -1) / np.float32(255))
    labels, last = torch.from_numpy(found.labels), 60_000 if choose else 70_000
    first = last - 10_000
    return [(rows[:first], labels[:first]), (rows[first:last], labels[first:last])]


class Training:
    """A network in training: weights, progress, and the secret from which noise is drawn."""

    def __init__(self, setting, seed, train, test):
        self.setting, self.test, self.step = setting, test, 0
        secret = Secret.of_simulation(seed, "mnist")
        noise, of_projection = setting.noises
        self.train, self.test = train, test
        if setting.projection == "random":
            draws = torch.randn(784, setting.width, generator=generator(seed, "projection"))
            self._project(draws / math.sqrt(setting.width))
        elif setting.projection == "pca":
            self._project(
                private_projection(train[0], setting.width, noise=of_projection, secret=secret)
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            widths = [setting.width, *[setting.hidden] * setting.layers]
            hidden = [(nn.Linear(one, two), nn.ReLU()) for one, two in pairwise(widths)]
            self.model = nn.Sequential(*chain(*hidden), nn.Linear(widths[-1], 10))
        self.secret, self.rows = secret, len(train[0])
        self.q, self.a_epoch = setting.lot / self.rows, round(self.rows / setting.lot)
        norm = setting.clip * (math.sqrt(setting.layers + 1) if setting.by == "layer" else 1)
        self.half = None
        if noise:
            self.half = PrivateHalf(
                self.model, norm=norm, noise=noise, batch_size=setting.lot, secret=secret,
                party="all", by=setting.by, quantile=0.5 if setting.median else None,
            )  # fmt: skip
            prove(self.half.clipper, self.model, [(setting.width,)], "the network")

    def _project(self, directions):
        self.train, self.test = (
            (rows @ directions, labels) for rows, labels in (self.train, self.test)
        )

    def epoch(self):
        """Train one pass over the lots."""
        rate = self.setting.rate(self.step // self.a_epoch)
        weights = list(self.model.parameters())
        for _ in range(self.a_epoch):
            drawn = self.secret.uniform((self.rows,), "rows", self.step) < self.q
            at = torch.from_numpy(np.flatnonzero(drawn))
            inputs, labels = self.train[0][at], self.train[1][at]
            if self.half is None:
                self.model.zero_grad()
                loss = nn.functional.cross_entropy(self.model(inputs), labels, reduction="sum")
                (loss / self.setting.lot).backward()
            else:
                with self.half.recording() as calls:
                    outputs = self.model(inputs)
                grad = outputs.detach().softmax(1) - nn.functional.one_hot(labels, 10)
                self.half.give_gradients(outputs, grad, calls, self.step)
            with torch.no_grad():
                for weight in weights:
                    weight -= rate * weight.grad
            self.step += 1

    def cost(self):
        """Return the epsilon of projection and training steps together, by accountant."""
        noise, of_projection = self.setting.noises
        if not noise:
            return {}
        spent = [GaussianSteps(noise, self.step, self.q)]
        if self.setting.projection == "pca":
            spent.append(GaussianSteps(of_projection, 1))
        return {name: round(epsilon_by(spent, DELTA, name), 4) for name in ("moments", "rdp")}

    @torch.no_grad()
    def accuracy(self, part):
        """Return the accuracy on the first 10,000 training rows or on the test rows."""
        inputs, labels = (each[:10_000] for each in getattr(self, part))
        return round(float((self.model(inputs).argmax(1) == labels).float().mean()), 4)

    def save(self, path):
        """Save the state of the training, so that a later run can continue it."""
        state = {name: one.numpy() for name, one in self.model.state_dict().items()}
        norms = [] if self.half is None else self.half.state()
        beside = path.with_suffix(".new.npz")
        np.savez(beside, step=self.step, norms=norms, **state)
        beside.replace(path)

    def load(self, path):
        """Continue the training from a state that `save` has written."""
        with np.load(path, allow_pickle=False) as saved:
            self.step = int(saved["step"])
            names = self.model.state_dict()
            self.model.load_state_dict({name: torch.from_numpy(saved[name]) for name in names})
            if self.half is not None:
                self.half.restore(saved["norms"].tolist())


def run(setting, seed, most_epsilon, most_epochs, data, out, state, until=math.inf):
    """Train until the newer accountant's epsilon reaches the budget, or until the last epoch."""
    name = "_".join(str(one) for one in vars(setting).values())
    path = state / f"{name}_{seed}.npz"
    state.mkdir(parents=True, exist_ok=True)
    training = Training(setting, seed, *data)
    if path.exists():
        training.load(path)
    while training.step < most_epochs * training.a_epoch and time.monotonic() < until:
        training.epoch()
        spent = training.cost()
        if spent and spent["rdp"] > most_epsilon:
            break
        record = {"seed": seed, **vars(setting), "epoch": training.step // training.a_epoch}
        record |= {f"epsilon_{one}": value for one, value in spent.items()}
        record |= {"train": training.accuracy("train"), "test": training.accuracy("test")}
        with out.open("a") as lines:
            print(json.dumps(record), file=lines)
        training.save(path)


def main():
    """Read the arguments and run the trainings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", choices=LEVELS, default="medium")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epsilon", type=float, default=8.0, help="the budget")
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("mnist.jsonl"))
    parser.add_argument("--state", type=Path, default=Path("mnist.state"))
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="minutes until the program stops; rerun to go on",
    )
    for name, kind in (("width", int), ("hidden", int), ("lot", int), ("clip", float),
                       ("noise", float), ("first-rate", float), ("last-rate", float)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=None)
    parser.add_argument("--by", choices=["half", "layer"], default="layer")
    parser.add_argument("--choose", action="store_true", help="use no test rows")
    parser.add_argument(
        "--median", action="store_true", help="adapt clipping norms to the median norm"
    )
    parser.add_argument("--projection", choices=["pca", "random"], default="pca")
    given = vars(parser.parse_args())
    use_one_thread()
    names = Setting.__dataclass_fields__
    setting = Setting(**{k: v for k, v in given.items() if k in names and v is not None})
    until, data = time.monotonic() + 60 * given["minutes"], mnist(given["choose"])
    for seed in given["seeds"]:
        run(setting, seed, given["epsilon"], given["epochs"], data, given["out"], given["state"],
            until)  # fmt: skip


if __name__ == "__main__":
    main()
