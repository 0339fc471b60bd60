"""What parties agree on before and while they exchange: terms, schedule, consent, handshake."""

from __future__ import annotations

from vfl.session.consent import check_consent
from vfl.session.handshake import Introduction, check_introduction
from vfl.session.message import SessionMessage
from vfl.session.schedule import Exchange
from vfl.session.terms import Mode, PartyTerms, Terms

__all__ = [
    "Exchange",
    "Introduction",
    "Mode",
    "PartyTerms",
    "SessionMessage",
    "Terms",
    "check_consent",
    "check_introduction",
]
