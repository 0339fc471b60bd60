"""The defense contract: hooks along a round, each called at one of the two parties.

Order of the hooks in one training round, in which data pass them:

    label party, once    prepare, labels
    either, once         wrap_bottom, then fit (feature party); merged, wrap_top (label party)
    label party          counts
    each party           batch
    feature party        embedding -> codec ... ; local_loss joins its own backward pass
    label party          ... -> merge -> top -> logits -> task loss of targets + loss
                         gradient -> codec
    feature party        ... -> received -> backward pass

    In a U-shape, where a cut comes back to the feature party, it passes `restorer` on arrival.

Before any of it, at a feature party whose consent is asked: `working_bytes` and `fit_epochs` state
the resources that the hooks will take. `wrap_bottom` is called there with a bottom on meta tensors.

A defense overrides the hooks that it needs. What protects draws from `context.secret`, which
belongs to the party the hook runs at, never from the run's seed. Columns of the label party's own
never leave it: their bottom is not wrapped, and their cut is not in a loss.

Below the contract: `Chain` joins several defenses; members can refuse labels without meaning for
them, and other members or models that would make a promise untrue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret
from vfl.privacy import PrivacyStatement

Side = Literal["feature", "label", "both"]

_Value = TypeVar("_Value", Tensor, nn.Module)

#: Inputs and labels; None if a party lacks them.
Batch = tuple[Tensor | None, Tensor | None]
#: Decoded cuts by feature party.
Cuts = Mapping[str, Tensor]
#: A scalar that is added to the party's own loss; None adds nothing.
Loss = Tensor | None

#: Largest batch on which `Defense.fit` trains a bottom, if `fit_epochs` is above 0.
FIT_ROWS = 128
#: Limits of epsilon, epochs, steps and rows in an option; a larger value is a mistake or an attack.
MOST_EPSILON = 10_000.0
MOST_EPOCHS = 100_000
MOST_STEPS = 10**9
MOST_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class LabelKind:
    """Kind of the labels in a session; no single label changes it.

    Attributes:
        classes: number of classes; None for a regression, whose labels are numbers.
        weighted: whether rows or classes weigh differently in the loss.
        epochs: number of epochs of the training; None if unknown.
        calibrated: whether answers are calibrated by labels of validation rows.
    """

    classes: int | None
    weighted: bool = False
    epochs: int | None = None
    calibrated: bool = False


class Defense:
    """One defense; its constructor takes hyper-parameters, and every hook does nothing by default.

    Attributes:
        side: parties that must run the defense. "both" means that both parties build it from the
            same spec.
        label_free: whether its hooks at the label party ignore labels, so that a promise about
            labels still holds afterwards.
        rows_apart: whether no hook mixes rows, so that a promise about a row still holds.
        once: not twice in a chain, for both would make the same draws.
        reads_cuts: whether its `loss`, if it has one, reads the cuts of the parties.
        fit_epochs: epochs over its rows that `fit` trains the bottom for.
        unaligned: whether `fit` also receives the party's rows outside all sessions.
        of_words: whether it changes words, so that the bottom must have a word embedding.
        separate_rows: models, "bottom" or "top", that must compute each row of outputs from one row
            alone; a promise about a row depends on it. vfl tests these models before a session
            starts.
    """

    side: ClassVar[Side] = "both"
    label_free: ClassVar[bool] = False
    rows_apart: ClassVar[bool] = False
    once: ClassVar[bool] = False
    reads_cuts: ClassVar[bool] = True
    fit_epochs: int = 0
    unaligned: bool = False
    of_words: bool = False
    separate_rows: frozenset[str] = frozenset()

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        """Return the most bytes that the hooks at a feature party allocate in a training.

        Count the hooks `fit`, `batch`, `embedding`, `local_loss` and `received`. vfl itself counts
        a few arrays of the cut's size, and `wrap_bottom` by running its result. It is computed
        before any allocation; the party refuses sizes above its consent.

        Args:
            rows: rows of a batch.
            columns: columns of the party's inputs, all axes of a row together.
            width: width of the cut before or after the codec, whichever is larger.
        """
        return 0

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Refuse other members of a chain that would make this defense's promise untrue.

        Raises:
            SpecError: a member contradicts the promise; the error names it.
        """

    def prepare(self, kind: LabelKind) -> None:
        """Receive the kind of labels, at the label party, before any other hook runs there.

        Raises:
            SpecError: the defense has no meaning for such labels.
        """

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        """Return the training labels that the label party uses; axes (rows,), called once."""
        return labels

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        """Return the bottom that the feature party trains; its output keeps axes (rows, width)."""
        return bottom

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        """Fit to the feature party's own training inputs once, before the first step.

        All that is learned is in `bottom`, so that it is saved with the party's weights.

        Args:
            bottom: the module from `wrap_bottom`, with the wraps of other defenses around it.
            inputs: axes (rows, ...), on the CPU, in ascending order of the rows, with rows outside
                all sessions at the end; without labels.
            secret: the feature party's.
        """

    def merged(self, widths: Sequence[int]) -> None:
        """Receive the widths of the merged cut's parts, at the label party, before `wrap_top`.

        Args:
            widths: one width for each party with a cut, in merge order, including the party's own;
                only the total width if the merger mixes parties.

        Raises:
            SpecError: the defense has no meaning for such a merged cut.
        """

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        """The top the label party really trains; `width` is that of the merged cut."""
        return top

    def counts(self, indices: Tensor, epoch: int) -> Tensor | None:
        """Select the rows of the next training batch to learn from, at the label party.

        Args:
            indices: positions of the rows among the labels that `labels` received; int64, axes
                (rows,).
            epoch: number of the epoch, counted from 1.

        Returns:
            bool, axes (rows,), or None for all rows. Losses and metrics omit other rows.
        """
        return None

    def batch(self, inputs: Tensor | None, labels: Tensor | None, context: StepContext) -> Batch:
        """Return the batch a party trains on: its inputs and, at the label party, its labels."""
        return inputs, labels

    def embedding(self, cut: Tensor, context: StepContext) -> Tensor:
        """Return the cut to encode, at the feature party; differentiable."""
        return cut

    def local_loss(self, cut: Tensor, inputs: Tensor, context: StepContext) -> Loss:
        """Return a scalar that the feature party adds to its own loss."""
        return None

    def logits(self, logits: Tensor, context: StepContext) -> Tensor:
        """The output that is really used, at the label party; differentiable."""
        return logits

    def targets(self, targets: Tensor, classes: int, context: StepContext) -> Tensor:
        """Return the targets of a training batch in the task loss.

        Args:
            targets: labels of axes (rows,), or the targets of an earlier defense.
            classes: columns of the logits.
            context: step, and the label party's private draws.

        Returns:
            Labels of axes (rows,), or probabilities of axes (rows, classes).
        """
        return targets

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        """A scalar the label party adds to the task loss; `cuts` as decoded, by feature party."""
        return None

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        """Return the gradient that the label party encodes for one party's cut."""
        return grad

    def restorer(self, sent: int, returned: int) -> nn.Module | None:
        """Return layers that repair what comes back in a U-shape; None for none.

        They belong to the feature party and train with its last layers. Their `forward(returned,
        cut, sent)` reads the cut that came back, the party's cut, and the same as `embedding` gave
        it, axes (rows, ..., width) each; it keeps the axes of `returned`.

        Args:
            sent: width of the party's cut.
            returned: width of the cut that comes back.
        """
        return None

    def received(self, cut: Tensor, grad: Tensor, context: StepContext) -> Tensor:
        """Return the gradient that the feature party uses in place of the received one.

        Both detached, axes (rows, width); with a codec that changes the width, its width.

        Raises:
            PeerError: the gradient is one that no honest label party would send.
        """
        return grad

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return the guarantees; empty if none can be stated."""
        return ()

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the state that changes during training; checkpoints of the party contain it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""


class Chain(Defense):
    """Several defenses; each hook calls the members in the given order."""

    def __init__(self, members: Sequence[Defense]) -> None:
        self.members = tuple(members)
        for at, member in enumerate(self.members):
            if member.once and any(type(other) is type(member) for other in self.members[:at]):
                raise SpecError(
                    f"{type(member).__name__} occurs twice in a chain, with the same random draws",
                    fix="name it once, with stronger options",
                )
            member.beside(self.members[:at], self.members[at + 1 :])

        self.fit_epochs = sum(member.fit_epochs for member in self.members)
        self.unaligned = any(member.unaligned for member in self.members)
        self.of_words = any(member.of_words for member in self.members)
        self.separate_rows = frozenset().union(*(one.separate_rows for one in self.members))

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return sum(member.working_bytes(rows, columns, width) for member in self.members)

    def prepare(self, kind: LabelKind) -> None:
        for member in self.members:
            member.prepare(kind)

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        return self._through("labels", labels, secret)

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return self._through("wrap_bottom", bottom, width)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        for member in self.members:
            member.fit(bottom, inputs, secret)

    def merged(self, widths: Sequence[int]) -> None:
        for member in self.members:
            member.merged(widths)

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        return self._through("wrap_top", top, width)

    def counts(self, indices: Tensor, epoch: int) -> Tensor | None:
        found = [member.counts(indices, epoch) for member in self.members]
        present = [one for one in found if one is not None]
        return torch.stack(present).all(dim=0) if present else None

    def batch(self, inputs: Tensor | None, labels: Tensor | None, context: StepContext) -> Batch:
        for member in self.members:
            inputs, labels = member.batch(inputs, labels, context)
        return inputs, labels

    def embedding(self, cut: Tensor, context: StepContext) -> Tensor:
        return self._through("embedding", cut, context)

    def local_loss(self, cut: Tensor, inputs: Tensor, context: StepContext) -> Tensor | None:
        return _total([member.local_loss(cut, inputs, context) for member in self.members])

    def logits(self, logits: Tensor, context: StepContext) -> Tensor:
        return self._through("logits", logits, context)

    def targets(self, targets: Tensor, classes: int, context: StepContext) -> Tensor:
        return self._through("targets", targets, classes, context)

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        return _total([member.loss(cuts, labels, logits, context) for member in self.members])

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        return self._through("gradient", grad, labels, context)

    def received(self, cut: Tensor, grad: Tensor, context: StepContext) -> Tensor:
        for member in self.members:
            grad = member.received(cut, grad, context)
        return grad

    def restorer(self, sent: int, returned: int) -> nn.Module | None:
        made = [member.restorer(sent, returned) for member in self.members]
        return next((one for one in made if one is not None), None)

    def _through(self, hook: str, value: _Value, *rest: object) -> _Value:
        """Pass a value through the hooks of the members in order."""
        for member in self.members:
            value = getattr(member, hook)(value, *rest)
        return value

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return tuple(statement for member in self.members for statement in member.privacy())

    def state_dict(self) -> Mapping[str, Tensor]:
        return {
            f"{position}.{key}": value
            for position, member in enumerate(self.members)
            for key, value in member.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for position, member in enumerate(self.members):
            prefix = f"{position}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            member.load_state_dict(own)


def uses(defense: Defense, *hooks: str) -> list[str]:
    """Return those of the hooks that a defense, or a member of a chain, overrides."""
    if isinstance(defense, Chain):
        return [hook for hook in hooks if any(uses(member, hook) for member in defense.members)]
    return [hook for hook in hooks if getattr(type(defense), hook) is not getattr(Defense, hook)]


def protects(defense: Defense, side: Side) -> bool:
    """Return whether a defense, or a member of a chain, protects messages from one party.

    It states a guarantee against that party, or changes a cut, a batch or a gradient before it is
    sent.

    Args:
        defense: the defense.
        side: "feature" or "label".
    """
    if isinstance(defense, Chain):
        return any(protects(member, side) for member in defense.members)
    hooks = ("batch", "embedding") if side == "feature" else ("gradient",)
    return defense.side in (side, "both") and bool(defense.privacy() or uses(defense, *hooks))


def _total(terms: Sequence[Tensor | None]) -> Tensor | None:
    present = [term for term in terms if term is not None]
    return sum(present[1:], start=present[0]) if present else None


class Undefended(Defense):
    """The baseline that defenses are compared with; every hook does nothing."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def require_classes(defense: str, kind: LabelKind) -> int:
    """The number of classes.

    Raises:
        SpecError: the labels are numbers.
    """
    if kind.classes is None:
        raise SpecError(
            f"'{defense}' needs classes, and the labels of a regression are numbers",
            want="label.task = 'classification'",
            fix="another defense; no defense of vfl hides exact labels that are numbers",
        )
    return kind.classes


def require_two_classes(defense: str, kind: LabelKind) -> None:
    """Refuse labels that are not of two classes.

    Raises:
        SpecError: the task has another number of classes; the error states it.
    """
    classes = require_classes(defense, kind)
    if classes != 2:
        raise SpecError(
            f"'{defense}' hides which of two classes a row has",
            got=f"{classes} classes",
            want="2 classes",
            fix="gradient_noise, tpsl or label_dp work for any number of classes",
        )


def require_equal_weights(defense: str, kind: LabelKind) -> None:
    """Refuse rows or classes of different weights.

    Raises:
        SpecError: weights are unequal, so the gradient of one label would depend on other labels.
    """
    if kind.weighted:
        raise SpecError(
            f"'{defense}' needs every row to weigh the same in the loss",
            got="weights of rows or classes",
            want="label.class_weight = 'none', and no weights of rows",
        )


def require_uncalibrated(defense: str, kind: LabelKind) -> None:
    """Refuse calibrated answers if a defense promises something about labels against everyone.

    Raises:
        SpecError: the calibration curves are fitted to validation labels, which no noise covers.
    """
    if kind.calibrated:
        raise SpecError(
            f"'{defense}' protects labels from all parties, and calibrated answers disclose some",
            where="label.calibration",
            got="curves fitted to the exact labels of validation rows",
            want="label.calibration = 'none'",
        )


def refuse_hooks_on_labels(what: str, members: Sequence[Defense], cure: str, *early: str) -> None:
    """Refuse members that let a row's gradient depend on labels which no noise covers.

    Args:
        what: the setting that excludes such members, for the message.
        members: the other members of the chain.
        cure: cure that the message names.
        early: further hooks to refuse, because they see labels that are not disclosed yet.

    Raises:
        SpecError: a member reads labels; the error names it.
    """
    for member in members:
        if member.side == "feature" or member.label_free:
            continue
        if found := uses(member, *early, "loss", "targets", "batch", "gradient"):
            when = " while some of them stay hidden" if early else ""
            _refuse(what, member, f"looks at labels in '{found[0]}'{when}", cure)


def refuse_mixing(defense: str, members: Sequence[Defense], hook: str) -> None:
    """Refuse members that may mix rows before the noise is added.

    Raises:
        SpecError: a member mixes rows; the error names it.
    """
    for member in members:
        if uses(member, hook) and not member.rows_apart:
            does = f"may mix rows in '{hook}'"
            cure = f"{defense}:norm=inf, which promises nothing, or one of the two alone"
            _refuse(f"the epsilon of '{defense}' does not hold", member, does, cure)


def refuse_batch_norm(module: nn.Module, defense: str) -> None:
    """Refuse a model in which one row's output depends on the others.

    Raises:
        SpecError: a member makes rows depend on each other, so clipping each row bounds nothing.
    """
    if any(isinstance(part, _BATCH_NORMS) for part in module.modules()):
        raise SpecError(
            f"'{defense}' promises an epsilon for one row, and the model normalises over the batch",
            want="a model that treats each row on its own",
            fix=f"another model, or {defense}:norm=inf, which promises nothing",
        )


def _refuse(what: str, member: Defense, does: str, cure: str) -> None:
    raise SpecError(f"{what} beside {type(member).__name__}, which {does}", fix=cure)
