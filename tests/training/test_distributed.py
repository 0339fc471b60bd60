"""`DistributedDataParallel` around a split module: ranks train what one process trains."""

import socket

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import vfl

ROWS, RANKS, STEPS = 8, 2, 3


def module():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return vfl.split(net, "1", torch.zeros(2, 6), codec="topk:k=2")


def batches():
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, ROWS, 6, generator=draw)
    return list(zip(inputs, torch.randint(0, 3, (STEPS, ROWS), generator=draw), strict=True))


def trained(model, part=slice(None)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs[part]), labels[part]).backward()
        optimizer.step()


def work(rank, port, path):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", address, rank=rank, world_size=RANKS)
    model = module()
    trained(nn.parallel.DistributedDataParallel(model), slice(rank, None, RANKS))
    torch.save(model.state_dict(), f"{path}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("VFL_COMPILED", "0")  # compiling for the first time takes half a minute
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, str(tmp_path)), nprocs=RANKS)
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    alone = module()
    trained(alone)
    for name, value in alone.named_parameters():
        assert torch.equal(states[0][name], states[1][name])
        assert torch.allclose(states[0][name], value, atol=1e-6)
    assert {state["_extra_state"]["step"] for state in states} == {STEPS}
