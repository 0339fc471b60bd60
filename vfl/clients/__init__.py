"""Feature parties: they hold columns and bottom models."""

from __future__ import annotations

from vfl.clients.feature_party import FeatureParty, build_feature_party

__all__ = ["FeatureParty", "build_feature_party"]
