"""Bottoms that start without labels and then receive a bounded number of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.registry import require_range
from vfl.core.seeds import Secret
from vfl.defenses.base import (
    MOST_EPSILON,
    MOST_STEPS,
    Batch,
    Defense,
    LabelKind,
    refuse_hooks_on_labels,
    require_classes,
    require_equal_weights,
)
from vfl.defenses.label_dp import flip_of, respond
from vfl.defenses.label_free import Anchored, LabelFree, Pretrained
from vfl.defenses.self_supervision import Learned, LearnsFirst
from vfl.privacy import PrivacyStatement

#: Text of an assumption that the guarantees state: the validation loss depends on true labels, and
#: a feature party could infer labels from the effects of this loss.
_UNJUDGED = "no validation loss ends the training or chooses its weights"
#: Text of a further assumption if exact labels are used: class weights and the scale of numeric
#: labels follow from all labels.
_COUNTS = "the class counts, or the mean and scale of numeric labels, are public"


class Bounded(nn.Module):
    """A bottom that trains only while `learns` is true, and otherwise runs in evaluation mode.

    Args:
        model: the bottom.

    Attributes:
        learns: whether the next training batch can still change the bottom's weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.learns = True

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the bottom's outputs, axes (rows, width), for inputs of axes (rows, ...)."""
        if self.learns or not self.training:
            outputs: Tensor = self.model(inputs)
            return outputs
        self.model.eval()  # freezes batch-norm statistics and stops dropout
        with torch.no_grad():
            outputs = self.model(inputs)
        return outputs


class FewRounds(LearnsFirst):
    """Bottoms learn without labels first, then from few gradients, and are then frozen.

    Before the first step, a bottom learns only from its owner's rows, without labels, as a
    `LabelFree` bottom does. The bottom then learns from the gradients of the first `steps`
    exchanges. In later exchanges, the label party sends zeros as gradients. The feature party keeps
    its bottom frozen even if the label party sends other values. So a feature party receives label
    information only about rows in the batches of the first `steps` exchanges, and each such row is
    in few batches. The top continues to learn from the labels of all rows.

    With `epsilon`, the first `steps` exchanges use randomised labels (Warner 1965; see `LabelDP`);
    the label party randomises each row's label only once. During these exchanges the top learns
    only from the randomised labels, so all messages to a feature party depend only on randomised
    labels. The top learns from true labels after the last exchange that returns a gradient. The
    result is label differential privacy against feature parties, but not against users who query
    the trained top. The guarantee assumes that no validation loss ends the training or chooses its
    weights.

    The design of this defense is our own. Sun et al. 2023 ("Communication-efficient vertical
    federated learning with limited overlapping samples") also combine few exchanges with local
    learning, to save bytes. Without `epsilon`, the leakage about labels of rows in the first
    exchanges can be measured but has no guaranteed bound.

    Args:
        steps: number of exchanges that return a gradient other than zeros, counted from the start
            of the session. An exchange for an evaluation between two epochs also counts. With 0,
            the bottom never learns from labels.
        epsilon: epsilon of the label differential privacy of one row's label against feature
            parties; None uses exact labels.
        kind: label-free objective with which the bottom learns before the first step: any kind of
            `LabelFree` except "random" and "pca".
        epochs: number of epochs over the party's rows with this objective.
        mask: share of a row's values to hide or replace before the first step, 0 to 0.9.
        unaligned: whether the bottom also learns from the party's unaligned rows (rows that other
            parties do not have).

    >>> defense = FewRounds(steps=20, epsilon=1)
    >>> defense.gradient(torch.ones(1, 2), torch.tensor([0]), StepContext(20)).tolist()
    [[0.0, 0.0]]

    Raises:
        BadOptionError: an option is out of range.
        SpecError: another defense of the chain makes the bottom, or reads labels while `epsilon` is
            set.
    """

    side = "both"
    rows_apart = True
    purpose = "few_rounds"

    def __init__(
        self,
        steps: int = 50,
        epsilon: float | None = None,
        kind: Learned = "simclr",
        epochs: int = 10,
        mask: float = 0.3,
        unaligned: bool = False,
    ) -> None:
        require_range("steps", steps, 0, MOST_STEPS)
        if epsilon is not None:
            require_range("epsilon", epsilon, 0, MOST_EPSILON)
        super().__init__(kind, epochs, mask, unaligned)
        self.steps = steps
        self.epsilon = epsilon
        self._classes = 0
        self._bottom: Bounded | None = None
        self._answers: Tensor | None = None  # randomised labels of all training rows
        self._indices: Tensor | None = None

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        others = (*before, *after)
        if any(isinstance(member, LabelFree | Anchored | Pretrained) for member in others):
            raise SpecError(
                "'few_rounds' builds the whole bottom, and so does another member of the chain",
                fix="use one of the two; few_rounds:steps=0 keeps the pretrained bottom frozen",
            )
        if self.epsilon is not None:
            what = "the epsilon of 'few_rounds' does not hold"
            refuse_hooks_on_labels(what, others, "few_rounds without epsilon, or few_rounds alone")

    def prepare(self, kind: LabelKind) -> None:
        if self.epsilon is not None:
            self._classes = require_classes("few_rounds:epsilon", kind)
            require_equal_weights("few_rounds:epsilon", kind)

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        if self.epsilon is not None:
            assert self._classes, "prepare comes first"
            draws = secret.uniform((len(labels), 2), "few_rounds")
            flip = flip_of(self.epsilon, self._classes)
            answers = respond(labels.numpy(), self._classes, flip, draws)
            self._answers = torch.from_numpy(answers).to(labels.dtype)
        return labels

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        self._bottom = Bounded(bottom)
        return self._bottom

    def counts(self, indices: Tensor, epoch: int) -> Tensor | None:
        self._indices = indices
        return None

    def batch(self, inputs: Tensor | None, labels: Tensor | None, context: StepContext) -> Batch:
        learns = context.step < self.steps
        if self._bottom is not None:
            self._bottom.learns = learns
        if labels is not None and learns and self._answers is not None:
            assert self._indices is not None, "counts comes first"
            labels = self._answers[self._indices]
        return inputs, labels

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        return grad if context.step < self.steps else torch.zeros_like(grad)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        if self.steps == 0:
            against = (
                "a feature party and every reader of its cuts, because no label enters a gradient"
            )
            return (PrivacyStatement("labels", against),)
        if self.epsilon is None:
            against = (
                f"a feature party, of rows that are in none of the first {self.steps} exchanges"
            )
            return (PrivacyStatement("labels", against, assumes=(_UNJUDGED, _COUNTS)),)
        return (
            PrivacyStatement(
                "labels",
                "a feature party, in one training; a second training draws new noise",
                self.epsilon,
                0.0,
                "label",
                relation="replace",
                accountant="randomised response",
                assumes=(_UNJUDGED,),
            ),
        )
