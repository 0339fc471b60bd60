"""Checkpoints: one party's state at a step, and the step from which all parties can resume.

The schedule defines the exchanges before which a party saves (`Exchange.saves`). All parties follow
the same schedule, so no frame requests a checkpoint. The label party commits checkpoint s when the
cut of exchange s has arrived from every party: each party saved its checkpoint before it sent that
cut. Random draws depend on the step number, so there is no generator state to save.
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

#: Folder of the checkpoints in a party's part of a run.
CHECKPOINTS = "checkpoints"
KEPT = 3
_ENDING = ".checkpoint"
_COMMITTED = "committed.json"


class Checkpoints:
    """One party's checkpoints of one run; every file is sealed, and is written atomically.

    Args:
        folder: folder of the checkpoint files.
        party: name of the party that owns the checkpoints.
        run: name of the run.
        terms: digest of the session's terms; a checkpoint of other terms is refused.
    """

    def __init__(self, folder: Path, party: str, run: str, terms: str) -> None:
        self.folder = folder
        self.party = party
        self.run = run
        self.terms = terms

        #: Function that is called with the number of a step, before the step's checkpoint is
        #: written; a recorder then writes its trace to disk.
        self.before_save: Callable[[int], None] = lambda step: None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the state before exchange `step`; only the last few checkpoints are kept.

        Args:
            step: number of the next exchange.
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
            CheckpointError: the checkpoint is missing, is damaged, or belongs to another party or
                run; an older checkpoint may be intact.
            RunFolderError: the checkpoint has another format or version, or belongs to a session
                with other terms.
        """
        path = self._path(step)
        try:
            payload = read_sealed(path, self._seal(step))
        except RunFolderError as problem:
            kept = ", ".join(map(str, self.intact())) or "none"
            raise CheckpointError(
                f"checkpoint {step} of party '{self.party}' cannot be used",
                where=str(path),
                got=f"{problem.what}; intact are: {kept}",
                want=f"an intact {self._seal(step)}",
                fix="resume the run: it continues from the newest checkpoint that every party has",
            ) from None
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        if (wrote := content["vfl"]) != VERSION:
            raise RunFolderError(
                "another version of vfl wrote this checkpoint, and might continue differently",
                where=str(path),
                got=f"vfl {wrote}",
                want=f"vfl {VERSION}",
                fix=f"pip install vfl=={wrote} to end this run, or start it anew",
            )
        if content["terms"] != self.terms:
            raise RunFolderError(
                "this checkpoint belongs to another experiment",
                where=str(path),
                got=f"terms {content['terms'][:8]}...",
                want=f"terms {self.terms[:8]}...",
                fix="resume with the settings the run was started with",
            )
        state: dict[str, Any] = content["state"]
        return state

    def intact(self, most: int | None = None) -> list[int]:
        """Return the steps with undamaged checkpoints, up to `most`, in order."""
        found = []
        for step in self.steps():
            if most is None or step <= most:
                with suppress(RunFolderError):
                    read_sealed(self._path(step), self._seal(step))
                    found.append(step)
        return found

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, in order."""
        found = self.folder.glob(f"*{_ENDING}")
        return sorted(int(path.stem) for path in found if path.stem.isdigit())

    def commit(self, step: int) -> None:
        """Record that every party has saved a checkpoint before exchange `step`."""
        write_sealed_json(self.folder / _COMMITTED, {"committed": step}, self._pointer)

    def committed(self) -> int:
        """Return the exchange from which all parties can continue; 0 before the first commit.

        Raises:
            RunFolderError: the file that names this exchange is damaged, or belongs to another run.
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
    """Return the newest step, up to `most`, that is intact at all parties; 0 if there is none."""
    common = set.intersection(*(set(one.intact(most)) for one in kept))
    return max(common, default=0)
