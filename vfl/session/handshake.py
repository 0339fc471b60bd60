"""The handshake: a feature party introduces itself; the label party compares before step 0.

Rows are compared by counts and by a digest of their order, keyed with the session; never by ids.
"""

from __future__ import annotations

import hmac
from typing import Any

from pydantic import Field, ValidationError

from vfl.config.toml import Settings
from vfl.datasets import PartyData
from vfl.errors import DisagreementError, MisalignedError, ProtocolError
from vfl.session.terms import Terms
from vfl.version import VERSION

_HEX = r"^[0-9a-f]{64}$"


class Introduction(Settings):
    """What a feature party says of itself when it attaches."""

    party: str = Field(max_length=32)
    version: str = Field(max_length=32)
    terms: str = Field(pattern=_HEX)
    rows: int = Field(ge=0)
    row_order: str = Field(pattern=_HEX)

    @classmethod
    def of(cls, data: PartyData, terms: Terms, session: str) -> Introduction:
        """The introduction of a party that holds `data`."""
        return cls(
            party=data.name,
            version=VERSION,
            terms=terms.digest(),
            rows=data.rows,
            row_order=data.row_digest(session),
        )

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Introduction:
        """Read an introduction from the stream.

        Raises:
            ProtocolError: it has another form.
        """
        try:
            return cls.model_validate(content)
        except ValidationError:
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
    if party not in terms.feature_parties:
        raise DisagreementError(
            f"party '{party}' is not part of this experiment",
            got=party,
            want=", ".join(terms.feature_parties),
            fix="use the names of the experiment's [parties] in the party files",
        )
    if introduction.version != VERSION:
        raise DisagreementError(
            f"party '{party}' runs another version of vfl",
            where="handshake",
            got=introduction.version,
            want=VERSION,
        )
    if introduction.terms != terms.digest():
        raise DisagreementError(
            f"party '{party}' runs another experiment",
            where="handshake",
            got=f"terms {introduction.terms[:8]}...",
            want=f"terms {terms.digest()[:8]}...",
        )
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
