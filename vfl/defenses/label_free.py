"""Bottoms made without labels.

`LabelFree` bottoms never learn one: the trivial reference for every defense of labels. `Anchored`
bottoms stay near their principal components: a large part never learns, and a small one does.
`Pretrained` bottoms begin without labels and then learn, which helps where few rows have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy, mse_loss, normalize

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import Secret
from vfl.defenses.base import (
    FIT_ROWS,
    MOST_EPOCHS,
    Defense,
    uses,
)
from vfl.defenses.components import Components, fit_bytes
from vfl.privacy import PrivacyStatement

Kind = Literal["random", "pca", "autoencoder", "scarf"]
Learned = Literal["autoencoder", "scarf"]
#: A covariance of more takes minutes to decompose.
_MOST_FEATURES = 4096
_DECODER_WIDTH = 256
_DECODER_COPIES = 5  # weights, gradients, two of Adam and one to work with


class Frozen(nn.Module):
    """A model whose weights and statistics no training moves.

    Args:
        model: it always runs as in evaluation: no dropout, no moving batch statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Frozen:
        self.training = mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """What the model gives, without a graph."""
        with torch.no_grad():
            outputs: Tensor = self.model(inputs)
        return outputs


class LabelFree(Defense):
    """Bottoms are made without labels and stay as they are; the label party answers with zeros.

    random: the bottom at its first weights. pca: principal components of `features` random ones of
    the inputs (0: of the inputs themselves) instead of the bottom. autoencoder: the bottom,
    trained to rebuild inputs of which a share `mask` was set to 0 (Vincent et al. 2008), on the
    feature party's own training rows. scarf: the bottom, trained to know a row again of which a
    share `mask` was replaced by other rows' values (Bahri et al. 2022). All come from the feature
    party's secret, before the first step, and are saved with its weights. Both sides run it: the
    gradient the label party sends is all zeros, and a feature party that gets another one ignores
    it. Only the top learns labels.

    Args:
        kind: "random", "pca", "autoencoder" or "scarf".
        features: of pca, up to 4096.
        epochs: of the autoencoder and of scarf, over the rows.
        mask: of the autoencoder and of scarf, 0 to 0.9.
        unaligned: whether the bottom also sees the party's own rows that no session has.

    Raises:
        BadOptionError: an option out of range.
        SpecError: it is joined to what works through gradients.

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
        return 0 if self.kind == "random" else _learning_bytes(columns, width)

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        for member in (*before, *after):
            if isinstance(member, LabelFree):
                continue  # stands twice, as the chain says
            gradients = uses(member, "gradient", "local_loss", "received")
            # A loss of one that has a part in the top or the batch too is about more than cuts.
            of_cuts = uses(member, "loss") and not uses(member, "wrap_top", "batch")
            if gradients or of_cuts:
                raise SpecError(
                    f"no gradient moves a bottom under 'label_free', and {type(member).__name__} "
                    "works through gradients",
                    fix="one of the two",
                )

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return Frozen(Components(width, self.features) if self.kind == "pca" else bottom)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        draw = torch.Generator().manual_seed(secret.number("label_free"))
        frozen = next(part for part in bottom.modules() if isinstance(part, Frozen))
        if isinstance(frozen.model, Components):
            frozen.model.fit(inputs, draw)
        elif self.kind in get_args(Learned):
            frozen.model.requires_grad_(True)
            learn = _rebuild if self.kind == "autoencoder" else _recognise
            learn(frozen.model, inputs, draw, self.epochs, self.mask)
            frozen.model.requires_grad_(False).eval()

    def gradient(self, grad: Tensor, labels: Tensor, context: StepContext) -> Tensor:
        return torch.zeros_like(grad)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "a feature party and whoever reads its cuts: labels enter neither cut nor gradient"
        )
        return (PrivacyStatement(protects="labels", against=against),)


def train_autoencoder(
    encoder: nn.Module, inputs: Tensor, draw: torch.Generator, epochs: int = 10, mask: float = 0.3
) -> nn.Module:
    """The encoder, trained to rebuild inputs of which a part is masked; in evaluation, frozen.

    Args:
        encoder: gives axes (rows, width), on the device that it is trained on.
        inputs: axes (rows, ...).
        draw: order and masks come from here; the decoder's first weights and dropout from torch's
            own generator.
        epochs: over all rows.
        mask: share of the inputs that is set to 0.
    """
    _rebuild(encoder.requires_grad_(True), inputs, draw, epochs, mask)
    return encoder.requires_grad_(False).eval()


def _rebuild(
    encoder: nn.Module, inputs: Tensor, draw: torch.Generator, epochs: int, mask: float
) -> None:
    """Train what may be trained of an encoder to rebuild masked inputs; see `train_autoencoder`."""

    def loss(whole: Tensor, model: nn.Module, device: torch.device) -> Tensor:
        seen = whole * (torch.rand(whole.shape, generator=draw) >= mask)
        return mse_loss(model(seen.to(device)), whole.flatten(1).to(device))

    _descend(encoder, inputs[0].numel(), inputs, draw, epochs, FIT_ROWS, loss)


def _recognise(
    encoder: nn.Module, inputs: Tensor, draw: torch.Generator, epochs: int, mask: float
) -> None:
    """Train what may be trained of an encoder to tell which row a corrupted row was made of.

    Each value is replaced with probability `mask` by the same column's of a row drawn at random,
    and a row is told from the others of its batch (Bahri et al. 2022, algorithm 1, with a
    temperature of 1), half of a batch being whole rows and half corrupted ones.
    """
    columns = inputs.flatten(1)

    def loss(whole: Tensor, model: nn.Module, device: torch.device) -> Tensor:
        flat = whole.flatten(1)
        others = columns.gather(0, torch.randint(len(columns), flat.shape, generator=draw))
        seen = torch.where(torch.rand(flat.shape, generator=draw) < mask, others, flat)
        both = torch.cat([whole, seen.reshape(whole.shape)]).to(device)
        one, other = normalize(model(both)).chunk(2)
        return cross_entropy(one @ other.T, torch.arange(len(one), device=device))

    _descend(encoder, _DECODER_WIDTH, inputs, draw, epochs, FIT_ROWS // 2, loss)


def _descend(
    encoder: nn.Module,
    outputs: int,
    inputs: Tensor,
    draw: torch.Generator,
    epochs: int,
    batch_size: int,
    loss: Callable[[Tensor, nn.Module, torch.device], Tensor],
) -> None:
    """Train an encoder and a perceptron behind it, which is forgotten."""
    device = next((weights.device for weights in encoder.parameters()), inputs.device)
    with torch.no_grad():
        width = encoder.eval()(inputs[:1].to(device)).shape[1]
    encoder.train()
    head = [nn.Linear(width, _DECODER_WIDTH), nn.ReLU(), nn.Linear(_DECODER_WIDTH, outputs)]
    model = nn.Sequential(encoder, nn.Sequential(*head).to(device))
    steps = optim.Adam([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for _ in range(epochs):
        order = torch.randperm(len(inputs), generator=draw)
        for start in range(0, max(len(order) - 1, 1), batch_size):  # no batch of one row
            whole = inputs.index_select(0, order[start : start + batch_size])
            steps.zero_grad()
            loss(whole, model, device).backward()  # type: ignore[no-untyped-call]
            steps.step()


def _learning_bytes(columns: int, width: int) -> int:
    """Most bytes of the perceptron behind a bottom, and of the batches both are trained on."""
    outputs = max(columns, _DECODER_WIDTH)
    head = _DECODER_WIDTH * (width + 1 + outputs) + outputs
    return 4 * (_DECODER_COPIES * head + FIT_ROWS * (8 * columns + 4 * _DECODER_WIDTH))


class Pretrained(Defense):
    """The bottom learns from its owner's rows without labels, and then from labels like any other.

    It learns before the first step, from the training rows and from the rows that no session has:
    those that other parties lack. So it needs fewer labels. It defends nothing: it is here because
    it stands where `LabelFree` does, whose bottoms are the same and then stay as they are.

    Args:
        kind: "scarf" or "autoencoder"; see `LabelFree`.
        epochs: over the rows.
        mask: share of a row's values that is replaced or set to 0, 0 to 0.9.
        unaligned: whether it sees the rows that no session has.

    Raises:
        BadOptionError: an option out of range.
        SpecError: beside `LabelFree` or `Anchored`, whose bottoms are made otherwise.

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
        return _learning_bytes(columns, width)

    def beside(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        if any(isinstance(member, LabelFree | Anchored) for member in (*before, *after)):
            raise SpecError(
                "'pretrained' trains the whole bottom, which the other member makes otherwise",
                fix="one of the two; label_free:kind=scarf stays as it was pretrained",
            )

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        draw = torch.Generator().manual_seed(secret.number("pretrained"))
        learn = _rebuild if self.kind == "autoencoder" else _recognise
        learn(bottom, inputs, draw, self.fit_epochs, self.mask)


class AnchoredBottom(nn.Module):
    """components(x) + rate * learned(x).

    Args:
        components: principal components of the inputs; nothing trains them.
        learned: a bottom.
        rate: of what it adds. Optimisers that scale a step by the size of its gradients (Adam) take
            steps of the same size whatever the rate, so the cut moves by `rate` as much.
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
    """Cuts are principal components of the inputs, and a little of what the bottom learns.

    Components are a label-free bottom: whoever has the inputs has them, too. What they are short of
    in accuracy is little, and a linear bottom (``bottom = "mlp:hidden=none"``) that adds little
    makes up for it: each step moves the cut by `rate` of what it would. `potential:norm=no` joined
    to it keeps what is added from telling labels.
    Our own; the idea is that of fine-tuning kept near its start (Li et al. 2018, L2-SP), with the
    start at components that saw no label. Only feature parties run it. Components come from the
    party's own training rows before the first step and are saved with its weights. What it tells
    is measured, not bounded: it states no promise.

    Args:
        rate: of the learned part, beside components of a mean variance of 1.

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
                "'anchored' adds a learned part to a label-free bottom, which LabelFree takes away",
                fix="one of the two; anchored:rate=0 is label_free:kind=pca,features=0",
            )

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return fit_bytes(rows, columns, features=0)

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        return AnchoredBottom(Components(width, features=0), bottom, self.rate)

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        anchored = next(part for part in bottom.modules() if isinstance(part, AnchoredBottom))
        anchored.components.fit(inputs, torch.Generator())  # components of no features draw nothing
