"""Matplotlib figures for notebooks (the extra `plot`); HTML pages have other charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vfl.core.errors import UserError
from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.statistics import estimate
from vfl.experiments.tables import MEASURES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _axes() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "plots need matplotlib, which is not installed", fix="pip install 'vfl[plot]'"
        ) from None
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    return figure, figure.subplots()


def plot_run(path: Path) -> Figure:
    """Plot the loss by epoch on training, validation and test rows.

    Raises:
        UserError: matplotlib is not installed.
    """
    figure, axes = _axes()
    epochs = LoadedRun(path).epochs
    for part in ("train", "validation", "test"):
        known = [(one["epoch"], one[f"{part}_loss"]) for one in epochs if f"{part}_loss" in one]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", markersize=3, label=part)
    axes.set(xlabel="epoch", ylabel="loss", title=path.name)
    axes.legend()
    return figure


def plot_study(path: Path, table: pd.DataFrame) -> Figure:
    """Plot each training's quality against its worst label attack, or else against bytes.

    Points are means over seeds with 95 % intervals. The dashed line is the mean, over all attacks,
    of the best baseline without the model.

    Raises:
        UserError: matplotlib is not installed, or the table contains no quality on test rows.
    """
    figure, axes = _axes()
    quality = table[(table.evaluator == "quality") & (table.subject == "test rows")]
    measures = quality.measure.unique()
    good = next((one for one in ("auc", "accuracy", "rmse") if one in measures), None)
    if good is None:
        raise UserError(
            "the study has no quality on test rows to plot", where=str(path), fix="run it again"
        )
    attacks = table[(table.evaluator == "attack") & (table.measure == good)]
    for training, own in quality[quality.measure == good].groupby("training", sort=False):
        up = estimate(own.value.tolist())
        mine = attacks[attacks.training == training]
        if len(attacks):
            means = mine.groupby(["subject", "k", "repeat"]).value.mean().unstack("repeat")
            worst = int(means.mean(axis=1).argmax()) if len(means) else None
            found = None if worst is None else estimate(means.iloc[worst].tolist())
        else:
            cost = table[(table.evaluator == "cost") & (table.training == training)]
            sent = cost[cost.measure.isin(["bytes_up", "bytes_down"])]
            found = estimate(sent.groupby("repeat").value.sum().tolist())
        if up is None or found is None:
            continue
        axes.errorbar(
            found.mean, up.mean, xerr=found.half_width or 0, yerr=up.half_width or 0,
            fmt="o", capsize=2, label=training,
        )  # fmt: skip
    word = MEASURES.get(good, good.upper())
    axes.set(ylabel=f"{word} on test rows", title=path.name)
    if len(attacks):
        axes.axvline(attacks.no_model.mean(), linestyle="--", color="grey")
        axes.set(xlabel=f"{word} of the worst attack; dashed: mean without the model")
    else:
        axes.set(xlabel="bytes of a training", xscale="log")
    axes.legend(fontsize="small")
    return figure
