"""Workers of vfl.tensors that connect to a pool: threads, or processes of the command."""

import os
from subprocess import DEVNULL, PIPE, STDOUT
from threading import Thread

import numpy as np
import torch
from forked import Fork

from vfl import tensors

LOADED = np.float32([[1.5, -2.25, 0.5], [-0.75, 3.0, 2.0]])


class Connected:
    """alice, bob and carol, each a thread with a connection of its own and one table."""

    def __init__(self, **options):
        self.pool = tensors.Pool("alice", "bob", "carol", **options)
        self.threads = []
        for name, ticket in self.pool.tickets.items():
            worker = tensors.Worker(name)
            worker.load(torch.from_numpy(LOADED), tag="rows")
            worker.grant("rows", epsilon=50)
            self.threads.append(Thread(target=tensors.serve, args=(worker, ticket), daemon=True))
            self.threads[-1].start()
        self.workers = self.pool.wait()

    def close(self):
        self.pool.close()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


class Elsewhere:
    """alice, bob and carol as processes of the command, of which each was given one table."""

    def __init__(self, folder, **options):
        self.pool = tensors.Pool("alice", "bob", "carol", **options)
        self.pool.write_tickets(folder)
        np.save(folder / "rows.npy", LOADED)
        words = ["vfl", "worker", "--load", f"rows={folder / 'rows.npy'}", "--epsilon", "50"]
        self.processes = [
            Fork([*words, folder / f"{name}.ticket"], os.environ, [DEVNULL, PIPE, STDOUT])
            for name in self.pool.tickets
        ]
        self.workers = self.pool.wait(600)

    def close(self):
        self.pool.close()
        said = [each.stdout.read() for each in self.processes]
        for each in self.processes:
            each.stdout.close()
        return [each.wait(600) for each in self.processes], said
