"""The label party: it holds labels and the top model."""

from __future__ import annotations

from vfl.session.label import EpochRecord, LabelParty, Objective, Records, summarise

__all__ = ["EpochRecord", "LabelParty", "Objective", "Records", "summarise"]
