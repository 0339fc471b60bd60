"""Rules that three parties agree on before they start: mode and number format."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice, require_range
from vfl.mpc.ring import limit_bits

Mode = Literal["thesis", "fast"]
MODES = ("thesis", "fast")
P0, P1, P2 = 0, 1, 2
HOLDERS = (P0, P1)
NAMES = ("P0", "P1", "P2")
#: Least number of values in a permutation; smaller groups get dummies.
LEAST_PERMUTED = 32
_BITS = {"thesis": 23, "fast": 21}
#: From 21 fraction bits on, sending only 40 bits of a permuted share causes an error of at most
#: 4e-6. Each fraction bit less multiplies this error by 4, and it soon exceeds the rounding error
#: of the fraction.
_LEAST_CUT_BITS = 21
#: A truncated value is exact to one unit if its magnitude is below 2 to the power of this number.
_MAGNITUDE_BITS = 8
#: Dummies with standard deviation 2 (`vfl.mpc.permuted`) stay below 2 to the power of this number;
#: with fewer bits, P2 would refuse some dummies as out of range. One normal number in 10^15 lies
#: beyond 8 standard deviations.
LEAST_MAGNITUDE_BITS = 4
#: Largest number of bits of a product, fraction included; with more bits, the ring has no room to
#: move shares.
_PRODUCT_BITS = 60
#: Margin in bits below the ring's limit. A sum that wrapped around looks like a random number; only
#: one random number in 128 lies below the margin.
_SPARE_BITS = 7


def name_of(role: int) -> str:
    """Return the name of a party by its role, for messages and traffic counts.

    >>> name_of(4)
    'P4'
    """
    return f"P{role}"


@dataclass(frozen=True, slots=True)
class Rules:
    """Terms of one computation on shares.

    Attributes:
        mode: "thesis" is the protocol of chapter 5 as printed, with its errors corrected. "fast"
            opens each tensor only once, in both directions at the same time. Fast mode sends
            products to P2 without dividing them first, and sends 40 bits of permuted shares (64 if
            `bits` is below 21). Fast mode requests a function's value and slope together.
        bits: number of fraction bits of shared values.
        magnitude_bits: truncated values must be below 2 to the power of this number in magnitude;
            see `Truncation`. Values that networks in shared form compute must be below this limit,
            too. The number is at least 4, so that dummies fit.
        delta_bits: number of fraction bits of activation gradients; a small number keeps sums over
            a batch below the ring's limit, and index lists short.
        least_permuted: groups with fewer elements than this are hidden among dummies.
        flips: whether permuted values carry random signs, for functions with a symmetry.
    """

    mode: Mode = "fast"
    bits: int = 0
    magnitude_bits: int = _MAGNITUDE_BITS
    delta_bits: int = 16
    least_permuted: int = LEAST_PERMUTED
    flips: bool | None = None

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        if not self.bits:
            object.__setattr__(self, "bits", _BITS[self.mode])
        if self.flips is None:
            object.__setattr__(self, "flips", self.mode == "fast")
        require_range("bits", self.bits, 8, 28)
        require_range("delta_bits", self.delta_bits, 4, self.bits)
        require_range("least_permuted", self.least_permuted, 1)
        require_range("magnitude_bits", self.magnitude_bits, LEAST_MAGNITUDE_BITS)
        if self.magnitude_bits > self.most_magnitude_bits:
            raise BadOptionError(
                "products have more bits than the ring",
                where="option 'magnitude_bits'",
                got=f"{self.magnitude_bits} above twice {self.bits} fraction bits",
                want=f"at most {_PRODUCT_BITS} together",
            )

    @property
    def most_magnitude_bits(self) -> int:
        """Return the largest `magnitude_bits` with this many fraction bits."""
        return _PRODUCT_BITS - 2 * self.bits

    @property
    def sum_bits(self) -> int:
        """Bits before the point; a sum within them has very probably not wrapped around."""
        return max(self.magnitude_bits, limit_bits(self.bits) - _SPARE_BITS)

    @property
    def sends_40_bits(self) -> bool:
        """Return whether P2 gets only 40 bits of a permuted share, unless the function needs 64."""
        return self.mode == "fast" and self.bits >= _LEAST_CUT_BITS

    def zmax_bits(self, bits: int) -> int:
        """Return the bits of the largest product to truncate, of which `bits` are fraction bits."""
        return bits + self.magnitude_bits

    def record(self) -> dict[str, str | int | bool]:
        """Return the terms as plain values."""
        return asdict(self)
