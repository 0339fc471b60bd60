"""A user whose id no passwd file knows, as containers have: torch asks for its name at once."""

import os
import subprocess
import sys

SCRIPT = """
import os, pwd

def unknown(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")

pwd.getpwuid = unknown
import vfl
import torch, getpass
print(getpass.getuser())
with torch.device("meta"):
    print(torch.nn.Linear(3, 2)(torch.zeros(4, 3)).shape)
"""


def test_a_model_is_measured_without_a_name():
    named = ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in named}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:2] == [f"user-{os.getuid()}", "torch.Size([4, 2])"]
