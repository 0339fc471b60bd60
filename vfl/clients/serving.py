"""The feature party while it serves: one request after the other, until the session is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from vfl.clients.feature_party import FeatureParty
from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.session import Exchange
from vfl.session.drift import Drift
from vfl.session.serving import Refused, Requests

_SAY_EVERY_S = 60.0


class ServedParty:
    """Answers what the label party asks for; see `vfl.session.serving`.

    Args:
        feature: the party, with the weights of its training.
        requests: what it is asked for, and may refuse.
        drift: counts its own inputs that are asked; it tells nobody but its own log and folder.
    """

    def __init__(
        self, feature: FeatureParty, requests: Requests, drift: Drift | None = None
    ) -> None:
        self.requests, self._drift = requests, drift or Drift(None, None)
        self._feature = feature
        self._step: int | None = None

    def answer(self) -> bool:
        """Wait for one request and answer it; False when the session is over.

        Raises:
            ProtocolError: a message out of turn, or rows that this session does not have.
        """
        link = self._feature.end.link
        frame = link.receive()
        if frame.kind is Kind.DONE:
            return False
        first = self._step is None  # it may have come back in the midst of a session
        if frame.kind is not Kind.ASK or not (first or frame.step == self._step):
            raise ProtocolError(
                "a message out of turn from the label party",
                got=f"{frame.kind.name} of step {frame.step}",
                want=f"ASK of step {self._step}, or DONE",
            )
        self._step = frame.step + 1
        rows = self.requests.admit(frame)
        if rows is None or isinstance(rows, Refused):
            why = b"" if rows is None else bytes([rows])
            link.send(Frame(Kind.REFUSAL, frame.step, why))
            return True
        exchange = Exchange(frame.step, "predict", 0, rows, last=True, confirmed=False)
        self._feature.begin(exchange)
        self._feature.answer(exchange)
        self._drift.add(self._feature.inputs, rows=rows)
        return True

    def run(self, say: Callable[[str], None]) -> None:
        """Serve until the session is over; say now and then, in counts, what was asked."""
        said, at = "", time.monotonic()
        while self.answer():
            if time.monotonic() - at > _SAY_EVERY_S:
                at = time.monotonic()
                if said != (said := self._summary()):
                    say(f"party {self._feature.name} {said}")
        say(f"party {self._feature.name} {self._summary()}")

    def _summary(self) -> str:
        if self._drift.inputs is None:
            return self.requests.summary()
        counted = len(self._drift.inputs.names)
        return f"{self.requests.summary()}; {self._drift.drifted()} of {counted} inputs drifted"
