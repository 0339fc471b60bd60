"""``vfl bench codecs``: what encoding and decoding a cut costs, beside finding its largest values.

All ways take turns, in an order drawn anew each round, over many different batches, in a process of
their own with one thread. A single batch in a tight loop would teach the processor its branches and
flatter every selector several times over. What counts is CPU time, so that others on the machine
matter little; medians are told, also in times of ``torch.topk(cut.abs(), k)`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vfl.bench.messages import CodecJob, CodecRow, CodecRows
from vfl.bench.process import Process
from vfl.core.errors import BadOptionError

#: Widths and values kept of the thesis' table 3.2.
PAIRS = (
    *((128, 3), (128, 6), (128, 13)),
    *((300, 2), (300, 4), (300, 9)),
    *((600, 2), (600, 4), (600, 9), (600, 14)),
    *((1280, 2), (1280, 4), (1280, 9)),
)
ROWS, BATCHES, ROUNDS = 256, 48, 96


def bench_codecs(
    pairs: Sequence[tuple[int, int]] = PAIRS,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[CodecRow]:
    """Measure every way to send cuts of the given widths.

    Args:
        pairs: width of the cut, and values kept of each row.
        rounds: turns of each; what is very slow gets fewer.
        seed: of the batches.
        say: told one line about each pair.

    Raises:
        BadOptionError: nothing to measure, or k outside 1 to the width.
        PeerFailedError: a process ended early; its standard error says why.
    """
    if rounds < 1 or not pairs or any(not 1 <= k <= width for width, k in pairs):
        shown = ", ".join(f"k {k} of width {width}" for width, k in pairs) or "no width"
        raise BadOptionError(
            "nothing to measure",
            got=f"{shown}, {rounds} rounds",
            want="k from 1 to the width, one round",
        )
    process = Process("vfl.bench.codecs_worker")
    try:
        rows: list[CodecRow] = []
        for width, k in pairs:
            say(f"width {width}, k {k}: {rounds} rounds over {BATCHES} batches of {ROWS} rows")
            process.tell(CodecJob(width=width, k=k, rounds=rounds, seed=seed))
            rows += process.hear(CodecRows).rows
        return rows
    finally:
        process.end(at_once=True)


def format_codecs(rows: Sequence[CodecRow]) -> str:
    """The rows for people, one table for each width and k; what is in brackets is the ratio."""
    loops = "compiled by numba" if rows[0].compiled else "in numpy and torch"
    lines = [f"{ROWS} rows, {BATCHES} batches, one thread, loops {loops}"]
    for row in rows:
        if row.name == rows[0].name:
            heads = f"{'encode us':>17}{'decode us':>17}{'bytes':>9}{'of dense':>10}"
            lines += ["", f"{f'width {row.width}, k {row.k}':<34}{heads}"]
        lines.append(_line(row))
    return "\n".join(lines)


def _line(row: CodecRow) -> str:
    times = [(row.encode_us, row.encode_ratio), (row.decode_us, row.decode_ratio)]
    shown = "".join(f"{f'{us:.0f} ({ratio:.2f}x)' if us else '':>17}" for us, ratio in times)
    size = f"{row.wire_bytes:>9.0f}{row.wire_ratio:>10.2%}" if row.wire_bytes else ""
    return f"{row.name:<34}{shown}{size}".rstrip()
