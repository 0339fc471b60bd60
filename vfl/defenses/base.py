"""The defense contract: hooks along the way of a round, each at a named side.

Order of the hooks in one training round, as the data meets them:

    label party, once    prepare, labels
    either, once         wrap_bottom, then fit (feature party); wrap_top (label party)
    label party          counts
    each party           batch
    feature party        embedding -> codec ... ; local_loss joins its own backward pass
    label party          ... -> merge -> top -> logits -> task loss of targets + loss
                         gradient -> codec
    feature party        ... -> received -> backward pass

A defense overrides the hooks it needs. What protects draws from `moment.secret`, which belongs to
the party the hook runs at, never from the run's seed. Columns of the label party's own never leave
it: their bottom is not wrapped, and their cut is not in a loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from vfl.compression import Moment
from vfl.seeds import Secret

Side = Literal["feature", "label", "both"]


@dataclass(frozen=True, slots=True)
class PrivacyStatement:
    """What a defense promises, in terms that can be checked.

    Attributes:
        protects: "labels", "inputs" or "model".
        against: the attacker the promise is about, in one sentence.
        epsilon, delta: differential privacy of one `unit`; None where there is no such guarantee.
        unit: what the guarantee is about ("one label"); empty without a guarantee.
    """

    protects: str
    against: str
    epsilon: float | None = None
    delta: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        text = f"{self.protects} against {self.against}"
        if self.epsilon is None:
            return f"{text} (no epsilon)"
        delta = f", delta {self.delta:g}" if self.delta else ""
        return f"{text}: epsilon {self.epsilon:.4g}{delta} for {self.unit}"


@dataclass(frozen=True, slots=True)
class LabelKind:
    """What the labels of a session are; nothing that depends on one of them.

    Attributes:
        classes: how many there are; None where labels are numbers, in a regression.
        weighted: whether rows or classes weigh differently in the loss.
        epochs: of the training; None where that is not known.
    """

    classes: int | None
    weighted: bool = False
    epochs: int | None = None


class Defense:
    """One defense; its hyper-parameters are the constructor's arguments, every hook a no-op.

    Attributes:
        side: who must run it. "both" means both sides build it from the same spec.
        label_free: its hooks at the label party look at no label, so that after them a promise
            about labels still holds.
        rows_apart: no hook makes a row out of several, so that a promise about a row still holds.
        once: not twice in a chain, for both would make the same draws.
        reads_cuts: its `loss`, if it has one, looks at each party's cut.
    """

    side: ClassVar[Side] = "both"
    label_free: ClassVar[bool] = False
    rows_apart: ClassVar[bool] = False
    once: ClassVar[bool] = False
    reads_cuts: ClassVar[bool] = True

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Refuse the other members of a chain, in whose company a promise would be untrue.

        Raises:
            SpecError: with the member that is in the way.
        """

    def prepare(self, kind: LabelKind) -> None:
        """Told what the labels are, at the label party, before any other hook runs there.

        Raises:
            SpecError: the defense has no meaning for such labels.
        """

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        """The training labels the label party really uses; axes (rows,), called once."""
        return labels

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        """The bottom the feature party really trains; its output keeps axes (rows, width)."""
        return bottom

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        """Look at the feature party's own training inputs once, before the first step.

        What is learned stays in `bottom`, so that it is saved with the party's weights.

        Args:
            bottom: what `wrap_bottom` gave, and the wraps of other defenses around it.
            inputs: axes (rows, ...), on the CPU, in ascending order of the rows; not a label.
            secret: the feature party's.
        """

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        """The top the label party really trains; `width` is that of the merged cut."""
        return top

    def counts(self, places: Tensor, epoch: int) -> Tensor | None:
        """Which rows of the coming training batch are learned from, at the label party.

        Args:
            places: where they stand among the labels that `labels` was given; int64, axes (rows,).
            epoch: from 1.

        Returns:
            bool, axes (rows,), or None for all; the others are in no loss and in no figure.
        """
        return None

    def batch(
        self, inputs: Tensor | None, labels: Tensor | None, moment: Moment
    ) -> tuple[Tensor | None, Tensor | None]:
        """What a party really feeds: its inputs and, at the label party, its labels."""
        return inputs, labels

    def embedding(self, cut: Tensor, moment: Moment) -> Tensor:
        """The cut that is really encoded, at the feature party; differentiable."""
        return cut

    def local_loss(self, cut: Tensor, inputs: Tensor, moment: Moment) -> Tensor | None:
        """A scalar the feature party adds to its own backward pass."""
        return None

    def logits(self, logits: Tensor, moment: Moment) -> Tensor:
        """The output that is really used, at the label party; differentiable."""
        return logits

    def targets(self, targets: Tensor, classes: int, moment: Moment) -> Tensor:
        """What the task loss compares the logits of a training batch with.

        Args:
            targets: labels of axes (rows,), or what an earlier defense made of them.
            classes: columns of the logits.
            moment: step, and the label party's private draws.

        Returns:
            Labels of axes (rows,), or probabilities of axes (rows, classes).
        """
        return targets

    def loss(
        self, cuts: Mapping[str, Tensor], labels: Tensor, logits: Tensor, moment: Moment
    ) -> Tensor | None:
        """A scalar the label party adds to the task loss; `cuts` as decoded, by feature party."""
        return None

    def gradient(self, grad: Tensor, labels: Tensor, moment: Moment) -> Tensor:
        """The gradient of one party's cut that is really encoded, at the label party."""
        return grad

    def received(self, cut: Tensor, grad: Tensor, moment: Moment) -> Tensor:
        """The gradient the feature party really uses, of the one that came back for its cut.

        Both detached, axes (rows, width); with a codec that changes the width, its width.

        Raises:
            PeerError: no honest label party would send that.
        """
        return grad

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """What is promised; empty when it promises nothing that can be stated."""
        return ()

    def state_dict(self) -> Mapping[str, Tensor]:
        """State that moves during training, checkpointed with the party."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
