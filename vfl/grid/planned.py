"""What a grid would train and try, as facts of `vfl check`; what cannot be done is refused here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vfl.config import Experiment, Places
from vfl.datasets import PartyData
from vfl.grid.attack import grid_cells
from vfl.grid.compare import comparison_of
from vfl.grid.misfits import misfits
from vfl.grid.trials import BASELINES
from vfl.grid.victims import attempts_of
from vfl.specs import tell


def compared(experiment: Experiment, places: Places) -> dict[str, Any]:
    """What `vfl compare` would train of an experiment that says so."""
    if experiment.compare is None:
        return {}
    comparison = comparison_of(experiment, places)
    codecs = dict.fromkeys(cell.experiment.codec for cell in comparison.cells)
    facts: dict[str, Any] = {"compared": list(codecs), "trainings": len(comparison.cells)}
    return facts | ({"left_out": list(comparison.notes)} if comparison.notes else {})


def attacked(
    experiment: Experiment, data: Mapping[str, PartyData], places: Places
) -> dict[str, Any]:
    """What `vfl grid` would train and try of an experiment that says so.

    Args:
        experiment: what is checked.
        data: every party's rows.
        places: where its settings stand, for the messages.

    Raises:
        UserError: it could not be done with these rows; all that is wrong is told at once.
    """
    if experiment.grid is None:
        return {}
    with places.told(Experiment):
        victims = sum(cell.called != BASELINES for cell in grid_cells(experiment))
        wrong = list(misfits(experiment, experiment.grid, data))
    tell(wrong, places)
    trials = len(attempts_of(experiment.grid).on_victim())
    facts = {"attacked": list(experiment.grid.victims), "victims": victims, "attacks_each": trials}
    tampering = list(experiment.grid.trainings[1:])
    return facts | ({"adversaries": tampering} if tampering else {})
