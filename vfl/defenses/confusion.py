"""Confusional autoencoder: the network learns transformed labels, which the label party decodes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import log_softmax

from vfl.compression import StepContext
from vfl.core.registry import MOST_WEIGHT, require_range
from vfl.core.seeds import Secret, scoped
from vfl.defenses.base import Defense, LabelKind, require_classes
from vfl.models.optimizers import descend

_STEPS = 200


class Confusion(Defense):
    """The label party trains on soft labels from its own autoencoder, and decodes predictions.

    Source: Zou et al. 2022 (CAE). Before the first step, the label party trains a soft label for
    each class y, called its code. The label party also trains a decoder from soft labels to
    classes, with layers of sizes C -> 6C -> C for C classes. (The paper computes codes with an
    encoder of one-hot labels.) Training minimises

        CE(y, decoded) - contrast x log(1 - code_y) - entropy x H(code)

    so that a code gives its true class a low probability, has a high entropy, and can still be
    decoded. The paper prints -CE(y, code) as the middle term. The printed term has no lower bound
    and makes the codes of different classes equal. Only the label party runs this defense. Random
    numbers come from the label party's secret; codes and decoder are the defense's state. Gradients
    disclose the codes. An attacker with a few labelled rows learns which class has which code, so
    cuts leak as much about labels as without this defense. The defense states no guarantee.

    Args:
        contrast: weight of the penalty on the probability that a code gives to its own class.
        entropy: weight of the codes' entropy; a larger weight makes the codes harder for the top to
            learn.

    >>> context = StepContext(0, True, Secret(bytes(32)))
    >>> codes = Confusion().targets(torch.tensor([0, 1]), 3, context)
    >>> codes.argmax(dim=1).tolist() != [0, 1], round(codes.sum().item(), 4)
    (True, 2.0)

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "label"

    def __init__(self, contrast: float = 1.0, entropy: float = 0.05) -> None:
        require_range("contrast", contrast, 0, MOST_WEIGHT)
        require_range("entropy", entropy, 0, MOST_WEIGHT)
        self.contrast = contrast
        self.entropy = entropy
        self._codes: Tensor | None = None
        self._decoder: nn.Module | None = None

    def prepare(self, kind: LabelKind) -> None:
        require_classes("confusion", kind)

    def targets(self, targets: Tensor, classes: int, context: StepContext) -> Tensor:
        if self._codes is None:
            assert context.secret is not None, "training has a secret"
            self._train(classes, context.secret)
        assert self._codes is not None, "trained or restored"
        codes = self._codes.to(targets.device)
        return targets @ codes if targets.is_floating_point() else codes[targets]

    def logits(self, logits: Tensor, context: StepContext) -> Tensor:
        if context.training or self._decoder is None:
            return logits
        decoded = self._decoder.to(logits.device)(torch.softmax(logits, dim=1))
        return log_softmax(decoded, dim=1)

    def state_dict(self) -> Mapping[str, Tensor]:
        if self._codes is None or self._decoder is None:
            return {}
        decoder = self._decoder.state_dict()
        return {"codes": self._codes} | {f"decoder.{name}": w for name, w in decoder.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            self._codes = self._decoder = None
            return
        self._codes = state["codes"]
        self._decoder = _decoder(len(self._codes)).requires_grad_(False)
        self._decoder.load_state_dict(
            {k.removeprefix("decoder."): w for k, w in state.items() if k != "codes"}
        )

    def _train(self, classes: int, secret: Secret) -> None:
        with scoped(secret.number("confusion")), torch.enable_grad():
            # The initial codes give a low probability to their own class. With two classes, a
            # training that starts at a high probability stops at the uniform code and never reaches
            # a low probability.
            table = nn.Parameter(torch.randn(classes, classes) - 3 * torch.eye(classes))
            decoder = _decoder(classes)
            steps = optim.Adam([table, *decoder.parameters()], lr=0.02)
            for _ in range(_STEPS):
                descend(steps, self._cost(table, decoder))
        self._codes = torch.softmax(table, dim=1).detach()
        self._decoder = decoder.requires_grad_(False)

    def _cost(self, table: Tensor, decoder: nn.Module) -> Tensor:
        logs = log_softmax(table, dim=1)
        codes = logs.exp()
        decoded = log_softmax(decoder(codes), dim=1).diagonal()
        near = -torch.log1p(-codes.diagonal().clamp_max(1 - 1e-6))
        certain = (codes * logs).sum(dim=1)
        return (self.contrast * near + self.entropy * certain - decoded).mean()


def _decoder(classes: int) -> nn.Module:
    """Return a decoder, from a code (soft label) to the logits of the true classes."""
    hidden = 6 * classes
    return nn.Sequential(nn.Linear(classes, hidden), nn.ReLU(), nn.Linear(hidden, classes))
