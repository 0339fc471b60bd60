"""Flower's part in a session, played by threads of the test's own process."""

import threading
from dataclasses import dataclass

from vfl.clients.session import take_part
from vfl.core.errors import VFLError
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
    """Hands each session message to a thread that plays the feature party of that node."""

    def __init__(self, parties):
        self.parties = parties
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
        thread = threading.Thread(target=self._play, args=(asked, name))
        self.threads.append(thread)
        thread.start()
        return [name]

    def pull_messages(self, identifiers):
        return []

    def _play(self, asked, name):
        try:
            take_part(asked, self.files[name], self.said.append)
        except VFLError as error:
            self.failures.append(error)
        except SystemExit:
            pass  # the party's process ends without a word
