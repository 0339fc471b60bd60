"""What a study came to, as tables: of codecs, of defenses by their worst attack, of value.

Each kind is written to `table.md`, `results.json`, `results.csv` and `means.csv`, from the records
of its cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from vfl.config import CompareSettings
from vfl.core.ledger import size
from vfl.core.storage import write_text
from vfl.core.text import csv_text
from vfl.experiments.attack_tables import (
    access_table,
    board_table,
    measure_words,
    missing,
    others_table,
    outside_table,
    searches_table,
    standings_table,
)
from vfl.experiments.cells import GridFolder, failure_of, grid_settings_of, settings_of
from vfl.experiments.leaderboard import fitting_measure, leaderboard
from vfl.experiments.lines import Line, beside_method, lines_of, unfinished
from vfl.experiments.records import (
    ALL,
    LOWER_IS_BETTER,
    TEST,
    TRAIN,
    TRAINING,
    Record,
    bytes_to,
    compared_measure,
    records_of,
    write_records,
)
from vfl.experiments.statistics import Estimate, advantage, judge, over_victims
from vfl.experiments.tables import (
    SHARES,
    Table,
    estimate_text,
    write_tables,
)
from vfl.experiments.value import BOOSTING, CENTRAL, SPLIT, measure_of


def write_results(folder: GridFolder) -> tuple[str, dict[str, Any]]:
    """Write `table.md`, `results.json`, `results.csv` and `means.csv` from what cells hold.

    Returns:
        The tables in Markdown with what they leave out, and the content of the JSON file.

    Raises:
        RunFolderError: there is no grid, or a file of it is damaged.
    """
    makers = {"codecs": _of_codecs, "attacks": _of_attacks, "value": _of_value}
    records = list(records_of(folder.path))
    write_records(folder.path, records)
    write_text(folder.path / "means.csv", means_csv(records))
    return write_tables(folder.path, *makers[folder.kind](folder, records))


#: What `results.json` holds, the tables, and lines below them.
Written = tuple[dict[str, Any], Sequence[Table], Sequence[str]]


def _of_codecs(folder: GridFolder, records: Sequence[Record]) -> Written:
    settings, measure = settings_of(folder.experiment()), compared_measure(folder)
    lines = codec_lines(folder, records)
    failed = {cell.title: failure["what"] for cell in folder.cells()
              if (failure := failure_of(folder.cells_path / cell.name))}  # fmt: skip
    content = {
        "measure": measure,
        "reference": settings.reference,
        "codecs": [_codec_record(line, settings, measure) for line in lines],
        "failed": failed,
    }
    below = [*folder.head("notes"), *unfinished(folder)]
    return content, codec_tables(settings, lines, measure), below


def _of_value(folder: GridFolder, records: Sequence[Record]) -> Written:
    measure, lines = measure_of(folder.experiment()), value_lines(folder, records)
    said = value_sentences(lines, measure)
    trainings = [
        {
            "training": line.about["what"],
            measure: _figures_of(line.over(measure)),
            "less_split": _figures_of(line.difference(measure)),
            "scores": dict(line.values(measure)),
            "bytes": sent_by(line),
            "of_dense": share_of(line),
        }
        for line in lines
    ]
    content = {"measure": measure, "trainings": trainings, "sentences": said}
    return content, [value_table(lines, measure)], [*said, *unfinished(folder)]


def _of_attacks(folder: GridFolder, records: Sequence[Record]) -> Written:
    settings = grid_settings_of(folder.experiment())
    measure = fitting_measure(records, settings.measure)
    entries = leaderboard(records, settings.margin, measure)
    tables: list[Table] = []
    if entries:
        tables = [board_table(entries, settings.margin), standings_table(entries)]
        if (access := access_table(records, settings.margin, measure)) is not None:
            tables.append(access)
        if (outside := outside_table(records, settings.margin, measure)) is not None:
            tables.append(outside)
    if (searches := searches_table(records)) is not None:
        tables.append(searches)
    if others := others_table(records):
        tables.append(others)
    content = {"measure": measure, "leaderboard": [asdict(entry) for entry in entries]}
    content["rows"] = [one.as_json() for one in records if one.evaluator == "attack"]
    below = [*missing(folder), *([measure_words(measure, settings.measure)] if entries else [])]
    return content, tables, below


def _figures_of(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


#: What records are alike in that differ in their repeat and draw alone.
_KIND = ("training", "adversary", "evaluator", "subject", "k", "measure")


def means_csv(records: Sequence[Record]) -> str:
    """Means over repeats, in the order of the records; shares, not percent.

    Half widths are those of Student's 95 % intervals over repeats, draws averaged for each; empty
    where there is one. `over_scratch` is thesis equation (4-2), victim by victim; `baseline_...` is
    the same attack on a label-free bottom, or what the leaked rows are worth from scratch.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for one in records:
        groups.setdefault(tuple(getattr(one, name) for name in _KIND), []).append(one)
    names = list(dict.fromkeys(f"baseline_{name}" for one in records for name in one.baselines))
    head = [
        *_KIND, "mean", "half_width", "repeats", "guess", "over_scratch", "over_scratch_half_width",
        *names,
    ]  # fmt: skip
    means = [dict(zip(_KIND, kind, strict=True)) | _means(own) for kind, own in groups.items()]
    return csv_text(head, means)


def _means(records: Sequence[Record]) -> dict[str, str | int]:
    values = {(one.repeat, one.draw): one.value for one in records}
    mean, half_width = _figures(over_victims(values))
    found: dict[str, str | int] = {
        "mean": mean,
        "half_width": half_width,
        "repeats": len({one.repeat for one in records}),
        "guess": _figures(_over(records, "guess"))[0],
    }
    # A seed whose baselines failed has none.
    for name in dict.fromkeys(name for one in records for name in one.baselines):
        beside = [one for one in records if name in one.baselines]
        baseline = {(one.repeat, one.draw): one.baselines[name] for one in beside}
        found[f"baseline_{name}"], _ = _figures(over_victims(baseline))
        if name == "scratch":
            over = _figures(advantage(values, baseline))
            found["over_scratch"], found["over_scratch_half_width"] = over
    return found


def _over(records: Sequence[Record], name: str) -> Estimate | None:
    """A column over the victims of which it is known."""
    values = {(one.repeat, one.draw): getattr(one, name) for one in records}
    return over_victims({key: value for key, value in values.items() if value is not None})


def _figures(found: Estimate | None) -> tuple[str, str]:
    """Mean and half width with four digits, or more of what is small."""
    if found is None:
        return "", ""
    return _digits(found.mean), "" if found.half_width is None else _digits(found.half_width)


def _digits(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.4g}"


def codec_lines(folder: GridFolder, records: Sequence[Record]) -> list[Line]:
    """The lines of a comparison, each beside the reference."""
    settings = settings_of(folder.experiment())
    return beside_method(lines_of(folder, records), settings.reference)


#: Cells of a table by heading, a line each.
Columns = dict[str, list[str]]


def codec_tables(
    settings: CompareSettings, lines: Sequence[Line], measure: str
) -> tuple[Table, Table]:
    """What these lines need: how good at how many bytes, and what it takes to send."""
    about: Columns = {"codec": [line.about["codec"] for line in lines]}
    if any(line.about["variant"] for line in lines):
        about = {"variant": [line.about["variant"] for line in lines], **about}
    if any(line.about["level"] for line in lines):
        levels = [line.about["level"] for line in lines]
        about["level"] = [f"{level} %" if level else "" for level in levels]

    def percent(name: str, subject: str = ALL) -> list[str]:
        return _written(lines, name, subject, lambda mean: f"{100 * mean:.2f} %")

    def number(name: str) -> list[str]:
        return _written(lines, name, ALL, lambda mean: f"{mean:.3g}")

    quality: Columns = {
        "formula": percent("formula_ratio", TRAINING),
        "forward": percent("wire_ratio_up", TRAINING),
        "backward": percent("wire_ratio_down", TRAINING),
        measure.replace("_", " "): [score_text(line.over(measure), measure) for line in lines],
    }
    if any(line.reference for line in lines):
        less = f"less {settings.reference}" + (", points" if measure in SHARES else "")
        quality[less] = [score_text(line.difference(measure), measure, "+") for line in lines]
        if measure in SHARES:
            quality["verdict"] = [verdict_on(line, measure) for line in lines]
    bound = "<=" if measure in LOWER_IS_BETTER else ">="
    for least in settings.accuracy:
        quality[f"bytes to {bound} {least:g}"] = [_bytes_text(line, least) for line in lines]
    quality["repeats"] = [f"{len(line.runs)} of {line.repeats}" for line in lines]
    work: Columns = {
        "test frames": percent("frame_ratio"),
        "bound": percent("bound_ratio"),
        "encode ms": number("encode_ms"),
        "decode ms": number("decode_ms"),
        "values a row": number("nonzeros"),
        "units": number("units"),
        "never sent": number("never_sent"),
        "dead": number("dead_units"),
    }
    return _table(about | quality), _table(about | work)


def verdict_on(line: Line, measure: str) -> str:
    """Whether a codec is as good as the reference within a point; empty of that itself."""
    if line.reference is None or line.difference(measure) is None:
        return ""
    ours, theirs = line.values(measure), line.reference.values(measure)
    lost = [theirs[repeat] - ours[repeat] for repeat in ours if repeat in theirs]
    return judge(lost).words("as good", "worse", "repeats")


def _written(
    lines: Sequence[Line], name: str, subject: str, write: Callable[[float], str]
) -> list[str]:
    means = [line.mean(name, subject) for line in lines]
    return ["" if mean is None else write(mean) for mean in means]


def _table(columns: Columns) -> Table:
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, words=1 + ("variant" in columns))


def _bytes_text(line: Line, least: float) -> str:
    """Mean bytes until so good; in brackets, how many repeats got there where not all did.

    The mean is over those alone, so it means little if some did not get there.
    """
    found = line.values(bytes_to(least), TRAINING)
    if not found:
        return "never" if line.runs else ""
    text = size(statistics.fmean(found.values()))
    return text + ("" if len(found) == len(line.runs) else f" ({len(found)})")


def score_text(found: Estimate | None, measure: str, sign: str = "") -> str:
    """A measure with its interval, shares in percent; with a sign it is a difference, in points.

    >>> score_text(Estimate(0.7213, 0.0131, 3), "accuracy")
    '72.1 ± 1.3 %'
    """
    if found is None:
        return ""
    if measure in SHARES:
        return estimate_text(found, sign, "" if sign else " %")
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:{sign}.4g}{half}"


def _codec_record(line: Line, settings: CompareSettings, measure: str) -> dict[str, Any]:
    reached = {f"{one:g}": line.values(bytes_to(one), TRAINING) for one in settings.accuracy}
    figures = {
        name: line.mean(name, subject)
        for subject, name in line.figures
        if subject in (TRAINING, ALL) and not name.startswith("bytes_to_")
    }
    return {
        **{key: line.about[key] for key in ("variant", "method", "codec", "level")},
        "repeats": len(line.runs),
        measure: _figures_of(line.over(measure)),
        "difference": _figures_of(line.difference(measure)),
        f"train_{measure}": line.mean(measure, TRAIN),
        "test_loss": line.mean("loss", TEST),
        "bytes_to": {
            least: {
                "bytes": statistics.fmean(found.values()) if found else None,
                "repeats": len(found),
            }
            for least, found in reached.items()
        },
        **figures,
    }


def value_lines(folder: GridFolder, records: Sequence[Record]) -> list[Line]:
    """The ways of training in the order of the cells, each beside split; seeds split rows anew."""
    found = []
    for line in lines_of(folder, records):
        tested, learned = (line.mean(name, TRAINING) for name in ("test_rows", "train_rows"))
        found.append(replace(line, ratio=tested / learned if tested and learned else 0.0))
    split = next(line for line in found if line.about["what"] == SPLIT)
    return [one if one is split else replace(one, reference=split) for one in found]


def _is_alone(line: Line) -> bool:
    """Whether nothing is sent but by a stand-in, in one place."""
    return bool(line.about["party"]) or line.about["what"] == CENTRAL


def sent_by(line: Line) -> float:
    """Bytes of a whole training, mean over the seeds; 0 where nothing is sent."""
    return 0.0 if _is_alone(line) else line.mean("bytes", TRAINING) or 0.0


def share_of(line: Line) -> float | None:
    """Of dense float32, mean; None where nothing is sent."""
    return None if _is_alone(line) else line.mean("wire_ratio", TRAINING)


def value_sentences(lines: Sequence[Line], measure: str) -> list[str]:
    """What a reader wants to know first; only what the intervals say."""
    named = {line.about["what"]: line for line in lines if line.values(measure)}
    split = named.pop(SPLIT, None)
    if split is None:
        return []
    sign, unit = (-1, "") if measure in LOWER_IS_BETTER else (1, "")
    unit = " points" if measure in SHARES else unit
    found = []
    for what, line in named.items():
        less = split.less(line, measure)
        if what.endswith(" alone") and less is not None:
            text = score_text(less, measure, "+")
            gain = sign * less.mean - (less.half_width or math.inf)
            verdict = "joining buys that" if gain > 0 else "no gain is shown"
            found.append(f"split less {what}: {text}{unit}; {verdict}")
    for what in (CENTRAL, f"{BOOSTING}, all columns"):
        if what in named and (less := split.less(named[what], measure)) is not None:
            inside = less.half_width is not None and abs(less.mean) <= less.half_width
            verdict = "within the interval of 0" if inside else "outside the interval of 0"
            found.append(f"split less {what}: {score_text(less, measure, '+')}{unit}; {verdict}")
    return found


def value_table(lines: Sequence[Line], measure: str) -> Table:
    """A line each: how good, how far from split, and what is sent."""
    less = "less split" + (", points" if measure in SHARES else "")
    head = ["training", measure.replace("_", " "), less, "bytes", "of dense", "seeds"]
    rows = [
        [
            line.about["what"],
            score_text(line.over(measure), measure),
            score_text(line.difference(measure), measure, "+"),
            size(round(sent)) if (sent := sent_by(line)) else "",
            "" if (share := share_of(line)) is None else f"{100 * share:.2f} %",
            f"{len(line.values(measure))} of {line.repeats}",
        ]
        for line in lines
    ]
    return Table(head, rows)
