"""Loops that run as they stand, or as machine code where numba is installed.

There is one source of each loop, so both give the same bytes. Where plain Python would take far too
long, numpy does the same in passes over the whole batch, and `COMPILED` says which is used; tests
hold both to the same bits. ``pip install 'vfl[fast]'`` installs numba; the environment variable
VFL_COMPILED=0 leaves it unused.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

Loop = TypeVar("Loop", bound=Callable[..., Any])

#: Whether loops are compiled in this process.
COMPILED = (
    os.environ.get("VFL_COMPILED", "1") != "0" and importlib.util.find_spec("numba") is not None
)


def compiled(loop: Loop) -> Loop:
    """A loop over integers and arrays of them, compiled at its first call if it can be."""
    if not COMPILED:
        return loop
    from numba import njit

    _teach_instructions()
    try:
        return cast(Loop, njit(cache=True, nogil=True)(loop))
    except RuntimeError:  # installation and home are read-only, so each process compiles anew
        return cast(Loop, njit(nogil=True)(loop))


def native(array: np.ndarray) -> Any:
    """The form of an array that a loop indexes fastest: plain Python reads views faster."""
    return array if COMPILED else memoryview(array)  # type: ignore[arg-type]


def prefetch(flat: Any, place: Any) -> None:
    """Have the processor fetch an entry of a flat array early; nothing unless it is compiled.

    A loop that jumps about in a table larger than the cache calls it some jumps ahead.
    """


def add_pair(flat: Any, place: Any, first: Any, second: Any) -> None:
    """Add two numbers to an entry of a flat float64 array and to the next one, in one step."""
    flat[place] += first
    flat[place + 1] += second


@cache
def _teach_instructions() -> None:
    """Compile `prefetch` and `add_pair` to instructions that numba does not choose by itself."""
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
