"""The parties that the label party invites: feature, middle and further label parties, dealers."""

from __future__ import annotations

from vfl.clients.feature_party import FeatureParty

__all__ = ["FeatureParty"]
