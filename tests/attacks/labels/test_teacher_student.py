"""A student reads what its kind can read: no line divides opposite corners of a square."""

import pytest
import torch
from torch import nn

from vfl.attacks import Grant, ThreatModel, View, make
from vfl.attacks.scoring import accuracy
from vfl.attacks.view import Evidence, Holdings
from vfl.core.seeds import generator

CORNERS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])


def corners(count, purpose):
    """Rows near four corners; classes are opposite corners."""
    indices = torch.arange(count) % 4
    noise = torch.randn(count, 2, generator=generator(0, purpose))
    return CORNERS[indices] + 0.2 * noise, indices % 2


def view_and_truth():
    (known, labels), (further, _) = corners(8, "known"), corners(400, "further")
    targets, truth = corners(200, "targets")
    held = Holdings(
        targets=Evidence(targets, targets),
        leaked=Evidence(known, known, labels),
        unlabelled=Evidence(further, further),
        new_top=lambda width: nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2)),
    )
    grants = {Grant.INPUTS, Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED, Grant.TOP_RECIPE}
    threat = ThreatModel("feature party", "inference", frozenset(grants))
    return View(threat, 2, held), truth


@pytest.mark.parametrize(("student", "low", "high"), [("linear", 0.3, 0.7), ("top", 0.98, 1.0)])
def test_only_a_network_reads_opposite_corners(student, low, high):
    view, truth = view_and_truth()
    attack = make(f"teacher_student:student={student},rounds=1")
    found = attack.run(view.only(attack.needs), generator(0, "draw"))
    assert low <= accuracy(found, truth) <= high
