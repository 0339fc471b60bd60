"""Cells of a grid: each is one training in its own run folder, named after its settings.

This module also defines the folder of a grid, and digests of everything on which trainings and
scores depend. Trainings and scores depend on the code of plug-ins, the experiment, and the data.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vfl.config import CompareSettings, Experiment, GridSettings, read_experiment, to_toml
from vfl.config.validate import STUDIES, named_plugins
from vfl.core.errors import ConfigError, RunFolderError
from vfl.core.registry import Registry, parse, parts
from vfl.core.storage import check_format, read_json, stamp, write_json, write_text
from vfl.core.version import VERSION

if TYPE_CHECKING:
    from vfl.datasets import PartyData


#: Name of the file that marks a folder as a grid.
GRID = "grid.json"
CONFIG = "config.toml"
CELLS = "cells"
#: Names of further files in a cell's run folder: measures of its codec; its failure; pictures of
#: its cuts; a note that a party detected the adversary and stopped the training.
CODEC, FAILURE, PICTURES = "codec.json", "failure.json", "pictures.json"
FOUND_OUT = "found_out.json"
_SPELLING = 40
#: Text in place of an adversary's spec if all parties are honest.
HONEST = "none"

Kind = Literal["codecs", "attacks", "value"]
Table = TypeVar("Table", CompareSettings, GridSettings)


@dataclass(frozen=True)
class Cell:
    """One training of a grid.

    Attributes:
        experiment: the experiment to train.
        title: name of the cell for display.
        about: the cell's entries in the grid's table, by name of the column.
        victim: in a grid, the spec of the attacked defense, codec or model, or "baselines"; in a
            value study, the kind of training; empty in a comparison, whose cells differ in `codec`.
            The name of the cell's folder begins with this text, or else with the codec.
        adversary: spec of the adversary in the training; "none" if all parties are honest.
    """

    experiment: Experiment
    title: str
    about: Mapping[str, str]
    victim: str = ""
    adversary: str = HONEST

    @property
    def repeat(self) -> str:
        """The cell's seed, or its fold."""
        own = self.about.get("repeat") or self.about.get("seed") or str(self.experiment.seed)
        return own.removeprefix("seed=")

    @cached_property
    def name(self) -> str:
        """Name of the cell's folder, which follows from the cell's fields, not from the grid."""
        spec = self.victim or self.experiment.codec
        spelt = re.sub(r"[^A-Za-z0-9=.,-]+", "_", spec)[:_SPELLING]
        honest = f"{spelt}-seed{self.experiment.seed}-{experiment_digest(self.experiment)}"
        about = json.dumps(dict(self.about), sort_keys=True)
        return honest if self.adversary == HONEST else f"{honest}-{text_digest(about)}"


class GridFolder:
    """The folder of a grid: its experiment, its list of cells, and one run folder per cell.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[tuple[int, ...], Any] = (), None

    @property
    def cells_path(self) -> Path:
        """Folder that contains the run folders of the cells."""
        return self.path / CELLS

    def aside(self, cell: Cell) -> Path:
        """Return the folder to which a cell's run is moved while it is trained again."""
        return self.path / "aside" / cell.name

    def stale(self, cell: Cell) -> Path:
        """Return the folder for a cell's runs whose data or code changed; see `staleness`."""
        return self.path / "stale" / cell.name

    def write(
        self,
        experiment: Experiment,
        cells: Sequence[Cell],
        command: str,
        notes: Sequence[str] = (),
        modules: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the description of the grid; trainings that the folder already contains are kept.

        Args:
            experiment: experiment with the table ([grid], [compare] or [value]) that defines the
                study.
            cells: all cells of the grid.
            command: command that repeats the study.
            notes: notes that pages show with the results.
            modules: record of the functions that build and train modules; None if an experiment
                file defines the grid. See `vfl.experiments.module_grid.Recipe`.

        Raises:
            RunFolderError: the folder contains a single run, or a grid of another version or kind;
                only one of the two grids trains modules; or the rows of the folder's grid were
                split in another way.
        """
        if (self.path / "run.json").exists():
            raise RunFolderError(
                "this is the folder of a single training",
                where=str(self.path),
                fix="give another folder: --out, or out= in Python",
            )
        created, kind = datetime.now(UTC).isoformat(timespec="seconds"), kind_of(experiment)
        if (self.path / GRID).exists():
            created = self.head("created")
            if (self.modules is None) is not (modules is None):
                raise RunFolderError(
                    "only one of the two grids trains modules, so they cannot share this folder",
                    where=str(self.path),
                    fix="give another folder: --out, or out= in Python",
                )
            if self.kind != kind:
                raise RunFolderError(
                    f"this is the folder of a grid of another kind, {self.kind}",
                    where=str(self.path),
                    fix="give another folder: --out, or out= in Python",
                )
            before, now = _split_of(self.experiment()), _split_of(experiment)
            if before != now:
                raise RunFolderError(
                    "the rows of this folder's trainings were split in another way",
                    where=str(self.path),
                    got=f"data.split = '{now}'",
                    want=f"data.split = '{before}'",
                    fix=f"-s data.split={before} continues this grid; --out starts another folder",
                )
        listed = [
            {
                "name": cell.name,
                "title": cell.title,
                "about": dict(cell.about),
                "called": cell.victim,
                "adversary": cell.adversary,
                "experiment": cell.experiment.model_dump(mode="json", exclude_none=True),
            }
            for cell in cells
        ]
        about = stamp() | {"name": experiment.name, "kind": kind}
        about |= {"created": created, "command": command}
        write_text(self.path / CONFIG, to_toml(experiment))
        if modules is not None:
            about |= {"modules": dict(modules)}
        write_json(self.path / GRID, about | {"notes": list(notes), "cells": listed})

    def experiment(self) -> Experiment:
        """Return the experiment from which the grid was made."""
        return read_experiment(self.path / CONFIG)

    def cells(self) -> list[Cell]:
        """Return the cells, in order."""
        return [
            Cell(
                Experiment.model_validate(one["experiment"]),
                one["title"],
                one["about"],
                one.get("called", ""),
                one.get("adversary", HONEST),
            )
            for one in self.record["cells"]
        ]

    @property
    def kind(self) -> Kind:
        """Kind of the study: "attacks" (a grid), "codecs" (a comparison) or "value"."""
        kind: Kind = self.record.get("kind", "codecs")
        return kind

    @property
    def modules(self) -> Mapping[str, Any] | None:
        """Record of the functions that make the modules; None for an experiment file."""
        found: Mapping[str, Any] | None = self.record.get("modules")
        return found

    def head(self, key: str) -> Any:
        """Return one entry of the grid's record: `name`, `created`, `command`, `vfl` or `notes`."""
        return self.record[key]

    @property
    def record(self) -> Any:
        """The whole record of the grid, as stored.

        Raises:
            RunFolderError: the folder contains no grid, or the record is damaged or has another
                format.
        """
        if not (self.path / GRID).exists():
            raise RunFolderError(
                "there is no grid in this folder",
                where=str(self.path),
                fix="give the folder that vfl compare or vfl grid printed",
            )
        about = (self.path / GRID).stat()
        version = about.st_mtime_ns, about.st_size, about.st_ino
        # cached, because each cell reads this record, which may have megabytes, several times
        if self._read[0] != version:
            record = read_json(self.path / GRID)
            check_format(record, self.path / GRID)
            self._read = version, record
        return self._read[1]


def kind_of(experiment: Experiment) -> Kind:
    """Return the kind of the study that an experiment's tables define."""
    if experiment.value is not None:
        return "value"
    return "codecs" if experiment.grid is None else "attacks"


def is_grid(path: Path) -> bool:
    """Return whether a folder is the folder of a grid."""
    return (path / GRID).exists()


def chosen(cells: Sequence[Cell], words: str) -> list[Cell]:
    """Return cells whose title or name contains a text; topk does not match randtopk.

    Args:
        cells: all cells.
        words: the text, which matches only as whole words.

    Raises:
        ConfigError: no cell contains the text.
    """
    whole = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
    found = [cell for cell in cells if whole.search(cell.title) or whole.search(cell.name)]
    if not found:
        raise ConfigError(
            "no cell has this name",
            got=words,
            want="whole words of a title that --dry-run prints",
        )
    return found


def is_done(path: Path) -> bool:
    """Return whether a cell's run folder contains a finished training."""
    return (path / "summary.json").exists() and (path / CODEC).exists()


def failure_of(path: Path, file: str = FAILURE) -> dict[str, Any] | None:
    """Return a failed cell's error record with its exit code; None if the cell has not failed."""
    failed = path / file
    return read_json(failed) if failed.exists() and not is_done(path) else None


def settings_of(experiment: Experiment) -> CompareSettings:
    """Return the experiment's [compare] table.

    Raises:
        ConfigError: the experiment has no [compare] table.
    """
    want = "a table [compare] with codecs, or --codec SPEC --codec SPEC"
    return _said(experiment.compare, "which codecs are compared", want)


def grid_settings_of(experiment: Experiment) -> GridSettings:
    """Return the experiment's [grid] table.

    Raises:
        ConfigError: the experiment has no [grid] table.
    """
    want = "a table [grid] with defenses and attacks, or --defense SPEC --attack SPEC"
    return _said(experiment.grid, "what is attacked", want).of_task(experiment.label.task)


def _said(table: Table | None, what: str, want: str) -> Table:
    if table is None:
        raise ConfigError(f"no setting says {what}", want=want)
    return table


_DIGITS = 12
#: Packages of plug-ins; in digests, a change to a package's list of members does not count.
_PLUG_INS = ("vfl.attacks.", "vfl.compression.", "vfl.defenses.", "vfl.models.")


def experiment_digest(experiment: Experiment) -> str:
    """Return a digest of the settings that affect training; tables of studies do not affect it."""
    left_out: dict[str, Any] = dict.fromkeys(STUDIES, True)
    # earlier versions had only this method of splitting, so their digests stay valid
    if _split_of(experiment) == "shuffled":
        left_out["data"] = {"split"}
    return text_digest(experiment.model_dump_json(exclude=left_out))


def _split_of(experiment: Experiment) -> str:
    return experiment.data.split or "shuffled"


def text_digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def data_digest(data: Mapping[str, PartyData]) -> str:
    """Return a digest of every party's inputs, labels and split."""
    digest = hashlib.sha256()
    for name, own in sorted(data.items()):
        split = own.split
        arrays = [split.train, split.validation, split.test]
        tensors = (own.inputs, own.labels, own.unaligned)
        arrays += [one.numpy() for one in tensors if one is not None]
        for array in arrays:
            digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()[:_DIGITS]


def code_of(*parts: str | type | FunctionType) -> str:
    """Return a digest of vfl's version, the source of modules, and plug-in code that they import.

    The digest covers this plug-in code: code of attacks, codecs, defenses and models; other code in
    the module's vfl package; and code in the author's package or folder. A change to the code of an
    attack that is not imported does not change the digest.

    A class or function from a notebook cell has no source file; the digest then covers its compiled
    code.

    Args:
        parts: classes and functions of plug-ins, each of which stands for its module; and names of
            modules that prepare a victim for an attack.
    """
    digest = hashlib.sha256(VERSION.encode())
    for name in sorted(_needed({one if isinstance(one, str) else one.__module__ for one in parts})):
        digest.update(name.encode())
        digest.update(_code_alone(_source(name)))
    made = {one for one in parts if not isinstance(one, str) and _is_of_a_cell(one)}
    for one in sorted(made, key=lambda one: one.__qualname__):
        digest.update("\n".join(_compiled(one, set())).encode())
    return digest.hexdigest()[:_DIGITS]


def _is_of_a_cell(made: type | FunctionType) -> bool:
    """Return whether a class or function has no source file, as in a notebook cell."""
    name = made.__module__
    return name not in sys.builtin_module_names and _file(name) is None


def _compiled(made: object, seen: set[object]) -> Iterator[str]:
    """Yield the compiled code of a class or function, and of the names in its module that it uses.

    File names and line numbers do not count, so running the notebook cell again gives the same
    code.
    """
    if isinstance(made, classmethod | staticmethod):
        made = made.__func__
    if isinstance(made, property):
        yield from (line for one in (made.fget, made.fset) for line in _compiled(one, seen))
    elif isinstance(made, type):
        if made in seen or not _is_of_a_cell(made):
            return
        seen.add(made)
        yield f"class {made.__qualname__}"
        for name, own in sorted(vars(made).items()):
            if name not in _OF_EVERY_CLASS:
                yield f"{name} ="
                yield from _compiled(own, seen)
        for base in made.__bases__:
            yield from _compiled(base, seen)
    elif isinstance(made, FunctionType):
        if made in seen or not _is_of_a_cell(made):
            return
        seen.add(made)
        yield from _compiled(made.__code__, seen)
        yield from _compiled((made.__defaults__, made.__kwdefaults__), seen)
        for name in sorted(made.__code__.co_names):
            if name in made.__globals__:
                yield from _compiled(made.__globals__[name], seen)
    elif isinstance(made, CodeType):
        yield f"{made.co_code.hex()} {made.co_names} {made.co_varnames} {made.co_freevars}"
        for one in made.co_consts:
            yield from _compiled(one, seen)
    elif isinstance(made, str | bytes | int | float | complex | None):
        yield repr(made)
    elif isinstance(made, tuple | list | dict | frozenset):
        listed = [*made.items()] if isinstance(made, dict) else made
        for one in sorted(listed, key=repr) if isinstance(made, frozenset) else listed:
            yield from _compiled(one, seen)


_OF_EVERY_CLASS = {"__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__"}


def plug_ins_of(experiment: Experiment, adversaries: Sequence[str] = ()) -> str:
    """Return a digest of the code of a training's main plug-ins; see `code_of`.

    The digest covers the defense, the codec, the top model, the parties' bottom models and the
    adversaries. It also covers all other plug-ins from outside vfl, such as mergers, losses,
    optimisers and data sets; vfl's own members of these families change only with its version.

    Args:
        experiment: experiment, whose settings contain specs of a defense, a codec and models.
        adversaries: specs of the adversaries in the training.
    """
    # imported late, because reports read digests without an import of torch
    from vfl import compression, defenses, models
    from vfl.attacks.active import make_adversary

    made: list[object] = [defenses.make(spec) for spec in parts(experiment.defense)]
    made += [compression.make(experiment.codec), models.make_top(experiment.label.top)]
    made += [models.make_bottom(party.bottom) for party in experiment.parties.values()]
    made += [make_adversary(spec) for spec in adversaries]
    return code_of(*map(type, made), *_from_outside(experiment))


def _from_outside(experiment: Experiment) -> Iterator[type]:
    """Yield classes of plug-ins from outside vfl, in families whose own members have no digest."""
    from vfl.datasets.augment import AUGMENTATIONS
    from vfl.datasets.sources import SOURCES
    from vfl.models import MERGERS
    from vfl.models.losses import LOSSES
    from vfl.models.optimizers import OPTIMIZERS, SCHEDULES
    from vfl.session.secure_mode import SECURE

    families: dict[str, Registry[Any]] = {
        "augmentation": AUGMENTATIONS,
        "data set": SOURCES,
        "loss": LOSSES,
        "merger": MERGERS,
        "optimizer": OPTIMIZERS,
        "schedule": SCHEDULES,
        "secure": SECURE,
    }
    for named in named_plugins(experiment.model_dump(exclude=set(STUDIES))):
        if (registry := families.get(named.family)) is None or named.spec == "none":
            continue
        for spec in parts(named.spec):
            name, _ = parse(spec)
            if registry.aliases.get(name, name) not in registry.own:
                yield registry.member(name)


def _needed(modules: Iterable[str]) -> set[str]:
    """Return the given modules, and the plug-in modules that they import directly or indirectly."""
    found, waiting = set(modules), list(modules)
    while waiting:
        for name in _imports(waiting.pop()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def _imports(module: str) -> Sequence[str]:
    """Return the plug-in modules that a module imports."""
    return _imported(module, _source(module))


def _parsed(source: bytes) -> ast.Module:
    """Parse source in one thread at a time: CPython 3.11 raises SystemError in parallel threads."""
    with _PARSING:
        return ast.parse(source)


@cache
def _imported(module: str, source: bytes) -> Sequence[str]:
    room, found = ".".join(module.split(".")[:2]) if module.startswith("vfl.") else "", []
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            asked = [importlib.util.resolve_name(name, module.rpartition(".")[0])]
        elif isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        else:
            continue
        found += [one for one in asked if _belongs(one, room, module)]
    return found


def _belongs(name: str, room: str, module: str) -> bool:
    if name.startswith(_PLUG_INS):
        return True
    if room:
        return name.startswith(f"{room}.")
    if name.split(".")[0] == module.split(".")[0]:
        return True
    here, there = _file(module), _file(name)
    beside = here is not None and there is not None and there.parent == here.parent
    return beside and not {"site-packages", "dist-packages"} & set(there.parts if there else ())


#: Source of loaded modules; each entry also has the module object to which the source belongs.
_LOADED: dict[str, tuple[object, bytes]] = {}
_PARSING = threading.Lock()


def _source(module: str) -> bytes:
    """Return a module's source; of a loaded module, the source at the first call."""
    loaded = sys.modules.get(module)
    loading = getattr(loaded, "__spec__", None) or loaded
    if loading is not None and (known := _LOADED.get(module)) and known[0] is loading:
        return known[1]
    file = _file(module)
    source = b"" if file is None or not file.exists() else file.read_bytes()
    if loading is not None:
        _LOADED[module] = loading, source
    return source


@cache
def _code_alone(source: bytes) -> bytes:
    """Return source code without docstrings, comment lines and empty lines."""
    tree = _parsed(source)
    lines = source.splitlines()
    docstrings = [text for node in ast.walk(tree) if (text := _docstring(node)) is not None]
    prose, kept = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node not in docstrings:
            kept.update(_rows(node)[1:])  # a line inside a string may look like a comment
    for text in docstrings:
        first, last = _rows(text)[0], _rows(text)[-1]
        around = lines[first - 1][: text.col_offset] + lines[last - 1][text.end_col_offset :]
        if not around.strip():
            prose.update(_rows(text))
    return b"\n".join(
        line.rstrip()
        for row, line in enumerate(lines, start=1)
        if row in kept or (row not in prose and line.strip() and not line.lstrip().startswith(b"#"))
    )


def _rows(node: ast.expr) -> range:
    """Return the line numbers of a syntax-tree node, counted from 1."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _docstring(node: ast.AST) -> ast.expr | None:
    """Return the syntax-tree node of a module's, class's or function's docstring, or None."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    match node.body[:1]:
        case [ast.Expr(value=ast.Constant(value=str()) as text)]:
            return text
    return None


def _file(module: str) -> Path | None:
    """Return the source file of a module; a running script counts as a module."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None and module not in sys.modules:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            return None
        origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None
