"""A dealer's material for questions, on disk; each file is used only once, even after a restart.

Material is correlated randomness, such as masks: a mask that is used for two questions discloses
the difference of the two masked values. The store therefore marks a file as used on disk, and
removes its content from the disk, before it hands the content to the program.
"""

from __future__ import annotations

import math
import mmap
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.errors import ReusedPadError, RunFolderError
from vfl.core.storage import Seal, checked_span, private_folder, sealing, sync_folder
from vfl.session.store.spending import Spending

_NAME = re.compile(r"[a-z0-9-]{1,80}")
_LEFT = ".material"
#: Header of a stored tensor: numbers that stand for its type and for its number of axes; the length
#: of each axis follows.
_HEAD, _AXIS = struct.Struct("<BB"), struct.Struct("<I")
_TYPES = (torch.int64, torch.int32, torch.float64)
#: Number of bytes of read memory pages that a reader releases at a time, after it has read a
#: tensor; a multiple of any page size.
_DROPPED_BYTES = 1 << 22


class Used(Settings):
    """Entry of the ledger for one file of material that was used.

    Attributes:
        run: name of the used file of material.
    """

    run: str

    @property
    def spent_epsilon(self) -> float | None:
        """None, because material has no stated epsilon."""
        return None


class MaterialStore(Spending[Used]):
    """One party's offline material (correlated randomness): one sealed file per question.

    An entry of the ledger is the name of a file of material that was used.

    Args:
        folder: folder of this party's material.
        party: name of this party.
        setup: identifier of the sharing of the weights (their split into shares) to which the
            material belongs.
    """

    kind, form, suffix = "used material", Used, ".used"

    def __init__(self, folder: Path, party: str, setup: str) -> None:
        super().__init__(folder, party)
        self._material = Seal("offline material", party, setup)
        private_folder(folder)

    def put(self, name: str, material: Iterable[Tensor]) -> None:
        """Store the material that the dealer sends for one question; see `putting`."""
        with self.putting(name) as keep:
            for tensor in material:
                keep(tensor)

    @contextmanager
    def putting(self, name: str) -> Iterator[Callable[[Tensor], None]]:
        """Yield a function that writes the material of one question to disk, tensor by tensor.

        Raises:
            ReusedPadError: material with this name was already dealt.
        """
        with self.locked():
            if self._left(name).exists() or self._path(name).exists():
                raise self._gone(name, "dealt before")
        with sealing(self._left(name), self._material) as put:
            yield lambda tensor: put(_as_bytes(tensor))

    def take(self, name: str) -> Iterator[Tensor]:
        """Take the material of a question and mark it as used; yield its tensors one by one.

        Raises:
            ReusedPadError: the material was already used, or no material with this name was dealt.
            RunFolderError: the file is damaged, or belongs to another party or other weights; the
                file counts as used.
        """
        with self.locked():
            if self._path(name).exists():
                # A process that was killed took this material.
                self._left(name).unlink(missing_ok=True)
                raise self._gone(name, "used before")
            if not self._left(name).exists():
                raise self._gone(name, "never dealt")
            try:
                span = checked_span(self._left(name), self._material)
            except RunFolderError as damage:
                self._use(name)  # otherwise every question would try this damaged file first
                damage.fix = "ask again: the next question uses other dealt material"
                raise
            with self._left(name).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # The file has no name any more, so its content disappears with this process.
            self._use(name)
        return _tensors(mapped, span)

    def names(self) -> list[str]:
        """Return the names of the questions for which unused material is stored, in order."""
        names = sorted(path.name.removesuffix(_LEFT) for path in self.folder.glob(f"*{_LEFT}"))
        return [name for name in names if not self._path(name).exists()]

    def names_of(self, kind: str) -> list[str]:
        """Return the names of unused material for questions of one kind, in order."""
        return [name for name in self.names() if kind_in(name) == kind]

    def _use(self, name: str) -> None:
        self._write(Used(run=name))
        sync_folder(self.folder)
        self._left(name).unlink()

    def _read(self, run: str) -> Used | None:
        """Check that the entry's file exists.

        An earlier version of vfl left such files empty.
        """
        return Used(run=run) if self._path(run).exists() else None

    def _path(self, run: str) -> Path:
        return self._left(run).with_suffix(self.suffix)

    def _left(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise self._gone(name, "never dealt")
        return self.folder / f"{name}{_LEFT}"

    def _gone(self, name: str, got: str) -> ReusedPadError:
        return ReusedPadError(
            "this dealt material (randomness) cannot be used for the question",
            where=name,
            got=got,
            want="unused material from the dealer",
            fix="deal again; masks that two questions share disclose their difference",
        )


def new_name(kind: str) -> str:
    """Return a new name of material for questions of this kind; it is unique."""
    return f"{kind}-{secrets.token_hex(8)}"


def kind_in(name: str) -> str:
    """Return the kind of questions for which the material of this name was dealt.

    >>> kind_in("8-24x3-0123456789abcdef")
    '8-24x3'
    """
    return name.rpartition("-")[0]


def _as_bytes(tensor: Tensor) -> bytes:
    """Return a tensor as bytes for a file; write int64 values as int32 if all of them fit."""
    array = tensor.contiguous().numpy()
    if array.dtype == np.int64 and array.size:
        least, most = int(array.min()), int(array.max())
        if least >= -(2**31) and most < 2**31:
            array = array.astype(np.int32)
    number = _TYPES.index(torch.from_numpy(array).dtype)
    axes = b"".join(map(_AXIS.pack, array.shape))
    return _HEAD.pack(number, array.ndim) + axes + array.tobytes()


def _tensors(file: mmap.mmap, span: range) -> Iterator[Tensor]:
    """Yield the tensors of a checked file one by one; free each tensor's memory after its use."""
    file.seek(span.start)
    left = 0
    while file.tell() < span.stop:
        number, axes = _HEAD.unpack(file.read(_HEAD.size))
        shape = [_AXIS.unpack(file.read(_AXIS.size))[0] for _ in range(axes)]
        kind = _TYPES[number]
        raw = bytearray(file.read(math.prod(shape) * kind.itemsize))
        found = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        if file.tell() - left >= _DROPPED_BYTES:
            file.madvise(mmap.MADV_DONTNEED, left, _DROPPED_BYTES)
            left += _DROPPED_BYTES
        found = found.reshape(shape)
        yield found.long() if kind == torch.int32 else found
