"""A tensor over a file, as `vfl.datasets.on_disk` makes one: what is selected of it is a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vfl.datasets.on_disk import MappedArray, Pages


class MappedTensor(Tensor):
    """Reads like any tensor; batches of its rows leave little of the file in memory."""

    # What follows of it is plain.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    pages: Pages | None

    @classmethod
    def over(cls, array: MappedArray) -> MappedTensor:
        """The tensor that shares an array's memory."""
        found: MappedTensor = torch.from_numpy(array).as_subclass(cls)
        found.pages = array.pages
        return found

    def index_select(self, dim: int, index: Tensor) -> Tensor:  # type: ignore[override]
        """A copy of some rows."""
        if self.pages is not None and dim == 0:
            self.pages.read_rows(index.numpy(), self[:1].nbytes)
        return super().index_select(dim, index)

    def __getitem__(self, key: Any) -> Tensor:
        if self.pages is not None and isinstance(key, Tensor) and key.dtype == torch.int64:
            self.pages.read_rows(key.numpy(), super().__getitem__(slice(1)).nbytes)
        found = super().__getitem__(key)
        if self.pages is not None and isinstance(key, slice):
            self.pages.read(found.nbytes)
        return found
