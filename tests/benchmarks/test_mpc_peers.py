"""The workloads as the adapters write them, computed in plaintext with numpy and torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import mpc
from benchmarks.mpc_workloads import workload_named
from benchmarks.peers import crypten_peer, spu_peer, talk

NAMES = [
    "lr100-b64-inference",
    "lr100-b64-training",
    "dnn1-b64-inference",
    "dnn1-b64-training",
    "relu-1k",
    "gelu-1k",
    "rsqrt-128",
]


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def gelu(values):
    return values * sigmoid((8 / np.pi) ** 0.5 * (values + 0.044715 * values**3))


JAX = SimpleNamespace(
    numpy=np,
    nn=SimpleNamespace(sigmoid=sigmoid, gelu=gelu),
    lax=SimpleNamespace(rsqrt=lambda values: values**-0.5),
)


@pytest.fixture(params=NAMES)
def given(request, tmp_path):
    """The task, the arrays as an adapter gets them, what is wanted, and how exactly."""
    task = mpc._task(workload_named(request.param), False, tmp_path, True)
    arrays, wanted = talk._arrays(task.arrays)
    # GeLU's form with tanh is 5e-4 from GeLU.
    return task.model_dump(), arrays, wanted, 1e-3 if task.function == "gelu" else 1e-9


def check(found, wanted, exact):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape
        assert np.abs(found[name] - value).max() < exact


def test_the_program_for_spu(given):
    task, arrays, wanted, exact = given
    found = spu_peer._program(JAX, task, list(arrays))(*arrays.values())
    assert sorted(spu_peer._outputs(task)) == sorted(found)
    check(found, wanted, exact)


def test_the_program_for_crypten(given, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "inv_sqrt", torch.Tensor.rsqrt, raising=False)  # CrypTen's
    task, arrays, wanted, exact = given
    peer = object.__new__(crypten_peer.Peer)
    peer._task = task
    peer._own = {name: torch.from_numpy(value) for name, value in arrays.items()}
    check({name: value.numpy() for name, value in peer._compute().items()}, wanted, exact)
