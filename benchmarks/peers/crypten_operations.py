"""Rounds, bytes and errors of CrypTen's operations: ``PYTHON -I crypten_operations.py RANK PORT``.

This program runs in an environment that has CrypTen, and imports no part of vfl. Rank 0 prints a
line of JSON for each operation; the operations have the names of `benchmarks/tensor_operations.py`
and process the same elements.
"""

from __future__ import annotations

import json
import os
import sys
import types
from importlib import import_module
from typing import Any

COUNT = 1000


def main() -> None:
    """Run one of the two parties."""
    rank, port = sys.argv[1], sys.argv[2]
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "DISTRIBUTED_BACKEND": "gloo",
        "RENDEZVOUS": f"tcp://127.0.0.1:{port}",
        "WORLD_SIZE": "2",
        "RANK": rank,
    }
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    absent: Any = types.ModuleType("torch.onnx.symbolic_registry")  # see `crypten_peer.py`
    sys.modules.setdefault(absent.__name__, absent)
    import_module("torch.onnx").symbolic_registry = absent  # type: ignore[attr-defined]
    crypten: Any = import_module("crypten")
    crypten.init()
    import_module("crypten.config").cfg.communicator.verbose = True
    counters: Any = import_module("crypten.communicator").get()
    functional: Any = import_module("torch.nn.functional")
    x, positive = torch.linspace(-4, 4, COUNT), torch.linspace(0.05, 20, COUNT)
    table, images = (10, COUNT // 10), (1, 10, 10, 10)
    filters = (1, 10, 3, 3)
    cases: dict[str, Any] = {
        "x * y": lambda a, p: a * p,
        "x ** 2": lambda a, p: a.square(),
        "x < y": lambda a, p: a < p,
        "x == y": lambda a, p: a == p,
        "x @ y": lambda a, p: a.reshape(table[::-1]).matmul(p.reshape(table)),
        "conv2d": lambda a, p: a.reshape(images).conv2d(a[:90].reshape(filters)),
        "relu": lambda a, p: a.relu(),
        "abs": lambda a, p: a.abs(),
        "where": lambda a, p: p + (a > 0) * (a - p),
        "max of 10": lambda a, p: a.reshape(-1, 10).max(1)[0],
        "argmax of 10": lambda a, p: a.reshape(-1, 10).argmax(1, one_hot=False),
        "max_pool2d": lambda a, p: a.reshape(images).max_pool2d(2),
        "avg_pool2d": lambda a, p: a.reshape(images).avg_pool2d(2),
        "exp": lambda a, p: a.exp(),
        "log": lambda a, p: p.log(),
        "reciprocal": lambda a, p: p.reciprocal(),
        "x / y": lambda a, p: a / p,
        "sqrt": lambda a, p: p.sqrt(),
        "rsqrt": lambda a, p: p.inv_sqrt(),
        "sigmoid": lambda a, p: a.sigmoid(),
        "tanh": lambda a, p: a.tanh(),
        "softmax of 10": lambda a, p: a.reshape(-1, 10).softmax(1),
        "log_softmax of 10": lambda a, p: a.reshape(-1, 10).log_softmax(1),
    }
    plain: dict[str, Any] = {
        "x ** 2": lambda a, p: a**2,
        "conv2d": lambda a, p: functional.conv2d(a.reshape(images), a[:90].reshape(filters)),
        "argmax of 10": lambda a, p: a.reshape(-1, 10).argmax(1),
        "max_pool2d": lambda a, p: functional.max_pool2d(a.reshape(images), 2),
        "avg_pool2d": lambda a, p: functional.avg_pool2d(a.reshape(images), 2),
        "rsqrt": lambda a, p: p.rsqrt(),
        "where": lambda a, p: torch.where(a > 0, a, p),
        "max of 10": lambda a, p: a.reshape(-1, 10).amax(1),
    }
    with crypten.no_grad():
        hidden = [crypten.cryptensor(each, src=0) for each in (x, positive)]
        for name, operation in cases.items():
            counters.reset_communication_stats()
            found = operation(*hidden)
            rounds, sent = counters.comm_rounds, counters.comm_bytes
            want = plain.get(name, operation)(x, positive)
            error = (found.get_plain_text() - want.float()).abs().max().item()
            if rank == "0":
                row = {"name": name, "rounds": rounds, "bytes": sent / COUNT, "error": error}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
