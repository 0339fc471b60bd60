"""What trainings and scores depend on, as digests: plug-ins' code, the experiment, and the rows."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vfl.config import Experiment
from vfl.registry import parts
from vfl.version import VERSION

if TYPE_CHECKING:
    from vfl.datasets import PartyData

_DIGITS = 12
#: Rooms whose modules plug-ins are made of; the lists of their members are no part of any.
_PLUG_INS = ("vfl.attacks.", "vfl.compression.", "vfl.defenses.", "vfl.models.")
#: Tables of an experiment that nothing trained follows from.
LISTS = frozenset({"compare", "grid"})


def experiment_digest(experiment: Experiment) -> str:
    """Of all that is trained, whatever it is compared with."""
    return text_digest(experiment.model_dump_json(exclude=set(LISTS)))


def text_digest(text: str) -> str:
    """A short one of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def data_digest(data: Mapping[str, PartyData]) -> str:
    """Of every party's inputs and labels, and of the split."""
    digest = hashlib.sha256()
    for name, own in sorted(data.items()):
        split = own.split
        arrays = [split.train, split.validation, split.test]
        arrays += [kept.numpy() for kept in (own.inputs, own.labels) if kept is not None]
        for array in arrays:
            digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()[:_DIGITS]


@cache
def code_of(*modules: str) -> str:
    """A digest of vfl's version, some modules' source, and what they import of plug-ins' code.

    That is of the rooms of attacks, codecs, defenses and models, of the room they stand in
    themselves, or of the package or folder of whoever wrote them. A change of another attack leaves
    it as it is.

    Args:
        modules: of plug-ins, ours or another package's, and of what shows an attack its victim.
    """
    digest = hashlib.sha256(VERSION.encode())
    for name in sorted(_needed(modules)):
        digest.update(name.encode())
        digest.update(_source(name))
    return digest.hexdigest()[:_DIGITS]


def plug_ins_of(experiment: Experiment, adversaries: Sequence[str] = ()) -> str:
    """A digest of the code of all that a training is made of; see `code_of`.

    Args:
        experiment: with a defense, a codec and models.
        adversaries: specs of those it is trained against.
    """
    from vfl import compression, defenses, models  # a report reads digests without torch
    from vfl.attacks.active import make_adversary

    made: list[object] = [defenses.make(spec) for spec in parts(experiment.defense)]
    made += [compression.make(experiment.codec), models.make_top(experiment.label.top)]
    made += [models.make_bottom(party.bottom) for party in experiment.parties.values()]
    made += [make_adversary(spec) for spec in adversaries]
    return code_of(*sorted({type(one).__module__ for one in made}))


def _needed(modules: Iterable[str]) -> set[str]:
    """The modules, and all of the room that they import by whatever way."""
    found, waiting = set(modules), list(modules)
    while waiting:
        for name in _imports(waiting.pop()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def _imports(module: str) -> Iterator[str]:
    """Modules of plug-ins, and of the same kind, that a module names in its imports."""
    room = ".".join(module.split(".")[:2]) if module.startswith("vfl.") else ""
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            asked = [importlib.util.resolve_name(name, module.rpartition(".")[0])]
        elif isinstance(node, ast.Import):
            asked = [alias.name for alias in node.names]
        else:
            continue
        yield from (one for one in asked if _belongs(one, room, module))


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


def _source(module: str) -> bytes:
    file = _file(module)
    return b"" if file is None else file.read_bytes()


def _file(module: str) -> Path | None:
    """Where a module's source lies; a script that runs is a module as well."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None and module not in sys.modules:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            return None
        origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None
