"""Plan of attacks on a victim, and their scores; stored scores prevent repeated runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vfl.config import GridSettings
from vfl.core.errors import RunFolderError
from vfl.core.registry import parse
from vfl.core.storage import (
    append_line,
    check_format,
    read_json,
    read_lines,
    stamp,
    write_json,
    write_text,
)

#: The victim's own bottom, as opposed to a label-free one.
TRAINED = "trained"
#: Bottom of attacks from scratch, which do not use the victim's bottom.
ANY = "raw"
#: Baselines that are attacks, with their specs; other baselines are bottoms.
SCRATCH = {"scratch": "scratch", "scratch_unlabelled": "scratch:unlabelled=true"}

#: The attack of feature parties that join their columns, and the attack on numeric labels.
_POOLED, _NUMBERS = "pooled", "regression"

#: Name in place of a bottom if the score is the adversary's own result, without an attack.
OUTCOME = "outcome"

#: Replaces the defense's spec in a cell of baselines.
BASELINES = "baselines"


@dataclass(frozen=True, slots=True)
class AttackJob:
    """One run of an attack.

    Attributes:
        attack: its spec, or an adversary's.
        k: number of leaked labels per class; 0 if the attack uses none.
        draw: number of their draw.
        bottom: `TRAINED`, or a label-free one, see `vfl.attacks.baselines`; or `OUTCOME`.
    """

    attack: str
    k: int
    draw: int
    bottom: str = TRAINED

    @property
    def code_key(self) -> str:
        """Key that is equal for jobs with the same code."""
        return f"{self.bottom} {self.attack}"


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """Attacks to run, and the number of their runs.

    Attributes:
        leaking: specs of attacks that use leaked labels.
        once: specs of attacks that use no leaked labels, so that one run is enough.
        leaks: numbers of leaked labels of each class.
        draws: number of draws of leaked rows.
        alone: specs of attacks without a baseline, because they read recordings of a training.
        adversaries: specs of adversaries whose own success is measured.
        unseen: specs without label-free baselines; training from scratch is their baseline.
    """

    leaking: Sequence[str]
    once: Sequence[str]
    leaks: Sequence[int]
    draws: int
    alone: frozenset[str] = frozenset()
    adversaries: Sequence[str] = ()
    unseen: frozenset[str] = frozenset()

    def on_victim(self) -> list[AttackJob]:
        """Return every attack on the victim itself, and the measurements of adversaries."""
        attacks = self._on((TRAINED,), self.once, self.leaking)
        return attacks + [AttackJob(spec, 0, 0, OUTCOME) for spec in self.adversaries]

    def baselines(self, names: Sequence[str]) -> list[AttackJob]:
        """Return the baselines of the jobs on the victim; see `GridSettings.baselines`."""
        leaking = [spec for spec in self.leaking if spec not in self.alone]
        once = [spec for spec in self.once if spec not in self.alone]
        scratch = dict.fromkeys(
            scratch_of(spec, name) for spec in leaking for name in names if name in SCRATCH
        )
        found = self._on((ANY,), (), list(scratch))
        # Without labels the baseline of the thesis is the same attack on the inputs themselves.
        found += self._on((ANY,), once, ())
        found += self._on(
            [name for name in names if name not in SCRATCH],
            [spec for spec in once if spec not in self.unseen],
            [spec for spec in leaking if spec not in self.unseen],
        )
        return list(dict.fromkeys(found))

    def _on(
        self, bottoms: Sequence[str], once: Sequence[str], leaking: Sequence[str]
    ) -> list[AttackJob]:
        """Yield jobs for these attacks on these bottoms; jobs of one leak are adjacent."""
        found = [AttackJob(spec, 0, 0, bottom) for bottom in bottoms for spec in once]
        return found + [
            AttackJob(spec, k, draw, bottom)
            for draw in range(self.draws)
            for k in self.leaks
            for bottom in bottoms
            for spec in leaking
        ]


def baselines_of(job: AttackJob, names: Sequence[str]) -> dict[str, AttackJob]:
    """Return the baselines of one job by name; baselines from scratch need leaked labels."""
    found = {name: replace(job, bottom=name) for name in names if name not in SCRATCH}
    if job.k == 0:
        return {"scratch": replace(job, bottom=ANY)} | found
    scratch = [name for name in names if name in SCRATCH]
    return {
        name: AttackJob(scratch_of(job.attack, name), job.k, job.draw, ANY) for name in scratch
    } | found


def scratch_of(spec: str, name: str) -> str:
    """Return the spec that trains from scratch on an attack's leaked rows."""
    attack = parse(spec)[0]
    if attack == _NUMBERS:
        return f"{_NUMBERS}:learner=scratch"
    return f"{_POOLED}:of={SCRATCH[name]}" if attack == _POOLED else SCRATCH[name]


def setting_text(settings: GridSettings) -> str:
    """Return the roles of rows as text, to distinguish scores of different settings."""
    parts = [settings.leaks_from, settings.unlabelled, settings.trained_by, settings.party]
    parts += [f"columns {settings.known_columns}"]
    if settings.attribute is not None:
        parts += [f"attribute {settings.attribute}"]
    return ", ".join(map(str, parts))


#: File in a run's folder.
SCORES = "attacks.jsonl"
#: Scores of the last call in its order, after all were complete: of `vfl attack`, and of the grid
#: to which the run belongs.
OF_RUN, OF_CELL = "attacks.json", "trials.json"
_KEY_DIGITS = 16
#: Phrase in a threat model's sentence for an attacker that recorded the training.
IN_TRAINING = "in the training phase"


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """Result of one run of an attack.

    Attributes:
        key: digest of everything that the value depends on; see `key_of`.
        attack: its spec.
        bottom: "trained" is the victim's bottom; "outcome" is an adversary's own result; others are
            label-free, see `vfl.attacks.baselines`.
        k: number of leaked labels per class; 0 for an attack that uses none.
        draw: number of the draw of leaked labels.
        measure, value, guess: see `vfl.attacks.scoring.Score`.
        threat: the attacker and its knowledge, in one sentence.
        seconds: it took.
        also: further measures, each with value and guess.
        access: the attacker's access to the model; see `vfl.attacks.view.Access`.
        report: the attack's own report; see `vfl.attacks.Attack.last_report`.
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
    access: str = ""
    report: Mapping[str, Any] | None = None

    @property
    def job(self) -> AttackJob:
        """Job that was run."""
        return AttackJob(self.attack, self.k, self.draw, self.bottom)

    @property
    def measured(self) -> list[tuple[str, float, float]]:
        """Every measure with value and guess, the headline first."""
        return [(self.measure, self.value, self.guess), *self.also]

    @property
    def of_training(self) -> bool:
        """Return whether the job attacks training rows, for which there is no baseline."""
        return IN_TRAINING in self.threat


#: File of a grid's folder that lists attacks from outside, and file of a cell with their scores.
ATTACKERS, OF_OUTSIDE = "attackers.json", "outside.json"


@dataclass(frozen=True, slots=True)
class Attacker:
    """An attack from outside.

    Attributes:
        spec: spec of the attack.
        author: author named in the file.
        date: date in the attack's file, in ISO 8601.
        file: its name.
        sha256: SHA-256 of the file.
    """

    spec: str
    author: str
    date: str
    file: str
    sha256: str

    @property
    def code_key(self) -> str:
        """Key under which `read_codes` has the digest of this job's code."""
        return f"file {self.spec}"


def read_attackers(path: Path) -> dict[str, Attacker]:
    """Return the attackers of a grid from outside, by specs; their code does not run.

    Raises:
        RunFolderError: the list is damaged.
    """
    listed = path / ATTACKERS
    if not listed.exists():
        return {}
    record = read_json(listed)
    check_format(record, listed)
    wanted = {one.name for one in fields(Attacker)}
    for one in record["attackers"]:
        if set(one) != wanted or not all(isinstance(word, str) for word in one.values()):
            raise RunFolderError("an attacker's record is damaged", where=str(listed))
    return {one["spec"]: Attacker(**one) for one in record["attackers"]}


class ScoresFile:
    """The file of a run folder that attacks write to.

    Args:
        folder: folder of the run.

    Raises:
        RunFolderError: a line is not a score.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SCORES
        self._known: dict[str, ScoreRecord] = {}
        if self._path.exists():
            for line in read_lines(self._path):
                score = _record(line, self._path)
                self._known[score.key] = score
            text = self._path.read_text(encoding="utf-8")
            if not text.endswith("\n"):  # a part of a line that a killed process left
                write_text(self._path, text[: text.rfind("\n") + 1])

    def get(self, key: str) -> ScoreRecord | None:
        """Return the score of a key, if it exists."""
        return self._known.get(key)

    def add(self, score: ScoreRecord) -> None:
        """Append one score; it is on disk when this returns.

        Raises:
            StorageError: the disk is full.
        """
        if not self._known:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self._path, asdict(score))
        self._known[score.key] = score


def key_of(about: Mapping[str, Any]) -> str:
    """Return a short digest of everything that a value depends on."""
    text = json.dumps(dict(about), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


def write_scores(
    path: Path, setting: str, scores: Iterable[ScoreRecord], code: Mapping[str, str]
) -> None:
    """Store which scores of a run are the current ones.

    Args:
        path: the file, `OF_RUN`, `OF_CELL` or `OF_OUTSIDE` of the run's folder.
        setting: roles of the rows, in words.
        scores: scores in order.
        code: digests of the code of each score, by `AttackJob.code_key`.
    """
    listed = [asdict(one) for one in scores]
    about = {"setting": setting, "code": dict(code), "scores": listed}
    write_json(path, stamp() | about)


def read_codes(path: Path) -> dict[str, str]:
    """Read digests of the code that a file's scores depend on, by `AttackJob.code_key`."""
    found = read_json(path).get("code", {}) if path.exists() else {}
    return {str(key): str(digest) for key, digest in found.items()}


def read_scores(path: Path, setting: str | None = None) -> list[ScoreRecord]:
    """Return the current scores in a file; none if they belong to another setting.

    Raises:
        RunFolderError: the file is damaged, or of another format.
    """
    if not path.exists():
        return []
    record = read_json(path)
    check_format(record, path)
    if setting not in (None, record["setting"]):
        return []
    return [_record(one, path) for one in record["scores"]]


def _record(record: Any, path: Path) -> ScoreRecord:
    if isinstance(record, dict):
        record.setdefault("also", [])  # written before attacks had several measures
        record.setdefault("access", "")
        record.setdefault("report", None)
    if not isinstance(record, dict) or set(record) != {field.name for field in fields(ScoreRecord)}:
        raise RunFolderError("a score is damaged", where=str(path))
    also = tuple((str(name), float(value), float(guess)) for name, value, guess in record["also"])
    return ScoreRecord(**record | {"also": also})
