"""The layout contracts: what a codec sends of a cut as one payload, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from vfl.compression.index_set import Places
from vfl.compression.values import Values
from vfl.frame import Payload


class Layout(ABC):
    """How the rows of one codec become bytes at one end of a link.

    In both kinds below `per_row` says whether every row has a scale of its own, and `step` names
    the training step; it is None for a query, which nothing is learned from.
    """

    @abstractmethod
    def payload_limit(self, rows: int, per_row: bool) -> int:
        """Most bytes so many rows can take."""

    def commit(self, step: int) -> None:
        """A step is final at this end; see `vfl.compression.Codec.commit`."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Adaptive state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""


class SparseLayout(Layout):
    """For k places and values a row."""

    @abstractmethod
    def pack(self, places: Places, values: Values, per_row: bool, step: int | None) -> bytes:
        """The payload of increasing places and of what stands there, both of axes (rows, k)."""

    @abstractmethod
    def unpack(
        self, payload: Payload, rows: int, per_row: bool, step: int | None
    ) -> tuple[Places, Values]:
        """The places and values of a payload.

        Raises:
            FrameError: what `pack` could not have made.
        """


class DenseLayout(Layout):
    """For every value of a row."""

    @abstractmethod
    def pack(self, values: Values, per_row: bool, step: int | None) -> bytes:
        """The payload of values of axes (rows, width)."""

    @abstractmethod
    def unpack(self, payload: Payload, rows: int, per_row: bool, step: int | None) -> Values:
        """The values of a payload, axes (rows, width).

        Raises:
            FrameError: what `pack` could not have made.
        """


def groups_of(rows: int, per_row: bool) -> int:
    """Scales that travel: one a row, or one for a batch that is not empty."""
    return rows if per_row else min(rows, 1)
