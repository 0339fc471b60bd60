"""Interface of the front: the service through which clients query a label party's trained run.

`vfl.serving` implements this interface as an HTTP service.
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

#: Seconds between two checks whether `vfl promote` requested another run, and whether the present
#: run has ended.
_LOOK_S = 0.1
#: Longest wait in seconds for the end of the replaced run's session, before the service handles the
#: next requested run.
_END_S = 10.0


class ServingFront:
    """Receives clients' queries about rows, and passes the queries to a session.

    Attributes:
        welcome: address of the service, as text for users.
        tasks: further label parties that serve the same run at the same time.
        partial: whether the service answers while a feature party is absent; the operator must
            allow this, and the model must be able to.
    """

    partial: bool = False
    tasks: tuple[str, ...]
    welcome: str

    @classmethod
    def open_lead(cls, party: PartyFile, run: str) -> ServingFront:
        """Open the front (HTTP service) of the leading label party for a run of this party.

        Raises:
            RunFolderError: the settings in the run's folder cannot be read.
            UserError: the address is in use or invalid, or other machines can reach the address
                without TLS.
        """
        raise NotImplementedError

    @classmethod
    def open_task(cls, party: PartyFile, folder: Path, ended: Callable[[], bool]) -> ServingFront:
        """Open the front (HTTP service) of a further label party, for this party's part of the run.

        Args:
            party: the party's own file.
            folder: folder of this party's part of the run.
            ended: function that returns whether the session of the leading label party has ended.

        Raises:
            UserError: see `open_lead`.
        """
        raise NotImplementedError

    @property
    def was_ready(self) -> bool:
        """Return whether the service has been able to answer rows at least once."""
        raise NotImplementedError

    def show(
        self,
        version: str,
        parties: list[str],
        data: PartyData,
        classes: Classes | None,
        drift: Drift,
    ) -> None:
        """Set the model and the tables for the next session."""
        raise NotImplementedError

    def following(self) -> Path | None:
        """Return the folder of a run to which `vfl promote` asks to switch, once per request.

        The result is None without such a request.
        """
        raise NotImplementedError

    def successor(self) -> ServingFront:
        """Return a front of the same service for another run, which will replace the present run.

        The present run answers the requests that already wait; then `play` of the present front
        returns.
        """
        raise NotImplementedError

    def retire(self) -> None:
        """Make `play` return as soon as the waiting requests are answered."""
        raise NotImplementedError

    def refused(self, run: str, error: VFLError) -> None:
        """Report to `vfl promote`, which requested this run, why the run is not served."""
        raise NotImplementedError

    def play(self, serving: ServingParty) -> None:
        """Query rows for the clients' requests until the front is retired.

        This method waits until then. If an error ends the session early, the method raises this
        error.
        """
        raise NotImplementedError

    def waits_for(self, parties: Sequence[str]) -> None:
        """Announce to clients that the session starts when these parties have connected."""
        raise NotImplementedError

    def waits_for_alignment(self) -> None:
        """Announce that the session starts when new tables have been aligned."""
        raise NotImplementedError

    def lost(self, error: VFLError) -> bool:
        """Return whether the caller should restart a session that ended with this error.

        Until a session runs again, the service answers requests with an error.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop answering."""
        raise NotImplementedError


#: Function that runs the session of one run for a front, until the front is retired or closed.
Play = Callable[[ServingFront], object]


class _Turn:
    """One served run, whose session runs in a separate thread."""

    def __init__(self, run: str, front: ServingFront, play: Play) -> None:
        self.run, self.front, self._play = run, front, play
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._playing, name="vfl-serving", daemon=True)
        self._thread.start()

    def is_over(self, wait_s: float | None = None) -> bool:
        """Return whether the session has ended; wait at most `wait_s` seconds for its end."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def again(self) -> _Turn:
        """Return a new turn that serves the same run again, with a successor of this front."""
        return _Turn(self.run, self.front.successor(), self._play)

    def took_over(self) -> bool:
        """Wait until the front can answer rows or its session has ended.

        Return whether the front can answer rows.
        """
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
    """Serve a run, then each run to which `vfl promote` asks to switch, without interruption.

    The session of the next run begins while the present run still answers. When the next run can
    answer rows, it replaces the present run; if it fails before, the service continues with the
    present run. Further label parties serve at separate addresses, which only one session at a time
    can use; if there are such parties, the present session therefore ends first.

    Args:
        front: the front (HTTP service) that receives the queries.
        run: name of the run with which the service starts.
        play: function that runs the session of the first run.
        opened: function that takes a run's folder and returns the function that runs sessions of
            this run.
        say: function that is called with the reason why a requested run is not served.

    Returns:
        The names of all served runs, in the order of serving.

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


#: The front is registered by name, because only a party that serves needs the packages of an HTTP
#: server.
FRONTS: Registry[ServingFront] = Registry(
    kind="front",
    contract=ServingFront,
    members={"http": "vfl.serving.front:HttpFront"},
)
