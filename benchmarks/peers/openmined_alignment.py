"""openmined-psi as an alignment protocol for the common rows of two parties, by another author.

    pip install openmined-psi==2.0.6
    vfl align --plugin benchmarks/peers/openmined_alignment.py -s align.protocol=openmined ...

The library computes Diffie-Hellman on NIST P-256 between a client, which learns the result, and a
server, which does not (Angelou et al. 2020). Here both parties learn the result, the label party
last: the feature party is first the client, accepts its result, and is then the server. The
library's own messages travel inside the messages of the session.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from vfl.core.errors import ConfigError, MissingPackageError, ProtocolError
from vfl.datasets.alignment.protocols import (
    NO,
    PROTOCOLS,
    YES,
    Message,
    Own,
    Protocol,
    Receive,
    Role,
    Send,
    other_size,
    refused_by_others,
    too_few_common,
)
from vfl.datasets.alignment.tags import KEY_BYTES, tags_of

_HEAD_BYTES = 64
_RATE = 1e-9  # rate of false positives in the library's compressed sets, which are not used

_Step = Generator[Send | Receive, Message, Any]


class OpenminedPsi(Protocol):
    """Diffie-Hellman by openmined-psi with uncompressed sets, which have no false positives.

    The feature party learns which of its rows are common. After the feature party has accepted, the
    label party learns which of its own rows are common. Both parties sort these rows by hashes
    under a key that the label party draws.

    Learned: each party learns the size of the other party's set; with `pad`, it learns only an
    upper bound of this size. An id can only be tested by both parties together (decisional
    Diffie-Hellman). A label party that violates the protocol may query different ids in the second
    run, as many ids as it announced.

    Bytes of two parties with n ids each: 105 n each way. Curve multiplications: 6 for each id.
    """

    id_bytes = 40

    def role(self, own: Own, parties: Sequence[str], label_party: str) -> Role:
        if len(parties) != 2:
            raise ConfigError(
                "openmined-psi finds the common rows of two parties",
                got=f"{len(parties)} parties",
                fix="-s align.protocol=ecdh",
            )
        other, psi = next(party for party in parties if party != own.party), _library()
        shuffled = np.argsort(np.frombuffer(os.urandom(8 * len(own.ids)), "<u8"), kind="stable")
        items = [own.ids[row].hex() for row in shuffled]
        items += [f"-{os.urandom(KEY_BYTES).hex()}" for _ in range(self.dummies(own))]
        if own.party == label_party:
            key = secrets.token_bytes(KEY_BYTES)
            yield Send(other, key)
            yield from self._answer(psi, own, other, items)
            if (yield Receive(other, 1)) != YES:
                raise refused_by_others()
            found = yield from self._ask(psi, own, other, items)
            yield from _say(own, other, len(found))
        else:
            key = bytes((yield Receive(other, KEY_BYTES)))
            found = yield from self._ask(psi, own, other, items)
            yield from _say(own, other, len(found))
            yield from self._answer(psi, own, other, items)
            if (yield Receive(other, 1)) != YES:
                raise refused_by_others()
        rows = shuffled[found]
        tags = tags_of([own.ids[row] for row in rows], key)
        ordered: np.ndarray = rows[np.lexsort(tags.T[::-1])]
        return ordered

    def _ask(self, psi: Any, own: Own, other: str, items: list[str]) -> _Step:
        """Run the client: return the items that the other party has too."""
        client = psi.client.CreateWithNewKey(True)
        setup = _read(psi.ServerSetup, (yield self._receive(own, other)), other)
        own.admit(other, len(setup.raw.encrypted_elements))
        yield Send(other, client.CreateRequest(items).SerializeToString())
        response = _read(psi.Response, (yield self._receive(own, other)), other)
        answers = response.encrypted_elements
        if len(answers) != len(items) or len(set(answers)) != len(items):
            raise ProtocolError(f"'{other}' answered too few items, or an item twice")
        try:
            found = np.array(client.GetIntersection(setup, response), dtype=np.int64)
        except (RuntimeError, ValueError):  # the text of the library's error is not shown
            raise other_size(other) from None
        if len(found) and found.max() >= len(own.ids):
            raise ProtocolError("a dummy item was reported as common")
        return found

    def _answer(self, psi: Any, own: Own, other: str, items: list[str]) -> _Step:
        """Run the server: answer the client's request."""
        server = psi.server.CreateWithNewKey(True)
        raw = psi.DataStructure.RAW
        setup = server.CreateSetupMessage(_RATE, len(items), items, raw)
        yield Send(other, setup.SerializeToString())
        request = _read(psi.Request, (yield self._receive(own, other)), other)
        own.admit(other, len(request.encrypted_elements))
        try:
            answer = server.ProcessRequest(request)
        except (RuntimeError, ValueError):
            raise other_size(other) from None
        yield Send(other, answer.SerializeToString())

    def _receive(self, own: Own, other: str) -> Receive:
        return Receive(other, _HEAD_BYTES + self.id_bytes * own.bounds.max_ids)


def _library() -> Any:
    try:
        return import_module("private_set_intersection.python")
    except ImportError:
        raise MissingPackageError(
            "this alignment needs openmined-psi", fix="pip install openmined-psi==2.0.6"
        ) from None


def _read(kind: Any, payload: Message, sender: str) -> Any:
    """Parse a message in the library's format."""
    message = kind()
    try:
        message.ParseFromString(bytes(payload))
    except Exception as problem:  # protobuf's own DecodeError, whose text quotes the message
        if type(problem).__name__ != "DecodeError":
            raise
        raise other_size(sender) from None
    return message


def _say(own: Own, other: str, common: int) -> Generator[Send, Message, None]:
    """Send whether this party accepts the number of common rows."""
    accepted = common >= own.bounds.min_common
    yield Send(other, YES if accepted else NO)
    if not accepted:
        raise too_few_common(own, common)


PROTOCOLS.register("openmined", OpenminedPsi)
