"""The log of a party's session ledger: append-only, signed lines that form a hash chain.

The ledger contains the present state. Its log contains the events in order: which party requested
which session, for which purpose, under which consent file, how the session ended, and its spending.
The ledger writes each log line while it holds the ledger's lock. A log line contains counts and
names, but no table value, no id and no nonce. Each log line contains the SHA-256 of the previous
line, and an Ed25519 signature (RFC 8032) by the party's identity key if the party has such a key:

    {"line": {"number": 2, "before": "SHA-256 of line 1", ...}, "signature": "128 hex digits"}

The signature covers the text ``vfl session log``, a line feed, and the exact bytes of the JSON
object behind the key ``line``. If a person without the key changes, inserts, moves or removes any
line except the last, `verified` reports the manipulation. The log itself cannot show that its last
lines are missing, or that the party rewrote the whole log. When a session begins, each party
therefore announces the head of its log: the number and the digest of its last line. The other party
stores this head in its own log. `verified` compares a log with its heads that the logs of other
parties contain.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from vfl.config.experiment import PartyName, Purpose
from vfl.config.toml import Settings
from vfl.core.errors import DataError
from vfl.core.storage import PRIVATE_FILE, private_folder, read_bytes, writing
from vfl.session.store.identity import Identity, Pin

NAME = "log.jsonl"
_DOMAIN = b"vfl session log\n"
_HEX = r"^[0-9a-f]{64}$"
_ZEROS = "0" * 64
#: Upper bound of line numbers, and of counts that a log line contains.
_MOST = 1 << 62
_FORM = re.compile(rb'\{"line": (\{.*\}), "signature": "((?:[0-9a-f]{128})?)"\}')
Event = Literal["consent", "begun", "ended", "refused", "restored", "forgotten", "withdrawn",
                "added", "removed", "renamed", "accepted"]  # fmt: skip


class Head(Settings):
    """Head of a log: the number of the log's last line, and the SHA-256 of this line.

    >>> Head()
    Head(number=0, sha256='0000000000000000000000000000000000000000000000000000000000000000')
    """

    number: int = Field(default=0, ge=0, lt=_MOST)
    sha256: str = Field(default=_ZEROS, pattern=_HEX)


class Line(Settings):
    """One line of the log; the file omits fields that have their default value.

    Attributes:
        number: number of the line, from 1.
        at: time of writing, ISO 8601 in UTC.
        party: name of the party that owns the log.
        event: kind of event. If a party's file has changed, a "consent" line precedes the line of
            the next event.
        before: SHA-256 of the previous line; zeros in the first line.
        key: SHA-256 of the public key that verifies the signature; empty without a signature.
        consent: SHA-256 of the party's own configuration file, which allowed or forbade the
            session.
        run, mode, asked_by, parties, purpose, terms: fields of the session; `terms` is the digest
            of the agreed terms. For the events "added", "removed" and "accepted", `parties` is the
            party that was added, removed or accepted; for "renamed", the party's old and new name.
        rows, passes, statistics, bytes_up, bytes_down: counts of rows, passes over the rows,
            disclosed statistics and bytes that the session spent; see `Spent`. For the events
            "forgotten" and "withdrawn", `rows` is the number of erased rows.
        epsilon: epsilon that the session spent on one row's inputs; None if the defense states no
            epsilon.
        outcome: end of the session, or reason of the refusal: "well" after a complete session,
            otherwise the code and text of a vfl error, or the type of another error.
        heads: heads of the other parties' logs, as these parties announced them in the session.
        settings: for "consent": the settings of [consent] that differ from their defaults.
    """

    number: int = Field(ge=1, lt=_MOST)
    at: str = Field(max_length=40)
    party: PartyName
    event: Event
    before: str = Field(pattern=_HEX)
    key: str = Field(default="", pattern=r"^$|" + _HEX)
    consent: str = Field(default="", pattern=r"^$|" + _HEX)
    run: str = Field(default="", max_length=128)
    mode: str = Field(default="", max_length=16)
    asked_by: str = Field(default="", max_length=32)
    parties: tuple[PartyName, ...] = Field(default=(), max_length=128)
    purpose: Purpose = ""
    terms: str = Field(default="", pattern=r"^$|" + _HEX)
    rows: int = Field(default=0, ge=0, lt=_MOST)
    passes: int = Field(default=0, ge=0, lt=_MOST)
    statistics: int = Field(default=0, ge=0, lt=_MOST)
    bytes_up: int = Field(default=0, ge=0, lt=_MOST)
    bytes_down: int = Field(default=0, ge=0, lt=_MOST)
    epsilon: float | None = Field(default=None, ge=0)
    outcome: str = Field(default="", max_length=2000)
    heads: dict[PartyName, Head] = Field(default_factory=dict, max_length=128)
    settings: dict[str, Any] = Field(default_factory=dict, max_length=64)


@dataclass(frozen=True, slots=True)
class Consented:
    """The SHA-256 of a party's own file, and its [consent] settings other than defaults."""

    sha256: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


class SessionLog:
    """The log of one session ledger; a process that writes to it must hold the ledger's lock.

    Args:
        folder: folder of the ledger.
        party: party that owns the log.
        identity: the party's key pair for signatures; with None, lines are chained but not signed.
        consented: the party's own configuration file, which states the consent.
    """

    def __init__(
        self,
        folder: Path,
        party: str,
        identity: Identity | None = None,
        consented: Consented | None = None,
    ) -> None:
        self.path, self._party = folder / NAME, party
        self._identity, self._consented = identity, consented or Consented()

    def head(self) -> Head:
        """Head of the log (number and SHA-256 of its last line).

        The number is 0 for an empty log.
        """
        return _head(_whole(self.path))

    def append(self, event: Event, **facts: Any) -> None:
        """Write a line to the log file on disk.

        Args:
            event: kind of event.
            facts: additional fields of a `Line`.

        Raises:
            StorageError: the line cannot be written.
        """
        consent = self._consented
        if consent.sha256 and consent.sha256 != self._last_consent():
            self._append("consent", settings=dict(consent.settings))
        self._append(event, **facts)

    def _append(self, event: Event, **facts: Any) -> None:
        content = _whole(self.path)
        head = _head(content)
        line = Line(
            number=head.number + 1,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            party=self._party,
            event=event,
            before=head.sha256,
            key="" if self._identity is None else self._identity.public.sha256,
            consent=self._consented.sha256,
            **facts,
        )
        body = json.dumps(line.model_dump(mode="json", exclude_defaults=True)).encode()
        signature = b"" if self._identity is None else self._identity.sign(_DOMAIN + body)
        text = b'{"line": %b, "signature": "%b"}\n' % (body, signature.hex().encode())
        with writing(self.path):
            private_folder(self.path.parent)
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
            try:
                # a process that was killed while writing may have left the last line incomplete
                os.ftruncate(handle, len(content))
                with os.fdopen(os.dup(handle), "wb") as file:
                    file.write(text)
                os.fsync(handle)
            finally:
                os.close(handle)

    def _last_consent(self) -> str:
        content = _whole(self.path)
        line = _parsed(content[content.rfind(b"\n", 0, -1) + 1 : -1])
        return "" if line is None else line[0].consent


def _whole(path: Path) -> bytes:
    """Return the log's bytes without an incomplete last line; empty if the file does not exist."""
    content = read_bytes(path) if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def _head(content: bytes) -> Head:
    if not content:
        return Head()
    last = content[content.rfind(b"\n", 0, -1) + 1 : -1]
    return Head(number=content.count(b"\n"), sha256=hashlib.sha256(last).hexdigest())


def _parsed(text: bytes) -> tuple[Line, bytes, bytes] | None:
    """Parse a line into its fields, signed bytes and signature; return None for any other text."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    try:
        return Line.model_validate_json(found[1]), found[1], bytes.fromhex(found[2].decode())
    except ValidationError:
        return None


def lines_after(path: Path, place: int) -> tuple[list[Line], int]:
    """Return the log's lines after a byte offset, without verifying the lines.

    Args:
        path: path of the log, which may not exist yet.
        place: the byte offset, at the beginning of a line.

    Returns:
        the lines that can be parsed, and the byte offset of the end of the last complete line.
    """
    content = _whole(path)
    found = (_parsed(text) for text in content[place:].split(b"\n"))
    return [each[0] for each in found if each is not None], max(place, len(content))


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of the verification of a log.

    Attributes:
        party: name of the party that owns the log; empty for a log without lines.
        lines: lines of the log that can be parsed, in order.
        problems: texts about lines that do not fit the hash chain, a signature, or a head in
            another party's log.
        signed: number of lines with a valid signature by one of the given keys.
        unsigned: number of lines without a signature.
        strange: number of lines with a signature by a key that is not among the given keys.
        anchored: the largest number of a line that another party's log confirms; 0 if no line is
            confirmed.
        open: number of sessions that have a start but no end in the log: sessions that still run,
            or that were killed.
        head: head of the log (number and SHA-256 of its last line).
    """

    party: str
    lines: Sequence[Line]
    problems: Sequence[str]
    signed: int
    unsigned: int
    strange: int
    anchored: int
    open: int
    head: Head

    @property
    def holds(self) -> bool:
        """Return whether chain, signatures and heads are right, and given keys signed all lines."""
        return not (self.problems or self.unsigned or self.strange)


def verified(path: Path, keys: Iterable[Pin], peers: Iterable[Path] = ()) -> Verified:
    """Verify a log: its hash chain, its signatures, and its heads in other parties' logs.

    Args:
        path: the log, or a copy of it.
        keys: public keys of the party that owns the log, including its earlier keys.
        peers: logs of other parties; if one of them contains a head of the verified log, the line
            with the head's number must have the head's digest.

    Raises:
        RunFolderError: a file is missing.
        DataError: the file is not a log of sessions.
    """
    content = read_bytes(path)
    texts = content.split(b"\n")
    torn = texts.pop()
    known = {key.sha256: key for key in keys}
    lines, problems, digests = list[Line](), list[str](), list[str]()
    counts = {"signed": 0, "unsigned": 0, "strange": 0}
    before, party, names = _ZEROS, "", list[str]()
    for number, text in enumerate(texts, 1):
        digests.append(hashlib.sha256(text).hexdigest())
        found = _parsed(text)
        if found is None:
            problems.append(f"line {number} is not a log line")
            before = digests[-1]
            continue
        line, body, signature = found
        party = party or line.party
        names += [] if party in names else [party]
        if line.party != party:
            problems.append(f"line {number} belongs to party '{line.party}', not '{party}'")
        if line.number != number:
            problems.append(f"line {number} has the number {line.number}")
        if not hmac.compare_digest(line.before, before):
            problems.append(f"the digest in line {number} does not match the previous line")
        if not signature:
            counts["unsigned"] += 1
        elif line.key not in known:
            counts["strange"] += 1
        elif known[line.key].has_signed(_DOMAIN + body, signature):
            counts["signed"] += 1
        else:
            problems.append(f"line {number} does not match its signature")
        if line.event == "renamed" and line.parties[:1] == (party,):
            party = line.parties[-1]
        lines.append(line)
        before = digests[-1]
    if content and not lines:
        raise DataError("this file is not a log of sessions", where=str(path), want=f"a {NAME}")
    if torn:
        problems.append(
            "the last line is incomplete: the process ended while it was writing the line"
        )
    anchored, more = _compared({*names, party}, digests, peers)
    head = Head(number=len(digests), sha256=before)
    return Verified(
        party, lines, [*problems, *more], **counts, anchored=anchored, open=_open(lines), head=head
    )


def _compared(
    names: Collection[str], digests: Sequence[str], peers: Iterable[Path]
) -> tuple[int, list[str]]:
    """Return the largest line number that other parties' logs confirm, and mismatches as text."""
    anchored, problems = 0, dict[str, None]()
    for path in peers:
        for text in read_bytes(path).split(b"\n"):
            found = _parsed(text)
            heads = {} if found is None else found[0].heads
            kept = next((heads[name] for name in names if name in heads), None)
            if found is None or kept is None or not kept.number:
                continue
            witness = f"party '{found[0].party}' has seen line {kept.number}"
            if kept.number > len(digests):
                problems[f"{witness}, and this log ends at {len(digests)}"] = None
            elif not hmac.compare_digest(digests[kept.number - 1], kept.sha256):
                problems[f"{witness} with other contents: this log was rewritten afterwards"] = None
            else:
                anchored = max(anchored, kept.number)
    return anchored, list(problems)


def _open(lines: Iterable[Line]) -> int:
    under_way: dict[tuple[str, str], int] = {}
    for line in lines:
        key = line.run, line.mode
        if line.event in ("begun", "ended"):
            under_way[key] = under_way.get(key, 0) + (1 if line.event == "begun" else -1)
    return sum(max(0, count) for count in under_way.values())
