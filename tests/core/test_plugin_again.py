"""A plug-in whose file was edited: loading it again takes the new code, in the same process."""

import sys

import pytest

from vfl.compression import CODECS, make
from vfl.core.errors import UnknownNameError, UserError
from vfl.core.registry import PLUGINS, load_plugin

CODE = """
from vfl.compression import CODECS
from vfl.compression.none import Uncompressed

class Edited(Uncompressed):
    \"\"\"A codec that is being written.\"\"\"
    version = VERSION

CODECS.register("edited", Edited)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(CODECS, "_members", dict(CODECS._members))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "edited_plugin_of_a_test.py"

    def written(code):
        file.write_text(code)
        return file

    yield written
    sys.modules.pop(file.stem, None)


def test_an_edited_file_gives_the_new_code(write):
    load_plugin(write(CODE.replace("VERSION", "1")))
    first = make("edited")
    load_plugin(write(CODE.replace("VERSION", "1")))
    assert type(make("edited")) is type(first), "an unchanged file is not run again"
    load_plugin(write(CODE.replace("VERSION", "2")))
    assert (first.version, make("edited").version) == (1, 2)


def test_a_file_that_does_not_run_leaves_the_former_one(write):
    load_plugin(write(CODE.replace("VERSION", "1")))
    with pytest.raises(UserError, match="does not run"):
        load_plugin(write("1 / 0"))
    assert make("edited").version == 1
    assert sys.modules["edited_plugin_of_a_test"].Edited is type(make("edited"))
    load_plugin(write(CODE.replace("VERSION", "3")))
    assert make("edited").version == 3


def test_names_that_the_file_registers_no_more_are_gone(write):
    more = "class Too(Edited): pass\nCODECS.register('edited_too', Too)"
    load_plugin(write(CODE.replace("VERSION", "1") + more))
    assert {"edited", "edited_too"} <= set(CODECS.names())
    load_plugin(write(CODE.replace("VERSION", "2").replace("Edited", "Renamed")))
    assert make("edited").version == 2
    with pytest.raises(UnknownNameError):
        make("edited_too")


def test_a_file_that_fails_midway_registers_nothing(write):
    load_plugin(write(CODE.replace("VERSION", "1")))
    half = CODE.replace("VERSION", "2") + 'CODECS.register("half", Edited)\n1 / 0'
    with pytest.raises(UserError, match="does not run"):
        load_plugin(write(half))
    assert make("edited").version == 1
    assert "half" not in CODECS.names()
