"""What parties agree on before and while they exchange: terms, schedule, consent, handshake."""

from __future__ import annotations

from vfl.core.torch_internals import Compute
from vfl.session.checkpoint import CHECKPOINTS, Checkpoints
from vfl.session.consent import check_consent, check_dealers_consent
from vfl.session.exchange import Adversary, FeatureEnd, LabelEnd
from vfl.session.handshake import (
    Introduction,
    PartyReport,
    SessionMessage,
    check_introduction,
    for_others,
    unexpected,
)
from vfl.session.party_folder import PartyFolder
from vfl.session.schedule import EarlyStopping, Exchange
from vfl.session.terms import Mode, PartyTerms, Terms

__all__ = [
    "CHECKPOINTS",
    "Adversary",
    "Checkpoints",
    "Compute",
    "EarlyStopping",
    "Exchange",
    "FeatureEnd",
    "Introduction",
    "LabelEnd",
    "Mode",
    "PartyFolder",
    "PartyReport",
    "PartyTerms",
    "SessionMessage",
    "Terms",
    "check_consent",
    "check_dealers_consent",
    "check_introduction",
    "for_others",
    "unexpected",
]
