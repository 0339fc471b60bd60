"""What a dealer left for questions, on disk: each is taken once, also after a restart.

A mask that is used for two questions gives away their difference. So a file is marked as used, on
the disk, before its content is given to anybody, and its content is removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.errors import ReusedPadError, RunFolderError
from vfl.core.storage import Seal, load_weights, private_folder, save_weights, sync_folder
from vfl.session.store.spending import Spending

_NAME = re.compile(r"[a-z0-9-]{1,80}")
_LEFT = ".safetensors"


class Used(Settings):
    """Material that was used.

    Attributes:
        run: its name.
    """

    run: str

    @property
    def spent_epsilon(self) -> float | None:
        """None: no epsilon is stated."""
        return None


class MaterialStore(Spending[Used]):
    """One party's offline material, a sealed file a question, in a folder for its owner alone.

    An entry of the ledger is a name that was used.

    Args:
        folder: this party's.
        party: its name.
        setup: the sharing of the weights that it was dealt for.
    """

    kind, form, suffix = "used material", Used, ".used"

    def __init__(self, folder: Path, party: str, setup: str) -> None:
        super().__init__(folder, party)
        self._material = Seal("offline material", party, setup)
        private_folder(folder)

    def put(self, name: str, material: Sequence[Tensor]) -> None:
        """Keep what one offline phase gave.

        Raises:
            ReusedPadError: that name was dealt before.
        """
        with self.locked():
            if self._left(name).exists() or self._path(name).exists():
                raise self._gone(name, "dealt before")
            tensors = {f"{index:06d}": each for index, each in enumerate(material)}
            save_weights(self._left(name), tensors, self._material)

    def take(self, name: str) -> list[Tensor]:
        """The material of a question, which is from now on used.

        Raises:
            ReusedPadError: it was used before, or never dealt.
            RunFolderError: the file is damaged, or of another party or other weights; it counts as
                used.
        """
        with self.locked():
            if self._path(name).exists():
                self._left(name).unlink(missing_ok=True)  # its taker was killed
                raise self._gone(name, "used before")
            if not self._left(name).exists():
                raise self._gone(name, "never dealt")
            try:
                found = load_weights(self._left(name), self._material)
            except RunFolderError as damage:
                self._use(name)  # it would stand for ever before what is whole
                damage.fix = "ask again: this material is given up, and other is taken"
                raise
            self._use(name)
        return [found[each] for each in sorted(found)]

    def names(self) -> list[str]:
        """Questions that can still be asked, in order of their names."""
        names = sorted(path.name.removesuffix(_LEFT) for path in self.folder.glob(f"*{_LEFT}"))
        return [name for name in names if not self._path(name).exists()]

    def _use(self, name: str) -> None:
        self._write(Used(run=name))
        sync_folder(self.folder)
        self._left(name).unlink()

    def _read(self, run: str) -> Used | None:
        """That the file is there is enough; an earlier vfl left it empty."""
        return Used(run=run) if self._path(run).exists() else None

    def _path(self, run: str) -> Path:
        return self._left(run).with_suffix(self.suffix)

    def _left(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise self._gone(name, "never dealt")
        return self.folder / f"{name}{_LEFT}"

    def _gone(self, name: str, got: str) -> ReusedPadError:
        return ReusedPadError(
            "a question needs material of its own",
            where=name,
            got=got,
            want="material that was dealt and not used",
            fix="deal again; masks that two questions share give away their difference",
        )
