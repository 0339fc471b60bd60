"""``vfl list``: what can be named in a spec."""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Annotated, Any

import typer

from vfl.cli.output import Json, emit
from vfl.registry import Registry


class Family(StrEnum):
    """The families of plug-ins."""

    CODECS = "codecs"
    DEFENSES = "defenses"
    SECURE = "secure"
    ATTACKS = "attacks"
    PACKS = "packs"
    ADVERSARIES = "adversaries"
    BOTTOMS = "bottoms"
    TOPS = "tops"


def listing(
    family: Annotated[
        Family | None, typer.Argument(metavar="FAMILY", help="One family; all by default.")
    ] = None,
    json: Json = False,
) -> None:
    """List codecs, defenses, attacks and models with their options.

    A family is codecs, defenses, secure, attacks, packs (several attacks by one name), adversaries,
    bottoms or tops; without one, all are listed.
    """
    rows = [
        row
        for name, registry in _registries().items()
        if family is None or family.value == name
        for row in _rows(name, registry)
    ]
    if family in (None, Family.PACKS):
        rows += _packs()
    if json:
        emit(rows)
        return
    for row in rows:
        print(f"{row['family']:<11} {row['spec']}\n{'':<11} {row['summary']}")


def _registries() -> dict[str, Registry[Any]]:
    from vfl.attacks import ATTACKS
    from vfl.attacks.active import ADVERSARIES
    from vfl.compression import CODECS
    from vfl.defenses import DEFENSES
    from vfl.models import BOTTOMS, TOPS
    from vfl.mpc.secure import SECURE

    return {
        "codecs": CODECS,
        "defenses": DEFENSES,
        "secure": SECURE,
        "attacks": ATTACKS,
        "adversaries": ADVERSARIES,
        "bottoms": BOTTOMS,
        "tops": TOPS,
    }


def _packs() -> list[dict[str, str]]:
    from vfl.config.packs import PACKS

    return [
        {"family": "packs", "name": name, "spec": name, "summary": f"{', '.join(specs)}."}
        for name, specs in PACKS.items()
    ]


def _rows(family: str, registry: Registry[Any]) -> list[dict[str, str]]:
    return [
        {
            "family": family,
            "name": name,
            "spec": _spec(name, registry),
            "summary": (inspect.getdoc(registry.member(name)) or "").split("\n")[0],
        }
        for name in registry.names()
    ]


def _spec(name: str, registry: Registry[Any]) -> str:
    options = [
        key if option.default in (option.empty, None) else f"{key}={option.default}"
        for key, option in registry.options(name).items()
    ]
    return name + (f":{','.join(options)}" if options else "")
