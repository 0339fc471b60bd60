"""The label party, which has the labels and the top model."""

from __future__ import annotations

from vfl.session.label import EpochRecord, LabelParty, Objective, Records, summarise

__all__ = ["EpochRecord", "LabelParty", "Objective", "Records", "summarise"]
