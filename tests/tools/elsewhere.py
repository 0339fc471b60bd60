"""Workers of vfl.tensors as processes of the command."""

import subprocess
import sys

import numpy as np

from vfl import tensors

LOADED = np.float32([[1.5, -2.25, 0.5], [-0.75, 3.0, 2.0]])


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
        self.workers = self.pool.wait(90)

    def close(self):
        self.pool.close()
        said = [each.communicate(timeout=90)[0] for each in self.processes]
        return [each.returncode for each in self.processes], said
