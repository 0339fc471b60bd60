"""Interface of the service that receives queries for a serving label party.

`vfl.serving` implements the interface as an HTTP service.
"""

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

#: Interval at which the service checks for the next run, and for the end of a run, in seconds.
_LOOK_S = 0.1
#: Longest wait for a retired run to end, before the next requested run is looked up, in seconds.
_END_S = 10.0


class ServingFront:
    """Receives queries about rows and passes them to a session.

    Attributes:
        welcome: address of the service, as text for users.
        tasks: further label parties that serve at the same time.
        partial: whether the service may answer, and the model can answer, while a feature party is
            absent.
    """

    partial: bool = False
    tasks: tuple[str, ...]
    welcome: str

    @classmethod
    def open_lead(cls, party: PartyFile, run: str) -> ServingFront:
        """Open the front of the leading label party for its own run.

        Raises:
            RunFolderError: the settings in the run's folder cannot be read.
            UserError: the address is in use or invalid, or is open to others without TLS.
        """
        raise NotImplementedError

    @classmethod
    def open_task(cls, party: PartyFile, folder: Path, ended: Callable[[], bool]) -> ServingFront:
        """Open the front of a further label party, for this party's part of the run.

        Args:
            party: the party's own file.
            folder: folder of this party's part of the run.
            ended: function that returns whether the session has ended.

        Raises:
            UserError: see `open_lead`.
        """
        raise NotImplementedError

    @property
    def was_ready(self) -> bool:
        """Return whether the service could answer rows at least once."""
        raise NotImplementedError

    def show(
        self,
        version: str,
        parties: list[str],
        data: PartyData,
        classes: Classes | None,
        drift: Drift,
    ) -> None:
        """Set the model and the tables that the next session serves."""
        raise NotImplementedError

    def following(self) -> Path | None:
        """Return the folder of the next run that a client requests, once per request; else None."""
        raise NotImplementedError

    def successor(self) -> ServingFront:
        """Return a front of the same service for another run; it will replace the present run.

        The present run answers the requests that already wait; then `play` of this front returns.
        """
        raise NotImplementedError

    def retire(self) -> None:
        """Make `play` return after the waiting requests are answered."""
        raise NotImplementedError

    def refused(self, run: str, error: VFLError) -> None:
        """Report to the client that requested a run why this run is not served."""
        raise NotImplementedError

    def play(self, serving: ServingParty) -> None:
        """Start to serve, and query rows for the clients' requests until the front is retired.

        An error that ends the session early is raised to the caller.
        """
        raise NotImplementedError

    def waits_for(self, parties: Sequence[str]) -> None:
        """Announce that the session starts when these parties have attached."""
        raise NotImplementedError

    def waits_for_alignment(self) -> None:
        """Announce that the session starts when the rows of new tables are aligned."""
        raise NotImplementedError

    def lost(self, error: VFLError) -> bool:
        """Answer requests with an error until all parties have returned.

        Return whether the session should wait for the parties.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop answering."""
        raise NotImplementedError


#: Function that runs the session of one run behind a front, until the front is retired or closed.
Play = Callable[[ServingFront], object]


class _Turn:
    """One run served by a front in its own thread."""

    def __init__(self, run: str, front: ServingFront, play: Play) -> None:
        self.run, self.front, self._play = run, front, play
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._playing, name="vfl-serving", daemon=True)
        self._thread.start()

    def is_over(self, wait_s: float | None = None) -> bool:
        """Return whether the session of this turn has ended, waiting at most `wait_s` seconds."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def again(self) -> _Turn:
        """Return a new turn that serves the same run with a successor of this front."""
        return _Turn(self.run, self.front.successor(), self._play)

    def took_over(self) -> bool:
        """Wait until the front can answer rows, and return True, or until it has failed."""
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
    """Serve a run, and then each run that clients request, without a gap between two runs.

    The session of the next run begins while the present run still answers. The next run replaces
    the present run when it can answer rows; if it cannot be served, the present run stays. Further
    label parties serve at separate addresses, which only one session at a time can use; with such
    parties, the present session ends first.

    Args:
        front: the service that receives the queries.
        run: name of the run that is served first.
        play: function that runs the session of the first run.
        opened: function that takes a run's folder and returns the play function for this run.
        say: function that receives the reason why a requested run is not served.

    Returns:
        The names of the served runs, in order.

    Raises:
        VFLError: the error that ended the session of the last served run.
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


#: The front is registered by name, because only a serving party needs the packages of an HTTP
#: server.
FRONTS: Registry[ServingFront] = Registry(
    kind="front",
    contract=ServingFront,
    members={"http": "vfl.serving.front:HttpFront"},
)
