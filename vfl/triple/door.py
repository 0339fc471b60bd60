"""Where a party listens for others, and what gets each of them in.

P2 listens for P0 and P1, and P0 for P1. Whoever listens makes the secrets of its links: a TLS
certificate of its own, and a token for each caller. So P2 has none of those of P0 and P1.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from vfl.config.toml import Settings
from vfl.core.errors import MissingDataError, UserError
from vfl.core.storage import write_bytes
from vfl.mpc.rules import NAMES
from vfl.transport import Credential, ServerCertificate, session_certificate

#: Whom each role listens for.
LISTENS = {0: (1,), 1: (), 2: (0, 1)}
#: And whom it calls.
CALLS = {0: (2,), 1: (0, 2), 2: ()}
#: How long a certificate is good.
DAYS = 90
_DOOR = "door.json"
_Kept = TypeVar("_Kept", bound=Settings)


class Invitation(Settings):
    """What one caller needs to get in; a secret of the two.

    Attributes:
        listener, caller: their roles.
        host, port: where the listener is reached.
        session: name of the door.
        ca_pem: authority of the listener's certificate.
        token: of this caller.
    """

    listener: int = Field(ge=0, le=2)
    caller: int = Field(ge=0, le=2)
    host: str
    port: int = Field(ge=1, le=65535)
    session: str
    ca_pem: str
    token: str = Field(repr=False)

    @property
    def file(self) -> str:
        """The name under which it is handed over."""
        return f"{NAMES[self.listener]}-for-{NAMES[self.caller]}.json"


class Door(Settings):
    """The listener's own secrets.

    Attributes:
        role: who listens.
        host: its name or address, as the certificate has it.
        port: 0 for a free one.
        session: name of the door.
        ca_pem, cert_pem, key_pem: its certificate.
        tokens: of the callers, by role.
    """

    role: int = Field(ge=0, le=2)
    host: str
    port: int = Field(ge=0, le=65535)
    session: str
    ca_pem: str
    cert_pem: str
    key_pem: str = Field(repr=False)
    tokens: dict[int, str] = Field(repr=False)

    @classmethod
    def fresh(cls, role: int, host: str, port: int = 0) -> Door:
        """New secrets for a role that listens."""
        made = session_certificate([host], DAYS)
        return cls(
            role=role,
            host=host,
            port=port,
            session=secrets.token_hex(16),
            ca_pem=made.ca_pem.decode(),
            cert_pem=made.cert_pem.decode(),
            key_pem=made.key_pem.decode(),
            tokens={caller: secrets.token_urlsafe(32) for caller in LISTENS[role]},
        )

    @property
    def certificate(self) -> ServerCertificate:
        """For TLS."""
        return ServerCertificate(
            self.ca_pem.encode(), self.cert_pem.encode(), self.key_pem.encode()
        )

    @property
    def credentials(self) -> dict[str, Credential]:
        """What each caller must show."""
        return {
            NAMES[caller]: Credential(NAMES[caller], token) for caller, token in self.tokens.items()
        }

    def invitations(self, port: int) -> dict[int, Invitation]:
        """What each caller needs, by role; `port` is the one really listened on."""
        return {
            caller: Invitation(
                listener=self.role,
                caller=caller,
                host=self.host,
                port=port,
                session=self.session,
                ca_pem=self.ca_pem,
                token=token,
            )
            for caller, token in self.tokens.items()
        }

    def keep_in(self, folder: Path) -> list[Path]:
        """Write the door, and beside it the invitations to hand over; files for owners only.

        Raises:
            UserError: there is a door already, whose invitations would be worth nothing.
        """
        path = folder / _DOOR
        if path.exists():
            raise UserError(
                "a door is there already and is never overwritten",
                where=str(path),
                fix="name another folder, or remove it; its invitations end with it",
            )
        invitations = self.invitations(self.port).values()
        found = {path: self} | {folder / each.file: each for each in invitations}
        for place, content in found.items():
            write_bytes(place, (content.model_dump_json(indent=1) + "\n").encode())
        return list(found)


def read_door(path: Path) -> Door:
    """The door in a folder, or in a file.

    Raises:
        MissingDataError, UserError: see `read_invitation`.
    """
    return _read(path / _DOOR if path.is_dir() else path, Door, "door")


def read_invitation(path: Path) -> Invitation:
    """The invitation in a file.

    Raises:
        MissingDataError: there is no file.
        UserError: it holds something else; it is not quoted, for it may be a secret.
    """
    return _read(path, Invitation, "invitation")


def _read(path: Path, kind: type[_Kept], what: str) -> _Kept:
    made = "vfl mpc invite makes doors and invitations"
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise MissingDataError(f"there is no {what} here", where=str(path), fix=made) from None
    except ValidationError:
        raise UserError(f"this file is no {what}", where=str(path), fix=made) from None
