"""A grid of attacks: its cells, trainings of victims (attacked models), and attacks.

A victim's training makes the recordings that the attacks need; the victim is trained again only if
a recording is missing. A repeated training gives the same weights, so earlier scores stay valid.
Before a repeated training, the old run folder is moved aside; afterwards, its scores are moved to
the new run folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl.attacks import Grant
from vfl.attacks.active import make_adversary
from vfl.attacks.cases import labels_of
from vfl.config import Experiment, GridSettings, TraceSettings
from vfl.config.run_folder import RunFolder
from vfl.config.validate import STUDIES, check_one_label_party, of_complete_rows, refuse
from vfl.core.errors import HijackError, RunFolderError
from vfl.core.storage import read_json, stamp, write_bytes, write_json
from vfl.datasets import PartyData
from vfl.experiments.attack_runner import (
    AttackRunner,
    FinishedAttack,
    codes_of,
    detected,
    measured_adversaries,
    start_adversary,
)
from vfl.experiments.cells import (
    FAILURE,
    FOUND_OUT,
    HONEST,
    PICTURES,
    Cell,
    GridFolder,
    grid_settings_of,
)
from vfl.experiments.checks import check_attacks_fit, check_grid
from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.pictures import GALLERY, pictures_of
from vfl.experiments.results import Record, attacks_on_run
from vfl.experiments.scenarios import (
    attacker_of,
    is_recorded,
    kind_of_cases,
    require_recorded,
    scenario_of_job,
    scenarios_of,
    trace_for,
)
from vfl.experiments.scores import (
    BASELINES,
    OF_CELL,
    OF_OUTSIDE,
    OF_RUN,
    SCORES,
    AttackJob,
    AttackPlan,
    ScoreRecord,
    ScoresFile,
    read_scores,
    setting_text,
    write_scores,
)
from vfl.experiments.training import recording, train_cell
from vfl.session import PartyFolder
from vfl.training.run import training_rows


def attack_plan(settings: GridSettings, adversary: str = HONEST) -> AttackPlan:
    """Return the attacks of a grid, and how often each attack runs.

    Args:
        settings: settings of the grid.
        adversary: spec of the adversary in the victim's training; the plan contains only attacks by
            the adversary's party.

    Raises:
        SpecError: an attack cannot be built.
    """
    planned = scenarios_of(settings)
    if adversary != HONEST:
        who = make_adversary(adversary).who
        planned = {spec: one for spec, one in planned.items() if one[1].attacker == who}
    leaking = [spec for spec, (attack, _) in planned.items() if Grant.LEAKED in attack.needs]
    once = [spec for spec in planned if spec not in leaking]
    alone = frozenset(spec for spec, (_, scenario) in planned.items() if not scenario.by_cuts)
    measured = measured_adversaries(settings, adversary)
    unseen = frozenset(planned) - frozenset(settings.baseline_specs)
    return AttackPlan(leaking, once, settings.leaks, settings.draws, alone, measured, unseen)


def train_recorded(
    cell: Cell,
    folder: GridFolder,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    device: str,
) -> None:
    """Train a victim, or continue its training, with the recordings that unscored jobs need.

    Args:
        cell: the victim.
        folder: folder of the grid.
        data: data of every party.
        settings: settings of the grid, which define attackers and attacks.
        device: device on which the model is trained.
    """
    path, aside = folder.cells_path / cell.name, folder.aside(cell)
    jobs = attack_plan(settings, cell.adversary).on_victim()
    if kind_of_cases(cell.experiment).replays:
        train_cell(cell, folder, data, device, TraceSettings())
        return

    def needed(run: Path) -> TraceSettings:
        """Return the recordings that jobs without a score for this run need."""
        runner = AttackRunner.of_run(RunFolder(run), data, settings, cell.adversary)
        lacking = runner.lacking(jobs, ScoresFile(run))
        return _recorded(lacking, settings)

    if (path / "summary.json").exists():
        _give_back(aside, path)
        trace = needed(path)
        if is_recorded(path, trace):
            return
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
    elif aside.exists():
        trace = needed(aside)
    else:
        trace = _recorded(jobs, settings)
    if (path / "metrics.jsonl").exists() and RunFolder(path).experiment().trace != trace:
        shutil.rmtree(path)  # the run's recordings are not the required ones
    plain = replace(cell, experiment=recording(cell.experiment, TraceSettings()))
    party = attacker_of(cell.experiment, settings)
    adversaries = start_adversary(cell.adversary, plain.experiment, data, party, settings)
    train_cell(plain, folder, data, device, trace, adversaries)
    _give_back(aside, path)


def _recorded(jobs: Sequence[AttackJob], settings: GridSettings) -> TraceSettings:
    """Return the recordings that these attack jobs and later attacks need."""
    scenarios = [scenario_of_job(one.attack, one.bottom) for one in jobs]
    return trace_for(scenarios, settings.record)


def forget_recordings(path: Path, settings: GridSettings) -> None:
    """Delete a victim's large recordings, unless the grid keeps them for later attacks."""
    for trace in [] if settings.record else list(path.glob("parties/*/trace")):
        shutil.rmtree(trace)  # vfl can train the victim again and record this training


def _give_back(aside: Path, path: Path) -> None:
    """Move attack results from the old run folder, which was moved aside, to the new run folder."""
    kept = [aside / name for name in (SCORES, OF_CELL, OF_OUTSIDE, PICTURES)]
    for file in [*kept, *(aside / GALLERY).glob("*")]:
        if file.exists():
            write_bytes(path / file.relative_to(aside), file.read_bytes())
    shutil.rmtree(aside, ignore_errors=True)


def grid_cells(experiment: Experiment) -> list[Cell]:
    """Return the cells of an experiment with a [grid] table, ordered by seed.

    Raises:
        ConfigError: the experiment has no [grid] table, or the table's attacker is no feature
            party.
        SpecError: an attack or an adversary cannot be built; defenses are built only in trainings.
        ExposedCutError, UserError: see `check_grid`.
    """
    check_one_label_party(experiment, "a grid of attacks")
    settings = grid_settings_of(experiment)
    check_grid(experiment, settings)
    plain = experiment.model_copy(update=dict.fromkeys(STUDIES))
    found = []
    for seed in settings.seeds:
        seeded = plain.model_copy(update={"seed": seed})
        found.append(_cell(seeded, BASELINES))
        for victim in settings.victims:
            defended = seeded.model_copy(update=settings.differs(victim))
            found += [_cell(defended, victim, one, settings) for one in settings.trainings]
    return found


def attack_cell(
    cell: Cell, folder: GridFolder, data: Mapping[str, PartyData], device: str = "cpu"
) -> None:
    """Train a cell's victim unless it is trained, and run all attacks that have no score yet.

    Args:
        cell: the cell of a victim, or the cell that measures the baselines of one seed.
        folder: folder of the grid.
        data: data of every party.
        device: device on which the model is trained; attacks run on the CPU.

    Raises:
        UserError: an attack cannot run on this victim; see `check_attacks_fit`.
    """
    settings = grid_settings_of(folder.experiment())
    check_attacks_fit(cell.experiment, settings, data)
    path = folder.cells_path / cell.name
    if cell.victim == BASELINES:
        jobs = attack_plan(settings).baselines(settings.baselines)
        runner = AttackRunner(cell.experiment, data, settings)
        scores = list(runner.run(jobs, ScoresFile(path)))
    else:
        scores = attack_victim(cell, folder, data, settings, device)
    write_scores(path / OF_CELL, setting_text(settings), scores, codes_of(scores))


def attack_victim(
    cell: Cell,
    folder: GridFolder,
    data: Mapping[str, PartyData],
    settings: GridSettings,
    device: str,
) -> list[ScoreRecord]:
    """Attack a trained victim, and return the scores of all attacks; see `attack_cell`."""
    path, jobs = folder.cells_path / cell.name, attack_plan(settings, cell.adversary).on_victim()
    if (path / FOUND_OUT).exists():
        return [detected(cell.adversary, settings)]
    try:
        train_recorded(cell, folder, data, settings, device)
    except HijackError as error:
        if cell.adversary == HONEST:
            raise
        write_json(path / FOUND_OUT, stamp() | error.record())
        (path / FAILURE).unlink(missing_ok=True)
        return [detected(cell.adversary, settings)]
    runner = AttackRunner.of_run(RunFolder(path), data, settings, cell.adversary)
    scores = list(runner.run(jobs, ScoresFile(path)))
    drawn = settings.pictures and cell.experiment.label.task == "classification"
    if cell.experiment.seed == settings.seeds[0] and drawn:
        draw_pictures(RunFolder(path), data, settings)
    forget_recordings(path, settings)
    return scores


def draw_pictures(folder: RunFolder, data: Mapping[str, PartyData], settings: GridSettings) -> None:
    """Store charts of the cuts of a run's test rows, unless they exist; see `pictures_of`.

    Args:
        folder: the run.
        data: data of every party.
        settings: settings of the grid, which define the number of rows in pictures and the party
            that sent the cuts.
    """
    experiment, path = folder.experiment(), folder.path / PICTURES
    party = attacker_of(experiment, settings)
    about = {"rows": settings.pictures, "party": party}
    if path.exists() and about.items() <= read_json(path).items():
        return
    label = data[experiment.label.party]
    rows = torch.from_numpy(label.split.test)[: settings.pictures]
    cuts = kind_of_cases(experiment)(experiment, data, settings, folder).cuts(rows)
    keep_pictures_of(folder.path, cuts, labels_of(label)[0][rows], about)


def keep_pictures_of(run: Path, cuts: Tensor, labels: Tensor, about: Mapping[str, Any]) -> None:
    """Store pictures (charts) of the cuts of some rows.

    Args:
        run: the run's folder.
        cuts: cut-layer activations, axes (rows, width).
        labels: labels of the rows, int64, axes (rows,).
        about: requested number of rows in pictures, and the party that sent the cuts.
    """
    write_json(run / PICTURES, stamp() | dict(about) | pictures_of(cuts, labels))


def _cell(
    experiment: Experiment,
    called: str,
    adversary: str = HONEST,
    settings: GridSettings | None = None,
) -> Cell:
    about: dict[str, Any] = {"defense": called, "seed": str(experiment.seed)}
    title = f"{called} seed={experiment.seed}"
    if settings is None or adversary == HONEST:
        return Cell(experiment, title, about, called)
    about |= {"adversary": adversary, "known": str(settings.known)}
    about["party"] = attacker_of(experiment, settings)
    return Cell(experiment, f"{called} against {adversary} seed={experiment.seed}", about, called,
                adversary)  # fmt: skip


def attack_finished_run(
    folder: RunFolder,
    settings: GridSettings,
    say: Callable[[str], None] = lambda line: None,
    on_end: Callable[[FinishedAttack], None] = lambda ended: None,
) -> list[Record]:
    """Attack a finished run, with baselines; skip attacks that already have a score.

    The run's page also shows the results of earlier calls that attacked the same rows.

    Args:
        folder: folder of a finished run.
        settings: attacks, numbers of leaked labels, number of draws of leaked rows, baselines, and
            the attacking party.
        say: callback that receives a line of text about the current step.
        on_end: callback that receives each attack when it ends.

    Returns:
        The records of the attacks in `settings`, for the numbers of leaked labels in `settings`.

    Raises:
        RunFolderError: the run is not finished; or it was trained in a federation, where weights
            stay with the parties; or the training did not record the messages that an attack reads.
        UserError: an attack, or a number of leaked labels, does not fit the data.
        SpecError: an attack cannot be built.
    """
    if not (folder.path / "summary.json").exists():
        raise RunFolderError(
            "this run has not ended well, so it cannot be attacked",
            where=str(folder.path),
            fix=f"vfl status {folder.path}",
        )
    folder.require_experiment()
    # this check comes first, because without the parties' parts all other errors are misleading
    for party in folder.experiment().parties:
        PartyFolder(folder.party(party)).require()
    refuse(of_complete_rows(folder.experiment(), "an attack"))
    settings = settings.of_task(folder.experiment().label.task)
    check_grid(folder.experiment(), settings)
    require_recorded(folder.path, settings.attack_specs)
    data = training_rows(folder)
    check_attacks_fit(folder.experiment(), settings, data)
    # the page of a run does not show pictures of reconstructed rows
    settings = settings.model_copy(update={"reconstructions": False})
    plan = replace(attack_plan(settings), adversaries=())
    jobs = plan.on_victim() + plan.baselines(settings.baselines)
    say(f"{len(jobs)} attacks on {folder.path}, baselines included")
    path, setting = folder.path / OF_RUN, setting_text(settings)
    earlier = [one.job for one in read_scores(path, setting) if one.job not in jobs]
    runner, file = AttackRunner.of_run(folder, data, settings), ScoresFile(folder.path)
    scores = list(runner.run(jobs, file, on_end))
    whole = [*runner.known(earlier, file), *scores]
    write_scores(path, setting, whole, codes_of(whole))
    rows = attacks_on_run(LoadedRun(folder.path), settings.baselines)
    return [row for row in rows if AttackJob(row.subject, row.k, row.draw) in jobs]
