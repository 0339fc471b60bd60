"""Horizontal federated averaging with differential privacy: clients hold rows, not columns.

`settings` is the file of `vfl horizontal`. `plan` computes the noise for a privacy budget and the
resulting guarantees. `client` trains on a client's rows, and `average` averages the clients'
updates. `flower` runs clients as a Flower ClientApp and the average as a ServerApp; `simulation`
runs all clients in one process. `party` and `server` are the parts of a project's parties, and
`ledger` stores a party's spent budget. `study` and `command` are the entry points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.horizontal.average import Averager
    from vfl.horizontal.client import ClientState, ClientTrainer, Update, add_noise
    from vfl.horizontal.plan import NoisePlan, most_rounds, participants, plan_noise
    from vfl.horizontal.simulation import Outcome, simulate

__all__ = [
    "Averager",
    "ClientState",
    "ClientTrainer",
    "NoisePlan",
    "Outcome",
    "Update",
    "add_noise",
    "most_rounds",
    "participants",
    "plan_noise",
    "simulate",
]

__getattr__ = lazy_names(__name__)
