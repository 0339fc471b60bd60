"""A session: the parties' terms, both endpoints of an exchange, and a party's files.

Agreement: `terms`, `rules`, `schedule`, `consent`, `ranges`, `handshake`. The round: `exchange` and
`label`. A party's disk: `store` and `trace`. Several processes of one party: `ranks`.
"""

from __future__ import annotations

from vfl.core.torch_internals import Compute
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
from vfl.session.schedule import EarlyStopping, Exchange
from vfl.session.store.checkpoint import CHECKPOINTS, Checkpoints
from vfl.session.store.party_folder import PartyFolder
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
