"""The app bundle Flower carries: what vfl's own holds, and whether a party runs one it was sent.

Flower runs whatever bundle a SuperLink sends, with the rights of the SuperNode's user. So
`vfl supernode` puts `main` in the place of Flower's program that runs bundles: it looks at the
bundle's bytes before any of them is unpacked or imported, and refuses all but those the party's
own file accepts. Flower's other programs, which would run code too, are not available there.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import re
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vfl.config import read_party_file
from vfl.errors import ConfigError, ConsentError
from vfl.version import VERSION

PARTY_FILE_VARIABLE = "VFL_PARTY_FILE"
SHIM = "vfl_app.py"
SETTINGS = "pyproject.toml"
#: What a consent file calls the bundle that holds no code but the shim of the installed vfl.
OWN = "vfl"
_FILES = {SHIM, SETTINGS, "experiment.toml", ".info/CONTENT"}
_LIMIT_BYTES = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PROGRAM = "flwr-clientapp"
_OTHER_PROGRAMS = (
    "flwr-agentapp",
    "flwr-connector",
    "flwr-model",
    "flwr-serverapp",
    "flwr-simulation",
)
#: Both a shell's and Python's: a first line of `#!` can hold no long path, nor one with a blank.
_SCRIPT = """\
#!/bin/sh
'''exec' "{python}" -P "$0" "$@"
'''
from vfl.bundle import {function}

{function}()
"""


def shim() -> str:
    """The code of vfl's own bundle: ten lines over the installed package."""
    return resources.files("vfl").joinpath("templates", SHIM).read_text(encoding="utf-8")


def settings(name: str) -> str:
    """The pyproject.toml of vfl's own bundle, for an experiment of that name."""
    template = resources.files("vfl").joinpath("templates", "app_pyproject.toml")
    return template.read_text(encoding="utf-8").format(name=name, version=VERSION)


def check_bundle(content: bytes, accepted: Sequence[str]) -> None:
    """Refuse a bundle the party does not accept.

    Args:
        content: the bundle as Flower sent it, a zip archive.
        accepted: "vfl" for vfl's own, or the SHA-256 of others, as 64 hexadecimal digits.

    Raises:
        ConsentError: what is wrong with it.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest in accepted:
        return
    foreign = _foreign(content) if OWN in accepted else "its SHA-256"
    if foreign is not None:
        raise ConsentError(
            "this party does not run the app bundle that the SuperLink sent",
            where=foreign,
            got=f"SHA-256 {digest}",
            want=f"one of {', '.join(accepted) or 'none'}; '{OWN}' is the bundle of vfl {VERSION}",
            fix="read that bundle's code, then add its SHA-256 to consent.bundles in party.toml",
        )


def _foreign(content: bytes) -> str | None:
    """Where a bundle differs from vfl's own; None where it does not."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if sorted(names) != sorted(_FILES):
                return "its files"
            if sum(entry.file_size for entry in entries) > _LIMIT_BYTES:
                return "its size"
            code, text = archive.read(SHIM), archive.read(SETTINGS).decode()
        found = tomllib.loads(text)
        name = found["project"]["name"]
        if not _NAME.fullmatch(name) or found != tomllib.loads(settings(name)):
            return SETTINGS
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError, NotImplementedError):
        return "its form"
    return None if code == shim().encode() else SHIM


def guarded(environment: Mapping[str, str], folder: Path, party_file: Path) -> dict[str, str]:
    """An environment in which Flower finds our programs instead of its own that run bundles.

    Args:
        environment: of a SuperNode.
        folder: where the programs are written.
        party_file: says which bundles the party accepts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_PROGRAM, *_OTHER_PROGRAMS):
        function = "main" if name == _PROGRAM else "refuse"
        path = folder / name
        path.write_text(_SCRIPT.format(python=sys.executable, function=function))
        path.chmod(0o755)
    path_variable = f"{folder.resolve()}{os.pathsep}{environment['PATH']}"
    file = str(party_file.resolve())
    return {**environment, "PATH": path_variable, PARTY_FILE_VARIABLE: file}


def main() -> None:
    """Flower's own program, on bundles that the party accepts."""
    runtime: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    command = importlib.import_module("flwr.supernode.cli.flwr_clientapp")
    install = runtime.install_from_fab  # a Flower without it ends here, before any bundle comes
    accepted = _accepted()

    def install_accepted(content: bytes, *arguments: Any, **options: Any) -> Any:
        try:
            check_bundle(content, accepted)
        except ConsentError as refusal:
            print(refusal, flush=True)
            raise
        return install(content, *arguments, **options)

    runtime.install_from_fab = install_accepted
    command.flwr_clientapp()


def refuse() -> None:
    """Instead of the other programs by which Flower runs code."""
    program = Path(sys.argv[0]).name
    print(ConsentError(f"a party of vfl does not run {program}"), flush=True)
    sys.exit(ConsentError.exit_code)


def _accepted() -> Sequence[str]:
    file = os.environ.get(PARTY_FILE_VARIABLE)
    if not file:
        raise ConfigError("no party's own file", want=f"its path in {PARTY_FILE_VARIABLE}")
    return read_party_file(Path(file)).consent.bundles
