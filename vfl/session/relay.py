"""Messages between two parties without a direct network connection; the label party relays them.

In a frame from one feature party to another, `peer` is the receiver's number: its position among
the parties that have a stream to the label party, counted from 1. In a frame for the label party,
`peer` is 0. The payload of a relayed frame is encrypted and authenticated end to end; the
authentication covers the frame's kind and step. When the label party forwards a frame, it replaces
the receiver's number in `peer` with the sender's number.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from vfl.config import PartyFile
from vfl.core.errors import AuthenticationError, ProtocolError, VFLError
from vfl.core.frame import Frame, Kind, Link
from vfl.datasets.alignment.protocols import Message, Send
from vfl.datasets.on_disk import DiskBytes
from vfl.session import rules
from vfl.session.store.identity import Identity, read_pins
from vfl.session.store.witness import Standing
from vfl.session.terms import Terms
from vfl.transport.link import ObservedPoll, PolledLink, TransportLink
from vfl.transport.pairs import (
    OFFER_BYTES,
    TAG_BYTES,
    Agreeing,
    NotAgreedError,
    SealedPairs,
    derived,
    opened_offer,
)

_BLOCK_BYTES = 1 << 20  # bytes that are encrypted at a time if the payload is a file


class PairSeals(SealedPairs[Message, Message]):
    """Encrypts messages between two parties, so that the relaying label party cannot read them.

    At the start of a session, each party sends to every other party an offer: a new X25519 key (RFC
    7748) and the counter of the sender's store. The sender's identity key signs the offer, and the
    receiver checks that the counter has increased (`vfl.session.store.witness`). From the
    shared secret of a pair of parties, HKDF (RFC 5869) derives two keys, one for each direction;
    the keys also depend on the session, the terms and both offers. AES-256-GCM encrypts and
    authenticates the messages of the pair, which are numbered.

    Args:
        party: the party's own configuration file, which names its identity key and the pinned keys
            of the other parties.
        terms: the agreed terms.
        session: identifier of this attempt (one start) of the session.
        others: parties that receive sealed messages from this party; None means every other feature
            party.
        standing: counter of the party's store; None if the party announces no counter.

    Raises:
        MissingDataError, DataError: an identity key or a pinned key is missing, and the session
            needs it.
    """

    def __init__(
        self,
        party: PartyFile,
        terms: Terms,
        session: str,
        others: Sequence[str] | None = None,
        standing: Standing | None = None,
    ) -> None:
        self._me, self._standing = party.party, standing
        named = terms.feature_parties if others is None else others
        super().__init__(
            [name for name in named if name != self._me], lambda sender, *_: _not_of(sender)
        )
        facts = [session, terms.digest(), *rules.peers(terms), terms.label_party]
        self._binding = hashlib.sha256(json.dumps(facts).encode()).digest()
        self._own, self._waiting = Agreeing(), dict[str, list[Message]]()
        self._offer = b""
        if self.others:
            self._pins = read_pins(party.beside(party.identity.peers), self.others)
            identity = Identity.kept_at(party.beside(party.identity.key))
            count = 0 if standing is None else standing.announce().count
            self._offer = self._own.offer(identity, self._signed(self._me), count)

    def offers(self) -> list[Send]:
        """Return the first message to every other of these parties: this party's offer."""
        return [Send(name, self._offer) for name in self.others]

    def seal(self, sent: Send) -> list[Send]:
        """Encrypt a message for its receiver.

        Return an empty list until the receiver's offer has arrived.
        """
        if sent.to not in self.others:
            return [sent]
        if not self.has_keys(sent.to):
            self._waiting.setdefault(sent.to, []).append(sent.payload)
            return []
        return [Send(sent.to, self.sealed(sent.to, sent.payload))]

    def open(self, sender: str, payload: Message) -> tuple[Message | None, list[Send]]:
        """Decrypt a received message.

        The result is the content, None if the message was an offer, and the messages to send.

        Raises:
            AuthenticationError: the party that the frame names as sender has not signed the offer,
                or has not encrypted the message.
        """
        if sender not in self.others:
            return payload, []
        if not self.has_keys(sender):
            self._agree(sender, bytes(payload[: OFFER_BYTES + 1]))
            held = self._waiting.pop(sender, [])
            return None, [one for each in held for one in self.seal(Send(sender, each))]
        return self.opened(sender, payload), []

    def _agree(self, sender: str, offer: bytes) -> None:
        try:
            public, count = opened_offer(offer, self._pins[sender], self._signed(sender))
            if self._standing is not None:
                self._standing.admit_count(sender, count)
            shared = self._own.shared(public)
        except NotAgreedError:
            raise _not_of(sender) from None

        def cipher(one: str, two: str, offers: bytes) -> _Seal:
            info = b"vfl sealed pair 1" + json.dumps([one, two]).encode() + offers
            return _Seal(derived(shared, info, salt=self._binding))

        there = cipher(self._me, sender, self._offer + offer)
        self.use(sender, there, cipher(sender, self._me, offer + self._offer), first=1)

    def _signed(self, party: str) -> bytes:
        return b"vfl sealed offer 2" + self._binding + party.encode() + b"\0"


class _Seal:
    """Encryption of bytes or files with AES-256-GCM and one key; a file is read in blocks."""

    def __init__(self, key: bytes) -> None:
        self._key, self._whole = AES(key), AESGCM(key)

    def encrypt(self, nonce: bytes, payload: Message, about: bytes | None) -> Message:
        if isinstance(payload, bytes):
            return self._whole.encrypt(nonce, payload, about)
        encryptor, found = Cipher(self._key, GCM(nonce)).encryptor(), DiskBytes(payload.place)
        encryptor.authenticate_additional_data(about or b"")
        for start in range(0, len(payload), _BLOCK_BYTES):
            found.write(encryptor.update(payload[start : start + _BLOCK_BYTES]))
        encryptor.finalize()
        found.write(encryptor.tag)
        return found

    def decrypt(self, nonce: bytes, payload: Message, about: bytes | None) -> Message:
        """Decrypt a payload, and return its content.

        The content is returned only after the tag over the whole payload was verified.

        Raises:
            InvalidTag: the authentication tag is wrong.
        """
        if isinstance(payload, bytes):
            return self._whole.decrypt(nonce, payload, about)
        if (size := len(payload) - TAG_BYTES) < 0:
            raise InvalidTag
        decryptor = Cipher(self._key, GCM(nonce, payload[size:])).decryptor()
        found = DiskBytes(payload.place)
        decryptor.authenticate_additional_data(about or b"")
        for start in range(0, size, _BLOCK_BYTES):
            found.write(decryptor.update(payload[start : min(start + _BLOCK_BYTES, size)]))
        decryptor.finalize()
        return found


def _not_of(sender: str) -> AuthenticationError:
    return AuthenticationError(
        f"a message of this session was not sealed by party '{sender}'",
        want="a signature by the key that is pinned in peers, and a message sealed with the "
        "pair's key",
    )


def about(frame: Frame) -> bytes:
    """Return the associated data of an encrypted frame, which sender and receiver compute alike."""
    return f"{frame.kind.name} {frame.step}".encode()


class SealedLinks:
    """Divides a party's stream into a link to the label party and encrypted links to other parties.

    Args:
        stream: stream to the label party.
        seals: object that encrypts and authenticates messages, so that the relaying label party
            cannot read them.
        parties: all parties with a stream, in an order that all agree on.
        most: largest number of buffered frames of one sender.
        bound: function that takes a frame and returns the associated data that AES-GCM
            authenticates with the frame.

    Attributes:
        direct: the link to the label party.
        others: the encrypted links to other parties, by party.
    """

    def __init__(
        self,
        stream: Link,
        seals: SealedPairs[bytes, Message],
        parties: Sequence[str],
        most: int,
        bound: Callable[[Frame], bytes] = about,
    ) -> None:
        self._stream, self._seals, self._parties, self._most = stream, seals, list(parties), most
        self._bound = bound
        self._waiting: dict[int, deque[Frame]] = defaultdict(deque)
        self.direct: Link = _Pair(stream.send, lambda: self._receive(0))
        self.others: dict[str, TransportLink] = {
            name: _Pair(self._sender(name), self._receiver(name)) for name in seals.others
        }

    def agree(self, seals: PairSeals) -> None:
        """Exchange offers with all other parties, and derive the keys of every pair.

        Args:
            seals: object that encrypts the messages on these links.

        Raises:
            AuthenticationError: an offer was not signed by the expected party.
        """
        for sent in seals.offers():
            self._stream.send(Frame(Kind.PROTOCOL, 0, bytes(sent.payload), self._number(sent.to)))
        for name in self._seals.others:
            frame = self._receive(self._number(name))
            if frame.kind is not Kind.PROTOCOL or len(frame.payload) != OFFER_BYTES:
                raise _out_of_turn(frame, name)
            seals.open(name, bytes(frame.payload))

    def _sender(self, name: str) -> Callable[[Frame], None]:
        def send(frame: Frame) -> None:
            sealed = self._seals.sealed(name, bytes(frame.payload), self._bound(frame))
            number = self._number(name)
            self._stream.send(Frame(frame.kind, frame.step, bytes(sealed), number))

        return send

    def _receiver(self, name: str) -> Callable[[], Frame]:
        def receive() -> Frame:
            frame = self._receive(self._number(name))
            opened = self._seals.opened(name, bytes(frame.payload), self._bound(frame))
            return Frame(frame.kind, frame.step, bytes(opened))

        return receive

    def _receive(self, number: int) -> Frame:
        """Receive the next frame from the party with this number; buffer all other frames."""
        while not self._waiting[number]:
            self._keep(self._stream.receive())
        return self._waiting[number].popleft()

    def receive_any(self) -> tuple[str | None, Frame]:
        """Receive the next frame from any party, with the sender's name.

        The name is None for the label party.
        """
        while True:
            for name in (None, *self._seals.others):
                number = 0 if name is None else self._number(name)
                if self._waiting[number]:
                    link = self.direct if name is None else self.others[name]
                    return name, link.receive()
            self._keep(self._stream.receive())

    def came(self, name: str | None, poll: Callable[[], Frame | None]) -> bool:
        """Buffer all frames that have arrived; return whether this sender sent one of them."""
        while (frame := poll()) is not None:
            self._keep(frame)
        return bool(self._waiting[0 if name is None else self._number(name)])

    def _keep(self, frame: Frame) -> None:
        numbers = {0, *map(self._number, self._seals.others)}
        if frame.peer not in numbers or len(self._waiting[frame.peer]) >= self._most:
            raise _out_of_turn(frame, "the label party")
        self._waiting[frame.peer].append(frame)

    def _number(self, name: str) -> int:
        return 1 + self._parties.index(name)


class _Pair:
    """A party's link to one other party, over a stream that several such links share."""

    def __init__(self, send: Callable[[Frame], None], receive: Callable[[], Frame]) -> None:
        self.send, self.receive = send, receive

    def fail(self, error: VFLError) -> None:
        """Do nothing, because the stream, which other links share, reports errors itself."""

    def close(self) -> None:
        """Do nothing, because the function that opened the stream closes it."""


class PolledPair(_Pair):
    """One link of a serving party, to another party or to the label party; polling it never blocks.

    Args:
        links: the party's links.
        name: name of the party that the link leads to; None for the label party.
        stream: the stream that carries the links.
    """

    def __init__(self, links: SealedLinks, name: str | None, stream: PolledLink) -> None:
        link = links.direct if name is None else links.others[name]
        super().__init__(link.send, link.receive)
        self._links, self._name, self._stream = links, name, stream

    @property
    def patience_s(self) -> float:
        return self._stream.patience_s

    def poll(self) -> Frame | None:
        return self.receive() if self._links.came(self._name, self._stream.poll) else None

    def fileno(self) -> int:
        return self._stream.fileno()


class Askers:
    """A feature party's links to several label parties of a service.

    An answer goes to the label party that sent the last request. If there are n label parties,
    label party i numbers its requests i, i + n, i + 2 n and so on. No two requests of a session
    have the same step number, so noise derived from a step number is never drawn twice.

    Args:
        links: links of the feature party.
        names: label parties that send requests, in addition to the leading label party.
    """

    def __init__(self, links: SealedLinks, names: Sequence[str]) -> None:
        self._links, self._names = links, (None, *names)
        self._asked: Link = links.direct
        self._done = set[str | None]()

    def send(self, frame: Frame) -> None:
        self._asked.send(frame)

    def receive(self) -> Frame:
        """Receive the next request of a label party, or DONE after all label parties have ended.

        Raises:
            ProtocolError: a label party uses a step number that belongs to another label party, or
                sends a request after DONE.
        """
        while True:
            name, frame = self._links.receive_any()
            if frame.kind is Kind.DONE and name not in self._done:
                self._done.add(name)
                if len(self._done) == len(self._names):
                    return frame
                continue
            if name in self._done or self._names[frame.step % len(self._names)] != name:
                raise _out_of_turn(frame, "the label party" if name is None else f"'{name}'")
            self._asked = self._links.direct if name is None else self._links.others[name]
            return frame

    def close(self) -> None:
        """Do nothing: the function that opened the stream closes it."""


class Switchboard:
    """The label party's streams to other parties; it relays frames between these parties.

    Only one thread may use a switchboard. While it waits for a frame that is addressed to the label
    party, it relays the frames that are addressed to other parties.

    Args:
        streams: streams by party, in the order on which all parties agree.
        receive_any: function that returns the next frame from any sender, and the sender's name.
        pairs: function that takes the names of two parties and returns whether these parties may
            send each other messages.
        most: largest number of buffered frames of one party.

    Attributes:
        links: links to the parties, by name.
        unanswered: for each party, the number of frames relayed to this party minus the number of
            frames that this party sent to other parties.
        came: pairs (sender, frame) of received frames that the switchboard has neither relayed nor
            buffered yet; see `Carried`.
        polled: True while streams are being polled, and after polling has ended because a stream
            failed.
        waits_for: name of the party that received the last relayed frame; while serving, name of
            the party that has to send the next frame.
    """

    def __init__(
        self,
        streams: Mapping[str, Link],
        receive_any: Callable[[], tuple[str, Frame]],
        pairs: Callable[[str, str], bool],
        most: int,
    ) -> None:
        self._streams, self._receive_any, self._pairs = streams, receive_any, pairs
        self._names, self.most, self.waits_for = list(streams), most, ""
        self.unanswered, self.polled = Counter[str](), False
        self.came = deque[tuple[str, Frame]]()
        self._waiting: dict[str, deque[Frame]] = {name: deque() for name in streams}
        self.links: dict[str, Link] = {
            name: _Pair(stream.send, self._receiver(name)) for name, stream in streams.items()
        }

    def _receiver(self, name: str) -> Callable[[], Frame]:
        def receive() -> Frame:
            waiting = self._waiting[name]
            while not waiting:
                self.take(*self._receive_any())
            return waiting.popleft()

        return receive

    def take(self, sender: str, frame: Frame) -> None:
        """Relay a frame to another party, or buffer a frame for the label party."""
        if frame.peer:
            self._hand_on(sender, frame)
        elif len(self._waiting[sender]) < self.most:
            self._waiting[sender].append(frame)
        else:
            raise _out_of_turn(frame, f"party '{sender}'")

    def next_of(self, name: str) -> Frame | None:
        """Return the next buffered frame from a party to the label party; None if there is none."""
        return self._waiting[name].popleft() if self._waiting[name] else None

    def _hand_on(self, sender: str, frame: Frame) -> None:
        known = frame.peer <= len(self._names)
        receiver = self._names[frame.peer - 1] if known else sender
        if not self._pairs(sender, receiver):
            raise _out_of_turn(frame, f"party '{sender}'")
        number, self.waits_for = 1 + self._names.index(sender), receiver
        self._streams[receiver].send(Frame(frame.kind, frame.step, frame.payload, number))
        self.unanswered[receiver] += 1
        self.unanswered[sender] -= 1


class Carried(_Pair):
    """The label party's link to a party that it queries during serving; polling it never blocks.

    Every poll reads all streams, because the switchboard also relays messages between other
    parties. Frames are relayed only while no stream is broken, because sending to a broken stream
    would block. Each feature party behind a middle party answers every frame of the middle party
    with exactly one frame, so counting frames shows which party has not answered yet.

    Args:
        board: switchboard that relays the frames.
        name: name of the queried party: the middle party, or a feature party.
        streams: streams of all parties, the same as those of the switchboard.
        behind: whether the queried party must receive answers of other parties before it answers.
    """

    def __init__(
        self, board: Switchboard, name: str, streams: Mapping[str, ObservedPoll], behind: bool
    ) -> None:
        super().__init__(board.links[name].send, board.links[name].receive)
        self._board, self._name, self._streams, self._behind = board, name, streams, behind
        board.waits_for = name

    @property
    def waits_for(self) -> str:
        """The party that has to send the next frame, or whose stream has failed."""
        return self._board.waits_for if self._behind or self._board.polled else self._name

    @property
    def patience_s(self) -> float:
        """Longest time without a message from a party, in seconds, before a query fails."""
        return max(stream.patience_s for stream in self._streams.values())

    def filenos(self) -> list[int]:
        """File descriptors of all streams; -1 for a broken stream."""
        return [stream.fileno() for stream in self._streams.values()]

    def poll(self) -> Frame | None:
        """Return the queried party's next frame, if it has arrived.

        The method relays frames for other parties first.
        """
        board, came = self._board, self._board.came
        board.polled = True
        for name, stream in self._streams.items():
            board.waits_for = name
            # a party may have at most this many unread frames in transit
            for _ in range(board.most):
                if (frame := stream.poll()) is None:
                    break
                if len(came) >= board.most * len(self._streams):
                    raise _out_of_turn(frame, f"party '{name}'")
                came.append((name, frame))
        while came and -1 not in self.filenos():
            board.take(*came.popleft())
        board.polled = False
        late = (name for name, count in board.unanswered.items() if count > 0)
        board.waits_for = next((name for name in late if name != self._name), self._name)
        return board.next_of(self._name)


def _out_of_turn(frame: Frame, sender: str) -> ProtocolError:
    return ProtocolError(
        f"an unexpected message from {sender}",
        got=f"{frame.kind.name} of step {frame.step}, peer {frame.peer}",
        want="a frame of this session for this party",
    )
