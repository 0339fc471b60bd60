"""The label party's part in the feature parties' agreement on keys: it carries their offers."""

from __future__ import annotations

from collections.abc import Mapping

from vfl.errors import ProtocolError
from vfl.frame import Frame, Kind
from vfl.mpc.agreement import OFFER_BYTES
from vfl.server.label_party import LabelParty


def relay_offers(label: LabelParty) -> Mapping[str, int]:
    """Wait for everybody's offer and send all of them to everybody; see `agreement`.

    A third party that deals is one of them, after the feature parties.
    Nothing happens in a session whose cuts are not summed under masks.

    Returns:
        Columns of each party's layer, where first layers are shared.

    Raises:
        ProtocolError: a party sent something else.
        LostPeerError: a party went away.
    """
    if not label.reception.masked:
        return {}
    offers = {name: half.take(Kind.PROTOCOL, 0).payload for name, half in label.halves.items()}
    links = [half.link for half in label.halves.values()]
    if (line := label.reception.dealer) is not None:
        offers[line.dealer] = line.take(Kind.PROTOCOL, 0)
        links.append(line.link)
    for name, offer in offers.items():
        if len(offer) != OFFER_BYTES:
            raise ProtocolError(
                f"party '{name}' offered keys of another form",
                got=f"{len(offer)} bytes",
                want=f"{OFFER_BYTES} bytes",
            )
    together = b"".join(bytes(offer) for offer in offers.values())
    for link in links:
        link.send(Frame(Kind.PROTOCOL, 0, together))
    return label.reception.begin()
