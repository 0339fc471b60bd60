"""What of a grid does not fit its rows, told before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from vfl import attacks, compression
from vfl.attacks import Attack, Grant
from vfl.attacks.attribute_case import require_column
from vfl.attacks.leak import draw_leak
from vfl.attacks.victim import Part, classes_of
from vfl.config import Experiment, GridSettings
from vfl.datasets import PartyData
from vfl.errors import TooFewRowsError, UserError
from vfl.grid.outcomes import begun
from vfl.grid.recordings import known_rows
from vfl.grid.scenes import Scene, scene_of
from vfl.grid.victims import attacker_of
from vfl.run import session_of
from vfl.seeds import generator

#: Whose attackers hold rows without labels, whether an attack reads them or not.
_IN_USE: frozenset[Scene] = frozenset({"asked", "kept", "pooled"})
#: A setting, and what is wrong with it.
Misfit = tuple[tuple[str, ...], UserError]


def misfits(
    experiment: Experiment, settings: GridSettings, data: Mapping[str, PartyData]
) -> Iterator[Misfit]:
    """Everything that would stop a cell of a grid, in the words in which the cell would say it.

    Args:
        experiment: what is trained; with another seed rows may be split otherwise.
        settings: what it is trained with and against, and what attacks it.
        data: every party's rows.

    Raises:
        UserError: what no setting of a grid could mend; see `attempt_misfits`.
    """
    yield from attempt_misfits(experiment, settings, data)
    for key, specs in (("defenses", settings.defenses), ("codecs", settings.codecs)):
        for spec in specs:
            victim = experiment.model_copy(update=settings.differs(spec))
            yield from _refusal(key, spec, partial(session_of, victim, data, "train"))
    party = attacker_of(experiment, settings)
    for spec in settings.adversaries:
        told = partial(begun, spec, experiment, data, party, settings)
        yield from _refusal("adversaries", spec, told)


def attempt_misfits(
    experiment: Experiment, settings: GridSettings, data: Mapping[str, PartyData]
) -> Iterator[Misfit]:
    """The part of `misfits` that a single victim, whatever its defense, would be stopped by.

    Raises:
        TooFewRowsError: there are no test rows.
        UserError: a regression, or no feature party of that name.
    """
    require_test_rows(experiment, data)
    party, label = attacker_of(experiment, settings), data[experiment.label.party]
    labels, classes = classes_of(label)
    width = compression.make(experiment.codec).wire_width(experiment.parties[party].width)
    made = {spec: attacks.make(spec) for spec in settings.attack_specs}
    scenes = {spec: scene_of(one, spec, own_columns=True) for spec, one in made.items()}
    for spec, attack in made.items():
        check = partial(_check, attack, scenes[spec], classes, width, data[party])
        yield from _refusal("attacks", spec, check)
    leaking = {scenes[spec] for spec, attack in made.items() if Grant.LEAKED in attack.needs}
    for part in {"train" if scene == "heard" else settings.leaks_from for scene in leaking}:
        rows = torch.from_numpy(getattr(label.split, part))
        leak = partial(draw_leak, labels[rows], max(settings.leaks), generator(0), classes)
        yield from _refusal("leaks", "", leak)
    if _IN_USE & set(scenes.values()):
        yield from _refusal("unlabelled", "", partial(_unlabelled, settings.unlabelled, label))
    if any("attribute" in scene for scene in scenes.values()):
        inputs = data[party].inputs
        assert inputs is not None
        columns = math.prod(inputs.shape[1:])
        yield from _refusal("attribute", "", partial(require_column, columns, settings.attribute))


def check_attempts(
    experiment: Experiment, settings: GridSettings, data: Mapping[str, PartyData]
) -> None:
    """Refuse attacks that this victim could not meet, before it is trained.

    Raises:
        UserError: the first of `attempt_misfits`.
    """
    for setting, misfit in attempt_misfits(experiment, settings, data):
        misfit.where = misfit.where or ".".join(setting)
        raise misfit


def require_test_rows(experiment: Experiment, data: Mapping[str, PartyData]) -> None:
    """Refuse rows of which none are for testing.

    Raises:
        TooFewRowsError: there are none.
    """
    if not len(data[experiment.label.party].split.test):
        raise TooFewRowsError(
            "nothing can be compared without test rows", where="data.test", want="data.test > 0"
        )


def _check(attack: Attack, scene: Scene, classes: int, width: int, own: PartyData) -> None:
    """Refuse an attack that has no meaning for the task, or whose attacker knows no row."""
    if scene in ("received", "received attribute", "summed"):
        known_rows(own.split, "a label party")
    if scene == "queried" and Grant.LEAKED_INPUTS in attack.needs:
        known_rows(own.split, "an outsider")
    attack.check(2 if "attribute" in scene else classes, width)


def _unlabelled(part: Part, label: PartyData) -> None:
    """Refuse an attacker that is to hold rows without labels where there are none."""
    if not len(getattr(label.split, part)):
        raise TooFewRowsError(
            f"a feature party in use holds {part} rows without labels, and there are none",
            want=f"data.{part} > 0, or unlabelled = 'test'",
        )


def _refusal(key: str, spec: str, attempt: Callable[[], object]) -> Iterator[Misfit]:
    """What stops an attempt, if anything does; the message says of which spec."""
    try:
        attempt()
    except UserError as error:
        error.what = f"{spec}: {error.what}" if spec else error.what
        yield ("grid", key), error
