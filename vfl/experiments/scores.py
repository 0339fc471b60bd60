"""Plan of attacks on a victim, and scores; attacks with stored scores are skipped."""

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

#: Name of the bottom model in a job on the victim's own bottom model.
TRAINED = "trained"
#: Name in place of a bottom model in a job from scratch, and in a job on the party's own inputs;
#: neither uses the victim's bottom model.
ANY = "raw"
#: Specs of the baselines that are attacks; all other baselines are bottom models that were trained
#: without labels.
SCRATCH = {"scratch": "scratch", "scratch_unlabelled": "scratch:unlabelled=true"}

#: Variants of the attack from scratch: for feature parties that join their columns, and for numeric
#: labels.
_POOLED, _NUMBERS = "pooled", "regression"

#: Name in place of a bottom model in a job that measures an adversary's own success, without an
#: attack.
OUTCOME = "outcome"

#: Text in place of a defense's spec for a cell that contains only baselines.
BASELINES = "baselines"


@dataclass(frozen=True, slots=True)
class AttackJob:
    """One run of an attack, with one draw of leaked labels.

    Attributes:
        attack: spec of the attack, or of the adversary.
        k: number of leaked labels per class; 0 if the attack uses no leaked labels.
        draw: number of the random draw of leaked labels.
        bottom: `TRAINED`, the name of a bottom model that was trained without labels (see
            `vfl.attacks.baselines`), `ANY` or `OUTCOME`.
    """

    attack: str
    k: int
    draw: int
    bottom: str = TRAINED

    @property
    def code_key(self) -> str:
        """Key that is the same for all jobs whose scores depend on the same code."""
        return f"{self.bottom} {self.attack}"


@dataclass(frozen=True, slots=True)
class AttackPlan:
    """Attacks to run on a victim, and how often each attack is run.

    Attributes:
        leaking: specs of attacks that use leaked labels.
        once: specs of attacks that use no leaked labels, which therefore run only once.
        leaks: numbers of leaked labels of each class; each number gives separate runs.
        draws: number of random draws of leaked rows.
        alone: specs of attacks without baselines, because a bottom model that was trained without
            labels cannot replace the victim's; see `Scenario.by_cuts`.
        adversaries: specs of adversaries whose own success is measured.
        unseen: specs of attacks for which training from scratch, or the same attack on the inputs,
            is the only baseline, because `GridSettings.baseline_attacks` does not list them.
    """

    leaking: Sequence[str]
    once: Sequence[str]
    leaks: Sequence[int]
    draws: int
    alone: frozenset[str] = frozenset()
    adversaries: Sequence[str] = ()
    unseen: frozenset[str] = frozenset()

    def on_victim(self) -> list[AttackJob]:
        """Return all jobs of attacks on the victim itself, and the measurements of adversaries."""
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
        # Without leaked labels, the baseline is the same attack on the party's inputs in place of
        # the cuts.
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
        """Return the jobs for some attacks and bottom models, ordered by their leaked labels."""
        found = [AttackJob(spec, 0, 0, bottom) for bottom in bottoms for spec in once]
        return found + [
            AttackJob(spec, k, draw, bottom)
            for draw in range(self.draws)
            for k in self.leaks
            for bottom in bottoms
            for spec in leaking
        ]


def baselines_of(job: AttackJob, names: Sequence[str]) -> dict[str, AttackJob]:
    """Return a job's baselines by name; baselines from scratch exist only with leaked labels."""
    found = {name: replace(job, bottom=name) for name in names if name not in SCRATCH}
    if job.k == 0:
        return {"scratch": replace(job, bottom=ANY)} | found
    scratch = [name for name in names if name in SCRATCH]
    return {
        name: AttackJob(scratch_of(job.attack, name), job.k, job.draw, ANY) for name in scratch
    } | found


def scratch_of(spec: str, name: str) -> str:
    """Return the spec of the attack that trains from scratch on another attack's leaked rows."""
    attack = parse(spec)[0]
    if attack == _NUMBERS:
        return f"{_NUMBERS}:learner=scratch"
    return f"{_POOLED}:of={SCRATCH[name]}" if attack == _POOLED else SCRATCH[name]


def setting_text(settings: GridSettings) -> str:
    """Return the roles of rows as text, by which scores of different settings are distinguished."""
    parts = [settings.leaks_from, settings.unlabelled, settings.trained_by, settings.party]
    parts += [f"columns {settings.known_columns}"]
    if settings.attribute is not None:
        parts += [f"attribute {settings.attribute}"]
    return ", ".join(map(str, parts))


#: Name of the file in a run's folder to which attacks append their scores.
SCORES = "attacks.jsonl"
#: Names of files with the current scores in order, written after all attacks have ended: by `vfl
#: attack`, and by the grid that contains the run.
OF_RUN, OF_CELL = "attacks.json", "trials.json"
_KEY_DIGITS = 16
#: Phrase in the sentence of a threat model if the attacker recorded the training.
IN_TRAINING = "in the training phase"


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """Result of one run of an attack.

    Attributes:
        key: digest of everything on which the value depends; see `key_of`.
        attack: its spec.
        bottom: see `AttackJob`.
        k: number of leaked labels per class; 0 for an attack that uses no leaked labels.
        draw: number of the random draw of leaked labels.
        measure, value, guess: see `vfl.attacks.scoring.Score`.
        threat: sentence with the attacker and the attacker's knowledge.
        seconds: running time of the attack in seconds.
        also: further measures, each as (name, value, guess).
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
        """The job that produced the score."""
        return AttackJob(self.attack, self.k, self.draw, self.bottom)

    @property
    def measured(self) -> list[tuple[str, float, float]]:
        """All measures of the score as (name, value, guess); the headline measure is the first."""
        return [(self.measure, self.value, self.guess), *self.also]

    @property
    def of_training(self) -> bool:
        """Return whether the job attacks training rows, for which no baseline exists."""
        return IN_TRAINING in self.threat


#: Name of the file in a grid's folder that lists attacks from outside, and name of the file in a
#: cell's folder with these attacks' scores.
ATTACKERS, OF_OUTSIDE = "attackers.json", "outside.json"


@dataclass(frozen=True, slots=True)
class Attacker:
    """An attack from a user's file ("from outside"), as a grid's folder lists it.

    Attributes:
        spec: spec of the attack.
        author: author that the attack's file states.
        date: date that the attack's file states, in ISO 8601.
        file: its name.
        sha256: SHA-256 digest of the attack's file.
    """

    spec: str
    author: str
    date: str
    file: str
    sha256: str

    @property
    def code_key(self) -> str:
        """Key under which `read_codes` returns the digest of this attack's code."""
        return f"file {self.spec}"


def read_attackers(path: Path) -> dict[str, Attacker]:
    """Return a grid's attackers from outside, by spec, without running their code.

    Raises:
        RunFolderError: the file that lists the attackers is damaged.
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
    """The file in a run folder to which attacks append their scores.

    Args:
        folder: folder of the run.

    Raises:
        RunFolderError: a line of the file is not a score.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SCORES
        self._known: dict[str, ScoreRecord] = {}
        if self._path.exists():
            for line in read_lines(self._path):
                score = _record(line, self._path)
                self._known[score.key] = score
            text = self._path.read_text(encoding="utf-8")
            if not text.endswith("\n"):  # a killed process wrote a part of a line
                write_text(self._path, text[: text.rfind("\n") + 1])

    def get(self, key: str) -> ScoreRecord | None:
        """Return the score with this key, or None."""
        return self._known.get(key)

    def add(self, score: ScoreRecord) -> None:
        """Append one score to the file; afterwards the score survives a crash.

        Raises:
            StorageError: the disk is full.
        """
        if not self._known:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self._path, asdict(score))
        self._known[score.key] = score


def key_of(about: Mapping[str, Any]) -> str:
    """Return a short digest of everything on which a score's value depends."""
    text = json.dumps(dict(about), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]


def write_scores(
    path: Path, setting: str, scores: Iterable[ScoreRecord], code: Mapping[str, str]
) -> None:
    """Write the file that lists the current scores of a run.

    Args:
        path: path of the file `OF_RUN`, `OF_CELL` or `OF_OUTSIDE` in the run's folder.
        setting: roles of the rows as text, see `setting_text`.
        scores: the current scores, in order.
        code: digests of the code that produced the scores, by `AttackJob.code_key`.
    """
    listed = [asdict(one) for one in scores]
    about = {"setting": setting, "code": dict(code), "scores": listed}
    write_json(path, stamp() | about)


def read_codes(path: Path) -> dict[str, str]:
    """Return the digests of the code that produced a file's scores, by `AttackJob.code_key`."""
    found = read_json(path).get("code", {}) if path.exists() else {}
    return {str(key): str(digest) for key, digest in found.items()}


def read_scores(path: Path, setting: str | None = None) -> list[ScoreRecord]:
    """Return the current scores in a file; empty if the scores belong to another setting.

    Raises:
        RunFolderError: the file is damaged, or has another format.
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
        record.setdefault("also", [])  # files of old versions with one measure per attack
        record.setdefault("access", "")
        record.setdefault("report", None)
    if not isinstance(record, dict) or set(record) != {field.name for field in fields(ScoreRecord)}:
        raise RunFolderError("a score is damaged", where=str(path))
    also = tuple((str(name), float(value), float(guess)) for name, value, guess in record["also"])
    return ScoreRecord(**record | {"also": also})
