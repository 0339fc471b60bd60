"""Submissions: a study's results in a folder, so that other people can repeat a part of them.

    FOLDER/
      submission.json   author, command, SHA-256 of every other file
      experiment.toml   what was trained and attacked
      results.json      every figure, with versions and digests; see `provenance`
      plugins/          files of plug-ins, which run only after `--plugin FILE`

`submit` writes a submission from the folder of a comparison or a grid. `verify` draws some of the
submission's trainings, repeats them with their attacks, and compares each figure.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vfl.config import to_toml
from vfl.core.errors import ConfigError, DataError, RunFolderError
from vfl.core.registry import loaded_plugins
from vfl.core.sources import is_loader
from vfl.core.storage import check_format, read_json, stamp, write_json, write_text
from vfl.experiments.cells import Cell, GridFolder
from vfl.experiments.provenance import provenance
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scheduler import FinishedCell
from vfl.experiments.scores import BASELINES
from vfl.experiments.statistics import estimate
from vfl.experiments.study import Kind, plan_study, run_study
from vfl.training.specs import read_checked

ABOUT, EXPERIMENT, RESULTS, PLUGINS = (
    "submission.json", "experiment.toml", "results.json", "plugins",
)  # fmt: skip
#: Share of the repeated figures that must match the submission; with 95 % intervals, one figure in
#: twenty fails by chance. Figures of quality must all match.
HOLDING = 0.95
#: Smallest and largest accepted difference between figures, as shares of the repeated figure, or of
#: 1 if the figure is below 1. The submitter could choose the standard deviation of the submitted
#: repeats, so this deviation has a limited effect on the accepted difference.
_ROOM, _MOST_ROOM = 0.01, 0.05
_KINDS: Mapping[str, Kind] = {"codecs": "compare", "attacks": "grid"}
#: Names of fields that identify a figure within a study, and names of fields that are the same for
#: all repeats of a figure.
_FIGURE = ("cell", "evaluator", "subject", "measure", "k", "draw")
_REPEATED = ("training", "adversary", "evaluator", "subject", "measure", "k")
#: Kinds of measurement whose results do not depend on the machine.
_COMPARED = ("quality", "attack")
_LARGEST = 1 << 28


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of a submission, compared with its repetition.

    Attributes:
        cell, evaluator, subject, measure, k, draw: see `vfl.experiments.results.Record`.
        submitted, again: the submitted value and the repeated value; None if these results do
            not have the figure.
        room: largest accepted difference between the two values.
    """

    cell: str
    evaluator: str
    subject: str
    measure: str
    k: int
    draw: int
    submitted: float | None
    again: float | None
    room: float

    @property
    def is_equal(self) -> bool:
        """Return whether both values are the same number."""
        return self.submitted == self.again

    @property
    def holds(self) -> bool:
        """Return whether the difference between the two values is accepted."""
        if self.submitted is None or self.again is None:
            return False
        return abs(self.submitted - self.again) <= self.room

    def record(self) -> dict[str, Any]:
        """Return the comparison as a record for `--json`."""
        return asdict(self) | {"holds": self.holds}

    def __str__(self) -> str:
        """Return the comparison as one line."""
        both = (self.submitted, self.again)
        submitted, again = ("missing" if one is None else f"{one:.4f}" for one in both)
        leaked = f"  k={self.k} draw {self.draw}" if self.k else ""
        figure = f"{self.cell}  {self.subject}{leaked}  {self.measure}"
        return f"{figure}  {submitted} -> {again}  (within {self.room:.4f})"


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`.

    Attributes:
        path: folder with the repeated trainings.
        cells: number of repeated trainings, and number of all trainings in the submission.
        checks: compared figures.
        other_rows: names of repeated trainings whose data differ from the data of the submission.
        failed: repeated trainings that failed.
    """

    path: Path
    cells: tuple[int, int]
    checks: Sequence[Check]
    other_rows: Sequence[str]
    failed: Sequence[FinishedCell]

    @property
    def holds(self) -> bool:
        """Return whether enough figures match, with all of quality, on equal data, without failure.

        At least `HOLDING` of all figures must match, and every figure of quality.
        """
        enough = sum(one.holds for one in self.checks) >= HOLDING * len(self.checks) > 0
        quality = all(one.holds for one in self.checks if one.evaluator == "quality")
        return enough and quality and not self.other_rows and not self.failed

    @property
    def sentence(self) -> str:
        """The result of the verification in one sentence."""
        held, equal = (
            sum(getattr(one, name) for one in self.checks) for name in ("holds", "is_equal")
        )
        return (
            f"{self.cells[0]} of {self.cells[1]} trainings were repeated: {held} of "
            f"{len(self.checks)} figures hold, {equal} of them bit for bit"
            + (f"; {len(self.other_rows)} trainings had other rows" if self.other_rows else "")
        )

    def record(self) -> dict[str, Any]:
        """Return the result as a record for `--json`."""
        return {
            "holds": self.holds,
            "sentence": self.sentence,
            "folder": str(self.path),
            "cells": self.cells[0],
            "all_cells": self.cells[1],
            "other_rows": list(self.other_rows),
            "failed": [one.cell.title for one in self.failed],
            "checks": [one.record() for one in self.checks],
        }


def submit(path: Path, out: Path, author: str) -> Path:
    """Write a submission from the folder of a comparison or a grid.

    The submission includes the code of the plug-ins that this process has loaded.

    Args:
        path: folder of the study; all of the study's trainings must be complete and up to date.
        out: folder of the submission, which must not exist.
        author: author of the submission.

    Returns:
        The folder.

    Raises:
        RunFolderError: this kind of study cannot be repeated from a file, the study is incomplete,
            or the folder `out` exists.
    """
    grid = LoadedGrid(GridFolder(path))
    _require_complete(grid)
    if out.exists():
        raise RunFolderError(
            "the folder of the submission exists", where=str(out), fix="--out with a new folder"
        )
    (out / PLUGINS).mkdir(parents=True)
    write_text(out / EXPERIMENT, to_toml(grid.experiment))
    write_json(out / RESULTS, stamp() | provenance(grid))
    for file in loaded_plugins():
        (out / PLUGINS / file.name).write_bytes(file.read_bytes())
    digests = {str(file.relative_to(out)): _sha256(file) for file in _files(out)}
    about = {"author": author, "command": grid.folder.head("command"), "sha256": digests}
    write_json(out / ABOUT, stamp() | about)
    return out


def verify(
    path: Path,
    out: Path,
    share: float = 0.1,
    draw: int = 0,
    jobs: int = 1,
    device: str = "cpu",
    on_end: Callable[[FinishedCell], None] = lambda ended: None,
) -> Verification:
    """Repeat a random share of a submission's trainings with their attacks; compare the figures.

    A figure matches if it differs from the repeated figure by at most sqrt(2) t(0.975, n - 1) s.
    Here s is the standard deviation of the figure's n repeats in the submission. The accepted
    difference is at least 1 and at most 5 % of the repeated figure, or of 1 if the figure is below
    1. Figures from the same machine and versions are equal, because the seed also determines the
    protective noise, unless an attack has a time limit. A figure that the submission lacks counts
    as a figure that does not match.

    Args:
        path: the submission.
        out: folder for the repeated trainings; a later call continues an interrupted call in this
            folder.
        share: share of the submission's trainings to repeat; at least one training is repeated.
        draw: seed of the random choice of trainings.
        jobs: number of cells that run at the same time, each in its own process.
        device: device on which the models are trained.
        on_end: callback that receives each cell (training) when it ends.

    Raises:
        RunFolderError: the folder contains no submission, or a file of the submission is damaged.
        DataError: a file differs from the digest in the submission, or the results do not match the
            experiment.
        ConfigError: a plug-in of the submission is not loaded, or the experiment's data come from a
            function.
    """
    submitted = _read(path)
    experiment, locations = read_checked(path / EXPERIMENT, [])
    if is_loader(experiment.data.source):
        raise ConfigError(
            "a submission names a function that would run on this machine",
            where=f"{path / EXPERIMENT}: data.source",
            got=str(experiment.data.source),
            want="a data set by name, or a file",
        )
    study = plan_study(_KINDS[submitted["kind"]], experiment, locations)
    known = {one["cell"]: one for one in submitted["cells"] if one["trained"]}
    trained = [cell for cell in study.cells if cell.victim != BASELINES]
    if {cell.name for cell in trained} != set(known):
        raise DataError(
            "the results of this submission belong to another experiment",
            where=str(path),
            got=f"{len(known)} trainings",
            want=f"the {len(trained)} trainings of {EXPERIMENT}",
        )
    drawn = random.Random(draw).sample(trained, max(1, round(share * len(trained))))
    chosen = [cell for cell in study.cells if cell in drawn or _is_baseline_of(cell, drawn)]
    command = f"vfl verify {path} --share {share:g} --draw {draw}"
    found = run_study(study, out, command, chosen, jobs, device, on_end)
    grid = LoadedGrid(GridFolder(out))
    names = {cell.name for cell in drawn}
    again = {
        one["cell"]: one["made_of"] for one in provenance(grid)["cells"] if one["cell"] in names
    }
    other = [name for name, made in again.items() if made["data"] != known[name]["made_of"]["data"]]
    rows = [one.row() for one in grid.records]
    checks = _checks(names, submitted["records"], rows)
    return Verification(out, (len(drawn), len(trained)), checks, other, found.failed)


def _require_complete(grid: LoadedGrid) -> None:
    folder = grid.folder
    if folder.kind not in _KINDS or folder.modules is not None:
        raise RunFolderError(
            "this study cannot be repeated from an experiment file",
            where=str(grid.path),
            want="a comparison or a grid of an experiment file",
        )
    stale = sum(bool(one.stale) for one in grid.records)
    states = [one["state"] for one in provenance(grid)["cells"]]
    if stale or set(states) != {"done"}:
        raise RunFolderError(
            "this study is incomplete",
            where=str(grid.path),
            got=f"{states.count('done')} of {len(states)} trainings are complete, and {stale} "
            "results are out of date, because code or rows have changed",
            fix=str(folder.head("command")),
        )


def _read(path: Path) -> Any:
    """Check a submission's files against the digests it lists, and return its results."""
    if not (path / ABOUT).exists():
        raise RunFolderError(
            "there is no submission in this folder", where=str(path), want=f"a file {ABOUT}"
        )
    about = read_json(path / ABOUT)
    check_format(about, path / ABOUT)
    digests = {str(file.relative_to(path)): _sha256(file) for file in _files(path)}
    digests.pop(ABOUT, None)
    said = about.get("sha256")
    if digests != said:
        names = sorted(set(digests) ^ set(said or {})) or [
            name for name, digest in digests.items() if digest != said[name]
        ]
        raise DataError("a file of this submission differs from its digest",
                        where=str(path), got=names[0])  # fmt: skip
    loaded = {_sha256(file) for file in loaded_plugins()}
    for name, digest in digests.items():
        if Path(name).parts[0] == PLUGINS and digest not in loaded:
            raise ConfigError(
                "this submission needs a plug-in, whose code would run on this machine",
                got=name,
                fix=f"read {path / name}; then vfl verify {path} --plugin {path / name}",
            )
    results = read_json(path / RESULTS)
    check_format(results, path / RESULTS)
    if results.get("kind") not in _KINDS:
        raise DataError("this kind of study cannot be repeated", where=str(path / RESULTS),
                        got=str(results.get("kind"))[:40], want=" or ".join(_KINDS))  # fmt: skip
    keys = [_key(row, _FIGURE) for row in results["records"]]
    if len(set(keys)) < len(keys) or not all(
        math.isfinite(row["value"]) for row in results["records"]
    ):
        raise DataError(
            "a figure of this submission is not a number, or occurs twice",
            where=str(path / RESULTS),
            want="one finite number for each figure",
        )
    return results


def _is_baseline_of(cell: Cell, drawn: Sequence[Cell]) -> bool:
    return cell.victim == BASELINES and any(one.repeat == cell.repeat for one in drawn)


def _checks(
    cells: Collection[str],
    submitted: Sequence[Mapping[str, Any]],
    again: Sequence[Mapping[str, Any]],
) -> list[Check]:
    """Compare figures of repeated cells; include figures that only one of the two has."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for row in submitted:
        values.setdefault(_key(row, _REPEATED), []).append(row["value"])
    sides = [{_key(row, _FIGURE): row for row in rows if row["cell"] in cells
              and row["evaluator"] in _COMPARED} for rows in (submitted, again)]  # fmt: skip
    found = list[Check]()
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        before, now = (side.get(key) for side in sides)
        repeats = values.get(_key(before or now or {}, _REPEATED), [])
        found.append(
            Check(
                **dict(zip(_FIGURE, key, strict=True)),
                submitted=None if before is None else before["value"],
                again=None if now is None else now["value"],
                room=0.0 if now is None else _room(now["value"], repeats),
            )
        )
    return found


def _room(again: float, repeats: Sequence[float]) -> float:
    """Return the accepted difference from a repeated figure, given the submitted repeats of it."""
    found, scale = estimate(repeats), max(1.0, abs(again))
    spread = 0.0
    if found is not None and found.half_width is not None:
        spread = math.sqrt(2 * found.count) * found.half_width
    return min(max(spread, _ROOM * scale), _MOST_ROOM * scale)


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _files(path: Path) -> list[Path]:
    """Return the files of a submission, sorted by path; raise an error for a link."""
    found = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    for file in found:
        if file.is_symlink() or file.stat().st_size > _LARGEST:
            raise DataError(
                "a submission consists of plain files", where=str(path),
                got=str(file.relative_to(path)), want=f"no link, and at most {_LARGEST} bytes",
            )  # fmt: skip
    return sorted(found)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
