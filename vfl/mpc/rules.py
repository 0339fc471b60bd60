"""What the three parties agree on before they begin: the mode, and what follows from it."""

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
#: Fewer values than this are not hidden by an order among them.
LEAST_PERMUTED = 32
_BITS = {"thesis": 23, "fast": 21}
#: With 21 bits the 40 bits of a permuted share cost an error of at most 4e-6; with fewer 4 times
#: that a bit, which soon is more than the fraction's own error.
_LEAST_CUT_BITS = 21
#: A truncated value below this many bits before the point is exact within one unit.
_MAGNITUDE_BITS = 8
#: Dummies of deviation 2 (`vfl.mpc.permuted`) stay within, or P2 would refuse them as out of range:
#: beyond 8 deviations is one normal number of 10^15.
LEAST_MAGNITUDE_BITS = 4
#: Of a product with its fraction; beyond it there is no room to move shares in.
_PRODUCT_BITS = 60
#: A sum that has wrapped looks like any number; that many bits below the limit one in 128 does.
_SPARE_BITS = 7


def name_of(role: int) -> str:
    """What messages and accounts call a party, of three or of more.

    >>> name_of(4)
    'P4'
    """
    return f"P{role}"


@dataclass(frozen=True, slots=True)
class Rules:
    """Terms of one computation.

    Attributes:
        mode: "thesis" is chapter 5 as written, with its errors mended; "fast" opens each tensor
            once and both ways at the same time, keeps the scale of products that go to P2, sends
            40 bits of permuted shares (64 where `bits` is below 21) and asks for value and slope
            together.
        bits: fraction bits of shared values.
        magnitude_bits: values that are truncated are smaller than 2 to this; see `Truncation`. What
            parties share of networks must be too. At least 4, for the dummies.
        delta_bits: fraction bits of gradients of activations; few of them keep sums over a batch
            small in the ring, and the index lists short.
        least_permuted: fewer elements than this are hidden among dummies.
        flips: random signs under permuted values, for functions that allow them.
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
                "products of so many bits do not fit the ring",
                where="option 'magnitude_bits'",
                got=f"{self.magnitude_bits} above twice {self.bits} fraction bits",
                want=f"at most {_PRODUCT_BITS} together",
            )

    @property
    def most_magnitude_bits(self) -> int:
        """The largest `magnitude_bits` with so many fraction bits."""
        return _PRODUCT_BITS - 2 * self.bits

    @property
    def sum_bits(self) -> int:
        """Bits before the point that a sum of products may have, and has probably not wrapped."""
        return max(self.magnitude_bits, limit_bits(self.bits) - _SPARE_BITS)

    @property
    def sends_40_bits(self) -> bool:
        """Whether P2 hears 40 bits of a permuted share, where a function can do with them."""
        return self.mode == "fast" and self.bits >= _LEAST_CUT_BITS

    def zmax_bits(self, bits: int) -> int:
        """Bits of the largest product that is truncated safely; `bits` are of its fraction."""
        return bits + self.magnitude_bits

    def record(self) -> dict[str, str | int | bool]:
        """The terms as plain values."""
        return asdict(self)
