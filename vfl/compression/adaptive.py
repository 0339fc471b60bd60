"""Counts of symbols that adapt to what was sent, alike at both ends.

Counts move only when a step is committed: a frame that is sent again, or that belongs to an attempt
that was given up, was coded with the counts of its own step. A byte at the head of each frame says
which history the counts have, so that ends that lost step are found out.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.coder import LARGEST_TOTAL, Shares
from vfl.errors import CorruptFrameError, TruncatedFrameError
from vfl.frame import Payload

Numbers = npt.NDArray[np.int64]

#: A context whose counts exceed this forgets half of them.
_FORGET_ABOVE = 60_000


class Coded(NamedTuple):
    """Symbols in the order they are coded, both int64 of axes (symbols,)."""

    contexts: Numbers
    symbols: Numbers


class AdaptiveCounts:
    """Counts of every symbol in every context.

    Args:
        start: first counts, axes (contexts, symbols); 0 for a symbol that cannot occur.
        weight: what a symbol adds to its count, by context or for all.

    Attributes:
        cumulative: running counts, axes (contexts, symbols + 1), int64.
    """

    def __init__(self, start: np.ndarray, weight: np.ndarray | int) -> None:
        self._counts = start.astype(np.int64)
        self._weight = np.broadcast_to(weight, len(start))
        self._history = 0
        self._waiting: dict[int, Coded] = {}
        self.cumulative = np.zeros((start.shape[0], start.shape[1] + 1), np.int64)
        self._renew(np.arange(len(start)))

    @property
    def tag(self) -> bytes:
        """One byte that differs, 255 times in 256, where the counts differ."""
        return bytes([self._history & 0xFF])

    def split(self, payload: Payload, scale_bytes: int) -> tuple[memoryview, memoryview]:
        """Scales and coded symbols of a payload that begins with the tag.

        Raises:
            TruncatedFrameError: it ends before its symbols.
            CorruptFrameError: it was coded with other counts.
        """
        view, body = memoryview(payload), 1 + scale_bytes
        if len(view) < body:
            raise TruncatedFrameError(
                "a payload ends inside its scales", got=f"{len(view)} bytes", want=f"{body} or more"
            )
        if bytes(view[:1]) != self.tag:
            raise CorruptFrameError(
                "a range-coded payload was made with other counts",
                fix="start the session again from its last checkpoint",
            )
        return view[1:body], view[body:]

    def shares(self, coded: Coded) -> Shares:
        """What the range coder needs of symbols."""
        starts = self.cumulative[coded.contexts, coded.symbols]
        ends = self.cumulative[coded.contexts, coded.symbols + 1]
        return Shares(starts, ends - starts, self.cumulative[coded.contexts, -1])

    def saw(self, step: int, coded: Coded) -> None:
        """Keep what a frame of a step held until the step is committed."""
        self._waiting[step] = coded

    def commit(self, step: int) -> None:
        """Count what the step's frame held."""
        coded = self._waiting.pop(step, None)
        if coded is None:
            return
        np.add.at(self._counts, (coded.contexts, coded.symbols), self._weight[coded.contexts])
        touched = np.unique(coded.contexts)
        while (large := touched[self._counts[touched].sum(axis=1) > _FORGET_ABOVE]).size:
            self._counts[large] = (self._counts[large] + 1) >> 1
        self._renew(touched)
        told = coded.symbols.astype("<i8").tobytes() + step.to_bytes(8, "little")
        self._history = zlib.crc32(told, self._history)

    def state_dict(self) -> dict[str, Tensor]:
        """Counts, history, and what waits for its commit."""
        state = {"counts": torch.tensor(self._counts), "history": torch.tensor(self._history)}
        for step, coded in self._waiting.items():
            state[f"step-{step}"] = torch.from_numpy(np.stack(coded))
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        self._counts = state["counts"].numpy().copy()
        self._history = int(state["history"])
        self._waiting = {
            int(name.removeprefix("step-")): Coded(*kept.numpy().copy())
            for name, kept in state.items()
            if name.startswith("step-")
        }
        self._renew(np.arange(len(self._counts)))

    def _renew(self, contexts: Numbers) -> None:
        np.cumsum(
            self._counts[contexts], axis=1, out=(fresh := np.empty_like(self._counts[contexts]))
        )
        self.cumulative[contexts, 1:] = fresh


assert _FORGET_ABOVE <= LARGEST_TOTAL
