"""The label party while it serves: it asks the feature parties for rows, and runs the top."""

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

#: Most parties whose contributions are computed: every subset of them takes a pass of the top.
_MOST_EXPLAINED = 8
_REFERENCE_ROWS = 32
#: A party that went away, and why one that is here ended the session by its own will.
LOSSES = (LostPeerError, PeerFailedError)
REFUSALS = (ConsentError.code, DisagreementError.code)


class RefusedRequest(Exception):
    """A feature party sends no cut of some rows.

    Args:
        party: who refuses.
        reason: why.
    """

    def __init__(self, party: str, reason: Refused) -> None:
        super().__init__(f"{party}: {reason.name}")
        self.party, self.reason = party, reason


@dataclass(frozen=True, slots=True)
class Answer:
    """What a batch of rows was answered.

    Attributes:
        outputs: as a prediction writes them, axes (rows, outputs).
        cuts: by party, or the feature parties' sum; axes (rows, width) each.
        missing: for each row, the parties for whose cut a learned vector stands; None where no
            party may be missing.
        remarks: what the model says of each row beside; see `WholeNetwork.remarks`.
    """

    outputs: Tensor
    cuts: Mapping[str, Tensor]
    missing: Sequence[tuple[str, ...]] | None = None
    remarks: Sequence[Mapping[str, Any]] = ()


class AskedEnd(Protocol):
    """A label party's end of the round with another party."""

    link: Link


class Asking(Protocol):
    """The label party of a network whose rows are asked for, with the weights of its training."""

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
        """The parties' cuts of some rows, by name, or their sum under `SUM`."""

    def outputs_of(self, cuts: Mapping[str, Tensor], step: int) -> Tensor:
        """The network's outputs, axes (rows, outputs)."""

    def answers(self, outputs: Tensor) -> Tensor:
        """Logits of classes, or numbers in the labels' own units."""

    def calibrated(self, answers: Tensor) -> Tensor:
        """Answers as they leave; see `AnyLabelParty.calibrated`."""

    def contributions(self, row: int) -> Mapping[str, Tensor] | None:
        """The Shapley value of each party for each output of a row of the last query.

        None where they follow from the cuts.
        """


class Away(Protocol):
    """Parties that went away while others go on answering; see `Federation`."""

    def lost(self, party: str) -> None:
        """It does not answer any more."""

    def returned(self, parties: Collection[str]) -> Mapping[str, Link]:
        """The links of those that are here again; the others are asked to come now and then."""


class ServingParty:
    """Asks for rows as they are wanted, one request after the other, without ever waiting.

    `begin` asks, `arrived` says whether everybody has answered, `answer` takes that. All three end
    the session with what they raise: LostPeerError, PeerFailedError, ProtocolError, FrameError.

    Args:
        label: the label party, with the weights of its training.
        between: lets parties of the same process answer, after each request.
        away: follows parties that went away, where a learned vector may stand for their cuts.
        absent: those that are not here at the start.
        behind: feature parties behind a party in the middle, which is asked in their place.
        asker: which of several label parties that ask this one is, and how many there are; each
            has steps of its own, see `Askers`.

    Attributes:
        waits_for: the party that is waited for now, or that was lost.
        absent: parties for all of whose cuts the learned vectors stand now.
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

    def streams(self) -> list[int]:
        """File numbers that say when something has come; -1 for a stream that is cut."""
        return [number for link in self._links.values() for number in link.filenos()]

    def begin(self, rows: np.ndarray) -> None:
        """Ask every party for some rows; nothing else may be asked for.

        Args:
            rows: positions, ascending; at most `QUERY_ROWS`. None at all asks who is there.
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

    def arrived(self) -> bool:
        """Whether everybody has answered what was asked for; without a request nobody may."""
        away, late_at = list[str](), self._late_at
        for name, link in list(self._links.items()):
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
                raise ProtocolError(f"party '{name}' answers what was not asked")
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
        """What everybody answered, once it has arrived; None to the question who is there.

        Args:
            inputs: the label party's own inputs of the rows; those of its table if not given.

        Raises:
            RefusedRequest: a party sends no cut of them; the session goes on.
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
        """Rows whose mean cut stands for a party that is left out; none once they were asked."""
        told = self.label.terms.secure == "none" and self._explains(self._links)
        if self._reference is not None or not told or self.absent:
            return self._asked[:0]
        rows, complete = self.label.data.split.test, self.label.data.complete
        rows = rows if complete is None else rows[complete[rows]]
        spread = np.linspace(0, len(rows) - 1, min(_REFERENCE_ROWS, len(rows)))
        return np.unique(rows[spread.astype(np.int64)])

    def refer_to(self, answer: Answer) -> None:
        """Take the answer of the reference rows."""
        self._reference = {name: cut.mean(0) for name, cut in answer.cuts.items()}

    def contributions(self, cuts: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
        """The Shapley value of every cut for each output of one row, by party.

        In place of a party that is left out stands the mean cut of `reference_rows` (Shapley 1953;
        Lundberg and Lee 2017, equation 8, with parties as features).

        Args:
            cuts: of an answer.
            row: which of its rows.

        Returns:
            Axes (outputs,) each; empty where only a sum of cuts is known, or parties are many.
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
        """Tell the feature parties that there are no more requests."""
        for link in self._links.values():
            link.send(Frame(Kind.DONE))

    def _has(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Which rows a party answers, bool, axes (rows,); none of them while it is away."""
        held = self._held[name][rows] if self._held else np.ones(len(rows), dtype=bool)
        return held & (name in self._links.keys() - self.absent)

    def _take_in(self, name: str, link: Link) -> None:
        """Ask a party from here on."""
        self._links[name] = Peeked(name, link)
        self.label.ends[name].link = self._links[name]

    def _bring_back(self) -> None:
        """Take in again who has come back."""
        if self._away is not None and self.absent:
            for name, link in self._away.returned(self.absent).items():
                self.absent -= {name}
                self._take_in(name, link)

    def _lose(self, name: str, loss: PeerError) -> None:
        """Go on without a party.

        Raises:
            PeerError: the loss; no vector stands for its cuts, it refuses, or it was the last one.
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
    """Shapley values of a game.

    Args:
        names: of the players.
        values: of all coalitions, axes (2^players, outputs); in the order in which the first
            player's absence varies slowest, and nobody's presence comes first.

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
