"""Plan of a training with `[dp]`: its steps, rows, noise, privacy statement, and refused settings.

Every party computes the same plan from the agreed terms and the number of training rows, so no
message has to contain the plan. With Poisson sampling, a key in the terms determines which rows a
step uses; the parties of the session and the operator of the SuperLink can read this key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from vfl import compression, defenses
from vfl.core.errors import PrivacyError
from vfl.core.seeds import Secret, derive, permutation
from vfl.privacy import PrivacyStatement
from vfl.privacy.accountants import (
    ANALYTIC,
    GaussianSteps,
    epsilon_of,
    noise_for,
    poisson_steps,
    steps_for,
)
from vfl.privacy.dpsgd import Branches, PrivateHalf
from vfl.privacy.premise import Forward, prove
from vfl.privacy.statement import EMPTY_PLACE
from vfl.session.schedule import batches, steps_per_epoch

if TYPE_CHECKING:
    from vfl.session.terms import Terms

_noise_for, _steps_for = cache(noise_for), cache(steps_for)
_ASSUMES = (
    "every party clips gradients of its model part and adds noise as agreed",
    "the parties' secrets stay secret (in one process they follow from the run's seed)",
    "encoders, validation rows, training metrics and the choice of settings are not counted",
)


@dataclass(frozen=True, slots=True)
class PrivacyPlan:
    """Plan of a training with DP-SGD, which is the same at all parties.

    Attributes:
        rows, batch_size: number of training rows, and expected number of rows in a step.
        a_epoch: number of steps in one epoch.
        steps: number of steps of the whole training; the privacy budget covers all of them.
        noise: noise multiplier (noise divided by clipping norm) for the gradients of all parties
            together.
        delta, accountant: delta of the privacy guarantee, and name of the accountant that computes
            epsilon.
        halves: number of parties that train weights; the noise multiplier of each party is `noise`
            times the square root of this number.
        shuffled: whether the epochs are shuffled, so that a row is in at most one step of an epoch;
            otherwise each step samples its rows.
        clients: number of branches (groups of rows) if epsilon protects a whole branch; 0 if
            epsilon protects a single row.
    """

    rows: int
    batch_size: int
    a_epoch: int
    steps: int
    noise: float
    delta: float
    accountant: str
    halves: int
    shuffled: bool
    clients: int = 0

    @classmethod
    def of(cls, terms: Terms, rows: int) -> PrivacyPlan | None:
        """Return the plan for a training on this many rows; None without [dp] or without rows.

        Raises:
            PrivacyError: the privacy budget allows no step, or no noise multiplier is large enough
                for this budget.
        """
        dp, train = terms.dp, terms.train
        if dp is None or not rows:
            return None
        shuffled, size = dp.sampling == "shuffled", min(train.batch_size, rows)
        a_epoch = steps_per_epoch(rows, size) if shuffled else poisson_steps(rows, size)
        rate = 1.0 if shuffled else size / rows
        # With shuffled batches, a row is in one step of each epoch; if the row is replaced, the sum
        # of clipped gradients changes by at most two clipping norms.
        a_record, apart = (1, 2.0) if shuffled else (a_epoch, 1.0)
        budget, counted = (rate, dp.accountant), train.epochs * a_record
        if dp.noise is None:
            assert dp.epsilon is not None, "checked with the settings"
            noise = apart * _noise_for(dp.epsilon, dp.delta, counted, *budget)
        else:
            noise = dp.noise
            if dp.epsilon is not None:
                counted = min(counted, _steps_for(dp.epsilon, dp.delta, noise / apart, *budget))
        if not counted:
            raise PrivacyError(
                "the privacy budget does not allow a single step",
                where="dp",
                got=f"epsilon {dp.epsilon} with noise multiplier {noise:g}",
                fix="set a larger dp.epsilon or dp.noise; or leave dp.noise out: vfl then derives "
                "it from dp.epsilon",
            )
        steps = counted * a_epoch // a_record
        halves = len(terms.feature_parties) + dp.label_trains
        law = (noise, dp.delta, dp.accountant)
        clients = _branched(terms)[1] if dp.unit == "client" else 0
        return cls(rows, size, a_epoch, steps, *law, halves, shuffled, clients)

    @property
    def epochs(self) -> int:
        """Number of epochs that the training starts; the last epoch may have fewer steps."""
        return math.ceil(self.steps / self.a_epoch)

    @property
    def most_rows(self) -> int:
        """Most rows in a batch.

        A Poisson-sampled batch exceeds this number with probability e^-70 (Chernoff).
        """
        if self.shuffled:
            return self.batch_size
        if self.clients:
            return self.rows
        return min(self.rows, self.batch_size + math.ceil(12 * math.sqrt(self.batch_size)) + 60)

    def batches(self, terms: Terms, train: np.ndarray) -> Callable[[int], list[np.ndarray]]:
        """Return a function from an epoch's number to its batches: positions in the aligned rows.

        The first epoch has number 1.

        If the terms contain no key, because a session is only planned, the function draws different
        rows from the later training.
        """
        if self.shuffled:

            def shuffled(epoch: int) -> list[np.ndarray]:
                order = train[permutation(terms.seed, len(train), "order", epoch)]
                return batches(order, self.batch_size)

            return shuffled
        key = terms.dp.key if terms.dp is not None else None
        public = derive(terms.seed, "planned").to_bytes(32, "little")
        secret = Secret(public if key is None else bytes.fromhex(key))
        rate, units = self.batch_size / self.rows, np.arange(len(train))
        if self.clients:  # a batch contains all rows of a branch, or none of them
            units = branches_of(terms, _branched(terms)[0], train)[train]
        count = self.clients or len(train)

        def sampled(epoch: int) -> list[np.ndarray]:
            first = (epoch - 1) * self.a_epoch
            steps = range(first, min(first + self.a_epoch, self.steps))
            drawn = (secret.uniform((count,), "rows", step) < rate for step in steps)
            return [train[one[units]] for one in drawn]

        return sampled

    def epsilon(self, steps: int) -> float:
        """Return the epsilon that this many steps spend."""
        if self.shuffled:
            begun = math.ceil(steps / self.a_epoch)
            return epsilon_of(GaussianSteps(self.noise / 2, begun), self.delta)
        rate = self.batch_size / self.rows
        return epsilon_of(GaussianSteps(self.noise, steps, rate), self.delta, self.accountant)

    def statement(self, steps: int) -> PrivacyStatement:
        """Return the privacy statement after this many steps."""
        exact = self.shuffled or self.batch_size == self.rows
        hidden: tuple[str, ...] = (
            () if exact else ("no one outside the session knows the rows of a batch",)
        )
        hidden += (
            ("a person belongs to one branch, and all parties agree on it",) if self.clients else ()
        )
        hidden += () if self.shuffled else ("the number of rows is public", EMPTY_PLACE)
        return PrivacyStatement(
            protects="records",
            against="anyone who has or queries the trained models; not a party of the session",
            epsilon=self.epsilon(steps),
            delta=self.delta,
            unit="client" if self.clients else "record",
            per="training",
            relation="replace" if self.shuffled else "add or remove",
            adversary="outsider with the model",
            accountant=ANALYTIC if exact else self.accountant,
            assumes=(*hidden, *_ASSUMES),
        )

    def sensitivity(self, terms: Terms) -> float:
        """Return the largest change (2-norm) of all gradient sums that a row or branch can cause.

        With `dp.quantile`, which adapts clipping norms, the result refers to the initial clipping
        norms.
        """
        dp = terms.dp
        assert dp is not None, "only with a plan"
        parties = terms.feature_parties + [terms.label_party] * dp.label_trains
        joint = math.hypot(*(dp.clips.get(party, dp.clip) for party in parties))
        return 2 * joint if self.shuffled else joint

    def half(
        self,
        terms: Terms,
        party: str,
        model: nn.Module,
        forward: Forward,
        shapes: Sequence[tuple[int, ...]],
        secret: Secret,
        branches: Branches | None = None,
    ) -> PrivateHalf:
        """Build the DP-SGD object that clips and perturbs the gradients of one party's model.

        The noise of the plan is the noise that all parties add to their models together.

        k models with noise multiplier s each are equivalent to one model with noise multiplier s /
        sqrt(k). The model is first run on random rows, in order to check that the output of one row
        does not depend on another row; see `vfl.privacy.premise.prove`.

        Args:
            terms: terms of the session.
            party: party that owns the model.
            model: modules (torch) of the party's model.
            forward: function that runs these modules on a batch of each input and returns their
                outputs.
            shapes: axes of one row, for each input.
            secret: the party's own secret, from which noise is drawn.
            branches: branch of each of the party's rows; None if the rows belong to no branches.

        Raises:
            PrivacyError: the output of a row depends on other rows, or the model stores values of
                the rows.
        """
        dp = terms.dp
        assert dp is not None, "only with a plan"
        half = PrivateHalf(
            model,
            norm=dp.clips.get(party, dp.clip),
            noise=self.noise * math.sqrt(self.halves),
            batch_size=self.batch_size * (self.clients or self.rows) / self.rows,
            secret=secret,
            party=party,
            by=dp.clip_by,
            quantile=dp.quantile,
            branches=branches,
        )
        whose = f"the model of party '{party}'"
        prove(half.clipper, forward, shapes, whose, self.most_rows)
        return half


def _branched(terms: Terms) -> tuple[str, int]:
    """Return name and number of branches of the only party that has more than one branch."""
    return next((name, one.branches) for name, one in terms.parties.items() if one.branches > 1)


def branches_of(terms: Terms, party: str, train: np.ndarray) -> np.ndarray:
    """Return each aligned row's branch, up to the last training row.

    The value is -1 for rows that are not training rows.
    """
    found = np.full(train.max() + 1, -1)
    order = permutation(terms.seed, len(train), "branches", party)
    found[train] = order % terms.parties[party].branches
    return found


class RowsAtBranches:
    """Provides the branches of a batch's rows to DP-SGD, batch by batch.

    Args:
        terms, train: agreed terms of the session, and positions of its training rows.
        party: name of the party that owns the model.
    """

    def __init__(self, terms: Terms, train: np.ndarray, party: str) -> None:
        dp = terms.dp
        clients = dp is not None and dp.unit == "client"
        if clients:
            party = _branched(terms)[0]
        own = terms.parties.get(party)
        self.branches: Branches | None = None
        if terms.mode == "train" and dp is not None and own is not None and own.branches > 1:
            self.branches = Branches(own.branches, clients)
            self._of = branches_of(terms, party, train)

    def expect(self, step: int, rows: np.ndarray) -> None:
        """Announce which aligned rows the batch of a step contains."""
        if self.branches is not None:
            self.branches.at[step] = torch.from_numpy(self._of[rows])


_OVER_ROWS = ("batch", "fit", "counts", "targets", "loss", "local_loss", "logits")
_OF_ROWS = ("embedding", "gradient", "received")


def refuse_beside_dp(terms: Terms) -> None:
    """Refuse codecs and defenses that mix rows, or that train weights without clipping.

    Raises:
        PrivacyError: the guarantee of [dp] does not hold with the codec, the defense or the
            sampling; the error names it.
    """
    if terms.dp is None:
        return
    if terms.dp.sampling == "poisson" and terms.dp.key is None:
        raise PrivacyError(
            "the batches are sampled without a secret key, so anyone could compute the rows of a "
            "batch",
            where="terms.dp.key",
            want="a key that is derived from the label party's secret",
        )
    refuse_codec(terms.codec, {terms.parties[party].width for party in terms.feature_parties})
    refuse_defense(terms.defense, terms.dp.sampling)


def refuse_defense(spec: str, sampling: str) -> None:
    """Refuse a defense that mixes rows, or whose own epsilon does not fit the sampling of [dp].

    Raises:
        PrivacyError: the guarantee of [dp] does not hold with this defense; the error names the
            cause.
        SpecError: the defense cannot be built.
    """
    defense = defenses.make(spec)
    members = defense.members if isinstance(defense, defenses.Chain) else (defense,)
    for member in members:
        over = defenses.uses(member, *_OVER_ROWS)
        over += [] if member.rows_apart else defenses.uses(member, *_OF_ROWS)
        if over:
            raise PrivacyError(
                f"[dp] clips a row's gradient, and {type(member).__name__} may mix rows",
                where="defense",
                got=f"'{over[0]}'",
                fix="use label_dp or layer_norm, or with dp.sampling = 'shuffled' clipped_noise or "
                "gradient_noise; or remove [dp]",
            )
    stated = [one for one in defense.privacy() if one.epsilon is not None]
    repeated = [one for one in stated if one.per != "training"]
    if repeated and sampling == "poisson":
        raise PrivacyError(
            "with Poisson sampling, a row may be in more than one step of an epoch",
            where="defense",
            got=f"a defense whose epsilon is valid for one {repeated[0].per}, and which counts "
            "epochs",
            fix="set dp.sampling = 'shuffled', or use another defense",
        )


def refuse_codec(spec: str, widths: Iterable[int]) -> None:
    """Refuse a codec that trains layers, or in which a row's bytes depend on other rows.

    Raises:
        PrivacyError: the codec breaks the guarantee of [dp]; the error names the cause.
        SpecError: the codec cannot be built, or does not fit a width.
    """
    codec = compression.make(spec)
    for width in widths:
        ends = [one for one in (codec.client_module(width), codec.server_module(width)) if one]
        got = ""
        if any(True for end in ends for _ in end.parameters()):
            got = "layers that it trains"
        elif type(codec).local_loss is not compression.Codec.local_loss:
            got = "a separate loss over all rows of the batch"
        elif _mixes_rows(spec, codec.wire_width(width)):
            got = "a scale that the rows of a batch share"
        if got:
            raise PrivacyError(
                f"[dp] bounds the effect of one row, but codec '{spec}' lets a row affect "
                "other rows",
                where="codec",
                got=got,
                fix="set scale=row or values=fp32 in the codec, or codec = 'none'",
            )


def _mixes_rows(spec: str, width: int) -> bool:
    """Return whether the encoded bytes of a row, or of its gradient, depend on another row."""
    secret = Secret(bytes(32))
    draw = torch.Generator().manual_seed(0)
    rows, grads = torch.randn(2, 5, width, generator=draw)
    found = []
    for factor in (1.0, 100.0):
        codec = compression.make(spec)
        context = compression.StepContext(0, training=True, secret=secret, rows=np.arange(5))
        first = torch.tensor([factor, 1.0, 1.0, 1.0, 1.0])[:, None]
        payload, kept = codec.encode(rows * first, context)
        cut, saved = codec.decode(payload, 5, width, context)
        sent = codec.encode_grad(grads * first, saved, context)
        found.append((cut[1:], codec.decode_grad(sent, kept, 5, width, context)[1:]))
    (cut, grad), (other_cut, other_grad) = found
    return not (torch.equal(cut, other_cut) and torch.equal(grad, other_grad))
