"""XGBoost's vertical mode: ``PYTHON -I xgboost_federated.py`` runs its server or one party.

This program runs in an environment whose XGBoost has the federated plug-in, and imports no part of
vfl. The program reads a line of JSON from standard input. For the server, the line has a port and
the number of parties. For a party, the line also has the server's address, the party's rank and the
files of the party's cells; for rank 0 it has the file of labels too. Without an encryption plug-in,
XGBoost sends gradients to all parties in plaintext. The server cannot be restricted to the loopback
interface.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import xgboost
from xgboost import collective, federated


def main() -> None:
    """Run jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of the library must not appear between the lines of the protocol

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    job = json.loads(next(sys.stdin))
    if job["rank"] is not None:
        tell(**party(job))
        sys.stdin.read()
    else:
        federated.run_federated_server(job["parties"], job["port"], blocking=False)
        tell()
        sys.stdin.read()
    os._exit(0)  # XGBoost has no function that stops its server


def party(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and predict the held-out rows.

    Return seconds, processor seconds, and the predictions of rank 0.
    """
    cells, tested = np.load(job["cells"]), np.load(job["tested"])
    labels = None if job["labels"] is None else np.load(job["labels"])
    with collective.CommunicatorContext(
        dmlc_communicator="federated",
        federated_server_address=job["server"],
        federated_world_size=job["parties"],
        federated_rank=job["rank"],
    ):
        collective.allreduce(np.zeros(1), collective.Op.SUM)  # this call waits for all parties
        began, busy = time.perf_counter(), time.process_time()
        rows = xgboost.DMatrix(cells, labels, data_split_mode=1, nthread=1)
        model = xgboost.train(job["asked"], rows, job["rounds"])
        taken = {
            "seconds": time.perf_counter() - began,
            "cpu_s": time.process_time() - busy,
        }
        answer = model.predict(xgboost.DMatrix(tested, data_split_mode=1, nthread=1))
    return taken | {"answer": [] if job["rank"] else answer.astype(float).tolist()}


if __name__ == "__main__":
    main()
