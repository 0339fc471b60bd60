from benchmarks.emulation import Wan
from benchmarks.hub import _job, _row, bench_hub
from benchmarks.training_step import Measurement


def test_threads_of_two_processes_train_with_a_label_party():
    (row,) = bench_hub([4], steps=4, repeats=1)
    assert (row.parties, row.wan, row.limit_ms) == (4, "", 0)
    assert row.cpu_ms > 0
    assert row.cpu_a_party_us == 250 * row.cpu_ms


def test_the_limit_is_what_lines_alone_take():
    turns = [Measurement(cpu_ms=cpu, wall_ms=50) for cpu in (8, 2, 4)]
    row = _row(2, turns, _job(2, 10, 0), Wan.parse("80mbps,40ms"))
    # Cuts come side by side, each over its own line; both gradients leave over the label party's.
    frame_ms = (16 + 4 * 64 * 64) / 1e4
    assert abs(row.limit_ms - (40 + 3 * frame_ms)) < 0.1
    assert (row.wall_ms, row.cpu_ms, row.cpu_a_party_us) == (50, 4, 2000)
