"""A feature party's part in the agreement on keys that a secure sum needs, before the first cut."""

from __future__ import annotations

from vfl.clients.feature_party import FeatureParty
from vfl.exchange import MaskedCut
from vfl.exchange.guards import expect
from vfl.frame import Frame, Kind
from vfl.mpc.agreement import Agreement
from vfl.mpc.pairwise import PairwiseMasks


def send_offer(party: FeatureParty, agreement: Agreement) -> None:
    """Send this party's offer to the label party, which relays it."""
    party.half.link.send(Frame(Kind.PROTOCOL, 0, agreement.offer))


def take_offers(party: FeatureParty, agreement: Agreement) -> None:
    """Wait for everybody's offers and mask this party's cuts from now on.

    Raises:
        AuthenticationError: an offer its party has not signed for this attempt; no cut was sent.
        ProtocolError, FrameError: the label party sent something else.
    """
    codec = party.half.codec
    assert isinstance(codec, MaskedCut), "only masked cuts need keys"
    offers = expect(party.half.link, Kind.PROTOCOL, 0, "the label party").payload
    codec.begin(PairwiseMasks(party.name, agreement.binding.parties, agreement.keys(offers)))
