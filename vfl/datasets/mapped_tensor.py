"""A tensor whose values are in a file of `vfl.datasets.on_disk`; selections are copies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.torch_internals import PLAIN_RESULTS
from vfl.datasets.on_disk import MappedArray, Pages, note

#: More rows than a batch usually has are read in pieces, because one read keeps all parts of the
#: file that it touches in memory.
_BATCH_ROWS, _PIECE_ROWS = 1 << 13, 1 << 10


class MappedTensor(Tensor):
    """Behaves like a tensor; reading batches of rows keeps little of the file in memory."""

    # Operations on this tensor return ordinary tensors.
    __torch_function__ = PLAIN_RESULTS
    pages: Pages | None

    @classmethod
    def over(cls, array: MappedArray) -> MappedTensor:
        """Make a tensor that shares the memory of a mapped array."""
        found: MappedTensor = torch.from_numpy(array).as_subclass(cls)
        found.pages = array.pages
        return found

    def index_select(self, dim: int, index: Tensor) -> Tensor:  # type: ignore[override]
        """Return a copy of some rows."""
        if self.pages is None or dim:
            return super().index_select(dim, index)
        if len(index) > _BATCH_ROWS:
            return torch.cat([self.index_select(0, piece) for piece in _pieces(index)])
        self._note(index.numpy())
        return super().index_select(dim, index)

    def __getitem__(self, key: Any) -> Tensor:
        chosen = isinstance(key, Tensor) and key.dtype == torch.int64 and key.ndim > 0
        if chosen and len(key) > _BATCH_ROWS:
            return torch.cat([self[piece] for piece in _pieces(key)])
        rows = key.numpy() if isinstance(key, Tensor) else key
        if self.pages is not None and isinstance(rows, np.ndarray | slice):
            self._note(rows)
        return super().__getitem__(key)

    def _note(self, rows: np.ndarray | slice) -> None:
        assert self.pages is not None, "asked above"
        note(self.pages, rows, len(self), self.element_size() * math.prod(self.shape[1:]))


def _pieces(rows: Tensor) -> list[Tensor]:
    return [rows[start : start + _PIECE_ROWS] for start in range(0, len(rows), _PIECE_ROWS)]
