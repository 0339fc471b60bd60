"""A link that tells others about every frame: the ledger counts here, a trace records here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vfl.errors import VFLError
from vfl.frame import Frame
from vfl.link import Observer
from vfl.transport.base import TransportLink


class Observed:
    """A link and its observers, told after each frame that was really sent or received.

    Args:
        link: the link that carries the frames.
        party: name of the feature party at one of its ends.
        end: whose end this is.
        observers: told (party, "up" or "down", frame); up is towards the label party.
    """

    __slots__ = ("_link", "_observers", "_party", "_receiving", "_sending")

    def __init__(
        self,
        link: TransportLink,
        party: str,
        end: Literal["feature", "label"],
        observers: Sequence[Observer],
    ) -> None:
        self._link = link
        self._party = party
        self._observers = tuple(observers)
        self._sending, self._receiving = ("up", "down") if end == "feature" else ("down", "up")

    def send(self, frame: Frame) -> None:
        self._link.send(frame)
        for observer in self._observers:
            observer(self._party, self._sending, frame)

    def receive(self) -> Frame:
        frame = self._link.receive()
        for observer in self._observers:
            observer(self._party, self._receiving, frame)
        return frame

    def fail(self, error: VFLError) -> None:
        self._link.fail(error)

    def close(self) -> None:
        self._link.close()
