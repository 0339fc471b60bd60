"""Measures a codec on a cut with real frames; computes its formula and its entropy bound.

The entropy bound is the number of bits that an ideal coder needs for the kept indices and codes of
a whole cut, computed from their frequencies. The bound does not include headers, scales, or the tag
byte of an adaptive packer. So the difference between a frame's bytes and the bound is the cost of
packing and of these parts. The module reads a saved cut from a numpy file; it does not read
pickles.
"""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import Codec, StepContext, Symbols
from vfl.core.errors import (
    DataError,
    MissingDataError,
    NonFiniteError,
    SpecError,
    UserError,
    nearest,
)
from vfl.core.frame import Frame, Kind, from_bytes, to_bytes
from vfl.core.seeds import Secret


@dataclass(frozen=True, slots=True)
class CodecMeasure:
    """The results of measuring a codec on a cut.

    Attributes:
        rows: number of rows of the cut.
        width: width of the original cut, before the codec's own module changes it.
        batch_size: number of rows in a frame; the last frame may have fewer.
        wire_bytes: total bytes of all frames, with their headers and length prefixes.
        dense_bytes: bytes of the original cut in float32: 4 for each value.
        formula_ratio: size of the codes relative to `dense_bytes`, by the formula in the codec's
            paper.
        wire_ratio: `wire_bytes` divided by `dense_bytes`.
        entropy_bound_bytes: entropy bound in bytes, see `entropy_bound_bits`; NaN if the codec
            reports no symbols.
        relative_error: L2 norm of (cut - decoded cut), relative to the L2 norm of the cut, where
            the cut is the input of `encode`.
        encode_ms: median time to encode a frame, in milliseconds.
        decode_ms: median time to decode a frame, in milliseconds.
    """

    rows: int
    width: int
    batch_size: int
    wire_bytes: int
    dense_bytes: int
    formula_ratio: float
    wire_ratio: float
    entropy_bound_bytes: float
    relative_error: float
    encode_ms: float
    decode_ms: float


def measure_codec(
    codec: Codec,
    cut: Tensor,
    *,
    width: int,
    batch_size: int = 256,
    training: bool = True,
    secret: Secret | None = None,
) -> CodecMeasure:
    """Measure a codec: an encoder copy and a decoder copy exchange the rows of a cut in batches.

    In training, both copies commit every frame as a step, so an adaptive packer adapts as in a run
    in which each frame is answered before the next one. In inference, the state does not change, so
    a packer has only the counts that `codec` already has.

    Args:
        codec: codec of which encoder and decoder are copies; the function does not change it.
        cut: input of `encode`, float32, axes (rows, wire width), detached; if the codec has a
            module, this is the module's output.
        width: width of the original cut, before the codec's module.
        batch_size: number of rows in a frame.
        training: whether frames are encoded as in training; otherwise as in inference.
        secret: secret of the encoding party; None uses a fixed secret, for repeatable results.

    Raises:
        UserError: the cut or the frames have no rows.
        NonFiniteError: the cut contains NaN or Inf.
        SpecError: the encoder and the decoder compute different values for a frame.

    >>> from vfl.compression import make
    >>> measured = measure_codec(make("topk:k=3,values=8"), torch.eye(256, 128), width=128)
    >>> measured.wire_bytes, f"{measured.wire_bytes / measured.entropy_bound_bytes:.3f}"
    (1396, '1.029')
    """
    if not len(cut) or batch_size < 1:
        got = f"{len(cut)} rows, {batch_size} a frame"
        raise UserError("there is nothing to measure", got=got, want="at least one of each")
    own = secret or Secret.of_simulation(0, "measure")
    batches = [
        (batch, _context_of(batch, step, batch_size, own if training else None))
        for step, batch in enumerate(torch.split(cut, batch_size), start=1)
    ]
    crossings = list(_cross_all(codec, batches))
    wire_bytes = sum(crossing.wire_bytes for crossing in crossings)
    dense_bytes = 4 * len(cut) * width
    told = (codec.symbols(batch, context) for batch, context in batches)
    bound_bits = entropy_bound_bits(symbols for symbols in told if symbols is not None)
    error2, norm2 = sum(one.squared_error for one in crossings), cut.double().square().sum().item()
    return CodecMeasure(
        rows=len(cut),
        width=width,
        batch_size=batch_size,
        wire_bytes=wire_bytes,
        dense_bytes=dense_bytes,
        formula_ratio=codec.formula_ratio(width),
        wire_ratio=wire_bytes / dense_bytes,
        entropy_bound_bytes=bound_bits / 8,
        relative_error=math.sqrt(error2 / norm2) if norm2 else math.inf if error2 else 0.0,
        encode_ms=1000 * median(crossing.encode_s for crossing in crossings),
        decode_ms=1000 * median(crossing.decode_s for crossing in crossings),
    )


def _context_of(batch: Tensor, step: int, batch_size: int, secret: Secret | None) -> StepContext:
    """Return the context of a batch, in which row positions count through the whole cut.

    The context of a query has no secret.
    """
    if secret is None:
        return StepContext(step)
    rows = np.arange(len(batch)) + (step - 1) * batch_size
    return StepContext(step, training=True, secret=secret, rows=rows)


_Batches = list[tuple[Tensor, StepContext]]


class _Crossing(NamedTuple):
    """One batch after encoding, sending and decoding, with the times of both computations."""

    wire_bytes: int
    squared_error: float
    encode_s: float
    decode_s: float


def _cross_all(codec: Codec, batches: _Batches) -> Iterator[_Crossing]:
    """Yield the result of every batch; the first batch runs twice, as its first run compiles.

    The same cut and context give the same bytes, so the repetition does not change the codec's
    state.
    """
    encoder, decoder = deepcopy(codec), deepcopy(codec)
    _cross(encoder, decoder, *batches[0])
    for batch, context in batches:
        yield _cross(encoder, decoder, batch, context)
        if context.training:
            encoder.commit(context.step)
            decoder.commit(context.step)


def _cross(encoder: Codec, decoder: Codec, cut: Tensor, context: StepContext) -> _Crossing:
    rows, width = cut.shape
    reading = replace(context, secret=None)
    start = perf_counter()
    payload = encoder.encode(cut, context).payload
    encoded = perf_counter()
    raw = to_bytes(Frame(Kind.CUT if context.training else Kind.QUERY, context.step, payload))
    arrived = from_bytes(raw, decoder.payload_limit(rows, width)).payload
    framed = perf_counter()
    decoded = decoder.decode(arrived, rows, width, reading).cut
    end = perf_counter()
    if not torch.equal(decoded, encoder.decode(payload, rows, width, reading).cut):
        raise SpecError(
            "sender and receiver of a codec decode a frame differently",
            where=f"step {context.step}",
            got=type(encoder).__name__,
            fix="test it with vfl.testing.CodecContract",
        )
    error = (cut.double() - decoded.double()).square().sum().item()
    return _Crossing(len(raw), error, encoded - start, end - framed)


def entropy_bound_bits(batches: Iterable[Symbols]) -> float:
    """Return how many bits an ideal coder needs for the symbols (kept indices and codes) of a cut.

    A row of width d with n kept values has one of C(d, n) possible sets of indices. So the indices
    of all rows together take

        indices = sum of log2 C(d, n) + the entropy of n (0 if n never changes)

    and codes take log2(choices) each if their frequencies are unknown. If frequencies are known,
    the bound is an order-0 entropy (of single symbols) over all rows:

        pooled   min(indices, entropy of whether each unit is kept) + entropy of the codes
        by unit  min(indices + log2(choices) per code, entropy of each unit's codes; an absent value
                 counts as a further code)

    The entropy of symbols with counts c is the sum of c log2(total / c), as if the decoder knew the
    frequencies beforehand. A coder that also uses preceding symbols may need fewer bits than this
    bound.

    Args:
        batches: the symbols that the codec sends for the cut, batch by batch; without any symbols,
            the result is NaN.

    >>> kept = np.zeros((256, 128), bool)
    >>> kept[:, :3] = True
    >>> f"{entropy_bound_bits([Symbols(kept, np.zeros(768, int), choices=256)]) / 8:.1f} bytes"
    '1356.2 bytes'
    """
    sizes: Counter[int] = Counter()
    table: np.ndarray | None = None
    symbols: Symbols | None = None
    for symbols in batches:
        sizes.update(symbols.support.sum(axis=1).tolist())
        if symbols.counts != "none":
            counted = _table(symbols)
            table = counted if table is None else table + counted
    if symbols is None:
        return math.nan
    width = symbols.support.shape[1]
    sets = sum(rows * math.log2(math.comb(width, kept)) for kept, rows in sizes.items())
    indices = sets + entropy_bits(list(sizes.values()))
    plain = indices + math.log2(symbols.choices) * sum(kept * n for kept, n in sizes.items())
    if table is None:
        return plain
    present = table.sum(axis=1)
    absent = sizes.total() - present
    if symbols.counts == "pooled":
        by_unit = sum(map(entropy_bits, np.stack([present, absent], axis=1)))
        return min(indices, by_unit) + entropy_bits(table.sum(axis=0))
    return min(plain, sum(map(entropy_bits, np.column_stack([table, absent]))))


def entropy_bits(counts: npt.ArrayLike) -> float:
    """Return the order-0 entropy, in bits, of symbols with these counts.

    >>> entropy_bits([1, 1, 2])
    6.0
    """
    found = np.asarray(counts, np.float64)
    occurring = found[found > 0]
    return float((occurring * np.log2(occurring.sum() / occurring)).sum())


def _table(symbols: Symbols) -> np.ndarray:
    """Return how often each code occurs in each unit, axes (width, choices)."""
    width = symbols.support.shape[1]
    cells = symbols.support.nonzero()[1] * symbols.choices + symbols.codes
    found = np.bincount(cells, minlength=width * symbols.choices)
    return found.reshape(width, symbols.choices)


def read_cut(path: Path, array: str | None = None) -> Tensor:
    """Read a cut from a file, float32, axes (rows, width).

    Args:
        path: a ``.npy`` or ``.npz`` file.
        array: name of the array in a ``.npz`` file; may be omitted if the file has only one array.

    Raises:
        MissingDataError: the file does not exist.
        DataError: the file is not a numpy file, or has several arrays, or no array of this name; or
            its array does not have floating-point numbers, two axes and at least one value.
        UserError: `array` is given for a ``.npy`` file, whose array has no name.
        NonFiniteError: a value is NaN or Inf, or too large for float32.
    """
    values = _load(path, array)
    axes = " x ".join(map(str, values.shape)) or "a single number"
    what, got, fix = "", axes, None
    if values.dtype.kind != "f" or values.dtype.itemsize not in (2, 4, 8):
        what, got = "a cut is made of floating-point numbers", str(values.dtype)
    elif values.ndim != 2:
        what, fix = "a cut has two axes", "values.reshape(rows, -1) flattens each row"
    elif not values.size:
        what = "a cut without values"
    if what:
        want = "float16, float32 or float64 of axes (rows, width), 1 x 1 or more"
        raise DataError(what, where=str(path), got=got, want=want, fix=fix)
    with np.errstate(over="ignore"):
        cut = values.astype(np.float32, order="C")
    if wrong := int(np.count_nonzero(~np.isfinite(cut))):
        raise NonFiniteError(
            "a cut holds NaN or Inf, or numbers that float32 cannot hold",
            where=str(path),
            got=f"{wrong} of {cut.size} values",
            want="finite numbers",
        )
    return torch.from_numpy(cut)


def _load(path: Path, array: str | None) -> np.ndarray:
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*")]
        raise MissingDataError(
            "this file of a cut does not exist",
            got=str(path),
            want="a .npy or .npz file, or a folder with a trace",
            fix=nearest(path.name, beside),
        )
    with path.open("rb") as file:
        with _readable(path):
            loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            if array is not None:
                raise UserError(
                    "an .npy file holds a single array, without a name",
                    where=str(path),
                    got=f"--array {array}",
                    fix="leave --array out",
                )
            return loaded
        name = _chosen(loaded.files, path, array)
        with loaded, _readable(path):
            found: np.ndarray = loaded[name]
            return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, TypeError, zipfile.BadZipFile):
        raise DataError(
            "this is not an array that numpy can read without pickle",
            where=str(path),
            want="a file of plain numbers that numpy.save or numpy.savez wrote",
        ) from None


def _chosen(names: list[str], path: Path, array: str | None) -> str:
    if array is None and len(names) == 1:
        return names[0]
    if array in names:
        return str(array)
    listed = ", ".join(sorted(names)) or "no array at all"
    if array is None:
        raise DataError(
            "the file has several arrays; which one is the cut?",
            where=str(path),
            got=listed,
            want="one array, or its name",
            fix=f"--array {sorted(names)[0]}" if names else None,
        )
    what = f"no array is called '{array}'"
    raise DataError(what, where=str(path), want=listed, fix=nearest(array, names))
