"""The defense contract: hooks of one training step, each called at one of the two parties.

Order in which the parties of one training step call the hooks:

    label party, once    prepare; merged, wrap_top; labels
    feature party, once  wrap_bottom, then fit
    label party          counts
    each party           batch
    feature party        embedding -> codec ... ; local_loss joins its own backward pass
    label party          ... -> merge -> top -> logits -> task loss of targets + loss
                         gradient -> codec
    feature party        ... -> received -> backward pass

    In a U-shape, the feature party passes the returned cut through the layers of `restorer`.

A feature party first consents to the memory and time that the hooks need, and then calls them. For
this consent, `working_bytes` and `fit_epochs` state the hooks' memory and epochs, and the party
measures the memory of the wrapped bottom on meta tensors.

A defense overrides the hooks that it needs. Random numbers that protect data come from
`context.secret`, the secret of the party at which the hook runs, and never from the run's seed. If
the label party also has columns, the cut of these columns never leaves the label party. So no
defense wraps the bottom of these columns, and `loss` does not receive their cut among its `cuts`.

`Chain` joins several defenses. A member of a chain can refuse a kind of labels that it cannot
protect. A member can also refuse other members, and models, that would invalidate its guarantee.
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
from vfl.models.losses import CrossEntropy
from vfl.models.losses import Loss as TaskLoss
from vfl.privacy import PrivacyStatement

Side = Literal["feature", "label", "both"]

_Value = TypeVar("_Value", Tensor, nn.Module)

#: A batch's inputs and labels; each is None at a party that does not have it.
Batch = tuple[Tensor | None, Tensor | None]
#: Decoded cuts, by name of the feature party.
Cuts = Mapping[str, Tensor]
#: A scalar that the hook adds to the loss of its party; None adds nothing.
Loss = Tensor | None

#: Largest batch size that `Defense.fit` may use to train a bottom, if `fit_epochs` is above 0.
FIT_ROWS = 128
#: Upper limits of the options epsilon, epochs, steps and rows. A value above the limit is a
#: mistake, or comes from an attacker.
MOST_EPSILON = 10_000.0
MOST_EPOCHS = 100_000
MOST_STEPS = 10**9
MOST_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class LabelKind:
    """Properties of a session's labels and loss that do not depend on any single label.

    Attributes:
        classes: number of classes; None for a regression, whose labels are numbers.
        weighted: whether some rows or classes have a larger weight in the loss than other rows or
            classes.
        epochs: number of epochs of the training; None if it is not known.
        calibrated: whether the label party calibrates its predictions with the labels of validation
            rows.
        loss: loss function that the settings name; None is the usual loss of the task.
        local_steps: number of steps of the label party's optimiser for each exchange.
        scaled: whether the task scales numeric labels by the mean and standard deviation of all
            training labels.
    """

    classes: int | None
    weighted: bool = False
    epochs: int | None = None
    calibrated: bool = False
    loss: TaskLoss | None = None
    local_steps: int = 1
    scaled: bool = False


class Defense:
    """Base class of defenses. The constructor takes hyper-parameters; by default, hooks do nothing.

    Attributes:
        side: the party that must run the defense. "both" means that both parties build the defense
            from the same spec.
        label_free: whether the defense's hooks at the label party ignore labels. If so, these hooks
            do not invalidate a guarantee for labels that another defense of the chain gives.
        rows_apart: whether every hook treats each row separately. If so, these hooks do not
            invalidate a guarantee for one row that another defense of the chain gives.
        once: whether a chain may contain the defense only once, because two copies would make the
            same random draws.
        reads_cuts: whether the method `loss` reads the cuts of the feature parties.
        fit_epochs: number of epochs for which `fit` trains the bottom.
        unaligned: whether `fit` also receives the party's unaligned rows (rows that other parties
            do not have).
        of_words: whether the defense replaces words of the input texts. If so, the bottom must have
            a word embedding.
        separate_rows: models ("bottom", "top"), each with the codec's trained module, in which a
            row's output must depend on this row's input only, because the defense's guarantee for a
            row assumes it. vfl tests whether these models have this property before a session
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
        """Return the most bytes that the hooks at a feature party allocate during a training.

        The result covers the hooks `fit`, `batch`, `embedding`, `local_loss` and `received`
        together. In addition, vfl counts a few arrays of the cut's size and the inputs that `fit`
        receives, and measures the memory of the wrapped bottom on meta tensors. vfl calls this
        method before it allocates memory; the feature party refuses a training that needs more
        memory than its consent allows.

        Args:
            rows: batch size.
            columns: number of the party's input columns: the product of a row's axes.
            width: width of the cut before or after the codec, whichever is larger.
        """
        return 0

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Refuse other members of the chain that would invalidate this defense's guarantee.

        Raises:
            SpecError: another member would invalidate the guarantee; the error names that member.
        """

    def prepare(self, kind: LabelKind) -> None:
        """Receive properties of the labels; the label party calls this hook before all others.

        Raises:
            SpecError: the defense cannot protect labels with these properties.
        """

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        """Return the labels that the label party trains on, axes (rows,); called only once."""
        return labels

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        """Return the bottom that the feature party trains; its output keeps axes (rows, width)."""
        return bottom

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        """Fit the wrapped bottom to the party's training inputs, once, before the first step.

        The learned weights must be part of `bottom`, so that the party's checkpoints contain them.

        Args:
            bottom: the module from `wrap_bottom`, inside the wrappers of later defenses.
            inputs: training inputs without labels, axes (rows, ...), on the CPU. Rows are in
                ascending order; unaligned rows (which other parties do not have) come last.
            secret: the feature party's secret.
        """

    def merged(self, widths: Sequence[int]) -> None:
        """Receive the width of each party's part of the merged cut; called before `wrap_top`.

        Args:
            widths: one width for each party with a cut, in the order in which the merger reads
                them, including the label party's own cut; only the total width if the merger mixes
                the parties' cuts.

        Raises:
            SpecError: the defense cannot work with a merged cut of these widths.
        """

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        """Return the top that the label party trains; `width` is the width of the merged cut."""
        return top

    def counts(self, indices: Tensor, epoch: int) -> Tensor | None:
        """Return a mask of the rows from which the label party learns in the next training batch.

        Args:
            indices: positions of the batch's rows among the labels given to the method `labels`;
                int64, axes (rows,).
            epoch: number of the current epoch, counted from 1.

        Returns:
            Mask of type bool, axes (rows,); None selects all rows. Losses and metrics leave out the
            rows where the mask is False.
        """
        return None

    def batch(self, inputs: Tensor | None, labels: Tensor | None, context: StepContext) -> Batch:
        """Return the batch on which a party trains: inputs and, at the label party, labels."""
        return inputs, labels

    def embedding(self, cut: Tensor, context: StepContext) -> Tensor:
        """Return the cut that the feature party encodes; the result must be differentiable."""
        return cut

    def local_loss(self, cut: Tensor, inputs: Tensor, context: StepContext) -> Loss:
        """Return a scalar that the feature party adds to the loss of its own bottom."""
        return None

    def logits(self, logits: Tensor, context: StepContext) -> Tensor:
        """Return the logits that the label party uses for loss and predictions; differentiable."""
        return logits

    def targets(self, targets: Tensor, classes: int, context: StepContext) -> Tensor:
        """Return the targets of a training batch that the task loss compares with the logits.

        Args:
            targets: labels, axes (rows,), or the targets that an earlier defense of the chain
                returned.
            classes: number of columns of the logits.
            context: context of the step, with the label party's secret.

        Returns:
            Labels of axes (rows,), or class probabilities of axes (rows, classes).
        """
        return targets

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        """Return a scalar that the label party adds to the task loss; `cuts` are decoded cuts."""
        return None

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        """Return a party's gradient as the label party will encode and send it."""
        return grad

    def restorer(self, sent: int, returned: int) -> nn.Module | None:
        """Return layers that repair the cut returned in a U-shape; None if the cut needs no repair.

        The layers belong to the feature party, which trains them together with its last layers. The
        layers' method `forward(returned, cut, sent)` reads the returned cut, the party's cut before
        this defense, and the cut after the hook `embedding`. Each of these has axes (rows, ...,
        width); the result has the axes of `returned`.

        Args:
            sent: width of the cut that the party sends.
            returned: width of the cut that the party receives back.
        """
        return None

    def received(self, cut: Tensor, grad: Tensor, context: StepContext) -> Tensor:
        """Return the gradient that the feature party uses instead of the received gradient.

        The tensors `cut` and `grad` are detached and have axes (rows, width). If the codec changes
        the width, both tensors have the codec's width.

        Raises:
            PeerError: no honest label party would send a gradient like the received one.
        """
        return grad

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return the defense's privacy guarantees; empty if the defense guarantees nothing."""
        return ()

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return state that changes during training; the party's checkpoints contain it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned."""


class Chain(Defense):
    """Several defenses as one; each hook calls the members' hooks of the same name in order.

    Raises:
        SpecError: a member that a chain may contain only once occurs twice, or one member would
            invalidate another one's guarantee.
    """

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
        """Pass a value through the hooks with one name of all members, in order."""
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
    """Return those names in `hooks` that a defense, or a member of a chain, overrides."""
    if isinstance(defense, Chain):
        return [hook for hook in hooks if any(uses(member, hook) for member in defense.members)]
    return [hook for hook in hooks if getattr(type(defense), hook) is not getattr(Defense, hook)]


def protects(defense: Defense, side: Side) -> bool:
    """Return whether a defense, or a member of a chain, protects messages that one party sends.

    The defense must run at this party. The defense must also state a guarantee, or change a cut, a
    batch or a gradient before the party sends it.

    Args:
        defense: the defense.
        side: the party that sends the messages: "feature" or "label".
    """
    if isinstance(defense, Chain):
        return any(protects(member, side) for member in defense.members)
    hooks = ("batch", "embedding") if side == "feature" else ("gradient",)
    return defense.side in (side, "both") and bool(defense.privacy() or uses(defense, *hooks))


def _total(terms: Sequence[Tensor | None]) -> Tensor | None:
    present = [term for term in terms if term is not None]
    return sum(present[1:], start=present[0]) if present else None


class Undefended(Defense):
    """No defense: all hooks do nothing; the baseline with which defenses are compared."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def require_classes(defense: str, kind: LabelKind) -> int:
    """Return the number of classes; refuse the labels of a regression.

    Raises:
        SpecError: the labels are numbers for a regression.
    """
    if kind.classes is None:
        raise SpecError(
            f"'{defense}' needs classes, and the labels of a regression are numbers",
            want="label.task = 'classification'",
            fix="a defense that works for numbers, such as label_free or gradient_noise:norm=inf",
        )
    return kind.classes


def require_two_classes(defense: str, kind: LabelKind) -> None:
    """Refuse a task that does not have exactly two classes.

    Raises:
        SpecError: the task is a regression or does not have two classes.
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


def require_cross_entropy(defense: str, kind: LabelKind, smoothed: bool = False) -> None:
    """Refuse a loss other than the cross-entropy.

    Args:
        defense: name of the defense, for the error text.
        kind: properties of labels and loss.
        smoothed: whether the defense also works with label smoothing.

    Raises:
        SpecError: the loss is another one.
    """
    plain = type(kind.loss) is CrossEntropy and (smoothed or not kind.loss.smoothing)
    if kind.loss is not None and not plain:
        raise SpecError(
            f"'{defense}' computes with the gradient of the cross-entropy",
            where="label.loss",
            got=type(kind.loss).__name__,
            want="cross_entropy" if smoothed else "cross_entropy, without smoothing",
        )


def require_uncalibrated(defense: str, kind: LabelKind) -> None:
    """Refuse calibrated predictions, for a defense that protects labels from all parties.

    Raises:
        SpecError: predictions are calibrated; calibration curves are fitted to exact validation
            labels, which no noise protects.
    """
    if kind.calibrated:
        raise SpecError(
            f"'{defense}' protects labels from all parties, and calibrated answers disclose some",
            where="label.calibration",
            got="curves fitted to the exact labels of validation rows",
            want="label.calibration = 'none'",
        )


def refuse_hooks_on_labels(what: str, members: Sequence[Defense], cure: str, *early: str) -> None:
    """Refuse other members of the chain whose hooks make a row's gradient depend on exact labels.

    Args:
        what: the setting with which the refused members cannot be used; the error message names the
            setting.
        members: the other members of the chain.
        cure: a fix that the error message suggests.
        early: names of further hooks to refuse, which run while some labels must still stay secret.

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
    """Refuse other members of the chain that may mix rows before this defense adds its noise.

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
