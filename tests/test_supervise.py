"""A service that ends is started again, with longer and longer pauses, and not for ever."""

import pytest

from vfl import supervise as room
from vfl.errors import AuthenticationError, LostPeerError
from vfl.supervise import supervise


class Standing:
    name = "the SuperNode of bank"

    def __init__(self, stopped):
        self._stopped = stopped

    def stop(self):
        self._stopped.append(self)

    def wait(self):
        return -9


class World:
    """A clock that only pauses move, and what each attempt to start brings."""

    def __init__(self, *attempts):
        self.attempts = list(attempts)
        self.now = 0.0
        self.pauses, self.said, self.stopped = [], [], []

    def start(self):
        attempt = self.attempts.pop(0)
        if isinstance(attempt, Exception):
            raise attempt
        return Standing(self.stopped)

    def follow(self, service):
        if not self.attempts:
            raise KeyboardInterrupt

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def run(self, **options):
        supervise(self.start, self.follow, self.said.append, **options)


@pytest.fixture
def world(monkeypatch):
    def make(*attempts):
        made = World(*attempts)
        monkeypatch.setattr(room, "sleep", made.sleep)
        monkeypatch.setattr(room, "monotonic", lambda: made.now)
        return made

    return make


def away():
    return LostPeerError("the SuperLink cannot be reached", got="Connection refused")


def test_it_is_started_again_until_somebody_interrupts(world):
    bank = world("up", away(), away(), "up", "up")
    with pytest.raises(KeyboardInterrupt):
        bank.run()
    assert bank.pauses == [1.0, 2.0, 4.0, 1.0]
    assert bank.said[0] == "the SuperNode of bank ended (exit -9); starting it again in 1 s"
    assert bank.said[1] == (
        "the SuperLink cannot be reached (Connection refused); starting it again in 2 s"
    )
    assert len(bank.stopped) == 3


def test_patience_ends_and_the_reason_is_told(world):
    bank = world(*(away() for _ in range(100)))
    with pytest.raises(LostPeerError, match="cannot be reached"):
        bank.run(patience_s=60)
    assert bank.pauses == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert bank.now <= 60


def test_what_waiting_does_not_mend_is_told_at_once(world):
    bank = world(AuthenticationError("the certificate of the SuperLink is not accepted"))
    with pytest.raises(AuthenticationError):
        bank.run()
    assert bank.pauses == []
