"""What the parties learn of each other, by name: ``secure = "none"``, ``"sum"`` or ``"beaver"``."""

from __future__ import annotations

from vfl.mpc.masked_sum import Ring
from vfl.mpc.shared_layer import OUTPUT_BITS
from vfl.registry import Registry


class SecureMode:
    """How the parties' cuts come together at the label party."""

    def ring(self, parties: int) -> Ring | None:
        """The ring in which the cuts of so many feature parties are summed; None if in no ring."""
        raise NotImplementedError

    def dealer(self, label_party: str) -> str | None:
        """Who deals what first layers are shared with; None where nobody shares."""
        return None

    def third_party(self, label_party: str) -> str | None:
        """Who deals and does nothing else; None where the label party deals, or nobody does."""
        dealer = self.dealer(label_party)
        return None if dealer == label_party else dealer


class Plain(SecureMode):
    """The label party sees every cut."""

    def ring(self, parties: int) -> Ring | None:
        return None


class MaskedSum(SecureMode):
    """The label party sees the sum of the cuts alone: every party adds masks that cancel out.

    Args:
        bits: of a value on the wire: 8, 16 or 32.
        fraction: of these, how many stand behind the point; 16 of 32 unless given, 8 of 16, 3 of 8.
            A value is exact to 2^-(fraction + 1).

    >>> MaskedSum(bits=8).ring(parties=2).reach
    7.875
    """

    def __init__(self, bits: int = 32, fraction: int | None = None) -> None:
        self._bits = bits
        self._fraction = fraction
        self.ring(parties=1)  # refuses options that make no ring

    def ring(self, parties: int) -> Ring:
        return Ring.of(self._bits, self._fraction, parties)


class Beaver(SecureMode):
    """The label party sees the sum alone, and no party has the weights of a first layer.

    Args:
        dealer: name of the party that deals what is random; the label party unless given. With
            another one, which has no data, the label party holds the other share of each layer.

    >>> Beaver().dealer("lender"), Beaver(dealer="notary").third_party("lender")
    ('lender', 'notary')
    """

    def __init__(self, dealer: str | None = None) -> None:
        self._dealer = dealer

    def ring(self, parties: int) -> Ring:
        return Ring(64, OUTPUT_BITS, parties=1)  # shares of the sum: none has a bound of its own

    def dealer(self, label_party: str) -> str:
        return self._dealer or label_party


SECURE: Registry[SecureMode] = Registry(
    kind="secure mode",
    contract=SecureMode,
    members={
        "none": "vfl.mpc.secure:Plain",
        "sum": "vfl.mpc.secure:MaskedSum",
        "beaver": "vfl.mpc.secure:Beaver",
    },
    group="vfl.secure",
)


def make(spec: str) -> SecureMode:
    """The mode a spec names.

    Raises:
        SpecError: an unknown name or option, with the nearest known one.
    """
    return SECURE.make(spec)
