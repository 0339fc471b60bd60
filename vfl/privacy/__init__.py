"""Differential privacy: statements, accountants, DP-SGD of one party's half.

A statement names the protected unit, the attacker, the accountant and the assumptions. An
accountant computes the cost of a mechanism. `dpsgd` clips and noises one party's half of a network.
"""

from __future__ import annotations

from vfl.privacy.statement import PrivacyStatement, added

__all__ = ["PrivacyStatement", "added"]
