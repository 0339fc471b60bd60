"""A service on a real federation under load: a promotion and a killed party in every round."""

import sys

import numpy as np
import pytest

from benchmarks.standing import Loss, Outcome, play, rows_of, standing

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists processes"),
]

CLIENTS, ROUND_S, AWAY_S = 8, 40.0, 2.0
#: With everything on a busy machine; the benchmark says how long it takes on an idle one.
BACK_WITHIN_S = 60.0


def test_nothing_is_lost_but_for_a_503_that_names_who_is_away():
    kills = ("machine", "command")
    with standing() as made:
        outcome = play(made, CLIENTS, len(kills) * ROUND_S, ROUND_S, AWAY_S, kills)
    assert outcome.unexcused() == []
    assert [loss.left for loss in outcome.losses] == [0, 0]
    assert all(loss.answered_at - loss.back_at < BACK_WITHIN_S for loss in outcome.losses)
    assert {run.name for run in made.runs} == {*outcome.answered}
    assert sum(outcome.answered.values()) > 200
    assert len(outcome.promotions) == len(kills)


def test_a_503_is_excused_only_while_the_party_that_it_names_is_away():
    loss = Loss("left", "machine", killed_at=10.0, back_at=20.0, answered_at=22.0)
    named = [(9.9, "left"), (10.1, "left"), (22.0, "left"), (15.0, "right"), (22.1, "left")]
    outcome = Outcome([loss], [1.5], {"one": 7, "two": 3}, named, ["a wrong answer by one"])
    found = outcome.unexcused()
    assert [line.split()[2] for line in found[1:]] == ["left", "right", "left"]
    lost, promoted, whole = rows_of(outcome)
    assert (lost.what, lost.slowest_s, promoted.slowest_s) == ("machine killed", 2.0, 1.5)
    assert (whole.answered, whole.unavailable, whole.faults) == (10, 2, 4)
    never = Outcome([Loss("left", "session", 1.0, 1.0)])
    assert rows_of(never)[0].slowest_s == np.inf
