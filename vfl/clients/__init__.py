"""Feature parties, which have columns and bottom models."""

from __future__ import annotations

from vfl.clients.feature_party import FeatureParty

__all__ = ["FeatureParty"]
