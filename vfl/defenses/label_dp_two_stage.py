"""Randomised response in two stages: what some rows taught is the prior of the others' labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vfl.compression import Moment
from vfl.defenses.base import Defense, LabelKind, PrivacyStatement, Side
from vfl.defenses.label_dp import flip_of, respond, respond_with_prior
from vfl.defenses.refusals import refuse_early_readers, require_classes, require_equal_weights
from vfl.errors import SpecError
from vfl.options import require, require_range
from vfl.seeds import Secret


class TwoStageLabelDP(Defense):
    """Labels of some rows are randomised before the first step, the others' later, with a prior.

    In the first stage nothing is learned from the late rows: their gradients are zero. What the
    top then says of each of them, in the stage's last epoch, is the prior of its own answer
    (RRWithPrior), and training goes on with all rows. The top never saw a label of theirs, and
    every label is randomised once, so epsilon holds for each label as it does for `label_dp`: all
    that follows, the priors too, only processes answers. Which rows are late is no secret.

    Source: Ghazi et al. 2021, "Deep learning with label differential privacy", LP-2ST, the case of
    two stages of their LP-MST. There the prior comes from a pass over the late rows; here from
    outputs of the batches they are in anyway, so that nothing travels that did not before.

    Args:
        epsilon: of one label.
        epochs: of the first stage; the training must have more.
        share: of the rows in the first stage.

    >>> defense = TwoStageLabelDP(epsilon=2, epochs=1)
    >>> defense.prepare(LabelKind(classes=10))
    >>> told = defense.labels(torch.arange(10), Secret.of_simulation(0, "lender"))
    >>> 0 < int(defense.counts(torch.arange(10), epoch=1).sum()) < 10
    True

    Raises:
        BadOptionError: an option out of range.
    """

    side: ClassVar[Side] = "label"
    rows_apart: ClassVar[bool] = True
    once: ClassVar[bool] = True

    def __init__(self, epsilon: float = 1.0, epochs: int = 5, share: float = 0.5) -> None:
        require_range("epsilon", epsilon, 0)
        require_range("epochs", epochs, 1)
        require("share", share, "above 0 and below 1", 0 < share < 1)
        self.epsilon = epsilon
        self.epochs = epochs
        self.share = share
        self._classes = 0
        self._exact: np.ndarray | None = None
        self._told = torch.empty(0, dtype=torch.int64)
        self._seen = torch.empty(0)  # what the top last said of each row, until the second stage
        self._places: Tensor | None = None

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        refuse_early_readers("label_dp_two_stage", (*before, *after), "label_dp, or it alone")

    def prepare(self, kind: LabelKind) -> None:
        self._classes = require_classes("label_dp_two_stage", kind)
        require_equal_weights("label_dp_two_stage", kind)
        if kind.epochs is not None and kind.epochs <= self.epochs:
            raise SpecError(
                "the training ends before the second stage of 'label_dp_two_stage'",
                got=f"{kind.epochs} epochs",
                want=f"more than the {self.epochs} of the first stage",
                fix="fewer 'epochs' in the spec, or more in train.epochs",
            )

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        self._exact = labels.numpy()
        draws = secret.uniform((len(labels), 3), "label_dp_two_stage")
        self._draws = draws[:, 1:]
        self._late = draws[:, 0] >= self.share
        flip = flip_of(self.epsilon, self._classes)
        told = respond(self._exact, self._classes, flip, self._draws)
        told[self._late] = 0  # of no meaning, and nothing learns from it
        self._told = torch.from_numpy(told).to(labels.dtype)
        self._seen = torch.zeros(len(labels), self._classes)
        return self._told.clone()

    def counts(self, places: Tensor, epoch: int) -> Tensor | None:
        self._places = places
        if epoch > self.epochs and len(self._seen):
            self._answer()
        return ~torch.from_numpy(self._late)[places] if len(self._seen) else None

    def batch(
        self, inputs: Tensor | None, labels: Tensor | None, moment: Moment
    ) -> tuple[Tensor | None, Tensor | None]:
        if labels is not None and self._places is not None:
            labels = self._told[self._places]
        return inputs, labels

    def logits(self, logits: Tensor, moment: Moment) -> Tensor:
        if moment.training and self._places is not None and len(self._seen):
            self._seen[self._places] = logits.detach().float().cpu()
        return logits

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = "everybody, in one training; a second one draws anew"
        return (PrivacyStatement("labels", against, self.epsilon, 0.0, "one training label"),)

    def state_dict(self) -> Mapping[str, Tensor]:
        return {"told": self._told, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        told = state["told"]
        if self._exact is not None and len(told) != len(self._exact):
            raise SpecError(
                "'label_dp_two_stage' goes on with the labels it was given first",
                got=f"{len(self._exact)} training rows",
                want=f"the same {len(told)} as before",
            )
        self._told, self._seen = told.clone(), state["seen"].clone()

    def _answer(self) -> None:
        """Randomise the labels of the late rows, each with what the top says as its prior."""
        assert self._exact is not None, "labels comes first"
        late = self._late
        priors = torch.softmax(self._seen.double(), dim=1).numpy()[late]
        answers = respond_with_prior(self._exact[late], priors, self.epsilon, self._draws[late])
        self._told[torch.from_numpy(late)] = torch.from_numpy(answers).to(self._told.dtype)
        self._seen = self._seen[:0]
