"""Loops over arrays that run in plain Python, or as machine code if numba is installed.

Plain Python and numba run the same source of each loop, so both return the same bytes. Where plain
Python would be far too slow, a numpy version computes the same result in passes over the whole
batch; the caller chooses between loop and numpy version by `COMPILED`. Tests check that the loop
and the numpy version return equal bits. ``pip install 'vfl[fast]'`` installs numba; the environment
variable VFL_COMPILED=0 disables it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

Loop = TypeVar("Loop", bound=Callable[..., Any])

#: Whether numba compiles loops in this process.
COMPILED = (
    os.environ.get("VFL_COMPILED", "1") != "0" and importlib.util.find_spec("numba") is not None
)


def compiled(loop: Loop) -> Loop:
    """Compile a loop over integers and integer arrays at its first call, if numba is installed."""
    if not COMPILED:
        return loop
    from numba import njit

    _teach_instructions()
    try:
        return cast(Loop, njit(cache=True, nogil=True)(loop))
    # If the folders for numba's cache are read-only, each process compiles the loop again.
    except RuntimeError:
        return cast(Loop, njit(nogil=True)(loop))


def native(array: np.ndarray) -> Any:
    """Return an array in the form that loops index fastest: without numba, this is a memoryview."""
    return array if COMPILED else memoryview(array)  # type: ignore[arg-type]


def prefetch(flat: Any, place: Any) -> None:
    """Make the processor load an entry of a flat array into its cache; without numba, do nothing.

    A loop that reads a table larger than the processor's cache in random order calls this function
    for an entry some iterations before it reads the entry.
    """


def add_pair(flat: Any, place: Any, first: Any, second: Any) -> None:
    """Add two numbers to adjacent entries of a flat float64 array in one step."""
    flat[place] += first
    flat[place + 1] += second


@cache
def _teach_instructions() -> None:
    """Teach numba machine instructions for `prefetch` and `add_pair` that it would not choose."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic, overload

    whole, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    pair = ir.VectorType(ir.DoubleType(), 2)

    def address(context: Any, builder: Any, signature: Any, arguments: Any, kind: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.bitcast(builder.gep(array.data, [arguments[1]]), kind)

    def emit_prefetch(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        where = address(context, builder, signature, arguments, byte)
        to_read, every_level, of_data = (ir.Constant(whole, one) for one in (0, 3, 1))
        builder.call(instruction, [where, to_read, every_level, of_data])

    def emit_add_pair(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        where = address(context, builder, signature, arguments, pair.as_pointer())
        added = ir.Constant(pair, ir.Undefined)
        for lane, number in enumerate(arguments[2:]):
            added = builder.insert_element(added, number, ir.Constant(whole, lane))
        sums = builder.fadd(builder.load(where, align=8), added)
        builder.store(sums, where, align=8)

    float64, int64 = types.float64, types.int64
    fetch: Any = intrinsic(lambda typing, flat, place: (types.void(flat, int64), emit_prefetch))
    add: Any = intrinsic(
        lambda typing, flat, place, first, second: (
            types.void(flat, int64, float64, float64),
            emit_add_pair,
        )
    )
    overload(prefetch)(lambda flat, place: lambda flat, place: fetch(flat, place))
    overload(add_pair)(
        lambda flat, place, first, second: (
            lambda flat, place, first, second: add(flat, place, first, second)
        )
    )
