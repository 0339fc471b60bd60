"""Contract tests for protocols whose parties hold secret shares.

class TestMine(HolderContract):
    protocols = {"product": Protocol(make, program, result=torch.tensor([6.0]), holders=2)}

The tests replace the links of one holder by an adversary, which receives the messages of the other
parties before it sends its own messages (a rushing adversary). The adversary repeats messages of
other parties or earlier messages, changes a part of its messages, changes messages for one receiver
only, sends messages of other sizes, or stops sending. The last party is the helper, which deals
randomness; the tests also check the messages that the helper receives.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from vfl.core.errors import (
    CheatingError,
    LostPeerError,
    PeerError,
    PeerFailedError,
    ProtocolError,
    VFLError,
)
from vfl.core.frame import Frame
from vfl.mpc.channel import Polled
from vfl.mpc.in_process import LocalParties
from vfl.mpc.rules import name_of
from vfl.testing.base import Contract

Note = Callable[[Tensor], None]
#: Messages that a holder sends in one turn, each with the role of its receiver.
Sent = list[tuple[int, Frame]]
#: Function that determines the messages that the adversary sends; its arguments are the turn, the
#: messages that an honest holder would send, and the messages received in this turn. If the
#: function replaces a received message, the adversary's own copy of the protocol continues with the
#: replaced message.
Behaviour = Callable[[int, Sent, dict[int, Frame]], Sent]

_WORD = np.dtype("<i8")
#: Seconds for which the adversary first waits for the messages of the other parties; in an
#: asymmetric protocol, the other parties may wait for the adversary's message instead.
_PATIENCE_S = 0.02
_TIMEOUT_S = 0.15
#: Seconds after which a test counts a protocol as hanging.
_HANGING_S = 60.0
#: Ring elements below this number are counts or indices, which may repeat in several messages.
_LEAST_WORD = 1 << 40
#: A check of MACs consists of three messages: the opened values, a commitment, and the committed
#: part with its nonce.
_CHECK_TURNS, _NONCE_BYTES = 3, 16


@dataclass(frozen=True)
class Protocol:
    """A program of several parties: all parties but the last hold shares; the last helps.

    Attributes:
        make: function that makes the parties with agreed keys; its argument is the number of
            seconds that a party waits for a message.
        program: program that each party runs; if the program sends shares to the helper in another
            form, it records these shares. The program returns a tensor at every holder that learns
            the values, and None at all other parties.
        result: the correct values if all parties follow the protocol.
        holders: number of holders, with roles from 0; the helper has the next role number.
        tolerance: largest error of a correct result.
        macs: whether the protocol detects a false share. Without MACs, the protocol assumes that
            all parties follow it; it may accept a wrong result if a party sends false values in
            messages of the right form.
        helper: values that the helper receives: nothing, values that masks make uniform, or masked
            parts of permuted values, from which the helper learns only the unordered values.
        word_bytes: number of bytes that a ring element has in a message to the helper; these bytes
            are the element's upper bytes.
    """

    make: Callable[[float], LocalParties[Any]]
    program: Callable[[Any, Note], Tensor | None]
    result: Tensor
    holders: int = 2
    tolerance: float = 0.0
    macs: bool = False
    helper: Literal["nothing", "masked", "permuted"] = "nothing"
    word_bytes: int = 8

    def right(self, found: Tensor) -> bool:
        """Return whether a result is correct."""
        wanted = self.result.double()
        return bool(((found.double() - wanted).abs() <= self.tolerance).all())


class Adversary:
    """Links of one dishonest holder, which receives before it sends, and may send anything.

    Args:
        links: the dishonest holder's links, by role of the other party.
        holders: number of holders; the adversary waits for the messages of all other holders.
        behave: function that determines the adversary's messages in a turn; by default, it returns
            the honest messages.
        patience_s: seconds for which the adversary waits for the other parties' messages of a turn
            before it sends its own.

    Attributes:
        turns: messages that an honest holder would have sent, one list for each turn.
    """

    def __init__(
        self,
        links: Mapping[int, Polled],
        holders: int,
        behave: Behaviour | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._links, self._holders, self._behave = links, holders, behave
        self._patience_s = patience_s
        self._held: Sent = []
        self._heard: dict[int, deque[Frame]] = defaultdict(deque)
        self.turns: list[Sent] = []

    def hold(self, peer: int, frame: Frame) -> None:
        """Keep a message back until this holder waits for a message."""
        self._held.append((peer, replace(frame, payload=bytes(frame.payload))))

    def receive(self, peer: int) -> Frame:
        """Return the next frame from a party."""
        self.flush()
        return self._heard[peer].popleft() if self._heard[peer] else self._links[peer].receive()

    def flush(self) -> None:
        """End a turn: send the messages that `hold` kept back, possibly changed."""
        if not self._held:
            return
        sent, self._held = self._held, []
        heard = self._listen({peer for peer, _ in sent if peer < self._holders})
        turn = len(self.turns)
        self.turns.append(sent)
        for peer, frame in sent if self._behave is None else self._behave(turn, sent, heard):
            self._links[peer].send(frame)
        for peer, frame in heard.items():
            self._heard[peer][0] = frame

    def _listen(self, waiting: set[int]) -> dict[int, Frame]:
        until = time.monotonic() + self._patience_s
        while True:
            for peer in waiting:
                if not self._heard[peer] and (frame := self._links[peer].poll()) is not None:
                    self._heard[peer].append(frame)
            if all(self._heard[peer] for peer in waiting) or time.monotonic() > until:
                return {peer: self._heard[peer][0] for peer in waiting if self._heard[peer]}
            time.sleep(0.0005)


@dataclass
class Tapped:
    """A link that stores the frames it receives, or that belongs to the adversary."""

    link: Polled
    peer: int
    adversary: Adversary | None = None
    heard: list[bytes] = field(default_factory=list)

    def send(self, frame: Frame) -> None:
        """See `vfl.core.frame.Link`."""
        if self.adversary is not None:
            self.adversary.hold(self.peer, frame)
        else:
            self.link.send(frame)

    def receive(self) -> Frame:
        """See `vfl.core.frame.Link`."""
        own = self.adversary is None
        frame = self.link.receive() if own else self.adversary.receive(self.peer)  # type: ignore[union-attr]
        self.heard.append(bytes(frame.payload))
        return frame

    def poll(self) -> Frame | None:
        """See `vfl.mpc.channel.Polled`."""
        frame = self.link.poll()
        if frame is not None:
            self.heard.append(bytes(frame.payload))
        return frame

    def read_beside(self, links: Sequence[Any]) -> None:
        """See `vfl.mpc.channel.Polled`."""

    def close(self) -> None:
        """See `vfl.core.frame.Link`."""
        self.link.close()


@dataclass
class Played:
    """Outcome of a session: results and recorded shares by role, and all received messages."""

    results: list[Tensor | None]
    notes: dict[int, list[Tensor]]
    turns: list[Sent]
    heard: dict[tuple[int, int], list[bytes]]


def play(
    protocol: Protocol,
    liar: int | None = None,
    behave: Behaviour | None = None,
    times: int = 1,
    timeout_s: float = _HANGING_S,
) -> list[Played]:
    """Run a protocol several times in one session; one holder may be an adversary.

    Raises:
        VFLError: a holder failed; the first error is raised.
    """
    found = []
    with protocol.make(timeout_s) as parties:
        for _ in range(times):
            taps: dict[tuple[int, int], Tapped] = {}
            adversary = None
            for party in parties.parties:
                links = {
                    peer: getattr(channel.link, "link", channel.link)
                    for peer, channel in party.channels.items()
                }
                hands = None
                if party.role == liar:
                    # If the protocol checks every opening, all holders send a message in each turn,
                    # so the adversary can wait for these messages.
                    patience_s = _HANGING_S if protocol.macs else _PATIENCE_S
                    hands = adversary = Adversary(links, protocol.holders, behave, patience_s)
                for peer, channel in party.channels.items():
                    tap = taps[party.role, peer] = Tapped(links[peer], peer, hands)
                    channel.link = tap
            notes: dict[int, list[Tensor]] = defaultdict(list)

            def program(
                party: Any, notes: dict[int, list[Tensor]] = notes, hands: Any = adversary
            ) -> Tensor | None:
                if party.role != liar:
                    return protocol.program(party, notes[party.role].append)
                try:  # an error at the adversary itself is not a failure of the protocol
                    result = protocol.program(party, notes[party.role].append)
                    hands.flush()
                except VFLError:
                    for channel in party.channels.values():
                        channel.link.close()
                    return None
                return result

            results = parties.run(program)
            heard = {pair: tap.heard for pair, tap in taps.items()}
            turns = [] if adversary is None else adversary.turns
            found.append(Played(results, notes, turns, heard))
    return found


def _shifted(payload: bytes, at: int) -> bytes:
    """Add one to the first ring element of a payload, or to its last one."""
    words = bytearray(payload)
    start = 0 if at == 0 else max(0, len(words) - 8)
    value = int.from_bytes(words[start : start + 8], "little") + 1
    words[start : start + 8] = (value % 2 ** (8 * len(words[start : start + 8]))).to_bytes(
        len(words[start : start + 8]), "little"
    )
    return bytes(words)


def _negated(payload: bytes) -> bytes:
    whole = len(payload) // 8 * 8
    words = -np.frombuffer(payload[:whole], _WORD)
    return words.astype(_WORD).tobytes() + payload[whole:]


@dataclass
class Lie:
    """One kind of false message in one turn; in all other turns, the holder follows the protocol.

    Attributes:
        kind: kind of the message, see `KINDS` and `SIZES`; a kind that does not apply leaves the
            message unchanged.
        turn: the turn.
        only: role of the only receiver of the false message; None means all receivers.
    """

    kind: str
    turn: int
    only: int | None = None
    told: bool = False
    _before: list[Frame] = field(default_factory=list, repr=False)

    def __call__(self, turn: int, sent: Sent, heard: dict[int, Frame]) -> Sent:
        """See `Behaviour`."""
        found: Sent = []
        for peer, frame in sent:
            payload = bytes(frame.payload)
            if turn == self.turn and self.only in (None, peer):
                changed = self._changed(peer, payload, heard)
                self.told = self.told or changed != payload
                step = (frame.step + 1) & 0xFFFFFFFF if self.kind == "other turn" else frame.step
                self.told = self.told or step != frame.step
                found.append((peer, replace(frame, payload=changed, step=step)))
            else:
                found.append((peer, frame))
            self._before.append(frame)
        if turn == self.turn and self.kind.endswith("throughout") and heard:
            # The lying holder's program then computes the same wrong sum as the programs of all
            # other holders.
            one = min(heard)
            shifted = self._changed(one, bytes(heard[one].payload), heard)
            heard[one] = replace(heard[one], payload=shifted)
        return found

    def _changed(self, peer: int, payload: bytes, heard: Mapping[int, Frame]) -> bytes:
        match self.kind:
            case "shorter":
                return payload[:-8]
            case "longer":
                return payload + bytes(8)
            case "empty":
                return b""
            case "first element" | "first element throughout" if payload:
                return _shifted(payload, 0)
            case "last element" | "last element throughout" if payload:
                return _shifted(payload, -1)
            case "random":
                return secrets.token_bytes(len(payload))
            case "largest":
                return b"\xff" * (len(payload) - 1) + b"\x7f" if payload else payload
            case "replay":
                same = [one for one in self._before if len(one.payload) == len(payload)]
                return bytes(same[0].payload) if same else payload
            case "echo" | "negated echo":
                theirs = bytes(heard[peer].payload) if peer in heard else b""
                if len(theirs) != len(payload):
                    return payload
                return theirs if self.kind == "echo" else _negated(theirs)
        return payload


#: Kinds of false messages whose size or place in the protocol is wrong, and kinds that have the
#: right form.
SIZES = ("shorter", "longer", "empty", "other turn")
KINDS = (
    "first element",
    "last element",
    "first element throughout",
    "last element throughout",
    "random",
    "largest",
    "replay",
    "echo",
    "negated echo",
)


@dataclass
class LateLie:
    """Opens a false value; then chooses its part of the check so that all parts add up to 0."""

    opening: int

    def __call__(self, turn: int, sent: Sent, heard: dict[int, Frame]) -> Sent:
        """See `Behaviour`."""
        if turn == self.opening:
            # The program of the lying holder then computes the same wrong sum as all other holders.
            one = min(heard)
            heard[one] = replace(heard[one], payload=_shifted(bytes(heard[one].payload), -1))
            return [(peer, replace(one, payload=_shifted(bytes(one.payload), -1)))
                    for peer, one in sent]  # fmt: skip
        if turn == self.opening + _CHECK_TURNS - 1:
            parts = [
                np.frombuffer(bytes(one.payload)[_NONCE_BYTES:], _WORD).astype(object)
                for one in heard.values()
            ]
            total = np.sum(parts, axis=0)
            answer = np.array([-each % (2**61 - 1) for each in total], dtype=_WORD).tobytes()
            return [(peer, replace(one, payload=bytes(one.payload)[:_NONCE_BYTES] + answer))
                    for peer, one in sent]  # fmt: skip
        return sent


@dataclass
class EchoedCheck:
    """Repeats another holder's commitment, then reveals that holder's part of the MAC check."""

    opening: int

    def __call__(self, turn: int, sent: Sent, heard: dict[int, Frame]) -> Sent:
        """See `Behaviour`."""
        if turn - self.opening in (1, 2):
            theirs = next(iter(heard.values()))
            return [(peer, replace(one, payload=bytes(theirs.payload))) for peer, one in sent]
        return sent


class HolderContract(Contract):
    """Properties of every protocol on secret shares.

    Attributes:
        protocols: the protocols under test, by name.
    """

    family = "protocol"
    protocols: ClassVar[Mapping[str, Protocol]] = {}
    _turns: ClassVar[dict[tuple[str, int], list[Sent]]] = {}

    def __init_subclass__(cls) -> None:
        cls.specs = tuple(cls.protocols)
        cls._turns = {}

    def _honest_turns(self, spec: str, role: int) -> list[Sent]:
        """Return an honest holder's messages by turn; this runs the protocol once."""
        if (spec, role) not in self._turns:
            (honest,) = play(self.protocols[spec], role)
            self._turns[spec, role] = honest.turns
        return self._turns[spec, role]

    def _lies(self, spec: str, kinds: Sequence[str]) -> Iterator[tuple[int, Lie]]:
        """Yield each kind of false message, in each turn of each holder, to all or to one."""
        protocol = self.protocols[spec]
        for liar in range(protocol.holders):
            for turn, sent in enumerate(self._honest_turns(spec, liar)):
                peers = sorted({peer for peer, _ in sent})
                for only in [None] if len(peers) == 1 else [None, peers[0]]:
                    yield from ((liar, Lie(kind, turn, only)) for kind in kinds)

    def _honest(self, liar: int | None, played: Played) -> list[Tensor]:
        found = enumerate(played.results)
        return [one for role, one in found if one is not None and role != liar]

    def test_result_does_not_depend_on_who_receives_first(self, spec: str) -> None:
        protocol = self.protocols[spec]
        told = 0
        for liar in (None, *range(protocol.holders)):
            (played,) = play(protocol, liar)
            found = self._honest(None, played)
            told += len(found)
            assert all(map(protocol.right, found)), "the result is wrong"
        assert told, "no holder receives a result"

    def test_malformed_message_is_refused(self, spec: str) -> None:
        refused = 0
        for liar, lie in self._lies(spec, SIZES):
            try:
                play(self.protocols[spec], liar, lie)
            except ProtocolError:
                refused += lie.told
            except PeerError as other:
                pytest.fail(f"{lie}: {other.code} where the form of a message is wrong")
            else:
                assert not lie.told, f"{lie} was accepted"
        assert refused, "no false message was sent that a holder could refuse"

    def test_silent_holder_ends_the_session_in_time(self, spec: str) -> None:
        protocol = self.protocols[spec]
        for liar in range(protocol.holders):
            for last in {0, len(self._honest_turns(spec, liar)) - 1}:
                began = time.monotonic()

                def silent(turn: int, sent: Sent, heard: Any, last: int = last) -> Sent:
                    return sent if turn < last else []

                with pytest.raises((LostPeerError, PeerFailedError), match=r"in time|closed"):
                    play(protocol, liar, silent, timeout_s=_TIMEOUT_S)
                assert time.monotonic() - began < _HANGING_S, (
                    "the protocol does not end in time when a holder is silent"
                )

    def test_well_formed_false_message_is_detected_by_macs(self, spec: str) -> None:
        """Test that a protocol's MACs detect a false message.

        Without MACs, the session must end with a result or with a typed error.
        """
        protocol, wrong = self.protocols[spec], 0
        for liar, lie in self._lies(spec, KINDS):
            try:
                (played,) = play(protocol, liar, lie)
            except CheatingError:
                assert lie.told, f"{lie}: an honest holder was accused"
            except VFLError as other:
                if protocol.macs:
                    pytest.fail(f"{lie}: {other.code} instead of a CheatingError")
            else:
                right = all(map(protocol.right, self._honest(liar, played)))
                assert right or not protocol.macs, f"{lie} by P{liar}: a wrong result was accepted"
                assert not (protocol.macs and lie.told), f"{lie} by P{liar} was not found"
                wrong += not right
        assert protocol.macs or wrong, "the protocol detects every lie: declare this by macs=True"

    def test_check_value_is_committed_before_others_open(self, spec: str) -> None:
        self._needs_macs(spec)
        for liar, opening in self._openings(spec):
            with pytest.raises(CheatingError, match="lied") as caught:
                play(self.protocols[spec], liar, LateLie(opening))
            assert f"of {name_of(liar)}" in (caught.value.got or ""), (
                "the error does not name the lying holder"
            )

    def test_echoed_commitment_is_refused(self, spec: str) -> None:
        self._needs_macs(spec)
        for liar, opening in self._openings(spec):
            with pytest.raises(CheatingError, match="lied") as caught:
                play(self.protocols[spec], liar, EchoedCheck(opening))
            assert f"of {name_of(liar)}" in (caught.value.got or ""), "an echo passes"

    def test_no_mask_is_used_twice(self, spec: str) -> None:
        """Test that a program that runs twice in one session uses each mask only once."""
        one, two = play(self.protocols[spec], times=2)
        for pair in one.heard:
            again = _words(one.heard[pair]) & _words(two.heard[pair])
            assert not again, f"P{pair[0]} receives ring elements of P{pair[1]} twice"

    def test_helper_receives_only_declared_values(self, spec: str) -> None:
        protocol, helper = self.protocols[spec], self.protocols[spec].holders
        size = protocol.word_bytes
        runs, orders = play(protocol, times=2), []
        for played in runs:
            told = {peer: b"".join(played.heard[helper, peer]) for peer in range(helper)}
            if protocol.helper == "nothing":
                assert not any(told.values()), "the helper receives something"
                continue
            for peer, raw in told.items():
                assert raw, f"P{peer} sends the helper nothing"
                assert _uniform(raw), f"what P{peer} sends the helper is not uniform"
                if protocol.helper == "masked":
                    continue
                words = {raw[at : at + size] for at in range(0, len(raw), size)}
                kept = torch.cat([one.reshape(-1) for one in played.notes[peer]]).numpy()
                shares = kept.astype(_WORD).view(np.uint8).reshape(-1, 8)[:, 8 - size :]
                assert len(shares) >= 256, "the program records too few shares for this test"
                stored = {bytes(each) for each in shares}
                assert not words & stored, f"the helper is sent shares that P{peer} keeps"
            if protocol.helper == "permuted":
                orders.append(_sums(list(told.values()), size))
        if orders:
            one, two = orders
            assert not np.array_equal(one, two), (
                "the helper sees values in the same order in two runs"
            )

    def _needs_macs(self, spec: str) -> None:
        if not self.protocols[spec].macs:
            pytest.skip("it has no MACs")

    def _openings(self, spec: str) -> Iterator[tuple[int, int]]:
        protocol = self.protocols[spec]
        for liar in range(protocol.holders):
            turns = len(self._honest_turns(spec, liar))
            assert turns % _CHECK_TURNS == 0, "an opening has three turns"
            for opening in range(0, turns, _CHECK_TURNS):
                yield liar, opening


def _words(payloads: Sequence[bytes]) -> set[int]:
    """Return all complete ring elements of some payloads that are not counts or indices."""
    found: set[int] = set()
    for payload in payloads:
        words = np.frombuffer(payload[: len(payload) // 8 * 8], "<u8")
        found |= set(words[words > _LEAST_WORD].tolist())
    return found


def _uniform(raw: bytes) -> bool:
    """Return whether the chi-square statistic of the bytes is within six standard deviations."""
    counts = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return bool(abs(statistic - 255) < 6 * (2 * 255) ** 0.5)


def _sums(parts: Sequence[bytes], size: int) -> np.ndarray:
    """Return the sum of all parties' parts; each element is the upper bytes of a word."""
    total: np.ndarray = np.zeros(len(parts[0]) // size, _WORD)
    for raw in parts:
        words = np.zeros((len(total), 8), np.uint8)
        words[:, 8 - size :] = np.frombuffer(raw, np.uint8).reshape(-1, size)
        total += words.view(_WORD).reshape(-1)
    return total
