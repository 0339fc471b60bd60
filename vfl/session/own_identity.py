"""The keys a feature party brings to a secure sum, from its own file."""

from __future__ import annotations

from vfl.config import PartyFile
from vfl.mpc.agreement import Agreement, Binding
from vfl.mpc.identity import Identity, read_pins
from vfl.session.terms import Terms


def binding_of(terms: Terms, session: str, attempt: int) -> Binding:
    """What the keys of one attempt are bound to."""
    return Binding(session, attempt, terms.digest(), tuple(terms.feature_parties))


def own_agreement(party: PartyFile, terms: Terms, session: str, attempt: int) -> Agreement:
    """This party's side of an agreement, with its identity key and the keys it has pinned.

    Raises:
        MissingDataError, DataError: one of the files is missing or holds something else.
    """
    others = [name for name in terms.feature_parties if name != party.party]
    return Agreement(
        party.party,
        Identity.kept_at(party.beside(party.identity.key)),
        read_pins(party.beside(party.identity.peers), others),
        binding_of(terms, session, attempt),
    )
