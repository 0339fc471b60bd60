"""What a training has sent, so that the same exchange never goes out with other contents.

Private draws follow from the name of a run and the number of an exchange, or from the very values
they hide. A label party decides how often a training begins, and its gradients decide what the next
cut holds: with the exchange repeated on other contents it could average noise away, or take the
difference of two cuts that share their draws. So a party notes a SHA-256 of every exchange before
the frame leaves, and refuses to send anything else under that number.

A record is written and not synchronised: it outlives the process however that ends. A machine that
loses power may lose the records since the last epoch began. Each record is chained to those before
it; a record that a kill has torn is the last one, was never sent, and is left out.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from vfl.core.errors import DisagreementError, RunFolderError
from vfl.core.frame import Payload
from vfl.core.storage import PRIVATE_FILE, damaged, private_folder, write_bytes, writing

_MAGIC = b"vfl sent"
_KEY = struct.Struct("<IH")
_DIGEST_BYTES = 32
_TAG_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES
_RECORD_BYTES = _KEY.size + _DIGEST_BYTES + _TAG_BYTES


class Journal:
    """The exchanges of one training, as one party sent them; see `Journal.create`.

    Args:
        path: the file.
        owner: party, run and nonce it belongs to.
        peers: whom the party sends to, in an order that never changes; a feature party has one
            peer and need not name it.
        closed: the training has ended here, and sends nothing that it has not sent before.
        least: how many records there must be.

    Raises:
        RunFolderError: it is missing, not as it was written, or of something else.
    """

    def __init__(
        self,
        path: Path,
        owner: Sequence[str],
        peers: Sequence[str] = ("",),
        *,
        closed: bool = False,
        least: int = 0,
    ) -> None:
        self.path = path
        self._party, self._run = owner[0], owner[1]
        self._peers = {name: number for number, name in enumerate(peers)}
        self._closed = closed
        self._sent: dict[bytes, bytes] = {}
        self._tag = b""
        if not path.exists():
            raise RunFolderError(
                "the journal of what a training has sent is missing",
                where=str(path),
                fix="put it back from a copy, or train under another name",
            )
        whole = self._read(path.read_bytes(), _head(owner))
        if len(self._sent) < least:
            raise damaged(path)
        with writing(path):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND, PRIVATE_FILE)
            os.ftruncate(self._file, whole)

    @classmethod
    def create(cls, path: Path, owner: Sequence[str]) -> None:
        """Begin an empty journal in the place of any other; it is on the disk afterwards."""
        private_folder(path.parent)
        write_bytes(path, _head(owner))

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def steps(self) -> int:
        """Exchanges up to the last one that it holds; 0 of an empty one."""
        return 1 + max((_KEY.unpack(key)[0] for key in self._sent), default=-1)

    def admit(self, step: int, content: Payload, peer: str = "") -> None:
        """Note what is about to be sent.

        Args:
            step: number of the exchange.
            content: what goes out, or what it is made of under masks that are new each time.
            peer: to whom.

        Raises:
            DisagreementError: the exchange had other contents before, or the training has ended
                without it; nothing of it may be sent.
            StorageError: it cannot be noted.
        """
        key = _KEY.pack(step, self._peers[peer])
        digest = hashlib.sha256(content).digest()
        before = self._sent.get(key)
        if before is not None:
            if not hmac.compare_digest(before, digest):
                raise self._repeated(step, f"contents {digest.hex()[:8]}...", before.hex())
            return
        if self._closed:
            raise self._repeated(step, "an exchange that was never sent", None)
        self._tag = _tag(self._tag, key, digest)
        with writing(self.path):
            if os.write(self._file, key + digest + self._tag) < _RECORD_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._sent[key] = digest

    def sync(self) -> None:
        """Have all records on the disk."""
        with writing(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _read(self, content: bytes, head: bytes) -> int:
        """Take the records in; how many bytes are whole."""
        if not hmac.compare_digest(content[:_HEAD_BYTES], head):
            raise damaged(self.path)
        self._tag = head[-_TAG_BYTES:]
        last = _HEAD_BYTES + (len(content) - _HEAD_BYTES) // _RECORD_BYTES * _RECORD_BYTES
        for start in range(_HEAD_BYTES, last, _RECORD_BYTES):
            record = content[start : start + _RECORD_BYTES]
            key, digest = record[: _KEY.size], record[_KEY.size : -_TAG_BYTES]
            self._tag = _tag(self._tag, key, digest)
            if not hmac.compare_digest(self._tag, record[-_TAG_BYTES:]):
                raise damaged(self.path)
            self._sent[key] = digest
        return last

    def _repeated(self, step: int, got: str, before: str | None) -> DisagreementError:
        want = "nothing more, for it has ended" if before is None else f"contents {before[:8]}..."
        return DisagreementError(
            f"party '{self._party}' would send something else than before in the training "
            f"'{self._run}'",
            where=f"exchange {step}",
            got=got,
            want=f"{want}, so that nothing it hides can be averaged",
            fix="start a run of another name",
        )


def _head(owner: Sequence[str]) -> bytes:
    return _MAGIC + hashlib.sha256("\x1f".join(["journal", *owner]).encode()).digest()


def _tag(before: bytes, key: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(before + key + digest).digest()[:_TAG_BYTES]
