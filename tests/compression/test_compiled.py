"""Compiled loops write the bytes of plain ones."""

import hashlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from vfl.compression import StepContext, make
from vfl.core import compiled
from vfl.core.seeds import Secret, generator

SPECS = (
    "topk:k=3,values=4,packer=range",
    "topk:k=4,values=8",
    "randtopk:k=3,values=4,grad=4",
    "randtopk:k=6,law=multinomial",
    "quantise:values=3,packer=range",
    "quantise:values=8",
    "relu",
    "rate",
)
#: Enough for the range coder to have several states.
WIDE = tuple((f"quantise:values={bits},packer=range", (150, 90)) for bits in (4, 7, 8))


def digest():
    """Of all payloads of a few steps, which are decoded and committed too."""
    found = hashlib.sha256()
    for spec, (rows, width) in [*((spec, (30, 20)) for spec in SPECS), *WIDE]:
        codec = make(spec)
        for step in range(4):
            cut = torch.randn(rows, width, generator=generator(step, "compiled")).relu()
            context = StepContext(step, training=True, secret=Secret.of_simulation(0, "feature"))
            payload, kept = codec.encode(cut, context)
            decoded, saved = codec.decode(payload, rows, width, context)
            gradient = codec.encode_grad(cut / 8, saved, context)
            codec.commit(step)
            found.update(bytes(payload) + decoded.numpy().tobytes() + bytes(gradient))
            found.update(codec.decode_grad(gradient, kept, rows, width, context).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_both_give_the_same_bytes():
    script = "import runpy, sys; print(runpy.run_path(sys.argv[1])['digest']())"
    done = subprocess.run(
        [sys.executable, "-c", script, __file__],
        env={**os.environ, "VFL_COMPILED": "0" if compiled.COMPILED else "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.strip() == digest()


def test_plain_loops_are_used_when_asked_for():
    script = "from vfl.core import compiled; print(compiled.COMPILED)"
    env = {**os.environ, "VFL_COMPILED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"
