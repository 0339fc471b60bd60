"""Train on CIFAR-10 with DP-SGD after public convolutions: Abadi et al. 2016, section 5.3.

    python examples/private/cifar.py --epsilon 8 --seeds 0 --out cifar.jsonl

The paper trains its convolutions on CIFAR-100, which it treats as public data. This program trains
them on 20,000 pictures of Tiny-ImageNet, reduced to 32 x 32 pixels. The convolutions then stay
fixed, and the two dense layers of width 384 after them are trained with DP-SGD, on the middle 24 x
24 pixels of pictures. The folder --state stores convolutions and features, so that an interrupted
training can continue. Both data sets are read from the folder in the environment variable VFL_DATA.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from mnist import Setting, run
from torch import nn

from vfl.core.seeds import generator, use_one_thread
from vfl.datasets.sources import SetFormat, read_bundled

#: Number of rows in a lot, noise multiplier, and clipping norm of a layer, for each epsilon, as in
#: the paper.
LOTS, NOISE, CLIP = {2.0: 2000, 4.0: 4000, 8.0: 4000}, 6.0, 3.0
SIDE, CHANNELS, DENSE = 24, 64, 384
WIDTH = CHANNELS * (SIDE // 4) ** 2


def pictures(source):
    """Return a data set's pictures as bytes, axes (rows, 3, 32, 32), and their labels."""
    found = read_bundled(source, form=SetFormat(side=32))
    return torch.from_numpy(np.asarray(found.cells)), torch.from_numpy(found.labels)


def scaled(pixels):
    """Scale every picture to mean 0 and standard deviation 1, as the paper's framework does."""
    rows = pixels.float()
    mean, deviation = rows.mean((1, 2, 3), keepdim=True), rows.std((1, 2, 3), keepdim=True)
    return (rows - mean) / deviation.clamp(min=1.0)


def convolutions():
    """Return a module of two convolutions of 5 x 5 with 64 channels, each followed by pooling."""
    layers = []
    for channels in (3, CHANNELS):
        layers += [nn.Conv2d(channels, CHANNELS, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten())


def public_convolutions(pixels, labels, epochs, seed=0):
    """Train the convolutions on public pictures, which are randomly cropped and mirrored."""
    draw = generator(seed, "public pictures")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        front = convolutions()
        classes = int(labels.max()) + 1
        back = nn.Sequential(
            nn.Linear(WIDTH, DENSE), nn.ReLU(), nn.Dropout(), nn.Linear(DENSE, classes)
        )
        optimizer = torch.optim.Adam([*front.parameters(), *back.parameters()])
        for epoch in range(epochs):
            for at in torch.randperm(len(labels), generator=draw).split(128):
                top, left = torch.randint(0, 32 - SIDE + 1, (2,), generator=draw).tolist()
                rows = pixels[at][:, :, top : top + SIDE, left : left + SIDE]
                if torch.rand((), generator=draw) < 0.5:
                    rows = rows.flip(3)
                loss = nn.functional.cross_entropy(back(front(scaled(rows))), labels[at])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"public pictures, epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    return front


@torch.no_grad()
def features(front, pixels):
    """Return features of the middle of every picture, as rows with Euclidean norm 1."""
    middle = pixels[:, :, 4 : 4 + SIDE, 4 : 4 + SIDE]
    found = torch.cat([front(scaled(rows)).half() for rows in middle.split(500)])
    return found / found.float().norm(dim=1, keepdim=True).clamp(min=1e-6).half()


def kept(state, epochs):
    """Return the features and labels of all 60,000 pictures; later calls read them from a file."""
    path = state / f"features_{epochs}.npz"
    if not path.exists():
        front = public_convolutions(*pictures("tiny_imagenet"), epochs)
        pixels, labels = pictures("cifar10")
        state.mkdir(parents=True, exist_ok=True)
        np.savez(path, features=features(front, pixels).numpy(), labels=labels.numpy())
    with np.load(path, allow_pickle=False) as saved:
        return torch.from_numpy(saved["features"]), torch.from_numpy(saved["labels"])


def main():
    """Read the arguments and run the trainings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, choices=LOTS, default=8.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--public-epochs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--scale", type=float, default=10.0, help="norm of a row's features")
    parser.add_argument(
        "--noise", type=float, default=NOISE, help="noise multiplier; 0 adds no noise"
    )
    parser.add_argument("--lot", type=int, help="rows in a lot; by default as in the paper")
    parser.add_argument("--clip", type=float, default=CLIP)
    parser.add_argument(
        "--layers", type=int, default=2, help="number of hidden layers of width 384"
    )
    parser.add_argument("--choose", action="store_true", help="use no test rows")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="minutes until the program stops; rerun to go on",
    )
    parser.add_argument("--out", type=Path, default=Path("cifar.jsonl"))
    parser.add_argument("--state", type=Path, default=Path("cifar.state"))
    asked = parser.parse_args()
    use_one_thread()
    rows, labels = kept(asked.state, asked.public_epochs)
    rows, last = rows.float() * asked.scale, 50_000 if asked.choose else 60_000
    first = last - 10_000
    data = [(rows[:first], labels[:first]), (rows[first:last], labels[first:last])]
    setting = Setting(
        level="none", width=WIDTH, hidden=DENSE, layers=asked.layers, noise=asked.noise,
        lot=asked.lot or LOTS[asked.epsilon], clip=asked.clip, first_rate=asked.rate,
        last_rate=asked.rate, projection="none", choose=asked.choose,
    )  # fmt: skip
    until = time.monotonic() + 60 * asked.minutes
    for seed in asked.seeds:
        run(setting, seed, asked.epsilon, asked.epochs, data, asked.out, asked.state, until)


if __name__ == "__main__":
    main()
