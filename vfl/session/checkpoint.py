"""Checkpoints: what one party needs to go on from a step, and which step everybody can go on from.

A party saves before every exchange whose number is a multiple of the interval, the same rule on
both sides, so no frame asks for it. The label party commits checkpoint s when the cut of exchange
s has come from every party: each of them saved before it sent that. Random draws are keyed by
step, so there is no generator state to keep.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vfl.errors import RunFolderError
from vfl.storage import check_format, read_json, stamp, write_bytes, write_json
from vfl.version import VERSION

#: Where they lie in a party's part of a run.
CHECKPOINTS = "checkpoints"
KEPT = 3
_COMMITTED = "committed.json"


class Checkpoints:
    """One party's checkpoints of one run; each file is whole or not there.

    Args:
        folder: where they lie.
        terms: digest of the session's terms; a checkpoint of other terms is refused.
        every: exchanges between two checkpoints.
    """

    def __init__(self, folder: Path, terms: str, every: int) -> None:
        self.folder = folder
        self.terms = terms
        self.every = every
        #: Told the step before its checkpoint is written; a trace saves what it holds by then.
        self.before_save: Callable[[int], None] = lambda step: None

    def due(self, step: int) -> bool:
        """Whether a party saves before this exchange."""
        return step > 0 and step % self.every == 0

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Keep the state before exchange `step`; older ones than the last few are removed.

        Args:
            step: number of the next exchange.
            state: tensors, numbers and texts in mappings and lists.
        """
        self.before_save(step)
        content = io.BytesIO()
        torch.save(stamp() | {"terms": self.terms, "step": step, "state": state}, content)
        write_bytes(self._path(step), content.getvalue())
        for old in self.steps()[:-KEPT]:
            self._path(old).unlink(missing_ok=True)

    def load(self, step: int) -> dict[str, Any]:
        """The state before exchange `step`.

        Raises:
            RunFolderError: it is missing, damaged, of another format or of another experiment.
        """
        path = self._path(step)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            kept = ", ".join(map(str, self.steps())) or "none"
            raise RunFolderError(
                "there is no checkpoint of that step", where=str(path), got=f"steps {kept}"
            ) from None
        except (RuntimeError, EOFError, zipfile.BadZipFile, ValueError):
            raise RunFolderError("a checkpoint is damaged", where=str(path)) from None
        check_format(content, path)
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

    def steps(self) -> list[int]:
        """The steps that are kept, in order."""
        return sorted(int(path.stem) for path in self.folder.glob("*.pt") if path.stem.isdigit())

    def commit(self, step: int) -> None:
        """Every party has saved before this exchange; at the label party only."""
        write_json(self.folder / _COMMITTED, {"step": step})

    def committed(self) -> int:
        """The exchange everybody can go on from; 0 when nothing was committed."""
        path = self.folder / _COMMITTED
        return int(read_json(path)["step"]) if path.exists() else 0

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:010d}.pt"
