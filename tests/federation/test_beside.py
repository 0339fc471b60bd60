"""Sessions beside each other: one port at the label party, one SuperNode a feature party."""

import threading
import time

import pytest
from real_deployment import Deployment, results

from vfl.federation.guard import Bell
from vfl.federation.programs import SESSIONS_AT_ONCE, SessionsAtOnce
from vfl.training import demo


class Node:
    """What Flower's loop does with messages and replies."""

    def __init__(self):
        self.ready, self.sent = [], []
        self.sessions = SessionsAtOnce(self._push, Bell())

    def come(self):
        callbacks = {"state": self.ready, "send": self.sent.append}
        thread = threading.Thread(
            target=lambda: self.sessions.message_came(**callbacks), daemon=True
        )
        thread.start()
        return thread

    def _push(self, *, state, send):
        while not state:
            time.sleep(0.01)
        reply = state.pop(0)
        if reply == "broken":
            raise RuntimeError("the store of objects has no such reply")
        send(reply)


def test_a_message_does_not_wait_for_the_reply_to_another():
    node = Node()
    for _ in range(3):
        assert not joined(node.come()).is_alive()
    node.ready += ["of the third", "broken", "of the first"]  # in any order, and one may fail
    wait_for(lambda: node.sent == ["of the third", "of the first"])


def test_one_session_more_than_there_are_places_waits_for_a_reply():
    node = Node()
    began = [joined(node.come()) for _ in range(SESSIONS_AT_ONCE - 1)]
    assert not any(thread.is_alive() for thread in began)
    last = node.come()  # which plays, but no further message is fetched
    last.join(0.2)
    assert last.is_alive()
    node.ready.append("a reply")
    assert not joined(last).is_alive()


def joined(thread):
    thread.join(30)
    return thread


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.net
def test_trainings_beside_each_other_give_what_each_gives_alone(tmp_path):
    deployed = Deployment(tmp_path / "project", "train.epochs=2")
    try:
        deployed.start()
        long = deployed.train("train.epochs=60")
        long.wait_for("epoch   2")
        short = deployed.trained()
        assert long.poll() is None
        assert long.wait() == 0, long.said()
        for training, settings in ((short, []), (long, ["train.epochs=60"])):
            alone = demo.run_in_process(
                deployed.folder, deployed.label, lambda record: None, settings
            )
            assert results(alone) == results(deployed.run(training))
    finally:
        deployed.close()
