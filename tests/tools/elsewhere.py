"""Workers of vfl.tensors that connect to a pool: threads, or processes of the command."""

import subprocess
import sys
from threading import Thread

import numpy as np
import torch

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
        command = [sys.executable, "-m", "vfl", "worker", "--load", f"rows={folder / 'rows.npy'}"]
        self.processes = [
            subprocess.Popen(
                [*command, "--epsilon", "50", str(folder / f"{name}.ticket")],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for name in self.pool.tickets
        ]  # fmt: skip
        self.workers = self.pool.wait(600)

    def close(self):
        self.pool.close()
        said = [each.communicate(timeout=600)[0] for each in self.processes]
        return [each.returncode for each in self.processes], said
