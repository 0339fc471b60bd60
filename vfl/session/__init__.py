"""A session: the parties' terms, both endpoints of an exchange, and a party's files.

The modules `terms`, `rules`, `schedule`, `consent`, `ranges` and `handshake` define a session and
check it before it starts. The modules `exchange` and `label` run the training and query exchanges.
The modules `store` and `trace` write a party's files. The module `ranks` splits one party over
several processes.
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
