"""Flower's part in a session, played by threads of the test's own process."""

import json
import threading
from dataclasses import dataclass
from types import SimpleNamespace

from vfl.clients.session import take_part
from vfl.core.errors import ConsentError, DisagreementError, VFLError
from vfl.session import SessionMessage


@dataclass
class Node:
    node_id: int
    name: str


@dataclass
class Envelope:
    """A message that needs no running Flower."""

    content: object
    dst_node_id: int
    message_type: str
    ttl: float


class Flower:
    """Hands each session message to a thread that plays the feature party of that node.

    A party that refuses a session replies at once, as it does over Flower; where it `tells`, one
    that fails does so too, else nobody ever hears of that.
    """

    def __init__(self, parties, *, tells=False):
        self.parties = parties
        self.tells = tells
        self._failed = {}
        self.files = {}
        self.threads = []
        self.said = []
        self.failures = []

    def get_nodes(self):
        return [Node(number, name) for number, name in enumerate(self.parties, start=1)]

    def push_messages(self, messages):
        (message,) = messages
        asked = SessionMessage.parse(str(message.content["session"]["message"]))
        name = self.parties[message.dst_node_id - 1]
        self._failed.pop(name, None)  # of an earlier session
        thread = threading.Thread(target=self._play, args=(asked, name))
        self.threads.append(thread)
        thread.start()
        return [name]

    def pull_messages(self, identifiers):
        gone = [name for name in identifiers if name in self._failed]
        return [_reply(name, self._failed.pop(name)) for name in gone]

    def _play(self, asked, name):
        try:
            take_part(asked, self.files[name], self.said.append)
        except VFLError as error:
            self.failures.append(error)
            if self.tells or isinstance(error, ConsentError | DisagreementError):
                self._failed[name] = error
        except SystemExit:
            pass  # the party's process ends without a word


def _reply(name, error):
    """What a party's app sends back when the party fails."""
    return reply_of(name, {"session": {"failure": json.dumps(error.record())}})


def reply_of(identifier, content):
    """What an app sent back to a message, as Flower hands it out."""
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identifier),
        content=content,
        has_error=lambda: False,
    )
