"""Private transformer inference over a network: owner, user and dealer are three processes.

The protocols are in `vfl.llm.two_party`. The owner (role P0) and the dealer (P2) listen on ports;
the user (P1) connects to them. In the offline phase, the dealer deals material (correlated
randomness), and each pair of parties has a stream. In the online phase, a question is answered, and
only the owner and the user have a link. If `dealer_counts` is set, the dealer has marked the
question's material as used before. Every stream uses TLS 1.3 and a token that belongs to this pair
of parties. Before a session shares any value, each party signs fresh session keys with its identity
key, and the other parties check the signatures with identity keys that they have pinned.

A party that takes material marks the material as used on its disk, before it sends a message that
depends on it.

Dealing and asking use separate streams, so that the parties can answer a question while the dealer
makes material for later questions. Their handshakes exclude one another: the user holds the lock of
its folder from a request until all keys are checked and the question's material is marked. Owner
and dealer, which hold the locks of their folders while they listen, also run one handshake at a
time. All three parties therefore run handshakes in the same order, and the counter of every store
only grows.
"""

from __future__ import annotations

import math
import secrets
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from weakref import WeakSet

from pydantic import Field, StringConstraints, ValidationError
from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.address import Address
from vfl.core.errors import (
    AuthenticationError,
    ConfigError,
    DataError,
    DisagreementError,
    MissingDataError,
    ProtocolError,
    ReusedPadError,
    RunFolderError,
    VFLError,
    redacted_traceback,
)
from vfl.core.frame import Frame, Kind
from vfl.core.storage import (
    Seal,
    load_weights,
    locked,
    read_sealed_json,
    save_weights,
    weights_digest,
    write_sealed_json,
)
from vfl.core.traffic import CONTROL
from vfl.core.version import VERSION
from vfl.llm.file import LlmFile, LlmParty
from vfl.llm.ledger import questions_of
from vfl.llm.material import MaterialStore, kind_in, new_name
from vfl.llm.private_decoder import (
    OnToken,
    PrivateLayers,
    greedy,
    has_token,
    kind_of_question,
    layer_shapes,
)
from vfl.llm.two_party import Form, Pick, Role, kind_of
from vfl.llm.weights import BLOCK, WeightStore
from vfl.models.decoder import Decoder, DecoderShape, Encoder, EncoderShape
from vfl.mpc.rules import P0, P1, P2
from vfl.mpc.secure.keys import OFFER_BYTES, Agreement, Binding
from vfl.session.store.identity import Identity, read_pins
from vfl.session.store.witness import MOST, Witness
from vfl.transport import (
    Admission,
    Credential,
    Hello,
    HubLink,
    LinkLimits,
    ServerCertificate,
    TcpHub,
    TcpLink,
    Timeouts,
    TransportLink,
    expiry_warning,
)

Task = Literal["deal", "ask"]
PARTIES: tuple[LlmParty, ...] = ("owner", "user", "dealer")
ROLES = dict(zip(PARTIES, (P0, P1, P2), strict=True))
#: Parties from which each role accepts connections.
CALLERS: dict[LlmParty, tuple[LlmParty, ...]] = {
    "owner": ("user",),
    "user": (),
    "dealer": ("owner", "user"),
}
_CALLED = {"owner": "the model owner", "user": "the user", "dealer": "the dealer"}
_WINDOW = 16
_TALK_BYTES, _ERROR_BYTES = 16 * 1024, 64 * 1024
#: Time in seconds, after the rejoin window, for which a listening party may refuse a caller's new
#: process because it still waits for the caller's earlier process.
_GRACE_S = 2.0
#: Time in seconds for which a command silently waits for another command of the same folder; then
#: it prints a message.
_QUIET_S = 0.5
_ELSEWHERE = "owner and dealer"
_WRITTEN = "vfl llm init writes all of them; take the file of this project's folder of the party"
#: Format version of the files of shared weights. If stored weights have an earlier format, the
#: parties share the weights again.
_STORED = 2

_Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32}|)$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,80}$")]
_Spent = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Say = Callable[[str], None]


class Talk(Settings):
    """Handshake message before a computation; it contains only sizes and names.

    Attributes:
        version, terms: version of vfl, and digest of the agreed terms.
        task: kind of session that the user requests.
        prompt_tokens, count: number of tokens of a question, and largest number of tokens of its
            answer; for a classifier, `count` is 1.
        texts: number of questions of this length in one batch.
        questions: number of such batches for which the dealer is to make material.
        session: identifier of this session; the user and the owner each contribute a half.
        setup: identifier of the sharing of the weights that the sender has stored; "" if it has
            none.
        fresh: whether the weights are to be shared again, with new randomness.
        names: names of the material to deal or to use in this session.
        spent: bytes and messages, by phase, that other parties exchanged without the receiver of
            this message.
        known: the largest counter of the receiver's store that the sender has recorded. If the
            store's own counter is smaller, the store was restored from an old copy, and the
            receiver refuses the session.
    """

    version: str = Field(default=VERSION, max_length=32)
    terms: str = Field(max_length=64)
    task: Task
    prompt_tokens: int = Field(ge=1, lt=2**31, strict=True)
    count: int = Field(ge=1, lt=2**31, strict=True)
    texts: int = Field(default=1, ge=1, lt=2**31, strict=True)
    questions: int = Field(default=1, ge=0, le=4096, strict=True)
    session: str = Field(default="", pattern=r"^[0-9a-f]{0,64}$")
    setup: _Hex = ""
    fresh: bool = Field(default=False, strict=True)
    names: tuple[_Name, ...] = Field(default=(), max_length=4096)
    spent: dict[str, tuple[_Spent, _Spent]] = Field(default={}, max_length=4)
    known: int = Field(default=0, ge=0, lt=MOST, strict=True)

    @property
    def kind(self) -> str:
        """Name of the kind of material that the user's request needs."""
        return kind_of_question(self.prompt_tokens, self.count, self.texts)


@dataclass(slots=True)
class Account:
    """Counts bytes and messages on one party's links by phase; headers are included.

    Attributes:
        phase: phase in which traffic is counted now.
        spent: bytes and messages, by phase and by pair of parties.
    """

    phase: str = CONTROL
    spent: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)

    def add(self, phase: str, pair: str, size: int, messages: int) -> None:
        """Add bytes and messages to the counts of a pair in a phase."""
        before = self.spent.setdefault(phase, {}).get(pair, (0, 0))
        self.spent[phase][pair] = (before[0] + size, before[1] + messages)

    def add_all(self, pair: str, spent: Mapping[str, tuple[int, int]]) -> None:
        """Add counts that `of` returned at another party."""
        for phase, (size, messages) in spent.items():
            self.add(phase, pair, size, messages)

    def of(self, pair: str) -> dict[str, tuple[int, int]]:
        """Return the bytes and messages of one pair, by phase."""
        return {phase: row[pair] for phase, row in self.spent.items() if pair in row}

    def facts(self, phase: str, seconds: float, questions: int = 1) -> dict[str, Any]:
        """Return a phase's bytes, messages and seconds, each divided by the number of questions."""
        pairs = {pair: size / questions for pair, (size, _) in self.spent.get(phase, {}).items()}
        messages = sum(count for _, count in self.spent.get(phase, {}).values()) / questions
        return {
            "bytes": sum(pairs.values()),
            "messages": messages,
            "seconds": seconds / questions,
            "between": pairs,
        }


class Wire:
    """A link that counts its traffic, and can wait for a frame without removing it from the link.

    Args:
        link: link to another party.
        account: account in which the link counts its traffic.
        parties: the two ends of the link: this party, then the other party.
        witness: witness (counter record) of this party's store.
    """

    def __init__(
        self,
        link: TransportLink,
        account: Account,
        parties: tuple[LlmParty, LlmParty],
        witness: Witness,
    ) -> None:
        self._link, self._account, self._witness = link, account, witness
        self._peer, self._pair = parties[1], " and ".join(sorted(parties, key=PARTIES.index))
        self._ahead: deque[Frame] = deque()

    def send(self, frame: Frame) -> None:
        """See `vfl.core.frame.Link`."""
        self._link.send(frame)
        self._count(frame)

    def receive(self) -> Frame:
        """See `vfl.core.frame.Link`."""
        if self._ahead:
            return self._ahead.popleft()
        frame = self._link.receive()
        self._count(frame)
        return frame

    def ends(self) -> bool:
        """Wait for the next frame; return whether it says that the other party has finished."""
        self._ahead.append(self.receive())
        return self._ahead[0].kind is Kind.DONE

    def watch(self, link: HubLink) -> None:
        """Receive frames that have arrived on this object's `link`, to notice errors in time.

        A party calls this method while it waits for a frame of a different party.
        """
        while len(self._ahead) < _WINDOW and (frame := link.poll()) is not None:
            self._count(frame)
            self._ahead.append(frame)

    def send_talk(self, talk: Talk, kind: Kind = Kind.ASK) -> None:
        """Send a handshake message before a computation."""
        known = self._witness.read().peers.get(self._peer, 0)
        talk = talk.model_copy(update={"known": known})
        self.send(Frame(kind, payload=talk.model_dump_json().encode()))

    def receive_talk(self, kind: Kind = Kind.ASK) -> Talk:
        """Receive a handshake message before a computation.

        Raises:
            ProtocolError: the other party sent another kind of message.
            RolledBackError: the other party has recorded a larger counter for this party's store
                than the store itself has.
        """
        frame = self.receive()
        if frame.kind is not kind:
            raise ProtocolError("an unexpected message", got=frame.kind.name, want=kind.name)
        try:
            talk = Talk.model_validate_json(bytes(frame.payload))
        except ValidationError:
            raise ProtocolError(
                "a request of an unknown form arrived before a computation"
            ) from None
        self._witness.require(talk.known, _CALLED[self._peer])
        return talk

    def fail(self, error: BaseException) -> None:
        """Send an error of this party to the other party, then close the link.

        For an unexpected error, the message contains only the error's type.
        """
        if not isinstance(error, VFLError):
            error = ProtocolError("a party ended the computation early", got=type(error).__name__)
        self._link.fail(error)

    def close(self) -> None:
        """See `vfl.core.frame.Link`."""
        self._link.close()

    def _count(self, frame: Frame) -> None:
        phase = self._account.phase if frame.kind is Kind.PROTOCOL else CONTROL
        self._account.add(phase, self._pair, frame.wire_bytes, 1)


class _EnoughError(Exception):
    """Raised at P0 or P1 if the answer ends before its material is used up."""


class _OverError(Exception):
    """Raised to make a party stop listening."""


def _stream_of(party: LlmParty, task: Task) -> str:
    """Return the name of a party's stream for a task."""
    return party if task == "ask" else f"{party} (dealing)"


def most_bytes(shape: DecoderShape, tokens: int, form: Form) -> int:
    """Return the largest message's size in bytes.

    The message is about these tokens, or is a block of the weights.
    """
    widest = max(shape.vocabulary, 3 * shape.width, 2 * shape.inner, shape.heads * tokens)
    # Every row contains a number of at most 4 bytes for each score level.
    if form.protect == "scores":
        widest = max(widest, shape.heads << form.score_bits - 1)
        widest = max(widest, 2 * shape.heads * tokens)  # each score takes four products
    return max(8 * (BLOCK + widest), 2 * 8 * tokens * widest, _TALK_BYTES)


class Party:
    """Common base class of the three parties: keys, files, and the start of a session.

    Args:
        file: the party's own file of settings.
        say: function that receives one line of text for each event.

    Attributes:
        digest: SHA-256 of the weights; only the model owner has it.
    """

    def __init__(self, file: LlmFile, say: Say) -> None:
        self.file, self.terms, self.say = file, file.terms, say
        self.name: LlmParty = file.party
        self.digest = ""
        self.role = ROLES[self.name]
        self.shape = self.terms.architecture
        self.folder = file.store_path
        self.ledger = questions_of(file)
        self._identity = Identity.kept_at(file.beside("identity.key"), _WRITTEN)
        self._pins = read_pins(
            file.beside("peers"), [each for each in PARTIES if each != self.name]
        )
        self._layers: tuple[str, PrivateLayers] | None = None
        self._handshake = threading.Lock()
        self._wires: WeakSet[Wire] = WeakSet()
        self._over = threading.Event()
        self._timeouts = Timeouts(
            step_s=file.patience_s, idle_s=file.patience_s, rejoin_window_s=file.rejoin_s
        )
        most = most_bytes(self.shape, self.terms.limits.max_tokens, self.terms.form)
        each = {
            Kind.ASK: _TALK_BYTES,
            Kind.DONE: _TALK_BYTES,
            Kind.PROTOCOL: most,
            Kind.ERROR: _ERROR_BYTES,
        }
        self._limits = LinkLimits(up=each, down=each)

    # Streams.

    def wire(self, link: TransportLink, peer: LlmParty, account: Account) -> Wire:
        """Make the link to another party."""
        wire = Wire(link, account, (self.name, peer), self.ledger.witness)
        self._wires.add(wire)
        if self._over.is_set():
            wire.close()
        return wire

    def listen(self) -> tuple[TcpHub, dict[str, Credential]]:
        """Return the party's hub (listening end), and the credentials that callers must present."""
        files = self.file.beside("certificates")
        certificate = ServerCertificate(
            *(_bytes(files / name) for name in ("ca.pem", "server.pem", "server.key"))
        )
        renew = f"renew it with: vfl renew {self.file.beside('.')}"
        if warning := expiry_warning(files / "server.pem", renew):
            self.say(warning)
        credentials = {
            stream: Credential(stream, self._token(name))
            for name in CALLERS[self.name]
            for stream in (_stream_of(name, "ask"), _stream_of(name, "deal"))
        }
        admission = Admission(self.terms.project, credentials, limits=lambda party: self._limits)
        host, port = self.file.address("listen")
        hub = TcpHub(host, port, admission, certificate, self._timeouts, _WINDOW)
        self.say(f"{_CALLED[self.name]} listens on {Address(host, hub.port)}; end it with Ctrl-C")
        return hub, credentials

    def serve(self, poll: Callable[[], None] | None = None) -> None:
        """Listen, and run every session that another party begins, until interrupted.

        A dealing of material and a question can run at the same time.

        Args:
            poll: function that is called every 0.05 s while no question is being answered; an
                exception of it ends this call.
        """

        def ended() -> None:
            if self._over.is_set():
                raise _OverError

        with self.ledger.alone():
            self._over.clear()
            hub, credentials = self.listen()
            dealing = threading.Thread(
                target=self._stand, args=(hub, credentials, "deal", ended), daemon=True
            )
            dealing.start()
            try:
                self._stand(hub, credentials, "ask", poll)
            finally:
                self._over.set()
                hub.close()
                for wire in list(self._wires):
                    wire.close()  # this ends a dealing in progress too
                dealing.join()

    def session(self, hub: TcpHub, wires: dict[LlmParty, Wire], task: Task) -> None:
        """Run one session at a listening party, from the first message to the end.

        Args:
            hub: hub to which the first caller has connected.
            wires: dictionary that the method fills with the streams, by the caller's name; if the
                session fails, the error is sent to these callers.
            task: kind of session (task) for which the streams were opened.
        """
        raise NotImplementedError

    def _stand(
        self,
        hub: TcpHub,
        credentials: Mapping[str, Credential],
        task: Task,
        poll: Callable[[], None] | None,
    ) -> None:
        """Run every session of one task, one session after another."""
        streams = [_stream_of(caller, task) for caller in CALLERS[self.name]]
        with suppress(_OverError):
            while True:
                hub.wait_all(streams[:1], math.inf, poll)
                self._play_one(hub, task)
                for stream in streams:
                    hub.replace(stream, credentials[stream])

    def _play_one(self, hub: TcpHub, task: Task) -> None:
        wires: dict[LlmParty, Wire] = {}
        try:
            self.session(hub, wires, task)
        except VFLError as error:
            self._broke_off(wires, error, str(error))
        except Exception as bug:  # an error must not affect the next session
            self._broke_off(wires, bug, redacted_traceback(bug))

    def _broke_off(self, wires: Mapping[LlmParty, Wire], error: Exception, text: str) -> None:
        for wire in wires.values():
            wire.fail(error)
        self.say(f"a session ended early: {text}")

    def call(self, peer: Literal["owner", "dealer"], account: Account, task: Task) -> Wire:
        """Open a stream for a task to a party that listens.

        Raises:
            AuthenticationError: the token or the certificate is wrong.
            LostPeerError: no process answers at the address.
        """
        host, port = self.file.address(peer)
        hello = Hello(self.terms.project, _stream_of(self.name, task), self._token(peer))
        authority = _bytes(self.file.beside("peers") / f"{peer}.pem")
        deadline, pause_s = time.monotonic() + self.file.rejoin_s + _GRACE_S, 0.05
        while True:
            try:
                link = TcpLink.connect(
                    host,
                    port,
                    hello,
                    authority,
                    self._timeouts,
                    _WINDOW,
                    _CALLED[peer],
                    self._limits,
                )
                return self.wire(link, peer, account)
            except AuthenticationError as refusal:
                # The other party, which its certificate has identified, may still wait for an
                # earlier process of this party.
                if refusal.where is not None:
                    raise
                if time.monotonic() > deadline:
                    refusal.where = str(Address(host, port))
                    refusal.fix = (
                        f"compare peers/{peer}.token of the {self.name} with "
                        f"peers/{self.name}.token of the {peer}, which must be equal; or end "
                        "another process of this folder"
                    )
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    @contextmanager
    def _failing(self, wire: Wire) -> Iterator[Wire]:
        """Use a stream in a block; if an error ends the block, report it to the other party."""
        try:
            yield wire
        except BaseException as error:
            wire.fail(error)
            raise
        finally:
            wire.close()

    def _open(
        self, streams: ExitStack, peer: Literal["owner", "dealer"], account: Account, task: Task
    ) -> Wire:
        return streams.enter_context(self._failing(self.call(peer, account, task)))

    def check(self, said: Talk, task: Task) -> None:
        """Check that the other party has the same version of vfl and the same terms.

        Raises:
            DisagreementError: the other party has another version of vfl or other terms.
            ProtocolError: the requested task differs from the task of the stream.
        """
        if said.task != task:
            raise ProtocolError("a request arrived on the stream of another task", got=said.task)
        for what, got, want in (
            ("runs another version of vfl", said.version, VERSION),
            ("has other terms", said.terms[:16], self.terms.digest()[:16]),
        ):
            if got != want:
                raise DisagreementError(
                    f"the other party {what}",
                    where="[terms]",
                    got=got,
                    want=want,
                    fix="compare the [terms] in both parties' files; in one project they are equal",
                )

    def talk(
        self, task: Literal["deal", "ask"], prompt_tokens: int, count: int, **more: Any
    ) -> Talk:
        """Return this party's handshake message."""
        return Talk(
            terms=self.terms.digest(), task=task, prompt_tokens=prompt_tokens, count=count, **more
        )

    def require_within(self, asked: Talk) -> None:
        """Check that a question fits the terms and the model's context.

        Raises:
            ConsentError: the request has more tokens than the owner's terms allow.
            DataError: the question and its answer are longer than the model's context, or a
                classifier would have to answer several texts at a time.
        """
        each = asked.prompt_tokens + asked.count
        if each > self.shape.context + 1:
            raise DataError(
                "a question and its answer are longer than the model's context",
                got=f"{asked.prompt_tokens} and {asked.count} tokens",
                want=f"{self.shape.context + 1} together",
            )
        if isinstance(self.shape, EncoderShape) and (asked.count, asked.texts) != (1, 1):
            raise DataError("a classifier takes one text at a time and does not answer with tokens")
        self.terms.limits.require(max_tokens=asked.texts * each)

    def meet(self, wires: Mapping[LlmParty, Wire], session: str) -> Role:
        """Exchange signed fresh keys with all other parties, and check the parties' signatures.

        The result is the role of this party, with a key for each of its pairs of parties.

        Raises:
            AuthenticationError: a party's identity key differs from the key that this party has
                pinned.
            RolledBackError: a party's folder was restored from an old copy.
        """
        parties = tuple(each for each in PARTIES if each == self.name or each in wires)
        binding = Binding(session, 0, self.terms.digest(), parties)
        age = self.ledger.witness.announce(), self.ledger.witness.admit
        agreement = Agreement(self.name, self._identity, self._pins, binding, *age)
        links = {ROLES[name]: wire for name, wire in wires.items()}
        role = kind_of(self.terms.form)(self.role, links, self.terms.form)
        for channel in role.channels.values():
            channel.send_bytes(agreement.offer, 0, "setup")
        offers: dict[str, bytes] = {self.name: agreement.offer}
        for name in wires:
            offers[name] = bytes(role.channels[ROLES[name]].receive_bytes(0, OFFER_BYTES))
        keys = agreement.keys(b"".join(offers[name] for name in parties))
        for name in wires:
            role.use_key(ROLES[name], keys[name], session, 0)
        return role

    def called_to_count(
        self, streams: ExitStack, wires: Mapping[LlmParty, Wire], plan: Talk, account: Account
    ) -> dict[LlmParty, Wire]:
        """Open the first streams of a question, including that to the dealer if the dealer counts.

        Raises:
            LostPeerError: the dealer does not answer.
        """
        if not self.terms.dealer_counts:
            return {**wires}
        dealer = self._open(streams, "dealer", account, "ask")
        dealer.send_talk(plan)
        return {**wires, "dealer": dealer}

    def take(self, wires: Mapping[LlmParty, Wire], plan: Talk) -> tuple[Role, Iterator[Tensor]]:
        """Connect to the parties of a question, and take the question's material.

        The material is then marked as used. If the dealer counts, the dealer too has marked the
        material as used before this method returns.

        Raises:
            RolledBackError: a party's folder was restored from an old copy.
            PeerFailedError: the dealer has already counted this material as used.
        """
        role = self.meet(wires, plan.session)
        material = self.store(plan.setup).take(plan.names[0])
        if dealer := wires.get("dealer"):
            dealer.send_talk(plan, Kind.DONE)
            dealer.receive_talk(Kind.DONE)
        return role, material

    # Files.

    def setup(self) -> dict[str, Any]:
        """Return facts about the shared weights on this party's disk; empty if there are none."""
        path = self.folder / "setup.json"
        if not path.exists():
            return {}
        found = read_sealed_json(path, Seal("setup", self.name, None))
        return found if found.get("stored") == _STORED else {}

    def known(self) -> str:
        """Return the identifier of the shared weights that this party can use; "" without any."""
        return str(self.setup().get("setup", ""))

    def unused(self) -> list[str]:
        """Return the names of the unused material for these weights."""
        known = self.known()
        return self.store(known).names() if known else []

    def store(self, setup: str) -> MaterialStore:
        """Return the store of the material that belongs to one sharing of the weights."""
        return MaterialStore(self.folder / f"material-{setup}", self.name, setup)

    def layers(self, setup: str) -> PrivateLayers:
        """Return this party's shares of the weights.

        The shares are checked once, and mapped from the disk into memory.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        if self._layers is None or self._layers[0] != setup:
            weights, shapes = self._weights(setup), layer_shapes(self.shape, self.terms.form)
            constants = {layer.name: weights.get(layer) for layer in shapes}
            path = self.folder / f"layers-{setup}.safetensors"
            found = load_weights(path, Seal("positions", self.name, setup)) if path.exists() else {}
            self._layers = setup, PrivateLayers(self.shape, constants, found.get("positions"))
        return self._layers[1]

    def shared(
        self, role: Role, plan: Talk, account: Account, model: Decoder | Encoder | None = None
    ) -> PrivateLayers:
        """Return the shared weights for a dealing; share them again if a party lacks its part.

        After a new sharing, all shares and material of earlier sharings are removed.
        """
        setup = plan.setup
        if not plan.fresh:
            return self.layers(setup)
        account.phase, began = "setup", time.monotonic()
        layers = PrivateLayers.share(role, self.shape, model, self._weights(setup).put)
        if layers.positions is not None:
            path = self.folder / f"layers-{setup}.safetensors"
            found = {"positions": layers.positions}
            save_weights(path, found, Seal("positions", self.name, setup))
        digest = self.digest
        facts = account.facts("setup", time.monotonic() - began)
        record = {"stored": _STORED, "setup": setup, "weights": digest, "spent": facts}
        write_sealed_json(self.folder / "setup.json", record, Seal("setup", self.name, setup))
        self._remove_all_but(setup)
        self._layers = setup, layers
        return layers

    def restored(self) -> None:
        """Continue with a store that was restored from an old copy, if no newer store exists.

        The material in the copy may have been used since the copy was made. All of the material is
        therefore removed, and the next dealing shares the weights again.
        """
        with self.ledger.alone():
            self._remove_all_but(None)
            self.ledger.witness.restored(0.0)

    def _remove_all_but(self, setup: str | None) -> None:
        """Remove all sharings of the weights but one with their material; None keeps none."""
        if setup is None:
            (self.folder / "setup.json").unlink(missing_ok=True)
        for path in self.folder.glob("*-*"):
            kept = setup is not None and setup in path.name
            if path.name.startswith(("layers-", "material-")) and not kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _weights(self, setup: str) -> WeightStore:
        return WeightStore(self.folder / f"layers-{setup}", self.name, setup)

    def _token(self, peer: str) -> str:
        return _bytes(self.file.beside("peers") / f"{peer}.token").decode(errors="replace").strip()


class Owner(Party):
    """The model owner, which has the weights and answers a limited number of questions.

    Args:
        file: the owner's file of settings.
        load: function that loads the model; the constructor calls it once, and each sharing of the
            weights calls it again. Between these calls, the model's weights are not in memory.
        say: see `Party`.

    Raises:
        ConfigError: the model has another shape than the terms state.
    """

    def __init__(self, file: LlmFile, load: Callable[[], Decoder | Encoder], say: Say) -> None:
        super().__init__(file, say)
        model = load()
        if model.shape != self.shape:
            raise ConfigError(
                "the model has another shape (architecture) than the terms state",
                where=file.model,
                got=repr(model.shape),
                want=repr(self.shape),
            )
        self._load = load
        self.digest = weights_digest(model.state_dict())

    def session(self, hub: TcpHub, wires: dict[LlmParty, Wire], task: Task) -> None:
        account = Account()
        wire = wires["user"] = self.wire(hub.link(_stream_of("user", task)), "user", account)
        asked = wire.receive_talk()
        self.check(asked, task)
        self.require_within(asked)
        if task == "deal":
            self._deal(wire, asked)
        else:
            self._answer(wire, asked, account)

    def _model(self) -> Decoder | Encoder:
        """Return the model.

        The ledger counts questions by the digest of the model's weights.

        Raises:
            ConfigError: the weights in the folder have changed since this party started.
        """
        model = self._load()
        if weights_digest(model.state_dict()) != self.digest:
            raise ConfigError(
                "the model's weights have changed since this command began",
                where=self.file.model,
                fix="stop vfl llm serve, and start it again",
            )
        return model

    def known(self) -> str:
        """See `Party`; a sharing of other weights than these does not count."""
        return super().known() if self.setup().get("weights") == self.digest else ""

    def _deal(self, wire: Wire, asked: Talk) -> None:
        account = Account()
        with ExitStack() as streams:
            with self._handshake:
                plan, dealer = self._planned(streams, wire, asked, account)
                role = self.meet({"user": wire, "dealer": dealer}, plan.session)
                layers = self.shared(role, plan, account, self._model() if plan.fresh else None)
            store = self.store(plan.setup)
            account.phase = "offline"
            for name in plan.names:
                with store.putting(name) as keep:
                    role.prepare(_program(layers, _blank(plan), plan.count), keep)
                wire.receive_talk(Kind.DONE)  # the user has stored its part of the shares
            dealer.receive_talk(Kind.DONE)
            spent = account.of(_ELSEWHERE)
            wire.send_talk(plan.model_copy(update={"names": (), "spent": spent}), Kind.DONE)
            self.say(f"dealt for {_sizes(plan)}, times {len(plan.names)}")

    def _planned(
        self, streams: ExitStack, wire: Wire, asked: Talk, account: Account
    ) -> tuple[Talk, Wire]:
        """Return the plan of a dealing for user and dealer, and the stream to the dealer."""
        known = self.known()
        waiting = asked.questions * asked.texts
        if known:
            store = self.store(known)
            for name in set(store.names()) - set(asked.names):
                # An earlier dealing was interrupted before the user received its part.
                store.take(name)
            waiting += sum(_texts_in(name) for name in store.names())
        self.terms.limits.require(max_dealt=waiting)
        dealer = self._open(streams, "dealer", account, "deal")
        session = asked.session + secrets.token_hex(16)
        plan = asked.model_copy(update={"session": session, "setup": known, "names": ()})
        dealer.send_talk(plan)
        theirs = dealer.receive_talk()
        fresh = not known or {known} != {theirs.setup, asked.setup}
        setup = secrets.token_hex(16) if fresh else known
        names = tuple(new_name(asked.kind) for _ in range(asked.questions))
        plan = plan.model_copy(update={"setup": setup, "fresh": fresh, "names": names})
        dealer.send_talk(plan)
        wire.send_talk(plan)
        return plan, dealer

    def _answer(self, wire: Wire, asked: Talk, account: Account) -> None:
        with self._handshake:
            known = self.known()
            same = known and known == asked.setup
            own = self.store(known).names_of(asked.kind) if same else []
            both = sorted(set(own) & set(asked.names))
            session = asked.session + secrets.token_hex(16)
            plan = asked.model_copy(update={"session": session, "names": tuple(both[:1])})
            # Check the limits first, so that the dealer makes no material for a question that the
            # owner would then refuse.
            self.ledger.require(self.digest, asked.texts, self.terms.limits)
            if not both:
                wire.send_talk(plan)
                return
            with ExitStack() as streams:
                wires = self.called_to_count(streams, {"user": wire}, plan, account)
                wire.send_talk(plan)
                role, material = self.take(wires, plan)
            self.ledger.count(self.digest, asked.texts)
            layers = self.layers(known)  # a later dealing may remove this sharing
        account.phase = "online"
        program = _program(layers, _blank(asked), asked.count, wants=lambda going: not wire.ends())
        began = time.monotonic()
        with suppress(_EnoughError):
            role.answer(program, material)
        wire.receive_talk(Kind.DONE)
        wire.send_talk(plan.model_copy(update={"spent": account.of(_ELSEWHERE)}), Kind.DONE)
        seconds = time.monotonic() - began
        self.say(f"answered {_sizes(asked)} in {seconds:.1f} s")

    def restored(self) -> None:
        """See `Party`.

        All questions that the limits allow for these weights then count as answered.
        """
        super().restored()
        self.ledger.count(self.digest, self.terms.limits.max_questions)


class Dealer(Party):
    """The dealer: it deals material before a question, counts used material, and sees no text."""

    def session(self, hub: TcpHub, wires: dict[LlmParty, Wire], task: Task) -> None:
        link = hub.link(_stream_of("owner", task))
        owner = wires["owner"] = self.wire(link, "owner", Account())
        plan = owner.receive_talk()
        self.check(plan, task)
        if task == "deal":
            owner.send_talk(self.talk("deal", 1, 1, setup=self.known()))
            plan = owner.receive_talk()
        stream = _stream_of("user", task)
        hub.wait_all([stream], self.file.patience_s, partial(owner.watch, link))
        user = wires["user"] = self.wire(hub.link(stream), "user", Account())
        theirs = user.receive_talk()
        self.check(theirs, task)
        same = ("task", "session", "setup", "fresh", "names", "prompt_tokens", "count", "texts")
        if any(getattr(theirs, name) != getattr(plan, name) for name in same):
            raise DisagreementError("the model owner and the user make different requests")
        self.require_within(plan)
        self.terms.limits.require(max_dealt=len(plan.names) * plan.texts)
        with self._handshake:
            role = self.meet(wires, plan.session)
            if task == "ask":
                self._count(wires, plan, self.known())
                return
            layers = self.shared(role, plan, Account())
        store = self.store(plan.setup)
        for name in plan.names:
            store.put(name, ())  # store the name of the material before any party has the material
            role.prepare(_program(layers, _blank(plan), plan.count))
        owner.send_talk(plan, Kind.DONE)
        user.receive_talk(Kind.DONE)
        self.say(f"dealt for {_sizes(plan)}, times {len(plan.names)}")

    def _count(self, wires: Mapping[LlmParty, Wire], plan: Talk, known: str) -> None:
        """Mark the material of a question as used, as the owner and the user have done.

        Raises:
            ReusedPadError: the material was already used, or was dealt before this dealer lost an
                earlier store.
        """
        for wire in wires.values():
            wire.receive_talk(Kind.DONE)
        store = self.store(known)
        for name in plan.names:
            store.take(name)
        for wire in wires.values():
            wire.send_talk(plan, Kind.DONE)


@dataclass(frozen=True, slots=True)
class Reply:
    """The user's result for one batch of questions.

    Attributes:
        answers: token numbers of each answer; empty for a classifier.
        logits: logits of a classifier, one number for each class.
        phases: bytes, messages and seconds of each phase, summed over all parties; and the bytes
            between each pair of parties. The phase "setup" (sharing of the weights) occurs once per
            set of weights, and "offline" (dealing of material) occurs before the questions. The
            phase "control" counts all other messages; its seconds are those of the whole call.
    """

    answers: list[list[int]]
    logits: list[float]
    phases: dict[str, dict[str, Any]]

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the answer to a single question."""
        (tokens,) = self.answers
        return tokens


class User(Party):
    """The user: it has the text and learns the answer."""

    @property
    def classifies(self) -> bool:
        """Return whether the model answers with a class instead of tokens."""
        return isinstance(self.shape, EncoderShape)

    def deal(self, prompt_tokens: int, count: int, questions: int = 1, texts: int = 1) -> None:
        """Let the dealer make material for questions of one length before the user asks them.

        Args:
            prompt_tokens: number of tokens of a question.
            count: largest number of tokens of an answer; 1 for a classifier.
            questions: number of batches for which to deal.
            texts: number of questions that the user will ask together in one batch.

        Raises:
            ConsentError: the owner's terms do not allow the request.
            DataError: the question and its answer are longer than the model's context.
            PeerError: another party does not answer, or has disconnected.
        """
        account, nonce = Account(), secrets.token_hex(16)
        sizes = {"texts": texts, "questions": questions, "session": nonce}
        with ExitStack() as streams:
            self._take_turn(streams, "deal")
            with self._alone():
                known, left = self.known(), tuple(self.unused())
                asked = self.talk("deal", prompt_tokens, count, setup=known, names=left, **sizes)
                self.require_within(asked)
                owner = self._open(streams, "owner", account, "deal")
                owner.send_talk(asked)
                plan = owner.receive_talk()
                self._check_plan(plan, asked)
                dealer = self._open(streams, "dealer", account, "deal")
                dealer.send_talk(plan)
                role = self.meet({"owner": owner, "dealer": dealer}, plan.session)
                layers = self.shared(role, plan, account)
            store, account.phase = self.store(plan.setup), "offline"
            began = time.monotonic()
            for done, name in enumerate(plan.names, 1):
                with store.putting(name) as keep:
                    role.prepare(_program(layers, _blank(plan), count), keep)
                owner.send_talk(plan.model_copy(update={"names": ()}), Kind.DONE)
                if len(plan.names) > 1:
                    self.say(f"dealt {done} of {len(plan.names)} questions")
            dealer.send_talk(plan.model_copy(update={"names": ()}), Kind.DONE)
            seconds = time.monotonic() - began
            account.add_all(_ELSEWHERE, owner.receive_talk(Kind.DONE).spent)
            record = self.setup()
            if plan.fresh:
                record["spent"] = account.facts("setup", record["spent"]["seconds"])
            facts = account.facts("offline", seconds, max(1, len(plan.names)))
            record.setdefault("kinds", {})[asked.kind] = facts
            kept = {name: record[name] for name in ("stored", "setup", "weights", "spent", "kinds")}
            seal = Seal("setup", self.name, plan.setup)
            write_sealed_json(self.folder / "setup.json", kept, seal)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other commands of this folder out of handshakes in a block.

        First, wait until no other command is in a handshake.
        """
        with ExitStack() as held:
            self._wait_for(held, self.ledger.alone)
            yield

    def _take_turn(self, held: ExitStack, task: Task) -> None:
        """Wait until no other command of this folder runs this task.

        Until `held` ends, other commands wait for this one. A command waits for the second lock
        while it holds the first, so that a command that has just ended cannot overtake the waiting
        command.
        """
        folder = self.folder / "turns" / task
        with ExitStack() as waiting:
            self._wait_for(waiting, partial(locked, folder / "next"))
            self._wait_for(held, partial(locked, folder))

    def _wait_for(
        self, held: ExitStack, lock: Callable[[float], AbstractContextManager[None]]
    ) -> None:
        try:
            held.enter_context(lock(_QUIET_S))
        except RunFolderError as busy:
            self.say(f"waiting for another command of this folder ({busy.got})")
            held.enter_context(lock(math.inf))

    def ask(
        self,
        prompt: Sequence[int],
        count: int,
        pick: Pick = greedy,
        on_token: Callable[[int], bool] = lambda token: False,
    ) -> Reply:
        """Return the answer to a question; see `ask_all`."""
        return self.ask_all([prompt], count, pick, lambda text, token: on_token(token))

    def ask_all(
        self,
        prompts: Sequence[Sequence[int]],
        count: int = 1,
        pick: Pick = greedy,
        on_token: OnToken = lambda text, token: False,
    ) -> Reply:
        """Answer questions of one length together.

        If no stored material fits (randomness that the dealer made for such questions), the dealer
        makes it now.

        Args:
            prompts: token numbers of each question; a classifier takes one question.
            count: largest number of tokens of each answer.
            pick: function that picks a token from scores in permuted order; see `Pick`.
            on_token: function that receives a question's number and its next token, and returns
                True to end this question's answer.

        Raises:
            DataError: a question has no token, or a token that the model lacks, or is too long for
                the model's context.
            ConsentError: the owner's terms do not allow the request.
            PeerError: another party does not answer, or has disconnected.
            ReusedPadError: the owner has no material for these questions, even after a dealing.
        """
        (length,) = {len(prompt) for prompt in prompts}
        self.require_askable(length, count, len(prompts))
        if not all(has_token(self.shape, token) for prompt in prompts for token in prompt):
            raise DataError(
                "a question must consist of tokens that the model knows",
                got=f"{length} tokens, of them one that it lacks",
                want=f"each from 0 to {self.shape.vocabulary - 1}",
                fix="use the tokenizer of this model",
            )
        with ExitStack() as held:
            self._take_turn(held, "ask")
            reply = self._ask(prompts, count, pick, on_token)
            if reply is None:
                self.say(
                    "the dealer has made nothing for a question of this length, and does so now"
                )
                self.deal(length, count, texts=len(prompts))
                reply = self._ask(prompts, count, pick, on_token)
        if reply is None:
            raise ReusedPadError(
                "the model owner has no material for this question",
                want="unused material that both parties have",
                fix="deal again: vfl llm deal with the user's folder",
            )
        return reply

    def require_askable(self, length: int, count: int, texts: int = 1) -> None:
        """Require that questions of this length fit the terms and the model's context.

        Raises:
            DataError: there is no token, or the question and its answer are longer than the model's
                context.
            ConsentError: the owner's terms do not allow the request.
        """
        if not length:
            raise DataError(
                "a question must consist of tokens that the model knows",
                got="none",
                want="at least one",
            )
        self.require_within(self.talk("ask", length, count, texts=texts))

    def require_dealable(self, questions: int, texts: int = 1) -> None:
        """Require that the owner's terms allow dealing for this many more questions in advance.

        Raises:
            ConsentError: the owner's terms do not allow dealing in advance for so many questions.
        """
        waiting = sum(map(_texts_in, self.unused()))
        self.terms.limits.require(max_dealt=waiting + questions * texts)

    def left(self) -> dict[str, int]:
        """Return, by kind of question, the number of batches whose material is stored."""
        return dict(Counter(map(kind_in, self.unused())))

    def _ask(
        self, prompts: Sequence[Sequence[int]], count: int, pick: Pick, on_token: OnToken
    ) -> Reply | None:
        account, nonce, met = Account(), secrets.token_hex(16), time.monotonic()
        with ExitStack() as streams:
            with self._alone():
                facts, setup = self.setup(), self.known()
                sizes = {"texts": len(prompts), "session": nonce, "setup": setup}
                asked = self.talk("ask", len(prompts[0]), count, **sizes)
                own = self.store(setup).names_of(asked.kind) if setup else []
                owner = self._open(streams, "owner", account, "ask")
                owner.send_talk(asked.model_copy(update={"names": tuple(own[:64])}))
                plan = owner.receive_talk()
                self._check_plan(plan, asked)
                if not plan.names:
                    return None
                if plan.names[0] not in own or plan.setup != setup:
                    raise ProtocolError("the model owner names material that does not exist")
                with ExitStack() as counting:
                    wires = self.called_to_count(counting, {"owner": owner}, plan, account)
                    role, material = self.take(wires, plan)
                layers = self.layers(setup)
            account.phase, began = "online", time.monotonic()
            answers: list[list[int]] = [[] for _ in prompts]
            logits = None

            def answered(text: int, token: int) -> bool:
                answers[text].append(token)
                return on_token(text, token)

            with suppress(_EnoughError):
                program = _program(layers, prompts, count, pick, answered)
                logits = role.answer(program, material)
            seconds = time.monotonic() - began
            owner.send_talk(plan.model_copy(update={"names": ()}), Kind.DONE)
            account.add_all(_ELSEWHERE, owner.receive_talk(Kind.DONE).spent)
        offline = facts.get("kinds", {}).get(asked.kind, {})
        phases = {"setup": facts["spent"], "offline": offline}
        phases["online"] = account.facts("online", seconds)
        phases[CONTROL] = account.facts(CONTROL, time.monotonic() - met)
        classes = logits[0].tolist() if isinstance(logits, Tensor) else []
        return Reply([] if classes else answers, classes, phases)

    def restored(self) -> None:
        """See `Party.restored`; first wait until running questions and dealings have ended."""
        with ExitStack() as held:
            # Take the locks in the order in which `ask_all` takes them.
            for task in ("ask", "deal"):
                self._take_turn(held, task)
            super().restored()

    def _check_plan(self, plan: Talk, asked: Talk) -> None:
        self.check(plan, asked.task)
        nonce = asked.session
        wanted = plan.session.startswith(nonce) and len(plan.session) == 2 * len(nonce)
        if not wanted or plan.kind != asked.kind:
            raise ProtocolError("the model owner answers a different request")


def _program(
    layers: PrivateLayers,
    prompts: Sequence[Sequence[int]],
    count: int,
    pick: Pick | None = None,
    on_token: OnToken = lambda text, token: False,
    wants: Callable[[bool], bool] = lambda going: going,
) -> Callable[[Role], Tensor | None]:
    """Run a party's part of answering texts or of classifying a text; see `PrivateLayers.answer`.

    Args:
        layers: this party's part of the layers with shared weights.
        prompts: at P1 (the user), the tokens of questions of one length; at the other parties, as
            many zeros.
        count: largest number of tokens of an answer.
        pick: P1's function that picks tokens.
        on_token: P1's function that receives each token.
        wants: function that both parties call with their wish to continue; it returns P1's wish at
            both.
    """

    def goes_on(going: bool) -> bool:
        if not wants(going):
            raise _EnoughError
        return True

    def program(party: Role) -> Tensor | None:
        if isinstance(layers.shape, EncoderShape):
            return layers.classify(party, prompts[0], [0] * len(prompts[0]))
        layers.answer(party, prompts, count, pick, on_token, goes_on)
        return None

    return program


def _texts_in(name: str) -> int:
    """Return the number of questions in the batch that uses the material of this name."""
    texts = kind_in(name).partition("x")[2]
    return int(texts) if texts else 1


def _blank(asked: Talk) -> list[list[int]]:
    return [[0] * asked.prompt_tokens] * asked.texts


def _sizes(asked: Talk) -> str:
    what = "a question" if asked.texts == 1 else f"{asked.texts} questions asked together"
    return f"{what}, {asked.prompt_tokens} tokens and {asked.count} answered"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise MissingDataError(
            "a key, token or certificate is missing",
            where=str(path),
            fix=_WRITTEN,
        ) from None
