"""A SuperNode whose loop ends by an error ends, so that `vfl up` can start it again."""

import subprocess
import sys

import pytest

ENDS = """
import os, sys, threading, time
from types import SimpleNamespace
from vfl.federation import programs, upstream

def loop():
    threading.Thread(target=time.sleep, args=(300,)).start()  # as Flower's local API
    {end}

command = SimpleNamespace(uvicorn=SimpleNamespace(Config=None), flower_supernode=loop)
upstream.SUPERNODE = SimpleNamespace(load=lambda: command)
upstream.SUPERNODE_LOOP = SimpleNamespace(load=lambda: SimpleNamespace(_push_messages=None))
api = SimpleNamespace(superexec_secret="", ca="", certificate="", key="", secret="")
programs.LocalApi.begin = lambda folder: api
programs._start_superexec = lambda api, address: None
os.environ[programs.LOCAL_API_VARIABLE] = "."
sys.argv = ["flower-supernode", "--port", "0"]
programs.supernode()
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ('raise ConnectionError("no data of this text is printed")', " (ConnectionError)"),
        ("return  # Flower has logged the error", ""),
    ],
    ids=["raised", "logged"],
)
def test_an_error_of_the_loop_ends_the_process_beside_its_local_api(end, said):
    program = ENDS.replace("{end}", end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"vfl: the SuperNode ended{said}\n" in done.stdout
    assert "no data" not in done.stdout + done.stderr
