"""Scenarios: threat models of attacks, the recordings that they need, and their cases."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from vfl import attacks
from vfl.attacks import Attack, Goal, Grant
from vfl.attacks.active import make_adversary
from vfl.attacks.cases import (
    ATTRIBUTE,
    INFERENCE,
    OWN_COLUMNS,
    QUERYING,
    RECALLING,
    RECEIVING,
    SERVING,
    SUMMING,
    TRAINING,
    Queried,
    Setting,
    TrainedParts,
    Victim,
    attribute_case,
    queried_case,
    recalled_case,
    received_case,
    summed_case,
    training_case,
)
from vfl.attacks.scoring import Case, seeking
from vfl.attacks.transcript import SentCuts
from vfl.attacks.view import Who
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.config.grid import PACKS, Records
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    ConfigError,
    RunFolderError,
    TooFewRowsError,
    UnknownNameError,
    UserError,
    nearest,
)
from vfl.core.products import cases
from vfl.core.registry import named, parse
from vfl.core.seeds import generator
from vfl.datasets import PartyData, Split
from vfl.experiments.scores import OUTCOME, TRAINED
from vfl.session import Adversary, PartyFolder
from vfl.session.trace import Replayed, read
from vfl.training.run import AnySession, session_of, trained

_OF_LABELS: tuple[Goal, ...] = ("labels", "values", "clusters", "scores")


@dataclass(frozen=True)
class Scenario:
    """One kind of attacker in a grid, with its knowledge.

    Attributes:
        name: name of the scenario.
        attacker: role of the attacking party.
        goals: goals that attacks of this scenario may have.
        grants: grants (kinds of evidence) that the attacker has.
        records: recording of the training that attacks of this scenario use; None if they use no
            recording.
        own_columns: whether the label party may have its own columns as evidence.
        attribute: whether attacks of this scenario infer an attribute of the feature party.
        by_cuts: whether attacks use outputs of bottom models, so that bottom models trained without
            labels give a baseline.
    """

    name: str
    attacker: Who
    goals: tuple[Goal, ...]
    grants: frozenset[Grant]
    records: Records | None = None
    own_columns: bool = False
    attribute: bool = False
    by_cuts: bool = False


#: Scenarios with a feature party as attacker: at inference time; with its bottom model of every
#: epoch; together with all other feature parties; with a recording of the training; and together
#: with all others with this recording.
INFERENCE_TIME = Scenario(
    "inference", "feature party", _OF_LABELS, INFERENCE | {Grant.PROTOCOL}, by_cuts=True
)
SNAPSHOTS = Scenario(
    "snapshots", "feature party", _OF_LABELS, INFERENCE | {Grant.SNAPSHOTS}, "snapshots",
    by_cuts=True,
)  # fmt: skip
COLLUSION = Scenario(
    "collusion", "feature party", _OF_LABELS, INFERENCE | {Grant.PARTNERS}, by_cuts=True
)
TRAINING_TIME = Scenario(
    "training", "feature party", _OF_LABELS, TRAINING | {Grant.PROTOCOL}, "training"
)
TRAINING_COLLUSION = Scenario(
    "training collusion", "feature party", _OF_LABELS, TRAINING | {Grant.PARTNERS}, "training"
)
#: Scenarios with the label party as attacker: with recorded queries; with a recorded training; with
#: either recording, to infer an attribute; and a label party that receives only sums and colludes
#: with all other feature parties.
RECORDED_QUERIES = Scenario(
    "recorded queries", "label party", ("inputs", "tokens"), RECEIVING, "queries", own_columns=True
)
RECORDED_TRAINING = Scenario(
    "recorded training",
    "label party",
    ("inputs", "tokens"),
    RECALLING | {Grant.PROTOCOL},
    "training",
    own_columns=True,
)
QUERIES_ATTRIBUTE = Scenario(
    "attribute from queries", "label party", ("labels",), ATTRIBUTE | {Grant.QUERIES}, "queries",
    attribute=True,
)  # fmt: skip
TRAINING_ATTRIBUTE = Scenario(
    "attribute from training", "label party", ("labels",), ATTRIBUTE | {Grant.EPOCHS}, "training",
    attribute=True,
)  # fmt: skip
SECURE_SUM = Scenario("secure sum", "label party", ("inputs",), SUMMING)
#: Scenario with an outsider as attacker, who requests predictions.
PREDICTIONS = Scenario("predictions", "outsider", ("scores",), QUERYING)
#: Scenario with the party in the middle of a caller's U-shaped module as attacker.
SERVER = Scenario("server of a U-shape", "label party", ("inputs", "labels"), SERVING)
#: All scenarios in order; an attack belongs to the first scenario that grants all evidence the
#: attack needs.
SCENARIOS = (
    INFERENCE_TIME, TRAINING_TIME, SNAPSHOTS, COLLUSION, TRAINING_COLLUSION, RECORDED_QUERIES,
    RECORDED_TRAINING, SECURE_SUM, QUERIES_ATTRIBUTE, TRAINING_ATTRIBUTE, PREDICTIONS, SERVER,
)  # fmt: skip
#: Relative paths of the parties' recordings in a run folder.
_TRACES = "parties/*/trace"


def scenario_of(attack: Attack, spec: str, own_columns: bool = False) -> Scenario:
    """Return the scenario (kind of attacker) of an attack.

    Args:
        attack: the attack, whose needed grants determine the scenario.
        spec: spec of the attack, for error messages.
        own_columns: whether the label party has its own columns.

    Raises:
        UserError: no attacker of a grid has all grants that the attack needs.
    """
    granted = [
        (one, one.grants | (OWN_COLUMNS if own_columns and one.own_columns else frozenset()))
        for one in SCENARIOS
        if attack.goal in one.goals
    ]
    for scenario, grants in granted:
        if attack.needs <= grants:
            return scenario
    beyond = attack.needs - frozenset().union(*(grants for _, grants in granted))
    raise UserError(
        f"no attacker of a grid has the data that {spec} needs",
        got=", ".join(str(grant) for grant in Grant if grant in (beyond or attack.needs)),
        fix="build its case in Python: vfl.attacks.scoring.attempt",
    )


def scenarios_of(
    settings: GridSettings, own_columns: bool = True
) -> dict[str, tuple[Attack, Scenario]]:
    """Return the attacks of a grid by spec, each with its scenario; see `scenario_of`."""
    made = {spec: _made(spec) for spec in settings.attack_specs}
    return {spec: (one, scenario_of(one, spec, own_columns)) for spec, one in made.items()}


def _made(spec: str) -> Attack:
    """Build an attack from its spec; for an unknown name, the error also lists packs of attacks."""
    try:
        return attacks.make(spec)
    except UnknownNameError as error:
        error.fix = error.fix or nearest(spec, PACKS)
        raise


def scenario_of_job(spec: str, bottom: str = TRAINED) -> Scenario | None:
    """Return an attack job's scenario; None for an adversary's result that needs no recording."""
    if bottom != OUTCOME:
        return scenario_of(attacks.make(spec), spec, own_columns=True)
    return RECORDED_QUERIES if isinstance(make_adversary(spec), Attack) else None


def trace_for(
    scenarios: Iterable[Scenario | None], besides: Sequence[Records] = ()
) -> TraceSettings:
    """Return the recordings that a training must make for these scenarios and for later attacks."""
    wanted = {one.records for one in scenarios if one is not None} | set(besides)
    train = ("train",) if "training" in wanted else ()
    asked = ("validation", "test") if "queries" in wanted else ()
    return TraceSettings(phases=(*train, *asked), snapshots=int("snapshots" in wanted))


def is_recorded(path: Path, wanted: TraceSettings) -> bool:
    """Return whether a run folder contains the requested recordings and snapshots."""
    if not wanted.enabled:
        return True
    found = [read(trace).settings for trace in path.glob(_TRACES)]
    return bool(found) and all(
        set(wanted.phases) <= set(one.phases) and one.snapshots >= wanted.snapshots for one in found
    )


def options_of(trace: TraceSettings) -> list[str]:
    """Return the settings that turn on a recording, as arguments for `-s`."""
    asked = []
    if phases := trace.phases:
        asked = [f"trace.phases={phases[0] if len(phases) == 1 else json.dumps(phases)}"]
    if trace.snapshots:
        asked.append(f"trace.snapshots={trace.snapshots}")
    return asked


def require_recorded(path: Path, specs: Iterable[str]) -> None:
    """Reject attacks that need a recording which the run's training did not make.

    Args:
        path: folder of the run.
        specs: the attacks.

    Raises:
        RunFolderError: a recording is missing; the error contains the setting that turns it on.
    """
    if kind_of_cases(RunFolder(path).experiment()).replays:
        return
    lacking = [spec for spec in specs if not is_recorded(path, trace_for([scenario_of_job(spec)]))]
    if lacking:
        wanted = trace_for(map(scenario_of_job, lacking))
        options = " ".join(f"-s {shlex.quote(one)}" for one in options_of(wanted))
        missing = [*wanted.phases, *(["bottoms"] * wanted.snapshots)]
        raise RunFolderError(
            f"{', '.join(lacking)} needs a recording that this run does not have",
            where=str(path),
            want=f"a recording of {' and '.join(missing)}",
            fix=f"vfl train with {options}, and attack that run",
        )


#: Number of queries that an attacking label party makes for the same rows.
_TIMES = 16
#: Number of training rows, and number of test rows, whose membership attacks infer.
_MEMBERS = 1000


def kind_of_cases(experiment: Experiment) -> type[Cases]:
    """Return the class that builds the cases of attacks on an experiment's runs."""
    path = cases().get(parse(experiment.secure)[0])
    return Cases if path is None else cast(type[Cases], named(path))


def attacker_of(experiment: Experiment, settings: GridSettings) -> str:
    """Return the feature party that attacks, or that the label party attacks.

    Raises:
        ConfigError: the settings' party is no feature party of the experiment.
    """
    known = experiment.feature_parties
    party = settings.party or known[0]
    if party not in known:
        raise ConfigError(
            "no feature party has that name", where="grid.party", got=party, want=", ".join(known)
        )
    return party


def setting_of(settings: GridSettings) -> Setting:
    """Return the roles of rows (leaked, unlabelled, target) for attacks by a feature party."""
    return Setting("test", settings.leaks_from, settings.unlabelled, settings.trained_by)


class Cases:
    """The cases of attacks on one victim; recorded frames are decoded only once.

    Products, such as `vfl.trees`, define subclasses for their own models.

    Args:
        experiment: experiment of the victim's training.
        data: data of every party.
        settings: settings of the grid, which define attackers, their knowledge, and the inferred
            attribute.
        folder: folder of the victim's finished run. None means untrained feature parties, whose
            bottom models are replaced by bottom models that were trained without labels, for
            baselines.

    Attributes:
        party: the feature party that attacks, or that the label party attacks.
        replays: whether a run's weights determine the sent frames, so that attacks need no
            recording.

    Raises:
        ConfigError: the attacker is no feature party of the experiment.
        RunFolderError: the run folder contains no weights.
    """

    replays: ClassVar[bool] = False

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        settings: GridSettings,
        folder: RunFolder | None = None,
    ) -> None:
        self.experiment, self.data, self.settings, self.folder = experiment, data, settings, folder
        self.party = attacker_of(experiment, settings)
        self._frames: dict[str, list[tuple[Replayed, Tensor]]] = {}
        self._begin()

    @classmethod
    def held(cls, scenario: Scenario, experiment: Experiment) -> frozenset[Grant]:
        """Return the grants that a scenario's attacker has on a kind of model.

        Args:
            scenario: the scenario.
            experiment: experiment of the victim's training.
        """
        own_columns = experiment.label.party in experiment.parties
        own = OWN_COLUMNS if own_columns and scenario.own_columns else frozenset()
        return (scenario.grants | own) - {Grant.PROTOCOL}

    def _begin(self) -> None:
        """Prepare the trained or untrained models that attacks on a network need."""
        begun = self.folder is None
        self._begun = session_of(self.experiment, self.data, "predict").weights() if begun else {}
        self.victim = self._victim(self.party)

    @property
    def weights_sha256(self) -> str:
        """Digest of the victim's weights, on which scores depend; empty for an untrained one."""
        return "" if self.folder is None else str(self.folder.summary()["weights_sha256"])

    def cuts(self, rows: Tensor) -> Tensor:
        """Return the cuts that the feature party sends for aligned rows, axes (rows, width)."""
        return self.victim.cuts(rows)

    def case(self, scenario: Scenario, k: int, draw: torch.Generator) -> Case:
        """Return the case of an attack for one draw of leaked or queried rows.

        Args:
            scenario: scenario (kind of attacker) of the attack.
            k: number of leaked labels per class; the settings determine the number of rows with
                known columns.
            draw: random generator for the leaked or queried rows.

        Raises:
            RunFolderError: the run lacks the recording that the scenario needs.
            TooFewRowsError: a class has fewer rows than labels to leak.
            ConfigError: the feature party has no column with the number of the attribute.
        """
        others = [name for name in self.experiment.feature_parties if name != self.party]
        if scenario in (TRAINING_TIME, TRAINING_COLLUSION):
            return training_case(
                self.experiment, self.data, self._of(self.party, "train"), self.party, k, draw,
                partners=others if scenario == TRAINING_COLLUSION else (),
                others_top=self._top,
            )  # fmt: skip
        if scenario == PREDICTIONS:
            return self._queried(draw)
        if scenario == SECURE_SUM:
            return summed_case(self._parts(), self.party, others, self._leaks(), draw)
        if scenario.attacker == "feature party":
            snapshots = self._snapshots() if scenario == SNAPSHOTS else []
            partners = [self._victim(name) for name in others] if scenario == COLLUSION else []
            setting = setting_of(self.settings)
            return seeking(
                self.victim.case(k, draw, setting, snapshots=snapshots, partners=partners)
            )
        of_training = scenario.records == "training"
        columns = self._recalled(draw) if of_training else self._received(draw)
        if not scenario.attribute:
            return columns
        own = self.data[self.party]
        assert own.inputs is not None
        train = own.inputs[torch.from_numpy(own.split.train)]
        return attribute_case(columns, train, self.settings.attribute)

    def answers(
        self,
        data: Mapping[str, PartyData],
        rows: Tensor,
        adversaries: Mapping[str, Adversary] | None = None,
    ) -> Tensor:
        """Return the trained network's outputs for some rows of the given data.

        Args:
            data: data of every party, in which the rows are looked up.
            rows: positions among the aligned rows, int64.
            adversaries: dishonest parties, by party name.

        Returns:
            Outputs of the network, axes (rows, outputs).
        """
        return self.asked(data, rows, adversaries).outputs()

    def asked(
        self,
        data: Mapping[str, PartyData],
        rows: Tensor,
        adversaries: Mapping[str, Adversary] | None = None,
    ) -> AnySession:
        """Return a session in which the trained network answered queries; see `answers`."""
        assert self.folder is not None, "untrained networks have no queries"
        asked = {
            name: replace(own, split=replace(own.split, test=rows.numpy()))
            for name, own in data.items()
        }
        return trained(self.folder, asked, "predict", adversaries=adversaries).run()

    def _weights(self, name: str) -> dict[str, Tensor]:
        if self.folder is None:
            return self._begun[name]
        return PartyFolder(self.folder.party(name)).weights()

    def _parts(self) -> TrainedParts:
        weights = {name: self._weights(name) for name in self.data}
        return TrainedParts(self.experiment, self.data, weights)

    def _top(self) -> nn.Module:
        """Return the label party's trained top model."""
        return self._parts().top()

    def _victim(self, name: str) -> Victim:
        return Victim(self.experiment, self.data, name, self._weights(name))

    def _snapshots(self) -> list[dict[str, Tensor]]:
        """Return the bottom model's weights after each epoch (constant if untrained)."""
        if self.folder is None:
            return [self._weights(self.party)]
        recording = read(self.folder.party(self.party) / "trace")
        return [one.weights for one in recording.snapshots() if one.epoch > 0]

    def _received(self, draw: torch.Generator) -> Case:
        orders = generator(self.experiment.seed, "again")

        def again(rows: Tensor) -> list[SentCuts]:
            return self.victim.asked_again(rows, _TIMES, orders.clone_state())

        frames, leaks = self._of(self.experiment.label.party, None), self._leaks()
        return received_case(self._parts(), frames, self.party, leaks, draw, again)

    def _recalled(self, draw: torch.Generator) -> Case:
        train = self.data[self.party].split.train
        leaks = min(self.settings.known_columns, len(train) // 2)
        frames = self._of(self.experiment.label.party, None)
        return recalled_case(self._parts(), frames, self.party, leaks, draw)

    def _leaks(self) -> int:
        """Return the number of validation rows whose columns the attacking label party knows."""
        rows = known_rows(self.data[self.party].split, "a label party")
        return min(self.settings.known_columns, rows)

    def _queried(self, draw: torch.Generator) -> Case:
        split = self.data[self.party].split
        train, others, own = map(torch.from_numpy, (split.train, split.test, split.validation))
        count = min(_MEMBERS, len(train), len(others))
        members = train[torch.randperm(len(train), generator=draw)[:count]]
        others = others[torch.randperm(len(others), generator=draw)[:count]]
        rows = Queried(members, others, own)
        outputs = self.answers(self.data, rows.targets)
        return queried_case(self.experiment, self.shown(), rows, outputs)

    def shown(self) -> Mapping[str, PartyData]:
        """Return every party's data, encoded as numbers for neural networks."""
        return self.data

    def _of(self, owner: str, phase: str | None) -> list[tuple[Replayed, Tensor]]:
        if owner not in self._frames:
            assert self.folder is not None, "an untrained network has no recording"
            recording = read(self.folder.party(owner) / "trace")
            self._frames[owner] = list(recording.decoded(phase=phase))
        return self._frames[owner]


def known_rows(split: Split, who: str) -> int:
    """Return the number of rows, besides training and target rows, that an attacker may know.

    Args:
        split: split of the rows.
        who: the attacker's name for the error message.

    Raises:
        TooFewRowsError: the split has no rows besides training and target rows.
    """
    if not len(split.validation):
        raise TooFewRowsError(
            f"{who} knows columns of validation rows, but none exist",
            where="data.validation",
            want="data.validation > 0",
        )
    return len(split.validation)
