"""Runs attacks on a victim (attacked model): builds the case, scores the guess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vfl import attacks
from vfl.attacks import Attack, Evidence, Grant, ThreatModel, View
from vfl.attacks.active import ActiveAdversary, Backdoor, Triggering, make_adversary
from vfl.attacks.baselines import Kind, label_free_bottom, view_behind
from vfl.attacks.cases import begin
from vfl.attacks.scoring import Case, Score, guess_of, scores_of
from vfl.attacks.wrappers import Wrapper
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, NonFiniteError, SpecError
from vfl.core.seeds import generator
from vfl.datasets import PartyData
from vfl.defenses.purification import flagged_share
from vfl.experiments.cells import HONEST, code_of, data_digest, experiment_digest
from vfl.experiments.pictures import keep_pictures, kept_pictures
from vfl.experiments.scenarios import (
    INFERENCE_TIME,
    RECORDED_QUERIES,
    TRAINING_TIME,
    Cases,
    Scenario,
    kind_of_cases,
    scenario_of,
    setting_of,
)
from vfl.experiments.scores import OUTCOME, TRAINED, AttackJob, ScoreRecord, ScoresFile, key_of
from vfl.experiments.training import recording
from vfl.training.local import LocalSession
from vfl.training.run import load_adversary


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Result of one attack on one case.

    Attributes:
        scores: all measures for the attack's goal; the headline measure is the first.
        threat: threat model of the attack.
        true, found: true and reconstructed pictures, axes (targets, channels, height, width); None
            if the attack reconstructs no pictures.
        report: the attack's own report; see `Attack.last_report`.
    """

    scores: Sequence[Score]
    threat: ThreatModel
    true: Tensor | None = None
    found: Tensor | None = None
    report: Mapping[str, Any] | None = None


def run_attack(case: Case, attack: Attack, draw: torch.Generator) -> AttackResult:
    """Run an attack with only the grants (kinds of evidence) that it needs, and score its guess.

    Raises:
        NotGrantedError: the attack needs more grants than the threat model gives; the function does
            not run the attack.
        NonFiniteError: the attack's guess contains NaN or infinite values.
    """
    found = guess_of(case, attack, draw)
    scores = scores_of(case, attack.goal, found)
    threat = case.view.only(attack.needs).threat
    about = "attribute" if Grant.LEAKED_ATTRIBUTES in attack.needs else ""
    about = "membership" if threat.who == "outsider" else about
    if about:  # a measure called accuracy here is not the accuracy of inferred labels
        scores = [replace(one, measure=f"{about}_{one.measure}") for one in scores]
    if attack.goal != "inputs" or case.inputs is None or case.inputs.dim() != 4:
        return AttackResult(scores, threat, report=attack.last_report())
    return AttackResult(scores, threat, case.inputs, found, attack.last_report())


@dataclass(frozen=True, slots=True)
class FinishedAttack:
    """An attack that has just finished.

    Attributes:
        score: score record of the attack.
        done, total: number of attacks that have a score so far, and number of all attacks.
        left_s: estimated remaining seconds, if each remaining attack takes as long as the mean
            attack of this call.
    """

    score: ScoreRecord
    done: int
    total: int
    left_s: float


#: Name of a measure for a victim whose training ended because a party detected the adversary.
FOUND = "found_out"


def start_adversary(
    spec: str,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    settings: GridSettings,
) -> dict[str, ActiveAdversary]:
    """Return a training's adversary, by the adversary's party; empty if the training has none.

    Args:
        spec: spec of the adversary.
        experiment: the experiment that is trained.
        data: data of every party.
        party: feature party that is the adversary, or the target of a malicious label party.
        settings: settings of the grid.
    """
    if spec == HONEST:
        return {}
    adversary = make_adversary(spec)
    draw = generator(experiment.seed, "adversary")
    begin(adversary, experiment, data, party, settings.known, draw)
    return {party if adversary.who == "feature party" else experiment.label.party: adversary}


def measured_adversaries(settings: GridSettings, adversary: str) -> list[str]:
    """Return the adversaries to measure on a victim whose training had the adversary `adversary`.

    On an honest victim, the grid's adversaries are measured for comparison, if their result needs
    no part in the training.
    """
    if adversary == HONEST:
        others = [spec for spec in settings.trainings if spec != HONEST]
        return [spec for spec in others if _needs_no_part(make_adversary(spec))]
    made = make_adversary(adversary)
    return [adversary] if made.spoils or isinstance(made, Attack | Backdoor) else []


def detected(adversary: str, settings: GridSettings) -> ScoreRecord:
    """Return the score of an adversary that a party detected, so that the training stopped."""
    made = make_adversary(adversary)
    threat = ThreatModel(made.who, "training", made.holds, behaviour="malicious")
    about = {"adversary": adversary, "known": settings.known}
    return ScoreRecord(
        key=key_of(about), attack=adversary, bottom=OUTCOME, k=0, draw=0, measure=FOUND,
        value=1.0, guess=0.0, threat=threat.sentence(), seconds=0.0, access=threat.access,
    )  # fmt: skip


def _needs_no_part(adversary: ActiveAdversary) -> bool:
    return (isinstance(adversary, Backdoor) and not adversary.learns) or adversary.spoils


def adversary_result(cases: Cases, spec: str, draw: torch.Generator) -> AttackResult:
    """Return the measured success of one adversary on a finished run.

    The result has these measures, each with its value by guessing:

    - "backdoor": share of other classes' test rows that the model assigns to the adversary's class
      with the trigger; the guess is this share without the trigger.
    - "flagged", if a defense judges parties: share of the same test rows for which the defense
      flags the adversary's cut with the trigger; the guess is the share that is flagged without the
      trigger.
    - "error": share of wrong predictions on test rows; the guess is the error of the best constant
      prediction.
    - An adversary that is also an attack has the measures of this attack.
    """
    adversary, folder = make_adversary(spec), cases.folder
    assert folder is not None, "an adversary is measured by the run it took part in"
    if isinstance(adversary, Backdoor):
        held = frozenset({Grant.INPUTS})
        threat = ThreatModel("feature party", "inference", held, behaviour="malicious")
        if adversary.learns:
            adversary = _learned(cases, folder, spec)
            assert isinstance(adversary, Backdoor)
        return AttackResult(_backdoor_scores(cases, adversary), threat)
    if isinstance(adversary, Attack):  # the attack uses the cuts of the test rows
        attack = _learned(cases, folder, spec)
        assert isinstance(attack, Attack)
        case = cases.case(RECORDED_QUERIES, 0, generator(cases.experiment.seed, "leak", 0))
        return run_attack(case, attack, draw)
    held = frozenset({Grant.LABELS})
    threat = ThreatModel(adversary.who, "training", held, behaviour="malicious")
    label = cases.data[cases.experiment.label.party]
    assert label.labels is not None
    accuracy = folder.summary()["test_accuracy"]
    counts = label.labels[torch.from_numpy(label.split.test)].bincount()
    error = Score("error", 1 - accuracy, 1 - float(counts.max() / counts.sum()))
    return AttackResult([error], threat)


def _learned(cases: Cases, folder: RunFolder, spec: str) -> ActiveAdversary:
    """Return an adversary with the state that it had at the end of the run's training."""
    started = start_adversary(spec, cases.experiment, cases.data, cases.party, cases.settings)
    ((player, adversary),) = started.items()
    load_adversary(folder, player, adversary)
    return adversary


def _backdoor_scores(cases: Cases, adversary: Backdoor) -> list[Score]:
    label, own = cases.data[cases.experiment.label.party], cases.data[cases.party]
    assert label.labels is not None
    assert label.classes is not None
    assert own.inputs is not None
    if not 0 <= adversary.target < len(label.classes):
        raise ConfigError(
            "the backdoor's class is not a class of the task",
            where="grid.adversaries",
            got=f"target={adversary.target}",
            want=f"0 to {len(label.classes) - 1}",
        )
    test = torch.from_numpy(label.split.test)
    others = test[label.labels[test] != adversary.target]
    triggered = replace(own, inputs=adversary.triggered(own.inputs))
    with_trigger = {**cases.data, cases.party: triggered}
    playing = {cases.party: Triggering(adversary)}

    sessions = (cases.asked(with_trigger, others, playing), cases.asked(cases.data, others))

    def share(answers: Tensor) -> float:
        return float((answers.argmax(1) == adversary.target).double().mean())

    scores = [Score("backdoor", *(share(one.outputs()) for one in sessions))]
    flagged = [_flagged(one, cases.party) for one in sessions]
    if None not in flagged:
        scores.append(Score("flagged", *(one for one in flagged if one is not None)))
    return scores


def _flagged(session: object, party: str) -> float | None:
    """Return the share of a party's cuts that a defense flagged; None if no defense flags cuts."""
    if not isinstance(session, LocalSession):
        return None
    return flagged_share(session.label.model, list(session.terms.parties).index(party))


#: Modules that prepare a victim's evidence and score an attack; attacks with goals other than
#: labels depend on further modules (`_BESIDES`).
_BEHIND = ("vfl.attacks.scoring", "vfl.attacks.cases")
_BESIDES = ("vfl.experiments.attack_runner", "vfl.experiments.scenarios")
#: Modules that train bottom models without labels.
_FREE = ("vfl.attacks.baselines", "vfl.defenses.self_supervision")
#: Measures that exist only for pictures.
_PICTURES = {"ssim"}


class AttackRunner:
    """Runs attacks on one victim; caches only the cases of the last k and draw of leaked labels.

    The seed determines leaked rows and the attacks' random draws, so these are the same for all
    victims with this seed.

    Args:
        experiment: experiment of the victim's training.
        data: data of every party.
        settings: settings of the grid, which define the attackers, and the splits from which rows
            are leaked or attacked.
        folder: run folder of the finished victim; without a folder, only baselines run.
        adversary: spec of the adversary in the victim's training.
        cases: cases of attacks for a victim that is not a run; None builds the cases from the
            experiment.

    Raises:
        ConfigError: the attacker is no feature party of the experiment.
        RunFolderError: the run is not finished, or its weights are missing.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        settings: GridSettings,
        folder: RunFolder | None = None,
        adversary: str = HONEST,
        cases: Cases | None = None,
    ) -> None:
        kind = kind_of_cases(experiment)
        self._cases_of = cases or kind(experiment, data, settings, folder)
        self._seed, self._adversary, party = experiment.seed, adversary, self._cases_of.party
        self._width = experiment.parties[party].width
        self._gallery: Path | None = None  # folder for images that attacks reconstruct
        self._about: dict[str, Any] = {
            "experiment": experiment_digest(recording(experiment, TraceSettings())),
            "data": data_digest(data),
            "party": party,
            "setting": repr(setting_of(settings)),
            "seed": self._seed,
            "weights": self._cases_of.weights_sha256,
        }
        if type(self._cases_of) is not Cases:
            self._about["cases"] = code_of(type(self._cases_of))
        if folder is not None or cases is not None:
            self._about |= {"columns": settings.known_columns}
            if settings.attribute is not None:
                self._about["attribute"] = settings.attribute
        if folder is not None:
            if adversary != HONEST:
                self._about |= {"adversary": adversary, "known": settings.known}
            if settings.draws_rows(experiment.is_table) and self._seed == settings.seeds[0]:
                self._gallery = folder.path
        self._leak: tuple[int, int] | None = None
        self._cases: dict[tuple[Scenario, str], Case] = {}
        self._bottoms: dict[tuple[str, int], tuple[nn.Module, dict[int, Evidence]]] = {}

    @classmethod
    def of_run(
        cls,
        folder: RunFolder,
        data: Mapping[str, PartyData],
        settings: GridSettings,
        adversary: str = HONEST,
    ) -> AttackRunner:
        """Return a runner for attacks on a finished run."""
        return cls(folder.experiment(), data, settings, folder, adversary)

    def run(
        self,
        jobs: Sequence[AttackJob],
        scores: ScoresFile,
        on_end: Callable[[FinishedAttack], None] = lambda ended: None,
    ) -> Iterator[ScoreRecord]:
        """Yield the score of each job; run jobs that have no score yet, and store their scores."""
        began, ran = time.monotonic(), 0
        missing = len(self.lacking(jobs, scores))
        for number, job in enumerate(jobs, start=1):
            found = self._known(job, scores)
            if found is None:
                found = self._record(job)
                scores.add(found)
                ran += 1
                left_s = (time.monotonic() - began) / ran * (missing - ran)
                on_end(FinishedAttack(found, number, len(jobs), left_s))
            yield found

    def lacking(self, jobs: Iterable[AttackJob], scores: ScoresFile) -> list[AttackJob]:
        """Return the jobs that have no score in the file of scores."""
        return [job for job in jobs if self._known(job, scores) is None]

    def known(self, jobs: Iterable[AttackJob], scores: ScoresFile) -> list[ScoreRecord]:
        """Return the stored scores of jobs, for attacks that still exist."""
        found = []
        for job in jobs:
            with suppress(SpecError):
                found.append(self._known(job, scores))
        return [one for one in found if one is not None]

    def _known(self, job: AttackJob, scores: ScoresFile) -> ScoreRecord | None:
        """Return a job's stored score, or None if the job has none or lacks requested pictures."""
        key = self._key(job)
        found = scores.get(key)
        if found is not None and self._gallery is not None:
            drawn = any(name in _PICTURES for name, _, _ in found.measured)
            if drawn and kept_pictures(self._gallery, key) is None:
                return None
        return found

    def _record(self, job: AttackJob) -> ScoreRecord:
        key, (found, seconds) = self._key(job), self._result(job)
        if self._gallery is not None and found.true is not None and found.found is not None:
            keep_pictures(self._gallery, key, found.true, found.found)
        first, *others = found.scores
        threat = found.threat
        if self._adversary != HONEST:
            threat = replace(threat, behaviour="malicious")
        return ScoreRecord(
            key=key,
            attack=job.attack,
            bottom=job.bottom,
            k=job.k,
            draw=job.draw,
            measure=first.measure,
            value=first.value,
            guess=first.guess,
            threat=self._sentence(threat),
            seconds=round(seconds, 4),
            also=[(one.measure, one.value, one.guess) for one in others],
            access=threat.access,
            report=found.report,
        )

    def _result(self, job: AttackJob) -> tuple[AttackResult, float]:
        """Run a job, and return its result and its duration in seconds."""
        draw = generator(self._seed, "attack", job.draw)
        if job.bottom == OUTCOME:
            started = time.perf_counter()
            result = adversary_result(self._cases_of, job.attack, draw)
            return result, time.perf_counter() - started
        attack = attacks.make(job.attack)
        case = self._case(job, scenario_of(attack, job.attack, own_columns=True))
        started = time.perf_counter()
        try:
            return run_attack(case, attack, draw), time.perf_counter() - started
        except NonFiniteError as error:
            error.where = job.attack
            raise

    def _sentence(self, threat: ThreatModel) -> str:
        if self._adversary == HONEST:
            return threat.sentence()
        return f"{threat.sentence()} While the victim trained it was {self._adversary}."

    def _case(self, job: AttackJob, scenario: Scenario) -> Case:
        leak = job.k, job.draw
        if leak != self._leak:
            self._leak, self._cases = leak, {}
        own = scenario, TRAINED
        if own not in self._cases:
            draw = generator(self._seed, "leak", job.draw)
            self._cases[own] = self._cases_of.case(scenario, job.k, draw)
        if (scenario, job.bottom) not in self._cases:
            self._cases[scenario, job.bottom] = self._label_free(job.bottom, self._cases[own])
        return self._cases[scenario, job.bottom]

    def _label_free(self, kind: str, case: Case) -> Case:
        """Return a case whose attackers have bottom models that were trained without labels."""
        view, partners = case.view, []
        if Grant.PARTNERS in view.threat.grants:
            partners = [
                view_behind(one, *self._bottom(kind, place, one, one.targets.cuts.shape[1]))
                for place, one in enumerate(view.partners, 1)
            ]
        own = view_behind(view, *self._bottom(kind, 0, view, self._width))
        return replace(case, view=own.instead(partners=partners) if partners else own)

    def _bottom(
        self, kind: str, place: int, view: View, width: int
    ) -> tuple[nn.Module, dict[int, Evidence]]:
        """Return a bottom model, trained on unlabelled rows only, and its outputs."""
        if (kind, place) not in self._bottoms:
            features = generator(self._seed, "label-free")
            made = label_free_bottom(cast(Kind, kind), view, width, features)
            self._bottoms[kind, place] = made, {}
        return self._bottoms[kind, place]

    def _key(self, job: AttackJob) -> str:
        about = {"attack": job.attack, "k": job.k, "draw": job.draw, "bottom": job.bottom}
        about["code"] = code_of_job(job)
        return key_of(self._about | about)


def code_of_job(job: AttackJob) -> str:
    """Return a digest of the source code on which a job's score depends.

    Raises:
        SpecError: the attack cannot be built.
    """
    made = (make_adversary if job.bottom == OUTCOME else attacks.make)(job.attack)
    return code_of(*_classes(made), *_BEHIND, *_beside(job, made))


def codes_of(scores: Iterable[ScoreRecord]) -> dict[str, str]:
    """Return digests of the source code on which the scores depend, by `AttackJob.code_key`."""
    jobs = {one.job.code_key: one.job for one in scores}
    return {key: code_of_job(job) for key, job in jobs.items()}


def _beside(job: AttackJob, made: object) -> tuple[str, ...]:
    """Return the modules on which a score depends, besides those of all label attacks."""
    if job.bottom not in (TRAINED, OUTCOME):
        return _FREE
    if job.bottom == OUTCOME or not isinstance(made, Attack):
        return _BESIDES
    scenario = scenario_of(made, job.attack, own_columns=True)
    return () if scenario in (INFERENCE_TIME, TRAINING_TIME) else _BESIDES


def _classes(made: object) -> Iterator[type]:
    """Yield the class of an attack or adversary, and the class of each attack that it wraps."""
    yield type(made)
    if isinstance(made, Wrapper):
        yield from _classes(made.inner)
