"""Checks of a grid of attacks before any training: of its settings, and of its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

import torch

from vfl import compression
from vfl.attacks import Attack, Goal, Grant
from vfl.attacks.active import make_adversary
from vfl.attacks.cases import Part, codes_of, draw_leak, labels_of, require_column
from vfl.config import Experiment, GridSettings
from vfl.config.toml import Mistake, mistakes_of, raise_mistakes
from vfl.config.validate import idle_in_grid, of_idle
from vfl.core.errors import ExposedCutError, TooFewRowsError, UserError
from vfl.core.registry import parse
from vfl.core.seeds import generator
from vfl.datasets import PartyData
from vfl.experiments.attack_runner import start_adversary
from vfl.experiments.cells import HONEST
from vfl.experiments.scenarios import (
    COLLUSION,
    PREDICTIONS,
    QUERIES_ATTRIBUTE,
    RECORDED_QUERIES,
    SECURE_SUM,
    SERVER,
    SNAPSHOTS,
    TRAINING_COLLUSION,
    TRAINING_TIME,
    Cases,
    Scenario,
    attacker_of,
    kind_of_cases,
    known_rows,
    scenarios_of,
)
from vfl.session.secure_mode import shared_bottom_error, shares_weights
from vfl.session.trace import trace_of_masked_cuts
from vfl.training.run import session_of


def check_attacks(experiment: Experiment, settings: GridSettings) -> None:
    """Raise an error for attacks that cannot run, before the grid trains a model.

    Raises:
        ConfigError: a feature party does not exist, or the settings have several of the mistakes
            below.
        SpecError: an attack or an adversary cannot be built.
        UserError: no attacker of this grid can have the evidence that an attack needs.
        ExposedCutError: an attack reads recorded frames, but the training adds cuts under masks, so
            no frame has a cut.
    """
    raise_mistakes(mistakes_of(_settings_mistakes(experiment, settings)))


def check_grid(experiment: Experiment, settings: GridSettings) -> None:
    """Run `check_attacks`, and reject settings that no attack of the grid uses.

    Raises:
        ConfigError, SpecError, UserError, ExposedCutError: see `check_attacks`.
    """
    found = list(_settings_mistakes(experiment, settings))
    read = set[str]()
    active = [make_adversary(spec) for spec in settings.trainings if spec != HONEST]
    scenarios = [scenario for _, scenario in scenarios_of(settings).values()]
    scenarios += [RECORDED_QUERIES for one in active if isinstance(one, Attack)]
    for scenario in scenarios:
        if scenario.attacker == "label party":
            read |= {"attribute"} if scenario.attribute else {"reconstructions"}
            read.add("known_columns")
    raise_mistakes(mistakes_of([*found, *of_idle(idle_in_grid(settings, read))]))


def _settings_mistakes(experiment: Experiment, settings: GridSettings) -> Iterator[UserError]:
    """Yield the mistakes in a grid's settings; yield at most one mistake per attack.

    Raises:
        ConfigError, SpecError, UserError, ExposedCutError: a setting of the grid prevents every
            attack.
    """
    party = attacker_of(experiment, settings)
    planned = scenarios_of(settings, experiment.label.party in experiment.parties)
    for spec, (attack, scenario) in planned.items():
        mistakes = _scenario_mistakes(scenario, spec, attack, experiment, settings, party)
        yield from islice(mistakes, 1)
    if len(_like(experiment, settings)) < len(settings.models):
        yield UserError(
            "all models of a grid must be of the kind that the setting 'model' has",
            where="grid.models",
            got=", ".join(settings.models),
            want=f"specs of '{parse(experiment.secure)[0]}', the kind of the setting 'model'",
        )
    if settings.record and kind_of_cases(experiment).replays:
        yield UserError(
            "attacks on this model need no recording: its weights determine the frames",
            where="grid.record",
            fix="leave record out",
        )
    active = [spec for spec in settings.trainings if spec != HONEST]
    for spec in active:
        make_adversary(spec)
    if active and kind_of_cases(experiment) is not Cases:
        yield UserError(
            f"{active[0]} tampers with a bottom or a top, and this model has neither",
            where="grid.adversaries",
            fix="leave adversaries out",
        )
    if active and settings.trained_by == "owner":
        yield UserError(
            f"{active[0]} tampers with the training, which is impossible if one owner trains alone",
            where="grid.adversaries",
            fix="trained_by = 'split'",
        )


def _like(experiment: Experiment, settings: GridSettings) -> list[Experiment]:
    """Return victims that have the experiment's kind of model with other options."""
    name = parse(experiment.secure)[0]
    return [
        experiment.model_copy(update=settings.differs(one))
        for one in settings.models
        if parse(one)[0] == name
    ]


def _scenario_mistakes(
    scenario: Scenario,
    spec: str,
    attack: Attack,
    experiment: Experiment,
    settings: GridSettings,
    party: str,
) -> Iterator[UserError]:
    """Yield the reasons why no attacker of this grid can run a given attack.

    Raises:
        ExposedCutError: no attack can run, because no party has a bottom model.
    """
    if scenario == SECURE_SUM and experiment.secure == "none":
        yield UserError(
            f"{spec} subtracts cuts from a sum, but here the label party sees every cut",
            where="grid.attacks",
            fix="secure = 'sum', or only the inner attack of this spec",
        )
    kind = kind_of_cases(experiment)
    victims = experiment, *_like(experiment, settings)
    beyond = attack.needs - frozenset.intersection(*(kind.held(scenario, one) for one in victims))
    if beyond:
        listed = " and ".join(str(grant) for grant in Grant if grant in beyond)
        yield UserError(
            f"{spec} needs {listed}, which no attacker of this model has",
            where="grid.attacks",
            want="an attack that reads messages of this model",
        )
    if experiment.secure != "none" and scenario.records is not None and not kind.replays:
        why = f"recorded frames: {trace_of_masked_cuts().what}"
        if scenario == SNAPSHOTS:
            why = (
                "bottoms of every epoch, which a trace stores; with a secure sum there is no trace"
            )
        yield ExposedCutError(
            f"{spec} reads {why}",
            where="grid.attacks",
            want="secure = 'none', or an attack that needs no recording",
        )
    if kind is Cases and shares_weights(experiment):
        raise shared_bottom_error(party)
    if scenario in (COLLUSION, TRAINING_COLLUSION) and len(experiment.feature_parties) == 1:
        yield UserError(
            f"{spec} needs colluding feature parties, and there is only one",
            where="grid.attacks",
            fix="a second feature party",
        )
    if scenario.records in ("training", "snapshots") and settings.trained_by == "owner":
        yield UserError(
            f"{spec} needs a recorded training, and an owner that trains alone sends no frames",
            where="grid.attacks",
            fix="trained_by = 'split'",
        )
    if attack.needs & {Grant.TOP, Grant.OTHERS_TOP}:
        own = {experiment.label.party} if Grant.INPUTS in attack.needs else set()
        found, wanted = set(experiment.parties), {party} | own
        # an attack through the top must know the cuts of all parties that feed the top
        if found != wanted:
            yield UserError(
                f"{spec} needs a top model without cuts of further parties",
                where="grid.attacks",
                got=f"columns of {', '.join(sorted(found))}",
                want=f"columns of {', '.join(sorted(wanted))}",
            )


def grid_mistakes(
    experiment: Experiment, settings: GridSettings, data: Mapping[str, PartyData]
) -> Iterator[Mistake]:
    """Yield the errors with which a cell of a grid would stop.

    Args:
        experiment: the experiment to train; another seed may split the rows differently.
        settings: settings of the grid, which define defenses, adversaries and attacks.
        data: data of every party.

    Raises:
        UserError: an attack cannot run with any setting of the grid; see `attack_mistakes`.
    """
    yield from attack_mistakes(experiment, settings, data)
    for spec, (_, scenario) in scenarios_of(settings).items():
        if scenario == SERVER:
            yield (
                ("grid", "attacks"),
                UserError(
                    f"{spec} is an attack by the server of a U-shape, which vfl.split makes",
                    fix="vfl.attack(vfl.split(network, [first, second], example), loader)",
                ),
            )
    changed = {"defenses": settings.defenses, "codecs": settings.codecs, "models": settings.models}
    for key, specs in changed.items():
        for spec in specs:
            victim = experiment.model_copy(update=settings.differs(spec))
            yield from _refusal(key, spec, partial(session_of, victim, data, "train"))
    party = attacker_of(experiment, settings)
    for spec in settings.adversaries:
        start = partial(start_adversary, spec, experiment, data, party, settings)
        yield from _refusal("adversaries", spec, start)


def attack_mistakes(
    experiment: Experiment, settings: GridSettings, data: Mapping[str, PartyData]
) -> Iterator[Mistake]:
    """Yield those mistakes of `grid_mistakes` that would stop any single victim.

    Raises:
        TooFewRowsError: there are no test rows.
        UserError: the attacking party is no feature party.
    """
    require_test_rows(experiment, data)
    party, label = attacker_of(experiment, settings), data[experiment.label.party]
    labels, classes = labels_of(label)
    width = compression.make(experiment.codec).wire_width(experiment.parties[party].width)
    planned = scenarios_of(settings)
    for spec, (attack, scenario) in planned.items():
        knows = not kind_of_cases(experiment).replays
        check = partial(_check_attack, attack, scenario, classes, width, data[party], knows)
        yield from _refusal("attacks", spec, check)
    leaking = {one for attack, one in planned.values() if Grant.LEAKED in attack.needs}
    for part in {"train" if one == TRAINING_TIME else settings.leaks_from for one in leaking}:
        rows = torch.from_numpy(getattr(label.split, part))
        leak = partial(
            draw_leak, codes_of(labels[rows], classes), max(settings.leaks), generator(0), classes
        )
        yield from _refusal("leaks", "", leak)
    if any(one.by_cuts for _, one in planned.values()):
        yield from _refusal(
            "unlabelled", "", partial(_check_unlabelled, settings.unlabelled, label)
        )
    if any(one.attribute for _, one in planned.values()):
        inputs = data[party].inputs
        assert inputs is not None
        columns = math.prod(inputs.shape[1:])
        yield from _refusal("attribute", "", partial(require_column, columns, settings.attribute))


def check_attacks_fit(
    experiment: Experiment, settings: GridSettings, data: Mapping[str, PartyData]
) -> None:
    """Reject attacks that cannot run on this victim, before the victim is trained.

    Raises:
        UserError: an attack cannot run; the error is the first of `attack_mistakes`.
    """
    for setting, mistake in attack_mistakes(experiment, settings, data):
        mistake.where = mistake.where or ".".join(setting)
        raise mistake


def require_test_rows(experiment: Experiment, data: Mapping[str, PartyData]) -> None:
    """Reject data without test rows.

    Raises:
        TooFewRowsError: there are no test rows.
    """
    if not len(data[experiment.label.party].split.test):
        raise TooFewRowsError(
            "a study or an attack needs test rows", where="data.test", want="data.test > 0"
        )


#: Goals that are meaningless for class labels, and goals that are meaningless for numeric labels.
_OF_TASK: tuple[tuple[Goal, ...], ...] = (("values",), ("labels", "clusters", "scores"))


def _check_attack(
    attack: Attack, scenario: Scenario, classes: int, width: int, own: PartyData, validates: bool
) -> None:
    """Reject an attack whose goal is meaningless for the labels, or whose attacker knows no rows.

    Args:
        attack: the attack.
        scenario: the attack's scenario.
        classes: number of classes of the labels; 1 if labels are numbers.
        width: width of the cut as the messages contain it.
        own: data of the attacked party.
        validates: whether the attacking label party knows validation rows (and not training rows).
    """
    if not scenario.attribute and attack.goal in _OF_TASK[classes == 1]:
        raise UserError(
            "this attack infers classes, but the labels here are numbers"
            if classes == 1
            else "this attack infers numbers, but the labels here are classes",
            fix="the pack numbers" if classes == 1 else "the pack light",
        )
    if validates and scenario in (RECORDED_QUERIES, QUERIES_ATTRIBUTE, SECURE_SUM):
        known_rows(own.split, "a label party")
    if scenario == PREDICTIONS and Grant.LEAKED_INPUTS in attack.needs:
        known_rows(own.split, "an outsider")
    attack.check(2 if scenario.attribute else classes, width)


def _check_unlabelled(part: Part, label: PartyData) -> None:
    """Reject a split without rows as the source of the attacker's unlabelled rows."""
    if not len(getattr(label.split, part)):
        raise TooFewRowsError(
            f"the attacker's unlabelled rows are the {part} rows, but there are none",
            want=f"data.{part} > 0, or unlabelled = 'test'",
        )


def _refusal(key: str, spec: str, attempt: Callable[[], object]) -> Iterator[Mistake]:
    """Yield the error of a failed attempt as a mistake; the error's message names the spec."""
    try:
        attempt()
    except UserError as error:
        error.what = f"{spec}: {error.what}" if spec else error.what
        yield ("grid", key), error
