"""The defense contract: hooks of one training round, each called at one of the two parties.

Order in which one training round calls the hooks:

    label party, once    prepare, labels
    either, once         wrap_bottom, then fit (feature party); merged, wrap_top (label party)
    label party          counts
    each party           batch
    feature party        embedding -> codec ... ; local_loss joins its own backward pass
    label party          ... -> merge -> top -> logits -> task loss of targets + loss
                         gradient -> codec
    feature party        ... -> received -> backward pass

    In a U-shape, the feature party passes the returned cut through the layers of `restorer`.

A feature party consents to the needed memory and time before it calls any of these hooks. For this
consent, `working_bytes` and `fit_epochs` state the memory and the epochs that the hooks need, and
the party measures `wrap_bottom` on meta tensors.

A defense overrides the hooks that it needs. Random numbers that protect data come from
`context.secret`, the secret of the party at which the hook runs, and never from the run's seed. If
the label party also has columns, their cut never leaves the label party. So no defense wraps the
bottom of these columns, and their cut is not among the `cuts` of `loss`.

`Chain` joins several defenses. A member of a chain can refuse a kind of labels that it cannot
protect, and other members or models that would invalidate its guarantee.
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

#: Inputs and labels of a batch; None if a party has no inputs or no labels.
Batch = tuple[Tensor | None, Tensor | None]
#: Decoded cuts, by name of the feature party.
Cuts = Mapping[str, Tensor]
#: A scalar that a hook adds to the loss of the party at which it runs; None adds nothing.
Loss = Tensor | None

#: Largest batch size with which `Defense.fit` trains a bottom, if `fit_epochs` is above 0.
FIT_ROWS = 128
#: Upper limits of the options epsilon, epochs, steps and rows. A larger value is a mistake, or
#: comes from an attacker.
MOST_EPSILON = 10_000.0
MOST_EPOCHS = 100_000
MOST_STEPS = 10**9
MOST_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class LabelKind:
    """Properties of a session's labels; no single label changes them.

    Attributes:
        classes: number of classes; None for a regression, whose labels are numbers.
        weighted: whether some rows or classes have a larger weight in the loss than other rows or
            classes.
        epochs: number of epochs of the training; None if it is not known.
        calibrated: whether the label party calibrates its answers with the labels of validation
            rows.
    """

    classes: int | None
    weighted: bool = False
    epochs: int | None = None
    calibrated: bool = False


class Defense:
    """Base class of defenses. A constructor takes hyper-parameters; by default hooks do nothing.

    Attributes:
        side: the party that must run the defense. "both" means that both parties build the defense
            from the same spec.
        label_free: whether the defense's hooks at the label party ignore labels. If so, another
            member's guarantee for labels still holds after these hooks.
        rows_apart: whether every hook treats each row separately. If so, another member's guarantee
            for one row still holds.
        once: whether a chain may contain the defense only once, because two copies would make the
            same random draws.
        reads_cuts: whether the method `loss` reads the cuts of the feature parties.
        fit_epochs: number of epochs for which `fit` trains the bottom.
        unaligned: whether `fit` also receives the party's unaligned rows, which are in no session.
        of_words: whether the defense replaces words. If so, the bottom must have a word embedding.
        separate_rows: models ("bottom", "top") that must compute each row of their outputs from one
            row of inputs alone, because the guarantee for a row depends on this. vfl tests these
            models for this property before a session starts.
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
        """Return the most bytes that the hooks at a feature party allocate during a training.

        The result covers the hooks `fit`, `batch`, `embedding`, `local_loss` and `received`. vfl
        itself adds a few arrays of the cut's size, and measures `wrap_bottom` by running the
        wrapped bottom. vfl calls this method before any allocation; the feature party refuses sizes
        above the limit of its consent.

        Args:
            rows: batch size.
            columns: number of the party's input columns: the product of all axes of a row.
            width: width of the cut before or after the codec, whichever is larger.
        """
        return 0

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Refuse other members of the chain that would invalidate this defense's guarantee.

        Raises:
            SpecError: another member would invalidate the guarantee; the error names that member.
        """

    def prepare(self, kind: LabelKind) -> None:
        """Receive the kind of the labels; the label party calls this before any other hook.

        Raises:
            SpecError: the defense cannot protect labels of this kind.
        """

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        """Return the labels that the label party trains on, axes (rows,); called only once."""
        return labels

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        """Return the bottom that the feature party trains; its output keeps axes (rows, width)."""
        return bottom

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        """Fit the wrapped bottom to the party's training inputs, once, before the first step.

        The learned weights must be part of `bottom`, so that checkpoints of the party contain them.

        Args:
            bottom: the module from `wrap_bottom`, inside the wrappers of later defenses.
            inputs: training inputs without labels, axes (rows, ...), on the CPU. Rows are in
                ascending order; unaligned rows, which are in no session, come last.
            secret: the feature party's secret.
        """

    def merged(self, widths: Sequence[int]) -> None:
        """Receive the widths of the merged cut's parts; the label party calls it before `wrap_top`.

        Args:
            widths: one width for each party with a cut, in merge order, including the label party's
                own cut; only the total width if the merger mixes the parties' cuts.

        Raises:
            SpecError: the defense cannot work with a merged cut of these widths.
        """

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        """Return the top that the label party trains; `width` is the width of the merged cut."""
        return top

    def counts(self, indices: Tensor, epoch: int) -> Tensor | None:
        """Return a mask of the rows in the next training batch that the label party learns from.

        Args:
            indices: positions of the batch's rows in the labels that `labels` received; int64, axes
                (rows,).
            epoch: number of the current epoch, counted from 1.

        Returns:
            Mask of type bool, axes (rows,); None selects all rows. Losses and metrics leave out the
            other rows.
        """
        return None

    def batch(self, inputs: Tensor | None, labels: Tensor | None, context: StepContext) -> Batch:
        """Return the batch that a party trains on: its inputs and, at the label party, labels."""
        return inputs, labels

    def embedding(self, cut: Tensor, context: StepContext) -> Tensor:
        """Return the cut that the feature party encodes; the computation is differentiable."""
        return cut

    def local_loss(self, cut: Tensor, inputs: Tensor, context: StepContext) -> Loss:
        """Return a scalar that the feature party adds to its own loss."""
        return None

    def logits(self, logits: Tensor, context: StepContext) -> Tensor:
        """Return, differentiably, the logits that the label party uses for loss and answers."""
        return logits

    def targets(self, targets: Tensor, classes: int, context: StepContext) -> Tensor:
        """Return the targets of a training batch for the task loss.

        Args:
            targets: labels of axes (rows,), or targets that an earlier member returned.
            classes: number of columns of the logits.
            context: context of the step, with the label party's secret.

        Returns:
            Labels of axes (rows,), or class probabilities of axes (rows, classes).
        """
        return targets

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        """Return a scalar that the label party adds to the task loss; `cuts` holds decoded cuts."""
        return None

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        """Return the gradient of one party's cut that the label party encodes and sends."""
        return grad

    def restorer(self, sent: int, returned: int) -> nn.Module | None:
        """Return layers that repair the cut sent back in a U-shape; None if none are needed.

        The layers belong to the feature party, which trains them together with its last layers. The
        layers' method `forward(returned, cut, sent)` reads the cut that came back, the party's cut
        before this defense, and the cut after `embedding`. Each has axes (rows, ..., width); the
        result has the axes of `returned`.

        Args:
            sent: width of the party's cut.
            returned: width of the cut that comes back.
        """
        return None

    def received(self, cut: Tensor, grad: Tensor, context: StepContext) -> Tensor:
        """Return the gradient that the feature party uses in place of the received one.

        Both tensors are detached and have axes (rows, width). If the codec changes the width, this
        is the codec's width.

        Raises:
            PeerError: an honest label party would never send a gradient like the received one.
        """
        return grad

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return the defense's privacy guarantees; empty if it has none that can be stated."""
        return ()

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the state that changes in training; the party's checkpoints contain this state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""


class Chain(Defense):
    """Several defenses as one; each hook calls the members in the given order."""

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
    """Return the names among `hooks` that a defense, or a member of a chain, overrides."""
    if isinstance(defense, Chain):
        return [hook for hook in hooks if any(uses(member, hook) for member in defense.members)]
    return [hook for hook in hooks if getattr(type(defense), hook) is not getattr(Defense, hook)]


def protects(defense: Defense, side: Side) -> bool:
    """Return whether a defense, or a member of a chain, protects the messages that one party sends.

    The defense must run at this party. The defense must also state a guarantee, or change a cut, a
    batch or a gradient before the party sends it.

    Args:
        defense: the defense.
        side: the party: "feature" or "label".
    """
    if isinstance(defense, Chain):
        return any(protects(member, side) for member in defense.members)
    hooks = ("batch", "embedding") if side == "feature" else ("gradient",)
    return defense.side in (side, "both") and bool(defense.privacy() or uses(defense, *hooks))


def _total(terms: Sequence[Tensor | None]) -> Tensor | None:
    present = [term for term in terms if term is not None]
    return sum(present[1:], start=present[0]) if present else None


class Undefended(Defense):
    """A defense whose hooks all do nothing: the baseline for comparisons."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def require_classes(defense: str, kind: LabelKind) -> int:
    """Return the number of classes.

    Raises:
        SpecError: the labels are numbers of a regression.
    """
    if kind.classes is None:
        raise SpecError(
            f"'{defense}' needs classes, and the labels of a regression are numbers",
            want="label.task = 'classification'",
            fix="another defense; no defense of vfl hides exact labels that are numbers",
        )
    return kind.classes


def require_two_classes(defense: str, kind: LabelKind) -> None:
    """Refuse a task that does not have exactly two classes.

    Raises:
        SpecError: the task does not have two classes; the error states the number of classes.
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
    """Refuse unequal weights of rows or classes in the loss.

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
    """Refuse calibrated answers, for a defense that protects labels from all parties.

    Raises:
        SpecError: answers are calibrated; calibration curves are fitted to exact validation labels,
            which no noise protects.
    """
    if kind.calibrated:
        raise SpecError(
            f"'{defense}' protects labels from all parties, and calibrated answers disclose some",
            where="label.calibration",
            got="curves fitted to the exact labels of validation rows",
            want="label.calibration = 'none'",
        )


def refuse_hooks_on_labels(what: str, members: Sequence[Defense], cure: str, *early: str) -> None:
    """Refuse other members whose hooks make a row's gradient depend on exact labels.

    Args:
        what: the setting that does not allow the refused members; the error message names the
            setting.
        members: the other members of the chain.
        cure: a fix that the error message suggests.
        early: names of further hooks to refuse, because they run while some labels are still
            secret.

    Raises:
        SpecError: a member reads labels; the error names this member.
    """
    for member in members:
        if member.side == "feature" or member.label_free:
            continue
        if found := uses(member, *early, "loss", "targets", "batch", "gradient"):
            when = " while some of them stay hidden" if early else ""
            _refuse(what, member, f"looks at labels in '{found[0]}'{when}", cure)


def refuse_mixing(defense: str, members: Sequence[Defense], hook: str) -> None:
    """Refuse other members of the chain that may mix rows before the noise is added.

    Raises:
        SpecError: a member may mix rows; the error names this member.
    """
    for member in members:
        if uses(member, hook) and not member.rows_apart:
            does = f"may mix rows in '{hook}'"
            cure = f"{defense}:norm=inf, which promises nothing, or only one of the two defenses"
            _refuse(f"the epsilon of '{defense}' does not hold", member, does, cure)


def refuse_batch_norm(module: nn.Module, defense: str) -> None:
    """Refuse a model with batch normalisation, in which one row's output depends on other rows.

    Raises:
        SpecError: the model has batch normalisation, so clipping each row does not bound one row's
            influence.
    """
    if any(isinstance(part, _BATCH_NORMS) for part in module.modules()):
        raise SpecError(
            f"'{defense}' promises an epsilon for one row, and the model normalises over the batch",
            want="a model that treats each row on its own",
            fix=f"another model, or {defense}:norm=inf, which promises nothing",
        )


def _refuse(what: str, member: Defense, does: str, cure: str) -> None:
    raise SpecError(f"{what} beside {type(member).__name__}, which {does}", fix=cure)
