"""``vfl new``: writes a package with your own codec, defense or attack."""

from __future__ import annotations

import importlib.util
import re
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from vfl.cli.output import argument, say

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class _Kind(NamedTuple):
    """Differences between the packages for codecs, defenses and attacks.

    Attributes:
        family: name of the family's registry.
        contract: test class in `vfl.testing` for members of the family.
        study: command that compares members of the family.
        stored: a further row, with a command, for the table in the package's README.md.
    """

    family: str
    contract: str
    study: str
    stored: str = ""


_KINDS = {
    "codec": _Kind("codecs", "CodecContract", "compare"),
    "defense": _Kind("defenses", "DefenseContract", "grid"),
    "attack": _Kind(
        "attacks",
        "AttackContract",
        "grid",
        "| `vfl grid --add-attack {}.py FOLDER` | adds its row to the leaderboard of a stored "
        "grid, without any training |\n",
    ),
}


def new(
    kind: Annotated[
        Literal["codec", "defense", "attack"], argument("codec, defense or attack.", "KIND")
    ],
    name: Annotated[
        str, argument("Name of the member, of its module, and of the new folder.", "NAME")
    ],
) -> None:
    """Write a package with a codec, a defense or an attack: module, contract test, study, CI file.

    The folder NAME is new. Its README.md has the commands: the test, a table that compares NAME
    with others, and the installation that registers the name.
    """
    from vfl.cli.reference import registries
    from vfl.core.errors import ConfigError, TakenNameError
    from vfl.core.storage import write_text
    from vfl.core.version import VERSION

    folder, own = Path(name), _KINDS[kind]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "this is not a valid name for a member",
            got=name,
            want="at most 32 small letters, digits and '_', starting with a letter",
        )
    if name in registries()[own.family].names() or importlib.util.find_spec(name) is not None:
        raise TakenNameError(
            "a member of vfl or a module of Python has this name",
            got=name,
            want=f"a name that neither vfl list {own.family} nor Python knows",
        )
    if folder.exists():
        raise ConfigError("this folder exists already", where=str(folder), fix="another name")
    words = {
        "NAME": name,
        "CLASS": "".join(part.capitalize() for part in name.split("_")),
        "ARTICLE": "An" if kind[0] in "aeiou" else "A",
        "KIND": kind,
        "FAMILY": own.family,
        "GROUP": f"vfl.{own.family}",
        "CONTRACT": own.contract,
        "COMMAND": f"vfl {own.study} {own.study}.toml",
        "VERSION": VERSION,
        "STORED": own.stored.format(name),
        "TODAY": date.today().isoformat(),
    }
    placeholder = re.compile(rf"\b({'|'.join(words)})\b|(?<=Test)CLASS|^STORED(?=\|)", re.M)
    for template, target in {
        f"{kind}.py": f"{name}.py",
        "test.py": f"test_{name}.py",
        f"{kind}.toml": f"{own.study}.toml",
        "pyproject.toml": "pyproject.toml",
        "tests.yml": ".github/workflows/tests.yml",
        "README.md": "README.md",
    }.items():
        text = files("vfl.cli").joinpath("template", f"{template}.txt").read_text()
        write_text(folder / target, placeholder.sub(lambda found: words[found[0]], text))
    say(f"wrote {folder}; {folder / 'README.md'} has the commands")
