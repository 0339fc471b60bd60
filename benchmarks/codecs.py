"""Cost of encoding and decoding a cut, compared with finding its largest values.

All codecs take turns, in an order drawn anew for each round, on many different batches. The codecs
run in a separate process with one thread. The same batch in a tight loop would train the
processor's branch prediction, so that selecting the largest values would appear several times
faster than it is. The measure is CPU time, so that other work on the machine matters little. The
result rows show medians, and their ratio to the time of ``torch.topk(cut.abs(), k)`` alone.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import zstandard
from scipy.sparse import csr_matrix
from torch import Tensor

from benchmarks import harness
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.compression import StepContext, make
from vfl.config.toml import Settings
from vfl.core.compiled import COMPILED
from vfl.core.errors import BadOptionError, WidthError
from vfl.core.frame import Frame, Kind, from_bytes, to_bytes
from vfl.core.seeds import Secret, generator, permutation

#: Widths, and numbers of values kept per row, in the thesis' table 3.2.
PAIRS = (
    *((128, 3), (128, 6), (128, 13)),
    *((300, 2), (300, 4), (300, 9)),
    *((600, 2), (600, 4), (600, 9), (600, 14)),
    *((1280, 2), (1280, 4), (1280, 9)),
)
ROWS, BATCHES, ROUNDS = 256, 48, 96
#: Codecs to measure, the same for every width; `k` is replaced by the number of kept values.
SPECS = (
    "none",
    "topk:k={k},values=8",
    "randtopk:k={k},values=8",
    "topk:k={k},values=4,packer=range",
    "size:k={k},values=8",
    "sign",
    "quantise:values=8",
    "quantise:values=2,packer=range",
    "quantise:values=4,packer=range",
    "relu:values=4",
    "relu:values=4,packer=bitmap",
)
BASE = "torch.topk"
_AHEAD = 3  # number of batches that a turn encodes before the batch that is measured
_ENOUGH_S = 1.0  # seconds after which the remaining rounds are skipped
_INPUTS = 64


class CodecJob(Settings):
    """Job of one process: a width for which to measure all codecs.

    Attributes:
        width: width of the cut.
        k: number of values that a sparse codec keeps in each row.
        rounds: number of turns of each codec.
        seed: seed of the batches.
    """

    width: int
    k: int
    rounds: int
    seed: int


class CodecRow(Settings):
    """Cost of one codec, or of another way to send a cut.

    Attributes:
        width, k: see `CodecJob`.
        name: spec of the codec, or name of another way.
        compiled: whether numba compiled the loops.
        rounds: number of measurements.
        encode_us, decode_us: median time in microseconds, including header and checksum of a frame.
        encode_ratio, decode_ratio: these times divided by the time of torch.topk.
        wire_bytes: median number of bytes sent for a batch; 0 if nothing is sent.
        wire_ratio: `wire_bytes` divided by the bytes of the dense float32 cut.
    """

    width: int
    k: int
    name: str
    compiled: bool
    rounds: int
    encode_us: float
    decode_us: float
    encode_ratio: float
    decode_ratio: float
    wire_bytes: float
    wire_ratio: float


class CodecRows(Settings):
    """Costs of all ways to send cuts of one width."""

    rows: tuple[CodecRow, ...]


def bench_codecs(
    width: int | None = None,
    k: Sequence[int] = (),
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> list[CodecRow]:
    """Measure encoding and decoding of every codec, relative to torch.topk, and the frames' bytes.

    Args:
        width: width of the cut; by default, the widths in the thesis.
        k: numbers of values kept in each row, such as 3,6; requires a width.
        rounds: number of turns of each codec; very slow codecs get fewer turns.
        seed: seed of the batches.

    Raises:
        BadOptionError: `k` is given without a width, or is larger than the width.
        LostPeerError: a process ended early; its standard error says why.
    """
    if k and width is None:
        raise BadOptionError("k requires a width", got=f"k {k}", want="--width 128")
    pairs: Sequence[tuple[int, int]] = PAIRS
    if width is not None:
        known = [kept for published, kept in PAIRS if published == width]
        pairs = [(width, kept) for kept in k or known or [max(1, width // 32)]]
    if any(kept > wide for wide, kept in pairs):
        raise BadOptionError("k is above the width", got=str(pairs), want="k from 1 to the width")
    rows: list[CodecRow] = []
    with BenchmarkWorker("codecs") as worker:
        for wide, kept in pairs:
            harness.say(f"width {wide}, k {kept}: {rounds} rounds of {BATCHES} batches")
            worker.put(CodecJob(width=wide, k=kept, rounds=rounds, seed=seed))
            rows += worker.get(CodecRows).rows
    return rows


TABLE = harness.table(
    ("width", ">5", "width"),
    ("k", ">4", "k"),
    ("  way", "<36", lambda row: f"  {row.name}"),
    ("encode us", ">17", lambda row: harness.beside(row.encode_us, row.encode_ratio, 0)),
    ("decode us", ">17", lambda row: _cost(row.decode_us, row.decode_ratio)),
    ("bytes", ">9.0f", lambda row: row.wire_bytes or None),
    ("of dense", ">10.2%", lambda row: row.wire_ratio or None),
    ("  loops", "<0", lambda row: "  compiled" if row.compiled else "  in numpy and torch"),
)


def _cost(microseconds: float, ratio: float) -> str | None:
    return harness.beside(microseconds, ratio, 0) if microseconds else None


def work(parent: Parent) -> None:
    """Measure the requested jobs."""
    for job in parent.each(CodecJob):
        parent.put(measure(job))


def measure(job: CodecJob) -> CodecRows:
    """Measure all ways to send cuts of one width.

    A turn consists of a few batches, of which only the last is measured. This last batch has new
    data, but the codec's code is already in the processor's caches, independently of the codec that
    ran before.
    """
    batches = make_batches(job.width, job.seed)
    turns = [*contenders(job.width, job.k).items()]
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
    """Make different batches of ReLU outputs, in which units are active at various rates."""
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


class Cost(NamedTuple):
    """Cost of one batch: seconds to encode it, seconds to decode it, and its bytes."""

    encode_s: float
    decode_s: float
    wire_bytes: int


#: Function that measures one batch; its arguments are the step number and the batch.
Turn = Callable[[int, Tensor], Cost]


def contenders(width: int, k: int) -> dict[str, Turn]:
    """Return the functions to measure for a width; torch.topk comes first.

    Codecs that would need too large a table are left out.
    """
    found: dict[str, Turn] = {"memcpy": _memcpy, BASE: partial(_topk, k), "zstd -1, dense": _zstd}
    for spec in (each.format(k=k) for each in SPECS):
        try:
            found[spec] = _CodecTurn(spec, width)
        except WidthError:
            continue
    return found | {"csr + pickle, top k": partial(_csr_pickle, k)}


class _CodecTurn:
    """A codec at both parties of a link; a trained layer at the feature party is not timed."""

    def __init__(self, spec: str, width: int) -> None:
        self._codec = make(spec)
        self._codec.check(width)
        module = self._codec.client_module(width)
        self._module = module.eval() if module is not None else None
        self._secret = Secret.of_simulation(0, "bench")

    @torch.no_grad()
    def __call__(self, step: int, batch: Tensor) -> Cost:
        cut = self._module(batch) if self._module is not None else batch
        rows, width = cut.shape
        sender, reader = StepContext(step, True, self._secret), StepContext(step, True)
        began = time.thread_time()
        raw = to_bytes(Frame(Kind.CUT, step, self._codec.encode(cut, sender).payload))
        encoded = time.thread_time()
        self._codec.decode(from_bytes(raw).payload, rows, width, reader)
        decoded = time.thread_time()
        self._codec.commit(step)
        return Cost(encoded - began, decoded - encoded, len(raw))


def _memcpy(step: int, batch: Tensor) -> Cost:
    began = time.thread_time()
    batch.clone()
    return Cost(time.thread_time() - began, 0.0, 4 * batch.numel())


def _topk(k: int, step: int, batch: Tensor) -> Cost:
    began = time.thread_time()
    torch.topk(batch.abs(), k)
    return Cost(time.thread_time() - began, 0.0, 0)


def _zstd(step: int, batch: Tensor) -> Cost:
    began = time.thread_time()
    raw = zstandard.ZstdCompressor(level=1).compress(batch.numpy().data)
    encoded = time.thread_time()
    zstandard.ZstdDecompressor().decompress(raw)
    return Cost(encoded - began, time.thread_time() - encoded, len(raw))


def _csr_pickle(k: int, step: int, batch: Tensor) -> Cost:
    """Measure a pickled SciPy matrix; the time to choose the kept values is not counted."""
    indices = torch.topk(batch.abs(), k).indices
    sparse = torch.zeros_like(batch).scatter_(1, indices, batch.gather(1, indices)).numpy()
    began = time.thread_time()
    raw = pickle.dumps(csr_matrix(sparse), pickle.HIGHEST_PROTOCOL)
    encoded = time.thread_time()
    pickle.loads(raw).toarray()
    return Cost(encoded - began, time.thread_time() - encoded, len(raw))


main = harness.command(bench_codecs, TABLE)


if __name__ == "__main__":
    main()
