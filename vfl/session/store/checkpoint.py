"""Checkpoints: what one party needs to go on from a step, and which step everybody can go on from.

The schedule says before which exchanges a party saves (`Exchange.saves`), the same on both sides,
so no frame asks for it. The label party commits checkpoint s when the cut of exchange
s has come from every party: each of them saved before it sent that. Random draws are keyed by
step, so there is no generator state to keep.
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

#: Where they lie in a party's part of a run.
CHECKPOINTS = "checkpoints"
KEPT = 3
_ENDING = ".checkpoint"
_COMMITTED = "committed.json"


class Checkpoints:
    """One party's checkpoints of one run; each file is sealed, and whole or not there.

    Args:
        folder: where they lie.
        party: whose they are.
        run: the run's name.
        terms: digest of the session's terms; a checkpoint of other terms is refused.
    """

    def __init__(self, folder: Path, party: str, run: str, terms: str) -> None:
        self.folder = folder
        self.party = party
        self.run = run
        self.terms = terms

        #: Told the step before its checkpoint is written; a trace saves what it holds by then.
        self.before_save: Callable[[int], None] = lambda step: None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Keep the state before exchange `step`; older ones than the last few are removed.

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
        """The state before exchange `step`.

        Raises:
            CheckpointError: it is missing, damaged, another party's or another run's; an older
                one may be intact.
            RunFolderError: it is of another format or version, or of other terms.
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
                fix="resume the run: it goes on from the newest checkpoint that everybody has",
            ) from None
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        if (wrote := content["vfl"]) != VERSION:
            raise RunFolderError(
                "another version of vfl wrote this checkpoint, and might go on otherwise",
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
        """The steps whose checkpoints are as they were written, up to `most`, in order."""
        found = []
        for step in self.steps():
            if most is None or step <= most:
                with suppress(RunFolderError):
                    read_sealed(self._path(step), self._seal(step))
                    found.append(step)
        return found

    def steps(self) -> list[int]:
        """The steps that are kept, in order."""
        found = self.folder.glob(f"*{_ENDING}")
        return sorted(int(path.stem) for path in found if path.stem.isdigit())

    def commit(self, step: int) -> None:
        """Every party has saved before this exchange, as the label party knows, or was told."""
        write_sealed_json(self.folder / _COMMITTED, {"committed": step}, self._pointer)

    def committed(self) -> int:
        """The exchange everybody can go on from; 0 when nothing was committed.

        Raises:
            RunFolderError: the pointer is damaged, or another run's.
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
    """The newest step up to `most` that all of these parties have intact; 0 is the beginning."""
    common = set.intersection(*(set(one.intact(most)) for one in kept))
    return max(common, default=0)
