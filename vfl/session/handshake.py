"""The handshake: a party introduces itself; the label party compares before step 0.

Rows are compared by counts and by a digest of their order, keyed with the session; never by ids.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from vfl.config.experiment import PartyName
from vfl.config.toml import Settings
from vfl.datasets import PartyData
from vfl.errors import DisagreementError, MisalignedError, ProtocolError
from vfl.session.peer_version import check_version
from vfl.session.terms import SHORT, Terms
from vfl.version import VERSION

_HEX = r"^[0-9a-f]{64}$"
Short = Annotated[str, StringConstraints(max_length=SHORT, pattern=r"^[ -~]*$")]
_NAMED = 4


class Introduction(Settings):
    """What a feature party says of itself when it attaches.

    Attributes:
        terms: digest of the terms it was sent.
        settings: those terms as short texts, so that a difference has a name.
        row_order: digest of its rows' order, keyed with the session.
    """

    party: PartyName
    version: str = Field(max_length=32, pattern=r"^[ -~]+$")
    terms: str = Field(pattern=_HEX)
    settings: dict[Short, Short] = Field(max_length=64)
    rows: int = Field(ge=0, lt=2**40)
    row_order: str = Field(pattern=_HEX)

    @classmethod
    def of(cls, data: PartyData, terms: Terms, session: str) -> Introduction:
        """The introduction of a party that holds `data`."""
        return cls(
            party=data.name,
            version=VERSION,
            terms=terms.digest(),
            settings=terms.settings(),
            rows=data.rows,
            row_order=data.row_digest(session),
        )

    @classmethod
    def of_dealer(cls, party: str, terms: Terms) -> Introduction:
        """The introduction of a third party that deals and has no rows."""
        return cls(
            party=party,
            version=VERSION,
            terms=terms.digest(),
            settings=terms.settings(),
            rows=0,
            row_order="0" * 64,
        )

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Introduction:
        """Read an introduction from the stream.

        Raises:
            DisagreementError: another version of vfl wrote it.
            ProtocolError: it has another form.
        """
        try:
            return cls.model_validate(content)
        except ValidationError:
            check_version(content.get("version"), "a feature party")
            raise ProtocolError("a party introduced itself in an unknown form") from None


def check_introduction(
    introduction: Introduction, terms: Terms, own: PartyData, session: str
) -> None:
    """Compare a feature party with the label party's own view of the session.

    Raises:
        DisagreementError: unknown party, other terms or another version of vfl.
        MisalignedError: other rows, or the same rows in another order.
    """
    party = introduction.party
    if party not in terms.peers:
        raise DisagreementError(
            f"party '{party}' is not part of this experiment",
            got=party,
            want=", ".join(terms.peers),
            fix="use the names of the experiment's [parties] in the party files",
        )
    check_version(introduction.version, f"party '{party}'")
    if introduction.terms != terms.digest():
        raise _other_experiment(introduction, terms)
    if party == terms.dealer:
        return  # it has no rows
    if introduction.rows != own.rows:
        raise MisalignedError(
            f"the tables of '{party}' and '{own.name}' have different rows",
            where="handshake",
            got=f"'{party}': {introduction.rows} rows, '{own.name}': {own.rows} rows",
            want="the same ids at every party",
            fix="keep only the ids all parties share, for example after a private set intersection",
        )
    if not hmac.compare_digest(introduction.row_order, own.row_digest(session)):
        raise MisalignedError(
            f"the tables of '{party}' and '{own.name}' hold different ids",
            where="handshake",
            got=f"{introduction.rows} rows at both, but another digest of their ids",
            want="the same ids, written the same way, at every party",
            fix="check the id column's type, and keep only the ids all parties share",
        )


def _other_experiment(introduction: Introduction, terms: Terms) -> DisagreementError:
    """Names the settings that differ, theirs and ours; both sides know all of them."""
    ours, theirs = terms.settings(), introduction.settings
    differing = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    digests = f"{terms.digest()[:8]}... here, {introduction.terms[:8]}... there"
    return DisagreementError(
        f"party '{introduction.party}' runs another experiment",
        where="handshake",
        got=_named(theirs, differing),
        want=_named(ours, differing),
        fix=f"send both sides the same experiment: terms {digests}",
    )


def _named(settings: Mapping[str, str], differing: Sequence[str]) -> str:
    named = [f"{name} {settings.get(name, 'not set')}" for name in differing[:_NAMED]]
    more = len(differing) - len(named)
    return ", ".join(named) + (f", and {more} more" if more else "")
