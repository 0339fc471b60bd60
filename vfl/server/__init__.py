"""The label party: it holds labels and the top model."""

from __future__ import annotations

from vfl.server.label_party import EpochRecord, LabelParty, Objective
from vfl.server.summary import summarise

__all__ = ["EpochRecord", "LabelParty", "Objective", "summarise"]
