"""The label party's part of a session: code of parties that have labels and a top model."""

from __future__ import annotations

from vfl.session.label.party import LabelParty, Records
from vfl.session.label.summary import summarise
from vfl.session.label.task import EpochRecord, Objective

__all__ = ["EpochRecord", "LabelParty", "Objective", "Records", "summarise"]
