"""Differential privacy: statements of guarantees, accountants, and DP-SGD for one party's model.

A statement names the protected unit, the attacker, the accountant and the assumptions of a
guarantee. An accountant computes the epsilon that a mechanism costs. `dpsgd` clips the gradients of
one party's model in a split network, and adds noise to them.
"""

from __future__ import annotations

from vfl.privacy.statement import PrivacyStatement, added

__all__ = ["PrivacyStatement", "added"]
