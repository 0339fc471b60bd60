"""Makers of untrained halves: the architectures in use, which every party was told."""

from __future__ import annotations

from vfl import models
from vfl.attacks.evidence import Maker, TopMaker
from vfl.config import Experiment


def top_recipe(experiment: Experiment, classes: int) -> TopMaker:
    """Makes a top like the label party's, for cuts of a given width."""
    return lambda width: models.make_top(experiment.label.top).build(width, classes)


def bottom_recipe(experiment: Experiment, party: str, shape: tuple[int, ...]) -> Maker:
    """Makes a bottom like a party's, for rows of these axes."""
    asked = experiment.parties[party]
    return lambda: models.make_bottom(asked.bottom).build(shape, asked.width)
