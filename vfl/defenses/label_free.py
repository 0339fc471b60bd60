"""Bottoms made without labels.

`LabelFree` bottoms never learn from a label: the trivial reference for every defense of labels.
`Anchored` bottoms stay near their principal components: In `Anchored` bottoms a large part never
learns, and a small one does. `Pretrained` bottoms start without labels and then learn, which helps
if few rows have labels.
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
from vfl.defenses.self_supervision import Learned, learn, learning_bytes
from vfl.privacy import PrivacyStatement

Kind = Literal["random", "pca", Learned]
#: A covariance matrix of more columns takes minutes to decompose.
_MOST_FEATURES = 4096


class Frozen(nn.Module):
    """A model whose weights and statistics never change in training.

    Args:
        model: the model, which always runs as in evaluation: without dropout, with fixed batch
            statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Frozen:
        self.training = mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs, without a graph."""
        with torch.no_grad():
            outputs: Tensor = self.model(inputs)
        return outputs


class LabelFree(Defense):
    """Bottoms are made without labels and never change; the label party returns zero gradients.

    random: the bottom at its first weights. "pca": principal components of `features` random
    features of the inputs (0: of the inputs) replace the bottom. With the other kinds, the bottom
    learns from the feature party's own training rows, see `vfl.defenses.self_supervision.learn`:
    autoencoder (Vincent et al. 2008), scarf (Bahri et al. 2022), simclr (Chen et al. 2020), vicreg
    (Bardes et al. 2022), vime (Yoon et al. 2020). All random draws use the feature party's secret,
    before the first step, and are saved with its weights. Both sides run it: the gradient of the
    label party is zero, and a feature party ignores any other gradient. Only the top learns labels.

    Args:
        kind: "random", "pca", "autoencoder", "scarf", "simclr", "vicreg" or "vime".
        features: number of random features of pca, up to 4096.
        epochs: epochs over the rows, for kinds that learn.
        mask: share of a row's values that are hidden or replaced, 0 to 0.9, for kinds that learn.
        unaligned: whether the bottom also learns from the party's own rows outside all sessions.

    Raises:
        BadOptionError: an option is out of range.
        SpecError: another joined defense acts through gradients, which do not exist here.

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
                continue  # the chain's own error reports duplicates
            gradients = uses(member, "gradient", "local_loss", "received")
            # A member that also changes the top or the batch has a loss on more than cuts.
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


class Pretrained(Defense):
    """The bottom first learns from its owner's rows without labels, and then from labels as usual.

    It learns before the first step from the training rows and the rows outside all sessions: those
    that other parties lack. So it needs fewer labels. It defends nothing: It is in this file
    because its bottoms start like those of `LabelFree`, which are then frozen.

    Args:
        kind: a kind of `LabelFree` that learns.
        epochs: over the rows.
        mask: share of a row's values that is hidden or replaced, 0 to 0.9.
        unaligned: whether it sees the rows that no session has.

    Raises:
        BadOptionError: an option is out of range.
        SpecError: `LabelFree` or `Anchored` stands in the same chain and makes the bottom in
            another way.

    >>> Pretrained(epochs=5).fit_epochs
    5
    """

    side = "feature"
    once = True

    def __init__(
        self,
        kind: Learned = "scarf",
        epochs: int = 20,
        mask: float = 0.6,
        unaligned: bool = True,
    ) -> None:
        require_choice("kind", kind, get_args(Learned))
        require_range("epochs", epochs, 1, MOST_EPOCHS)
        require_range("mask", mask, 0, 0.9)
        self.kind = kind
        self.mask = mask
        self.unaligned = unaligned
        self.fit_epochs = epochs

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return learning_bytes(self.kind, columns, width)

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if any(isinstance(member, LabelFree | Anchored) for member in (*before, *after)):
            raise SpecError(
                "'pretrained' trains the whole bottom, and the other member builds another one",
                fix="use one of the two; label_free:kind=scarf keeps the pretrained bottom frozen",
            )

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        draw = torch.Generator().manual_seed(secret.number("pretrained"))
        learn(self.kind, bottom, inputs, draw, self.fit_epochs, self.mask)


class AnchoredBottom(nn.Module):
    """components(x) + rate * learned(x).

    Args:
        components: principal components of the inputs; training does not change them.
        learned: a bottom.
        rate: factor of the learned output. Optimisers such as Adam, which scale steps by the size
            of gradients, take equal steps at any rate, so the cut's change is proportional to
            `rate`.
    """

    def __init__(self, components: Components, learned: nn.Module, rate: float) -> None:
        super().__init__()
        self.components = components
        self.learned = learned
        self.rate = rate

    def forward(self, inputs: Tensor) -> Tensor:
        """Axes (rows, ...) in, (rows, width) out."""
        cut: Tensor = self.components(inputs) + self.rate * self.learned(inputs)
        return cut


class Anchored(Defense):
    """Cuts are principal components of the inputs, plus a small learned part.

    Components are a label-free bottom: any party with the inputs can compute them. They lose little
    accuracy, and a linear bottom (``bottom = "mlp:hidden=none"``) restores it: each step moves the
    cut by `rate` times the usual amount. With `potential:norm=no` joined to it, the added part
    discloses fewer labels. This is vfl's own design; the idea is fine-tuning that stays near its
    start (Li et al. 2018, L2-SP), with label-free components as the start. Only feature parties run
    it. Components come from the party's own training rows before the first step and are saved with
    its weights. Its leakage is measured, not bounded: it states no guarantee.

    Args:
        rate: scale of the learned part, relative to components of mean variance 1.

    >>> bottom = Anchored(rate=0.5).wrap_bottom(nn.Identity(), width=2)
    >>> Anchored().fit(bottom, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), Secret(bytes(32)))
    >>> [[round(value, 3) for value in row] for row in bottom(torch.tensor([[1.0, 0.0]])).tolist()]
    [[1.914, 0.0]]
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
        anchored.components.fit(inputs, torch.Generator())  # components of no features draw nothing
