"""Names of roles, and the rules on which three parties agree before they start."""

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
#: Smallest number of values in a permutation; dummies (false values) fill smaller groups.
LEAST_PERMUTED = 32
_BITS = {"thesis": 23, "fast": 21}
#: With 21 or more fraction bits, sending only 40 bits of a permuted share causes an error of at
#: most 4e-6. Each fraction bit less multiplies this error by 4, so that it soon exceeds the
#: rounding error of the fraction bits.
_LEAST_CUT_BITS = 21
#: A truncated value is exact to one unit if its magnitude is below 2 to the power of this number
#: (bits).
_MAGNITUDE_BITS = 8
#: Dummies, which have standard deviation 2 (`vfl.mpc.permuted`), stay below 2 to the power of this
#: number; with fewer bits, P2 would refuse some dummies as out of range. One normal number in 10^15
#: lies beyond 8 standard deviations.
LEAST_MAGNITUDE_BITS = 4
#: Largest number of bits of a product, fraction bits included; with more bits, the ring has too few
#: spare bits to move shares.
_PRODUCT_BITS = 60
#: Margin, in bits, between the largest accepted number and the ring's limit. A sum that wrapped
#: around looks like a random number; only one random number in 128 lies within the accepted range.
_SPARE_BITS = 7


def name_of(role: int) -> str:
    """Return the name of a role's party, for messages and traffic counts.

    >>> name_of(4)
    'P4'
    """
    return f"P{role}"


@dataclass(frozen=True, slots=True)
class Rules:
    """The terms of one computation on shares.

    Attributes:
        mode: "thesis" is the protocol of chapter 5 as the thesis prints it, with errors in print
            corrected. "fast" opens each tensor only once, in all directions at the same time. Fast
            mode sends P2 products that are not yet divided, and sends only 40 bits of permuted
            shares (64 if `bits` is below 21, or for functions of positive numbers). In training,
            fast mode also requests a function's value and its derivative together.
        bits: number of fraction bits of shared values; 0 stands for 21 in fast mode, and 23 in
            thesis mode.
        magnitude_bits: values that the parties truncate must be below 2 to the power of this number
            in magnitude; see `Truncation`. The limit also holds for every sum of a layer in thesis
            mode, and in training for sums before a function without bounds. The number is at least
            4, so that dummies (false values) fit.
        delta_bits: number of fraction bits of activation gradients; a small number keeps sums over
            a batch below the ring's limit, and lists of indices near the wrap-around short.
        least_permuted: smallest size of a permuted group; dummies (false values) fill smaller
            groups.
        flips: whether permuted values carry random signs, for functions f whose f(-x) follows from
            f(x); None stands for yes in fast mode, and no in thesis mode.
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
        """Return the largest `magnitude_bits` that this number of fraction bits allows."""
        return _PRODUCT_BITS - 2 * self.bits

    @property
    def sum_bits(self) -> int:
        """Bits before the binary point; a sum within them has very probably not wrapped around."""
        return max(self.magnitude_bits, limit_bits(self.bits) - _SPARE_BITS)

    @property
    def sends_40_bits(self) -> bool:
        """Return whether P2 receives only 40 bits of a permuted share.

        A function that needs 64 bits is an exception.
        """
        return self.mode == "fast" and self.bits >= _LEAST_CUT_BITS

    def zmax_bits(self, bits: int) -> int:
        """Return the bits of the largest product to truncate; `bits` of these are fraction bits."""
        return bits + self.magnitude_bits

    def record(self) -> dict[str, str | int | bool]:
        """Return the terms as plain values for a record."""
        return asdict(self)
