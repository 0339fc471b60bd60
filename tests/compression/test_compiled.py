"""Loops write the same bytes as machine code and as Python, through steps that packers learn."""

import os
import subprocess
import sys

import pytest
import torch

from vfl.compression import StepContext, make
from vfl.core import compiled
from vfl.core.seeds import Secret, generator

#: The last are wide enough for the range coder to have several states.
SPECS = [
    *((spec, 30, 20) for spec in ("topk:k=3,values=4,packer=range", "randtopk:k=3,grad=4")),
    *((spec, 30, 20) for spec in ("randtopk:k=6,law=multinomial", "relu", "rate")),
    *((f"quantise:values={bits},packer=range", 150, 90) for bits in (4, 8)),
]


def steps_of(spec, rows, width):
    """All bytes of a few steps, which are decoded and committed too."""
    codec, found = make(spec), []
    for step in range(4):
        cut = torch.randn(rows, width, generator=generator(step, "compiled")).relu()
        context = StepContext(step, training=True, secret=Secret.of_simulation(0, "feature"))
        payload, kept = codec.encode(cut, context)
        decoded, saved = codec.decode(payload, rows, width, context)
        gradient = codec.encode_grad(cut / 8, saved, context)
        codec.commit(step)
        found += [bytes(payload), decoded.numpy().tobytes(), bytes(gradient)]
        found.append(codec.decode_grad(gradient, kept, rows, width, context).numpy().tobytes())
    return found


@pytest.mark.skipif(not compiled.COMPILED, reason="numba is not installed")
@pytest.mark.parametrize(("spec", "rows", "width"), SPECS)
def test_both_give_the_same_bytes(monkeypatch, spec, rows, width):
    found = steps_of(spec, rows, width)
    monkeypatch.setattr(compiled, "COMPILED", False)
    for name, module in list(sys.modules.items()):
        if name.startswith("vfl.compression."):
            for loop, value in list(vars(module).items()):
                if hasattr(value, "py_func"):
                    monkeypatch.setattr(module, loop, value.py_func)
    assert steps_of(spec, rows, width) == found


def test_plain_loops_are_used_when_asked_for():
    script = "from vfl.core import compiled; print(compiled.COMPILED)"
    environment = {**os.environ, "VFL_COMPILED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"


@pytest.mark.skipif(not compiled.COMPILED, reason="numba is not installed")
def test_loops_are_compiled_where_nothing_can_be_written(monkeypatch):
    """A read-only installation and home, as in a container: numba has no place for its cache."""
    from numba.core.caching import CompileResultCacheImpl

    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])

    def doubled(number):
        return 2 * number

    loop = compiled.compiled(doubled)
    assert loop(21) == 42
    assert loop.nopython_signatures
