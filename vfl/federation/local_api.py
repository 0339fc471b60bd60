"""The local API of a SuperLink or SuperNode: where it listens, and how its own programs get in.

Made anew at each start: a secret, and a certificate of its own, so that a program never shows the
secret to another process that took the port. All of it lies in one folder that only the owner can
read, `folder`:

address     host and port on the loopback, written once the service listens
secret      what a request must carry
superexec   what signs the requests for work of Flower's SuperExec
ca.pem      the authority that signed server.pem; its key is forgotten
server.pem  the certificate
server.key  its key
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from vfl.errors import LostPeerError
from vfl.storage import private_folder, write_bytes, write_text
from vfl.transport import session_certificate

HOST = "127.0.0.1"
_SECRET_BYTES = 32
#: The service restarts long before.
_DAYS = 3650.0


@dataclass(frozen=True, slots=True)
class LocalApi:
    """One service's local API."""

    folder: Path

    @classmethod
    def begin(cls, folder: Path) -> LocalApi:
        """Make the secrets of a new start; those of an earlier one are worth nothing any more."""
        api = cls(folder)
        private_folder(folder)
        (folder / "address").unlink(missing_ok=True)
        certificate = session_certificate([HOST], _DAYS)
        write_text(folder / "secret", secrets.token_urlsafe(_SECRET_BYTES))
        write_bytes(api.superexec_secret, secrets.token_bytes(_SECRET_BYTES))
        write_bytes(api.ca, certificate.ca_pem)
        write_bytes(api.certificate, certificate.cert_pem)
        write_bytes(api.key, certificate.key_pem)
        return api

    def listens_on(self, port: int) -> None:
        """Tell the service's own programs where it is."""
        write_text(self.folder / "address", f"{HOST}:{port}")

    @property
    def address(self) -> str:
        """Host and port.

        Raises:
            LostPeerError: the service does not run, or not yet.
        """
        try:
            return (self.folder / "address").read_text()
        except FileNotFoundError:
            raise LostPeerError(
                "this service of Flower does not run here",
                where=str(self.folder),
                fix="start it with: vfl superlink PROJECT, or vfl supernode PARTY.toml",
            ) from None

    @property
    def secret(self) -> str:
        """What a request must carry."""
        return (self.folder / "secret").read_text()

    @property
    def superexec_secret(self) -> Path:
        """The file that SuperExec and its service share."""
        return self.folder / "superexec"

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        """The server's key."""
        return self.folder / "server.key"
