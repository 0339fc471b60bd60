"""Attacks from a user's file ("from outside") on a grid's victims, and their scores.

The user's attack code runs on victims (attacked models) that a grid's folder stores. The scores are
stored in separate files, which the command of the grid does not change.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError, UserError
from vfl.core.registry import load_plugin, parse
from vfl.core.storage import stamp, write_json
from vfl.experiments.cells import FOUND_OUT, GridFolder, grid_settings_of
from vfl.experiments.scores import (
    ATTACKERS,
    BASELINES,
    OF_CELL,
    OF_OUTSIDE,
    SCRATCH,
    Attacker,
    ScoresFile,
    read_attackers,
    read_codes,
    read_scores,
    setting_text,
    write_scores,
)
from vfl.experiments.staleness import is_stale

if TYPE_CHECKING:
    from vfl.datasets import PartyData
    from vfl.experiments.cells import Cell

#: Name of the file in a cell's folder with the reason why an attack from outside failed on this
#: cell.
OUTSIDE_FAILURE = "outside_failure.json"
_LONGEST = 80  # largest number of characters of an author's name
_WANTED = '__author__ = "A. Name" and __date__ = "2026-01-31", or lines Author: and Date: on top'


def load_attackers(file: Path, specs: Sequence[str] = ()) -> list[Attacker]:
    """Run a file that registers attacks; return each attack with the file's author and date.

    Args:
        file: Python file as for `--plugin`. Author and date are in `__author__` and `__date__`, or
            in docstring lines that begin with ``Author:`` and ``Date:``.
        specs: specs of attacks in this file; by default, all attacks of the file with default
            options.

    Raises:
        UserError: the file does not run, registers no attack, or lacks an author or a date.
        TakenNameError: the file registers an attack under the name of an existing attack.
        SpecError: an attack cannot be built with these options.
    """
    from vfl.attacks import ATTACKS, make

    load_plugin(file)
    module = sys.modules[file.stem]
    names = ATTACKS.registered_by(file.stem)
    asked = [parse(spec)[0] for spec in specs]
    if not names or not set(asked) <= set(names):
        raise UserError(
            "this file registers no attack, or not the requested one", where=str(file),
            got=", ".join(names) or "none",
            want=", ".join(asked) or "ATTACKS.register(NAME, CLASS)",
        )  # fmt: skip
    author, day = (_said(module, word) for word in ("author", "date"))
    try:
        date.fromisoformat(day)
    except ValueError:
        day = ""
    if not (author and author.isprintable() and len(author) <= _LONGEST and day):
        raise UserError("the file has no valid author and date", where=str(file), want=_WANTED)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for spec in specs or names:
        make(spec)
    return [Attacker(spec, author, day, file.name, digest) for spec in specs or names]


def _said(module: object, word: str) -> str:
    """Return the author or date that a module states, in an attribute or in its docstring."""
    found = re.search(rf"(?im)^\s*{word}:[ \t]*(\S.*)$", getattr(module, "__doc__", None) or "")
    given = getattr(module, f"__{word}__", found[1] if found else "")
    return str(given).strip()


def list_attackers(folder: GridFolder, found: Sequence[Attacker]) -> None:
    """Add attacks to a grid's list of outside attacks; a newer entry replaces one with equal spec.

    Raises:
        RunFolderError: there is no grid of attacks in this folder.
        UserError: the grid already runs this attack as one of its own attacks.
    """
    if folder.kind != "attacks":
        raise RunFolderError(
            "this folder holds no grid of attacks", where=str(folder.path),
            want="the folder that vfl grid printed",
        )  # fmt: skip
    settings = grid_settings_of(folder.experiment())
    for one in found:
        if one.spec in settings.attack_specs:
            raise UserError(f"{one.spec} is already an attack of this grid", where=str(folder.path))
    listed = read_attackers(folder.path) | {one.spec: one for one in found}
    write_json(folder.path / ATTACKERS, stamp() | {"attackers": list(map(asdict, listed.values()))})


def is_stored(cell: Cell, folder: GridFolder) -> bool:
    """Return whether a cell was attacked; then its victim is stored or can be recorded again."""
    runs = folder.cells_path / cell.name, folder.aside(cell)
    return any((run / OF_CELL).exists() for run in runs)


def attack_from_outside(
    cell: Cell, folder: GridFolder, data: Mapping[str, PartyData], device: str = "cpu"
) -> None:
    """Run the listed outside attacks on a victim; scores that exist are kept.

    The function runs only attacks whose code this process has loaded. A victim is trained again, to
    the same weights, only if an attack needs a recording that does not exist.

    Args:
        cell: cell of a victim, or the cell that measures the baselines of one seed.
        folder: folder of the grid.
        data: data of every party.
        device: device on which the model is trained.

    Raises:
        RunFolderError: the victim was not trained on these data, or the code of its defense, codec
            or model has changed.
        UserError: an attack does not fit the victim.
    """
    from vfl.attacks import ATTACKS
    from vfl.experiments.attack_grid import attack_plan, forget_recordings, train_recorded
    from vfl.experiments.attack_runner import AttackRunner, codes_of
    from vfl.experiments.checks import check_attacks, check_attacks_fit

    path = folder.cells_path / cell.name
    known = set(ATTACKS.names()) - ATTACKS.own
    attackers = read_attackers(folder.path)
    specs = [spec for spec in attackers if parse(spec)[0] in known]
    if not specs or not is_stored(cell, folder) or (path / FOUND_OUT).exists():
        return
    if is_stale(cell, folder, data):
        raise RunFolderError(
            "this victim was trained on other rows or by other code", where=str(path),
            fix=f"train it again: {folder.head('command')}",
        )  # fmt: skip
    settings = grid_settings_of(folder.experiment())
    update = {"attacks": tuple(specs), "baseline_attacks": None}
    settings = settings.model_copy(update=update)
    check_attacks(cell.experiment, settings)
    check_attacks_fit(cell.experiment, settings, data)
    plan = replace(attack_plan(settings, cell.adversary), adversaries=())
    if cell.victim == BASELINES:  # training from scratch already has a score from the grid itself
        jobs = plan.baselines([name for name in settings.baselines if name not in SCRATCH])
        runner = AttackRunner(cell.experiment, data, settings)
    else:
        jobs = plan.on_victim()
        train_recorded(cell, folder, data, settings, device)
        runner = AttackRunner.of_run(RunFolder(path), data, settings, cell.adversary)
    scores = list(runner.run(jobs, ScoresFile(path)))
    setting, listed = setting_text(settings), path / OF_OUTSIDE
    before = [one for one in read_scores(listed, setting) if one.attack not in specs]
    files = {one.code_key: one.sha256 for one in attackers.values() if one.spec in specs}
    codes = read_codes(listed) | codes_of(scores) | files
    write_scores(listed, setting, [*before, *scores], codes)
    forget_recordings(path, settings)
