"""Feature and middle parties that answer the label party's requests to a served run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from vfl.clients.middle_party import MiddleParty
from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.session import Exchange
from vfl.session.drift import Drift
from vfl.session.serving import Peeked, Refused, Requests, refusals

_SAY_EVERY_S = 60.0


class _Served:
    """Receives requests over one network link, and counts the requests.

    Args:
        name: name of the party.
        link: network link to the label party that sends requests.
        requests: object that checks and counts requests.
        drift: counters of the queried rows, by value range of each of the party's inputs; only the
            party's log and folder contain these counters.
        askers: number of label parties that send requests; each label party has separate step
            numbers; see `Askers`.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        requests: Requests,
        drift: Drift | None = None,
        askers: int = 1,
    ) -> None:
        self.requests, self._drift = requests, drift or Drift(None, None)
        self._name, self._link, self._askers = name, link, askers
        self._steps = dict[int, int]()

    def answer(self) -> bool:
        """Wait for one request and answer the request; return False when the session is over."""
        raise NotImplementedError

    def run(self, say: Callable[[str], None]) -> None:
        """Serve until the session is over; report the number of requests once a minute."""
        said, at = "", time.monotonic()
        try:
            while self.answer():
                if time.monotonic() - at > _SAY_EVERY_S:
                    at = time.monotonic()
                    if said != (said := self._summary()):
                        say(f"party {self._name} {said}")
        finally:
            self.requests.close()
        say(f"party {self._name} {self._summary()}")

    def _admit(self) -> tuple[Frame, np.ndarray | Refused | None] | None:
        """Return the next request with its checked rows or a refusal.

        Return None after the last request.

        Raises:
            ProtocolError: the message is unexpected, or requests rows that this session does not
                have.
        """
        frame = self._link.receive()
        if frame.kind is Kind.DONE:
            return None
        asker = frame.step % self._askers
        # a label party that reconnects may continue with a later step
        step = self._steps.get(asker, frame.step)
        if frame.kind is not Kind.ASK or frame.step != step:
            raise ProtocolError(
                "an unexpected message from the label party",
                got=f"{frame.kind.name} of step {frame.step}",
                want=f"ASK of step {step}, or DONE",
            )
        self._steps[asker] = frame.step + self._askers
        return frame, self.requests.admit(frame)

    def _refuse(self, step: int, why: bytes) -> None:
        self._link.send(Frame(Kind.REFUSAL, step, why))

    def _summary(self) -> str:
        if self._drift.inputs is None:
            return self.requests.summary()
        counted = len(self._drift.inputs.names)
        return f"{self.requests.summary()}; {self._drift.drifted()} of {counted} inputs drifted"


class AnsweringEnd(Protocol):
    """Methods of a feature party's endpoint that a service calls."""

    link: Link


class Answering(Protocol):
    """Interface of a feature party that has trained weights and answers queries."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Tensor | None: ...
    @property
    def end(self) -> AnsweringEnd: ...

    def begin(self, exchange: Exchange) -> None:
        """Send this party's values of an exchange's rows to the label party."""

    def answer(self, exchange: Exchange) -> None:
        """Answer messages of other parties."""


class ServedParty(_Served):
    """A feature party that answers queries of a service; see `vfl.session.serving`.

    Args:
        feature: the feature party, with its trained weights.
        requests, drift, askers: see `_Served`.
    """

    def __init__(
        self,
        feature: Answering,
        requests: Requests,
        drift: Drift | None = None,
        askers: int = 1,
    ) -> None:
        super().__init__(feature.name, feature.end.link, requests, drift, askers)
        self._feature = feature

    def answer(self) -> bool:
        if (asked := self._admit()) is None:
            return False
        frame, rows = asked
        if rows is None or isinstance(rows, Refused):
            self._refuse(frame.step, b"" if rows is None else bytes([rows]))
            return True
        exchange = _exchange(frame.step, rows)
        self._feature.begin(exchange)
        self._feature.answer(exchange)
        if self._feature.inputs is not None:
            self._drift.add(self._feature.inputs, rows=rows)
        return True


class ServedMiddle(_Served):
    """The middle party in a service.

    The middle party queries feature parties, and sends its output to the label party.

    Args:
        middle: the middle party, with its trained weights.
        requests: see `_Served`.
    """

    def __init__(self, middle: MiddleParty, requests: Requests) -> None:
        super().__init__(middle.name, middle.end.link, requests)
        self._middle, self._links = middle, dict[str, Peeked]()
        self._asked: tuple[int, np.ndarray | Refused | None] | None = None
        for name, end in middle.ends.items():
            self._links[name] = end.link = Peeked(name, end.link)

    def answer(self) -> bool:
        if not self.ask():
            return False
        self.give()
        return True

    def ask(self) -> bool:
        """Wait for one request and pass it to the feature parties.

        Return False when the session is over.
        """
        self._asked, asked = None, self._admit()
        if asked is None:
            for link in self._links.values():
                link.send(Frame(Kind.DONE))
            return False
        self._asked = asked[0].step, asked[1]
        payload = b"" if isinstance(asked[1], Refused) else asked[0].payload
        # requests without rows are passed on too, so that all parties count the same requests
        for link in self._links.values():
            link.send(Frame(Kind.ASK, asked[0].step, payload))
        return True

    def give(self) -> None:
        """Answer the label party's request after every feature party has answered the middle party.

        Raises:
            ProtocolError, FrameError, NonFiniteError: a feature party's message is not a valid
                answer.
        """
        assert self._asked is not None, "`ask` has passed a request on"
        (step, asked), why = self._asked, b""
        rows = asked if isinstance(asked, np.ndarray) else None
        refused = refusals(self._links, step, self._links if rows is None else ())
        if rows is not None and not refused:
            self._middle.begin(_exchange(step, rows))
            return
        for name in () if rows is None else self._links.keys() - refused.keys():
            self._links[name].receive()
        if isinstance(asked, Refused):
            why = bytes([asked])
        for party, reason in refused.items():
            why = bytes([reason]) + party.encode()
        self._refuse(step, why)


def _exchange(step: int, rows: np.ndarray) -> Exchange:
    return Exchange(step, "predict", 0, rows, last=True, confirmed=False)
