"""What parties agree on before and while they exchange: terms, schedule, consent, handshake."""

from __future__ import annotations

from vfl.session.checkpoint import CHECKPOINTS, Checkpoints
from vfl.session.consent import check_consent, check_dealers_consent
from vfl.session.course import Course
from vfl.session.failure import for_others, unexpected
from vfl.session.handshake import Introduction, check_introduction
from vfl.session.message import SessionMessage
from vfl.session.party_folder import PartyFolder
from vfl.session.report import PartyReport
from vfl.session.schedule import Exchange
from vfl.session.terms import Mode, PartyTerms, Terms

__all__ = [
    "CHECKPOINTS",
    "Checkpoints",
    "Course",
    "Exchange",
    "Introduction",
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
