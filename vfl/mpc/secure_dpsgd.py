"""DP-SGD of a linear classifier on shared rows, with noise from every holder.

The protocols are those of PEA (2022), with corrections. Protocol 1 computes inverse square roots
(of numbers in [0.5, 1), by divisions that are exact to one unit). In Protocol 2, every holder adds
a part of the noise; the noise suffices even if a third of the holders leave out their parts.
Protocol 3 is a training step; it clips each row's gradient without disclosing which rows' gradients
were clipped. Each holder has its own rows with the same columns, or different columns of the same
rows; inputs, labels, gradients and the model stay secret-shared until the end, when the model is
revealed. A program is a function that receives a `Member`, the object of one party; see
`vfl.mpc.many.members`.

The classifier has one logistic output per class; in place of the logistic curve it uses a straight
line that is limited to the range from 0 to 1 (Mohassel and Zhang 2017, section 5.3). The gradient
of a row x with label y and output p is therefore (p - y) x, whose norm is |p - y| |x|. A training
step takes these rounds of messages:

    rounds
    9       the outputs, limited to 0 and 1: products under masks (Beaver 1991), and signs from the
            carries of a shared mask's bits
    4       each row's norm: the norm of its errors times the norm of its inputs, which their owner
            shares
    14      1 / norm: the norm is shifted to [0.5, 1), where a polynomial is never above the exact
            value (Protocol 1); or two messages, if the dealer inverts permuted norms
    8       longer gradients scaled down to the bound; the sign that selects them is not disclosed
    5       sum, noise and step: each of m holders adds whole numbers from a discrete Gaussian
            (Canonne et al. 2020) with 3 / (2 m) of the requested variance

A division takes a round of messages, because dividing each share locally gives a wrong quotient for
half of all numbers that use the ring's full range. With the dealer's help, the results of divisions
are exact to one unit (Escudero et al. 2020).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vfl.core.errors import PrivacyError
from vfl.core.registry import require, require_choice, require_range
from vfl.core.seeds import SECRET_BYTES, Secret, generator
from vfl.mpc.many.members import MOST_HOLDERS, LocalMembers, Member
from vfl.mpc.ring import inner, matmul
from vfl.mpc.shares import SharedTensor
from vfl.privacy import PrivacyStatement, kernel
from vfl.privacy.accountants import GaussianSteps, epsilon_of
from vfl.privacy.row_gradients import Outer
from vfl.privacy.statement import added

Form = Literal["polynomial", "permuted"]
#: A holder's inputs, axes (rows, columns), and labels, axes (rows,).
Rows = tuple[Tensor, Tensor]

#: Fraction bits of an inverse square root; many are needed, because a large argument has a small
#: inverse root.
ROOT_BITS = 30
#: The polynomial 0.8277 x^2 - 2.046 x + 2.2182 is below 1 / sqrt(x) on [0.5, 1), by 0.01 % to 0.85
#: % of the value. The polynomial is that of PEA 2022, Protocol 1, without the offset 0.0048 that
#: the protocol adds. The argument x', scaled to [0.5, 1), has 22 fraction bits, and its square has
#: 44.
_NORMAL_BITS, _SQUARE, _LINEAR, _CONSTANT = 22, 0.8277, -2.046, 2.2182
_POLYNOMIAL_BITS, _POWER_BITS = 26, 24
#: Largest exponent of the power of two by which the result is multiplied; for arguments below 2^-22
#: the result is therefore too small.
_MOST_POWER = 11
#: Fraction bits of a sum of gradients when noise is added to it, and of the step size (learning
#: rate divided by batch size).
_SUM_BITS, _RATE_BITS = 24, 20
_LEAST_NOISE = 4 * 2.0**-_SUM_BITS
#: Fraction bits of the squared norms of rows and errors.
_SQUARE_BITS = 30
#: Largest sum of gradients, largest step (learning rate times clip norm), and largest squared norm
#: of a row that the ring can represent.
_MOST_SUM, _MOST_STEP, _MOST_SQUARES = 2.0**20, 2.0**16, 2.0**11
_MOST_CLIP = 2.0**9
#: Highest position of a number's leading 1 bit for which a product with the number still fits into
#: the ring.
_MOST_PLACE = 62


def inverse_root(
    member: Member, shared: SharedTensor, form: Form = "polynomial", where: str = "norms"
) -> SharedTensor:
    """Compute 1 / sqrt(x) of every element; the result is never above the exact value.

    The result has 30 fraction bits. "polynomial": the result is at most 1 % below 1 / sqrt(x) for x
    from 2^-10 to 2^20, or from 2^-20 if x has 30 fraction bits; no value is disclosed, and the
    computation takes 14 rounds of messages. "permuted": the result is at most 2^-30 below 1 /
    sqrt(x); the computation takes two messages, and the dealer sees the values of x in an unknown
    order.

    Args:
        member: this party.
        shared: shared values x of at least 0; for 0 the result is 0, or one unit less.
        form: see above.
        where: name of x in the record of values that the dealer saw.
    """
    require_choice("form", form, ("polynomial", "permuted"))
    if form == "permuted":
        return member.apply(shared, _below_inverse_root, where, ROOT_BITS)
    places = range(_MOST_PLACE + 1)
    # If the leading 1 bit is at position p, then x = x' 2^(p + 1 - bits), where x' is x shifted up
    # until it fills 63 bits.
    leading = member.numbers_of(member.highest_bit(member.bits_of(shared)), places)
    factors = [1 << (_MOST_PLACE - place) for place in places]
    powers = [
        math.floor(2.0 ** (min((shared.bits - place - 1) / 2, _MOST_POWER) + _POWER_BITS))
        for place in places
    ]
    filled = member.multiply(_weighted(leading, factors), shared.alone())
    normal = member.divide(
        SharedTensor(filled.share, _MOST_PLACE + 1), _MOST_PLACE + 1 - _NORMAL_BITS, positive=True
    )
    (normal,) = member.open(normal)
    square = member.multiply(normal, normal)  # the square has 44 bits; a factor of 16 bits gives 60
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
    """Return the sum of shared bits times public weights, over the first axis of `bits`."""
    column = torch.tensor(weights).reshape(-1, *[1] * (bits.share.dim() - 1))
    return SharedTensor((bits.share * column).sum(0), 0)


def _below_inverse_root(values: Tensor) -> Tensor:
    found = torch.where(values > 0, values.rsqrt(), 0.0)
    return (found * 2.0**ROOT_BITS).floor() * 2.0**-ROOT_BITS


def noise_share(
    member: Member, shape: Sequence[int], deviation: float, secret: Secret, bits: int
) -> SharedTensor:
    """Draw shared noise: the sum of secret parts, one from each holder (PEA 2022, Protocol 2).

    Each of the m holders' parts is a discrete Gaussian with 3 / (2 m) of the wanted variance. The
    sum of all parts has 1.5 times the wanted variance; if a third of the holders leave their parts
    out, the rest still has at least the wanted variance. No message.

    Args:
        member: this party.
        shape: axes of the noise tensor.
        deviation: wanted standard deviation of the noise.
        secret: this holder's own secret; with one secret, each operation number may be used only
            once.
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
    """Terms of a training on shares, which must be equal at all parties.

    Attributes:
        rows: number of rows of each holder; if all holders have the same rows, all numbers but the
            first are 0.
        columns: number of input columns of every row.
        classes: number of classes; labels are 0 to classes - 1.
        steps: number of training steps.
        batch_size: mean number of rows of a batch; each row is sampled independently (Poisson).
        learning_rate: factor by which the mean gradient is multiplied in a step.
        clip: clip norm of a row's gradient.
        noise: standard deviation of the noise divided by `clip`; even if a third of the holders
            leave out their parts, the noise is not smaller.
        longest: largest norm of a row; the row's owner scales a longer row down to it.
        form: see `inverse_root`.
        seed: public seed of the batches; None draws the batches from a secret key of the parties
            (`agreed_key`). With a public seed, the batches are public, which `statement` takes into
            account.
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
    seed: int | None = None

    def __post_init__(self) -> None:
        require_range("holders", len(self.rows), 2, MOST_HOLDERS)
        require_range("classes", self.classes, 2)
        require_range("batch_size", self.batch_size, 1, sum(self.rows))
        require("clip", self.clip, f"above 0, at most {_MOST_CLIP:g}", 0 < self.clip <= _MOST_CLIP)
        require("noise", self.noise, "above 0", 0 < self.noise < math.inf)
        squares = self.classes * (self.longest + 1.01) ** 2
        wanted = f"at least 1, and {_MOST_SQUARES:g} at most: classes * (longest + 1.01)^2"
        require("longest", self.longest, wanted, self.longest >= 1 and squares <= _MOST_SQUARES)
        total, step = 2 * self.batch_size * self.clip, self.learning_rate * self.clip
        wanted = f"at most {_MOST_SUM:g} with twice the batch size"
        require("clip", self.clip, wanted, total <= _MOST_SUM)
        wanted = f"above 0, at most {_MOST_STEP:g} times clip"
        require("learning_rate", self.learning_rate, wanted, 0 < step <= _MOST_STEP)
        require_choice("form", self.form, ("polynomial", "permuted"))
        if self.bound <= 0:
            raise PrivacyError(
                "the clip norm is below the amount that rounding may add to a row's gradient",
                got=f"{self.clip:g}",
                want=f"above {self.clip - self.bound:.2g}",
                fix="use a larger clip, or fewer columns",
            )
        deviation, most = self.clip * self.noise, 2.0 ** (40 - _SUM_BITS)
        wanted = f"{_LEAST_NOISE:.2g} to {most:g}, as whole numbers of 2^-{_SUM_BITS}"
        require("clip times noise", deviation, wanted, _LEAST_NOISE <= deviation <= most)

    @property
    def bound(self) -> float:
        """Norm to which a row's gradient is scaled: `clip` minus the largest rounding error."""
        weights = (self.columns + 1) * self.classes
        rounding = math.sqrt(self.classes) * 2.0**-20 * (self.longest + 1)
        return self.clip - rounding - math.sqrt(weights) * 2.0**-_SUM_BITS

    @property
    def rate(self) -> float:
        """Probability that a batch contains a given row, for an observer of the model alone."""
        return 1.0 if self.seed is not None else self.batch_size / sum(self.rows)

    def batch(self, step: int, key: Secret | None = None) -> Tensor:
        """Return the positions of a step's rows among the shared rows; there may be no rows.

        Args:
            step: number of the training step, counted from 0.
            key: key of the parties from `agreed_key`; None with a public seed.

        Raises:
            PrivacyError: the call passes neither a key nor a public seed, or passes both of them.
        """
        rows = sum(self.rows)
        if key is not None and self.seed is None:
            draws = torch.from_numpy(key.uniform((rows,), "secure batch", step))
        elif key is None and self.seed is not None:
            draws = torch.rand(rows, generator=generator(self.seed, "secure batch", step))
        else:
            raise PrivacyError(
                "batches need either a key of the parties or a public seed",
                got="neither" if key is None else "both",
                want="agreed_key(member), or SecureSgd(seed=...) whose statement counts it",
            )
        return torch.nonzero(draws < self.batch_size / rows)[:, 0]

    def statement(self, delta: float) -> PrivacyStatement:
        """Return the privacy guarantee of a row against observers of the model who are not parties.

        With a public seed, the guarantee is that of the row that is contained in the largest number
        of batches. The guarantee counts each of these batches as one noisy step, without privacy
        amplification by sampling.
        """
        steps, hidden = self.steps, "no outsider knows which batch contained which rows"
        if self.seed is not None:
            counts = torch.zeros(sum(self.rows), dtype=torch.int64)
            for step in range(self.steps):
                counts[self.batch(step)] += 1
            steps = int(counts.max())
            hidden = f"the batches are public, and no row is in more than {steps}"
        return PrivacyStatement(
            "records",
            "an observer of the model who did not take part",
            epsilon=epsilon_of(GaussianSteps(self.noise, steps, self.rate), delta),
            delta=delta,
            unit="record",
            relation="add or remove",
            adversary="outsider with the model",
            accountant="rdp",
            assumes=(
                (
                    "the holders follow the protocol, and the dealer discloses its material to no "
                    "holder"
                ),
                f"at most {len(self.rows) // 3} of {len(self.rows)} leave their noise out",
                hidden,
            ),
        )


@dataclass(frozen=True, slots=True)
class LocalStart:
    """Starts a training from models that the holders trained separately (PEA 2022, Protocol 4).

    Attributes:
        steps, batch_size, learning_rate: number of steps, batch size and learning rate of each
            holder's own DP-SGD; `SecureSgd` gives its other terms.
        noise: standard deviation of the noise in the holders' own trainings, divided by `clip`.
        choice: "average" of the models, or "best": the best of the models and their average,
            without disclosing which one is selected.
        judge_noise: standard deviation of the noise that "best" adds to the models' scores, which
            are computed on the rows of one batch. With 0, the scores are computed on public rows
            (`public` of `train`), which costs no privacy. The paper computes the scores on private
            rows, and does not count the privacy cost.
        public_rows: number of public rows for the scores.
    """

    steps: int
    batch_size: int
    learning_rate: float
    noise: float
    choice: Literal["average", "best"] = "average"
    judge_noise: float = 0.0
    public_rows: int = 0

    def __post_init__(self) -> None:
        require("noise", self.noise, "above 0", 0 < self.noise < math.inf)
        require("judge_noise", self.judge_noise, "at least 0", 0 <= self.judge_noise < math.inf)
        require_choice("choice", self.choice, ("average", "best"))
        if self.choice == "best" and not self.judge_noise and not self.public_rows:
            raise PrivacyError(
                "the choice of the best model would disclose facts about the rows on which models"
                " are scored",
                want="noise on the scores, or public rows",
                fix="judge_noise=2, or public_rows and the rows themselves",
            )

    def statement(self, terms: SecureSgd, delta: float) -> PrivacyStatement:
        """Return the privacy guarantee of the whole training.

        Each part of the training gets a third of `delta` if noise protects the choice of the model;
        otherwise each gets half.
        """
        parts = 3 if self.choice == "best" and self.judge_noise else 2
        rest = terms.statement(delta / parts)
        alone = min(self.batch_size / min(terms.rows), 1.0)
        spent = [GaussianSteps(self.noise, self.steps, alone)]
        if parts == 3:
            spent.append(GaussianSteps(self.judge_noise, 1, terms.rate))
        return added(
            [rest, *(replace(rest, epsilon=epsilon_of(each, delta / parts)) for each in spent)]
        )


def agreed_key(member: Member) -> Secret:
    """Agree on a key for drawing batches.

    Every holder contributes to the key, and only the parties know it. The dealer also has the key,
    because it deals for the rows of a batch; after `Member.shuffled` it does not know which party
    owns a row. The agreement takes one round of messages with 32 bytes each.

    Args:
        member: this party.
    """
    number, parts = member.next_number(), {}
    if not member.deals:
        parts[member.role] = secrets.token_bytes(SECRET_BYTES)
        for channel in member.channels.values():
            channel.send_bytes(parts[member.role], number, "setup")
    for role in range(member.holders):
        if role != member.role:
            parts[role] = bytes(member.channels[role].receive_bytes(number, SECRET_BYTES))
    together = b"".join(parts[role] for role in sorted(parts))
    return Secret(hashlib.sha256(b"vfl secure batches" + together).digest())


def train(
    member: Member,
    terms: SecureSgd,
    own: Rows | None,
    secret: Secret,
    start: LocalStart | None = None,
    public: Rows | None = None,
) -> Tensor | None:
    """Train a model; return the model's weights at every holder, axes (columns + 1, classes).

    The last row of the weights contains the biases.

    Args:
        member: this party.
        terms: terms of the training, equal at all parties.
        own: a holder's own inputs, axes (rows, columns), and labels, axes (rows,); None at the
            dealer.
        secret: this holder's own secret for its part of the noise; use it for only one training.
        start: terms of the models from which the training starts, equal at all parties; by default
            the weights start at 0.
        public: rows that all holders know, if `start` computes scores on them.

    Returns:
        The weights, float64; None at the dealer.
    """
    key = agreed_key(member) if terms.seed is None else None
    rows = shared_rows(member, terms, own)
    weights = first_weights(member, terms)
    if start is not None:
        judged = terms.batch(terms.steps, key)
        weights = started(member, terms, start, own, secret, rows, judged, public)
    for step in range(terms.steps):
        weights = train_step(member, terms, weights, rows, terms.batch(step, key), secret)
    return member.reveal(weights, "model")


def train_alone(
    terms: SecureSgd, start: LocalStart, own: Rows, secret: Secret, begin: Tensor | None = None
) -> Tensor:
    """Run DP-SGD at one party that sees all its own rows.

    The function returns float64 weights, as `train` does.

    Args:
        terms: terms of the joint training; this function uses their `clip`, `longest` and
            `classes`.
        start: terms of the holder's own training.
        own: inputs and labels of the holder's rows.
        secret: the holder's secret, from which batches and noise are drawn.
        begin: initial weights of the model; None means zeros.
    """
    inputs, truth, _ = prepared(terms, *own)
    shape = (inputs.shape[1], terms.classes)
    weights = torch.zeros(shape, dtype=torch.float64) if begin is None else begin.clone()
    rate = min(start.batch_size / len(inputs), 1.0)
    law = kernel.NoisySum(terms.clip, terms.clip * start.noise, weights.numel())
    for step in range(start.steps):
        batch = torch.from_numpy(secret.uniform((len(inputs),), "local batch", step) < rate)
        errors = (inputs[batch] @ weights / 4 + 0.5).clamp(0, 1) - truth[batch]
        layer = Outer(inputs[batch], errors, weight=True, bias=False)
        (total,) = layer.weighted(kernel.clip_factors(layer.squares().sqrt(), law.bound))
        noisy = kernel.release([law], total.T.reshape(-1), secret, "local noise", step)
        weights -= start.learning_rate / start.batch_size * noisy.reshape(shape)
    return weights


def started(
    member: Member,
    terms: SecureSgd,
    start: LocalStart,
    own: Rows | None,
    secret: Secret,
    private: SharedRows,
    judged: Tensor,
    public: Rows | None = None,
) -> SharedTensor:
    """Return the initial weights of a joint training; see `LocalStart`.

    Args:
        member: this party.
        terms: terms of the training, equal at all parties.
        start: terms of each holder's own training, and the rule that combines their models.
        own: see `train`.
        secret: see `train`.
        private: rows of all holders, as shares.
        judged: positions of the rows on which the models are scored, drawn as one separate batch;
            not used with public rows.
        public: see `train`.
    """
    mine = None if own is None else train_alone(terms, start, own, secret)
    shape, holders = (terms.columns + 1, terms.classes), range(member.holders)
    models = [
        member.share(each, shape, mine if each == member.role else None, f"model of P{each}")
        for each in holders
    ]
    total = torch.stack([model.share for model in models]).sum(0)
    part = round(2.0**member.bits / member.holders)
    average = member.divide(SharedTensor(total * part, 2 * member.bits), member.bits)
    if start.choice == "average":
        return average
    models = [average, *models]
    if start.judge_noise:
        rows = private.rows(judged)
        scores = _scores(member, terms, models, rows.inputs, rows.truth)
        # One row changes the score of every model by at most 1, plus one unit for each division.
        deviation = start.judge_noise * math.sqrt(len(models))
        deviation *= 1 + (terms.classes + 2) * 2.0**-member.bits
        scores = scores.plus(noise_share(member, scores.shape, deviation, secret, scores.bits))
    else:
        values: Sequence[Tensor | None] = [None] * 2
        if member.role == 0:
            assert public is not None, "every holder has public rows"
            values = prepared(terms, *public)
        inputs, truth = (
            member.share(0, (start.public_rows, width), value, "public rows")
            for width, value in zip((terms.columns + 1, terms.classes), values, strict=False)
        )
        scores = _scores(member, terms, models, inputs, truth)
    best, best_score = models[0], scores.share[0]
    for model, score in zip(models[1:], scores.share[1:], strict=True):
        better = member.is_negative(SharedTensor((score - best_score).reshape(1), scores.bits))
        change = torch.cat(
            [(model.share - best.share).reshape(-1), (score - best_score).reshape(1)]
        )
        taken = member.multiply(SharedTensor(change, member.bits), better).share
        best = SharedTensor(best.share + taken[:-1].reshape(shape), member.bits)
        best_score = best_score + taken[-1]
    return best


def _scores(
    member: Member,
    terms: SecureSgd,
    models: Sequence[SharedTensor],
    inputs: SharedTensor,
    truth: SharedTensor,
) -> SharedTensor:
    """Return each model's sum over rows of the mean squared error.

    A row adds at most 1 to the sum.
    """
    together = SharedTensor(torch.cat([each.share for each in models], 1), member.bits)
    logits = member.divide(member.multiply(inputs, together, matmul), member.bits)
    errors = _cut_line(member, logits).share - truth.share.repeat(1, len(models))
    (opened,) = member.open(SharedTensor(errors, member.bits))
    squares = member.divide(member.multiply(opened, opened), member.bits)
    sums = squares.share.reshape(-1, len(models), terms.classes).sum((0, 2))
    scaled = SharedTensor(sums * math.floor(2.0**member.bits / terms.classes), 2 * member.bits)
    return member.divide(scaled, member.bits)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a training as shares; the inputs are already opened under masks for products.

    Attributes:
        inputs: shared inputs, axes (rows, columns + 1); the last column contains ones.
        truth: shared one-hot labels, axes (rows, classes).
        squares: shared upper bounds of the inputs' squared norms, axes (rows, 1).
    """

    inputs: SharedTensor
    truth: SharedTensor
    squares: SharedTensor

    def rows(self, index: Tensor) -> SharedRows:
        """Return the rows at the positions `index`."""
        return SharedRows(*(one.rows(index) for one in (self.inputs, self.truth, self.squares)))


def first_weights(member: Member, terms: SecureSgd) -> SharedTensor:
    """Return zeros as shared initial weights, axes (columns + 1, classes)."""
    zeros = torch.zeros(terms.columns + 1, terms.classes, dtype=torch.int64)
    return member.own(zeros, member.bits)


def train_step(
    member: Member,
    terms: SecureSgd,
    weights: SharedTensor,
    rows: SharedRows,
    batch: Tensor,
    secret: Secret,
) -> SharedTensor:
    """Return the weights after one training step (PEA 2022, Protocol 3).

    Args:
        member: this party.
        terms: terms of the training, equal at all parties.
        weights: weights before the step.
        rows: all rows of the training, as shares.
        batch: positions of the step's rows, equal at all parties; there may be none.
        secret: see `noise_share`.
    """
    total = _clipped_sum(member, terms, weights, rows.rows(batch))
    total = total.plus(
        noise_share(member, weights.shape, terms.clip * terms.noise, secret, _SUM_BITS)
    )
    rate = round(terms.learning_rate / terms.batch_size * 2**_RATE_BITS)
    moved = member.divide(
        SharedTensor(total.share * rate, _SUM_BITS + _RATE_BITS),
        _SUM_BITS + _RATE_BITS - member.bits,
    )
    return weights.minus(moved)


def shared_rows(member: Member, terms: SecureSgd, own: Rows | None) -> SharedRows:
    """Share the rows of all holders, if every holder has its own rows with all columns.

    The shared rows are shuffled; with a public seed, they stay in the order of the holders.

    Args:
        member: this party.
        terms: terms of the training, equal at all parties.
        own: see `train`.
    """
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
    return _opened(member, terms, inputs, truth, squares)


def _opened(
    member: Member,
    terms: SecureSgd,
    inputs: SharedTensor,
    truth: SharedTensor,
    squares: SharedTensor,
) -> SharedRows:
    """Shuffle the rows, except with a public seed, and open the inputs once for all products.

    The dealer learns the positions of each step's rows, because it deals for these rows.
    """
    if terms.seed is None:
        inputs, truth, squares = member.shuffled(inputs, truth, squares)
    return SharedRows(member.open(inputs)[0], truth, squares)


def shared_columns(
    member: Member,
    terms: SecureSgd,
    columns: Sequence[int],
    labels_of: int,
    inputs: Tensor | None,
    labels: Tensor | None,
) -> SharedRows:
    """Share rows that all holders have, if each holder has some of the rows' columns.

    The shared rows are shuffled; with a public seed, they stay in their order.

    Each of the k holders with columns scales its part of a row down to the norm `longest` /
    sqrt(k).

    Args:
        member: this party.
        terms: terms of the training, equal at all parties.
        columns: number of columns of each holder; may be 0.
        labels_of: role number of the holder that has the labels.
        inputs: this holder's columns, axes (rows, columns); None if it has no columns.
        labels: the labels, axes (rows,), at the holder that has them; None elsewhere.
    """
    count = sum(terms.rows)
    longest = terms.longest / math.sqrt(sum(1 for width in columns if width))
    parts, squares = [], torch.zeros(count, 1, dtype=torch.int64)
    for owner, width in enumerate(columns):
        short, length = None, None
        if owner == member.role and width:
            assert inputs is not None, "a holder with columns passes inputs"
            short = _shortened(inputs, longest)
            length = _square(short)
        if width:
            where = f"columns of P{owner}"
            parts.append(member.share(owner, (count, width), short, where).share)
            squares = squares + member.share(owner, (count, 1), length, where).share
    ones = member.own(torch.zeros(count, 1, dtype=torch.int64), member.bits)
    parts.append(member.public(ones, 1.0).share)
    truth = None
    if member.role == labels_of:
        assert labels is not None, "the holder of the labels passes them"
        truth = _one_hot(terms, labels)
    return _opened(
        member,
        terms,
        SharedTensor(torch.cat(parts, 1), member.bits),
        member.share(labels_of, (count, terms.classes), truth, "labels"),
        member.public(SharedTensor(squares, member.bits), 1.0),
    )


def prepared(terms: SecureSgd, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Prepare a holder's rows: scaled inputs and a one, one-hot labels, and squared norms."""
    short = _shortened(inputs, terms.longest)
    rows = torch.cat([short, torch.ones(len(short), 1, dtype=torch.float64)], 1)
    return [rows, _one_hot(terms, labels), _square(rows)]


def model_inputs(inputs: Tensor, longest: float, holders: int = 1) -> Tensor:
    """Return inputs in the form for the model: rows longer than `longest` are scaled down to it.

    The result is float64.

    Args:
        inputs: one holder's columns, axes (rows, columns).
        longest: largest norm of a whole row.
        holders: number of holders that have columns of the row.
    """
    return _shortened(inputs, longest / math.sqrt(holders))


def _shortened(inputs: Tensor, longest: float) -> Tensor:
    norms: Tensor = inputs.double().norm(dim=1, keepdim=True)
    short: Tensor = inputs.double() * (longest / norms.clamp_min(longest))
    return short


def _one_hot(terms: SecureSgd, labels: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels.long(), terms.classes).double()


def _square(rows: Tensor) -> Tensor:
    """Return the squared norms of rows, with a margin for the rounding of the shared rows."""
    norms: Tensor = rows.norm(dim=1, keepdim=True)
    return norms.add(2.0**-10).square()


def _clipped_sum(
    member: Member,
    terms: SecureSgd,
    weights: SharedTensor,
    rows: SharedRows,
) -> SharedTensor:
    """Return the sum of row gradients, each scaled down to the clip norm; 24 fraction bits."""
    bits, inputs = member.bits, rows.inputs
    if not len(inputs.share):
        return member.own(torch.zeros(weights.shape, dtype=torch.int64), _SUM_BITS)
    logits = member.divide(member.multiply(inputs, weights.alone(), matmul), bits)
    errors = _cut_line(member, logits).minus(rows.truth)
    (errors,) = member.open(errors)
    # The result of a division may be up to one unit too small; without the added units, a norm
    # could be underestimated.
    unit = 2.0**-_SQUARE_BITS
    lengths = member.divide(member.multiply(errors, errors), 2 * bits - _SQUARE_BITS)
    lengths = SharedTensor(lengths.share.sum(1, keepdim=True), _SQUARE_BITS)
    lengths = member.multiply(member.public(lengths, terms.classes * unit), rows.squares)
    lengths = member.public(member.divide(lengths, bits), unit)
    factors = _scales(member, inverse_root(member, lengths, terms.form), terms.bound)
    scaled = member.divide(member.multiply(errors, factors), bits)
    found = member.multiply(inputs, scaled, inner)
    return member.divide(found, found.bits - _SUM_BITS)


def _cut_line(member: Member, logits: SharedTensor) -> SharedTensor:
    """Return Z / 4 + 1 / 2, limited to the range from 0 to 1, where Z are the logits."""
    line = member.public(SharedTensor(logits.share, logits.bits + 2), 0.5)
    line = member.divide(line, 2)
    both = torch.stack([line.share, member.public(line, 1.0, -1).share])
    outside = member.is_negative(SharedTensor(both, line.bits))
    low, high = outside.share.unbind()
    inside = member.public(SharedTensor(-low - high, 0), 1.0)
    kept = member.multiply(line, inside)
    return SharedTensor(kept.share + (high << kept.bits), kept.bits)


def _scales(member: Member, roots: SharedTensor, bound: float) -> SharedTensor:
    """Return the clip factors min(1, bound / norm), rounded down."""
    quotient = SharedTensor(roots.share * math.floor(bound * 2**10), roots.bits + 10)
    quotient = member.divide(quotient, quotient.bits - ROOT_BITS, below=True)
    excess = member.public(quotient, -1.0)
    shorter = member.is_negative(excess)
    kept = member.public(member.multiply(excess, shorter), 1.0)
    return member.divide(kept, kept.bits - member.bits, below=True)


def train_here(
    terms: SecureSgd,
    parts: Sequence[Rows],
    start: LocalStart | None = None,
    public: Rows | None = None,
) -> Tensor:
    """Train with all parties as threads of this process, which protects no secret.

    Args:
        terms: see `SecureSgd`.
        parts: inputs and labels of each holder; see the argument `own` of `train`.
        start: see `LocalStart`.
        public: see `train`.

    Returns:
        The weights that each holder receives at the end; see `train`.
    """
    own = [*parts, None]
    secrets = [Secret.fresh() for _ in own]
    agreed = {"training": asdict(terms), "start": asdict(start) if start else None}
    with LocalMembers(len(parts), terms=agreed) as members:
        found = members.run(lambda m: train(m, terms, own[m.role], secrets[m.role], start, public))
    assert found[0] is not None, "a holder has the model"
    return found[0]
