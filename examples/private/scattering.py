"""Train with differential privacy on scattering features of MNIST, at one party or at two.

    python examples/private/scattering.py --epsilons 8 2 .5 --seeds 0 1 2 --out goals.jsonl

A scattering transform (Bruna and Mallat 2013) has no trained weights, so it costs no privacy; [dp]
trains a linear model on its outputs (Tramer and Boneh 2021). With one party, the label party has
all columns; with two parties, each party has the features of one half of every picture. The
learning rates were found with --choose, which trains on 50,000 of the training rows and tests on
the other 10,000, but never on test rows.
"""

import argparse
import json
import math
import time
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, pad

from vfl.config import Experiment
from vfl.core.seeds import Secret, use_one_thread
from vfl.datasets import PartyData, Split
from vfl.datasets.sources import read_bundled
from vfl.datasets.table import Classes
from vfl.privacy.accountants import noise_for, poisson_steps
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import prove
from vfl.training.local import LocalSession

#: Learning rate for each epsilon, at one party and at two parties; --choose found these rates to be
#: the best.
RATES = {0.5: (100.0, 50.0), 2.0: (300.0, 100.0), 3.0: (300.0, 100.0), 8.0: (300.0, 300.0)}
EPOCHS, LOT, ANGLES = 30, 4096, 4
DELTA, CLIP, BOTTOM = 1e-5, 0.1, "mlp:hidden=none"
RESULTS = ("accuracy", "cpu_s")

noise_of = cache(noise_for)


def wavelets(height, width, angles):
    """Return Morlet wavelets of two scales and several angles, as frequency responses."""
    axes = (np.fft.fftfreq(size) * size for size in (height, width))
    ys, xs = np.meshgrid(*axes, indexing="ij")

    def morlet(scale, angle):
        sigma, slant, xi = 0.8 * 2**scale, 0.5, 3 * math.pi / 4 / 2**scale
        u = xs * math.cos(angle) + ys * math.sin(angle)
        v = -xs * math.sin(angle) + ys * math.cos(angle)
        bell = np.exp(-(u**2 + slant**2 * v**2) / (2 * sigma**2))
        wave = bell * np.exp(1j * xi * u)
        wave -= bell * (wave.sum() / bell.sum())
        return np.fft.fft2(wave * slant / (2 * math.pi * sigma**2))

    turns = [math.pi * at / angles for at in range(angles)]
    return [
        torch.from_numpy(np.stack([morlet(scale, turn) for turn in turns])).to(torch.complex64)
        for scale in (0, 1)
    ]


def scattering(pictures, angles=ANGLES):
    """Return scattering orders 0 to 2, averaged over 4 x 4 pixels; axes (rows, columns)."""
    rows, _, _ = pictures.shape
    whole = pad(pictures[:, None], (4, 4, 4, 4), mode="reflect")[:, 0]
    filters = wavelets(*whole.shape[1:], angles)
    smooth = lambda each: avg_pool2d(each.flatten(0, -3)[:, None], 8, 4)[:, 0]  # noqa: E731

    def modulus(signals, bank):
        spectrum = torch.fft.fft2(signals)
        return torch.fft.ifft2(spectrum[..., None, :, :] * bank).abs()

    first, second = (modulus(whole, bank) for bank in filters)
    deeper = modulus(first, filters[1])
    parts = [whole[:, None], first, second, deeper.flatten(1, 2)]
    found = [smooth(each).unflatten(0, (rows, -1)) for each in parts]
    # Groups of channels are normalised within each row to mean 0 and standard deviation 1, so no
    # row's features depend on another row.
    groups = [each.unflatten(1, (-1, min(angles, each.shape[1]))) for each in found]
    scaled = [
        (each - each.mean((2, 3, 4), keepdim=True)) / (each.std((2, 3, 4), keepdim=True) + 1e-4)
        for each in groups
    ]
    flat = torch.cat([each.flatten(1) for each in scaled], 1)
    return flat / flat.shape[1] ** 0.5


def features(parties, angles, folder):
    """Return the features of each party's part of 70,000 pictures, and the labels."""
    found = read_bundled("mnist")
    pictures = torch.from_numpy(found.cells[:, 0] / np.float32(255))
    width = pictures.shape[2] // parties
    parts = []
    for at in range(parties):
        kept = folder / f"scattering_{angles}_{parties}_{at}.npy"
        if not kept.exists():
            cut = pictures[:, :, at * width : (at + 1) * width]
            blocks = [scattering(block, angles).half() for block in cut.split(250)]
            folder.mkdir(parents=True, exist_ok=True)
            np.save(kept, torch.cat(blocks).numpy())
        parts.append(torch.from_numpy(np.load(kept, allow_pickle=False)))
    return parts, torch.from_numpy(found.labels)


def data_of(parts, labels, split):
    """Return the data of each party; if only one party has features, it is the label party."""
    names = ["label"] if len(parts) == 1 else ["left", "right"]
    classes = Classes(tuple(map(str, range(10))))
    rows = {}
    for name, part in zip(names, parts, strict=True):
        own = (labels, classes) if name == "label" else (None, None)
        rows[name] = PartyData(name, part.float(), *own, split, bytes(32))
    if "label" not in rows:
        rows["label"] = PartyData("label", None, labels, classes, split, bytes(32))
    return rows


def central(part, labels, split, epsilon, rate, epochs, seed, clip):
    """Train a linear model at one party; return the model's accuracy on the split's test rows."""
    train = torch.from_numpy(split.train)
    q, steps = LOT / len(train), epochs * poisson_steps(len(train), LOT)
    secret = Secret.of_simulation(seed, "central")
    model = nn.Linear(part.shape[1], 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    half = PrivateHalf(
        model, norm=clip, noise=noise_of(epsilon, DELTA, steps, q, "pld"), batch_size=LOT,
        secret=secret, party="central",
    )  # fmt: skip
    prove(half.clipper, model, [part.shape[1:]], "the model")
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    for step in range(steps):
        at = train[torch.from_numpy(secret.uniform((len(train),), "rows", step) < q)]
        with half.recording() as calls:
            outputs = model(part[at].float())
        grad = outputs.detach().softmax(1) - nn.functional.one_hot(labels[at], 10)
        half.give_gradients(outputs, grad, calls, step)
        optimizer.step()
    test = torch.from_numpy(split.test)
    with torch.no_grad():
        return float((model(part[test].float()).argmax(1) == labels[test]).float().mean())


def split_training(parts, labels, split, epsilon, rate, epochs, seed, clip):
    """Train two feature parties and a label party with separate noise; return the test accuracy."""
    experiment = Experiment.model_validate(
        {
            "seed": seed,
            "merge": "sum",
            "parties": {name: {"width": 10, "bottom": BOTTOM} for name in ("left", "right")},
            "label": {"top": "identity"},
            "data": {"validation": 0.0},
            "dp": {"epsilon": epsilon, "delta": DELTA, "clip": clip / 2**0.5, "accountant": "pld"},
            "train": {"epochs": epochs, "batch_size": LOT, "optimizer": "sgd", "momentum": 0.9,
                      "learning_rate": rate},
        }
    )  # fmt: skip
    session = LocalSession(experiment, data_of(parts, labels, split), outputs=10).run()
    (stated,) = session.label.privacy()
    assert stated.epsilon <= epsilon
    return session.label.history[-1]["test_accuracy"]


def main():
    """Read the arguments and run the trainings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", type=int, nargs="+", choices=[1, 2], default=[1, 2])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 3.0, 2.0, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--rates", type=float, nargs="+", help="learning rates instead of this file's"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--angles", type=int, default=ANGLES, help="number of wavelet angles")
    parser.add_argument(
        "--clip", type=float, default=CLIP, help="clip norm of a row's whole gradient"
    )
    parser.add_argument("--choose", action="store_true", help="test on held-out training rows")
    parser.add_argument("--folder", type=Path, default=Path("scattering"))
    parser.add_argument("--out", type=Path, default=Path("scattering.jsonl"))
    asked = parser.parse_args()
    use_one_thread()
    first = 50_000 if asked.choose else 60_000
    last = 60_000 if asked.choose else 70_000
    none = np.arange(0)
    split = Split(np.arange(first), none, np.arange(first, last))
    done = asked.out.read_text().splitlines() if asked.out.exists() else []
    known = [{k: v for k, v in json.loads(line).items() if k not in RESULTS} for line in done]
    parts = {parties: features(parties, asked.angles, asked.folder) for parties in asked.parties}
    asked_for = product(asked.seeds, asked.epsilons, asked.parties)
    for seed, epsilon, parties in asked_for:
        own, labels = parts[parties]
        for rate in asked.rates or [RATES[epsilon][parties - 1]]:
            law = {"parties": parties, "epsilon": epsilon, "rate": rate, "seed": seed,
                   "epochs": asked.epochs, "clip": asked.clip, "angles": asked.angles,
                   "choose": asked.choose}  # fmt: skip
            if law in known:
                continue
            started = time.process_time()
            how = (labels, split, epsilon, rate, asked.epochs, seed, asked.clip)
            found = central(own[0], *how) if parties == 1 else split_training(own, *how)
            took = round(time.process_time() - started, 1)
            with asked.out.open("a") as lines:
                print(json.dumps(law | {"accuracy": round(found, 4), "cpu_s": took}), file=lines)


if __name__ == "__main__":
    main()
