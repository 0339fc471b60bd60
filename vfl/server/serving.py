"""The label party while it serves: it asks the feature parties for rows, and runs the top."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.server.label_party import LabelParty
from vfl.session import Exchange
from vfl.session.exchange import SUM
from vfl.session.serving import Refused, request

#: Most parties whose contributions are computed: every subset of them takes a pass of the top.
_MOST_EXPLAINED = 8
_REFERENCE_ROWS = 32


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
    """

    outputs: Tensor
    cuts: Mapping[str, Tensor]


class _Peeked:
    """A link whose next frame was looked at.

    Args:
        link: to a party.
        waits: called before something may take long, and with False once it has not failed.
    """

    def __init__(self, link: Link, waits: Callable[[bool], object]) -> None:
        self._link, self._waits = link, waits
        self._next: Frame | None = None

    def look(self) -> Frame:
        if self._next is None:
            self._waits(True)
            self._next = self._link.receive()
            self._waits(False)
        return self._next

    def receive(self) -> Frame:
        frame, self._next = self.look(), None
        return frame

    def send(self, frame: Frame) -> None:
        self._waits(True)
        self._link.send(frame)
        self._waits(False)

    def close(self) -> None:
        self._link.close()


class ServingParty:
    """Asks for rows as they are wanted; used by one thread.

    Args:
        label: the label party, with the weights of its training.
        between: lets parties of the same process answer, after each request.
        after: lets them take the receipt.

    Attributes:
        waits_for: the party that is waited for now, or that was lost; other threads may read it.
    """

    def __init__(
        self,
        label: LabelParty,
        between: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self.label = label
        self.waits_for: str | None = None
        self._between, self._after = between, after
        self._step = 0
        self._reference: Mapping[str, Tensor] | None = None
        self._links = {
            name: _Peeked(end.link, partial(self._wait_for, name))
            for name, end in label.ends.items()
        }
        for name, link in self._links.items():
            label.ends[name].link = link

    def ask(self, rows: np.ndarray, inputs: Tensor | None = None) -> Answer:
        """Answers for some rows.

        Args:
            rows: positions, ascending; at most `QUERY_ROWS`.
            inputs: the label party's own inputs of them; those of its table if not given.

        Raises:
            RefusedRequest: a party sends no cut of them; the session goes on.
            LostPeerError, PeerFailedError, ProtocolError, FrameError: the session is over.
        """
        step = self._send(rows)
        exchange = Exchange(step, "predict", 0, rows, last=True)
        refused = self._refusals(step)
        if refused:
            for name in self._links.keys() - refused.keys():
                self._links[name].receive()
                self._links[name].send(Frame(Kind.ACK, step))
            self._after()
            party, code = next(iter(refused.items()))
            raise RefusedRequest(party, code)
        if inputs is None and self.label.data.inputs is not None:
            inputs = self.label.data.inputs.index_select(0, torch.from_numpy(rows))
        cuts = self.label.query(exchange, inputs)
        self._after()
        self.label.progress.asked(len(rows))
        return Answer(self.label.answers(self.label.outputs_of(cuts, step)), cuts)

    def check(self) -> None:
        """Ask every party whether it is there.

        Raises:
            LostPeerError, PeerFailedError, ProtocolError, FrameError: the session is over.
        """
        step = self._send(np.empty(0, dtype=np.int64))
        self._refusals(step, empty=True)

    def contributions(self, cuts: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
        """The Shapley value of every cut for each output of one row, by party.

        In place of a party that is left out stands the mean cut of a few reference rows, which
        are asked once (Shapley 1953; Lundberg and Lee 2017, equation 8, with parties as features).

        Args:
            cuts: of an answer.
            row: which of its rows.

        Returns:
            Axes (outputs,) each; empty where only a sum of cuts is known, or parties are many.
        """
        names = list(cuts)
        if SUM in cuts or len(names) > _MOST_EXPLAINED:
            return {}
        if self._reference is None:
            rows = self.label.data.split.test
            spread = np.linspace(0, len(rows) - 1, min(_REFERENCE_ROWS, len(rows)))
            asked = self.ask(np.unique(rows[spread.astype(np.int64)]))
            self._reference = {name: cut.mean(0) for name, cut in asked.cuts.items()}
        present = np.array(list(itertools.product([False, True], repeat=len(names))))
        masks = torch.from_numpy(present)
        mixed = {
            name: torch.where(masks[:, [i]], cuts[name][row].cpu(), self._reference[name].cpu())
            for i, name in enumerate(names)
        }
        on = {name: values.to(cuts[name].device) for name, values in mixed.items()}
        outputs = self.label.answers(self.label.outputs_of(on, self._step - 1))
        return shapley(names, outputs)

    def close(self) -> None:
        """Tell the feature parties that there are no more requests."""
        for link in self._links.values():
            link.send(Frame(Kind.DONE))

    def _send(self, rows: np.ndarray) -> int:
        step, self._step = self._step, self._step + 1
        for link in self._links.values():
            link.send(request(step, rows))
        self._between()
        return step

    def _refusals(self, step: int, *, empty: bool = False) -> dict[str, Refused]:
        """Who refuses a request and why, once every party has said something to it."""
        refused = {}
        for name, link in self._links.items():
            frame = link.look()
            if frame.kind is not Kind.REFUSAL and not empty:
                continue  # the round checks it
            link.receive()
            code = bytes(frame.payload)
            known = not code if empty else code in [bytes([each]) for each in Refused]
            if frame.kind is not Kind.REFUSAL or frame.step != step or not known:
                raise ProtocolError(f"party '{name}' answered a request in an unknown form")
            if code:
                refused[name] = Refused(code[0])
        return refused

    def _wait_for(self, party: str, waits: bool) -> None:
        self.waits_for = party if waits else None


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
