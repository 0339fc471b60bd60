"""``vfl list`` and ``vfl explain``: names for specs, and explanations of error codes."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any, Literal

from vfl.cli.output import Json, argument, emit, option
from vfl.core import errors
from vfl.core.registry import Registry

#: Families of plug-ins, and the packs of attacks.
Family = Literal[
    "codecs",
    "defenses",
    "secure",
    "attacks",
    "packs",
    "adversaries",
    "bottoms",
    "mergers",
    "tops",
    "losses",
    "optimizers",
    "schedules",
    "alignments",
    "id_rules",
    "accountants",
    "sources",
    "augmentations",
]


def listing(
    family: Annotated[Family | None, argument("One family; by default all.", "FAMILY")] = None,
    json: Json = False,
) -> None:
    """List codecs, defenses, attacks, models, data sets and more, with their options.

    FAMILY is codecs, defenses, secure, attacks, packs (several attacks under one name),
    adversaries, bottoms, mergers, tops, losses, optimizers, schedules, alignments, id_rules,
    accountants, sources or augmentations; without FAMILY, all families are listed.
    """
    rows = [
        row
        for name, registry in registries().items()
        if family in (None, name)
        for row in _rows(name, registry)
    ]
    if family in (None, "packs"):
        rows += _packs()
    if json:
        emit(rows)
        return
    for row in rows:
        also = f" Also: {row['aliases']}." if row["aliases"] else ""
        print(f"{row['family']:<11} {row['spec']}\n{'':<11} {row['summary']}{also}")


def explain(
    code: Annotated[
        str | None, argument("Code, such as V104, from the first line of an error.", "CODE")
    ] = None,
    listed: Annotated[bool, option("All codes, one line each.", "--list")] = False,
    json: Json = False,
) -> None:
    """Explain an error code: its meaning, how the error occurs, and how to fix it.

    Without CODE, or with --list, the command lists all codes.
    """
    if code is None or listed:
        titles = {one: errors.title_of(one) for one in errors.codes()}
        if json:
            emit(titles)
        else:
            print("\n".join(f"{one}  {title}" for one, title in titles.items()))
        return
    page = errors.page_of(code)
    if json:
        emit({"code": code.strip().upper(), "title": errors.title_of(code), "page": page})
    else:
        print(page, end="")


def registries() -> dict[str, Registry[Any]]:
    """Return every family of plug-ins by name."""
    from vfl.attacks import ATTACKS
    from vfl.attacks.active import ADVERSARIES
    from vfl.compression import CODECS
    from vfl.datasets.alignment.ids import ID_RULES
    from vfl.datasets.alignment.protocols import PROTOCOLS
    from vfl.datasets.augment import AUGMENTATIONS
    from vfl.datasets.sources import SOURCES
    from vfl.defenses import DEFENSES
    from vfl.models import BOTTOMS, MERGERS, TOPS
    from vfl.models.losses import LOSSES
    from vfl.models.optimizers import OPTIMIZERS, SCHEDULES
    from vfl.privacy.accountants import ACCOUNTANTS
    from vfl.session.secure_mode import SECURE

    return {
        "codecs": CODECS,
        "defenses": DEFENSES,
        "secure": SECURE,
        "attacks": ATTACKS,
        "adversaries": ADVERSARIES,
        "bottoms": BOTTOMS,
        "mergers": MERGERS,
        "tops": TOPS,
        "losses": LOSSES,
        "optimizers": OPTIMIZERS,
        "schedules": SCHEDULES,
        "alignments": PROTOCOLS,
        "id_rules": ID_RULES,
        "accountants": ACCOUNTANTS,
        "sources": SOURCES,
        "augmentations": AUGMENTATIONS,
    }


def _packs() -> list[dict[str, str]]:
    from vfl.config import PACKS

    about = {"family": "packs", "aliases": ""}
    return [
        about | {"name": name, "spec": name, "summary": f"{', '.join(specs)}."}
        for name, specs in PACKS.items()
    ]


def _rows(family: str, registry: Registry[Any]) -> list[dict[str, str]]:
    return [
        {
            "family": family,
            "name": name,
            "spec": _spec(name, registry),
            "summary": _summary(inspect.getdoc(registry.member(name)) or ""),
            "aliases": ", ".join(alias for alias, of in registry.aliases.items() if of == name),
        }
        for name in registry.names()
    ]


def _summary(documentation: str) -> str:
    """Return a docstring's first sentence as one line; torch's docstrings may wrap it."""
    first = " ".join(documentation.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", first)[0]


def _text(value: object) -> str:
    """Format a default value in the syntax of a spec."""
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _spec(name: str, registry: Registry[Any]) -> str:
    options = [
        key if option.default in (option.empty, None) else f"{key}={_text(option.default)}"
        for key, option in registry.options(name).items()
    ]
    return name + (f":{','.join(options)}" if options else "")
