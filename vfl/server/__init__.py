"""The label party: the side that holds labels and the top model."""

from __future__ import annotations

from vfl.server.build import build_label_party
from vfl.server.label_party import LabelParty
from vfl.server.progress import EpochRecord
from vfl.server.summary import summarise

__all__ = ["EpochRecord", "LabelParty", "build_label_party", "summarise"]
