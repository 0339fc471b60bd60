import shutil
import sys

import pytest
import torch

from benchmarks import codecs
from benchmarks.codecs import PAIRS, CodecRows, bench_codecs, make_batches
from benchmarks.worker import BenchmarkWorker
from vfl.compression import StepContext, make
from vfl.core.compiled import COMPILED
from vfl.core.errors import BadOptionError, LostPeerError
from vfl.core.frame import HEADER_BYTES

ROWS, WIDTH, K = 256, 40, 3
DENSE_BYTES = 4 * ROWS * WIDTH


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in bench_codecs(WIDTH, [K], rounds=2)}


def test_everything_is_measured_as_often_as_asked(rows):
    families = {name.partition(":")[0] for name in rows}
    assert {"topk", "randtopk", "size", "sign", "quantise", "relu"} <= families
    assert {"memcpy", "torch.topk", "zstd -1, dense", "csr + pickle, top k"} <= families
    for row in rows.values():
        assert (row.width, row.k, row.rounds, row.compiled) == (WIDTH, K, 2, COMPILED)
        assert row.encode_us > 0
        assert (row.decode_us > 0) == (row.name not in ("memcpy", "torch.topk"))


def test_ratios_are_to_torch_topk_and_to_the_dense_cut(rows):
    base_us = rows["torch.topk"].encode_us
    for row in rows.values():
        assert row.encode_ratio == pytest.approx(row.encode_us / base_us)
        assert row.decode_ratio == pytest.approx(row.decode_us / base_us)
        assert row.wire_ratio == pytest.approx(row.wire_bytes / DENSE_BYTES)


def test_bytes_are_those_of_frames(rows):
    cut = make_batches(WIDTH, seed=0)[0]
    for spec in ("topk:k=3,values=8", "quantise:values=8"):
        payload = make(spec).encode(cut, StepContext(training=True)).payload
        assert rows[spec].wire_bytes == HEADER_BYTES + len(payload)
    assert rows["memcpy"].wire_bytes == DENSE_BYTES
    assert rows["torch.topk"].wire_bytes == 0
    least = ROWS * K * (4 + 4)  # a matrix in CSR format holds values and columns
    assert least < rows["csr + pickle, top k"].wire_bytes < 2 * least


def test_batches_differ_and_look_like_rectified_units():
    batches = make_batches(WIDTH, seed=0)
    assert len({batch.numpy().tobytes() for batch in batches}) == len(batches) == 48
    on = (torch.cat(batches) > 0).float().mean(dim=0)
    assert on.min() < 0.2
    assert on.max() > 0.8
    assert torch.equal(make_batches(WIDTH, seed=0)[7], batches[7])
    assert not torch.equal(make_batches(WIDTH, seed=1)[7], batches[7])


@pytest.mark.parametrize(
    ("asked", "pairs"),
    [
        ({}, list(PAIRS)),
        ({"width": 300}, [(300, 2), (300, 4), (300, 9)]),
        ({"width": 64}, [(64, 2)]),
        ({"width": 64, "k": [1, 7]}, [(64, 1), (64, 7)]),
    ],
)
def test_widths_and_values_kept_can_be_chosen(monkeypatch, asked, pairs):
    jobs = []

    class Scripted(BenchmarkWorker):
        def put(self, message):
            jobs.append((message.width, message.k))

        def get(self, kind):
            return CodecRows(rows=())

    monkeypatch.setattr(codecs, "BenchmarkWorker", Scripted)
    bench_codecs(**asked)
    assert jobs == pairs


@pytest.mark.parametrize("asked", [{"width": 8, "k": [9]}, {"k": [3]}])
def test_a_choice_that_makes_no_sense_is_refused(asked):
    with pytest.raises(BadOptionError):
        bench_codecs(**asked)


def test_a_process_that_ends_early_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(LostPeerError, match="exit status 1"):
        bench_codecs(8, [2], rounds=1)
