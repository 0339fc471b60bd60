"""``secure = "pea"``: DP-SGD of a linear classifier on shared rows, with every holder's noise.

A session mode for the protocols of PEA (2022), with corrections; `vfl.mpc.secure_dpsgd` implements
the protocols. Two to eight parties hold shares: all parties of [parties], and the label party. A
third party without data is the dealer. Only the label party has streams to the other parties; it
relays their sealed messages to each other.

    divided = "rows":     each holder has all columns and the labels of its own rows
    divided = "columns":  the holders have different columns of the same rows; one has the labels

The protocol discloses the final model, once, to the holders, and with divided columns also the
outputs of test rows to the label party; if an attempt is interrupted before, each party has only
shares of the model. Each attempt at the session draws new keys for masks, and new noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from vfl import models
from vfl.config.toml import Settings
from vfl.core.errors import (
    DataError,
    DisagreementError,
    ExposedCutError,
    PrivacyError,
    ProtocolError,
)
from vfl.core.frame import Kind, Link
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import Secret
from vfl.datasets import Split
from vfl.mpc.many.members import MOST_HOLDERS, Member
from vfl.mpc.ring import ELEMENT_BYTES
from vfl.mpc.secure.base import check_training, refuse_work_on_cuts
from vfl.mpc.secure.ends import (
    NetworkEnd,
    NetworkMode,
    NetworkSizes,
    Place,
    read_description,
    require_frame,
)
from vfl.mpc.secure.keys import TAG_BYTES
from vfl.mpc.secure_dpsgd import (
    Form,
    LocalStart,
    Rows,
    SecureSgd,
    SharedRows,
    first_weights,
    model_inputs,
    shared_columns,
    shared_rows,
    started,
    train_step,
)
from vfl.mpc.shares import SharedTensor
from vfl.privacy import PrivacyStatement, added
from vfl.privacy.accountants import GaussianSteps, epsilon_of, noise_for
from vfl.session.dp_plan import PrivacyPlan
from vfl.session.schedule import Exchange
from vfl.session.secure_mode import (
    EVALUATE,
    SETUP,
    TRAIN,
    Agreed,
    Happened,
    OwnRows,
    Revealed,
)
from vfl.session.terms import Terms

Divided = Literal["rows", "columns"]
Start = Literal["zero", "average", "best"]
#: Number of parts into which a training divides its privacy budget; the key is the option `start`.
_PARTS: Mapping[Start, int] = {"zero": 1, "average": 2, "best": 3}

_MOST_CLASSES = 1024
#: Largest value of the option `longest` that fits for any number of classes; `SecureSgd` checks the
#: exact limit for a session's number of classes.
_MOST_LENGTH = 32.0
#: Number of ring elements in the largest frame for each number in a batch; products of bits need
#: this many.
_BATCH_WORDS = 192
#: Number of ring elements that a holder stores at once: for each input, and for each number in a
#: batch.
_ROW_COPIES, _BATCH_COPIES = 6, 1024

#: Name of the weights in the state that a party saves.
_MODEL = "weight"

_Label = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class OwnFacts(Settings):
    """The description of its training rows that one holder announces.

    Attributes:
        rows: number of training rows.
        columns: number of columns of these rows.
        names: digest of the column names; empty if the holders have different columns.
    """

    rows: int = Field(ge=0, lt=2**32)
    columns: int = Field(ge=0, lt=2**24)
    names: str = Field(default="", max_length=64)


class Facts(Settings):
    """Facts about a session's rows that all parties need besides the terms of the session.

    Attributes:
        holders: each holder's description of its rows, in the order of the role numbers.
        classes: names of the classes, in the order of the numbers (label codes) that stand for
            them.
        asked: number of the label party's rows to test or to predict.
    """

    holders: tuple[OwnFacts, ...] = Field(min_length=2, max_length=MOST_HOLDERS)
    classes: tuple[_Label | str, ...] = Field(min_length=2, max_length=_MOST_CLASSES)
    asked: int = Field(ge=0, lt=2**32)


@dataclass(frozen=True, slots=True)
class PeaLayers(NetworkSizes):
    """Sizes of a session's model and batches, which bound the size of a frame and the memory.

    Attributes:
        training_rows: number of training rows of all parties together.
        columns, classes: number of inputs and of outputs of the model.
        batch_rows: largest number of rows in a training step.
    """

    training_rows: int
    columns: int
    classes: int
    batch_rows: int

    @property
    def parameters(self) -> int:
        """Number of weights of the model, biases included."""
        return (self.columns + 1) * self.classes

    def memory_bytes(self, rows: int) -> int:
        """Return the approximate number of bytes of memory that a holder uses at once."""
        held = _ROW_COPIES * self.training_rows * (self.columns + self.classes + 1)
        batch = self.batch_rows * (_BATCH_COPIES * self.classes + 4 * self.columns)
        return ELEMENT_BYTES * (held + batch)

    def limits(self, rows: int) -> dict[Kind, int]:
        return {Kind.PROTOCOL: self.frame_bytes + TAG_BYTES}

    @property
    def frame_bytes(self) -> int:
        """Size of the largest message, in bytes."""
        inputs = self.training_rows * (self.columns + 1)
        batch = self.batch_rows * max(_BATCH_WORDS * self.classes, self.columns + 1)
        return ELEMENT_BYTES * max(inputs, batch, 4 * self.parameters, 1024)


class Pea(NetworkMode):
    """Trains a linear classifier by DP-SGD on shared rows, to which every holder adds noise.

    Args:
        dealer: name of the dealer, a party without data whose own file contains ``role =
            "dealer"``.
        divided: "rows" if each party in [parties] and the label party have their own rows, with all
            columns and labels (each party's own file names the `label` column); "columns" if they
            have different columns of the same rows, and only the label party has the labels.
        form: method by which inverse square roots of gradient norms are computed, "polynomial" or
            "permuted". With "permuted", the dealer inverts the norms exactly, in two messages
            instead of fourteen rounds; it then learns the norms of a batch, but not which row each
            norm belongs to.
        longest: largest norm of a row after its columns are standardised; the row's owner scales a
            longer row down to it. If k holders have different columns, each scales its part down to
            `longest` / sqrt(k).
        start: model from which the training starts: "zero", "average" or "best". For "average",
            each holder first trains a model of its own by DP-SGD, for as many epochs as the joint
            training, with half of epsilon and delta (Protocol 4). The joint training then starts
            from the mean of these models; none of them is disclosed. For "best", a noisy score on
            one batch selects one of these models or their mean; the selection is not disclosed.
            With "best", the models, the score and the joint training each use a third of epsilon
            and delta.

    >>> Pea(dealer="notary").third_party("bank"), Pea().divides_rows
    ('notary', True)
    """

    reveals_model: ClassVar[bool] = True
    #: Largest number of frames in one training step: from the dealer, and from any other party.
    window: ClassVar[int] = 128
    waiting: ClassVar[int] = 128
    announced_bytes: ClassVar[int] = 1 << 9
    facts_bytes: ClassVar[int] = 1 << 14
    facts: ClassVar[type[Settings]] = Facts

    def __init__(
        self,
        dealer: str = "dealer",
        divided: Divided = "rows",
        form: Form = "polynomial",
        longest: float = 8.0,
        start: Start = "zero",
    ) -> None:
        require_choice("start", start, tuple(_PARTS))
        require_choice("divided", divided, ("rows", "columns"))
        require_choice("form", form, ("polynomial", "permuted"))
        require_range("longest", longest, 1, _MOST_LENGTH)
        self._dealer, self.form, self.longest = dealer, form, longest
        self._divided, self.start = divided, start

    @property
    def divides_rows(self) -> bool:
        return self._divided == "rows"

    def third_party(self, label_party: str) -> str | None:
        return self._dealer

    def holders(self, agreed: Agreed) -> list[str]:
        """Return the share holders in the order of their roles; the dealer is not included."""
        return list(dict.fromkeys([*agreed.parties, agreed.label_party]))

    def refuse(self, agreed: Agreed) -> None:
        holders = self.holders(agreed)
        require_range("parties", len(holders), 2, MOST_HOLDERS)
        if self._dealer in holders:
            raise ExposedCutError(
                "the dealer must have no data, or it could undo masks",
                got=f"dealer '{self._dealer}'",
                want="secure = 'pea:dealer=NAME', NAME without data",
            )
        if self.divides_rows and agreed.label_party not in agreed.parties:
            raise ExposedCutError(
                "every holder has rows with all columns, the label party too",
                got=f"label.party = '{agreed.label_party}', which is not in [parties]",
                want=f"[parties.{agreed.label_party}], or secure = 'pea:divided=columns'",
            )
        _check_model(agreed, self.divides_rows)
        check_training(agreed.train)
        refuse_work_on_cuts(agreed)
        if agreed.validation:
            raise ExposedCutError(
                "only the last model is revealed, so no epoch can be validated",
                got=f"data.validation = {agreed.validation}",
                want="data.validation = 0",
            )
        _check_dp(agreed)
        if self.start != "zero" and not (self.divides_rows and _whole_budget(agreed)):
            raise PrivacyError(
                "training a model at each holder needs whole rows, and a part of the budget",
                got=f"divided = '{self._divided}'" + (", dp.noise" if self.divides_rows else ""),
                want=f"secure = 'pea:start={self.start}', dp.epsilon and no dp.noise",
            )

    def promise(self, agreed: Agreed) -> str:
        holders = ", ".join(self.holders(agreed))
        seen = f"{self._dealer} sees the norms of gradients, secretly permuted"
        seen = seen if self.form == "permuted" else f"{self._dealer} sees no value"
        tests = "" if self.divides_rows else f"; {agreed.label_party} the outputs of test rows"
        return (
            f"{holders} learn the model at the end, and no row, gradient or earlier model of each "
            f"other{tests}; {seen}, unless it colludes with a holder or a party breaks the protocol"
        )

    def revealed(self, terms: Terms, happened: Sequence[Happened]) -> Iterator[Revealed]:
        """Yield the numbers of rows and columns that each party learned.

        `WholeNetwork.revealed` yields the other values that each party learned.
        """
        for name in (*self.holders(terms), self._dealer):
            yield Revealed(name, "numbers of rows and columns", "all", SETUP, 1, 1)

    def roles(self, agreed: Agreed) -> list[str]:
        return [*self.holders(agreed), self._dealer]

    def end(self, party: str, terms: Terms, rows: OwnRows, place: Place) -> PeaEnd:
        return PeaEnd(self, party, terms, rows, place)


class PeaEnd(NetworkEnd[Facts, Member]):
    """One party's endpoint of a PEA session: a holder of shares, or the dealer."""

    _mode: Pea

    def __init__(self, mode: Pea, party: str, terms: Terms, rows: OwnRows, place: Place) -> None:
        super().__init__(mode, party, terms, rows, place)
        self._holders = mode.holders(terms)
        # Columns of features come before those of labels (PEA 2022, Protocol 5).
        if rows.inputs is not None:
            bottom = models.make_bottom(terms.parties[party].bottom)
            assert isinstance(bottom, models.FixedBottom), "others are refused"
            self._rows = replace(rows, inputs=bottom.features(rows.inputs))
        if self._role == self._label_role:
            _check_classes(rows)
            _check_top(rows.top)
        self._plan: PrivacyPlan | None = None
        self._sgd: SecureSgd | None = None
        self._shared: SharedRows | None = None
        self._share: SharedTensor | None = None
        self._model: Tensor | None = None
        self._trained, self._noise = 0, Secret.fresh()

    @property
    def split(self) -> Split:
        facts, nothing = self._facts, np.empty(0, dtype=np.int64)
        trains = self._terms.mode == "train"
        train = np.arange(self._training_rows(facts)) if trains else nothing
        return Split(train, nothing, np.arange(facts.asked))

    def train(self, exchange: Exchange) -> None:
        member, sgd, shared = self._begun, self._sgd, self._shared
        assert sgd is not None, "a training has begun"
        assert shared is not None, "a training has begun"
        assert self._share is not None, "a training has begun"
        batch = torch.from_numpy(exchange.rows)
        self._share = train_step(member, sgd, self._share, shared, batch, self._noise)
        self._trained += 1
        self._wait_for_the_dealt(member.next_number())
        self._note(TRAIN)

    def outputs(self, exchange: Exchange) -> Tensor | None:
        if self.reveals(exchange) and self._model is None:
            assert self._share is not None, "a training has begun"
            self._model = self._begun.reveal(self._share, "model")
        found = self._answers(exchange)
        self._note(EVALUATE)
        return found

    def reveals(self, exchange: Exchange) -> bool:
        plan = self._plan
        return plan is not None and exchange.step == plan.steps and not exchange.trains

    def everybody_saved(self, commit: Callable[[], None]) -> None:
        channels, label = self._begun.channels, self._label_role
        saved, go_on = self._begun.next_number(), self._begun.next_number()
        others = [role for role in range(len(self._roles)) if role != label]
        if self._role != label:
            channels[label].send_bytes(b"", saved, "online")
            channels[label].receive_bytes(go_on, 0)
            commit()
            return
        for role in others:
            channels[role].receive_bytes(saved, 0)
        commit()
        for role in others:
            channels[role].send_bytes(b"", go_on, "online")

    def weights(self) -> dict[str, Tensor]:
        return {} if self._model is None else {_MODEL: self._model}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        raise AssertionError("only the final weights can be stored, because no epoch is validated")

    def training_state(self) -> dict[str, Any]:
        assert self._share is not None, "a training has begun"
        return {
            "share": self._share.share,
            "model": self._model,
            "trained": self._trained,
            **self._kept(),
        }

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        facts = self._known
        # This party does not know the other parties' rows yet.
        if facts is None or not self._training_rows(facts):
            return ()
        plan = self._plan_of(facts)
        hidden, left_out = "no other party knows which rows a batch had", len(self._holders) // 3
        noise = "no holder omits its noise"
        if left_out:
            noise = f"at most {left_out} of {len(self._holders)} holders leave their noise out"
        assumes = (
            hidden,
            "the numbers of rows are public",
            noise,
            "all parties follow the protocol otherwise, and the dealer does not collude",
            "means and deviations of columns and the choice of settings are not counted",
        )
        stated = [plan.statement(plan.steps)]
        if self._mode.start != "zero":
            alone = self._alone(plan, facts)
            least = min(one.rows for one in facts.holders)
            before = [GaussianSteps(alone.noise, alone.steps, alone.batch_size / least)]
            if alone.judge_noise:
                before.append(GaussianSteps(alone.judge_noise, 1, plan.batch_size / plan.rows))
            stated += [replace(stated[0], epsilon=epsilon_of(one, plan.delta)) for one in before]
        return (replace(added(stated), assumes=assumes),)

    # Steps before the training begins; see `NetworkEnd`.

    def announced(self) -> bytes | None:
        return None if self._own is None else self._own.model_dump_json().encode()

    def facts_of(self, told: Mapping[str, bytes]) -> Facts:
        holders = tuple(
            read_description(OwnFacts, raw, f"party '{name}'") for name, raw in told.items()
        )
        assert self._rows.split is not None, "the label party has rows"
        asked = len(self._rows.split.test)
        # The names are empty if the rows have no labels.
        classes = self._rows.names or tuple(range(self._rows.classes))
        return Facts(holders=holders, classes=classes, asked=asked)

    def sizes_of(self, facts: Facts) -> PeaLayers:
        own = self._own
        if len(facts.holders) != len(self._holders):
            raise ProtocolError("the label party's description names other parties than the terms")
        if own is not None and facts.holders[self._role] != own:
            raise DisagreementError(
                "the label party's description states other rows than this party has",
                got=f"{facts.holders[self._role].rows} rows",
                want=f"{own.rows} rows",
            )
        _check_alike(self._mode, self._terms, facts)
        rows = self._training_rows(facts)
        plan = PrivacyPlan.of(self._terms, rows) if self._terms.mode == "train" else None
        sizes = PeaLayers(
            training_rows=rows,
            columns=self._columns(facts),
            classes=len(facts.classes),
            batch_rows=facts.asked if plan is None else plan.most_rows,
        )
        require_frame(sizes.frame_bytes, "the inputs of all rows")
        return sizes

    def _player_of(self, links: Mapping[int, Link]) -> Member:
        return Member(self._role, links, len(self._holders))

    def _started(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Any] | None
    ) -> None:
        member, facts = self._begun, self._facts
        if self._terms.mode != "train":
            self._model = None if not weights else weights[_MODEL]
            return
        plan = self._plan = self._plan_of(facts)
        self._sgd = self._settings(facts, plan)
        self._trained = 0 if state is None else int(state["trained"])
        self._refuse_again(plan.steps)
        own, self._shared = self._share_rows(member, self._sgd, facts)
        self._share = first_weights(member, self._sgd)
        if state is None and self._mode.start != "zero":
            alone = self._alone(plan, facts)
            # The rows of this training step score the models.
            longer = replace(plan, steps=plan.steps + 1)
            judged = longer.batches(self._terms, np.arange(plan.rows))(longer.epochs)[-1]
            rows = self._shared, torch.from_numpy(judged)
            self._share = started(member, self._sgd, alone, own, self._noise, *rows)
        if state is not None:
            self._share = replace(self._share, share=state["share"])
            self._model = state["model"]

    # Steps that the methods above combine.

    def _training_rows(self, facts: Facts) -> int:
        rows = [one.rows for one in facts.holders]
        return sum(rows) if self._mode.divides_rows else rows[self._label_role]

    def _plan_of(self, facts: Facts) -> PrivacyPlan:
        """Return the privacy plan of the training on shares.

        The earlier parts of the training spend the rest of the budget.
        """
        terms = self._terms
        if self._mode.start != "zero":
            epsilon, delta = self._part()
            assert terms.dp is not None, "a mode that needs [dp]"
            dp = terms.dp.model_copy(update={"epsilon": epsilon, "delta": delta})
            terms = terms.model_copy(update={"dp": dp})
        plan = PrivacyPlan.of(terms, self._training_rows(facts))
        assert plan is not None, "a mode that needs [dp]"
        return plan

    def _part(self) -> tuple[float, float]:
        """Return epsilon and delta of each part of a training that starts from other models."""
        dp, parts = self._terms.dp, _PARTS[self._mode.start]
        assert dp is not None, "a mode that needs [dp]"
        assert dp.epsilon is not None, "it is refused without"
        return dp.epsilon / parts, dp.delta / parts

    def _alone(self, plan: PrivacyPlan, facts: Facts) -> LocalStart:
        """Plan each holder's own training; its sampling rate suits the holder with fewest rows."""
        mode, part, rate = self._mode, self._part(), self._terms.train.learning_rate
        assert mode.start != "zero", "the session has separate models of all holders"
        least = min(one.rows for one in facts.holders)
        size = max(1, least * plan.batch_size // plan.rows)
        noise = noise_for(*part, plan.steps, size / least, plan.accountant)
        judge = 0.0
        if mode.start == "best":
            judge = noise_for(*part, 1, plan.batch_size / plan.rows, plan.accountant)
        return LocalStart(plan.steps, size, rate, noise, mode.start, judge)

    def _columns(self, facts: Facts) -> int:
        columns = [one.columns for one in facts.holders]
        return columns[0] if self._mode.divides_rows else sum(columns)

    def _settings(self, facts: Facts, plan: PrivacyPlan) -> SecureSgd:
        dp, mode = self._terms.dp, self._mode
        assert dp is not None, "a mode that needs [dp]"
        rows = [one.rows for one in facts.holders]
        if not mode.divides_rows:  # all holders have the same rows, so one set of indices suffices
            rows = [plan.rows, *[0] * (len(rows) - 1)]
        return SecureSgd(
            rows=tuple(rows),
            columns=self._columns(facts),
            classes=len(facts.classes),
            steps=plan.steps,
            batch_size=plan.batch_size,
            learning_rate=self._terms.train.learning_rate,
            clip=dp.clip,
            noise=plan.noise,
            longest=mode.longest,
            form=mode.form,
        )

    @property
    def _own(self) -> OwnFacts | None:
        """Return this party's description of its rows if the party holds shares; otherwise None."""
        rows, inputs = self._rows, self._rows.inputs
        if self.party not in self._holders:
            return None
        assert rows.split is not None, "a holder has rows"
        trains = self._terms.mode == "train"
        names = ""
        if self._mode.divides_rows:
            names = hashlib.sha256(json.dumps(rows.columns).encode()).hexdigest()
        return OwnFacts(
            rows=len(rows.split.train) if trains else 0,
            columns=0 if inputs is None else inputs[0].numel(),
            names=names,
        )

    def _refuse_again(self, last: int) -> None:
        """Refuse to repeat a training whose final model may be known.

        Averaging the final models of two such trainings would cancel noise.
        """
        if self._rows.committed >= last > self._trained:
            raise PrivacyError(
                "the model of this training may have been revealed, and a second one would cost "
                "privacy that is not counted",
                where=f"party '{self.party}'",
                got=f"a restart from step {self._trained}",
                want=f"from step {last}, where all parties have saved",
                fix="restore the checkpoint from a copy, or train under another name",
            )

    def _share_rows(
        self, member: Member, sgd: SecureSgd, facts: Facts
    ) -> tuple[Rows | None, SharedRows]:
        """Return this holder's rows if it has all columns, and the shared rows of all holders."""
        inputs = labels = None
        if not member.deals and self._rows.split is not None:
            train = torch.from_numpy(self._rows.split.train)
            if self._rows.inputs is not None:
                inputs = self._rows.inputs.double().flatten(1)[train]
            if self._rows.labels is not None:
                labels = self._codes(facts)[train]
        if not self._mode.divides_rows:
            columns = [one.columns for one in facts.holders]
            return None, shared_columns(member, sgd, columns, self._label_role, inputs, labels)
        own = None
        if not member.deals:
            assert inputs is not None, "a holder has columns"
            assert labels is not None, "and labels"
            own = inputs, labels
        return own, shared_rows(member, sgd, own)

    def _codes(self, facts: Facts) -> Tensor:
        """Return the party's own labels as the numbers that all parties use for classes."""
        labels, known = self._rows.labels, {name: at for at, name in enumerate(facts.classes)}
        assert labels is not None, "whose codes they are"
        unknown = sum(name not in known for name in self._rows.names)
        if unknown:
            raise DataError(
                f"party '{self.party}' has classes that the label party lacks",
                got=f"{unknown} of {len(self._rows.names)} classes unknown",
                fix="give the label party rows of every class, with classes spelled the same at"
                " all parties",
            )
        places = torch.tensor([known[name] for name in self._rows.names], dtype=torch.int64)
        return places[labels]

    def _answers(self, exchange: Exchange) -> Tensor | None:
        """Return the model's outputs for some rows at the label party, axes (rows, classes)."""
        index, part = exchange.rows, None
        apart = self._mode.divides_rows
        has_rows = self._role == self._label_role or not apart
        if has_rows and self._model is not None and self._rows.inputs is not None:
            part = self._outputs(self._model, index)
        if apart:
            return part
        member, shape = self._begun, (len(index), len(self._facts.classes))
        shares = [
            member.share(role, shape, part if role == self._role else None, "outputs").share
            for role, one in enumerate(self._facts.holders)
            if one.columns
        ]
        total = SharedTensor(torch.stack(shares).sum(0), member.bits)
        found = member.reveal(total, f"{exchange.phase} outputs", to=self._label_role)
        if found is None or self._model is None:
            return None
        return found + self._model[-1]

    def _outputs(self, model: Tensor, index: np.ndarray) -> Tensor:
        """Return this party's part of the outputs, with the bias if it has all columns."""
        rows, facts, mode = self._rows, self._facts, self._mode
        assert rows.inputs is not None, "it has columns"
        assert rows.split is not None, "it has rows"
        phase = rows.split.test[index]
        inputs = rows.inputs.double().flatten(1)[torch.from_numpy(phase)]
        if mode.divides_rows:
            return model_inputs(inputs, mode.longest) @ model[:-1] + model[-1]
        columns = [one.columns for one in facts.holders]
        start = sum(columns[: self._role])
        holders = sum(1 for one in columns if one)
        short = model_inputs(inputs, mode.longest, holders)
        return short @ model[start : start + columns[self._role]]


# Refused settings.


def _check_alike(mode: Pea, terms: Terms, facts: Facts) -> None:
    """Require that all holders have the same columns, or that all have the same rows."""
    if mode.divides_rows:
        if len({(one.columns, one.names) for one in facts.holders}) > 1:
            counts = ", ".join(str(one.columns) for one in facts.holders)
            raise DisagreementError(
                "the holders' tables have different columns",
                got=f"{counts} columns, or others of the same number",
                want="the same columns in the same order at every holder",
                fix="[data] columns in each party's own file",
            )
        if terms.mode == "train" and any(not one.rows for one in facts.holders):
            raise DisagreementError("a holder has no rows to train on")
    elif len({one.rows for one in facts.holders}) > 1:
        raise DisagreementError("the holders train on different rows")


def _check_classes(rows: OwnRows) -> None:
    if not rows.classes:
        raise ExposedCutError(
            "clipping a row's gradient needs class outputs, and a regression has none",
            got="label.task = 'regression'",
            want="label.task = 'classification'",
        )
    require_range("classes", rows.classes, 2, _MOST_CLASSES)


def _check_model(agreed: Agreed, alike: bool) -> None:
    """Require a linear top model and bottom models without weights.

    If the parties divide rows, the bottom models must be equal. Only the label party knows the top
    model, so the terms of the session do not contain it.
    """
    bottoms = [asked.bottom for asked in agreed.parties.values()]
    fixed = all(isinstance(models.make_bottom(spec), models.FixedBottom) for spec in bottoms)
    if agreed.merge != "concat" or not fixed or (alike and len(set(bottoms)) > 1):
        raise ExposedCutError(
            "the model is one linear layer, and no party has a part of its own",
            got=f"merge = '{agreed.merge}', bottom = {', '.join(map(repr, bottoms))}",
            want="merge = 'concat', bottom = 'identity' or 'hog' at every party"
            + (", the same at all" if alike else ""),
        )


def _check_top(top: str | nn.Module) -> None:
    """Refuse a top model that is not a linear layer.

    Raises:
        ExposedCutError: the top model is of another kind; the error names the one that is possible.
    """
    if top != "linear":
        raise ExposedCutError(
            "the model is one linear layer, and no party has a part of its own",
            got=f"label.top = '{top if isinstance(top, str) else type(top).__name__}'",
            want="label.top = 'linear'",
        )


def _whole_budget(agreed: Agreed) -> bool:
    return agreed.dp is not None and agreed.dp.epsilon is not None and agreed.dp.noise is None


def _check_dp(agreed: Agreed) -> None:
    dp = agreed.dp
    if dp is None:
        raise PrivacyError(
            "the model is revealed, and without noise it would disclose facts about rows",
            where="dp",
            want="[dp] with an epsilon, or a noise",
            fix="-s dp.epsilon=1 -s dp.delta=1e-5",
        )
    wrong = {
        "dp.clips": dp.clips and "norms of parties",
        "dp.clip_by": dp.clip_by != "half" and dp.clip_by,
        "dp.quantile": dp.quantile is not None and f"{dp.quantile}",
        "dp.sampling": dp.sampling != "poisson" and dp.sampling,
    }
    for name, got in wrong.items():
        if got:
            raise PrivacyError(
                "every gradient of a sampled row is clipped to one public norm",
                where=name,
                got=str(got),
                want="dp.clip, and dp.sampling = 'poisson'",
            )
