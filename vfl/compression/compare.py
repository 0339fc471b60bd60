"""Compares codecs on one saved cut, without training: sizes, entropy bound, errors and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl.compression import Codec, make
from vfl.compression.coding.bits import TABLE_LIMIT
from vfl.compression.measure import CodecMeasure, measure_codec
from vfl.core.errors import WidthError
from vfl.core.seeds import scoped
from vfl.core.traffic import size

UNTRAINED = "~"


@dataclass(frozen=True, slots=True)
class CodecComparison:
    """The results of one codec on a cut.

    Attributes:
        codec: spec of the codec.
        untrained: whether the codec has a module that was applied before `encode` without training;
            then the reconstruction error has no meaning.
        measure: the measurement.
    """

    codec: str
    untrained: bool
    measure: CodecMeasure

    def record(self) -> dict[str, Any]:
        """Return the results as a JSON record, in which an unknown result is None."""
        figures = asdict(self.measure)
        if self.untrained:
            figures["relative_error"] = math.nan
        known = {key: value if math.isfinite(value) else None for key, value in figures.items()}
        return {"codec": self.codec, "untrained": self.untrained, **known}


def compare_codecs(
    cut: Tensor,
    specs: Sequence[str],
    *,
    batch_size: int = 256,
    training: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> list[CodecComparison]:
    """Measure codecs on a cut, one after another; see `vfl.compression.measure`.

    Args:
        cut: the cut as a bottom computes it, float32, axes (rows, width).
        specs: specs of the codecs; each must accept this width (`vfl.training.specs.check_codecs`).
        batch_size: number of rows in a frame.
        training: whether frames are encoded as in training; otherwise as in inference.
        say: function that is called with a message about the codec that is measured next.
    """
    rows = []
    for spec in specs:
        say(f"measuring {spec}")
        codec = make(spec)
        untrained, sent = _through_module(codec, cut)
        measure = measure_codec(
            codec, sent, width=cut.shape[1], batch_size=batch_size, training=training
        )
        rows.append(CodecComparison(spec, untrained, measure))
    return rows


def default_specs(width: int) -> list[str]:
    """Return specs of frequently used codecs that fit the width.

    The option k of a codec is width/40, at least 1, or less if its table would be too large.
    """
    k = max(1, min(width // 40, TABLE_LIMIT // width))
    specs = [
        "none",
        f"topk:k={k}",
        f"topk:k={k},values=8",
        f"topk:k={k},values=4,packer=range",
        f"randtopk:k={k},values=8",
        "quantise:values=8",
        "quantise:values=4,packer=range",
        "relu:values=4",
        f"size:k={k},values=8",
        "sign",
    ]
    return [spec for spec in specs if _fits(spec, width)]


def format_table(rows: Sequence[CodecComparison]) -> str:
    """Format the results as a table to read, in the given order."""
    first = rows[0].measure
    frames = -(-first.rows // first.batch_size)
    about = (
        f"{first.rows} rows of {first.width}, {size(first.dense_bytes)} as float32, "
        f"in {frames} {'frame' if frames == 1 else 'frames'}"
    )
    wide = max(len("codec"), *(len(row.codec) for row in rows)) + 2
    head = (
        f"{'codec':<{wide}}{'bytes':>10}{'of dense':>10}{'formula':>9}{'bound':>11}"
        f"{'over it':>9}{'error':>9}{'encode ms':>11}{'decode ms':>11}"
    )
    lines = [about, head, *(_line(row, wide) for row in rows)]
    if any(row.untrained for row in rows):
        lines.append(f"{UNTRAINED} has a trainable module, which is untrained here")
    return "\n".join(lines)


def _line(row: CodecComparison, wide: int) -> str:
    one, bound = row.measure, row.measure.entropy_bound_bytes
    known = math.isfinite(bound)
    over = f"{one.wire_bytes / bound:.3f}x" if known and bound > 0 else "-"
    error = UNTRAINED if row.untrained else f"{one.relative_error:.4f}"
    return (
        f"{row.codec:<{wide}}{size(one.wire_bytes):>10}{one.wire_ratio:>10.2%}"
        f"{one.formula_ratio:>9.2%}{size(bound) if known else '-':>11}{over:>9}{error:>9}"
        f"{one.encode_ms:>11.3f}{one.decode_ms:>11.3f}"
    )


def _through_module(codec: Codec, cut: Tensor) -> tuple[bool, Tensor]:
    """Return whether training would change the sent values; and the output of `client_module`."""
    width = cut.shape[1]
    with scoped(0):
        modules = [codec.client_module(width), codec.server_module(width)]
    module, _ = modules
    untrained = codec.wire_width(width) != width or any(map(_learns, modules))
    if module is None:
        return untrained, cut
    with torch.no_grad():
        return untrained, module.eval()(cut)


def _learns(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _fits(spec: str, width: int) -> bool:
    try:
        make(spec).check(width)
    except WidthError:
        return False
    return True
