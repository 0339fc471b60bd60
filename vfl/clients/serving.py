"""The feature party while it serves: one request after the other, until the session is over."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vfl.clients.feature_party import FeatureParty
from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.session import Exchange
from vfl.session.drift import DRIFTED, Drift
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
        self._step = 0
        self._sent: Exchange | None = None

    def answer(self) -> bool:
        """Wait for one request and answer it; False when the session is over.

        Raises:
            ProtocolError: a message out of turn, or rows that this session does not have.
        """
        link = self._feature.end.link
        frame = link.receive()
        if frame.kind is Kind.DONE:
            return False
        if frame.kind is not Kind.ASK or frame.step != self._step:
            raise ProtocolError(
                "a message out of turn from the label party",
                got=f"{frame.kind.name} of step {frame.step}",
                want=f"ASK of step {self._step}, or DONE",
            )
        self._step += 1
        rows = self.requests.admit(frame)
        if rows is None or isinstance(rows, Refused):
            why = b"" if rows is None else bytes([rows])
            link.send(Frame(Kind.REFUSAL, frame.step, why))
            return True
        self._sent = Exchange(frame.step, "predict", 0, rows, last=True)
        self._feature.begin(self._sent)
        self._feature.answer(self._sent)
        self._drift.add(self._feature.inputs.index_select(0, torch.from_numpy(rows)))
        return True

    def finish(self) -> None:
        """Wait until the label party has the cut, if one was sent."""
        if self._sent is not None:
            self._feature.finish(self._sent)
            self._sent = None

    def run(self, say: Callable[[str], None]) -> None:
        """Serve until the session is over; say now and then, in counts, what was asked."""
        said, at = "", time.monotonic()
        while self.answer():
            self.finish()
            if time.monotonic() - at > _SAY_EVERY_S:
                at = time.monotonic()
                if said != (said := self._summary()):
                    say(f"party {self._feature.name} {said}")
        say(f"party {self._feature.name} {self._summary()}")

    def _summary(self) -> str:
        if self._drift.inputs is None:
            return self.requests.summary()
        drifted = int((self._drift.inputs.stability() > DRIFTED).sum())
        counted = len(self._drift.inputs.names)
        return f"{self.requests.summary()}; {drifted} of {counted} inputs drifted"
