"""What `python -m benchmarks.llm` measures, on a model that answers in moments."""

import pytest
import torch

from benchmarks.emulation import Wan
from benchmarks.llm import (
    bench_llm,
    bench_next_tokens,
    shown,
)
from benchmarks.llm_memory import SECOND, bench_llm_memory
from benchmarks.llm_sizes import SHOWN, bench_llm_sizes
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import save_decoder


@pytest.mark.slow
def test_the_bytes_are_those_of_the_frames_and_the_line_takes_its_hops():
    rows = bench_llm(None, Wan.parse("40mbps,60ms"), 2, 8, 3, network="proxy")
    here, far = (row for row in rows if row.system == "vfl")
    assert (here.same, far.same) == (here.of, far.of) == (6, 6)
    assert (here.next_mb, here.messages) == (far.next_mb, far.messages)
    assert 0 < here.next_mb < here.first_mb
    assert here.framing is None
    assert 0 < far.framing < 0.05
    assert 0 < here.error < 0.05
    assert far.next_s > 0.9 * 0.03 * here.messages / 3
    assert "40mbps,60ms" in shown(rows)


def test_next_tokens_beside_the_model_in_float64(monkeypatch):
    """Both modes; and an error that is there is found, with the margin of each other token."""
    torch.manual_seed(0)
    model = Decoder(DecoderShape(vocabulary=60, width=32, layers=1, heads=2, tied=False)).eval()
    prompts = torch.randint(60, (6, 3), generator=torch.Generator().manual_seed(0)).tolist()
    plain, thesis, fast = bench_next_tokens(model, prompts)
    assert plain.same == thesis.same == fast.same == plain.of == 6
    assert plain.error < 1e-5 < fast.deviation < fast.error < 0.02
    assert fast.margins == []
    monkeypatch.setattr("vfl.llm.private_decoder._SCORE_SEEN", 1)
    _, _, coarse = bench_next_tokens(model, 4 * prompts)  # so many that one is another for certain
    assert coarse.same < coarse.of
    assert len(coarse.margins) == coarse.of - coarse.same
    assert all(0 < margin <= 2 * 0.5 for margin in coarse.margins)  # scores are off by one bit
    assert 0 < coarse.near <= 1


def test_texts_side_by_side_share_the_messages_of_one():
    short, long, one, four = bench_llm_sizes(None, (2, 8), (1, 4))
    assert short.messages == long.messages
    assert (one.messages, one.of, four.of) == (four.messages, 2, 8)
    assert short.online_mb < long.online_mb < 4 * short.online_mb
    assert one.online_mb < four.online_mb < 4 * one.online_mb
    for row in (one, four):
        assert row.same == row.of
        # `online_s` is a difference of two measured times, which a busy machine can make negative.
        assert row.line_s - row.online_s > 0.02 * row.messages
    assert SHOWN([one]).count("\n") == 2


@pytest.mark.slow
def test_memory_is_that_of_three_processes_and_tokens_are_compared(tmp_path):
    torch.manual_seed(0)
    save_decoder(tmp_path, Decoder(DecoderShape(vocabulary=256, width=64, layers=1, heads=2)))
    rows = bench_llm_memory(tmp_path, "a film", 3)
    assert [row.phase for row in rows][1:] == ["dealing", "asking beside a dealing", "asking"]
    assert [(row.same, row.of) for row in rows[2:]] == [(3, 3), (3, 3)]
    assert 1 < rows[0].sent < 1.6
    for row in rows:
        parties = {"owner", "dealer", "user"} | ({SECOND} if "beside" in row.phase else set())
        assert set(row.peak_bytes) == set(row.cpu_s) == parties
        assert min(row.peak_bytes.values()) > 1e8  # torch alone takes more
