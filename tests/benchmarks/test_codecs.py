import pytest

from benchmarks.codecs import bench_codecs, make_batches
from vfl.compression import StepContext, make
from vfl.core.errors import BadOptionError
from vfl.core.frame import HEADER_BYTES

ROWS, WIDTH, K = 256, 40, 3
DENSE_BYTES = 4 * ROWS * WIDTH


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in bench_codecs(WIDTH, [K], rounds=2)}


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


@pytest.mark.parametrize("asked", [{"width": 8, "k": [9]}, {"k": [3]}])
def test_a_choice_that_makes_no_sense_is_refused(asked):
    with pytest.raises(BadOptionError):
        bench_codecs(**asked)
