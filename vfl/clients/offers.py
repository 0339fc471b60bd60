"""A feature party's part in the agreement on keys of a secure mode, before the first cut."""

from __future__ import annotations

from vfl.clients.dealing_party import DealingParty
from vfl.clients.feature_party import FeatureParty
from vfl.exchange import DealerHalf, FeatureHalf, MaskedCut, OwnerHalf, SharedHalf, ShareHolder
from vfl.exchange.guards import expect
from vfl.frame import Frame, Kind
from vfl.mpc.agreement import Agreement
from vfl.mpc.pairwise import PairwiseMasks


def send_offer(party: FeatureParty | DealingParty, agreement: Agreement) -> None:
    """Send this party's offer to the label party, which relays it."""
    party.half.link.send(Frame(Kind.PROTOCOL, 0, agreement.offer))
    if isinstance(party.half, ShareHolder | DealerHalf):
        party.half.introduce()


def take_offers(
    party: FeatureParty | DealingParty, agreement: Agreement, dealer: str | None = None
) -> None:
    """Wait for everybody's offers and use the keys that follow from them from now on.

    Args:
        party: whose.
        agreement: its side of it.
        dealer: a third party that deals; None where the label party does, or nobody.

    Raises:
        AuthenticationError: an offer its party has not signed for this attempt; no cut was sent.
        ProtocolError, FrameError: the label party sent something else.
    """
    half = party.half
    order = tuple(name for name in agreement.binding.parties if name != dealer)
    offers = expect(half.link, Kind.PROTOCOL, 0, "the label party").payload
    keys = agreement.keys(offers)
    if isinstance(half, SharedHalf):
        half.begin(order, keys, expect(half.link, Kind.PROTOCOL, 1, "the label party").payload)
        return
    if isinstance(half, DealerHalf):
        half.begin(keys, expect(half.link, Kind.PROTOCOL, 1, "the label party").payload)
        return
    if isinstance(half, OwnerHalf):
        assert dealer is not None, "a third party deals"
        half.begin(order, keys, dealer)
        return
    assert isinstance(half, FeatureHalf), "every other half has a bottom"
    assert isinstance(half.codec, MaskedCut), "only masked cuts need keys"
    half.codec.begin(PairwiseMasks(party.name, order, keys))
