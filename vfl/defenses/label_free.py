"""Defenses whose bottoms learn without labels before the first step, or only without labels.

`LabelFree` bottoms never learn from a label; they are the simplest reference for other defenses
that protect labels. `Anchored` bottoms add a small part that learns from labels to a large part
that never learns (principal components). `Pretrained` bottoms first learn without labels and then
from labels; such a start helps if few rows have labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import Secret
from vfl.defenses.base import MOST_EPOCHS, Defense, uses
from vfl.defenses.components import Components, fit_bytes
from vfl.defenses.self_supervision import Learned, LearnsFirst, learn, learning_bytes
from vfl.privacy import PrivacyStatement

Kind = Literal["random", "pca", Learned]
#: Largest number of features; a larger covariance matrix would take minutes to decompose.
_MOST_FEATURES = 4096


class Frozen(nn.Module):
    """A model whose weights and batch-norm statistics never change in training.

    Args:
        model: the model. The model always runs in evaluation mode, without dropout and with stored
            batch-norm statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Frozen:
        self.training = mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs without an autograd graph."""
        with torch.no_grad():
            outputs: Tensor = self.model(inputs)
        return outputs


class LabelFree(Defense):
    """Bottoms are made without labels and then frozen; the label party sends zero gradients.

    kind "random" keeps the bottom at its initial weights. "pca" replaces the bottom by principal
    components of `features` random features of the inputs, or of the inputs themselves if
    `features` is 0. With the other kinds, the bottom learns without labels from the feature party's
    training rows (see `vfl.defenses.self_supervision.learn`): autoencoder (Vincent et al. 2008),
    scarf (Bahri et al. 2022), simclr (Chen et al. 2020), vicreg (Bardes et al. 2022), vime (Yoon et
    al. 2020). All this happens before the first training step. Random numbers come from the feature
    party's secret; the resulting bottom is saved with the party's weights. Both parties run this
    defense: the label party sends a zero gradient, and the frozen bottom ignores any other
    gradient. Only the top learns from labels.

    Args:
        kind: "random", "pca", "autoencoder", "scarf", "simclr", "vicreg" or "vime".
        features: number of random features for "pca", up to 4096.
        epochs: number of epochs over the rows, for kinds that learn.
        mask: share of a row's values to hide or replace, 0 to 0.9, for kinds that learn.
        unaligned: whether the bottom also learns from the party's unaligned rows (rows that other
            parties do not have).

    Raises:
        BadOptionError: an option is out of range.
        SpecError: another defense of the chain works through gradients, which are zero here.

    >>> LabelFree("random").gradient(torch.ones(1, 2), torch.tensor([0]), StepContext()).tolist()
    [[0.0, 0.0]]
    """

    side = "both"
    label_free = True
    once = True

    def __init__(
        self,
        kind: Kind = "pca",
        features: int = 1024,
        epochs: int = 10,
        mask: float = 0.3,
        unaligned: bool = False,
    ) -> None:
        require_choice("kind", kind, get_args(Kind))
        require_range("features", features, 0, _MOST_FEATURES)
        require_range("epochs", epochs, 1, MOST_EPOCHS)
        require_range("mask", mask, 0, 0.9)
        self.kind = kind
        self.features = features
        self.epochs = epochs
        self.mask = mask
        self.unaligned = unaligned
        self.fit_epochs = epochs if kind in get_args(Learned) else 0

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        if self.kind == "pca":
            return fit_bytes(rows, columns, self.features)
        return 0 if self.kind == "random" else learning_bytes(self.kind, columns, width)

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        for member in (*before, *after):
            if isinstance(member, LabelFree):
                continue  # the chain itself reports duplicates
            gradients = uses(member, "gradient", "local_loss", "received")
            # A member of the chain that also changes the top or the batch may use its loss only for
            # the top, which still learns under this defense.
            of_cuts = uses(member, "loss") and not uses(member, "wrap_top", "batch")
            if gradients or of_cuts:
                raise SpecError(
                    f"no gradient moves a bottom under 'label_free', and {type(member).__name__} "
                    "works through gradients",
                    fix="use one of the two",
                )

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return Frozen(Components(width, self.features) if self.kind == "pca" else bottom)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        draw = torch.Generator().manual_seed(secret.number("label_free"))
        frozen = next(part for part in bottom.modules() if isinstance(part, Frozen))
        if isinstance(frozen.model, Components):
            frozen.model.fit(inputs, draw)
        elif self.kind != "random" and self.kind != "pca":
            frozen.model.requires_grad_(True)
            learn(self.kind, frozen.model, inputs, draw, self.epochs, self.mask)
            frozen.model.requires_grad_(False).eval()

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        return torch.zeros_like(grad)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "a feature party and every reader of its cuts: labels enter neither cut nor gradient"
        )
        return (PrivacyStatement(protects="labels", against=against),)


class Pretrained(LearnsFirst):
    """The bottom first learns without labels from its owner's rows, and then from labels as usual.

    Before the first step, the bottom learns from the inputs of the party's training rows, and of
    its unaligned rows (rows that other parties do not have). So fewer labelled rows are enough for
    the training. `Pretrained` protects no data. The class is in this file because its bottoms start
    like `LabelFree` bottoms; afterwards they are not frozen.

    Args:
        kind: label-free objective of the learning before the first step: any kind of `LabelFree`
            except "random" and "pca".
        epochs: number of epochs over the rows before the first step.
        mask: share of a row's values to hide or replace before the first step, 0 to 0.9.
        unaligned: whether the bottom also learns from the party's unaligned rows (rows that other
            parties do not have).

    Raises:
        BadOptionError: an option is out of range.
        SpecError: `LabelFree` or `Anchored` is in the same chain; both make the bottom in a way
            that this class cannot combine.

    >>> Pretrained(epochs=5).fit_epochs
    5
    """

    side = "feature"
    purpose = "pretrained"

    def __init__(
        self,
        kind: Learned = "scarf",
        epochs: int = 20,
        mask: float = 0.6,
        unaligned: bool = True,
    ) -> None:
        super().__init__(kind, epochs, mask, unaligned)

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if any(isinstance(member, LabelFree | Anchored) for member in (*before, *after)):
            raise SpecError(
                "'pretrained' trains the whole bottom, and the other member builds another one",
                fix="use one of the two; label_free:kind=scarf keeps the pretrained bottom frozen",
            )


class AnchoredBottom(nn.Module):
    """A bottom with the output components(x) + rate * learned(x).

    Args:
        components: principal components of the inputs, which training does not change.
        learned: the bottom that training changes.
        rate: factor by which the trained bottom's output is multiplied. An optimiser such as Adam
            changes weights by steps of the same size at any `rate`, so the change of the cut is
            proportional to `rate`.
    """

    def __init__(self, components: Components, learned: nn.Module, rate: float) -> None:
        super().__init__()
        self.components = components
        self.learned = learned
        self.rate = rate

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the cut, axes (rows, width), for inputs of axes (rows, ...)."""
        cut: Tensor = self.components(inputs) + self.rate * self.learned(inputs)
        return cut


class Anchored(Defense):
    """Cuts are principal components of the inputs, plus a small part that learns from labels.

    The components form a label-free bottom: any party that has the inputs can compute their values.
    The components alone lose little accuracy, and a linear learned part (``bottom =
    "mlp:hidden=none"``) makes up for the loss. With an optimiser such as Adam, the change of the
    cut in a step is about `rate` times the change in a training without this defense. If the
    defense `potential:norm=no` is in the same chain, the learned part discloses less about labels.
    The design is vfl's own. `Anchored` applies the idea of fine-tuning that stays near the starting
    point (Li et al. 2018, L2-SP); its starting point are the label-free components. Only feature
    parties run this defense. Before the first step, each feature party computes the components of
    its training rows. The components are saved with the party's weights. Leakage can be measured
    but has no guaranteed bound, so the defense states no guarantee.

    Args:
        rate: factor of the learned part; for comparison, the components have mean variance 1.

    >>> bottom = Anchored(rate=0.5).wrap_bottom(nn.Identity(), width=2)
    >>> Anchored().fit(bottom, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), Secret(bytes(32)))
    >>> [[round(value, 3) for value in row] for row in bottom(torch.tensor([[1.0, 0.0]])).tolist()]
    [[1.914, 0.0]]

    Raises:
        BadOptionError: an option is out of range.
        SpecError: `LabelFree` is in the same chain, and would remove the learned part.
    """

    side = "feature"
    once = True

    def __init__(self, rate: float = 0.02) -> None:
        require_range("rate", rate, 0, 1)
        self.rate = rate

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if any(isinstance(member, LabelFree) for member in (*before, *after)):
            raise SpecError(
                "'anchored' adds a learned part to a label-free bottom, and LabelFree removes it",
                fix="use one of the two; anchored:rate=0 is label_free:kind=pca,features=0",
            )

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return fit_bytes(rows, columns, features=0)

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return AnchoredBottom(Components(width, features=0), bottom, self.rate)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        anchored = next(part for part in bottom.modules() if isinstance(part, AnchoredBottom))
        # If there are no random features, `fit` draws no random numbers.
        anchored.components.fit(inputs, torch.Generator())
