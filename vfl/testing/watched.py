"""An adversary under observation: what each of its hooks is given, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim

from vfl.attacks.active import ActiveAdversary
from vfl.compression import Moment
from vfl.exchange import Adversary


class Watched(Adversary):
    """Plays another adversary; a hook that does not keep to its part is an `AssertionError`.

    Args:
        adversary: the one that is played, which has begun.
        classes: how many there are.
    """

    def __init__(self, adversary: ActiveAdversary, classes: int) -> None:
        self.who = adversary.who
        self._played = adversary
        self._classes = classes

    def batch(self, inputs: Tensor, moment: Moment) -> Tensor:
        return self._alike("batch", inputs, moment)

    def labels(self, labels: Tensor, moment: Moment) -> Tensor:
        found = self._alike("labels", labels, moment)
        assert set(found.tolist()) <= set(range(self._classes)), "labels gave a label of no class"
        return found

    def optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        found = self._played.optimizer(optimizer)
        assert isinstance(found, optim.Optimizer), "optimizer gave none"
        return found

    def cut(self, cut: Tensor, moment: Moment) -> Tensor:
        return self._alike("cut", cut, moment)

    def gradient(self, party: str, grad: Tensor, moment: Moment) -> Tensor:
        return self._alike("gradient", party, grad, moment)

    def received(self, party: str, values: Tensor, moment: Moment) -> None:
        self._look("received", party, values, moment)

    def training_state(self) -> dict[str, Any]:
        return self._played.training_state()

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        self._played.load_training_state(saved)

    def _alike(self, hook: str, *given: Any) -> Tensor:
        """What a hook gives that changes values and nothing else about them."""
        found, before = self._look(hook, *given)
        assert isinstance(found, Tensor), f"{hook} gave no tensor"
        assert found.shape == before.shape, f"{hook} changed its shape"
        assert found.dtype == before.dtype, f"{hook} changed its type"
        # The other end refuses such a frame, and the training ends there.
        assert torch.isfinite(found).all(), f"{hook} gave what is not finite"
        return found

    def _look(self, hook: str, *given: Any) -> tuple[Any, Tensor]:
        """What a hook gives, and the values that it was given."""
        (values,) = (one for one in given if isinstance(one, Tensor))
        before = values.clone()
        found = getattr(self._played, hook)(*given)
        assert torch.equal(values, before), f"{hook} changed in place what it was given"
        return found, before
