"""Differential privacy that can be stated: statements, accountants, DP-SGD of one half.

A statement says whose privacy, against whom, by which accountant, under which assumptions. An
accountant says what a mechanism costs. `dpsgd` clips and noises one party's half of a network.
"""

from __future__ import annotations

from vfl.privacy.statement import PrivacyStatement, added

__all__ = ["PrivacyStatement", "added"]
