"""Horizontal federated averaging with differential privacy: clients hold rows, not columns.

`plan` says how much noise a budget needs and what that promises, `client` trains on a client's
rows, `average` joins what clients send, `flower` carries both as a Flower ServerApp and ClientApp,
and `simulation` plays everybody in one process.
"""

from __future__ import annotations

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
