"""What has rows answered while a label party serves; `vfl.serving` listens for clients by HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vfl.config import PartyFile
from vfl.core.errors import VFLError
from vfl.core.registry import Registry
from vfl.datasets import PartyData
from vfl.datasets.table import Classes
from vfl.session.drift import Drift
from vfl.session.label.asking import ServingParty


class ServingFront:
    """Takes questions about rows, and has a session answer them.

    Attributes:
        welcome: where it listens, for people.
        tasks: further label parties that are to serve meanwhile.
        partial: whether rows are answered without a feature party that is away, where the model
            can.
    """

    partial: bool = False
    tasks: tuple[str, ...]
    welcome: str

    @classmethod
    def open_lead(cls, party: PartyFile, run: str) -> ServingFront:
        """The front of the label party that leads, for its own run.

        Raises:
            RunFolderError: its settings in the run's folder cannot be read.
            UserError: the address cannot be listened on, or is open to others without TLS.
        """
        raise NotImplementedError

    @classmethod
    def open_task(cls, party: PartyFile, folder: Path, ended: Callable[[], bool]) -> ServingFront:
        """The front of a further label party, for its own part of the run.

        Args:
            party: its file.
            folder: its own part of the run.
            ended: asked now and then whether the session has ended.

        Raises:
            UserError: as `open_lead`.
        """
        raise NotImplementedError

    @property
    def was_ready(self) -> bool:
        """Whether rows of what is shown could be answered once."""
        raise NotImplementedError

    def show(
        self,
        version: str,
        parties: list[str],
        data: PartyData,
        classes: Classes | None,
        drift: Drift,
    ) -> None:
        """What the next session serves."""
        raise NotImplementedError

    def following(self) -> Path | None:
        """The folder of the run to go on with, told once; None ends the service."""
        raise NotImplementedError

    def play(self, serving: ServingParty) -> None:
        """Ask for rows until it is told to end; what ends the session early is raised."""
        raise NotImplementedError

    def lost(self, error: VFLError) -> bool:
        """Answer with an error until everybody is back; whether to wait for that."""
        raise NotImplementedError

    def close(self) -> None:
        """Answer nobody any more."""
        raise NotImplementedError


#: By name, because only who serves needs what an HTTP server needs; nobody else adds one.
FRONTS: Registry[ServingFront] = Registry(
    kind="front",
    contract=ServingFront,
    members={"http": "vfl.serving.front:HttpFront"},
)
