"""Messages before and after a session's exchanges: session message, introduction, and report.

Flower carries one `SessionMessage` to a party. The party introduces itself on its stream to the
label party. Before step 0, the label party compares terms, versions and rows. Rows are compared by
their number and by a keyed digest of their order, never by ids. The key of the digest is the
session's identifier. A party's last message is its report, with the digest of its trained weights.
If a party fails, other parties receive only those parts of its error that disclose nothing about
its data.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

from pydantic import Field, StringConstraints, ValidationError

from vfl.config.experiment import MAX_STEPS, PartyName, Seconds
from vfl.config.toml import Host, OptionalHost, Settings
from vfl.core.errors import (
    ConfigError,
    DataError,
    DisagreementError,
    MisalignedError,
    PeerFailedError,
    ProtocolError,
    RunFolderError,
    StorageError,
    VFLError,
)
from vfl.core.frame import Frame, Kind
from vfl.core.version import VERSION
from vfl.datasets import PartyData
from vfl.datasets.alignment.positions import Alignment
from vfl.session import rules, secure_mode
from vfl.session.store.witness import MOST, Announcement
from vfl.session.terms import SHORT, AlignTerms, Terms, differing
from vfl.transport import Hello, LinkLimits, TcpLink, Timeouts, route_of

_HEX = r"^[0-9a-f]{64}$"
Short = Annotated[str, StringConstraints(max_length=SHORT, pattern=r"^[ -~]*$")]


#: Most erased rows that a session message can name, and that an introduction can name. More rows
#: than the second number require several sessions, and more than the first a new alignment.
MOST_TOLD, _MOST_AT_ONCE = 4096, 128


class Withdrawn(Settings):
    """Rows that parties have erased from an alignment, as one party reports to another.

    Attributes:
        order: HMAC-SHA256 of the alignment's attribute `key`; the session's identifier is the key
            of the HMAC. If `order` is equal at two parties, equal positions mean the same rows at
            these parties.
        places: positions of the erased rows in the original order of the alignment.
    """

    order: str = Field(pattern=_HEX)
    places: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(max_length=MOST_TOLD)

    @classmethod
    def of(
        cls, alignment: Alignment | None, session: str, known: Collection[int] = ()
    ) -> Withdrawn | None:
        """Collect the erased rows that this party has to report; None if there are none.

        Args:
            alignment: the party's own alignment; None if the parties join rows by their ids.
            session: identifier of the session, which is the key of the HMAC.
            known: positions of erased rows that the other party has already reported.

        Raises:
            MisalignedError: more rows were erased than one message can name.
        """
        places = () if alignment is None else sorted({*alignment.withdrawn} - {*known})
        if alignment is None or not places:
            return None
        if len(places) > MOST_TOLD:
            raise MisalignedError(
                f"more than {MOST_TOLD} rows were erased from an alignment",
                where=f"alignment '{alignment.agreed.name}', version {alignment.version}",
                fix="vfl align",
            )
        return cls(order=cls._order(alignment, session), places=tuple(places))

    def first(self) -> Withdrawn:
        """Return the first positions, as many as an introduction can contain.

        The next session reports the rest.
        """
        return self.model_copy(update={"places": self.places[:_MOST_AT_ONCE]})

    def beyond(self, alignment: Alignment | None, session: str) -> list[int]:
        """Return the reported positions that this party's alignment does not list as erased yet.

        The result is empty if the report is about an alignment other than this party's alignment.
        """
        if alignment is None or not hmac.compare_digest(
            self.order, self._order(alignment, session)
        ):
            return []
        return sorted({*self.places} - {*alignment.withdrawn})

    @staticmethod
    def _order(alignment: Alignment, session: str) -> str:
        return hmac.new(session.encode(), alignment.key.encode(), hashlib.sha256).hexdigest()


class Introduction(Settings):
    """Message with which a party introduces itself when it connects to the label party's stream.

    Attributes:
        terms: digest of the terms that the party received.
        settings: short texts for all settings in these terms, so that an error can name the setting
            that differs.
        row_order: digest of the order of the party's rows, with the session's identifier as key;
            zeros for a party without rows.
        standing: announcement of the party's store counter; None if the party has no counter.
        withdrawn: rows that this party has erased and that the session message did not name.
    """

    party: PartyName
    version: str = Field(max_length=32, pattern=r"^[ -~]+$")
    terms: str = Field(pattern=_HEX)
    settings: dict[Short, Short] = Field(max_length=64)
    rows: int = Field(ge=0, lt=2**40)
    row_order: str = Field(pattern=_HEX)
    standing: Announcement | None
    withdrawn: Withdrawn | None = None

    @classmethod
    def of(
        cls,
        data: PartyData | None,
        terms: Terms,
        session: str,
        standing: Announcement | None = None,
        party: str | None = None,
        withdrawn: Withdrawn | None = None,
    ) -> Introduction:
        """Make the introduction of a party with rows `data`, or of `party` without rows."""
        if party is None:
            party = str(rules.rowless(terms)) if data is None else data.name
        return cls(
            party=party,
            version=VERSION,
            terms=terms.digest(),
            settings=terms.settings(),
            rows=0 if data is None else data.rows,
            row_order="0" * 64 if data is None else data.row_digest(session),
            standing=standing,
            withdrawn=None if withdrawn is None else withdrawn.first(),
        )

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Introduction:
        """Parse an introduction that a stream delivered.

        Raises:
            DisagreementError: another version of vfl wrote the introduction.
            ProtocolError: the message has an unknown form.
        """
        try:
            return cls.model_validate(content)
        except ValidationError:
            check_version(content.get("version"), "a feature party")
            raise ProtocolError("a party introduced itself in an unknown form") from None


def check_introduction(
    introduction: Introduction, terms: Terms, own: PartyData, session: str
) -> None:
    """Compare a party's introduction with the label party's terms, version and rows.

    Raises:
        DisagreementError: the party is unknown, or its terms or its version of vfl differ from the
            label party's.
        MisalignedError: the party's rows differ from the label party's rows, or have a different
            order.
    """
    party = introduction.party
    if party not in rules.peers(terms):
        raise DisagreementError(
            f"party '{party}' is not part of this experiment",
            got=party,
            want=", ".join(rules.peers(terms)),
            fix="use the names of the experiment's [parties] in the party files",
        )
    check_version(introduction.version, f"party '{party}'")
    if introduction.terms != terms.digest():
        got, want = differing(introduction.settings, terms.settings())
        digests = f"{terms.digest()[:8]}... here, {introduction.terms[:8]}... there"
        raise DisagreementError(
            f"party '{party}' runs another experiment",
            where="handshake",
            got=got,
            want=want,
            fix=f"start both parties with the same experiment: terms {digests}",
        )
    if (
        party == rules.rowless(terms)
        or terms.mode == "align"
        or secure_mode.make(terms.secure).divides_rows
    ):
        # the party has no rows, or has not aligned its rows yet, or every party has separate rows
        return
    if introduction.rows != own.rows:
        raise MisalignedError(
            f"the tables of '{party}' and '{own.name}' have different rows",
            where="handshake",
            got=f"'{party}': {introduction.rows} rows, '{own.name}': {own.rows} rows",
            want="the same ids at every party",
            fix="keep only the ids that all parties have, for example after a private set "
            "intersection (vfl align)",
        )
    if not hmac.compare_digest(introduction.row_order, own.row_digest(session)):
        raise MisalignedError(
            f"the tables of '{party}' and '{own.name}' hold different ids",
            where="handshake",
            got=f"{introduction.rows} rows at both parties, but different digests of their ids",
            want="the same ids, written the same way, at every party",
            fix="check the type of the id column, and keep only the ids that all parties have",
        )


def check_version(said: Any, peer: str) -> None:
    """Refuse a peer that announces another version of vfl.

    Args:
        said: content of the version field; anything except a short text is treated as a missing
            version.
        peer: name of the peer, for the error message.

    Raises:
        DisagreementError: the versions differ; the error states both versions.
    """
    if isinstance(said, str) and len(said) <= 32 and said.isprintable() and said != VERSION:
        raise DisagreementError(
            f"{peer} runs another version of vfl",
            where="handshake",
            got=f"vfl {said} at the other party",
            want=f"vfl {VERSION}, as at this party",
            fix=f"install one version at every party: pip install vfl=={VERSION}",
        )


#: Largest size of a message in bytes; vfl refuses a larger message before it parses the message.
MESSAGE_LIMIT_BYTES = 64 * 1024
_PEM = r"^-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\n\r -]*$"


class RankStream(Settings):
    """Stream between two further ranks (processes) of equal number, at two parties.

    Attributes:
        port: port on which the label party's rank of this number listens.
        token: token of this rank's stream, 32 random bytes; it is valid for no other stream.
        host, ca_pem: address and certificate authority of a label party's rank on another machine;
            empty if the session's address and authority apply.
    """

    port: int = Field(ge=1, le=65535)
    token: str = Field(pattern=r"^[A-Za-z0-9_-]{32,128}$", repr=False)
    host: OptionalHost = Field(default="", max_length=253)
    ca_pem: str = Field(default="", max_length=4096, pattern=rf"^$|{_PEM}", repr=False)


class SessionMessage(Settings):
    """Message that invites a party: address and credentials of the stream, and the session's terms.

    Attributes:
        session: 16 random bytes as hex; identifies this attempt.
        token: token with which the party shows on its stream that Flower authenticated its node; 32
            random bytes.
        node: the Flower node for which the token was made.
        host, port: address of the stream, as the party reaches it.
        ca_pem: certificate authority that signed the stream's certificate.
        idle_timeout_s: seconds that the party waits for one frame.
        rejoin_window_s: seconds within which a lost connection of the stream must be restored.
        start: number of the exchange at which a resumed training continues.
        attempt: number of restarts of the session; the parties' keys are valid for one attempt.
        rows: number of rows of the session, for a middle party, which has no rows; 0 for other
            parties.
        known: largest counter of the receiving party's store that the label party has received; see
            `vfl.session.store.witness`.
        ranks: the streams of the party's further ranks, from rank 1 on.
        withdrawn: rows that parties have erased from the alignment, as far as the label party
            knows.
        rank: number of the rank that receives this message; the rank's stream leads to the label
            party's rank of the same number.
        terms: terms of the session.
    """

    session: str = Field(pattern=r"^[0-9a-f]{32}$")
    token: str = Field(pattern=r"^[A-Za-z0-9_-]{32,128}$", repr=False)
    node: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    host: Host = Field(max_length=253)
    port: int = Field(ge=1, le=65535)
    ca_pem: str = Field(max_length=16384, pattern=_PEM, repr=False)
    idle_timeout_s: Seconds
    rejoin_window_s: Seconds
    start: int = Field(default=0, ge=0, lt=MAX_STEPS)
    attempt: int = Field(default=0, ge=0, le=1000)
    rows: int = Field(default=0, ge=0, lt=2**32)
    known: int = Field(default=0, ge=0, lt=MOST)
    ranks: tuple[RankStream, ...] = Field(default=(), max_length=63)
    withdrawn: Withdrawn | None = None
    rank: int = Field(default=0, ge=0, le=63)
    terms: AlignTerms | Terms

    def of_rank(self, rank: int) -> SessionMessage:
        """Make the message for one further rank, without the streams and tokens of other ranks."""
        own = self.ranks[rank - 1]
        changed = {"port": own.port, "token": own.token, "ranks": (), "rank": rank}
        if own.host:
            changed |= {"host": own.host, "ca_pem": own.ca_pem}
        return self.model_copy(update=changed)

    @classmethod
    def parse(cls, text: str) -> SessionMessage:
        """Parse a session message.

        Raises:
            DisagreementError: another version of vfl wrote the message with other fields.
            ProtocolError: the message has an unknown form.
        """
        raw = text.encode(errors="replace")
        if len(raw) > MESSAGE_LIMIT_BYTES:
            raise ProtocolError(
                "the session message is too long",
                got=f"{len(raw)} bytes",
                want=f"at most {MESSAGE_LIMIT_BYTES} bytes",
            )
        try:
            return cls.model_validate_json(raw)
        except ValidationError as problem:
            check_version(_version_in(text), "the label party")
            # The error shows only names of fields, because the message's values include the token.
            # A text that is not a JSON object has no field names.
            fields = sorted({str(error["loc"][0]) for error in problem.errors() if error["loc"]})
            raise ProtocolError(
                "this version of vfl cannot read the session message",
                where=f"fields {', '.join(fields)}" if fields else "the whole message",
                fix="install the same vfl version at every party",
            ) from None


def _version_in(text: str) -> Any:
    """Return the version that a message of unknown form states; None if it states no version."""
    try:
        return json.loads(text)["terms"]["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


#: Largest size of a report in bytes.
REPORT_LIMIT_BYTES = 1024


class PartyReport(Settings):
    """Final message of a party: it contains the digest of the party's weights, but no weights.

    Attributes:
        count: counter of the party's store at the end of the session; see
            `vfl.session.store.witness`.
    """

    party: PartyName
    weights_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    seconds: float = Field(ge=0, le=1e9)
    count: int = Field(default=0, ge=0, lt=MOST)

    def frame(self) -> Frame:
        """Return a DONE frame that contains the report."""
        return Frame(Kind.DONE, payload=self.model_dump_json().encode())

    @classmethod
    def of(cls, frame: Frame, party: str) -> PartyReport:
        """Parse the report in a frame.

        Raises:
            ProtocolError: the frame has another kind or an unknown form, or names another party.
        """
        if frame.kind is not Kind.DONE:
            raise ProtocolError(
                f"an unexpected message from party '{party}'", got=frame.kind.name, want="DONE"
            )
        if len(frame.payload) > REPORT_LIMIT_BYTES:
            raise ProtocolError(
                f"the report of party '{party}' has an unknown form",
                got=f"{len(frame.payload)} bytes",
                want=f"at most {REPORT_LIMIT_BYTES} bytes",
            )
        try:
            report = cls.model_validate_json(bytes(frame.payload))
        except ValidationError:
            raise ProtocolError(f"the report of party '{party}' has an unknown form") from None
        if report.party != party:
            raise ProtocolError(
                f"party '{party}' sent a report under another party's name", got=report.party
            )
        return report


def for_others(error: VFLError, party: str) -> VFLError:
    """Return an error that other parties may see.

    An error about the party's tables, folders or settings loses its details; any other error stays
    unchanged.
    """
    if isinstance(error, StorageError):
        return StorageError(f"party '{party}' cannot write its own files", got=error.got)
    if isinstance(error, MisalignedError):  # the text of this error contains only counts
        return error
    if isinstance(error, DataError | RunFolderError | ConfigError):
        return type(error)(f"party '{party}' cannot use its own files; its own log says why")
    return error


class Reported(Protocol):
    """A stream, or a hub with several streams, that can send an error to its peers."""

    def fail(self, error: VFLError) -> None:
        """Send an error to the peers."""

    def close(self) -> None:
        """Close the stream or the hub."""


@contextmanager
def errors_reported(to: Reported, party: str, *, within: bool = False) -> Iterator[None]:
    """Send errors of the `with` block to the peers.

    Close the stream at the end of the block in any case.

    Args:
        to: the stream, or the hub with the streams of all peers.
        party: this party.
        within: whether the peer is a process of the same party, which may see all details of errors
            about the party's files.
    """
    try:
        yield
    except VFLError as error:
        to.fail(error if within else for_others(error, party))
        raise
    except Exception as bug:
        to.fail(unexpected(bug, party))
        raise
    finally:
        to.close()


def unexpected(bug: BaseException, party: str) -> VFLError:
    """Make an error from a stop signal or an unexpected exception, without quoting its text."""
    if not isinstance(bug, Exception):
        return PeerFailedError(f"party '{party}' received a signal to stop")
    return PeerFailedError(
        f"party '{party}' failed unexpectedly",
        got=type(bug).__name__,
        fix="the log of that party contains the traceback",
    )


@contextmanager
def attached(
    message: SessionMessage, introduction: Introduction, limits: LinkLimits
) -> Iterator[TcpLink]:
    """Open the party's stream and introduce the party; send errors of the `with` block to the peer.

    Args:
        message: the session message that Flower delivered.
        introduction: introduction of the party.
        limits: limits of the frames on the stream.

    Raises:
        LostPeerError: no label party answers at the address.
        PeerFailedError: the label party refuses this party; the error contains the label party's
            reason.
    """
    hello = Hello(message.session, message.node, message.token, introduction.model_dump())
    link = TcpLink.connect(
        message.host,
        message.port,
        hello,
        message.ca_pem.encode(),
        Timeouts(idle_s=message.idle_timeout_s, rejoin_window_s=message.rejoin_window_s),
        rules.window_frames(message.terms),
        limits=limits,
        route=route_of(message.session, message.rank),
    )
    with errors_reported(link, introduction.party):
        yield link
