"""The clients that may query a service, by name; each client has a token, daily budgets, an expiry.

`vfl clients` draws a token of 32 random bytes and writes the list of clients, which contains only
the token's SHA-256 digest; a running service reads the list again when it has changed. A service
may also accept the tokens in a token file, which contains the tokens themselves.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from vfl.config import PartyFile
from vfl.config.toml import Settings
from vfl.core.errors import RunFolderError, StorageError, UserError
from vfl.core.storage import (
    Seal,
    damaged,
    locked,
    read_sealed_json,
    write_sealed_json,
    write_text,
)

#: Name of a folder with the list of clients, and of a folder with the counts of the current day.
FOLDER, _LIST, _SPENT = "clients", "clients.json", "spent.json"
_LIST_KIND, _SPENT_KIND = "clients of a service", "served rows"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_LOOK_EVERY_S = 1.0
#: Longest wait in seconds until another process has finished a change of the counts.
_PATIENCE_S = 5.0
_DAY_S = 24 * 3600
_LEAST_LETTERS = 16
#: Longest validity in days of a token that expires; a token without expiry is valid forever.
_MOST_DAYS = 36_500
#: Units of the two budgets of a client, in the order in which the budgets are stored.
COUNTED = ("rows", "requests")


class Caller(Settings):
    """A service's record of a client that may query it, without the client's token.

    Attributes:
        name: name of the client.
        digest: SHA-256 digest of the client's token, as hexadecimal digits.
        max_rows_per_day: largest number of rows per UTC day; None uses the limit that the service
            sets for all clients.
        max_requests_per_day: largest number of answered requests per UTC day; None sets no limit.
        expires: time at which the token expires, in seconds since 1970 (UTC); None if it never
            expires.
    """

    name: str = Field(pattern=_NAME)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    max_rows_per_day: int | None = Field(default=None, ge=1, lt=2**53)
    max_requests_per_day: int | None = Field(default=None, ge=1, lt=2**53)
    expires: float | None = None

    @classmethod
    def of_token(cls, token: str) -> Caller:
        """Return the service's record of a client whose token is in a token file.

        The token file has no names, so 16 digits of the token's digest are the client's name.
        """
        digest = hashlib.sha256(token.encode()).hexdigest()
        return cls(name=digest[:16], digest=digest)

    @property
    def until(self) -> str:
        """Text that states until when the token is valid."""
        if self.expires is None:
            return "no end"
        return f"until {datetime.fromtimestamp(self.expires, UTC):%Y-%m-%d %H:%M} UTC"

    def expired(self, now: float) -> bool:
        """Return whether the client's token has expired."""
        return self.expires is not None and now >= self.expires


class Clients:
    """The list of authorised clients of a party's services.

    Args:
        folder: folder that contains the list; several processes may use it at once.
        party: name of the party.
        plain: clients whose tokens are in the service's token file, in addition to the clients of
            the list.
        now: function that returns seconds since 1970 (UTC).
    """

    def __init__(
        self,
        folder: Path,
        party: str,
        plain: tuple[Caller, ...] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self._path = folder, folder / _LIST
        self._seal, self._now = Seal(_LIST_KIND, party, ""), now
        self._plain = {each.digest: each for each in plain}
        self._found, self._known, self._looked = dict(self._plain), _UNSEEN, -math.inf

    def entries(self) -> list[Caller]:
        """Return all clients of the list, ordered by name.

        Raises:
            RunFolderError: the list is damaged, or belongs to another party.
        """
        if not self._path.exists():
            return []
        record = read_sealed_json(self._path, self._seal)
        try:
            return [Caller.model_validate(each) for each in record["clients"]]
        except (KeyError, TypeError, ValidationError):
            raise damaged(self._path) from None

    def of(self, token: bytes) -> Caller | None:
        """Return the client with this token, or None; compare digests instead of tokens."""
        self._look()
        return self._found.get(hashlib.sha256(token).hexdigest())

    def is_over(self, client: Caller) -> bool:
        """Return whether a client's token has expired."""
        return client.expired(self._now())

    def add(
        self,
        name: str,
        *,
        rows: int | None = None,
        requests: int | None = None,
        days: float | None = None,
    ) -> str:
        """Add a client to the list, and return its token; the list stores only the token's digest.

        Args:
            name: name of the client.
            rows: largest number of rows per UTC day; None uses the limit that the service sets for
                all clients.
            requests: largest number of requests per UTC day; None sets no limit.
            days: days until the token expires; None if the token never expires.

        Raises:
            UserError: a client with this name exists, or the name or a number is invalid.
            RunFolderError: see `entries`.
        """
        if days is not None and not 0 < days <= _MOST_DAYS:
            raise UserError(
                "this number of days until a token expires is not allowed",
                where="days",
                got=f"{days:g}",
                want=f"more than 0 and at most {_MOST_DAYS} days",
            )
        token = secrets.token_urlsafe(32)
        facts = {
            "name": name,
            "digest": Caller.of_token(token).digest,
            "max_rows_per_day": rows,
            "max_requests_per_day": requests,
            "expires": None if days is None else self._now() + timedelta(days=days).total_seconds(),
        }
        try:
            client = Caller.model_validate(facts)
        except ValidationError as mistake:
            raise UserError(
                "this is not a valid client",
                where=", ".join(sorted({str(each["loc"][0]) for each in mistake.errors()})),
                want="a name of letters, digits, '-', '_' and '.' that begins with a letter or "
                "digit; numbers from 1 on",
            ) from None
        with self._changed() as clients:
            if name in clients:
                raise UserError(
                    f"client '{name}' exists already",
                    where=str(self._path),
                    fix="remove the client first; the count of its requests of today remains",
                )
            clients[name] = client
        return token

    def remove(self, name: str) -> None:
        """Remove a client from the list; running services refuse its token within two seconds.

        Raises:
            UserError: no client has this name.
            RunFolderError: see `entries`.
        """
        with self._changed() as clients:
            if clients.pop(name, None) is None:
                raise UserError(
                    f"there is no client '{name}'",
                    where=str(self._path),
                    got=", ".join(clients) or "no client at all",
                )

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Caller]]:
        """Yield the clients by name for changes in a `with` block; then write the list."""
        with locked(self.folder, math.inf):
            clients = {each.name: each for each in self.entries()}
            yield clients
            listed = [clients[name].model_dump(mode="json") for name in sorted(clients)]
            write_sealed_json(self._path, {"clients": listed}, self._seal)

    def _look(self) -> None:
        """Read the list of clients again if the file has changed.

        If the file is damaged, admit only the clients of the token file.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        try:
            about = os.stat(self._path)
            known = about.st_ino, about.st_mtime_ns, about.st_size
        except FileNotFoundError:
            known = _UNSEEN
        if known == self._known:
            return
        self._known, self._found = known, dict(self._plain)
        with suppress(RunFolderError):
            self._found |= {each.digest: each for each in self.entries()}


_UNSEEN = (0, 0, 0)


def tokens_in(path: Path) -> tuple[str, ...]:
    """Return the tokens of a token file, one per line.

    If the file is missing, create it with a token.

    Raises:
        UserError: other users may read the file, it contains no token, or a token is too short.
    """
    if not path.exists():
        write_text(path, secrets.token_urlsafe(32) + "\n")
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise UserError(
            "other users may read the token of the service",
            where=str(path),
            want="mode 0600",
            fix=f"chmod 600 {path}",
        )
    tokens = tuple(path.read_text(encoding="ascii", errors="replace").split())
    if not tokens or any(len(token) < _LEAST_LETTERS for token in tokens):
        raise UserError(
            "this file contains no token, or a token that is too short",
            where=str(path),
            want=f"one token on each line, of at least {_LEAST_LETTERS} characters",
        )
    return tokens


@dataclass(slots=True)
class _Count:
    """A client's counts for the current day, each as (rows, requests).

    Attributes:
        taken: rows and requests that this process has answered today.
        reserved: rows and requests that this process has already added to the counts on disk,
            before it answered them.
    """

    taken: list[int] = field(default_factory=lambda: [0, 0])
    reserved: list[int] = field(default_factory=lambda: [0, 0])


class Budgets:
    """Counts the rows and requests of each client with a limit in the current UTC day.

    A process adds a hundredth of a budget at a time to the counts on disk, before it answers these
    rows and requests. If the process is killed, the counts on disk are therefore too large and
    never too small, unless they could not be written. All services of a party use the same counts.
    If the clock is set back, the counts of the later day stay in force until that day ends.

    Args:
        folder: folder of the file with the counts.
        party: party that owns the services.
        rows: largest number of rows per UTC day for a client without its own limit; None sets no
            limit.
        now: function that returns seconds since 1970 (UTC).
        restored_since: function that returns whether the party has declared a restore of its store
            since a time, in seconds since 1970; all budgets of that day are then used up.

    Raises:
        RunFolderError: the file with the counts is damaged, or belongs to another party.
    """

    def __init__(
        self,
        folder: Path,
        party: str,
        rows: int | None,
        now: Callable[[], float] = time.time,
        restored_since: Callable[[float], bool] = lambda since: False,
    ) -> None:
        self._path, self._seal = folder / _SPENT, Seal(_SPENT_KIND, party, "")
        self._rows, self._now, self._restored_since = rows, now, restored_since
        self._day, self._counts, self._used_up = 0, dict[str, _Count](), False
        self._latest_day = 0
        self._spent = self.spent()

    @classmethod
    def of_party(cls, party: PartyFile, rows: int | None) -> Budgets:
        """Return the budgets of a party's services.

        Their counts are in the folder of the session ledger, whose counters show the party's peers
        when the folder was restored from an earlier copy.

        Raises:
            RunFolderError: see `Budgets`.
        """
        from vfl.session.store.party_folder import own_ledger  # it imports torch

        ledger = own_ledger(party)
        restored_since = ledger.was_restored_since
        return cls(ledger.folder / FOLDER, party.party, rows, restored_since=restored_since)

    def most(self, client: Caller) -> tuple[int | None, int | None]:
        """Return a client's daily limits, as (rows, requests); None means no limit."""
        rows = self._rows if client.max_rows_per_day is None else client.max_rows_per_day
        return rows, client.max_requests_per_day

    def spent(self) -> dict[str, list[int]]:
        """Return the counts on disk of today's rows and requests, by client; they are upper bounds.

        Raises:
            RunFolderError: the file with the counts is damaged, or belongs to another party.
        """
        if not self._path.exists():
            return {}
        try:
            record = read_sealed_json(self._path, self._seal)
            counts = {str(name): [int(rows), int(n)] for name, (rows, n) in record["spent"].items()}
            day = int(record["day"])
            self._latest_day = max(self._latest_day, day)
            return counts if day == self._today else {}
        except RunFolderError as problem:
            problem.fix = "remove the file; every client then has its whole budget again"
            raise
        except (AttributeError, KeyError, TypeError, ValueError):
            raise damaged(self._path) from None

    def take(self, client: Caller, rows: int) -> str | None:
        """Count a request for rows.

        If a budget is exhausted, return the budget's unit and count nothing.

        Returns:
            The unit of the exhausted budget, one of `COUNTED`; None if the request was counted.
        """
        most = self.most(client)
        if most == (None, None):
            return None
        if self._today != self._day:
            self._day, self._spent = self._today, {}
            self._used_up = self._restored_since(self._now() // _DAY_S * _DAY_S)
            self._counts.clear()
        if self._used_up:
            return COUNTED[most[0] is None]
        count = self._counts.setdefault(client.name, _Count())
        wanted = [taken + more for taken, more in zip(count.taken, (rows, 1), strict=True)]
        if any(
            limit is not None and want > have
            for limit, want, have in zip(most, wanted, count.reserved, strict=True)
        ):
            lacking = self._reserve(client.name, count, wanted, most)
            if lacking is not None:
                return lacking
        count.taken = wanted
        return None

    def give_back(self, client: Caller, rows: int) -> None:
        """Undo the count of a request that was not answered."""
        if (count := self._counts.get(client.name)) is not None:
            count.taken = [max(0, count.taken[0] - rows), max(0, count.taken[1] - 1)]

    @property
    def resets_in_s(self) -> int:
        """Return the seconds until every client has its full budget again."""
        return (self._today + 1) * _DAY_S - int(self._now())

    def close(self) -> None:
        """Subtract the rows and requests from the counts on disk that were not answered."""
        if self._counts and self._day == self._today:
            with self._noted() as spent:
                for name, count in self._counts.items():
                    pairs = zip(spent.get(name, [0, 0]), count.reserved, count.taken, strict=True)
                    spent[name] = [max(0, all_ - had + took) for all_, had, took in pairs]
        self._counts.clear()

    @property
    def _today(self) -> int:
        self._latest_day = max(self._latest_day, int(self._now() // _DAY_S))
        return self._latest_day

    def _reserve(
        self, name: str, count: _Count, wanted: list[int], most: tuple[int | None, int | None]
    ) -> str | None:
        """Add rows and requests of a client to the counts on disk in advance.

        Return the exhausted unit or None.
        """
        with self._noted() as spent:
            whole, more = spent.get(name, [0, 0]), [0, 0]
            for at, limit in enumerate(most):
                need = wanted[at] - count.reserved[at]
                if limit is None or need <= 0:
                    continue
                left = limit - whole[at]
                if left < need:
                    return COUNTED[at]
                more[at] = min(left, max(need, limit // 100))
            count.reserved = [had + each for had, each in zip(count.reserved, more, strict=True)]
            spent[name] = [had + each for had, each in zip(whole, more, strict=True)]
        return None

    @contextmanager
    def _noted(self) -> Iterator[dict[str, list[int]]]:
        """Yield today's counts on disk, for a `with` block that changes them.

        If the disk is full, the file is damaged or another process holds the lock for too long, the
        service counts in memory and still answers requests.
        """
        with ExitStack() as held:
            with suppress(StorageError, RunFolderError):
                held.enter_context(locked(self._path.parent, _PATIENCE_S))
                self._spent = self.spent()
            before = {name: list(counts) for name, counts in self._spent.items()}
            yield self._spent
            if self._spent != before:
                record: Mapping[str, Any] = {"day": self._today, "spent": self._spent}
                with suppress(StorageError):
                    write_sealed_json(self._path, record, self._seal)
