"""URVFL: a label party makes the victim's bottom imitate the attacker's encoder, per class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from vfl.attacks.active.hijacking import Bending
from vfl.attacks.base import key_of, require_at_least, through
from vfl.attacks.inputs.inversion import decoder
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend

_HIDDEN = 128
_BATCH_SIZE = 64


class URVFL(Bending):
    """Sends the gradient of a discriminator that also classifies, so gradients depend on labels.

    The discriminator has two outputs for each class: one for the attacker's own codes (outputs of
    its encoder), and one for the victim's cuts. Before the training, the attacker fits three
    networks on its own labelled rows: an encoder of the victim's architecture, a decoder, and a
    classifier of the codes. The discriminator's gradient moves a cut towards the encoder's codes of
    the same class. A wrong label gives a different gradient, as in an honest training, so
    `split_guard` computes higher scores than for `hijacking`. After the training, this class runs
    as an `Attack` and decodes the targets' cuts. As with `hijacking`, the decoder reconstructs the
    right row only because bottom and encoder have the same architecture.

    Source: Yao, Li, Gong, Hou, Pan 2025, "URVFL: undetectable data reconstruction attack on
    vertical federated learning" (NDSS; arXiv 2404.19582): the discriminator with an auxiliary
    classifier, and the pretrained encoder and decoder. The choice of layers and of loss weights is
    vfl's own.

    Args:
        victim: feature party whose gradient the attacker replaces; "all" for every feature party.
        steps: number of Adam steps, each on 64 rows, that fit the attacker's encoder, decoder and
            classifier before the training.
        learning_rate: learning rate of these Adam steps.
        judge_steps: number of training steps of the discriminator for each batch.
        judge_learning_rate: learning rate of the discriminator. If the discriminator learns too
            fast, it distinguishes the victim's cuts from codes without using labels. The
            discriminator's gradients then do not depend on labels, and so do not hide the
            tampering.

    >>> URVFL(judge_steps=2).goal
    'inputs'

    Raises:
        BadOptionError: an option is out of range.
    """

    holds = frozenset({Grant.LEAKED_INPUTS, Grant.LABELS, Grant.BOTTOM_RECIPE})

    def __init__(
        self,
        victim: str = "all",
        steps: int = 1000,
        learning_rate: float = 0.001,
        judge_steps: int = 1,
        judge_learning_rate: float = 0.00003,
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate, judge_steps=judge_steps)
        require_at_least(0, judge_learning_rate=judge_learning_rate)
        super().__init__(victim)
        self.steps = steps
        self.learning_rate = learning_rate
        self.judge_steps = judge_steps
        self.judge_learning_rate = judge_learning_rate

    def begin(self, view: View, draw: torch.Generator) -> None:
        self._public, self._known, self._draw = view.leaked.inputs, view.leaked.labels, draw
        self._classes = view.classes
        with scoped(key_of(draw)):
            self._encoder = view.new_bottom()
            width = through(self._encoder, self._public[:2]).shape[1]
            self._decoder = decoder(width, tuple(self._public.shape[1:]))
            self._judge = nn.Sequential(
                nn.Linear(width, _HIDDEN), nn.LeakyReLU(0.2), nn.Linear(_HIDDEN, 2 * view.classes)
            )
            self._pretrain(nn.Linear(width, view.classes))
        self._judging = torch.optim.Adam(self._judge.parameters(), lr=self.judge_learning_rate)

    def labels(self, labels: Tensor, context: StepContext) -> Tensor:
        self._labels = labels
        return labels

    def _learn(self, cuts: Tensor) -> None:
        for _ in range(self.judge_steps):
            rows, known = self._some(len(cuts))
            with torch.no_grad():
                codes = self._encoder(rows)
            own = cross_entropy(self._judge(codes), known)
            theirs = cross_entropy(self._judge(cuts), self._classes + self._labels)
            descend(self._judging, own + theirs)

    def _loss(self, cuts: Tensor) -> Tensor:
        return cross_entropy(self._judge(cuts), self._labels)

    def _parts(self) -> dict[str, Any]:
        networks = {"encoder": self._encoder, "decoder": self._decoder, "judge": self._judge}
        return networks | {"judging": self._judging}

    def _pretrain(self, classifier: nn.Module) -> None:
        """Fit encoder and decoder on the attacker's rows, so that codes separate the classes."""
        assert self._decoder is not None
        networks = nn.ModuleList([self._encoder, self._decoder, classifier]).train()
        optimizer = torch.optim.Adam(networks.parameters(), lr=self.learning_rate)
        for _ in range(self.steps):
            rows, known = self._some(_BATCH_SIZE)
            codes = self._encoder(rows)
            loss = mse_loss(self._decoder(codes), rows) + cross_entropy(classifier(codes), known)
            descend(optimizer, loss)
        networks.eval().requires_grad_(False)

    def _some(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` random rows of the attacker's own, with their labels."""
        rows = torch.randint(len(self._public), (count,), generator=self._draw)
        return self._public[rows], self._known[rows]
