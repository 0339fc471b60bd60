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

    return cast(Loop, njit(cache=True, nogil=True)(loop))


def native(array: np.ndarray) -> Any:
    """The form of an array that a loop indexes fastest: plain Python reads views faster."""
    return array if COMPILED else memoryview(array)  # type: ignore[arg-type]
