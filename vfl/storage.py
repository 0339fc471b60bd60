"""Files that are either whole or not there: write aside, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.errors import RunFolderError, StorageError
from vfl.version import VERSION

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell of a disk that is full, or a folder that takes no files, in our own words.

    Raises:
        StorageError: what is done inside cannot write.
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


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file atomically; a crash leaves the old one or the new one, never a part.

    Raises:
        StorageError: the disk is full, or the folder takes no files.
    """
    write_pieces(path, [content], mode)


def write_pieces(path: Path, pieces: Iterable[bytes], mode: int = 0o644) -> None:
    """`write_bytes` of bytes in pieces, which are not joined in memory."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, mode)
            os.replace(aside, path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise


def write_text(path: Path, content: str, mode: int = 0o644) -> None:
    """Replace a text file atomically."""
    write_bytes(path, content.encode(), mode)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder.

    Raises:
        RunFolderError: it is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise RunFolderError("a file of the run folder is missing", where=str(path)) from None
    except json.JSONDecodeError as problem:
        raise RunFolderError(
            "a file of the run folder is not JSON", where=f"{path}:{problem.lineno}"
        ) from None


def append_line(path: Path, record: Any) -> None:
    """Append one JSON line and make it durable.

    Raises:
        StorageError: the disk is full, or the file cannot be written to.
    """
    with writing(path), path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[Any]:
    """The records of a ``.jsonl`` file; a torn last line (a crash while appending) is left out."""
    *whole, _ = path.read_text().split("\n")  # not splitlines, to which \v ends a line as well
    for line in whole:
        yield json.loads(line)


def stamp() -> dict[str, Any]:
    """What every record begins with: the format, and the version of vfl that wrote it."""
    return {"format": FORMAT, "vfl": VERSION}


def check_format(record: Mapping[str, Any], path: Path) -> None:
    """Refuse a record that a version of vfl with another format wrote.

    Args:
        record: what begins with a `stamp`.
        path: where it lies, for the message.

    Raises:
        RunFolderError: which version wrote it, in which format, and what reads it.
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
        fix=f"pip install vfl=={writer} in an environment of its own reads it"
        if known
        else "read it with the version that wrote it, or train again",
    )


def pack_weights(state: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> bytes:
    """A state dict as safetensors, with notes in its header."""
    from safetensors.torch import save

    # A copy of each: the format refuses tensors that share memory, as tied weights do.
    packed: bytes = save(
        {name: value.contiguous().clone() for name, value in state.items()},
        dict(notes) if notes else None,
    )
    return packed


def unpack_weights(content: bytes, path: Path) -> dict[str, Tensor]:
    """The state dict that `pack_weights` gave; `path` is for the message.

    Raises:
        RunFolderError: the content is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        state: dict[str, Tensor] = load(content)
    except SafetensorError:
        raise RunFolderError("the weights are damaged", where=str(path)) from None
    return state


def save_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors, atomically."""
    write_bytes(path, pack_weights(state))


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from safetensors.

    Raises:
        RunFolderError: the file is missing or damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise RunFolderError("the weights are not there", where=str(path)) from None
    return unpack_weights(content, path)


def read_notes(path: Path) -> dict[str, str]:
    """The notes of a file that `load_weights` has read."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of a state dict, in name order."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def joint_digest(digests: Iterable[tuple[str, str]]) -> str:
    """One digest for a whole model from each party's own, in name order."""
    text = "".join(f"{party}:{digest}\n" for party, digest in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()
