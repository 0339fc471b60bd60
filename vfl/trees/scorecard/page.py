"""The page of a scorecard: points, columns, separation of scores, and each party's knowledge.

The same content is also written as a plain text file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from vfl.core.storage import write_text
from vfl.core.text import printable_lines
from vfl.experiments.glance import Card as Figure
from vfl.experiments.glance import Glance
from vfl.experiments.pages.build import ENVIRONMENT
from vfl.experiments.pages.charts import Drawing, Series, line_drawing
from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.tables import (
    Table,
    date_text,
    list_text,
    p_value_text,
    percent_text,
    three_digits,
)
from vfl.session.label.scored import Scored
from vfl.trees.scorecard.card import PARTS, CardColumn
from vfl.trees.scorecard.loaded import Line, LoadedCard
from vfl.trees.scorecard.mode import Scorecard

PAGE, TEXT = "scorecard.html", "scorecard.txt"
#: Names that credit scoring uses for ranges of the information value, and for ranges of the
#: stability index (Siddiqi 2006).
_STRENGTHS = ((0.02, "none"), (0.1, "weak"), (0.3, "medium"), (0.5, "strong"))
_TOO_STRONG = "suspicious"
_STABLE, _SHIFTED = 0.1, 0.25
_PAIRS, _CORRELATED = 15, 0.5
_PART_NAMES = {"train": "training", "validation": "validation", "test": "test"}


def write_card(path: Path) -> tuple[Path, Path]:
    """Write a run's scorecard into the run's folder, as page and as plain text; return both paths.

    Args:
        path: folder of the run.

    Raises:
        RunFolderError: the run is not a finished run with a scorecard.
    """
    loaded = LoadedCard(path)
    content = card_page(loaded)
    about = loaded.folder.about()
    meta = (date_text(str(about["created"])), content.count, f"vfl {about['vfl']}")
    page = {
        "kind": "scorecard",
        "name": loaded.experiment.name,
        "meta": " · ".join(filter(None, meta)),
        "content": content,
        "loads_pictures": False,
        "command": about["command"],
        "config_text": loaded.folder.config().strip(),
    }
    write_text(path / PAGE, ENVIRONMENT.get_template("page.html").render(page=page))
    write_text(path / TEXT, card_text(loaded, content))
    return path / PAGE, path / TEXT


def card_page(loaded: LoadedCard) -> Content:
    """Return the content of a scorecard's page."""
    lines = loaded.lines
    on_card = [line for line in lines if line.column.on_card]
    sections = [
        Section(title="Points", tables=[points_table(loaded, on_card)], below=_of_points(loaded)),
        Section(
            title="Information of each column",
            tables=[columns_table(loaded)],
            below=_of_columns(loaded),
            roomy=True,
        ),
        Section(
            title="Regression",
            tables=[regression_table(loaded)],
            below=_OF_REGRESSION,
            roomy=True,
        ),
        *_of_scores(loaded),
        _of_correlation(loaded),
        _of_knowledge(loaded),
    ]
    if left := [line for line in lines if not line.column.on_card]:
        table = points_table(loaded, left)
        sections.insert(
            3, Section(title="Bins of columns that are not on the card", tables=[table])
        )
    parties = list_text(tuple(loaded.parties))
    sentence = (
        f"{len(on_card)} of {len(lines)} columns of {parties} are on the card; "
        f"{loaded.label_party} has the labels. {_scale_text(loaded)}"
    )
    return Content(
        _glance(loaded),
        str(loaded.folder.about()["mode"]),
        sentence,
        _doubts(loaded),
        sections,
        weights=str(loaded.summary.get("weights_sha256", "")),
        json=card_json(loaded),
        tables=[columns_table(loaded), points_table(loaded, on_card)],
    )


def card_text(loaded: LoadedCard, content: Content) -> str:
    """Return the scorecard as plain text, for a file that a supervisory authority can archive."""
    head = f"Scorecard {loaded.experiment.name}"
    said = [head, "=" * len(head), "", content.sentence, content.glance.sentence, *content.notes]
    parts = []
    for section in content.sections:
        parts += ["", section.title, "-" * len(section.title), ""]
        parts += [one.markdown() for one in section.tables]
        parts += [f"{name}: {value}" for name, value in section.pairs]
        parts += [str(section.below)] if section.below else []
    about = loaded.folder.about()
    end = ["", f"Made by {about['command']} with vfl {about['vfl']}, {about['created']}."]
    if content.weights:
        end.append(f"Digest of the weights, sha256: {content.weights}")
    return printable_lines("\n".join([*said, *parts, *end]), 10_000_000) + "\n"


def card_json(loaded: LoadedCard) -> dict[str, Any]:
    """Return the scorecard as JSON data; bins with fewer rows than the floor have no counts."""
    card, mode = loaded.card, loaded.mode
    inflation, of_all = card.inflation(), card.inflation(on_card=False)
    return {
        "scale": {
            "base_score": mode.scale.base_score,
            "odds": mode.scale.odds,
            "double": mode.scale.double,
        },
        "base": card.base,
        "intercept": card.intercept,
        "columns": [
            {
                "party": line.party,
                "column": line.name,
                "on_card": line.column.on_card,
                "information_value": line.column.information_value(card.totals, mode.floor),
                "stability": _finite(line.column.shift),
                "coefficient": _finite(line.column.coefficient),
                "standard_error": _finite(line.column.error),
                "p_value": _finite(line.column.p_value),
                "variance_inflation": _finite(float(inflation[place])),
                "variance_inflation_of_all": _finite(float(of_all[place])),
                "bins": [
                    {"bin": text} | bin_facts(line.column, number, mode.floor)
                    for number, text in enumerate(line.bins)
                ],
            }
            for place, line in enumerate(loaded.lines)
        ],
        "correlation": card.correlation.tolist(),
        "scores": {part: _figures(loaded, part) for part in PARTS if part in card.scores},
    }


def bin_facts(column: CardColumn, number: int, floor: int) -> dict[str, Any]:
    """Return the facts to show about a bin: only its points if it has fewer rows than the floor."""
    goods, bads = column.counts[number].tolist()
    points = int(column.points[number])
    if goods + bads < floor:
        return {"rows": None, "bad_rate": None, "weight_of_evidence": None, "points": points}
    return {
        "rows": goods + bads,
        "bad_rate": bads / (goods + bads),
        "weight_of_evidence": float(column.weights[number]),
        "points": points,
    }


def points_table(loaded: LoadedCard, lines: Sequence[Line]) -> Table:
    """Return a table with one line per merged bin of chosen columns, without empty bins."""
    floor, rows = loaded.mode.floor, int(loaded.card.totals.sum())
    found = []
    for line in lines:
        for number, text in enumerate(line.bins):
            facts = bin_facts(line.column, number, floor)
            points = f"{facts['points']}" if line.column.on_card else ""
            known = facts["rows"] is not None
            if not line.column.counts[number].any():
                continue
            found.append(
                [
                    line.party, line.name, text,
                    f"{facts['rows']:,}" if known else f"< {floor}",
                    percent_text(facts["rows"] / rows) if known else "",
                    percent_text(facts["bad_rate"]) if known else "",
                    f"{facts['weight_of_evidence']:+.3f}" if known else "",
                    points,
                ]
            )  # fmt: skip
    head = ["party", "column", "bin", "rows", "share", "bad rate", "weight of evidence", "points"]
    return Table(head, found, words=3)


def columns_table(loaded: LoadedCard) -> Table:
    """Return a table with one line per column, the most informative first, with correlations."""
    card, lines, found = loaded.card, loaded.lines, []
    inflation = card.inflation(on_card=False)
    for place, line in enumerate(lines):
        column, value = line.column, line.column.information_value(card.totals, loaded.mode.floor)
        shown = [line.party, line.name, f"{value:.3f}", strength(value)]
        shown.append(f"{column.shift:.3f}" if math.isfinite(column.shift) else "")
        beside = np.abs(card.correlation[place])
        beside[place] = 0.0
        nearest = int(beside.argmax())
        known = not math.isnan(inflation[place])
        shown.append(f"{inflation[place]:.2f}" if known else "")
        tells = known and beside[nearest] > 0
        shown.append(f"{lines[nearest].name} of {lines[nearest].party}" if tells else "")
        shown.append(f"{card.correlation[place, nearest]:+.2f}" if tells else "")
        found.append((value, shown))
    head = [
        "party", "column", "information value", "strength", "stability", "variance inflation",
        "goes with", "correlation",
    ]  # fmt: skip
    return Table(head, [line for _, line in sorted(found, key=lambda one: -one[0])], words=2)


def regression_table(loaded: LoadedCard) -> Table:
    """Return a table with one line per column on the scorecard."""
    inflation, found = loaded.card.inflation(), []
    for place, line in enumerate(loaded.lines):
        column = line.column
        if column.on_card:
            texts = zip(
                (column.coefficient, column.error, column.p_value),
                (three_digits, three_digits, p_value_text),
                strict=True,
            )
            shown = [text(one) if math.isfinite(one) else "" for one, text in texts]
            found.append([line.party, line.name, *shown, f"{inflation[place]:.2f}"])
    head = ["party", "column", "coefficient", "standard error", "p-value", "variance inflation"]
    return Table(head, found, words=2)


def strength(value: float) -> str:
    """Return credit scoring's name for the strength of a column with this information value.

    >>> strength(0.2), strength(0.7)
    ('medium', 'suspicious')
    """
    return next((word for bound, word in _STRENGTHS if value < bound), _TOO_STRONG)


_OF_REGRESSION = (
    "A logistic regression of the good class on weights of evidence. All coefficients are "
    "positive, because a negative one would contradict the evidence. Variance inflation is "
    "computed among these columns."
)


def _of_columns(loaded: LoadedCard) -> str:
    later = "validation and test" if loaded.mode.needs_keys else "validation"
    return (
        "An information value above 0.5 is suspicious: such a column is often derived from the "
        f"outcome (Siddiqi 2006). Stability: population stability index of {later} rows relative "
        "to training rows; below 0.1 means stable, above 0.25 a different population. Variance "
        "inflation and correlation are computed for weights of evidence, among all informative "
        "columns."
    )


def _of_points(loaded: LoadedCard) -> str:
    base = f" Every row starts with {loaded.card.base} points." if loaded.card.base else ""
    return (
        f"A score is the sum of the points of a row's bins.{base} Weight of evidence: ln(share of "
        f"goods / share of bads). A bin with fewer than {loaded.mode.floor} training rows has the "
        "weight 0, and this page shows only its points."
    )


def _scale_text(loaded: LoadedCard) -> str:
    scale = loaded.mode.scale
    return (
        f"{scale.base_score:g} points mean {scale.odds:g} good rows per bad row, and "
        f"{scale.double:g} more points double these odds."
    )


def _figures(loaded: LoadedCard, part: str) -> dict[str, float | int | None]:
    scores = loaded.card.scores[part]
    goods, bads = scores.counts.sum(axis=0).tolist()
    trained = loaded.card.scores.get("train")
    shift = None if part == "train" or trained is None else trained.stability(scores)
    return {
        "rows": scores.rows,
        "bad_rate": bads / max(1, goods + bads),
        "auc": _finite(scores.auc(of=0)),
        "gini": _finite(scores.gini(of=0)),
        "ks": _finite(scores.kolmogorov_smirnov()),
        "stability": shift,
    }


def _glance(loaded: LoadedCard) -> Glance:
    scores = loaded.card.scores
    part = next((one for one in reversed(PARTS) if one in scores and scores[one].rows), "train")
    found, word = _figures(loaded, part), _PART_NAMES[part]
    shift = found["stability"]
    cards = [
        Figure(f"Gini, {word} rows", _number(found["gini"]), f"AUC {_number(found['auc'])}"),
        Figure(
            f"KS, {word} rows", _number(found["ks"]), "largest distance between good and bad rows"
        ),
        Figure("Stability of scores", _number(shift), _of_shift(loaded, shift)),
        Figure(
            "Columns on the card",
            str(sum(line.column.on_card for line in loaded.lines)),
            f"of {len(loaded.lines)}",
        ),
    ]
    sentence = (
        f"On {found['rows']:,} {word} rows the card reaches a Gini of {_number(found['gini'])} and "
        f"a KS of {_number(found['ks'])}."
    )
    return Glance(cards, sentence)


def _of_shift(loaded: LoadedCard, shift: float | None) -> str:
    if "train" not in loaded.card.scores:
        return "training rows have no scores"
    return "relative to the training rows" if shift is None or shift < _STABLE else "look at it"


def _doubts(loaded: LoadedCard) -> list[str]:
    card, found = loaded.card, []
    for line in loaded.lines:
        value = line.column.information_value(card.totals, loaded.mode.floor)
        if value >= _STRENGTHS[-1][0]:
            found.append(
                f"look at {line.name} of {line.party}: an information value of {value:.2f} is "
                "suspicious"
            )
        if line.column.shift > _SHIFTED:
            found.append(
                f"look at {line.name} of {line.party}: the shares of rows in its bins have shifted"
            )
    if not any(line.column.on_card for line in loaded.lines):
        found.append(
            "no column is on the card: each has too little information value, or the regression "
            "removed it"
        )
    return found


def _of_scores(loaded: LoadedCard) -> list[Section]:
    """Return the sections about how well scores separate and predict, one per split of rows."""
    scores = {part: one for part, one in loaded.card.scores.items() if one.rows}
    head = ["rows", "count", "bad rate", "AUC", "Gini", "KS", "stability"]
    table = []
    for part in scores:
        figures = _figures(loaded, part)
        shown = [_number(figures[name]) for name in ("auc", "gini", "ks")]
        shown.append("" if figures["stability"] is None else _number(figures["stability"]))
        rate = percent_text(figures["bad_rate"])
        table.append([_PART_NAMES[part], f"{figures['rows']:,}", rate, *shown])
    part = next((one for one in reversed(PARTS) if one in scores), "train")
    below = (
        "KS: largest distance between the distributions of goods and bads (Kolmogorov and Smirnov)."
        " Gini: 2 AUC - 1. Stability: population stability index of scores in ten bands, "
        "relative to the training rows."
    )
    if "train" not in loaded.card.scores:
        below += " It is missing here, because training rows have no scores."
    apart = Section(
        title="How scores separate",
        drawings=[_apart(scores[part], part), _calibration(loaded, scores[part], part)],
        tables=[Table(head, table)],
        below=below,
        roomy=True,
    )
    bands = Section(
        title=f"Bands of scores, {_PART_NAMES[part]} rows",
        tables=[_bands(loaded, scores[part])],
        below="Expected: the mean bad rate that the scores of the band's rows predict.",
        roomy=True,
    )
    return [apart, bands]


def _apart(scores: Scored, part: str) -> Drawing:
    shares = np.cumsum(scores.counts / np.maximum(scores.counts.sum(axis=0), 1), axis=0)
    lines = [
        Series(
            name, [*zip(scores.values.astype(float), 100 * shares[:, place], strict=True)], style
        )
        for name, place, style in (("bads", 1, 2), ("goods", 0, 1))
    ]
    caption = f"percent of {_PART_NAMES[part]} rows up to a score"
    return line_drawing("Goods and bads by score", caption, lines, "score")


def _expected(loaded: LoadedCard, scores: Scored) -> float:
    """Return the mean bad rate that the scores of the rows predict."""
    rows = scores.counts.sum(axis=1)
    likely = expit(-loaded.mode.scale.log_odds(scores.values))
    return float((likely * rows).sum() / max(1, rows.sum()))


def _calibration(loaded: LoadedCard, scores: Scored, part: str) -> Drawing:
    bands = scores.bands()
    found = [
        (100 * _expected(loaded, band), 100 * float(band.counts[:, 1].sum() / band.rows))
        for band in bands
    ]
    found.sort()
    most = max(max(pair) for pair in found)
    lines = [Series("bands", found, 2), Series("as expected", [(0.0, 0.0), (most, most)], 4)]
    caption = f"percent of bads in a band of {_PART_NAMES[part]} rows"
    return line_drawing("Calibration", caption, lines, "expected percent of bads", x_from=0.0)


def _bands(loaded: LoadedCard, scores: Scored) -> Table:
    rows = [
        [
            f"{band.values[0]} to {band.values[-1]}",
            f"{band.rows:,}",
            f"{int(band.counts[:, 1].sum()):,}",
            percent_text(float(band.counts[:, 1].sum() / band.rows)),
            percent_text(_expected(loaded, band)),
        ]
        for band in scores.bands()
    ]
    return Table(["scores", "rows", "bads", "bad rate", "expected"], rows)


def _of_correlation(loaded: LoadedCard) -> Section:
    """Return the section about the pairs of columns with the highest correlations."""
    lines, found = loaded.lines, []
    for one in range(len(lines)):
        for other in range(one):
            value = float(loaded.card.correlation[one, other])
            if abs(value) >= _CORRELATED:
                pair = [f"{lines[at].name} of {lines[at].party}" for at in (other, one)]
                found.append((abs(value), [*pair, f"{value:+.2f}"]))
    found.sort(key=lambda one: -one[0])
    tables = [Table(["column", "column", "correlation"], [row for _, row in found[:_PAIRS]], 2)]
    below = (
        f"Correlations of weights of evidence: {min(_PAIRS, len(found))} of the {len(found)} pairs "
        f"that reach {_CORRELATED}. Columns whose variance inflation is above the bound are left "
        "out; the column with the smallest information value is left out first."
    )
    if not found:
        return Section(title="Correlated columns", below=f"No pair reaches {_CORRELATED}.")
    return Section(title="Correlated columns", tables=tables, below=below, roomy=True)


def _of_knowledge(loaded: LoadedCard) -> Section:
    """Return the section about each party's knowledge."""
    label, mode = loaded.label_party, loaded.mode
    names = ("observer", "what", "of", "phase", "values")
    told = [one for one in loaded.summary.get("revealed", ()) if isinstance(one, dict)]
    rows = [[f"{cell:,}" if isinstance(cell := one.get(name, ""), int) else str(cell)
             for name in names] for one in told]  # fmt: skip
    return Section(
        title="Who learned what",
        tables=[Table(["who learned", "what", "of", "phase", "values"], rows, words=4)],
        below=_of_sums(label, mode) if mode.needs_keys else _of_bins(label, mode),
        roomy=True,
    )


def _of_bins(label: str, mode: Scorecard) -> str:
    return (
        f"{label} learns the fine bin of every training and validation cell of every party, as "
        "with trees and protect=order. It computes counts, correlations and stability, which no "
        f"noise protects. It learns no name, edge or category of other parties. {_told(mode)}"
    )


def _of_sums(label: str, mode: Scorecard) -> str:
    return (
        f"{label} learns sums over training rows: good and bad rows of each cell, correlations, "
        "and the sums of each step of the regression. It learns no bin or score of a single "
        f"training row. A party merges cells of fewer than {mode.floor} rows before any count. "
        f"Sums are exact and have no noise. {mode.helper} learns the cells and margins of rows, "
        "but not which row each belongs to; it learns more if it colludes. Each party learns the "
        f"coefficients of its columns in every step. {_told(mode)}"
    )


def _told(mode: Scorecard) -> str:
    answers = "the sum of its points" if mode.reasons == "party" else "points of each column"
    return (
        "Another party learns the weight of evidence of each merged bin of its own columns; with "
        "its own counts it can derive their bad rates. It learns nothing about bins with "
        f"fewer than {mode.floor} rows, and at most {mode.budget} weights of evidence in a "
        f"training. For each requested row, the party answers with {answers}."
    )


def _number(value: float | int | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
