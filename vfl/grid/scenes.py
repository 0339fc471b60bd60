"""Scenes: which threat model an attack is tried under, and what it asks to be recorded."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from vfl import attacks
from vfl.attacks import Attack, Goal, Grant
from vfl.attacks.active import make_adversary
from vfl.attacks.attribute_case import ATTRIBUTE
from vfl.attacks.columns_case import OWN_COLUMNS
from vfl.attacks.queried_case import QUERYING
from vfl.attacks.recorded_case import RECALLING, RECEIVING, TRAINING
from vfl.attacks.summed_case import SUMMING
from vfl.attacks.threat import Who
from vfl.attacks.victim import INFERENCE
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.errors import ExposedCutError, RunFolderError, UserError
from vfl.exchange.exposure import shares_weights
from vfl.exchange.shared_exposure import nobodys_bottom
from vfl.grid.trials import OUTCOME, TRAINED
from vfl.trace import read, trace_of_masked_cuts

#: "asked": a feature party once the network is in use, "kept" with its bottoms of every epoch,
#: "pooled" with all other feature parties; "heard": one that recorded the training. "received": a
#: label party that recorded the last queries, "recalled" one that recorded the training, and either
#: after an attribute; "summed": one that learned sums and all feature parties but the victim tell
#: it their cuts. "queried": an outsider that asks for predictions.
Scene = Literal[
    "asked", "kept", "pooled", "heard",
    "received", "recalled", "received attribute", "recalled attribute", "summed",
    "queried",
]  # fmt: skip
ATTACKERS: dict[Scene, Who] = {
    "asked": "feature party",
    "kept": "feature party",
    "pooled": "feature party",
    "heard": "feature party",
    "received": "label party",
    "recalled": "label party",
    "received attribute": "label party",
    "recalled attribute": "label party",
    "summed": "label party",
    "queried": "outsider",
}
#: What a feature party does with bottoms, so that it could be done with label-free ones as well.
BY_CUTS: frozenset[Scene] = frozenset({"asked", "kept", "pooled"})
#: What reads what a feature party sent and got while it trained; what reads the last queries.
_OF_TRAINING: frozenset[Scene] = frozenset({"heard", "kept", "recalled", "recalled attribute"})
_OF_QUERIES: frozenset[Scene] = frozenset({"received", "received attribute"})
#: Where a party's recording lies in a run folder.
_TRACES = "parties/*/trace"
_OF_LABELS: tuple[Goal, ...] = ("labels", "clusters", "scores")


def scene_of(attack: Attack, spec: str, own_columns: bool = False) -> Scene:
    """The scene of an attack.

    Args:
        attack: what it needs decides.
        spec: its spec, for the message.
        own_columns: whether the label party has columns of its own.

    Raises:
        UserError: no party of a grid holds all it needs.
    """
    granted = granted_in(own_columns)
    for scene, goals, grants in granted:
        if attack.goal in goals and attack.needs <= grants:
            return scene
    near = [grants for _, goals, grants in granted if attack.goal in goals]
    beyond = attack.needs - frozenset().union(*near)
    raise UserError(
        f"no attacker of a grid has what {spec} needs",
        got=", ".join(str(grant) for grant in Grant if grant in (beyond or attack.needs)),
        fix="build its case in Python: vfl.attacks.case.attempt",
    )


def granted_in(own_columns: bool) -> list[tuple[Scene, tuple[Goal, ...], frozenset[Grant]]]:
    """Every scene, the goals of its attacks, and what its attacker holds.

    Args:
        own_columns: whether the label party has columns of its own.
    """
    own = OWN_COLUMNS if own_columns else frozenset()
    return [
        ("asked", _OF_LABELS, INFERENCE),
        ("heard", _OF_LABELS, TRAINING),
        ("kept", _OF_LABELS, INFERENCE | {Grant.SNAPSHOTS}),
        ("pooled", _OF_LABELS, INFERENCE | {Grant.PARTNERS}),
        ("received", ("inputs",), RECEIVING | own),
        ("recalled", ("inputs",), RECALLING | own),
        ("summed", ("inputs",), SUMMING),
        ("received attribute", ("labels",), ATTRIBUTE | {Grant.QUERIES}),
        ("recalled attribute", ("labels",), ATTRIBUTE | {Grant.EPOCHS}),
        ("queried", ("scores",), QUERYING),
    ]


def scene_of_trial(spec: str, bottom: str = TRAINED) -> Scene | None:
    """The scene of a trial; None for what an adversary reached without any recording."""
    if bottom != OUTCOME:
        return scene_of(attacks.make(spec), spec, own_columns=True)
    return "received" if isinstance(make_adversary(spec), Attack) else None


def recorded_phases(scenes: Iterable[Scene | None]) -> TraceSettings:
    """What a training records for these scenes; nothing unless they need it."""
    known = set(scenes)
    train = ("train",) if known & _OF_TRAINING - {"kept"} else ()
    asked = ("validation", "test") if known & _OF_QUERIES else ()
    return TraceSettings(phases=(*train, *asked), snapshots=int("kept" in known))


def is_recorded(path: Path, wanted: TraceSettings) -> bool:
    """Whether a run folder has recordings of all these phases, and snapshots if they are wanted."""
    if not wanted.enabled:
        return True
    found = [read(trace).settings for trace in path.glob(_TRACES)]
    return bool(found) and all(
        set(wanted.phases) <= set(one.phases) and one.snapshots >= wanted.snapshots for one in found
    )


def options_of(trace: TraceSettings) -> list[str]:
    """The settings that ask for a recording, as `-s` takes them."""
    asked = []
    if phases := trace.phases:
        asked = [f"trace.phases={phases[0] if len(phases) == 1 else json.dumps(phases)}"]
    if trace.snapshots:
        asked.append(f"trace.snapshots={trace.snapshots}")
    return asked


def require_recorded(path: Path, specs: Iterable[str]) -> None:
    """Refuse attacks that read what a run did not record.

    Args:
        path: the run's folder.
        specs: the attacks.

    Raises:
        RunFolderError: with the setting that records it.
    """
    lacking = [
        spec for spec in specs if not is_recorded(path, recorded_phases([scene_of_trial(spec)]))
    ]
    if lacking:
        wanted = recorded_phases(map(scene_of_trial, lacking))
        options = " ".join(f"-s {shlex.quote(one)}" for one in options_of(wanted))
        kept = [*wanted.phases, *(["bottoms"] * wanted.snapshots)]
        raise RunFolderError(
            f"{', '.join(lacking)} would read what this run did not record",
            where=str(path),
            want=f"a recording of {' and '.join(kept)}",
            fix=f"vfl train with {options}, and attack that run",
        )


def check_scenes(
    experiment: Experiment, settings: GridSettings, made: Mapping[str, Attack], party: str
) -> None:
    """Refuse attacks that no attacker of this grid could run.

    Args:
        experiment: what is trained.
        settings: of the grid.
        made: the attacks by spec.
        party: the feature party.

    Raises:
        UserError: with the attack, and what it needs.
        ExposedCutError: it reads what is recorded, of a training that sums cuts under masks.
    """
    own_columns = experiment.label.party in experiment.parties
    for spec, attack in made.items():
        scene = scene_of(attack, spec, own_columns)
        if scene == "summed" and experiment.secure == "none":
            raise UserError(
                f"{spec} takes cuts off a sum, and the label party sees every cut",
                where="grid.attacks",
                fix="secure = 'sum', or the attack by itself",
            )
        if experiment.secure != "none":
            _check_masked(spec, scene)
        if shares_weights(experiment):
            raise nobodys_bottom(party)
        if scene == "pooled" and len(experiment.feature_parties) == 1:
            raise UserError(
                f"{spec} needs feature parties that collude, and there is one alone",
                where="grid.attacks",
                fix="a second feature party",
            )
        if scene in _OF_TRAINING and settings.trained_by == "owner":
            raise UserError(
                f"{spec} needs the training, and where the owner trained alone nobody saw it",
                where="grid.attacks",
                fix="trained_by = 'split'",
            )
        if ATTACKERS[scene] == "label party" and Grant.TOP in attack.needs:
            own = {experiment.label.party} if Grant.INPUTS in attack.needs else set()
            _check_feeders(spec, set(experiment.parties), {party} | own)


def _check_masked(spec: str, scene: Scene) -> None:
    """Refuse an attack that reads a recording, where cuts are summed under masks."""
    if scene not in _OF_TRAINING | _OF_QUERIES:
        return
    why = f"recorded frames: {trace_of_masked_cuts().what}"
    if scene == "kept":
        why = "bottoms of every epoch: a trace keeps them, and under a secure sum none is written"
    raise ExposedCutError(
        f"{spec} reads {why}",
        where="grid.attacks",
        want="secure = 'none', or an attack that reads nothing recorded",
    )


def _check_feeders(spec: str, found: set[str], wanted: set[str]) -> None:
    """An attack through the top stands for all who feed it."""
    if found != wanted:
        raise UserError(
            f"{spec} needs a top that nobody else feeds",
            where="grid.attacks",
            got=f"columns of {', '.join(sorted(found))}",
            want=f"columns of {', '.join(sorted(wanted))}",
        )
