"""Horizontal federated averaging with differential privacy: clients have rows, not columns.

The module `settings` defines the settings file of `vfl horizontal`. `plan` computes the noise that
a privacy budget requires, and the privacy guarantees that result from the noise. `client` trains
the network on the rows of one client, and `average` averages the weight changes of all clients.
`flower` runs clients as a Flower ClientApp and the averaging as a ServerApp; `simulation` runs all
clients in one process. `party` and `server` run a training with the parties of a project, and
`ledger` records the privacy budget that a party has spent. `study` runs many trainings of one
settings file, and `command` defines the command `vfl horizontal`.
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
