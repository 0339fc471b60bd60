"""The app bundle that Flower sends: its files in vfl, and the check of a received bundle.

Flower runs the code of any bundle that it receives, with the rights of the user who started its
SuperLink or SuperNode. Before they unpack or import any part of a bundle, the programs of
`vfl.federation.programs` therefore check its bytes. They refuse a bundle that the party's own file
does not accept.
"""

from __future__ import annotations

import hashlib
import io
import re
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import resources

from vfl.core.errors import ConsentError
from vfl.core.version import VERSION

SHIM = "vfl_app.py"
SETTINGS = "pyproject.toml"
#: Value in the setting `consent.bundles` that accepts vfl's own bundle, whose only code calls the
#: installed vfl package.
OWN = "vfl"
_FILES = {SHIM, SETTINGS, "experiment.toml", ".info/CONTENT"}
_TEMPLATES = resources.files("vfl.federation").joinpath("templates")
_LIMIT_BYTES = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def shim() -> str:
    """Return the code in vfl's own bundle, a few lines that call the installed vfl package."""
    return _TEMPLATES.joinpath(SHIM).read_text(encoding="utf-8")


def settings(name: str) -> str:
    """Return the text of pyproject.toml in vfl's own bundle, for an experiment with this name."""
    template = _TEMPLATES.joinpath("app_pyproject.toml")
    return template.read_text(encoding="utf-8").format(name=name, version=VERSION)


def check_bundle(content: bytes, accepted: Sequence[str]) -> None:
    """Refuse a bundle that the party does not accept.

    Args:
        content: bytes of the bundle that Flower sent, a zip archive.
        accepted: bundles that the party accepts: "vfl" for vfl's own bundle, or the SHA-256 of
            another bundle, as 64 hexadecimal digits.

    Raises:
        ConsentError: the party does not accept the bundle; the error states in which part it
            differs from vfl's own bundle.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest in accepted:
        return
    foreign = _foreign(content) if OWN in accepted else "its SHA-256"
    if foreign is not None:
        raise ConsentError(
            "this party does not run the app bundle that it received",
            where=foreign,
            got=f"SHA-256 {digest}",
            want=f"one of {', '.join(accepted) or 'none'}; '{OWN}' is the bundle of vfl {VERSION}",
            fix="read that bundle's code, then add its SHA-256 to consent.bundles in party.toml",
        )


def _foreign(content: bytes) -> str | None:
    """Return the part in which a bundle differs from vfl's own bundle, or None.

    The function compares the code and pyproject.toml, but no settings of the experiment.
    """
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
