"""A tensor over a file, made by `vfl.datasets.on_disk`; selections are copies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.core.torch_internals import PLAIN_RESULTS
from vfl.datasets.on_disk import MappedArray, Pages, note


class MappedTensor(Tensor):
    """Behaves like any tensor; reading batches of its rows keeps little of the file in memory."""

    # Results of operations are plain tensors.
    __torch_function__ = PLAIN_RESULTS
    pages: Pages | None

    @classmethod
    def over(cls, array: MappedArray) -> MappedTensor:
        """Make a tensor that shares an array's memory."""
        found: MappedTensor = torch.from_numpy(array).as_subclass(cls)
        found.pages = array.pages
        return found

    def index_select(self, dim: int, index: Tensor) -> Tensor:  # type: ignore[override]
        """Copy some rows."""
        if self.pages is not None and dim == 0:
            self._note(index.numpy())
        return super().index_select(dim, index)

    def __getitem__(self, key: Any) -> Tensor:
        rows = key.numpy() if isinstance(key, Tensor) else key
        if self.pages is not None and isinstance(rows, np.ndarray | slice):
            self._note(rows)
        return super().__getitem__(key)

    def _note(self, rows: np.ndarray | slice) -> None:
        assert self.pages is not None, "asked above"
        note(self.pages, rows, len(self), self.element_size() * math.prod(self.shape[1:]))
