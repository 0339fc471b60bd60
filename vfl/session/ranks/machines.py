"""Ranks of one party on several machines: their authentication and their messages.

While a session in several ranks runs, rank 0 listens at an address of the party's internal network,
and the commands that run the other ranks connect to this address. Each of these other ranks has one
TLS 1.3 stream, which carries rank 0's orders to the rank, the rank's answers, and all gradients.
Torch's process groups are not used here: gloo, as PyTorch ships it, neither encrypts nor
authenticates peers, and torch's store accepts any client.

Every machine of the party stores the same 32 secret bytes, which are called the ranks' key. From
this key, HKDF (RFC 5869) derives a token for each rank. HKDF also derives the private key of a
certificate authority, which signs a new certificate of rank 0 for each session. A rank sends its
token only to a server with such a certificate. Rank 0 trusts no message before the token; until a
connection has sent its token, the limits for unauthenticated connections in `vfl.transport.hub`
apply.

The ranks form a star: rank 0 adds up the received values in the order of the ranks, and sends the
sum back. Between two machines, a ring all-reduce would transfer as many bytes as this method; with
more machines, all traffic passes through rank 0's network connection.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl.config import PartyFile, read_party_file
from vfl.core.errors import (
    AuthenticationError,
    ConfigError,
    DataError,
    DisagreementError,
    LostPeerError,
    MissingDataError,
    MissingPartyError,
    PeerFailedError,
    ProtocolError,
    VFLError,
)
from vfl.core.frame import Frame, Kind
from vfl.core.version import VERSION
from vfl.datasets import PartyData
from vfl.session.handshake import check_version, errors_reported, unexpected
from vfl.session.ranks.group import Ranks, lost
from vfl.session.ranks.processes import FurtherRanks, Order, RankProcesses, WatchedLink, ended
from vfl.transport import Admission, Credential, Hello, PolledLink, TcpHub, TcpLink, Timeouts
from vfl.transport.certificates import Authority, ServerCertificate
from vfl.transport.pairs import derived

_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CERTIFICATE_DAYS = 30
#: Longest interruption of a rank's stream, in seconds; after a longer interruption, the rank ends.
#: This limit is shorter than the time that other parties wait for this party.
_REJOIN_S = 1.0
_RETRY_S = 1.0
#: Seconds within which a rank has to connect; rank 0 reports a missing rank before the ranks of
#: another party stop waiting after `join_timeout_s`.
_ARRIVAL_S = 40.0
_DIGESTED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class RanksKey:
    """Secret key that all machines of a party share.

    Attributes:
        party: name of the party that owns the machines.
        secret: the 32 secret bytes that every machine of the party stores.
    """

    party: str
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, party: PartyFile) -> RanksKey:
        """Read the key in a party's `node.ranks_key`.

        Raises:
            MissingDataError, DataError: the file is missing, other users may read it, or it
                contains no key.
        """
        path = party.beside(party.node.ranks_key)
        fix = (
            f"openssl rand -hex 32 > {path}; chmod 600 {path}; copy the same file to every machine"
        )
        try:
            text = path.read_text(errors="replace").strip()
            open_to_others = path.stat().st_mode & 0o077
        except FileNotFoundError:
            raise MissingDataError("the ranks' key is missing", where=str(path), fix=fix) from None
        if open_to_others:
            raise DataError(
                "other users of this machine may read the ranks' key",
                where=str(path),
                fix=f"chmod 600 {path}",
            )
        if not _KEY.fullmatch(text):
            raise DataError(
                "this file contains no ranks' key",
                where=str(path),
                want="32 random bytes as 64 hexadecimal digits",
                fix=fix,
            )
        return cls(party.party, bytes.fromhex(text))

    @property
    def authority(self) -> Authority:
        """Return the certificate authority of the ranks; each call returns the same key."""
        name = f"vfl ranks of {self.party}"
        return Authority.of_secret(self._derived("authority", 48), name, _CERTIFICATE_DAYS)

    def certificate(self, host: str) -> ServerCertificate:
        """Make a new TLS certificate of rank 0 for a host name."""
        return self.authority.issue_for([host], _CERTIFICATE_DAYS)

    def token(self, rank: int) -> str:
        """Return the secret token with which a rank authenticates itself to rank 0."""
        return self._derived(f"token of rank {rank}", 32).hex()

    def _derived(self, purpose: str, size: int) -> bytes:
        return derived(self.secret, f"vfl ranks 1|{self.party}|{purpose}".encode(), size)


class StreamGroup:
    """Collective operations of ranks over streams; see `vfl.session.ranks.group.Group`.

    Args:
        rank: number of this rank.
        size: number of ranks.
        take: function that takes a rank's number and returns the next frame received from that
            rank.
        give: function that takes a rank's number and sends a frame to that rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        take: Callable[[int], Frame],
        give: Callable[[int, Frame], None],
    ) -> None:
        self._take_frame, self._give_frame = take, give
        self._leads, self._size, self._count = rank == 0, size, 0
        self._others = range(1, size) if self._leads else range(1)

    def add_up(self, values: Tensor) -> None:
        """See `Group.add_up`; rank 0 adds the ranks' values in the order of the ranks."""
        if self._leads:
            for rank in self._others:
                values += self._take(rank, values)
        else:
            self._give(values)
        self.spread(values)

    def spread(self, values: Tensor) -> None:
        """See `Group`."""
        if self._leads:
            self._give(values)
        else:
            values.copy_(self._take(0, values))
        self._count = (self._count + 1) % 2**32

    def gather(self, values: Tensor) -> list[Tensor]:
        """See `Group`."""
        every = values.new_empty(self._size, *values.shape)
        if self._leads:
            every[0] = values
            for rank in self._others:
                every[rank] = self._take(rank, values)
        else:
            self._give(values)
        self.spread(every)
        return list(every)

    def _give(self, values: Tensor) -> None:
        # The values are copied: a resend after a lost connection repeats the sent bytes, but sums
        # are computed in place.
        payload = values.detach().cpu().contiguous().numpy().tobytes()
        for rank in self._others:
            self._give_frame(rank, Frame(Kind.GRAD, self._count, payload))

    def _take(self, rank: int, like: Tensor) -> Tensor:
        frame = self._take_frame(rank)
        if (frame.kind, frame.step, len(frame.payload)) != (Kind.GRAD, self._count, like.nbytes):
            raise ProtocolError(
                "two ranks run different collective operations",
                where=f"rank {rank}",
                got=f"{frame.kind.name} {frame.step} of {len(frame.payload)} bytes",
                want=f"{Kind.GRAD.name} {self._count} of {like.nbytes} bytes",
            )
        values = torch.frombuffer(bytearray(frame.payload), dtype=like.dtype)
        return values.view(like.shape).to(like.device)


class _RankLink(WatchedLink):
    """Rank 0's link to another rank; any error becomes a `LostRankError` that names the rank."""

    def __init__(self, party: str, rank: int, link: PolledLink, check: Callable[[], None]) -> None:
        super().__init__(link, _name(rank), check)
        self._party, self._rank = party, rank

    def look(self) -> None:
        with self._named():
            super().look()

    def send(self, frame: Frame) -> None:
        with self._named():
            super().send(frame)

    def _lost(self, how: str) -> VFLError:
        return lost(self._party, self._rank, how)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except PeerFailedError as failure:
            code, what = failure.peer_code or "", failure.peer_what
            raise ended(self._party, self._rank, code, what, failure.where, failure.fix) from None
        except LostPeerError as gone:
            raise self._lost(gone.what) from None


class RankMachines(FurtherRanks):
    """The additional ranks of a party on other machines, as rank 0 sees them.

    An object of this class listens for connections of ranks while it exists, and otherwise behaves
    like `RankProcesses`.

    Args:
        party: the party's own configuration file.
        size: number of ranks, this process included.
        patience_s: most seconds that a rank may take to connect, and to answer an order.

    Raises:
        UserError: this process cannot listen at the party's address for ranks.
        MissingDataError, DataError: the ranks' key cannot be read.
    """

    def __init__(self, party: PartyFile, size: int, patience_s: float) -> None:
        super().__init__(party.party, size, patience_s)
        assert party.ranks_address is not None, "it has ranks elsewhere"
        host, port = party.ranks_address
        self._at = party.node.ranks_at
        key = RanksKey.of(party)
        credentials = {
            _name(rank): Credential(_name(rank), key.token(rank)) for rank in self.further
        }
        self._hub = TcpHub(
            host,
            port,
            Admission(_session(party.party), credentials, self._admit),
            key.certificate(host),
            Timeouts(step_s=patience_s, rejoin_window_s=_REJOIN_S),
        )
        self._links: dict[int, _RankLink] = {}

    @property
    def one_machine(self) -> bool:
        """Return False: the ranks run on other machines."""
        return False

    def start(self, rank: int, order: Mapping[str, Any]) -> None:
        """Wait for the rank's connection, and send the rank its order.

        Raises:
            LostRankError: the rank did not connect in time.
            DisagreementError: the rank runs another version of vfl.
        """
        wait_s = min(self._patience_s, _ARRIVAL_S)
        try:
            self._hub.wait_all([_name(rank)], wait_s)
        except MissingPartyError:
            error = lost(self.party, rank, f"it did not connect within {wait_s:g} s")
            error.where, error.fix = self._at, f"vfl up party.toml --rank {rank} at its machine"
            raise error from None
        link = self._hub.link(_name(rank))
        self._links[rank] = _RankLink(self.party, rank, link, self.check_parties)
        group = {"size": self.size, "patience_s": self._patience_s}
        self._give(rank, _as_frame({**order, "group": group}))

    def receive(self, rank: int) -> Mapping[str, Any]:
        """Return the next message of a rank."""
        return _content(self._take(rank), _name(rank))

    def join_group(self, data: PartyData) -> Ranks:
        """Check that all ranks have the same table, and join their group.

        Raises:
            DisagreementError: a rank has a different table.
        """
        own = digest_of_rows(data)
        for rank in self.further:
            # If the rank has failed, its message is an error report, and `receive` raises it.
            if self.receive(rank).get("rows") != own:
                raise DisagreementError(
                    f"rank {rank} of party '{self.party}' has different rows or values from rank 0",
                    want="the same table at every machine of the party",
                    fix="copy the file of [data] source to that machine again",
                )
        return Ranks(self.party, 0, self.size, StreamGroup(0, self.size, self._take, self._give))

    def check(self) -> None:
        """Check the connections to all ranks."""
        for link in self._links.values():
            link.look()

    def _find_lost(self) -> None:
        """Do nothing, because the link's error has already named the lost rank."""

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            for link in self._links.values():
                with suppress(VFLError):  # this rank has completed its work
                    link.send(Frame(Kind.DONE))
        elif isinstance(error, Exception):
            known = error if isinstance(error, VFLError) else unexpected(error, self.party)
            self._hub.fail(known)
        self._hub.close()

    def _take(self, rank: int) -> Frame:
        return self._links[rank].receive()

    def _give(self, rank: int, frame: Frame) -> None:
        self._links[rank].send(frame)

    def _admit(self, name: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
        check_version(about.get("version"), f"{name} of party '{self.party}'")
        return {}


def further_ranks(party: PartyFile, size: int, patience_s: float, device: str) -> FurtherRanks:
    """Make the object with which rank 0 starts and reaches the other ranks of a party.

    Args:
        party: the party's own configuration file, which states whether the ranks are on other
            machines.
        size: number of ranks, this process included.
        patience_s: most seconds that a rank may take to connect, and to answer an order.
        device: device of rank 0's models.

    Raises:
        UserError, MissingDataError, DataError: see `RankMachines`.
    """
    if size > 1 and party.ranks_address is not None:
        return RankMachines(party, size, patience_s)
    return RankProcesses(party.party, size, patience_s, device)


@contextmanager
def joined(party_file: Path, rank: int, say: Callable[[str], None]) -> Iterator[Order]:
    """Receive this rank's next order from rank 0; report errors of the block to rank 0.

    Args:
        party_file: the party's own configuration file on this machine.
        rank: number of this rank, from 1.
        say: function that receives a message when rank 0's order has arrived.

    Raises:
        AuthenticationError: rank 0 has a different ranks' key, the session has fewer ranks, or
            another process with this rank's number is already connected.
        LostRankError: rank 0 has ended.
        ProtocolError: rank 0 sent an unexpected message.
    """
    party = read_party_file(party_file)
    link = _reached(party, rank)

    def take(_: int) -> Frame:
        try:
            return link.receive()
        except LostPeerError as gone:
            raise lost(party.party, 0, gone.what) from None

    def give(_: int, frame: Frame) -> None:
        try:
            link.send(frame)
        except LostPeerError as gone:
            raise lost(party.party, 0, gone.what) from None

    def reply(answer: Mapping[str, Any]) -> None:
        give(0, _as_frame(answer))

    def join_group(device: str, data: PartyData) -> Ranks:
        reply({"rows": digest_of_rows(data)})
        return Ranks(party.party, rank, size, StreamGroup(rank, size, take, give))

    with errors_reported(link, party.party, within=True):
        content = _content(take(0), "rank 0")
        size, link.patience_s = int(content["group"]["size"]), content["group"]["patience_s"]
        say(f"rank {rank} of party {party.party} begins")
        yield Order(content, rank, 0, party_file, reply, join_group)
        # until the context ends, no other process may connect as this rank
        if (last := take(0)).kind is not Kind.DONE:
            raise ProtocolError("an unexpected message", got=last.kind.name, want=Kind.DONE.name)


def digest_of_rows(data: PartyData) -> str:
    """Return the SHA-256 of a party's rows; only ranks of one party compare this digest."""
    digest = hashlib.sha256(data.ids_digest)
    for values in (data.inputs, data.labels, data.row_weights):
        if values is not None:
            digest.update(str((values.dtype, *values.shape)).encode())
            for start in range(0, len(values), _DIGESTED_ROWS):
                part = values[start : start + _DIGESTED_ROWS]
                digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _reached(party: PartyFile, rank: int) -> TcpLink:
    """Open a stream to rank 0; wait until rank 0 listens."""
    if party.ranks_address is None:
        raise ConfigError(
            "this party has no ranks on other machines",
            where="node.ranks_at",
            want="HOST:PORT of rank 0, an address of the party's own network",
        )
    host, port = party.ranks_address
    key = RanksKey.of(party)
    hello = Hello(_session(party.party), _name(rank), key.token(rank), {"version": VERSION})
    waits = Timeouts(rejoin_window_s=_REJOIN_S)
    while True:
        try:
            return TcpLink.connect(host, port, hello, key.authority.ca_pem, waits, peer="rank 0")
        except LostPeerError:
            time.sleep(_RETRY_S)  # rank 0 does not listen while no session with several ranks runs
        except AuthenticationError as refusal:
            raise AuthenticationError(
                f"rank 0 of party '{party.party}' does not accept this rank",
                where=party.node.ranks_at,
                got=refusal.got or refusal.what,
                want="one ranks.key at every machine, a rank below the session's number of ranks, "
                "and one process for each rank",
            ) from None


def _name(rank: int) -> str:
    return f"rank {rank}"


def _session(party: str) -> str:
    return f"ranks of {party}"


def _as_frame(content: Mapping[str, Any]) -> Frame:
    return Frame(Kind.PROTOCOL, payload=json.dumps(content).encode())


def _content(frame: Frame, who: str) -> Mapping[str, Any]:
    try:
        content = json.loads(bytes(frame.payload))
    except ValueError:
        content = None
    if frame.kind is not Kind.PROTOCOL or not isinstance(content, dict):
        raise ProtocolError("an unexpected message", where=who, got=frame.kind.name)
    return content
