"""A dealer's way through one session: check, attach, agree, deal until it is over, say goodbye."""

from __future__ import annotations

import time

from vfl.clients.attach import attached
from vfl.clients.dealing_party import build_dealing_party
from vfl.clients.offers import send_offer, take_offers
from vfl.config import PartyFile
from vfl.errors import DisagreementError
from vfl.session import (
    Introduction,
    PartyReport,
    SessionMessage,
    check_dealers_consent,
)
from vfl.session.limits import frame_limits
from vfl.session.own_data import own_ledger
from vfl.session.own_identity import own_agreement
from vfl.storage import weights_digest
from vfl.transport import Observed


def deal(message: SessionMessage, party: PartyFile) -> PartyReport:
    """Play the third party that deals through a whole session; it keeps nothing.

    Args:
        message: what Flower brought.
        party: the party's own file.

    Raises:
        DisagreementError: the party's file is that of a party with data.
        ConsentError: the session asks for more than the file allows; nothing was sent.
        DisagreementError: its name stands for another session here; nothing was sent.
        VFLError: anything else that ended the session; the label party was told.
    """
    started = time.perf_counter()
    terms = message.terms
    if party.role != "dealer":
        raise DisagreementError(
            f"party '{party.party}' has data, and the session asks it to deal",
            got=f"role = '{party.role}'",
            want="role = 'dealer' in its own file, and no [data]",
        )
    check_dealers_consent(terms, party.party, party.consent)
    ledger, introduction = own_ledger(party), Introduction.of_dealer(party.party, terms)
    limits = frame_limits(terms, party.party, None)
    with ledger.session(terms) as (_, meter), attached(message, introduction, limits) as stream:
        link = Observed(stream, party.party, "feature", [meter])
        dealer = build_dealing_party(terms, link)
        agreement = own_agreement(party, terms, message.session, message.attempt)
        send_offer(dealer, agreement)
        take_offers(dealer, agreement, terms.dealer)
        stream.agree(frame_limits(terms, party.party, None, dealer.half.layers))
        dealer.run(party.consent.max_bytes)
        no_weights = weights_digest({})
        if terms.mode == "train":
            ledger.end(terms.run, no_weights)
        return PartyReport(
            party=party.party,
            weights_sha256=no_weights,
            seconds=time.perf_counter() - started,
        )
