"""Client of `vfl serve`: queries rows over HTTP, in requests that the service accepts.

The client needs neither torch nor a run's folder. It needs only this package, the service's
address, and a file with the client's token; if a private authority signed the service's
certificate, also the authority's certificate; if the service requires a client certificate, also
a file with that certificate and its private key.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from vfl.core.address import parse_host
from vfl.core.errors import (
    AuthenticationError,
    ConsentError,
    DataError,
    LostPeerError,
    MissingPartyError,
    ProtocolError,
    UserError,
    VFLError,
)
from vfl.core.text import printable
from vfl.transport.stream import require_loopback

#: Shortest and longest pause in seconds between two attempts to send a request.
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
#: Largest size in bytes of a service's answer to a request.
_MOST_BYTES = 1 << 28
#: Error codes of temporary refusals: too many requests, too many rows at a party, or an absent
#: party.
_PASSES = ("rate", "party", "away")
_ERRORS: Mapping[int, type[VFLError]] = {
    401: AuthenticationError,
    403: ConsentError,
    404: DataError,
    429: ConsentError,
    502: MissingPartyError,
    503: MissingPartyError,
    504: MissingPartyError,
}


class Client:
    """Client of one service; usable as a context manager.

    Args:
        address: address of the service, such as "https://score.lender.example:8080"; http is
            accepted only for a service on this machine.
        token: file whose first line is the client's token.
        ca: PEM file of the authority that signed the service's certificate; None trusts the
            operating system's authorities.
        certificate: PEM file with the client's certificate and private key, if the service requires
            a client certificate.
        timeout_s: time limit in seconds for the answer to each attempt.
        attempts: largest number of attempts for a request that failed for a reason that may be
            temporary: an absent party (503), too many requests or rows per second (429), or a
            failed connection.
        sleep: function that waits the given number of seconds.

    Raises:
        UserError: the address is invalid, or is the address of another machine without TLS; or the
            file contains no token.
    """

    def __init__(
        self,
        address: str,
        token: Path | str,
        *,
        ca: Path | str | None = None,
        certificate: Path | str | None = None,
        timeout_s: float = 30.0,
        attempts: int = 6,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address = address
        self._timeout_s, self._attempts, self._sleep = timeout_s, max(1, attempts), sleep
        self._token = _token_in(Path(token))
        self._host, self._port, secure = _parts(address)
        self._tls: ssl.SSLContext | None = None
        if secure:
            self._tls = ssl.create_default_context(cafile=None if ca is None else str(ca))
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
            if certificate is not None:
                self._tls.load_cert_chain(str(certificate))
        else:
            require_loopback(self._host)
        self._connection: http.client.HTTPConnection | None = None
        self._most_ids: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def predict(
        self,
        ids: Sequence[str | int],
        columns: Mapping[str, Sequence[Any]] | None = None,
        explain: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the service's predictions for rows, in the order of `ids`.

        Args:
            ids: ids of the rows, in any spelling that the run's alignment treats as the same id.
            columns: values of the label party's columns for these rows, by column name; they
                replace the values in the label party's table.
            explain: whether to request each party's contribution as well; each HTTP request then
                contains one row.

        Returns:
            For each row, a record with `prediction`; `probabilities` for a classification;
            `missing` if the service answers without absent parties; the model's remarks on the row;
            `version` (the run that answered); and `contributions` if requested.

        Raises:
            AuthenticationError: the token is wrong or has expired.
            ConsentError: the row or request budget of the token is used up, the service does not
                disclose contributions, a party does not consent, or the last attempt exceeded a
                rate limit.
            DataError: the service does not know one of the ids.
            MissingPartyError: the party that the error names did not answer in the last attempt.
            LostPeerError: the service did not answer in the last attempt.
            ProtocolError: the response does not come from a vfl service.
            UserError: the request is invalid, for example because `columns` does not fit the model.
        """
        return [row for part in self.parts(ids, columns, explain) for row in part]

    def parts(
        self,
        ids: Sequence[str | int],
        columns: Mapping[str, Sequence[Any]] | None = None,
        explain: bool = False,
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the records of `predict` as they arrive, as one list per HTTP request."""
        size = 1 if explain else self.most_ids
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            body: dict[str, Any] = {"ids": list(ids[part])}
            if columns is not None:
                body["columns"] = {name: list(cells[part]) for name, cells in columns.items()}
            told = self._ask("POST", "/predict", body | ({"explain": True} if explain else {}))
            rows = told.get("predictions")
            wanted = len(body["ids"])
            if not isinstance(rows, list) or [type(row) for row in rows] != [dict] * wanted:
                raise self._strange(f"not {wanted} predictions")
            shared = {name: told[name] for name in ("version", "contributions") if name in told}
            yield [row | shared for row in rows]

    def model(self) -> dict[str, Any]:
        """Description of the model: run, classes, parties, columns of the label party, limits."""
        return self._ask("GET", "/model")

    @property
    def most_ids(self) -> int:
        """Largest number of rows that one request may contain."""
        if self._most_ids is None:
            most = self.model().get("max_ids")
            if not isinstance(most, int) or most < 1:
                raise self._strange("no max_ids")
            self._most_ids = most
        return self._most_ids

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, in at most `attempts` attempts; return the JSON of the response."""
        content = None if body is None else json.dumps(body).encode()
        problem: VFLError | None = None
        pause_s = 0.0
        for attempt in range(self._attempts):
            if attempt:
                self._sleep(pause_s)
            # The service may have closed an idle connection, so the client tries a new connection
            # immediately.
            rested = self._connection is not None
            pause_s = 0.0 if rested else min(_LONGEST_PAUSE_S, _PAUSE_S * 2**attempt)
            try:
                status, told, wait_s = self._exchange(method, path, content)
            except (OSError, http.client.HTTPException) as lost:
                self.close()
                problem = LostPeerError(
                    "the service does not answer",
                    where=self.address,
                    got=type(lost).__name__,
                    fix="check that vfl serve runs at this address, and that an authority of --ca "
                    "signed its certificate",
                )
                continue
            if status == 200:
                return told
            problem = self._refusal(status, told)
            if told.get("code") not in _PASSES:
                break
            pause_s = max(_PAUSE_S, pause_s, min(wait_s, _LONGEST_PAUSE_S))
        assert problem is not None, "one attempt at least"
        raise problem

    def _exchange(
        self, method: str, path: str, content: bytes | None
    ) -> tuple[int, dict[str, Any], float]:
        """Make one attempt.

        Return the HTTP status, the JSON, and the seconds to wait before the next attempt.
        """
        if self._connection is None:
            if self._tls is None:
                self._connection = http.client.HTTPConnection(
                    self._host, self._port, timeout=self._timeout_s
                )
            else:
                self._connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=self._tls
                )
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        self._connection.request(method, path, content, headers)
        answer = self._connection.getresponse()
        text = answer.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            self.close()
            raise self._strange("the response is too long")
        told: Any = None
        with suppress(ValueError, RecursionError):
            told = json.loads(text)
        # the response comes from a proxy in front of the service
        if not isinstance(told, dict) and answer.status > 500:
            told = {"error": "no service answers behind the proxy at this address", "code": "away"}
        if not isinstance(told, dict):
            raise self._strange(f"HTTP {answer.status} and no JSON object")
        wait = answer.headers.get("Retry-After", "0")
        return answer.status, told, float(wait) if wait.isdigit() and len(wait) < 9 else 0.0

    def _refusal(self, status: int, told: Mapping[str, Any]) -> VFLError:
        code, why = told.get("code"), told.get("error")
        return _ERRORS.get(status, UserError)(
            printable(why) if isinstance(why, str) else "the service refused",
            where=self.address,
            got=f"HTTP {status}" + (f", code {printable(code)}" if isinstance(code, str) else ""),
        )

    def _strange(self, got: str) -> ProtocolError:
        return ProtocolError(
            "the response does not come from vfl serve",
            where=self.address,
            got=got,
            fix="check the address",
        )


def _token_in(path: Path) -> str:
    words = path.read_text(encoding="ascii", errors="replace").split()
    if not words or not words[0].isprintable():
        raise UserError(
            "this file contains no token", where=str(path), want="one line that contains the token"
        )
    return words[0]


def _parts(address: str) -> tuple[str, int, bool]:
    """Return the host, the port, and whether the address requires TLS."""
    try:
        found = urlsplit(address)
        host, port = parse_host(found.hostname or ""), found.port
    except ValueError:
        found, host, port = urlsplit(""), "", None
    if found.scheme not in ("http", "https") or found.path not in ("", "/") or found.query:
        raise UserError(
            "this is not a valid address of a service",
            got=printable(address),
            want="https://HOST:PORT, or http://127.0.0.1:PORT on this machine",
        )
    secure = found.scheme == "https"
    return host, port or (443 if secure else 80), secure
