"""Checkpoints: one party's states, and the exchange from which all parties can resume.

The schedule defines before which exchanges every party saves a checkpoint (`Exchange.saves`). All
parties follow the same schedule, so no message has to request a checkpoint. The label party commits
checkpoint s when the cut of exchange s has arrived from every party that sends one: each of these
parties saved its checkpoint before it sent that cut. If a checkpoint is missing at a party, the
session returns to an older one. Random numbers are derived from the number of the exchange, so a
checkpoint contains no generator state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from vfl.core.errors import CheckpointError, RunFolderError
from vfl.core.storage import Seal, read_sealed, read_sealed_json, write_sealed, write_sealed_json
from vfl.core.version import VERSION

#: Name of the folder with the checkpoints, in a party's part of a run.
CHECKPOINTS = "checkpoints"
KEPT = 3
_ENDING = ".checkpoint"
_COMMITTED = "committed.json"


class Checkpoints:
    """One party's checkpoints of one run.

    Every file contains its SHA-256, which shows damage but no forgery, and is written atomically.

    Args:
        folder: folder of the checkpoint files.
        party: name of the party that owns the checkpoints.
        run: name of the run.
        terms: digest of the session's terms; a checkpoint that was saved with other terms is
            refused.
    """

    def __init__(self, folder: Path, party: str, run: str, terms: str) -> None:
        self.folder = folder
        self.party = party
        self.run = run
        self.terms = terms

        #: Function that is called with the number of an exchange before the checkpoint of this
        #: exchange is written; a recorder then writes its trace to disk.
        self.before_save: Callable[[int], None] = lambda step: None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the state before exchange `step`; delete all but the last few checkpoints.

        Args:
            step: number of the exchange that follows the checkpoint.
            state: tensors, numbers and texts in mappings and lists.
        """
        self.before_save(step)
        content = io.BytesIO()
        torch.save({"vfl": VERSION, "terms": self.terms, "state": state}, content)
        write_sealed(self._path(step), [content.getvalue()], self._seal(step))
        for old in self.steps()[:-KEPT]:
            self._path(old).unlink(missing_ok=True)

    def load(self, step: int) -> dict[str, Any]:
        """Load the state before exchange `step`.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, has a different format, or
                belongs to a different party or run; an older checkpoint may be undamaged.
            RunFolderError: another version of vfl wrote the checkpoint, or the checkpoint belongs
                to a session with different terms.
        """
        path = self._path(step)
        try:
            payload = read_sealed(path, self._seal(step))
        except RunFolderError as problem:
            kept = ", ".join(map(str, self.intact())) or "none"
            raise CheckpointError(
                f"checkpoint {step} of party '{self.party}' cannot be used",
                where=str(path),
                got=f"{problem.what}; undamaged checkpoints: {kept}",
                want=f"an undamaged {self._seal(step)}",
                fix="resume the run: it continues from the newest checkpoint that every party has",
            ) from None
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        if (wrote := content["vfl"]) != VERSION:
            raise RunFolderError(
                "another version of vfl wrote this checkpoint, and might continue differently",
                where=str(path),
                got=f"vfl {wrote}",
                want=f"vfl {VERSION}",
                fix=f"pip install vfl=={wrote} to complete this run, or start the training anew",
            )
        if content["terms"] != self.terms:
            raise RunFolderError(
                "this checkpoint belongs to a session with other terms",
                where=str(path),
                got=f"terms {content['terms'][:8]}...",
                want=f"terms {self.terms[:8]}...",
                fix="resume with the settings with which the run was started",
            )
        state: dict[str, Any] = content["state"]
        return state

    def intact(self, most: int | None = None) -> list[int]:
        """Return the exchanges, up to `most`, that have an undamaged checkpoint, in order."""
        found = []
        for step in self.steps():
            if most is None or step <= most:
                with suppress(RunFolderError):
                    read_sealed(self._path(step), self._seal(step))
                    found.append(step)
        return found

    def steps(self) -> list[int]:
        """Return the exchanges before which a checkpoint exists, damaged or not, in order."""
        found = self.folder.glob(f"*{_ENDING}")
        return sorted(int(path.stem) for path in found if path.stem.isdigit())

    def commit(self, step: int) -> None:
        """Record that every party has saved the checkpoint before exchange `step`."""
        write_sealed_json(self.folder / _COMMITTED, {"committed": step}, self._pointer)

    def committed(self) -> int:
        """Return the number of the exchange from which all parties can continue.

        The number is 0 before the first commit.

        Raises:
            RunFolderError: the file that contains this number is damaged, or belongs to a different
                run.
        """
        path = self.folder / _COMMITTED
        return int(read_sealed_json(path, self._pointer)["committed"]) if path.exists() else 0

    @property
    def _pointer(self) -> Seal:
        return Seal("committed checkpoint", self.party, self.run)

    def _seal(self, step: int) -> Seal:
        return Seal("checkpoint", self.party, self.run, step)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:010d}{_ENDING}"


def newest_common(kept: Sequence[Checkpoints], most: int) -> int:
    """Return the newest exchange, up to `most`, whose checkpoint is undamaged at all parties.

    The result is 0 without such an exchange.
    """
    common = set.intersection(*(set(one.intact(most)) for one in kept))
    return max(common, default=0)
