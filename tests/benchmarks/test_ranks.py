import pytest

from benchmarks.ranks import _rows, _Turn, bench_ranks
from benchmarks.training_step import KNOWN, LABEL_PARTY, Measurement


@pytest.mark.slow  # tests/session notices ranks that train another network
def test_one_rank_two_threads_and_two_ranks_train_the_same_network():
    one, threaded, two, *computed = bench_ranks(["shared_mlp"], steps=3, repeats=1)
    assert threaded.final_loss == pytest.approx(one.final_loss, abs=1e-5)
    assert two.final_loss == pytest.approx(one.final_loss, abs=1e-5)
    assert [(row.ranks, row.threads, row.how) for row in (one, threaded, two, *computed)] == [
        (1, 1, "measured"),
        (1, 2, "measured"),
        (2, 1, "measured"),
        (2, 1, "computed"),
        (8, 1, "computed"),
    ]
    assert 0 < computed[0].collectives_ms < computed[0].cpu_ms < one.cpu_ms


def test_a_step_of_more_ranks_is_computed_between_the_whole_batch_and_an_eighth():
    def step(cpu_ms):
        each = Measurement(cpu_ms=cpu_ms / 2, wall_ms=cpu_ms, final_loss=0.5)
        return {LABEL_PARTY: each, "left": each}

    turn = _Turn(step(100), step(110), [step(60), step(60)], step(30), {2: 4.0, 8: 10.0})
    one, threaded, two, half, eighth = _rows(KNOWN["shared_mlp"], [turn])
    assert (one.cpu_ms, threaded.cpu_ms, two.cpu_ms) == (100, 110, 60)
    assert threaded.work == pytest.approx(1.1)
    assert (two.speed, two.work) == (pytest.approx(100 / 60), pytest.approx(1.2))
    assert half.cpu_ms == pytest.approx(30 + 3 / 7 * 70 + 4)  # 64 rows cost 30, 512 cost 100
    assert eighth.cpu_ms == 40
    assert (eighth.speed, eighth.work) == (pytest.approx(2.5), pytest.approx(3.2))
