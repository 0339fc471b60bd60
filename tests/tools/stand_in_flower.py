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
        identifier = f"message {len(self.threads)}"
        thread = threading.Thread(target=self._play, args=(asked, name, identifier))
        self.threads.append(thread)
        thread.start()
        return [identifier]

    def pull_messages(self, identifiers):
        gone = [one for one in identifiers if one in self._failed]
        return [_reply(one, self._failed.pop(one)) for one in gone]

    def _play(self, asked, name, identifier):
        try:
            take_part(asked, self.files[name], self.said.append)
        except VFLError as error:
            self.failures.append(error)
            if self.tells or isinstance(error, ConsentError | DisagreementError):
                self._failed[identifier] = error
        except SystemExit:
            pass  # the party's process ends without a word


def _reply(identifier, error):
    """What a party's app sends back when the party fails."""
    return reply_of(identifier, {"session": {"failure": json.dumps(error.record())}})


def reply_of(identifier, content):
    """What an app sent back to a message, as Flower hands it out."""
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identifier),
        content=content,
        has_error=lambda: False,
    )
