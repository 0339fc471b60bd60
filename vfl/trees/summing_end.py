"""Common code of trainings on sums over rows, for several parties; see `vfl.trees.sums`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field
from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.errors import DisagreementError
from vfl.core.frame import Kind, Link
from vfl.datasets import Split
from vfl.mpc.secure.ends import NetworkEnd, NetworkSizes, require_frame
from vfl.mpc.secure.keys import TAG_BYTES
from vfl.trees.cells import RowCounts, other_parties
from vfl.trees.sums import Summing, largest_frame

MOST_COLUMNS = 4096
Columns = Annotated[int, Field(ge=1, le=MOST_COLUMNS)]


class SummingFacts(Settings):
    """Facts that all parties need beyond the terms that they agreed on for the session.

    Attributes:
        rows: number of training rows, of validation rows and of test rows.
        columns: number of columns of each party that has columns, by role; the intercept is one of
            the label party's columns.
    """

    rows: RowCounts
    columns: tuple[Columns, ...] = Field(min_length=2, max_length=256)


@dataclass(frozen=True, slots=True)
class Sizes(NetworkSizes):
    """The sizes of a training session, from which the limits on its frames follow.

    Attributes:
        facts: facts on which all parties of the session agreed.
        beside_bytes: size in bytes of the largest message that `Summing` does not send.
    """

    facts: SummingFacts
    beside_bytes: int

    @property
    def parameters(self) -> int:
        return sum(self.facts.columns)

    @property
    def frame_bytes(self) -> int:
        """Size of the largest message in bytes."""
        summing = largest_frame(self.facts.rows[0], self.facts.columns)
        return max(summing, self.beside_bytes, 1 << 12)

    def memory_bytes(self, rows: int) -> int:
        return 6 * self.frame_bytes

    def limits(self, rows: int) -> dict[Kind, int]:
        return {Kind.PROTOCOL: self.frame_bytes + TAG_BYTES}


_Facts = TypeVar("_Facts", bound=SummingFacts)


class SummingEnd(NetworkEnd[_Facts, Summing]):
    """A party in a training on sums over rows: one with columns, or the helper.

    Args:
        mode, party, terms, rows, place: see `NetworkEnd`.
    """

    @property
    def split(self) -> Split:
        return Split(*map(np.arange, self._facts.rows))

    @abstractmethod
    def _check(self, facts: _Facts) -> None:
        """Compare the agreed facts with the party's own rows and settings.

        Raises:
            DisagreementError: the facts state a different number of rows than the party has.
            ProtocolError: no valid session has these facts.
            TooFewRowsError: the model needs more rows.
        """

    @abstractmethod
    def _beside_bytes(self, facts: _Facts) -> int:
        """Return the size in bytes of the largest message that `Summing` does not send."""

    def sizes_of(self, facts: _Facts) -> Sizes:
        if len(facts.columns) != len(self._roles) - 1:
            raise other_parties()
        self._check(facts)
        sizes = self._sizes(facts)
        require_frame(sizes.frame_bytes, "the masks of all rows")
        return sizes

    def _sizes(self, facts: _Facts) -> Sizes:
        return Sizes(facts, self._beside_bytes(facts))

    def _player_of(self, links: Mapping[int, Link]) -> Summing:
        player = Summing(self._role, links, self._facts.rows[0], self._facts.columns)
        player.spend = self._rows.spend
        return player

    def _started(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None
    ) -> None:
        if state is not None:
            self.load_weights(state["weights"])

    def training_state(self) -> dict[str, Any]:
        return {"weights": self.weights(), **self._kept()}


def require_own_rows(own: tuple[RowCounts, Any], described: tuple[RowCounts, Any]) -> None:
    """Check that the label party describes this party's numbers of rows and columns correctly.

    Raises:
        DisagreementError: they differ.
    """
    if own != described:
        raise DisagreementError(
            "the label party describes other numbers of rows or columns than this party has",
            got=f"training, validation and test rows {described[0]}, columns {described[1]}",
            want=f"training, validation and test rows {own[0]}, columns {own[1]}",
        )
