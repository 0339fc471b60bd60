from pathlib import Path

import torch

from vfl.compression import StepContext, make
from vfl.core.frame import HEADER_BYTES

PAGE = Path(__file__).parents[2] / "docs" / "results" / "compression.md"


def frame_bytes(spec, cut):
    return HEADER_BYTES + len(make(spec).encode(cut, StepContext(step=1, training=True)).payload)


def test_the_page_shows_the_bytes_of_frames():
    cut = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    whole, *fewer = (
        f"{100 * frame_bytes(spec, cut) / (4 * cut.numel()):.2f} %".removeprefix("0")
        for spec in ("topk:k=3", "topk:k=3,values=8", "topk:k=3,values=4")
    )
    row = [HEADER_BYTES + 4 * 128, frame_bytes("topk:k=3,values=8", cut[:1])]
    page = PAGE.read_text(encoding="utf-8")
    assert f"a training frame has {whole} of the bytes of float32" in page
    assert "with 8-bit values {} and with 4-bit values {}.".format(*fewer) in page
    assert "{1} bytes with `topk:k=3,values=8` and {0} as float32".format(*row) in page
