"""Numeric simulation of section 5.4.4 and figure 5.2 (thesis on split learning, 2025).

    python examples/published/correlation.py

The program draws rows of 100 numbers from four distributions. It computes Y = A X with a normal
matrix A of several widths, and permutes every row of Y separately. It measures the distance
correlation of eq 5-9, without the square root, by an unbiased estimator (Szekely & Rizzo 2014). It
also computes eq 5-19, with a and b in those positions that the proof of the equation uses. The
simulation has 2,000 rows (the thesis has 10,000) and three random draws of A. A width whose results
the file already contains is not computed again.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from vfl.attacks.permuted import correlation
from vfl.core.seeds import generator, use_one_thread

OUT = Path("docs/results/published_correlation.csv")
NUMBERS, ROWS, DRAWS = 100, 2000, 3
WIDTHS = (1, 2, 5, 10, 20, 50, 100)
FIELDS = ("distribution", "width", "projected", "estimated", "permuted")


def subspace(draw: torch.Generator) -> Tensor:
    """Return rows near a subspace of 20 dimensions, as the thesis' matrix shapes do not match."""
    inside = torch.randn(ROWS, 20, generator=draw) @ torch.randn(20, NUMBERS, generator=draw) / 20
    return inside + 0.1 * torch.randn(ROWS, NUMBERS, generator=draw)


DISTRIBUTIONS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": lambda draw: torch.randn(ROWS, NUMBERS, generator=draw),
    "uniform": lambda draw: torch.rand(ROWS, NUMBERS, generator=draw),
    "sparse": lambda draw: (torch.rand(ROWS, NUMBERS, generator=draw) < 0.1).float(),
    "subspace": subspace,
}


def permuted(rows: Tensor, draw: torch.Generator) -> Tensor:
    """Permute the values of each row separately."""
    return rows.gather(1, torch.rand(rows.shape, generator=draw).argsort(1))


def estimate(rows: Tensor, width: int, draw: torch.Generator) -> float:
    """Estimate eq 5-19: S_1 to S_3 from all pairs, S'_3 from triples of rows and normal vectors.

    Only the covariance of two lengths is drawn: a length's mean `a` is known.
    """
    away = torch.cdist(rows.double(), rows.double())
    count, squares, sums = len(rows), away.square().sum(1), away.sum(1)
    # Only pairs of different rows count; the zero distances of equal rows would bias a small
    # difference of large sums.
    s1 = squares.sum() / (count * (count - 1))
    s2 = (sums.sum() / (count * (count - 1))).square()
    s3 = (sums.square() - squares).sum() / (count * (count - 1) * (count - 2))
    picks = torch.randint(len(rows), (3, 400_000), generator=draw)
    first, second, third = (rows[pick] for pick in picks)
    one, other = first - second, first - third
    product = one.norm(dim=1) * other.norm(dim=1)
    cosine = ((one * other).sum(1) / product.clamp_min(1e-12)).clamp(-1, 1)
    x, y = (torch.randn(len(one), width, generator=draw) for _ in "xy")
    turned = cosine[:, None] * x + (1 - cosine.square()).sqrt()[:, None] * y
    a = math.sqrt(2) * math.exp(math.lgamma((width + 1) / 2) - math.lgamma(width / 2))
    together = (product * (x.norm(dim=1) - a) * (turned.norm(dim=1) - a)).mean()
    above = a**2 * (s1 + s2 - 2 * s3)
    return float((above / (width * s1 + a**2 * s2 - 2 * (a**2 * s3 + together))).sqrt())


def main() -> None:
    """Append the missing results to the results file."""
    use_one_thread()
    done = set()
    if OUT.exists():
        with OUT.open(newline="") as file:
            done = {(row["distribution"], int(row["width"])) for row in csv.DictReader(file)}
    else:
        OUT.write_text(",".join(FIELDS) + "\n")
    for name, sample in DISTRIBUTIONS.items():
        for width in WIDTHS:
            if (name, width) in done:
                continue
            seen: list[tuple[float, float]] = []
            for number in range(DRAWS):
                draw = generator(number, "section 5.4.4", name)
                rows = sample(draw)
                projected = rows @ torch.randn(NUMBERS, width, generator=draw)
                both = projected, permuted(projected, draw)
                seen.append((correlation(rows, both[0]) ** 2, correlation(rows, both[1]) ** 2))
            guess = estimate(sample(generator(0, "section 5.4.4", name)), width, draw)
            figures = (fmean(each[0] for each in seen), guess, fmean(each[1] for each in seen))
            with OUT.open("a") as file:
                file.write(",".join([name, str(width), *(f"{it:.4f}" for it in figures)]) + "\n")


if __name__ == "__main__":
    main()
