"""DP-SGD of a linear classifier on rows that nobody shows, with noise that no one can leave out.

The protocols of PEA (2022), corrected: the inverse of a square root (Protocol 1, on [0.5, 1), with
divisions that are exact to a unit), noise that every holder adds a part of (Protocol 2), and the
step that clips each row's gradient without showing which rows were clipped (Protocol 3). Holders
have rows of their own with the same columns; inputs, labels, gradients and the model stay shares
until the model is revealed. A program is a function of a `Member`; see `vfl.mpc.many_parties`.

The classifier has one logistic output a class, whose curve is a line cut at 0 and 1 (Mohassel and
Zhang 2017, section 5.3), so that a row's gradient is (p - y) x, of norm |p - y| |x|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vfl.core.errors import PrivacyError
from vfl.core.registry import require, require_choice, require_range
from vfl.core.seeds import Secret, generator
from vfl.mpc.many_parties import MOST_HOLDERS, LocalMembers, Member
from vfl.mpc.ring import inner, matmul
from vfl.mpc.shares import SharedTensor
from vfl.privacy import PrivacyStatement
from vfl.privacy.accountants import GaussianSteps, epsilon_of

Form = Literal["polynomial", "permuted"]

#: Fraction bits of an inverse root, which is small where its argument is large.
ROOT_BITS = 30
#: 0.8277 x^2 - 2.046 x + 2.2182 is below 1 / sqrt(x) on [0.5, 1), by 0.01 % to 0.85 % (PEA 2022,
#: Protocol 1, less its offset 0.0048). Coefficients of x', x'^2 with 22 and 44 fraction bits.
_NORMAL_BITS, _SQUARE, _LINEAR, _CONSTANT = 22, 0.8277, -2.046, 2.2182
_POLYNOMIAL_BITS, _POWER_BITS = 26, 24
#: Of a sum of gradients when noise is added to it, and of a step's size.
_SUM_BITS, _RATE_BITS = 24, 20
_LEAST_NOISE = 4 * 2.0**-_SUM_BITS
#: Bits before the point of what comes in; a product of a root and a norm is for the ring to hold.
_MOST_CLIP = 2.0**9
#: Leading ones beyond it have no room to be multiplied.
_MOST_PLACE = 62


def inverse_root(
    member: Member, shared: SharedTensor, form: Form = "polynomial", where: str = "norms"
) -> SharedTensor:
    """1 / sqrt(x) of every element, never above the truth; 30 fraction bits.

    polynomial: by at most 1 % below it for 2^-10 to 2^20; nobody learns anything. 14 rounds.
    permuted: below it by one unit; two messages, and the dealer sees the multiset of x.

    Args:
        member: this party.
        shared: of at least 0; of 0 the result is 0, or a unit less.
        form: see above.
        where: what x is, for the account of what the dealer saw.
    """
    require_choice("form", form, ("polynomial", "permuted"))
    if form == "permuted":
        return member.apply(shared, _below_inverse_root, where, ROOT_BITS)
    places = range(_MOST_PLACE + 1)
    # With the leading one at place p, x = x' 2^(p + 1 - bits): shifted up it fills 63 bits.
    leading = member.numbers_of(member.highest_bit(member.bits_of(shared)), places)
    factors = [1 << (_MOST_PLACE - place) for place in places]
    powers = [math.floor(2.0 ** ((shared.bits - place - 1) / 2 + _POWER_BITS)) for place in places]
    filled = member.multiply(_weighted(leading, factors), shared.alone())
    normal = member.divide(
        SharedTensor(filled.share, _MOST_PLACE + 1), _MOST_PLACE + 1 - _NORMAL_BITS, positive=True
    )
    (normal,) = member.open(normal)
    square = member.multiply(normal, normal)  # 44 bits, so its factor has 16 and the sum 60
    sum_bits = 2 * _NORMAL_BITS + 16
    share = square.share * math.floor(_SQUARE * 2**16)
    share = share + normal.share * math.floor(_LINEAR * 2.0 ** (sum_bits - _NORMAL_BITS))
    polynomial = member.divide(
        member.public(SharedTensor(share, sum_bits), _CONSTANT), sum_bits - _POLYNOMIAL_BITS
    )
    power = SharedTensor(_weighted(leading, powers).share, _POWER_BITS)
    found = member.multiply(polynomial, power)
    return member.divide(found, found.bits - ROOT_BITS, below=True)


def _weighted(bits: SharedTensor, weights: Sequence[int]) -> SharedTensor:
    """The sum of shared bits times public numbers; the bits' first axis is summed."""
    column = torch.tensor(weights).reshape(-1, *[1] * (bits.share.dim() - 1))
    return SharedTensor((bits.share * column).sum(0), 0)


def _below_inverse_root(values: Tensor) -> Tensor:
    found = torch.where(values > 0, values.rsqrt(), 0.0)
    return (found * 2.0**ROOT_BITS).floor() * 2.0**-ROOT_BITS


def noise_share(
    member: Member, shape: Sequence[int], deviation: float, secret: Secret, bits: int
) -> SharedTensor:
    """Noise of which every holder adds a part that nobody else knows (PEA 2022, Protocol 2).

    Each part is a discrete Gaussian of variance 3 / (2 m) of the wanted one: what all leave is 1.5
    times that, and what is left without a third of the holders is no less than it. No message.

    Args:
        member: this party.
        shape: axes of the noise.
        deviation: the wanted one.
        secret: this holder's own; a purpose of it is drawn from once.
        bits: fraction bits of the noise.
    """
    number = member.next_number()
    count = math.prod(shape)
    if member.deals:
        return member.own(torch.zeros(tuple(shape), dtype=torch.int64), bits)
    part = deviation * math.sqrt(1.5 / member.holders) * 2.0**bits
    draws = secret.discrete_normal(count, part, "secure noise", number)
    return member.own(torch.from_numpy(draws).reshape(tuple(shape)), bits)


@dataclass(frozen=True, slots=True)
class SecureSgd:
    """Terms of a training, which all parties have alike.

    Attributes:
        rows: of each holder.
        columns: of every row.
        classes: labels are 0 to classes - 1.
        steps: how many.
        batch_size: rows of a batch on average; each row is in it or not by itself (Poisson).
        learning_rate: of the mean gradient.
        clip: bound of a row's gradient.
        noise: deviation of the noise over `clip`, that a third of the holders cannot take away.
        longest: bound of a row's norm; its owner scales a longer one down.
        form: see `inverse_root`.
        seed: of the batches, which all parties know.
    """

    rows: tuple[int, ...]
    columns: int
    classes: int
    steps: int
    batch_size: int
    learning_rate: float
    clip: float
    noise: float
    longest: float = 8.0
    form: Form = "polynomial"
    seed: int = 0

    def __post_init__(self) -> None:
        require_range("holders", len(self.rows), 2, MOST_HOLDERS)
        require_range("classes", self.classes, 2)
        require_range("batch_size", self.batch_size, 1, sum(self.rows))
        require("clip", self.clip, f"above 0, at most {_MOST_CLIP:g}", 0 < self.clip <= _MOST_CLIP)
        require("noise", self.noise, "above 0", 0 < self.noise < math.inf)
        require("longest", self.longest, "1 to 256", 1 <= self.longest <= 256)
        require_choice("form", self.form, ("polynomial", "permuted"))
        if self.bound <= 0:
            raise PrivacyError(
                "the clip norm is below what rounding may add to a row's gradient",
                got=f"{self.clip:g}",
                want=f"above {self.clip - self.bound:.2g}",
                fix="a larger clip, or fewer columns",
            )
        deviation, most = self.clip * self.noise, 2.0 ** (40 - _SUM_BITS)
        wanted = f"{_LEAST_NOISE:.2g} to {most:g}, as whole numbers of 2^-{_SUM_BITS}"
        require("clip times noise", deviation, wanted, _LEAST_NOISE <= deviation <= most)

    @property
    def bound(self) -> float:
        """What a row's gradient is scaled to: `clip` less all that rounding may add to it."""
        weights = (self.columns + 1) * self.classes
        rounding = math.sqrt(self.classes) * 2.0**-20 * (self.longest + 1)
        return self.clip - rounding - math.sqrt(weights) * 2.0**-_SUM_BITS

    def batch(self, step: int) -> Tensor:
        """Row numbers of a step, in the order of the holders; maybe none."""
        rows = sum(self.rows)
        draws = torch.rand(rows, generator=generator(self.seed, "secure batch", step))
        return torch.nonzero(draws < self.batch_size / rows)[:, 0]

    def statement(self, delta: float) -> PrivacyStatement:
        """What the revealed model promises to rows, whoever sees it and is no party."""
        rate = self.batch_size / sum(self.rows)
        spent = GaussianSteps(self.noise, self.steps, rate)
        return PrivacyStatement(
            "records",
            "whoever sees the model and did not take part",
            epsilon=epsilon_of(spent, delta),
            delta=delta,
            unit="record",
            relation="add or remove",
            adversary="outsider with the model",
            accountant="rdp",
            assumes=(
                "the holders follow the protocol, the dealer tells none of them what it deals",
                f"at most {len(self.rows) // 3} of {len(self.rows)} leave their noise out",
                "nobody outside knows which rows were in which batch",
            ),
        )


def train(
    member: Member, terms: SecureSgd, own: tuple[Tensor, Tensor] | None, secret: Secret
) -> Tensor | None:
    """The weights at every holder, axes (columns + 1, classes), the last row the biases.

    Args:
        member: this party.
        terms: the same at all.
        own: a holder's rows, axes (rows, columns), and labels, axes (rows,); None at the dealer.
        secret: this holder's own, for its part of the noise; never used for another training.

    Returns:
        float64; None at the dealer.
    """
    inputs, truth, squares = _shared_rows(member, terms, own)
    zeros = torch.zeros(terms.columns + 1, terms.classes, dtype=torch.int64)
    weights = member.own(zeros, member.bits)
    for step in range(terms.steps):
        batch = terms.batch(step)
        total = _clipped_sum(
            member, terms, weights, inputs.rows(batch), truth.rows(batch), squares.rows(batch)
        )
        total = total.plus(
            noise_share(member, weights.shape, terms.clip * terms.noise, secret, _SUM_BITS)
        )
        rate = round(terms.learning_rate / terms.batch_size * 2**_RATE_BITS)
        moved = member.divide(
            SharedTensor(total.share * rate, _SUM_BITS + _RATE_BITS),
            _SUM_BITS + _RATE_BITS - member.bits,
        )
        weights = weights.minus(moved)
    return member.reveal(weights, "model")


def _shared_rows(
    member: Member, terms: SecureSgd, own: tuple[Tensor, Tensor] | None
) -> tuple[SharedTensor, SharedTensor, SharedTensor]:
    """All holders' inputs with a column of ones, opened; one-hot labels; squares of norms."""
    parts: list[list[SharedTensor]] = [[], [], []]
    for owner, rows in enumerate(terms.rows):
        shapes = (rows, terms.columns + 1), (rows, terms.classes), (rows, 1)
        values: Sequence[Tensor | None] = [None] * 3
        if owner == member.role:
            assert own is not None, "a holder has rows"
            values = prepared(terms, *own)
        for kind, (shape, value) in enumerate(zip(shapes, values, strict=True)):
            parts[kind].append(member.share(owner, shape, value, f"rows of P{owner}"))
    inputs, truth, squares = (
        SharedTensor(torch.cat([each.share for each in kind]), member.bits) for kind in parts
    )
    return member.open(inputs)[0], truth, squares


def prepared(terms: SecureSgd, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """A holder's rows as they are shared: not too long, with a one; labels one-hot; norms^2."""
    norms = inputs.double().norm(dim=1, keepdim=True)
    short = inputs.double() * (terms.longest / norms.clamp_min(terms.longest))
    rows = torch.cat([short, torch.ones(len(short), 1, dtype=torch.float64)], 1)
    truth = torch.nn.functional.one_hot(labels.long(), terms.classes).double()
    # The norm of what is shared, which rounding may make longer.
    return [rows, truth, rows.norm(dim=1, keepdim=True).add(2.0**-10).square()]


def _clipped_sum(
    member: Member,
    terms: SecureSgd,
    weights: SharedTensor,
    inputs: SharedTensor,
    truth: SharedTensor,
    squares: SharedTensor,
) -> SharedTensor:
    """The sum of the rows' gradients, each scaled to the bound if it is longer; 24 bits."""
    bits = member.bits
    if not len(inputs.share):
        return member.own(torch.zeros(weights.shape, dtype=torch.int64), _SUM_BITS)
    logits = member.divide(member.multiply(inputs, weights.alone(), matmul), bits)
    errors = _cut_line(member, logits).minus(truth)
    (errors,) = member.open(errors)
    lengths = member.divide(member.multiply(errors, errors), bits)
    lengths = SharedTensor(lengths.share.sum(1, keepdim=True), bits)
    lengths = member.divide(member.multiply(lengths, squares), bits)
    factors = _scales(member, inverse_root(member, lengths, terms.form), terms.bound)
    scaled = member.divide(member.multiply(errors, factors), bits)
    found = member.multiply(inputs, scaled, inner)
    return member.divide(found, found.bits - _SUM_BITS)


def _cut_line(member: Member, logits: SharedTensor) -> SharedTensor:
    """Z / 4 + 1 / 2, at least 0 and at most 1."""
    line = member.public(SharedTensor(logits.share, logits.bits + 2), 0.5)
    line = member.divide(line, 2)
    both = torch.stack([line.share, member.public(line, 1.0, -1).share])
    outside = member.is_negative(SharedTensor(both, line.bits))
    low, high = outside.share.unbind()
    inside = member.public(SharedTensor(-low - high, 0), 1.0)
    kept = member.multiply(line, inside)
    return SharedTensor(kept.share + (high << kept.bits), kept.bits)


def _scales(member: Member, roots: SharedTensor, bound: float) -> SharedTensor:
    """min(1, bound / norm), rounded down."""
    quotient = SharedTensor(roots.share * math.floor(bound * 2**10), roots.bits + 10)
    quotient = member.divide(quotient, quotient.bits - ROOT_BITS, below=True)
    excess = member.public(quotient, -1.0)
    shorter = member.is_negative(excess)
    kept = member.public(member.multiply(excess, shorter), 1.0)
    return member.divide(kept, kept.bits - member.bits, below=True)


def train_here(terms: SecureSgd, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """All holders and the dealer as threads of this process, which protects nobody.

    Args:
        terms: see `SecureSgd`.
        parts: of each holder, inputs and labels; see `train`.

    Returns:
        The weights, as each holder has them; see `train`.
    """
    own = [*parts, None]
    secrets = [Secret.fresh() for _ in own]
    with LocalMembers(len(parts), terms=record(terms)) as members:
        found = members.run(lambda m: train(m, terms, own[m.role], secrets[m.role]))
    assert found[0] is not None, "a holder has the model"
    return found[0]


def record(terms: SecureSgd) -> Mapping[str, Any]:
    """The terms as plain values, for parties to compare."""
    return asdict(terms)
