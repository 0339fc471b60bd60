"""A session: the agreed terms, both endpoints of an exchange, and the files of a party.

The modules `terms`, `rules`, `schedule`, `consent`, `ranges` and `handshake` define a session and
check it before it starts. The modules `exchange`, `passes` and `label` compute the exchanges for
training and for queries. The modules `store` and `trace` read and write a party's files. The module
`ranks` divides the work of one party among several processes.
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
