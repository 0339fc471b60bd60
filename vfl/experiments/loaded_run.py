"""Reader of a run folder for pages, tables and notebooks; it reads each file once, when needed.

Only the file `run.json` must exist, because a run may have been interrupted. Values that were not
measured are empty or None.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError
from vfl.core.storage import Seal, read_bytes, read_json, read_lines, read_sealed_json
from vfl.core.text import as_written
from vfl.core.traffic import Traffic
from vfl.experiments.cells import CODEC
from vfl.experiments.scores import OF_RUN, ScoreRecord, read_codes, read_scores

if TYPE_CHECKING:
    from vfl.session.label.scored import Guessed, Residuals, Scored

Counts = TypeVar("Counts")
#: Record of one epoch: finite numbers by name, and `sent`, the bytes sent so far in both
#: directions. A NaN loss is left out, so its curve has a gap.
Epoch = Mapping[str, float]


class LoadedRun:
    """Contents of a run folder.

    Args:
        path: the folder.

    Raises:
        RunFolderError: the folder contains no run; a property also raises this error if a file is
            damaged or has another format.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "run.json").is_file():
            raise RunFolderError(
                "there is no run in this folder",
                where=str(path),
                want="a folder with the file run.json, which every training writes",
                fix="give the path that vfl train printed",
            )
        self.path, self.folder = path, RunFolder(path)

    @cached_property
    def head(self) -> Mapping[str, str]:
        """The fields `name`, `created`, `vfl`, `mode` and `command` of the record."""
        about = self.folder.about()
        return {
            one: str(about.get(one, "")) for one in ("name", "created", "vfl", "mode", "command")
        }

    @cached_property
    def config_text(self) -> str:
        """Text of the run's experiment, with defaults; empty if the folder has no config.toml."""
        return self.folder.config() if (self.path / "config.toml").exists() else ""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The experiment as nested tables; files of other vfl versions can be read as well."""
        return tomllib.loads(self.config_text)

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment of the run, checked."""
        return self.folder.experiment()

    @property
    def label_party(self) -> str | None:
        """Name of the label party in the experiment."""
        name: str | None = self.config.get("label", {}).get("party")
        return name

    @property
    def parties(self) -> tuple[str, ...]:
        """Names of the parties in the experiment, or in the ledger if the experiment is unreadable.

        The experiment's list contains no dealer, because a dealer has no columns.
        """
        sent = finite(self.summary.get("bytes_up"))
        named = list(self.config.get("parties", {})) or [
            *(row.party for row in self.traffic),
            *sent,
        ]
        return tuple(dict.fromkeys(named))

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """Metrics of additional label parties, by party; empty until they are known."""
        known = self.summary.get("tasks") or {}
        return {one["party"]: known.get(one["party"], {}) for one in self.config.get("tasks", ())}

    @cached_property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """Stored record of each epoch, in order."""
        path = self.path / "metrics.jsonl"
        return [_record(one, path) for one in read_lines(path)] if path.exists() else []

    @cached_property
    def epochs(self) -> Sequence[Epoch]:
        """Metrics of each epoch, in order."""
        found = []
        for position, record in enumerate(self.history, 1):
            epoch = {"epoch": float(position), **finite(record)}
            if {"bytes_up", "bytes_down"} <= set(epoch):
                epoch["sent"] = epoch["bytes_up"] + epoch["bytes_down"]
            found.append(epoch)
        return found

    @cached_property
    def traffic(self) -> Sequence[Traffic]:
        """Entries of the traffic ledger."""
        path = self.path / "traffic.csv"
        return _traffic(path) if path.exists() else []

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Hardware and software versions of the run."""
        path = self.path / "environment.json"
        return _record(read_json(path), path) if path.exists() else {}

    @property
    def has_ended(self) -> bool:
        """Return whether the run ended without an error."""
        return (self.path / "summary.json").exists()

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Metrics of the whole run; while it is running, only codec, defense and secure mode."""
        asked = {name: self.config.get(name) for name in ("codec", "defense", "secure")}
        return asked | (self.folder.summary() if self.has_ended else {})

    @cached_property
    def scored(self) -> Mapping[str, Scored]:
        """Counts of validation and test rows by predicted probability, for two classes.

        The entry `uncalibrated` has the counts of test rows before calibration.
        """
        from vfl.session.label.scored import Scored

        read = self._counted("probability", Scored.read)
        return {part: one for part, one in read.items() if 0 < one.positives < one.rows}

    @cached_property
    def guessed(self) -> Mapping[str, Guessed]:
        """Counts of rows by true and predicted class, for three to 50 classes."""
        from vfl.session.label.scored import Guessed

        return self._counted("guesses", Guessed.read)

    @cached_property
    def residuals(self) -> Mapping[str, Residuals]:
        """Counts of validation and test rows by residual, for a regression."""
        from vfl.session.label.scored import Residuals

        return self._counted("residuals", Residuals.read)

    def _counted(self, form: str, read: Callable[[Any], Counts]) -> dict[str, Counts]:
        """Return, by split, the counts of rows, if the stored record has the expected form."""
        found = self.folder.scored() if self.has_ended else {}
        parts = ("validation", "test", "uncalibrated")
        return {part: read(found[part]) for part in parts if form in (found.get(part) or ())}

    @cached_property
    def codec(self) -> Mapping[str, Any]:
        """Measures of the codec on the cuts of test rows, for cells of a grid only."""
        path = self.path / CODEC
        return _record(read_json(path), path) if path.exists() else {}

    @cached_property
    def scores(self) -> Sequence[ScoreRecord]:
        """Scores of attacks on this run; scores of the last `vfl attack` call come last."""
        return read_scores(self.path / OF_RUN)

    @cached_property
    def codes(self) -> Mapping[str, str]:
        """Digests of the code that produced the scores; empty if an old version stored none."""
        return read_codes(self.path / OF_RUN)

    @cached_property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        """Results of each `vfl evaluate` call, the earliest first."""
        return self.folder.evaluations()

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """Numbers of training, validation and test rows, from the label party's model card."""
        if self.label_party is None:
            return {}
        card = self.folder.party(self.label_party) / "card.json"
        if not card.exists():
            return {}
        rows = (
            read_sealed_json(card, Seal("card", self.label_party, None)).get("data", {}).get("rows")
        )
        return {name: int(count) for name, count in finite(rows).items()}

    @cached_property
    def audit(self) -> str:
        """Result of the last privacy audit as text; empty if there was no audit."""
        return str((self.folder.audit() or {}).get("text", ""))

    @property
    def sent(self) -> float | None:
        """Bytes that all parties sent in both directions; None if the run has not ended."""
        own = [self.summary, *self.tasks.values()]
        ways = [finite(one.get(f"bytes_{way}")) for one in own for way in ("up", "down")]
        return sum(sum(way.values()) for way in ways) if any(ways[:2]) else None

    def last(self, measure: str) -> float | None:
        """Return a measure's last value over the epochs; None if no epoch has this measure."""
        return next((one[measure] for one in reversed(self.epochs) if measure in one), None)

    def figure(self, name: str) -> float | None:
        """Return a number of the whole run by name; None if the number was not measured."""
        return finite(self.summary).get(name)

    def word(self, name: str) -> str:
        """Return a text of the run's summary by name; empty if the summary has none."""
        return str(self.summary.get(name) or "")


def finite(found: Any) -> dict[str, float]:
    """Return the finite numbers of a record by name; return an empty mapping for other values."""
    record = found if isinstance(found, dict) else {}
    return {
        str(name): value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _record(found: Any, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise RunFolderError("a file of this run holds no JSON object", where=str(path))
    return found


def _traffic(path: Path) -> list[Traffic]:
    try:
        reader = csv.DictReader(read_bytes(path).decode().splitlines())
    except UnicodeDecodeError:
        raise RunFolderError("a file of this run is not text", where=str(path)) from None
    wanted = [each.name for each in fields(Traffic)]
    if not set(wanted) <= set(reader.fieldnames or wanted):
        raise RunFolderError(
            "the ledger of this run lacks a column", where=str(path), want=", ".join(wanted)
        )
    try:
        return [
            Traffic(
                party=as_written(row["party"]),
                direction=row["direction"],
                phase=row["phase"],
                frames=int(row["frames"]),
                payload_bytes=int(row["payload_bytes"]),
                wire_bytes=int(row["wire_bytes"]),
                seconds=float(row["seconds"] or 0),
            )
            for row in reader
        ]
    except (TypeError, ValueError, csv.Error):
        where = f"{path}:{reader.line_num}"
        raise RunFolderError("the ledger of this run has a damaged line", where=where) from None
