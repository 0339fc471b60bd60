"""A convolutional network trained on secret shares of MNIST, compared with plain torch.

The network is that of CrypTen's tutorial 7 with ten classes. Images, one-hot labels, weights,
gradients and the loss are shares of two holders; all parties are in this process. The accuracy is
that of the revealed weights on all test images.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import harness
from vfl import tensors
from vfl.config.toml import Settings
from vfl.core.seeds import use_one_thread
from vfl.datasets.sources.picture_set import Part
from vfl.datasets.sources.pictures import read_mnist

_MOMENTUM = 0.9


class ImagesRow(Settings):
    """State of a training after some steps.

    Attributes:
        where: "plain" (torch without vfl) or "shares".
        step: number of training steps that are finished.
        loss: loss of the last batch.
        accuracy: accuracy on the test images.
        cpu_s: processor seconds of the steps, of all parties together.
    """

    where: str
    step: int
    loss: float
    accuracy: float
    cpu_s: float


def network() -> nn.Sequential:
    """Build the same network in every call; max pooling and ReLU may be exchanged."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(2304, 100), nn.ReLU(), nn.Linear(100, 10),
    )  # fmt: skip


def bench_tensor_images(
    *, steps: int = 400, batch_size: int = 32, learning_rate: float = 0.05, every: int = 100
) -> list[ImagesRow]:
    """Train MNIST on shares and in plain torch, with the same rows, initial weights and SGD.

    Args:
        steps: number of steps of each training.
        batch_size: number of rows in a step.
        learning_rate: learning rate of SGD with momentum 0.9.
        every: number of steps between two tests, each of which reveals the weights.
    """
    use_one_thread()
    found = read_mnist("MNIST", tuple(range(10)))
    train, test = (_tensors(part) for part in (found.train, found.test))
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
    alice, bob, carol = tensors.virtual("alice", "bob", "carol")

    def shared(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return tensors.share(value, alice, bob, dealer=carol)
        return tensors.fix_precision(value).share(alice, bob, dealer=carol)

    rows = []
    for where in ("plain", "shares"):
        place = shared if where == "shares" else lambda value: value
        model, taken = place(network()), 0.0
        rule = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=_MOMENTUM)
        for step in range(steps):
            at = order[torch.arange(step * batch_size, (step + 1) * batch_size) % len(order)]
            images, labels = train[0][at], functional.one_hot(train[1][at], 10).float()
            began = time.process_time()
            rule.zero_grad()
            loss: Any = functional.cross_entropy(model(place(images)), place(labels))
            loss.backward()
            rule.step()
            taken += time.process_time() - began
            if (step + 1) % every == 0:
                shown = loss.get().float_precision() if where == "shares" else loss.detach()
                accuracy = _accuracy(model, *test)
                rows.append(
                    ImagesRow(
                        where=where, step=step + 1, loss=float(shown), accuracy=accuracy,
                        cpu_s=taken,
                    )
                )  # fmt: skip
                harness.say(f"{where}, step {step + 1}: {accuracy:.3f}")
    return rows


def _tensors(part: Part) -> tuple[Tensor, Tensor]:
    """Return the pictures, with values from 0 to 1, and the labels."""
    pictures = part.take(np.arange(len(part.labels)))
    return torch.from_numpy(pictures).float() / 255, torch.from_numpy(part.labels)


def _accuracy(model: Any, images: Tensor, labels: Tensor) -> float:
    plain = network()
    weights = [getattr(each, "get", lambda each=each: each)() for each in model.parameters()]
    with torch.no_grad():
        for own, value in zip(plain.parameters(), weights, strict=True):
            own.copy_(value.float_precision() if hasattr(value, "float_precision") else value)
        return float((plain(images).argmax(1) == labels).float().mean())


TABLE = harness.table(
    ("where", "<7", "where"),
    ("step", ">5", "step"),
    ("loss", ">7.3f", "loss"),
    ("accuracy", ">8.4f", "accuracy"),
    ("CPU s", ">8.1f", "cpu_s"),
)


main = harness.command(bench_tensor_images, TABLE)


if __name__ == "__main__":
    main()
