"""Cells: what a grid trains, each a run of its own, named by what is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vfl.config import CompareSettings, Experiment, GridSettings, read_experiment, to_toml
from vfl.errors import ConfigError, RunFolderError
from vfl.grid.identity import experiment_digest, text_digest
from vfl.storage import check_format, read_json, stamp, write_json, write_text

#: What makes a folder that of a grid.
GRID = "grid.json"
CONFIG = "config.toml"
CELLS = "cells"
#: What a cell's run folder holds besides: measures of its codec; why it ended badly; its cut; that
#: a party found out who tampered, and stopped.
CODEC, FAILURE, PICTURES = "codec.json", "failure.json", "pictures.json"
FOUND_OUT = "found_out.json"
_SPELLING = 40
#: In the place of an adversary: nobody tampers.
HONEST = "none"

Kind = Literal["codecs", "attacks"]


@dataclass(frozen=True)
class Cell:
    """One training of a grid.

    Attributes:
        experiment: what is trained.
        title: what people call it.
        about: what it is in words of the grid, by column.
        called: what its folder's name begins with; the codec unless it is given.
        adversary: spec of the one it is trained against; "none" trains honestly.
    """

    experiment: Experiment
    title: str
    about: Mapping[str, str]
    called: str = ""
    adversary: str = HONEST

    @property
    def name(self) -> str:
        """Its folder's name; it follows from what is trained, whatever else is."""
        called = self.called or self.experiment.codec
        spelt = re.sub(r"[^A-Za-z0-9=.,-]+", "_", called)[:_SPELLING]
        honest = f"{spelt}-seed{self.experiment.seed}-{experiment_digest(self.experiment)}"
        told = json.dumps(dict(self.about), sort_keys=True)
        return honest if self.adversary == HONEST else f"{honest}-{text_digest(told)}"


class GridFolder:
    """The folder of a grid: its experiment, its list of cells, and a run folder for each.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def cells_path(self) -> Path:
        """Where the run folders lie."""
        return self.path / CELLS

    def aside(self, cell: Cell) -> Path:
        """Where a cell's run folder lies while the same is trained anew in its place."""
        return self.path / "aside" / cell.name

    def write(
        self, experiment: Experiment, cells: Sequence[Cell], command: str, notes: Sequence[str] = ()
    ) -> None:
        """Say what the grid is; what earlier calls trained of it stays.

        Args:
            experiment: with its table of what is compared.
            cells: what is trained.
            command: how to repeat it.
            notes: what a reader of the results must know.

        Raises:
            RunFolderError: the folder is that of a single run, or of another version.
        """
        if (self.path / "run.json").exists():
            raise RunFolderError(
                "this is the folder of a single training",
                where=str(self.path),
                fix="give another folder with --out",
            )
        created, kind = datetime.now(UTC).isoformat(timespec="seconds"), kind_of(experiment)
        if (self.path / GRID).exists():
            created = self.words("created")
            if self.kind != kind:
                raise RunFolderError(
                    f"this is the folder of a grid of another kind, {self.kind}",
                    where=str(self.path),
                    fix="give another folder with --out",
                )
        listed = [
            {
                "name": cell.name,
                "title": cell.title,
                "about": dict(cell.about),
                "called": cell.called,
                "adversary": cell.adversary,
                "experiment": cell.experiment.model_dump(mode="json", exclude_none=True),
            }
            for cell in cells
        ]
        about = stamp() | {"name": experiment.name, "kind": kind}
        about |= {"created": created, "command": command}
        write_text(self.path / CONFIG, to_toml(experiment))
        write_json(self.path / GRID, about | {"notes": list(notes), "cells": listed})

    def experiment(self) -> Experiment:
        """What the grid was made from."""
        return read_experiment(self.path / CONFIG)

    def cells(self) -> list[Cell]:
        """What is trained, in order."""
        return [
            Cell(
                Experiment.model_validate(one["experiment"]),
                one["title"],
                one["about"],
                one.get("called", ""),
                one.get("adversary", HONEST),
            )
            for one in self._record()["cells"]
        ]

    @property
    def kind(self) -> Kind:
        """What its cells are for."""
        kind: Kind = self._record().get("kind", "codecs")
        return kind

    def words(self, key: str) -> Any:
        """`name`, `created`, `command`, `vfl` or `notes`."""
        return self._record()[key]

    def _record(self) -> Any:
        if not (self.path / GRID).exists():
            raise RunFolderError(
                "there is no grid in this folder",
                where=str(self.path),
                fix="give the folder that vfl compare or vfl grid printed",
            )
        record = read_json(self.path / GRID)
        check_format(record, self.path / GRID)
        return record


def kind_of(experiment: Experiment) -> Kind:
    """What a grid of this experiment is for: what it compares."""
    return "codecs" if experiment.grid is None else "attacks"


def is_grid(path: Path) -> bool:
    """Whether a folder is that of a grid."""
    return (path / GRID).exists()


def chosen(cells: Sequence[Cell], words: str) -> list[Cell]:
    """The cells whose title or name holds these words, whole: topk is no part of randtopk.

    Raises:
        ConfigError: there is none.
    """
    whole = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
    found = [cell for cell in cells if whole.search(cell.title) or whole.search(cell.name)]
    if not found:
        raise ConfigError(
            "no cell is called so",
            got=words,
            want="a part of what --dry-run lists",
        )
    return found


def is_done(path: Path) -> bool:
    """Whether a cell's run folder is whole."""
    return (path / "summary.json").exists() and (path / CODEC).exists()


def failure_of(path: Path) -> dict[str, Any] | None:
    """Why a cell ended badly, as an error's record with its exit code; None if it did not."""
    failed = path / FAILURE
    return read_json(failed) if failed.exists() and not is_done(path) else None


def settings_of(experiment: Experiment) -> CompareSettings:
    """What is compared.

    Raises:
        ConfigError: nothing says so.
    """
    if experiment.compare is None:
        raise ConfigError(
            "nothing says which codecs are compared",
            want="a table [compare] with codecs, or --codec SPEC --codec SPEC",
        )
    return experiment.compare


def grid_settings_of(experiment: Experiment) -> GridSettings:
    """What is attacked.

    Raises:
        ConfigError: nothing says so.
    """
    if experiment.grid is None:
        raise ConfigError(
            "nothing says what is attacked",
            want="a table [grid] with defenses and attacks, or --defense SPEC --attack SPEC",
        )
    return experiment.grid
