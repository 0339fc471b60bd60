"""The process of ``vfl bench codecs``: measures all ways to send a cut in turns.

A turn is a few batches, of which the last counts: its data are new, but the code is where the
processor wants it, whatever ran before.
Started as ``python -m vfl.bench.codecs_worker``; it ends when its input does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from vfl.bench.codecs import BATCHES, ROWS
from vfl.bench.contenders import BASE, Cost, Turn, contenders
from vfl.bench.csr_pickle import CsrPickle
from vfl.bench.messages import CodecJob, CodecRow, CodecRows
from vfl.bench.process import tell
from vfl.core.compiled import COMPILED
from vfl.core.seeds import generator, permutation

_AHEAD = 3  # batches of a turn that do not count
_ENOUGH_S = 1.0  # what took so long already skips the rounds that are left
_INPUTS = 64


def measure(job: CodecJob) -> CodecRows:
    """Every way to send cuts of one width."""
    batches = make_batches(job.width, job.seed)
    with CsrPickle(batches, job.k) as csr_pickle:
        turns: list[tuple[str, Turn]] = [*contenders(job.width, job.k).items()]
        turns.append(("csr + pickle, top k", csr_pickle))
        costs: dict[str, list[Cost]] = {name: [] for name, _ in turns}
        for count in range(job.rounds):
            for place in permutation(job.seed, len(turns), "order of turns", count):
                name, turn = turns[place]
                if sum(cost.encode_s + cost.decode_s for cost in costs[name]) < _ENOUGH_S:
                    for ahead in range(_AHEAD, -1, -1):
                        step = (_AHEAD + 1) * (count + 1) - ahead
                        cost = turn(step, batches[(count - ahead) % BATCHES])
                    costs[name].append(cost)
    return CodecRows(rows=tuple(_rows(job, costs)))


def make_batches(width: int, seed: int) -> list[Tensor]:
    """Different batches of what a rectified layer gives, whose units are on more or less often."""
    draw = generator(seed, "bench codecs", width)
    weight = torch.randn(_INPUTS, width, generator=draw) / _INPUTS**0.5
    bias = torch.randn(width, generator=draw)
    inputs = torch.randn(BATCHES, ROWS, _INPUTS, generator=draw)
    return [(batch @ weight + bias).relu() for batch in inputs]


def _rows(job: CodecJob, costs: dict[str, list[Cost]]) -> list[CodecRow]:
    middles = {name: _median(each) for name, each in costs.items()}
    base_s = middles[BASE].encode_s
    return [
        CodecRow(
            width=job.width,
            k=job.k,
            name=name,
            compiled=COMPILED,
            rounds=len(costs[name]),
            encode_us=1e6 * middle.encode_s,
            decode_us=1e6 * middle.decode_s,
            encode_ratio=middle.encode_s / base_s,
            decode_ratio=middle.decode_s / base_s,
            wire_bytes=middle.wire_bytes,
            wire_ratio=middle.wire_bytes / (4 * ROWS * job.width),
        )
        for name, middle in middles.items()
    ]


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(median(each) for each in zip(*costs, strict=True)))


def main() -> None:
    """Measure until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        tell(measure(CodecJob.model_validate_json(line)))


if __name__ == "__main__":
    main()
