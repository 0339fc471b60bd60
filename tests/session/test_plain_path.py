"""A session that hides nothing imports nothing of the room that hides."""

import subprocess
import sys

PROGRAMS = """
import sys
from pathlib import Path
from vfl.cli import app
from vfl.clients.app import client_app
from vfl.server.app import server_app
app(["train", sys.argv[1], "--runs", sys.argv[2]], standalone_mode=False)
client_app()
server_app(Path("."))
"""
FOUND = """
import sys
print(sorted(name for name in sys.modules if name.startswith("vfl.mpc")))
"""
EXPERIMENT = """
[parties.bank]
[train]
epochs = 1
batch_size = 512
"""


def test_no_module_of_mpc_is_imported_where_nothing_is_hidden(tmp_path):
    """One process has all three parts of a session in it, so that Python starts once."""
    (tmp_path / "plain.toml").write_text(EXPERIMENT)
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAMS + FOUND,
            str(tmp_path / "plain.toml"),
            str(tmp_path / "run"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
