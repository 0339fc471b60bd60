"""The label party in a service: it queries feature parties, and runs the top model."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import (
    ConsentError,
    DisagreementError,
    LostPeerError,
    PeerError,
    PeerFailedError,
    ProtocolError,
)
from vfl.core.frame import Frame, Kind, Link
from vfl.datasets import PartyData
from vfl.session import Exchange, Terms
from vfl.session.exchange import SUM, CutAggregator
from vfl.session.label.task import Progress
from vfl.session.serving import Peeked, Refused, refusals, request

#: Largest number of parties for which contributions are computed: each subset of the parties adds
#: one row to a forward pass of the top model.
_MOST_EXPLAINED = 8
_REFERENCE_ROWS = 32
#: Errors that mean the loss of a party, and codes of the errors with which a connected party ends
#: the session intentionally.
LOSSES = (LostPeerError, PeerFailedError)
REFUSALS = (ConsentError.code, DisagreementError.code)


class RefusedRequest(Exception):
    """Error: a feature party refuses to send the cut of the queried rows.

    Args:
        party: name of the party that refuses.
        reason: reason of the refusal.
    """

    def __init__(self, party: str, reason: Refused) -> None:
        super().__init__(f"{party}: {reason.name}")
        self.party, self.reason = party, reason


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a query of some rows.

    Attributes:
        outputs: outputs for the rows: logits of classes (with calibration, logarithms of the
            probabilities) or numbers, axes (rows, outputs).
        cuts: cuts by party, or under the key `SUM` the sum of the feature parties' cuts; each with
            axes (rows, width).
        missing: for each row, the parties whose cut was replaced by a learned vector; None if no
            party may be absent or lack rows.
        remarks: further values that the model returns for each row, by name, such as the points of
            a scorecard; see `WholeNetwork.remarks`.
    """

    outputs: Tensor
    cuts: Mapping[str, Tensor]
    missing: Sequence[tuple[str, ...]] | None = None
    remarks: Sequence[Mapping[str, Any]] = ()


class AskedEnd(Protocol):
    """The label party's endpoint of the exchanges with one other party."""

    link: Link


class Asking(Protocol):
    """Interface of a label party that answers queries with trained weights."""

    @property
    def data(self) -> PartyData: ...
    @property
    def terms(self) -> Terms: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def aggregator(self) -> CutAggregator: ...
    @property
    def ends(self) -> Mapping[str, AskedEnd]: ...
    @property
    def remark_bytes(self) -> int: ...
    def remarks(self) -> Sequence[Mapping[str, Any]]: ...

    def query(self, exchange: Exchange, inputs: Tensor | None) -> Mapping[str, Tensor]:
        """Return the queried rows' cuts by party, or their sum under the key `SUM`."""

    def outputs_of(self, cuts: Mapping[str, Tensor], step: int) -> Tensor:
        """Return the outputs of the top model for these cuts, axes (rows, outputs)."""

    def answers(self, outputs: Tensor) -> Tensor:
        """Convert outputs to logits of classes, or to numbers in the unit of the labels."""

    def calibrated(self, answers: Tensor) -> Tensor:
        """Return calibrated answers, which clients receive; see `AnyLabelParty.calibrated`."""

    def contributions(self, row: int) -> Mapping[str, Tensor] | None:
        """Return each party's Shapley values of the outputs for one row of the last query.

        The result is None if the caller has to compute the Shapley values from the cuts.
        """


class Away(Protocol):
    """Records absent parties while the other parties still answer; see `Federation`."""

    def lost(self, party: str) -> None:
        """Record that a party does not answer queries any more."""

    def returned(self, parties: Collection[str]) -> Mapping[str, Link]:
        """Return the links of absent parties that have returned.

        Invite the other absent parties again.
        """


class ServingParty:
    """Queries rows for the service, one query at a time; its methods do not wait for answers.

    `begin` sends a query, `arrived` reports whether all parties have answered, and `answer` returns
    the answer. If one of these methods raises an error (LostPeerError, PeerFailedError,
    ProtocolError, FrameError), the session ends.

    Args:
        label: the label party, which has its trained weights.
        between: function that is called after each query; it lets the parties that run in this
            process answer.
        away: object that records absent parties; None if no learned vector may replace a party's
            cuts.
        absent: parties that are absent when the service begins.
        behind: feature parties that send their cuts to a middle party; the label party then queries
            the middle party.
        asker: index of this label party among the label parties that query the same feature
            parties, and the number of these label parties; each label party uses separate step
            numbers, see `Askers`.

    Attributes:
        waits_for: the party that has to answer next, or the party that was lost.
        absent: parties whose cuts are replaced by learned vectors now.
    """

    def __init__(
        self,
        label: Asking,
        between: Callable[[], object] = lambda: None,
        away: Away | None = None,
        absent: Collection[str] = (),
        behind: Collection[str] = (),
        asker: tuple[int, int] = (0, 1),
    ) -> None:
        self.label, self.absent, self._behind = label, frozenset(absent), behind
        self._away, self._held = away, label.data.held
        self._rows_of: Mapping[str, np.ndarray] = {}
        self.waits_for: str | None = None
        self._between = between
        self._step, self._every = asker
        self._asked = np.empty(0, dtype=np.int64)
        self._late_at: float | None = None
        self._reference: Mapping[str, Tensor] | None = None
        self._links: dict[str, Peeked] = {}
        for name, end in label.ends.items():
            if name not in self.absent:
                self._take_in(name, end.link)
        self._patience_s = max(link.patience_s for link in self._links.values())

    def streams(self) -> list[tuple[int, str]]:
        """Return (file descriptor, party) for each stream.

        A descriptor is readable if a message arrived. The descriptor of a broken stream is -1.
        """
        return [(number, name) for name, link in self._links.items() for number in link.filenos()]

    def broken(self) -> bool:
        """Return whether the connection of any stream is broken at present."""
        return any(-1 in link.filenos() for link in self._links.values())

    def begin(self, rows: np.ndarray) -> None:
        """Send a query for some rows to every present party; call `answer` before the next query.

        Args:
            rows: positions of the rows, ascending; at most `QUERY_ROWS` of them. A query without
                rows checks which parties are present.
        """
        self._bring_back()
        self._asked, held = rows, self._held
        self._rows_of = {n: rows[held[n][rows]] if held else rows for n in self._links}
        for name, link in list(self._links.items()):
            self.waits_for = name
            try:
                link.send(request(self._step, self._rows_of[name]))
            except LOSSES as loss:
                self._lose(name, loss)
        self._late_at = time.monotonic() + self._patience_s
        self._between()

    def arrived(self, at: str | None = None) -> bool:
        """Return whether all parties have answered the query.

        If there is no open query, return False.

        Args:
            at: name of the party from which a message may have arrived; None checks all parties.
        """
        away, late_at = list[str](), self._late_at
        for name, link in list(self._links.items()):
            if at is not None and name != at:
                away += [] if link.looked else [name]
                continue
            self.waits_for = name
            if late_at is None and not link.filenos():
                continue
            try:
                frame = link.look()
            except LOSSES as loss:
                self.waits_for = link.waits_for
                self._lose(name, loss)
                continue
            if frame is None:
                away.append(name)
            elif late_at is None:
                raise ProtocolError(f"party '{name}' answers although it was not asked")
        if late_at is None or not away:
            self.waits_for = None
            return late_at is not None
        self.waits_for = self._links[away[0]].waits_for
        if time.monotonic() > late_at:
            late = f"party '{self.waits_for}' sent nothing for {self._patience_s:g} s"
            self._lose(away[0], LostPeerError(late))
            return self.arrived()
        return False

    def answer(self, inputs: Tensor | None = None) -> Answer | None:
        """Return the answer to the query that `begin` sent; None if it was a query without rows.

        Args:
            inputs: the label party's inputs of the rows; if None, the method reads the inputs from
                the label party's table.

        Raises:
            RefusedRequest: a party refuses to send the cut of these rows; the session continues.
        """
        step, rows = self._step, self._asked
        self._step, self._late_at = step + self._every, None
        empty = [name for name, own in self._rows_of.items() if not len(own)]
        refused = dict[str, Refused]()
        for name, link in self._links.items():
            self.waits_for = name
            refused |= refusals({name: link}, step, empty, self._behind)
        self.waits_for = None
        if refused:
            for name in () if self._behind else self._links.keys() - refused.keys():
                if len(self._rows_of[name]):
                    self._links[name].receive()
            party, code = next(iter(refused.items()))
            raise RefusedRequest(party, code)
        if not len(rows):
            return None
        if inputs is None and self.label.data.inputs is not None:
            inputs = self.label.data.inputs.index_select(0, torch.from_numpy(rows))
        exchange = Exchange(step, "predict", 0, rows, last=True, confirmed=False)
        missing = None
        if self._held or self._away is not None:
            has = {name: self._has(name, rows) for name in self.label.ends}
            self.label.aggregator.without = [name for name in has if not has[name].any()]
            missing = [tuple(name for name in has if not has[name][at]) for at in range(len(rows))]
        cuts = self.label.query(exchange, inputs)
        self.label.progress.asked(len(rows))
        outputs = self.label.answers(self.label.outputs_of(cuts, step))
        return Answer(self.label.calibrated(outputs), cuts, missing, self.label.remarks())

    def reference_rows(self) -> np.ndarray:
        """Return rows whose mean cut stands for the cut of a party outside a coalition.

        The result is empty if these rows have already been queried, or if contributions cannot be
        computed.
        """
        told = self.label.terms.secure == "none" and self._explains(self._links)
        if self._reference is not None or not told or self.absent:
            return self._asked[:0]
        rows, complete = self.label.data.split.test, self.label.data.complete
        rows = rows if complete is None else rows[complete[rows]]
        spread = np.linspace(0, len(rows) - 1, min(_REFERENCE_ROWS, len(rows)))
        return np.unique(rows[spread.astype(np.int64)])

    def refer_to(self, answer: Answer) -> None:
        """Store each party's mean cut of the reference rows."""
        self._reference = {name: cut.mean(0) for name, cut in answer.cuts.items()}

    def contributions(self, cuts: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
        """Compute the Shapley value of every party's cut for each output of one row.

        For a party outside the coalition, the mean cut of `reference_rows` replaces the party's cut
        (Shapley 1953; Lundberg and Lee 2017, equation 8, where the features are the parties).

        Args:
            cuts: cuts of an answer, by party.
            row: index of the row among the queried rows.

        Returns:
            The Shapley values by party, axes (outputs,) each. The result is empty if only a sum of
            cuts or a middle party's output is known, if a party is absent, or if there are too many
            parties. It is also empty before the first call of `refer_to`.
        """
        if (told := self.label.contributions(row)) is not None:
            return dict(told)
        names = list(cuts)
        if self._reference is None or self.absent or not self._explains(names):
            return {}
        present = np.array(list(itertools.product([False, True], repeat=len(names))))
        masks = torch.from_numpy(present)
        mixed = {
            name: torch.where(masks[:, [i]], cuts[name][row].cpu(), self._reference[name].cpu())
            for i, name in enumerate(names)
        }
        on = {name: values.to(cuts[name].device) for name, values in mixed.items()}
        outputs = self.label.answers(self.label.outputs_of(on, self._step - self._every))
        return shapley(names, outputs)

    def close(self) -> None:
        """Send DONE to the parties: no more requests follow."""
        for link in self._links.values():
            link.send(Frame(Kind.DONE))

    def _has(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return which rows a party can answer, as a mask, axes (rows,).

        The mask is all False if the party is absent.
        """
        held = self._held[name][rows] if self._held else np.ones(len(rows), dtype=bool)
        return held & (name in self._links.keys() - self.absent)

    def _take_in(self, name: str, link: Link) -> None:
        """Send queries to this party from now on."""
        self._links[name] = Peeked(name, link)
        self.label.ends[name].link = self._links[name]

    def _bring_back(self) -> None:
        """Send queries again to absent parties that have returned."""
        if self._away is not None and self.absent:
            for name, link in self._away.returned(self.absent).items():
                self.absent -= {name}
                self._take_in(name, link)

    def _lose(self, name: str, loss: PeerError) -> None:
        """Record that a party is lost, and continue without it.

        Raises:
            PeerError: the argument `loss`: no learned vector replaces the party's cuts, the party
                refuses, or no other party is left.
        """
        refused = getattr(loss, "peer_code", None) in REFUSALS
        if self._away is None or refused or not self._links.keys() - {name}:
            raise loss
        self._links.pop(name)
        self.absent |= {name}
        self._away.lost(name)

    def _explains(self, names: Collection[str]) -> bool:
        return not self._behind and SUM not in names and len(names) <= _MOST_EXPLAINED


def shapley(names: Iterable[str], values: Tensor) -> dict[str, Tensor]:
    """Return the Shapley values of a cooperative game, by player.

    Args:
        names: names of the players.
        values: values of all coalitions, axes (2^players, outputs). The empty coalition is first;
            the presence of the first player varies slowest.

    >>> shapley(["a", "b"], torch.tensor([[0.0], [1.0], [2.0], [5.0]]))
    {'a': tensor([3.]), 'b': tensor([2.])}
    """
    players = list(names)
    count, found = len(players), {}
    for index, name in enumerate(players):
        bit = 1 << (count - 1 - index)
        total = torch.zeros_like(values[0])
        for coalition in range(1 << count):
            if not coalition & bit:
                size = bin(coalition).count("1")
                weight = 1 / (count * math.comb(count - 1, size))
                total += weight * (values[coalition | bit] - values[coalition])
        found[name] = total
    return found
