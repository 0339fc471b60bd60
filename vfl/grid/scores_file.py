"""Scores of attacks on one victim: one durable line each, so that nothing is done twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vfl.errors import RunFolderError
from vfl.grid.trials import Trial
from vfl.storage import (
    append_line,
    check_format,
    read_json,
    read_lines,
    stamp,
    write_json,
    write_text,
)

#: Of a run's folder.
SCORES = "attacks.jsonl"
#: The scores that the last call wanted, in its order, once it had them all: of `vfl attack`, and
#: of the grid that the run is a cell of.
OF_RUN, OF_CELL = "attacks.json", "trials.json"
_KEY_DIGITS = 16
#: What a threat model's sentence says of an attacker that recorded the training.
IN_TRAINING = "in the training phase"


@dataclass(frozen=True, slots=True)
class Scored:
    """What one attack reached once.

    Attributes:
        key: stands for all that the value depends on; see `key_of`.
        attack: its spec.
        bottom: "trained" is the victim's; "outcome" is what an adversary itself reached; others are
            label-free, see `vfl.attacks.baselines`.
        k: leaked labels of each class; 0 for an attack that uses none.
        draw: which draw of them.
        measure, value, guess: see `vfl.attacks.case.Score`.
        threat: who the attacker was and what it held, in one sentence.
        seconds: it took.
        also: further measures, each with value and guess.
    """

    key: str
    attack: str
    bottom: str
    k: int
    draw: int
    measure: str
    value: float
    guess: float
    threat: str
    seconds: float
    also: Sequence[tuple[str, float, float]] = ()

    @property
    def trial(self) -> Trial:
        """What was tried."""
        return Trial(self.attack, self.k, self.draw, self.bottom)

    @property
    def of_training(self) -> bool:
        """Whether it is about training rows, which no baseline is about."""
        return IN_TRAINING in self.threat


class ScoresFile:
    """The file of a run folder that attacks write to.

    Args:
        folder: of the run.

    Raises:
        RunFolderError: a line is no score.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SCORES
        self._known = {one.key: one for one in _read(self._path)}

    def get(self, key: str) -> Scored | None:
        """The score of that key, if it is there."""
        return self._known.get(key)

    def add(self, scored: Scored) -> None:
        """Append one score; it is on disk when this returns.

        Raises:
            StorageError: the disk is full.
        """
        if not self._known:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self._path, asdict(scored))
        self._known[scored.key] = scored

    def mend(self) -> None:
        """Take away the part of a line that a killed process left at the end."""
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            lines = "".join(json.dumps(record) + "\n" for record in read_lines(self._path))
            write_text(self._path, lines)


def key_of(about: Mapping[str, Any]) -> str:
    """A short digest of what a value depends on."""
    text = json.dumps(dict(about), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


def write_scores(path: Path, setting: str, scores: Iterable[Scored]) -> None:
    """Say which scores of a run are the wanted ones.

    Args:
        path: the file, `OF_RUN` or `OF_CELL` of the run's folder.
        setting: which rows played which part, in words of its own.
        scores: in order.
    """
    listed = [asdict(one) for one in scores]
    write_json(path, stamp() | {"setting": setting, "scores": listed})


def read_scores(path: Path, setting: str | None = None) -> list[Scored]:
    """The wanted scores in a file; none unless they are those of that setting.

    Raises:
        RunFolderError: the file is damaged, or of another format.
    """
    if not path.exists():
        return []
    record = read_json(path)
    check_format(record, path)
    if setting not in (None, record["setting"]):
        return []
    return [_scored(one, path) for one in record["scores"]]


def _scored(record: Any, path: Path) -> Scored:
    if isinstance(record, dict):
        record.setdefault("also", [])  # written before attacks had several measures
    if not isinstance(record, dict) or set(record) != {field.name for field in fields(Scored)}:
        raise RunFolderError("a score is damaged", where=str(path))
    also = tuple((str(name), float(value), float(guess)) for name, value, guess in record["also"])
    return Scored(**record | {"also": also})


def _read(path: Path) -> list[Scored]:
    return [_scored(record, path) for record in read_lines(path)] if path.exists() else []
