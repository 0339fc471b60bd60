"""The session message: the one thing Flower carries to a feature party for a whole session."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, ValidationError

from vfl.config.toml import Settings
from vfl.errors import ProtocolError
from vfl.session.peer_version import check_version
from vfl.session.terms import Terms


class SessionMessage(Settings):
    """Where the stream is, how to get in, and what will be done there.

    Attributes:
        session: 16 random bytes as hex; names this attempt.
        token: proves at the stream that Flower authenticated this node; 32 random bytes.
        node: the node the token was made for.
        host, port: the stream, as the feature party reaches it.
        ca_pem: authority that signed the stream's certificate; empty means no TLS.
        start: the exchange a resumed training goes on with.
        attempt: how often the session was begun anew; keys are good for one attempt.
        terms: what the session is about.
    """

    session: str = Field(pattern=r"^[0-9a-f]{32}$")
    token: str = Field(min_length=32, max_length=128, repr=False)
    node: str = Field(max_length=64)
    host: str = Field(max_length=255)
    port: int = Field(ge=1, le=65535)
    ca_pem: str = Field(max_length=16384, repr=False)
    idle_timeout_s: float = Field(gt=0)
    rejoin_window_s: float = Field(gt=0)
    start: int = Field(default=0, ge=0)
    attempt: int = Field(default=0, ge=0)
    terms: Terms

    @classmethod
    def parse(cls, text: str) -> SessionMessage:
        """Read a message.

        Raises:
            DisagreementError: another version of vfl wrote it in another form.
            ProtocolError: it has another form.
        """
        try:
            return cls.model_validate_json(text)
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
