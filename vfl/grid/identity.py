"""What a score depends on, as digests: the code of the attack, the experiment, and the rows."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vfl.config import Experiment
from vfl.version import VERSION

if TYPE_CHECKING:
    from vfl.datasets import PartyData

_ROOM = "vfl.attacks"
_DIGITS = 12
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
    """A digest of vfl's version, some modules' source, and what they import of the attacks room.

    A change of another attack leaves it as it is; what training stands on shows in the weights.

    Args:
        modules: of an attack, ours or another package's, and of what shows it its victim.
    """
    digest = hashlib.sha256(VERSION.encode())
    for name in sorted(_needed(modules)):
        digest.update(name.encode())
        digest.update(_source(name))
    return digest.hexdigest()[:_DIGITS]


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
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_ROOM}."):
            yield str(node.module)


def _source(module: str) -> bytes:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return b""
    return Path(spec.origin).read_bytes()
