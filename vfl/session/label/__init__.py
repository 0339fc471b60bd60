"""The label party's part of a session: common steps of parties with labels and a top model."""

from __future__ import annotations

from vfl.session.label.party import EpochRecord, LabelParty, Objective, Records
from vfl.session.label.summary import summarise

__all__ = ["EpochRecord", "LabelParty", "Objective", "Records", "summarise"]
