"""What a dealer left for questions, on disk: each is taken once, also after a restart.

A mask that is used for two questions gives away their difference. So a file is marked as used, on
the disk, before its content is given to anybody, and its content is removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vfl.core.errors import ReusedPadError, RunFolderError
from vfl.core.storage import (
    Seal,
    load_weights,
    locked,
    private_folder,
    save_weights,
    sync_folder,
    write_text,
)

_NAME = re.compile(r"[a-z0-9-]{1,80}")
_LEFT, _USED = ".safetensors", ".used"


class MaterialStore:
    """One party's offline material, a sealed file a question, in a folder for its owner alone.

    Args:
        folder: this party's.
        seal: of the party and the weights it was dealt for.
    """

    def __init__(self, folder: Path, seal: Seal) -> None:
        self._folder, self._seal = folder, seal
        private_folder(folder)

    def put(self, name: str, material: Sequence[Tensor]) -> None:
        """Keep what one offline phase gave.

        Raises:
            ReusedPadError: that name was dealt before.
        """
        with locked(self._folder):
            if self._left(name).exists() or self._used(name).exists():
                raise self._gone(name, "dealt before")
            tensors = {f"{index:06d}": each for index, each in enumerate(material)}
            save_weights(self._left(name), tensors, self._seal)

    def take(self, name: str) -> list[Tensor]:
        """The material of a question, which is from now on used.

        Raises:
            ReusedPadError: it was used before, or never dealt.
            RunFolderError: the file is damaged, or of another party or other weights; it counts as
                used.
        """
        with locked(self._folder):
            if self._used(name).exists():
                self._left(name).unlink(missing_ok=True)  # its taker was killed
                raise self._gone(name, "used before")
            if not self._left(name).exists():
                raise self._gone(name, "never dealt")
            try:
                found = load_weights(self._left(name), self._seal)
            except RunFolderError as damage:
                self._use(name)  # it would stand for ever before what is whole
                damage.fix = "ask again: this material is given up, and other is taken"
                raise
            self._use(name)
        return [found[each] for each in sorted(found)]

    def names(self) -> list[str]:
        """Questions that can still be asked, in order of their names."""
        names = sorted(path.name.removesuffix(_LEFT) for path in self._folder.glob(f"*{_LEFT}"))
        return [name for name in names if not self._used(name).exists()]

    def _use(self, name: str) -> None:
        write_text(self._used(name), "")
        sync_folder(self._folder)
        self._left(name).unlink()

    def _left(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise self._gone(name, "never dealt")
        return self._folder / f"{name}{_LEFT}"

    def _used(self, name: str) -> Path:
        return self._left(name).with_suffix(_USED)

    def _gone(self, name: str, got: str) -> ReusedPadError:
        return ReusedPadError(
            "a question needs material of its own",
            where=name,
            got=got,
            want="material that was dealt and not used",
            fix="deal again; masks that two questions share give away their difference",
        )
