"""A study's results as a LaTeX table with the package `booktabs`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from vfl.experiments.results import TEST, LoadedGrid, Record, fitting_quality, grouped
from vfl.experiments.tables import MEASURES, SHARES

_ESCAPED = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''",
    "²": r"\textsuperscript{2}",
}  # fmt: skip
_HEAD = (
    "training", "about", "leaked labels", "measure", "mean $\\pm$ std", "guess", "no model",
    "repeats",
)  # fmt: skip


def escaped(text: str) -> str:
    r"""Escape the characters of a text that are special in LaTeX.

    >>> print(escaped("topk:k=3 at 50 %"), escaped("label_dp"))
    topk:k=3 at 50 \% label\_dp
    """
    return "".join(_ESCAPED.get(one, one) for one in text)


def latex_table(
    grid: LoadedGrid,
    measures: Sequence[str] = (),
    caption: str | None = None,
    label: str | None = None,
) -> str:
    """Return a LaTeX table: one line per training, and per attack and number of leaked labels.

    Mean and sample standard deviation are over repeats (seeds or folds), after averaging over the
    draws of leaked rows in each repeat. Shares are printed in percent. The table prints the best
    guess and the best baseline without the model next to each value. Values whose data or code have
    changed since their computation are left out.

    Args:
        grid: the study.
        measures: measures of test rows and of attacks to show. If the list is empty, the table has
            the measure that fits the task; an attack without this measure is printed with its own
            first measure.
        caption: caption of the table; with None, the result is only the `tabular` environment.
        label: LaTeX label of the table, for references.

    Returns:
        The LaTeX text, which needs the package `booktabs`.
    """
    lines = [" & ".join(line) + r" \\" for line in _lines(_chosen(grid, measures))]
    head = " & ".join(_HEAD) + r" \\"
    table = [
        r"\begin{tabular}{llrlrrrr}", r"\toprule", head, r"\midrule", *lines, r"\bottomrule",
        r"\end{tabular}",
    ]  # fmt: skip
    if caption is not None:
        about = [rf"\caption{{{escaped(caption)}}}"]
        about += [rf"\label{{{label}}}"] if label else []
        table = [r"\begin{table}", r"\centering", *table, *about, r"\end{table}"]
    return "\n".join(table) + "\n"


def _chosen(grid: LoadedGrid, measures: Sequence[str]) -> Iterator[Record]:
    """Yield the records that the table shows."""
    guess = next((run.summary.get("guess") or {} for run in grid.runs.values()), {})
    fitting = measures or (fitting_quality(guess) if guess else "loss",)
    records = grid.current
    yield from (one for one in records if one.subject == TEST and one.measure in fitting)
    attacks = [one for one in records if one.evaluator == "attack"]
    for own in grouped(attacks, "cell", "adversary", "subject", "k", "draw").values():
        asked = [one for one in own if one.measure in fitting]
        yield from asked if asked or measures else own[:1]


def _lines(records: Iterable[Record]) -> Iterator[list[str]]:
    """Yield the texts in each line of the table, column by column."""
    keys = ("training", "attacker", "k", "measure")
    for (training, subject, k, measure), own in grouped(records, *keys).items():
        found = [
            [_mean(getattr(one, name) for one in again) for name in ("value", "guess", "no_model")]
            for again in grouped(own, "repeat").values()
        ]
        values, guesses, beside = (
            [one for one in column if one is not None] for column in zip(*found, strict=True)
        )
        yield [
            escaped(training),
            escaped(subject),
            str(k) if k else "",
            escaped(MEASURES.get(measure, measure.replace("_", " "))),
            _number(values, measure, spread=True),
            _number(guesses, measure),
            _number(beside, measure),
            str(len(values)),
        ]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.fmean(known) if known else None


def _number(values: Sequence[float], measure: str, *, spread: bool = False) -> str:
    """Return a mean (shares in percent), and the standard deviation over repeats if `spread`."""
    if not values:
        return "--"
    share = any(measure.endswith(name) for name in SHARES)
    factor, form = (100, ".1f") if share else (1, ".4g")
    mean = f"{factor * statistics.fmean(values):{form}}"
    if not spread or len(values) < 2:
        return f"${mean}$"
    return rf"${mean} \pm {factor * statistics.stdev(values):{form}}$"
