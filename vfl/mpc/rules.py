"""Rules that three parties agree on before they start: the mode, and derived settings."""

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
#: A permutation of fewer values than this does not hide them.
LEAST_PERMUTED = 32
_BITS = {"thesis": 23, "fast": 21}
#: With 21 bits, the 40 bits of a permuted share cause an error of at most 4e-6. Each bit less
#: multiplies it by 4, and it soon exceeds the error of the fraction itself.
_LEAST_CUT_BITS = 21
#: A truncated value below this many bits before the point is exact within one unit.
_MAGNITUDE_BITS = 8
#: Dummies of deviation 2 (`vfl.mpc.permuted`) stay within this bound; otherwise P2 would refuse
#: them as out of range. One normal number in 10^15 lies beyond 8 deviations.
LEAST_MAGNITUDE_BITS = 4
#: Largest number of bits of a product with its fraction; beyond that the ring has no room to shift
#: shares.
_PRODUCT_BITS = 60
#: A wrapped sum may look like any number; one in 128 is this many bits below the limit.
_SPARE_BITS = 7


def name_of(role: int) -> str:
    """Return a party's name for messages and accounts, for three or more parties.

    >>> name_of(4)
    'P4'
    """
    return f"P{role}"


@dataclass(frozen=True, slots=True)
class Rules:
    """Terms of one computation on shares.

    Attributes:
        mode: "thesis" is chapter 5 as written, with its errors corrected. "fast" opens each tensor
            once and both ways at the same time. It keeps the scale of products sent to P2, sends 40
            bits of permuted shares (64 if `bits` is below 21), and requests value and slope
            together.
        bits: fraction bits of shared values.
        magnitude_bits: truncated values must be below 2 to this number; see `Truncation`. So must
            the values of networks that parties share. At least 4, for the dummies.
        delta_bits: fraction bits of activation gradients; a small number keeps sums over a batch
            small in the ring and index lists short.
        least_permuted: smaller groups of elements are hidden among dummies.
        flips: whether permuted values carry random signs, for functions that allow them.
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
        """Largest `magnitude_bits` with this many fraction bits."""
        return _PRODUCT_BITS - 2 * self.bits

    @property
    def sum_bits(self) -> int:
        """Bits before the point of a sum of products that has very probably not wrapped."""
        return max(self.magnitude_bits, limit_bits(self.bits) - _SPARE_BITS)

    @property
    def sends_40_bits(self) -> bool:
        """Return whether P2 gets 40 bits of a permuted share, if functions need no more."""
        return self.mode == "fast" and self.bits >= _LEAST_CUT_BITS

    def zmax_bits(self, bits: int) -> int:
        """Return the bits of the largest product that is safe to truncate; `bits`: its fraction."""
        return bits + self.magnitude_bits

    def record(self) -> dict[str, str | int | bool]:
        """Return the terms as plain values."""
        return asdict(self)
