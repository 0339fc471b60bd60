"""Attacks on one finished run, as `vfl attack` tries and the run's page shows them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from vfl.config import GridSettings
from vfl.errors import RunFolderError
from vfl.grid.attack_rows import Of, Row, rows_of
from vfl.grid.cells import HONEST
from vfl.grid.scores_file import OF_RUN, ScoresFile, read_scores, write_scores
from vfl.grid.trials import TRAINED, Trial, setting_words
from vfl.run_folder import RunFolder
from vfl.storage import read_json

#: Measures that are no share of anything.
NO_SHARES = ("mse", "psnr", "ssim")
Table = tuple[Sequence[str], list[list[str]]]


def attacked(
    folder: RunFolder, settings: GridSettings, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Attack a run and its baselines; what has a score already is not tried again.

    The run's page keeps what earlier calls with the same rows tried.

    Args:
        folder: a run that has ended.
        settings: attacks, leaks, draws, baselines and who attacks.
        say: told what is being done.

    Returns:
        The rows of these attacks and leaks.

    Raises:
        RunFolderError: the run has not ended, or was trained in a federation, where weights stay
            with their parties, or did not record what an attack reads.
        UserError: an attack or a leak does not fit its rows.
        SpecError: an attack cannot be built.
    """
    from vfl.grid.misfits import check_attempts
    from vfl.grid.scenes import require_recorded
    from vfl.grid.victims import attempts_of, check_attacks, run_ground
    from vfl.run import load_data

    if not (folder.path / "summary.json").exists():
        raise RunFolderError("this run has not ended, so there is nothing to attack")
    check_attacks(folder.experiment(), settings)
    require_recorded(folder.path, settings.attack_specs)
    data = load_data(folder.experiment())
    check_attempts(folder.experiment(), settings, data)
    settings = settings.model_copy(update={"reconstructions": False})  # its page shows none
    attempts = attempts_of(settings)
    trials = attempts.on() + attempts.baselines(settings.baselines)
    say(f"{len(trials)} attacks on {folder.path}, baselines included")
    path, setting = folder.path / OF_RUN, setting_words(settings)
    earlier = [one.trial for one in read_scores(path, setting) if one.trial not in trials]
    ground, kept = run_ground(folder, data, settings), ScoresFile(folder.path)
    scores = list(ground.go_through(trials, kept))
    write_scores(path, setting, [*ground.known(earlier, kept), *scores])
    rows = read_run_rows(folder.path, settings.baselines)
    return [row for row in rows if Trial(row.attack, row.k, row.draw) in trials]


def read_run_rows(path: Path, baselines: Sequence[str] = GridSettings().baselines) -> list[Row]:
    """The scores that are kept of a run, as rows; none if it was never attacked.

    Args:
        path: of the run.
        baselines: those that count, as far as they are there.

    Raises:
        RunFolderError: a file is damaged.
    """
    scores = read_scores(path / OF_RUN)
    if not scores:
        return []
    experiment, summary = RunFolder(path).experiment(), read_json(path / "summary.json")
    own = [one for one in scores if one.bottom == TRAINED]
    free = [one for one in scores if one.bottom != TRAINED]
    accuracy = summary["test_accuracy"]
    return rows_of(own, free, baselines, Of(experiment.defense, HONEST, experiment.seed, accuracy))


def summary_table(rows: Sequence[Row]) -> Table:
    """One line an attack and number of leaked labels: means over the draws."""
    head = ["attack", "k", "measure", "reaches", "from scratch", "best baseline", "guess"]
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.attack, row.k, row.measure), []).append(row)
    return head, [
        [
            attack,
            str(k) if k else "",
            measure.replace("_", " "),
            shown([row.value for row in own], measure),
            shown([row.scratch for row in own if row.scratch is not None], measure),
            shown(_best(own), measure),
            shown([row.guess for row in own], measure),
        ]
        for (attack, k, measure), own in groups.items()
    ]


def shown(values: Sequence[float], measure: str) -> str:
    """The mean of some values, a share in percent; empty without any.

    >>> shown([0.5, 0.7], "accuracy"), shown([0.123456], "mse"), shown([], "auc")
    ('60.0 %', '0.1235', '')
    """
    if not values:
        return ""
    mean = statistics.fmean(values)
    return f"{mean:.4g}" if measure in NO_SHARES else f"{100 * mean:.1f} %"


def sentences(rows: Sequence[Row]) -> dict[str, str]:
    """Who the attacker was and what it held, by attack."""
    return {row.attacker: row.threat for row in rows}


def _best(rows: Sequence[Row]) -> list[float]:
    """The values of the baseline with the highest mean."""
    names = {name for row in rows for name in row.baselines}
    each = [[row.baselines[name] for row in rows if name in row.baselines] for name in names]
    return max(each, key=statistics.fmean, default=[])
