"""A feature party's part in the agreement on keys of a secure mode, before the first cut."""

from __future__ import annotations

from vfl.clients.feature_party import FeatureParty
from vfl.exchange import MaskedCut, SharedHalf
from vfl.exchange.guards import expect
from vfl.frame import Frame, Kind
from vfl.mpc.agreement import Agreement
from vfl.mpc.pairwise import PairwiseMasks


def send_offer(party: FeatureParty, agreement: Agreement) -> None:
    """Send this party's offer to the label party, which relays it."""
    party.half.link.send(Frame(Kind.PROTOCOL, 0, agreement.offer))
    if isinstance(party.half, SharedHalf):
        party.half.introduce()


def take_offers(party: FeatureParty, agreement: Agreement) -> None:
    """Wait for everybody's offers and use the keys that follow from them from now on.

    Raises:
        AuthenticationError: an offer its party has not signed for this attempt; no cut was sent.
        ProtocolError, FrameError: the label party sent something else.
    """
    half, order = party.half, agreement.binding.parties
    offers = expect(half.link, Kind.PROTOCOL, 0, "the label party").payload
    keys = agreement.keys(offers)
    if isinstance(half, SharedHalf):
        half.begin(order, keys, expect(half.link, Kind.PROTOCOL, 1, "the label party").payload)
        return
    assert isinstance(half.codec, MaskedCut), "only masked cuts need keys"
    half.codec.begin(PairwiseMasks(party.name, order, keys))
