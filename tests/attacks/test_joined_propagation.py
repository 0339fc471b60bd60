"""Inputs and cuts side by side: either alone at its ends, and more than both in between."""

import pytest
import torch

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.case import Case, attempt
from vfl.seeds import generator

CLASSES, ROWS, LEAKED = 3, 600, 60


def two_looks(weak=1.0):
    """Inputs and cuts are two looks at the class, each with noise of its own.

    Args:
        weak: times this are the last three of the six input columns.
    """
    draw = generator(0, "looks")
    labels = torch.arange(ROWS) % CLASSES
    inputs, cuts = (
        1.8 * torch.eye(CLASSES, 6)[labels] + torch.randn(ROWS, 6, generator=draw) for _ in range(2)
    )
    inputs[:, 3:] *= weak
    rest = Evidence(inputs[LEAKED:], cuts[LEAKED:])
    leaked = Evidence(inputs[:LEAKED], cuts[:LEAKED], labels[:LEAKED])
    grants = frozenset({Grant.CUTS, Grant.INPUTS, Grant.LEAKED, Grant.UNLABELLED})
    threat = ThreatModel("feature party", "inference", grants)
    holdings = Holdings(targets=rest, leaked=leaked, unlabelled=rest)
    return Case(View(threat, CLASSES, holdings), labels[LEAKED:])


def guess(spec, **case):
    return make(spec).run(two_looks(**case).view, generator(0))


@pytest.mark.parametrize(
    ("both", "one"),
    [
        ("share=1", "label_propagation:scaler=whiten"),
        ("share=0,components=0", "label_propagation:at=inputs"),
        ("share=0,components=6", "label_propagation:at=inputs"),  # all of them only turn the inputs
    ],
)
def test_a_share_of_all_or_nothing_is_one_of_the_two(both, one):
    assert torch.allclose(guess(f"joined_propagation:{both}"), guess(one), atol=1e-3)


def test_the_strongest_components_are_taken():
    """Without the weak columns the three others only turn."""
    few = guess("joined_propagation:share=0,components=3", weak=1e-4)
    assert torch.allclose(few, guess("label_propagation:at=inputs", weak=0), atol=1e-3)


def test_both_tell_more_than_either():
    both, cut, inputs = (
        attempt(two_looks(), make(spec), generator(0)).value
        for spec in (
            "joined_propagation:share=0.5,scaler=none",
            "label_propagation",
            "label_propagation:at=inputs",
        )
    )
    assert both > max(cut, inputs) + 0.05
