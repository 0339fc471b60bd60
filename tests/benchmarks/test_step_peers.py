import pytest

from benchmarks import step_peers
from benchmarks.step_peers import SYSTEMS, bench_peers
from benchmarks.training_step import Measurement
from vfl.core.errors import PeerFailedError


@pytest.mark.slow
def test_every_system_trains_the_same_network_and_is_compared_in_its_turn():
    rows = bench_peers(["mlp_small"], steps=8, repeats=1)
    assert [row.system for row in rows] == list(SYSTEMS)
    own = rows[0]
    for row in rows:
        assert row.final_loss == pytest.approx(own.final_loss, rel=1e-4)
        assert row.cpu_ratio == pytest.approx(own.cpu_ms / row.cpu_ms)


def test_a_system_that_trains_something_else_is_no_comparison():
    losses = {"tls": 0.5, "tcp": 0.5, "gloo": 0.5, "rpc": 0.6}
    turn = {name: Measurement(cpu_ms=1, wall_ms=1, final_loss=own) for name, own in losses.items()}
    with pytest.raises(PeerFailedError, match="different networks"):
        step_peers._check_same("mlp", turn)
