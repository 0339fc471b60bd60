"""What `python -m benchmarks.llm` measures, on a model that answers in moments."""

import pytest

from benchmarks.emulation import Wan
from benchmarks.llm import bench_llm, format_llm


@pytest.mark.slow
def test_the_bytes_are_those_of_the_frames_and_the_line_takes_its_hops():
    here, far = bench_llm(None, Wan.parse("40mbps,60ms"), questions=2, prompt_tokens=8, count=3)
    assert (here.same, far.same) == (here.of, far.of) == (6, 6)
    assert (here.online_mb, here.messages) == (far.online_mb, far.messages)
    assert 0 < here.framing < 0.05
    assert far.next_s > 0.9 * 0.03 * here.messages / 3
    assert "40mbps,60ms" in format_llm([here, far])
