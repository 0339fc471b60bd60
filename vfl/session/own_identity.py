"""The keys a party brings to a secure mode, from its own file."""

from __future__ import annotations

from vfl.config import PartyFile
from vfl.mpc.agreement import Agreement, Binding
from vfl.mpc.identity import MAKE_IDENTITY, Identity, read_pins
from vfl.session.terms import Terms


def binding_of(terms: Terms, session: str, attempt: int) -> Binding:
    """What the keys of one attempt are bound to."""
    return Binding(session, attempt, terms.digest(), tuple(terms.peers))


def own_agreement(party: PartyFile, terms: Terms, session: str, attempt: int) -> Agreement:
    """This party's side of an agreement, with its identity key and the keys it has pinned.

    Raises:
        MissingDataError, DataError: one of the files is missing or holds something else.
    """
    others = [name for name in terms.peers if name != party.party]
    return Agreement(
        party.party,
        Identity.kept_at(party.beside(party.identity.key)),
        read_pins(party.beside(party.identity.peers), others),
        binding_of(terms, session, attempt),
    )


def keys_of(party: PartyFile) -> str:
    """Whether this party could take part in a secure sum, and with whom.

    Raises:
        DataError: a file holds something else than a key.
    """
    key, peers = party.beside(party.identity.key), party.beside(party.identity.peers)
    if not key.exists():
        return f"no key; {MAKE_IDENTITY}"
    Identity.kept_at(key)
    pinned = sorted(read_pins(peers, [path.stem for path in peers.glob("*.pub")]))
    return f"key of its own; pinned: {', '.join(pinned) or 'nobody'}"
