"""Transcript-private split learning: adds noise to the gradient with respect to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.registry import require_range
from vfl.core.seeds import fingerprint
from vfl.defenses.base import (
    MOST_EPSILON,
    Cuts,
    Defense,
    LabelKind,
    Loss,
    refuse_hooks_on_labels,
    require_classes,
    require_cross_entropy,
    require_equal_weights,
    require_uncalibrated,
)
from vfl.privacy import PrivacyStatement, kernel

#: Margin for rounding errors: the sum of a row's float32 probabilities differs from 1 by less than
#: this.
_ROUNDING = 2.0**-20
#: Smallest allowed epsilon; a smaller one gives noise so large that float32 cannot represent the
#: gradient beside it.
_LEAST_EPSILON = 1e-6


class TranscriptPrivacy(Defense):
    """Adds Laplace noise to the gradient of every row's logits (TPSL: Yang et al. 2022).

    The loss must be the cross-entropy, and each exchange may have only one step of the optimiser.
    Then a row's label influences the gradient of the row's logits only through its one-hot code.
    With two classes, the gradients for the two labels differ by (1, -1), so noise of scale
    1 / epsilon along that direction is enough. With more classes, each logit gets noise of scale
    2 / epsilon. All messages to other parties, and the top's weights, are post-processing of the
    noisy gradient (arXiv 2203.02073), so the guarantee also holds for them. The noisy gradient is
    rounded to a grid, so that its low bits disclose nothing (Mironov 2012). With two classes, the
    rounded gradient stays exactly on the direction (1, -1).

    Args:
        epsilon: epsilon of the guarantee for one row's label in one epoch.

    Raises:
        BadOptionError: an option is out of range.
        SpecError: the loss is not the cross-entropy, or `train.local_steps` is above 1.
    """

    side = "label"
    label_free = True
    once = True
    reads_cuts = False

    def __init__(self, epsilon: float = 1.0) -> None:
        require_range("epsilon", epsilon, _LEAST_EPSILON, MOST_EPSILON)
        self.epsilon = epsilon

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        what = "the epsilon of 'tpsl' does not hold"
        refuse_hooks_on_labels(what, (*before, *after), "only one of the two defenses")

    def prepare(self, kind: LabelKind) -> None:
        require_classes("tpsl", kind)
        require_equal_weights("tpsl", kind)
        require_uncalibrated("tpsl", kind)
        require_cross_entropy("tpsl", kind, smoothed=True)
        if kind.local_steps > 1:
            raise SpecError(
                "the epsilon of 'tpsl' counts one gradient of a row in an epoch",
                where="train.local_steps",
                got=str(kind.local_steps),
                want="1",
            )

    def loss(self, cuts: Cuts, labels: Tensor, logits: Tensor, context: StepContext) -> Loss:
        assert context.secret is not None, "losses are for training only"
        if not logits.requires_grad:
            return None
        rows, classes = logits.shape
        # The random stream of the noise depends on the logits. If a restarted run repeats a step
        # with other cuts, the same noise in both attempts would disclose the difference of the
        # exact gradients.
        purpose = "tpsl", context.step, repr(self.epsilon), fingerprint(logits)
        columns = 1 if classes == 2 else classes
        draws = torch.from_numpy(context.secret.laplace((rows, columns), *purpose))
        logits.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: self._noised(grad, draws)
        )
        return None

    def _noised(self, grad: Tensor, draws: Tensor) -> Tensor:
        """Return the gradient of the mean loss, (p - onehot) / rows, plus noise.

        Rounding towards 0 ensures that a changed label changes a logit's gradient by at most 1,
        because p and p - 1 have opposite signs.
        """
        rows, columns = draws.shape
        of_rows = grad[:, :columns].double() * rows
        norm = (1.0 if columns == 1 else 2.0) * (1 + _ROUNDING)
        noisy = kernel.release_rows(of_rows, norm, norm / self.epsilon, "laplace", draws)
        noisy = (noisy / max(1, rows)).to(grad)
        return torch.cat([noisy, -noisy], 1) if columns == 1 else noisy

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "all parties, in one epoch; epsilons add up over epochs, and trainings draw new noise"
        )
        one = PrivacyStatement("labels", against, self.epsilon, 0.0, "label", "epoch")
        return (replace(one, relation="replace", accountant="Laplace mechanism"),)
