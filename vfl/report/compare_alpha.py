"""What alpha of randomised top-k does: score, training loss and generalisation gap.

The thesis shows them as figures 3.6 (score by alpha) and 3.7 (the others by epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vfl.grid import Estimate, Group
from vfl.grid.results import Measured
from vfl.registry import parse
from vfl.report.charts import STYLES, Series, line_chart
from vfl.report.compare_curves import (
    caption,
    ends,
    legend_of,
    mean_by_epoch,
    percent,
    score_word,
)
from vfl.report.parts import Drawing

_RANDOM, _PLAIN = "randtopk", "topk"


@dataclass(frozen=True, slots=True)
class Family:
    """Codecs that differ in alpha alone.

    Attributes:
        name: what they share.
        members: by alpha; plain top-k is alpha = 0.
        style: of its line.
    """

    name: str
    members: dict[float, Group]
    style: int


def families(groups: Sequence[Group]) -> list[Family]:
    """The families with at least two of randomised top-k, or one and plain top-k."""
    from vfl.compression import CODECS  # needs torch, which a page without alpha does not

    found: dict[tuple[str, ...], dict[float, Group]] = {}
    plain: dict[tuple[str, ...], Group] = {}
    for group in groups:
        name, given = parse(group.codec)
        if name == _PLAIN:
            plain[(group.variant, *_shared(given))] = group
        elif name == _RANDOM:
            known = {key: str(one.default) for key, one in CODECS.options(name).items()} | given
            key = (group.variant, f"law={known['law']}", *_shared(given))
            found.setdefault(key, {})[float(known["alpha"])] = group
    for (variant, _, *shared), members in found.items():
        if beside := plain.get((variant, *shared)):
            members.setdefault(0.0, beside)
    first = 2 if len({law for _, law, *_ in found}) == 1 else 1  # a single law needs no name
    several = [(key, members) for key, members in found.items() if len(members) > 1]
    return [
        Family(", ".join(filter(None, (key[0], *key[first:]))), members, 1 + (place + 1) % STYLES)
        for place, (key, members) in enumerate(several)
    ]


def alpha_drawings(groups: Sequence[Group], measure: str) -> Iterator[Drawing]:
    """Charts over alpha, and over epochs for each; none where no codecs differ in it alone."""
    known = [one for one in families(groups) if any(m.trained for m in one.members.values())]
    if not known:
        return
    score = [_series(one, lambda group: group.score, percent(measure)) for one in known]
    yield from _drawing(
        "alpha-score", f"{score_word(measure)} by alpha", caption(measure, "test rows"), score
    )
    losses = [_series(one, lambda group: group.over(lambda cell: cell.train_loss)) for one in known]
    words = "with the draws of training, mean over repeats"
    yield from _drawing("alpha-loss", "Training loss by alpha", words, losses)
    gaps = [_series(one, lambda group: group.over(gap), percent(measure)) for one in known]
    words = caption(measure, "training rows less test rows, without draws")
    yield from _drawing("alpha-gap", "Generalisation gap by alpha", words, gaps)
    for place, family in enumerate(known):
        yield from _loss_by_epoch(family, f"loss-{place}")


def gap(one: Measured) -> float | None:
    """The score of the training rows less that of the test rows."""
    if one.train_score is None or one.score is None:
        return None
    return one.train_score - one.score


def _loss_by_epoch(family: Family, key: str) -> Iterator[Drawing]:
    lines = [
        Series(
            f"alpha = {alpha:g}",
            mean_by_epoch(group, lambda epoch: epoch.train_loss),
            1 + (place + 1) % STYLES,
        )
        for place, (alpha, group) in enumerate(sorted(family.members.items()))
    ]
    drawn = [line for line in lines if line.points]
    if drawn:
        title = f"Training loss by epoch, {family.name}"
        chart = line_chart(key, title, ends(drawn), drawn, "epoch", whole_x=True, legend=False)
        yield Drawing(
            title, "with the draws of training, mean over repeats", chart, legend_of(drawn)
        )


def _drawing(key: str, title: str, words: str, lines: Sequence[Series]) -> Iterator[Drawing]:
    drawn = [line for line in lines if line.points]
    if drawn:
        chart = line_chart(key, title, ends(drawn), drawn, "alpha", legend=False)
        yield Drawing(title, f"{words}; bars: 95 % intervals", chart, legend_of(drawn))


def _series(
    family: Family,
    figure: Callable[[Group], Estimate | None],
    scale: float = 1.0,
) -> Series:
    found = [(alpha, figure(group)) for alpha, group in sorted(family.members.items())]
    known = [(alpha, one) for alpha, one in found if one is not None]
    whiskers = [
        (alpha, scale * (one.mean - one.half_width), scale * (one.mean + one.half_width))
        for alpha, one in known
        if one.half_width is not None
    ]
    points = [(alpha, scale * one.mean) for alpha, one in known]
    return Series(family.name, points, family.style, whiskers)


def _shared(given: dict[str, str]) -> list[str]:
    """The options that plain and randomised top-k both have, as they are spelt."""
    return sorted(f"{key}={value}" for key, value in given.items() if key not in ("alpha", "law"))
