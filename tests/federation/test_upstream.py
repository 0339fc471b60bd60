"""Names inside Flower: one file has all that vfl uses, and the installed Flower has them."""

import ast
import re
from importlib import import_module
from pathlib import Path

import flwr
import pytest

import vfl
from vfl.core.errors import ConfigError
from vfl.federation import programs, upstream
from vfl.federation.upstream import INTERNALS, Internal
from vfl.transport.probe import AHEAD_TOLERANCE_S, CLOCK_TOLERANCE_S

PACKAGE = Path(vfl.__file__).parent
OTHERS = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "upstream.py"]
#: Packages of Flower whose names are public.
PUBLIC = re.compile(r"flwr\.(app|clientapp|serverapp|simulation)(\.strategy)?")


def names_of_flower(path):
    """Modules of Flower that a file imports, or names in a string; its variables and headers."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if re.search("flwr|flower", text, re.I) else ():
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_other_file_knows_a_name_inside_flower():
    headers = {upstream.KEY_HEADER, upstream.TIME_HEADER, upstream.SIGNATURE_HEADER}
    inside = [
        (path.name, name)
        for path in OTHERS
        for name in names_of_flower(path)
        if (re.fullmatch(r"flwr(\.\w+)+", name) and not PUBLIC.fullmatch(name))
        or re.fullmatch(r"FLWR_[A-Z_]+", name)
        or name in headers
    ]
    assert inside == []


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: internal.module)
def test_this_flower_has_every_name(internal):
    assert internal.load().__name__ == internal.module
    assert internal.names
    assert internal.why


def test_this_flower_reads_every_variable():
    """A switch that Flower no longer reads would let it report, ask or install in silence."""
    files = Path(flwr.__file__).parent.rglob("*.py")
    quoted = {
        name
        for path in files
        for name in re.findall(r'"(FLWR_[A-Z_]+)"', path.read_text(encoding="utf-8"))
    }
    assert {*upstream.SILENT, *upstream.UNGUARDED, upstream.HOME, upstream.POLL} <= quoted
    assert set(upstream.SILENT) < set(programs.QUIET)


def test_this_flower_sends_these_headers_and_has_this_tolerance():
    keys, times = import_module("flwr.supercore.constant"), import_module("flwr.common.constant")
    assert keys.FLEET_HTTP_PUBLIC_KEY_HEADER == upstream.KEY_HEADER
    assert keys.FLEET_HTTP_SIGNATURE_HEADER == upstream.SIGNATURE_HEADER
    assert times.TIMESTAMP_HEADER == upstream.TIME_HEADER
    assert times.TIMESTAMP_TOLERANCE == CLOCK_TOLERANCE_S
    assert times.SYSTEM_TIME_TOLERANCE == AHEAD_TOLERANCE_S


@pytest.mark.parametrize(
    ("internal", "got"),
    [
        (Internal("flwr.nowhere.client", ("Client",), "a test"), "no flwr.nowhere"),
        (Internal("flwr.app", ("Message", "Massage"), "a test"), "no Massage"),
        (Internal("flwr.app", ("Message.unknown",), "a test"), "no Message.unknown"),
    ],
    ids=["module", "name", "attribute"],
)
def test_a_flower_without_a_name_is_refused(internal, got):
    with pytest.raises(ConfigError, match="cannot put its guards around this version") as refused:
        internal.load()
    assert (refused.value.where, refused.value.got) == (internal.module, got)
