"""Journal of sent messages: it prevents that an exchange is sent again with different contents.

A party's private random numbers are derived from the run's name and the exchange's number, or from
the values that the numbers hide. A label party decides how often a training begins, and the
gradients that it sends determine the next cut of a feature party. If an exchange were repeated with
different contents, the receiver could average out the noise, or subtract two cuts that were hidden
by the same random numbers. A party therefore records a SHA-256 of every exchange before it sends
the frame, and refuses to send different contents under the same exchange number.

A record is written without fsync: it remains however the process ends, but after a power failure
the records since the start of the last epoch may be lost. The digest in each record depends on all
earlier records. If the process was killed while it wrote a record, the incomplete record is
ignored: this record is the last one, and its message was never sent.
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
    """The messages that one party has sent in one training; see `Journal.create`.

    Args:
        path: path of the file.
        owner: party, run and nonce, which the journal's header binds to the journal.
        peers: receivers of the party's messages, in a fixed order; a feature party, which sends all
            receivers the same messages, names none.
        closed: whether the training has ended at this party; the party may then only send earlier
            messages again.
        least: least number of records that the journal must have; with fewer, the file is an older
            copy.

    Raises:
        RunFolderError: the journal is missing or damaged, or belongs to another training.
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
                "the journal of the messages sent in this training is missing",
                where=str(path),
                fix="restore the journal from a copy, or train under another name",
            )
        whole = self._read(path.read_bytes(), _head(owner))
        if len(self._sent) < least:
            raise damaged(path)
        with writing(path):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND, PRIVATE_FILE)
            os.ftruncate(self._file, whole)

    @classmethod
    def create(cls, path: Path, owner: Sequence[str]) -> None:
        """Begin an empty journal on disk; an existing journal at this path is replaced."""
        private_folder(path.parent)
        write_bytes(path, _head(owner))

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def steps(self) -> int:
        """Return the number of exchanges up to and including the last one in the journal.

        The number is 0 for an empty journal.
        """
        return 1 + max((_KEY.unpack(key)[0] for key in self._sent), default=-1)

    def admit(self, step: int, content: Payload, peer: str = "") -> None:
        """Record a message in the journal before the message is sent.

        Args:
            step: number of the exchange.
            content: content of the message; if each attempt masks the message anew, the content
                before masking.
            peer: receiver of the message.

        Raises:
            DisagreementError: an earlier attempt sent different contents in this exchange, or the
                training has ended without this exchange; the message must not be sent.
            StorageError: the record cannot be written.
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
        """Write all records from the operating system's cache to disk."""
        with writing(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self, content: bytes, head: bytes) -> int:
        """Read the records of a file.

        Return the number of bytes up to the end of the last complete record.
        """
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
        want = (
            "no further exchange, because the training has ended"
            if before is None
            else f"contents {before[:8]}..."
        )
        return DisagreementError(
            f"party '{self._party}' would send different contents than before in the training "
            f"'{self._run}'",
            where=f"exchange {step}",
            got=got,
            want=f"{want}, so that hidden values cannot be averaged out",
            fix="start a run with another name",
        )


def _head(owner: Sequence[str]) -> bytes:
    return _MAGIC + hashlib.sha256("\x1f".join(["journal", *owner]).encode()).digest()


def _tag(before: bytes, key: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(before + key + digest).digest()[:_TAG_BYTES]
