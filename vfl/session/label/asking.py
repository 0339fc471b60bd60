"""The label party while serving: it queries the feature parties and runs the top model."""

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
from vfl.session.label.party import Progress
from vfl.session.serving import Peeked, Refused, refusals, request

#: Largest number of parties whose contributions are computed, because each subset of the parties
#: needs a forward pass of the top model.
_MOST_EXPLAINED = 8
_REFERENCE_ROWS = 32
#: Errors of a lost party, and codes of the errors with which a party that is still present ends the
#: session on purpose.
LOSSES = (LostPeerError, PeerFailedError)
REFUSALS = (ConsentError.code, DisagreementError.code)


class RefusedRequest(Exception):
    """Error raised when a feature party refuses to send the cut of the queried rows.

    Args:
        party: name of the party that refuses.
        reason: reason of the refusal.
    """

    def __init__(self, party: str, reason: Refused) -> None:
        super().__init__(f"{party}: {reason.name}")
        self.party, self.reason = party, reason


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a batch of queried rows.

    Attributes:
        outputs: outputs of the rows in the form of a prediction, axes (rows, outputs).
        cuts: cuts by party, or the sum of the feature parties' cuts under `SUM`; axes (rows, width)
            each.
        missing: for each row, the parties whose cut a learned vector replaces; None if no party may
            be missing.
        remarks: further values that the model states for each row, by name, such as a scorecard's
            points; see `WholeNetwork.remarks`.
    """

    outputs: Tensor
    cuts: Mapping[str, Tensor]
    missing: Sequence[tuple[str, ...]] | None = None
    remarks: Sequence[Mapping[str, Any]] = ()


class AskedEnd(Protocol):
    """The label party's endpoint for one other party."""

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
        """Return the parties' cuts of the queried rows by name, or their sum under `SUM`."""

    def outputs_of(self, cuts: Mapping[str, Tensor], step: int) -> Tensor:
        """Return the network's outputs, axes (rows, outputs)."""

    def answers(self, outputs: Tensor) -> Tensor:
        """Convert outputs to logits of classes, or to numbers in the units of the labels."""

    def calibrated(self, answers: Tensor) -> Tensor:
        """Return calibrated answers for clients; see `AnyLabelParty.calibrated`."""

    def contributions(self, row: int) -> Mapping[str, Tensor] | None:
        """Return the Shapley value of each party for each output of a row of the last query.

        The result is None if the caller has to compute the values from the cuts.
        """


class Away(Protocol):
    """Interface that records absent parties while the other parties answer; see `Federation`."""

    def lost(self, party: str) -> None:
        """Note that a party does not answer queries any more."""

    def returned(self, parties: Collection[str]) -> Mapping[str, Link]:
        """Return the links of parties that have returned; invite absent parties at intervals."""


class ServingParty:
    """Queries rows on request, one request at a time, without blocking.

    `begin` sends a query, `arrived` reports whether all parties have answered, and `answer` returns
    the answer. Each error of these methods ends the session: LostPeerError, PeerFailedError,
    ProtocolError, FrameError.

    Args:
        label: the label party, with its trained weights.
        between: function that lets parties in the same process answer; it is called after each
            request.
        away: record of absent parties; None if no learned vector may replace a party's cuts.
        absent: parties that are absent at the start.
        behind: feature parties whose cuts go to a middle party, which is queried instead of them.
        asker: position of this label party among the label parties that query the same parties, and
            the number of these label parties; each of them uses separate step numbers, see
            `Askers`.

    Attributes:
        waits_for: the party whose answer is awaited, or the party that was lost.
        absent: parties whose cuts are replaced by learned vectors at present.
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
        """Return each stream's file descriptor, readable after a message, and its party's name.

        A descriptor is -1 for a broken stream.
        """
        return [(number, name) for name, link in self._links.items() for number in link.filenos()]

    def broken(self) -> bool:
        """Return whether a stream is broken at present."""
        return any(-1 in link.filenos() for link in self._links.values())

    def begin(self, rows: np.ndarray) -> None:
        """Query every party for some rows; before the next query, `answer` must return.

        Args:
            rows: positions of the rows, ascending; at most `QUERY_ROWS`. An empty query asks which
                parties are present.
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
        """Return whether all parties have answered the query; without a query, none may send.

        Args:
            at: link at which a message may have arrived; None checks all links.
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
        """Return the answer to the open query; None for an empty query.

        Args:
            inputs: the label party's own inputs of the rows; None reads them from its table.

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
        """Return the rows whose mean cut replaces the cut of a party that a coalition leaves out.

        The result is empty if these rows have already been queried.
        """
        told = self.label.terms.secure == "none" and self._explains(self._links)
        if self._reference is not None or not told or self.absent:
            return self._asked[:0]
        rows, complete = self.label.data.split.test, self.label.data.complete
        rows = rows if complete is None else rows[complete[rows]]
        spread = np.linspace(0, len(rows) - 1, min(_REFERENCE_ROWS, len(rows)))
        return np.unique(rows[spread.astype(np.int64)])

    def refer_to(self, answer: Answer) -> None:
        """Store the mean cuts of the reference rows."""
        self._reference = {name: cut.mean(0) for name, cut in answer.cuts.items()}

    def contributions(self, cuts: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
        """Compute the Shapley value of every cut for each output of one row, by party.

        Where a coalition leaves out a party, the mean cut of `reference_rows` replaces the party's
        cut (Shapley 1953; Lundberg and Lee 2017, equation 8, with parties as features).

        Args:
            cuts: cuts of an answer.
            row: index of the row in the query.

        Returns:
            The result has values of axes (outputs,) each; empty if only a sum of cuts is known, or
            if there are many parties.
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
        """Inform the feature parties that no more requests follow."""
        for link in self._links.values():
            link.send(Frame(Kind.DONE))

    def _has(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the mask of the rows that a party can answer, axes (rows,); False if absent."""
        held = self._held[name][rows] if self._held else np.ones(len(rows), dtype=bool)
        return held & (name in self._links.keys() - self.absent)

    def _take_in(self, name: str, link: Link) -> None:
        """Include a party in queries from now on."""
        self._links[name] = Peeked(name, link)
        self.label.ends[name].link = self._links[name]

    def _bring_back(self) -> None:
        """Include parties that have returned in queries again."""
        if self._away is not None and self.absent:
            for name, link in self._away.returned(self.absent).items():
                self.absent -= {name}
                self._take_in(name, link)

    def _lose(self, name: str, loss: PeerError) -> None:
        """Continue without a party.

        Raises:
            PeerError: the given `loss`, if no learned vector replaces the party's cuts, the party
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
    """Return the Shapley values of a game.

    Args:
        names: names of the players.
        values: values of all coalitions, axes (2^players, outputs). One value per coalition, the
            empty coalition first; the presence of the first player varies slowest.

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
