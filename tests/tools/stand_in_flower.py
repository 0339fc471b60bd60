"""Flower's part in a session, played by threads of the test's own process."""

import json
import threading
from dataclasses import dataclass
from types import SimpleNamespace

from vfl.clients.session import take_part
from vfl.core.errors import ConsentError, DisagreementError, VFLError
from vfl.session import SessionMessage, for_others


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
        self._replies = {}

    def get_nodes(self):
        return [Node(number, name) for number, name in enumerate(self.parties, start=1)]

    def push_messages(self, messages):
        (message,) = messages
        self._replies.pop(self.parties[message.dst_node_id - 1], None)
        asked = SessionMessage.parse(str(message.content["session"]["message"]))
        name = self.parties[message.dst_node_id - 1]
        thread = threading.Thread(target=self._play, args=(asked, name))
        self.threads.append(thread)
        thread.start()
        return [name]

    def pull_messages(self, identifiers):
        """The replies of parties that refused a session; of no others, for nobody reads them."""
        return [self._replies.pop(name) for name in identifiers if name in self._replies]

    def _play(self, asked, name):
        try:
            take_part(asked, self.files[name], self.said.append)
        except VFLError as error:
            self.failures.append(error)
            if isinstance(error, ConsentError | DisagreementError):
                failure = json.dumps(for_others(error, name).record())
                self._replies[name] = SimpleNamespace(
                    metadata=SimpleNamespace(reply_to_message_id=name),
                    has_error=lambda: False,
                    content={"session": {"failure": failure}},
                )
        except SystemExit:
            pass  # the party's process ends without a word
