"""What has rows answered while a label party serves; `vfl.serving` listens for clients by HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from vfl.config import PartyFile
from vfl.core.errors import VFLError
from vfl.core.registry import Registry
from vfl.datasets import PartyData
from vfl.datasets.table import Classes
from vfl.session.drift import Drift
from vfl.session.label.asking import ServingParty

#: How often it is looked for another run, and for the end of one.
_LOOK_S = 0.1
#: How long a run that was retired is waited for, before another one is looked for.
_END_S = 10.0


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
        """The folder of the run to go on with, told once; None where none is asked for."""
        raise NotImplementedError

    def successor(self) -> ServingFront:
        """The same service for another run, whose `play` takes over from the run before it.

        What waits for the run before is answered by that run; then its `play` returns.
        """
        raise NotImplementedError

    def retire(self) -> None:
        """Have `play` return once what waits is answered."""
        raise NotImplementedError

    def refused(self, run: str, error: VFLError) -> None:
        """Say to whoever asked for a run why it is not served."""
        raise NotImplementedError

    def play(self, serving: ServingParty) -> None:
        """Take over, and ask for rows until told to end; what ends the session early is raised."""
        raise NotImplementedError

    def waits_for(self, parties: Sequence[str]) -> None:
        """Say that the session begins once these parties have come."""
        raise NotImplementedError

    def waits_for_alignment(self) -> None:
        """Say that the session begins once the rows of new tables have been aligned."""
        raise NotImplementedError

    def lost(self, error: VFLError) -> bool:
        """Answer with an error until everybody is back; whether to wait for that."""
        raise NotImplementedError

    def close(self) -> None:
        """Answer nobody any more."""
        raise NotImplementedError


#: Plays the session of one run behind a front, until that is told to end.
Play = Callable[[ServingFront], object]


class _Turn:
    """One run behind a front, in a thread of its own."""

    def __init__(self, run: str, front: ServingFront, play: Play) -> None:
        self.run, self.front, self._play = run, front, play
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._playing, name="vfl-serving", daemon=True)
        self._thread.start()

    def is_over(self, wait_s: float | None = None) -> bool:
        """Whether it has ended, or does so within some seconds."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def again(self) -> _Turn:
        """The same run once more."""
        return _Turn(self.run, self.front.successor(), self._play)

    def took_over(self) -> bool:
        """Wait until rows can be asked of it, or it has failed."""
        while not self.front.was_ready:
            if self.is_over(_LOOK_S):
                return self.front.was_ready
        return True

    def _playing(self) -> None:
        try:
            self._play(self.front)
        except BaseException as problem:
            self.problem = problem


def serve_in_turn(
    front: ServingFront,
    run: str,
    play: Play,
    opened: Callable[[Path], Play],
    say: Callable[[str], object],
) -> list[str]:
    """Serve a run, and then whichever other one is asked for, without a gap between the two.

    The session of the next run begins beside the one that answers. It takes over once its rows can
    be asked for; a run that cannot be served leaves what was. Where further label parties serve at
    addresses of their own, which one session at a time can have, the session before ends first.

    Args:
        front: what has rows answered.
        run: name of the first one.
        play: plays it.
        opened: gives what plays the run of a folder.
        say: told why another run is not served.

    Returns:
        The names of the runs that were served, in turn.

    Raises:
        VFLError: what ended the session of the run that was served last.
    """
    now, served = _Turn(run, front, play), [run]
    while not now.is_over(_LOOK_S):
        if (asked := front.following()) is None:
            continue
        before = now
        try:
            following = opened(asked)
            if front.tasks:
                now.front.retire()
                now.is_over()
            now = _Turn(asked.name, before.front.successor(), following)
            if not now.took_over() and now.problem is not None:
                raise now.problem
        except VFLError as error:
            now = before.again() if before.is_over(0) and before.problem is None else before
            say(f"{error.what}; going on with {before.run}")
            front.refused(asked.name, error)
        else:
            before.is_over(_END_S)
            served.append(asked.name)
    if now.problem is not None:
        raise now.problem
    return served


#: By name, because only who serves needs what an HTTP server needs; nobody else adds one.
FRONTS: Registry[ServingFront] = Registry(
    kind="front",
    contract=ServingFront,
    members={"http": "vfl.serving.front:HttpFront"},
)
