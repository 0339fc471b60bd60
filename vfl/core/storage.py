"""Files with atomic writes and integrity checks, which only their owner can read.

A write goes to a temporary file, which is flushed to disk and then renamed to the target. Files
that later steps rely on are sealed: the file contains `kind`, `party`, `run`, `step`, `format` (2)
and a SHA-256 digest, which is checked before any other use. The field `sha256` is the digest of the
whole file with 64 zeros in place of the digest:

    form         place of the seal
    JSON         keys of the object; `"sha256": "..."` is its last line
    safetensors  `__metadata__` of the header
    container    8 bytes `vflseal1`, u32 length of the header, the header as JSON, the payload, 32
                 bytes SHA-256 of all bytes before
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from vfl.core.errors import RunFolderError, StorageError
from vfl.core.version import VERSION

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2
#: Modes of files and folders that only their owner can access, whatever the process's umask is.
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700

_MAGIC = b"vflseal1"
_LENGTH = struct.Struct("<I")
_HEAD_BYTES = len(_MAGIC) + _LENGTH.size
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEADER_LIMIT_BYTES = 4096
_ALIGNED_BYTES = 64
_PIECE_BYTES = 1 << 20
_ZEROS = "0" * 64
#: Regular expressions that find the SHA-256 digest at the end of a JSON record and in the header of
#: a safetensors file.
_JSON_DIGEST = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')
_TENSORS_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_LOCK = ".lock"
_LOCK_POLL_S = 0.05
_DURABLE = ContextVar("durable", default=True)
_ASIDE = re.compile(r"\..+\.[a-z0-9_]{8}")


@dataclass(frozen=True, slots=True)
class Seal:
    """Seal of a stored file: kind and owner of the file, run and training step of its content.

    Attributes:
        kind: kind of the stored file, such as "checkpoint" or "weights".
        party: party that owns the file; in a seal that a reader expects, None matches any party.
        run: name of the run to which the file belongs. In a seal that a reader expects, None
            matches any run.
        step: number of the training step after which the content was stored; 0 if the content
            belongs to no step.
    """

    kind: str
    party: str | None
    run: str | None
    step: int = 0

    def __str__(self) -> str:
        party = "" if self.party is None else f" of party '{self.party}'"
        run = "" if self.run is None else f" in run '{self.run}'"
        step = f", step {self.step}" if self.step else ""
        return f"{self.kind}{party}{run}{step}"

    def check(self, record: Mapping[str, Any], path: Path) -> None:
        """Refuse a file whose record has a different seal than this one.

        Raises:
            RunFolderError: the two seals differ, and the error states both; or the record has no
                seal, or has another format.
        """
        check_format(record, path)
        said = [record.get(name) for name in ("kind", "party", "run", "step")]
        if not all(isinstance(text, str) for text in said[:3]) or type(said[3]) is not int:
            raise damaged(path)
        found = Seal(*said)  # type: ignore[arg-type]
        party = found.party if self.party is None else self.party
        run = found.run if self.run is None else self.run
        if found != replace(self, party=party, run=run):
            raise RunFolderError(
                "this file has another kind, party or run",
                where=str(path),
                got=str(found),
                want=str(self),
                fix="restore the right file from a copy; files of a run cannot be exchanged",
            )


def existing_folder(path: Path) -> Path:
    """Return the path itself if it exists, or else its nearest existing parent."""
    return next(one for one in (path, *path.resolve().parents) if one.exists())


def is_empty(folder: Path) -> bool:
    """Return whether a folder contains no files except a lock file."""
    return not any(path.name != _LOCK for path in folder.iterdir())


def damaged(path: Path) -> RunFolderError:
    """Return the error for a damaged file."""
    return RunFolderError(
        "a file is not as it was written",
        where=str(path),
        got="bytes that do not fit its SHA-256, or no SHA-256",
        fix="restore it from a copy; a training continues from an older checkpoint",
    )


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents, which only their owner can access."""
    if path.is_dir():
        return
    # Meanwhile, the thread of another party may have made the folder.
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    private_folder(path.parent)
    path.mkdir(exist_ok=True)
    path.chmod(PRIVATE_FOLDER)


def close_to_others(folder: Path, ours: Collection[str] | None = None) -> None:
    """Make an existing folder private to its owner; earlier versions left folders readable.

    Args:
        folder: the folder; it stays unchanged if it does not exist or belongs to another user.
        ours: names of all files that vfl writes to this folder, if a user has chosen the folder's
            path. If a folder that a user has chosen contains further files, it belongs to the user
            and stays unchanged. None for a folder whose path vfl itself has chosen.
    """
    if not folder.is_dir() or folder.stat().st_uid != os.geteuid():
        return
    names = [] if ours is None else [path.name for path in folder.iterdir()]
    if not all(name in (*(ours or ()), _LOCK) or _ASIDE.fullmatch(name) for name in names):
        return
    with writing(folder):
        folder.chmod(PRIVATE_FOLDER)


def sweep(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove temporary files that killed processes left, but not those of writes in progress.

    Args:
        folder: folder in which to search. Without `names` it must be one of vfl's folders, and its
            subfolders are searched too; with `names` it may be any folder, and its subfolders are
            not searched.
        names: names of target files; only the temporary files of these targets are removed.
    """
    if not folder.is_dir():
        return
    for path in folder.rglob(".*") if names is None else folder.glob(".*"):
        written = _ASIDE.fullmatch(path.name) and path.name[1:].rpartition(".")[0]
        if not written or (names is not None and written not in names):
            continue
        if path.is_symlink() or not path.is_file():
            continue
        with suppress(OSError):  # the file belongs to another user, or was removed meanwhile
            handle = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


@contextmanager
def locked(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder during a block, and remove temporary files of killed processes.

    The operating system releases the lock when the process ends in any way.

    Args:
        folder: folder to lock.
        patience_s: longest time in seconds to wait for another process that holds the lock.

    Raises:
        RunFolderError: another process still holds the lock after the waiting time.
        StorageError: the folder or its lock file cannot be written.
    """
    with writing(folder):
        private_folder(folder)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    try:
        # Another process may be testing the lock at this moment, and then holds it briefly.
        deadline = time.monotonic() + max(patience_s, _LOCK_POLL_S)
        while not _takes(handle):
            if time.monotonic() >= deadline:
                owner = os.pread(handle, 32, 0).decode(errors="replace")
                raise RunFolderError(
                    "another process is using this folder",
                    where=str(folder),
                    got=f"process {owner}" if owner.isdigit() else None,
                    fix="wait until it has ended, or end it",
                )
            time.sleep(_LOCK_POLL_S)
        with writing(folder):
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        sweep(folder)
        yield
    finally:
        os.close(handle)


def worker_of(folder: Path) -> int | None:
    """Return the id of the process that holds a folder's lock, or 0 if its id is unknown.

    The result is None if no process holds the lock.
    """
    try:
        handle = os.open(folder / _LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        owner = os.pread(handle, 32, 0).decode(errors="replace")
        return int(owner) if owner.isdigit() else 0
    finally:
        os.close(handle)


def _takes(handle: int) -> bool:
    """Try to take the lock of an open file; return False if another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of a full disk or an unwritable folder to `StorageError`.

    Raises:
        StorageError: a write to a file inside the block fails.
    """
    try:
        yield
    except OSError as problem:
        raise StorageError(
            "a file cannot be written",
            where=str(path),
            got=problem.strerror,
            fix="make room or give this folder to the user that runs vfl, then resume the run",
        ) from problem


def write_bytes(path: Path, content: bytes, mode: int = PRIVATE_FILE) -> None:
    """Replace a file atomically; a crash leaves either the old or the new file.

    Raises:
        StorageError: the disk is full, or the folder is not writable.
    """
    write_pieces(path, [content], mode)


def write_pieces(
    path: Path, pieces: Iterable[bytes], mode: int = PRIVATE_FILE, *, durable: bool = True
) -> None:
    """Replace a file as `write_bytes` does, from pieces that are never joined in memory.

    With `durable=False` the function does not wait for the disk, so a crash of the machine may
    leave an empty file.
    """
    with writing(path), prepared(path, pieces, mode, durable=durable):
        pass


@contextmanager
def prepared(
    path: Path, pieces: Iterable[bytes], mode: int = PRIVATE_FILE, *, durable: bool = True
) -> Iterator[None]:
    """Write a temporary file before a block; rename it to the target if the block succeeds.

    Use it to record an action that the block performs: The function thus detects a full disk before
    the block's action, and the rename after the action needs no disk space.

    Raises:
        StorageError: the disk is full, or the folder is not writable.
    """
    with _replacing(path, mode) as file:
        with writing(path):
            file.writelines(pieces)
            _flush(file, durable=durable)
        yield


@contextmanager
def _replacing(path: Path, mode: int = PRIVATE_FILE) -> Iterator[BinaryIO]:
    """Yield a temporary file in the target's folder; rename it to the target on success."""
    with writing(path):
        private_folder(path.parent)
        handle, aside = _aside(path)
    file = os.fdopen(handle, "wb")
    try:
        yield file
        with writing(path):
            file.flush()
            os.chmod(aside, mode)
            os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    finally:
        # After a failed flush, closing the file would try to write once more
        with suppress(OSError):
            file.close()


@contextmanager
def not_durable() -> Iterator[None]:
    """Let no write inside a block wait for the disk; only for blocks that use temporary folders."""
    token = _DURABLE.set(False)
    try:
        yield
    finally:
        _DURABLE.reset(token)


def _flush(file: IO[Any], *, durable: bool = True) -> None:
    file.flush()
    if durable and _DURABLE.get():
        os.fsync(file.fileno())


def _aside(path: Path) -> tuple[int, str]:
    """Make a temporary file beside another file; `sweep` does not remove it while it is open."""
    while True:
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, aside
        os.close(handle)  # another process's sweep removed this file before this process locked it


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of new and removed files in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, content: str, mode: int = PRIVATE_FILE) -> None:
    """Replace a text file atomically."""
    write_bytes(path, content.encode(), mode)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder.

    Raises:
        RunFolderError: the file is missing or unreadable, or does not contain JSON.
    """
    return _parsed(read_bytes(path), str(path))


def _parsed(content: bytes, where: str) -> Any:
    """Parse JSON from one of vfl's files; raise an error for any other content."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as problem:
        where = f"{where}:{problem.lineno}" if problem.lineno > 1 else where
    # The text is not UTF-8, or its JSON lists are nested too deeply.
    except (ValueError, RecursionError):
        pass
    raise RunFolderError("a file of the run folder is not JSON", where=where) from None


def append_line(path: Path, record: Any) -> None:
    """Append a record to a file as a line of JSON, and wait until the line is on disk.

    Raises:
        StorageError: the disk is full, or the file is not writable.
    """
    append_text(path, json.dumps(record) + "\n")


def append_text(path: Path, text: str) -> None:
    """Append to a text file that only its owner may read, and wait until the text is on disk.

    Raises:
        StorageError: the disk is full, or the file is not writable.
    """
    with writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
        with os.fdopen(handle, "w") as file:
            os.fchmod(handle, PRIVATE_FILE)
            file.write(text)
            _flush(file)


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the records of a ``.jsonl`` file; an incomplete last line, left by a crash, is skipped.

    Raises:
        RunFolderError: the file is missing or unreadable, or a line is not JSON.
    """
    *whole, _ = read_bytes(path).split(b"\n")
    for number, line in enumerate(whole, 1):
        yield _parsed(line, f"{path}:{number}")


def write_sealed(path: Path, payload: Iterable[bytes], seal: Seal) -> None:
    """Replace a file atomically by a sealed container; the payload is an iterable of pieces."""
    with sealing(path, seal) as put:
        for piece in payload:
            put(piece)


@contextmanager
def sealing(path: Path, seal: Seal) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that appends one piece to the payload of a new sealed container."""
    header = json.dumps(stamp() | asdict(seal)).encode()
    # The payload starts at a multiple of 64 bytes, because readers map its numbers into memory.
    header += b" " * (-(_HEAD_BYTES + len(header)) % _ALIGNED_BYTES)

    digest = hashlib.sha256()
    with _replacing(path) as file:

        def put(piece: bytes) -> None:
            digest.update(piece)
            with writing(path):
                file.write(piece)

        put(b"".join([_MAGIC, _LENGTH.pack(len(header)), header]))
        yield put
        with writing(path):
            file.write(digest.digest())
            _flush(file)


def read_sealed(path: Path, seal: Seal) -> bytes:
    """Read the payload of a sealed container.

    Raises:
        RunFolderError: the file is missing or damaged, or does not have the expected seal.
    """
    view = memoryview(read_bytes(path))
    body, said = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(body).digest(), said):
        raise damaged(path)
    return bytes(body[_payload_start(body, seal, path) :])


def checked_span(path: Path, seal: Seal) -> range:
    """Check a sealed container piece by piece, and return the byte range of its payload.

    Raises:
        RunFolderError: the file is missing or damaged, or does not have the expected seal.
    """
    with _reading(path), path.open("rb") as file:
        stop, digest = max(os.fstat(file.fileno()).st_size - _DIGEST_BYTES, 0), hashlib.sha256()
        head = file.read(min(_HEAD_BYTES + _HEADER_LIMIT_BYTES, stop))
        digest.update(head)
        for at in range(len(head), stop, _PIECE_BYTES):
            digest.update(file.read(min(_PIECE_BYTES, stop - at)))
        said = file.read()
    if not hmac.compare_digest(digest.digest(), said):
        raise damaged(path)
    return range(_payload_start(head, seal, path), stop)


def _payload_start(head: bytes | memoryview, seal: Seal, path: Path) -> int:
    """Check the header of a sealed container; return the offset of the payload."""
    if len(head) < _HEAD_BYTES or head[: len(_MAGIC)] != _MAGIC:
        raise damaged(path)
    (length,) = _LENGTH.unpack_from(head, len(_MAGIC))
    if length > min(_HEADER_LIMIT_BYTES, len(head) - _HEAD_BYTES):
        raise damaged(path)
    start: int = _HEAD_BYTES + length
    seal.check(_record(head[_HEAD_BYTES:start], path), path)
    return start


def sealed_text(record: Mapping[str, Any], seal: Seal) -> str:
    """Format a record as JSON text that contains a seal and ends with the text's own digest."""
    whole = stamp() | asdict(seal) | dict(record) | {"sha256": _ZEROS}
    text = json.dumps(whole, indent=2) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, _, tail = text.rpartition(_ZEROS)
    return head + digest + tail


def write_sealed_json(path: Path, record: Mapping[str, Any], seal: Seal) -> None:
    """Replace a sealed JSON file, atomically."""
    write_text(path, sealed_text(record, seal))


def read_sealed_json(path: Path, seal: Seal) -> dict[str, Any]:
    """Read the record of a sealed JSON file, with its seal.

    Raises:
        RunFolderError: the file is missing or damaged, or does not have the expected seal.
    """
    content = read_bytes(path)
    _check_digest(content, _JSON_DIGEST.search(content), path)
    record = _record(content, path)
    seal.check(record, path)
    return record


def read_bytes(path: Path) -> bytes:
    """Read the content of a file.

    Raises:
        RunFolderError: the file is missing or unreadable.
    """
    with _reading(path):
        return path.read_bytes()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert errors of a missing or unreadable file to `RunFolderError`."""
    try:
        yield
    except FileNotFoundError:
        raise RunFolderError("a file of the run folder is missing", where=str(path)) from None
    except OSError as problem:
        raise RunFolderError(
            "a file of the run folder cannot be read", where=str(path), got=problem.strerror
        ) from None


def _check_digest(content: bytes, found: re.Match[bytes] | None, path: Path) -> None:
    """Compare a file's stored digest with a computed one.

    For the computation, zeros replace the digest in the file.
    """
    if found is None:
        _check_unsealed(content, path)
        raise damaged(path)
    digest = hashlib.sha256(content[: found.start(1)])
    digest.update(_ZEROS.encode())
    digest.update(memoryview(content)[found.end(1) :])
    if not hmac.compare_digest(digest.hexdigest().encode(), found[1]):
        _check_unsealed(content, path)
        raise damaged(path)


def _check_unsealed(content: bytes, path: Path) -> None:
    """Report a record of another format as such, with its version, and not as a damaged file.

    Raises:
        RunFolderError: the content is JSON of another format.
    """
    if len(content) < 2**20:
        try:
            record = json.loads(content)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict) and isinstance(record.get("format"), int):
            check_format(record, path)
            if "sha256" not in record:
                raise RunFolderError(
                    "this record has no SHA-256, so it may have been changed",
                    where=str(path),
                    got="a record of an earlier version of vfl, or a changed record",
                    fix="train again; to read the metrics, open the file in an editor",
                )


def _record(content: bytes | memoryview, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(bytes(content))
    except (ValueError, RecursionError):
        raise damaged(path) from None
    if not isinstance(record, dict):
        raise damaged(path)
    return record


def stamp() -> dict[str, Any]:
    """Return the first fields of every record: the format number, and the version of vfl."""
    return {"format": FORMAT, "vfl": VERSION}


def check_format(record: Mapping[str, Any], path: Path) -> None:
    """Refuse a record written in another format by another version of vfl.

    Args:
        record: a record that begins with the fields that `stamp` returns.
        path: path of the record's file, for the error message.

    Raises:
        RunFolderError: the record has another format; the error names the vfl version that wrote
            the record, the format, and a version that can read it.
    """
    found, writer = record.get("format"), record.get("vfl")
    if found == FORMAT:
        return
    known = isinstance(writer, str) and re.fullmatch(r"[0-9A-Za-z.+!-]{1,32}", writer)
    number = f"format {found}" if isinstance(found, int) else "no format number"
    raise RunFolderError(
        "another version of vfl wrote this, in another format",
        where=str(path),
        got=f"{number}, by vfl {writer if known else 'of a version it does not name'}",
        want=f"format {FORMAT}, as vfl {VERSION} writes it",
        fix=f"pip install vfl=={writer} in a separate environment can read it"
        if known
        else "read it with the version that wrote it, or train again",
    )


def pack_weights(
    state: Mapping[str, Tensor], seal: Seal, notes: Mapping[str, str] | None = None
) -> bytes:
    """Encode a state dict as safetensors with a seal.

    Args:
        state: the tensors.
        seal: seal (kind, owner, run and step) to write into the file.
        notes: further metadata.
    """
    from safetensors.torch import save

    about = {name: str(value) for name, value in (stamp() | asdict(seal)).items()}
    # The tensors are copied, because the format refuses tensors that share memory, such as tied
    # weights.
    packed: bytes = save(
        {name: value.contiguous().clone() for name, value in state.items()},
        {**(notes or {}), **about, "sha256": _ZEROS},
    )
    digest = hashlib.sha256(packed).hexdigest().encode()
    place = packed.index(b'"sha256":"' + _ZEROS.encode()) + len(b'"sha256":"')
    return packed[:place] + digest + packed[place + len(digest) :]


def unpack_weights(content: bytes, seal: Seal, path: Path) -> tuple[dict[str, Tensor], Notes]:
    """Decode state dict and notes from `pack_weights`; error messages name the file `path`.

    Raises:
        RunFolderError: the content is damaged, or has a seal other than the expected one.
    """
    from safetensors.torch import load

    header_bytes = int.from_bytes(content[:8], "little")
    if header_bytes > len(content) - 8:
        raise damaged(path)
    header = content[: 8 + header_bytes]
    _check_digest(content, _TENSORS_DIGEST.search(header), path)
    record = _record(header[8:], path)
    notes = record.pop("__metadata__", {})
    given = {name: notes.get(name, "") for name in ("format", "step")}
    number = {name: int(text) for name, text in given.items() if text.isdigit()}
    seal.check(notes | number, path)
    state: dict[str, Tensor] = load(content)
    # `load` returns the tensors in varying order.
    return {name: state[name] for name in record}, notes


Notes = dict[str, str]


def save_weights(path: Path, state: Mapping[str, Tensor], seal: Seal) -> None:
    """Write a state dict as safetensors with a seal, atomically."""
    write_bytes(path, pack_weights(state, seal))


def load_weights(path: Path, seal: Seal) -> dict[str, Tensor]:
    """Read a state dict from safetensors with a seal.

    Raises:
        RunFolderError: the file is missing or damaged, or does not have the expected seal.
    """
    state, _ = unpack_weights(read_bytes(path), seal, path)
    return state


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Compute SHA-256 over the names, types, shapes and bytes of a state dict's tensors.

    The tensors are sorted by name.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        if value.numel():  # an empty tensor may have strides with which `view` as bytes fails
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def joint_digest(digests: Iterable[tuple[str, str]]) -> str:
    """Compute the digest of a whole split network from the digests of the parties' models.

    The parties are sorted by name.
    """
    text = "".join(f"{party}:{digest}\n" for party, digest in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()


def rename_sealed(path: Path, party: str, new: str) -> bool:
    """Rename the owner in a JSON file's seal; return whether `party` was the owner.

    Raises:
        RunFolderError: the file is damaged.
    """
    content = read_bytes(path)
    if not content.startswith(b"{") or (found := _JSON_DIGEST.search(content)) is None:
        return False
    _check_digest(content, found, path)
    record = _record(content, path)
    if record.get("party") != party:
        return False
    seal = Seal(record["kind"], new, record["run"], record["step"])
    write_text(path, sealed_text(record | {"party": new}, seal))
    return True
