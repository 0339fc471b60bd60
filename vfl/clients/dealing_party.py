"""A party without data that only deals what shared first layers need."""

from __future__ import annotations

from vfl.errors import ConsentError
from vfl.exchange import DealerHalf
from vfl.frame import Kind
from vfl.link import Link
from vfl.session import Terms
from vfl.session.schedule import QUERY_ROWS


class DealingParty:
    """Plays the dealer of a session; it learns how many rows exchanges have, and columns layers.

    Args:
        half: its end of the stream to the label party.
    """

    def __init__(self, half: DealerHalf) -> None:
        self.half = half

    @property
    def name(self) -> str:
        """The party's name."""
        return self.half.party

    def answer(self) -> bool:
        """Deal for the exchange that is asked for next; False when the session is over."""
        return self.half.deal().kind is not Kind.DONE

    def run(self, most_bytes: int) -> None:
        """Deal until the label party says that the session is over.

        Args:
            most_bytes: how many it may send.

        Raises:
            ConsentError: it has sent more.
        """
        while self.answer():
            if self.half.sent_bytes > most_bytes:
                raise ConsentError(
                    f"party '{self.name}' does not consent to deal any further",
                    got=f"{self.half.sent_bytes} bytes",
                    want=f"bytes <= {most_bytes}",
                    fix="a shorter session, or a larger max_bytes in the [consent] of its own file",
                )


def build_dealing_party(terms: Terms, link: Link) -> DealingParty:
    """The dealer of a session in which a third party deals.

    Args:
        terms: the session's terms.
        link: the stream to the label party.
    """
    assert terms.dealer is not None, "a third party deals"
    owners = {name: terms.parties[name].width for name in terms.feature_parties}
    most_rows = max(terms.train.batch_rows, QUERY_ROWS)
    return DealingParty(DealerHalf(terms.dealer, owners, link, most_rows))
