"""The session message: the one thing Flower carries to a feature party for a whole session."""

from __future__ import annotations

import json
import re
from ipaddress import ip_address
from typing import Any

from pydantic import Field, ValidationError, field_validator

from vfl.config.experiment import MOST_STEPS, Seconds
from vfl.config.toml import Settings
from vfl.errors import ProtocolError
from vfl.session.peer_version import check_version
from vfl.session.terms import Terms

#: Most bytes of a message, refused before they are parsed.
LIMIT_BYTES = 64 * 1024
_PEM = r"^-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\n\r -]*$"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.*[A-Za-z]){_LABEL}(\.{_LABEL})*\.?", re.ASCII)


class SessionMessage(Settings):
    """Where the stream is, how to get in, and what will be done there.

    Attributes:
        session: 16 random bytes as hex; names this attempt.
        token: proves at the stream that Flower authenticated this node; 32 random bytes.
        node: the node the token was made for.
        host, port: the stream, as the feature party reaches it.
        ca_pem: authority that signed the stream's certificate; without it there is no stream.
        idle_timeout_s: how long the party waits for one frame.
        rejoin_window_s: how long a cut stream may take to come back.
        start: the exchange a resumed training goes on with.
        attempt: how often the session was begun anew; keys are good for one attempt.
        terms: what the session is about.
    """

    session: str = Field(pattern=r"^[0-9a-f]{32}$")
    token: str = Field(pattern=r"^[A-Za-z0-9_-]{32,128}$", repr=False)
    node: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    host: str = Field(max_length=253)
    port: int = Field(ge=1, le=65535)
    ca_pem: str = Field(max_length=16384, pattern=_PEM, repr=False)
    idle_timeout_s: Seconds
    rejoin_window_s: Seconds
    start: int = Field(default=0, ge=0, lt=MOST_STEPS)
    attempt: int = Field(default=0, ge=0, le=1000)
    terms: Terms

    @field_validator("host")
    @classmethod
    def _reachable(cls, host: str) -> str:
        if not _HOST_NAME.fullmatch(host):
            ip_address(host)  # a ValueError that names what it was given is not shown
        return host

    @classmethod
    def parse(cls, text: str) -> SessionMessage:
        """Read a message.

        Raises:
            DisagreementError: another version of vfl wrote it in another form.
            ProtocolError: it has another form.
        """
        raw = text.encode(errors="replace")
        if len(raw) > LIMIT_BYTES:
            raise ProtocolError(
                "the session message is too long",
                got=f"{len(raw)} bytes",
                want=f"at most {LIMIT_BYTES} bytes",
            )
        try:
            return cls.model_validate_json(raw)
        except ValidationError as problem:
            check_version(_version_in(text), "the label party")
            # Names only: a message holds the token. No location is text that is no object at all.
            fields = sorted({str(error["loc"][0]) for error in problem.errors() if error["loc"]})
            raise ProtocolError(
                "the session message has another form than this version reads",
                where=f"fields {', '.join(fields)}" if fields else "the whole message",
                fix="install the same vfl version at every party",
            ) from None


def _version_in(text: str) -> Any:
    """What a message of another form says of its version; None if it says nothing."""
    try:
        return json.loads(text)["terms"]["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
