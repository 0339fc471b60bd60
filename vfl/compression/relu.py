"""Sparse cuts by a rectifier: zeros take few bytes, and an L1 penalty controls their number."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from vfl.compression.base import INFERENCE, Encoded, StepContext
from vfl.compression.coding.bits import index_bits
from vfl.compression.coding.values import RectifiedFloats, RectifiedValues
from vfl.compression.packed import DenseCodec, Packer, Pad, Scale
from vfl.core.errors import WidthError
from vfl.core.registry import MOST_WEIGHT, require_choice, require_range

#: Limits of the L1 weight; its gain per step when the count of values above zero differs from the
#: target; and decay factor of the smoothed count.
_LEAST, _MOST, _GAIN, _MEMORY = 1e-4, 15.0, 0.02, 0.9


class Rectified(DenseCodec):
    """Puts a rectifier (ReLU) before the cut, so that zeros take few bits.

    After a rectifier, the gradient of a zero is zero, so the codec loses nothing if it does not
    send this gradient. For gradients of sparse cuts, thesis table 3.1 states a relative size of 1;
    the codec sends less. Unless ``pad=always``, the length of a gradient, and of a training frame
    (except with ``packer=dense``), discloses how many values are above zero.

    Args:
        values: format of a value: 1 to 8 bits, or ``fp32`` (except with ``packer=range``).
        packer: ``range`` (adaptive), ``enumerative``, ``bitmap`` or ``dense``; see `DenseCodec`.
        scale: see `DenseCodec`.
        grad: see `DenseCodec`.
        pad: see `PackedCodec`. Without padding, cuts have equal lengths only with ``packer=dense``;
            even then, gradients have different lengths.

    >>> import torch
    >>> codec, cut = Rectified(values="4", packer="bitmap"), torch.zeros(1, 64)
    >>> len(codec.encode(cut, StepContext(training=True)).payload)  # a scale, 64 bits of map
    10
    >>> len(codec.encode(cut).payload)  # a query: a scale, 64 codes of 4 bits
    34

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        values: str = "4",
        packer: Packer = "range",
        scale: Scale = "batch",
        grad: str = "fp32",
        pad: Pad = "query",
    ) -> None:
        require_choice("values", values, ("fp32", *"12345678"))
        code = RectifiedFloats() if values == "fp32" else RectifiedValues(int(values))
        super().__init__(code, packer, scale, grad, pad, rectified=True)

    def client_module(self, width: int) -> nn.Module:
        return nn.ReLU()


class L1(Rectified):
    """Adds, to the feature party's loss, weight x (the sum of a row's cut, averaged over rows).

    Source: thesis section 3.2, where the weight is fixed and multiplies the sum over the whole
    batch. In vfl, the option `target` sets the number of values above zero instead. After each
    step, the weight is multiplied by a power of count / target, where count is the number of values
    above zero per row. The target itself falls from half the width to `target` within `anneal`
    steps. Queries are computed without dropout; the numbers of values above zero in them correct
    the numbers counted in training.

    Args:
        target: wanted number of values above zero per row at inference; 0 keeps the weight
            constant.
        weight: initial weight of the penalty, which is the mean over rows of the sum of a row's
            cut.
        anneal: number of steps after which the target no longer changes.
        values: see `Rectified`.
        packer: see `Rectified`.
        scale: see `Rectified`.
        grad: see `Rectified`.
        pad: see `Rectified`.

    Attributes:
        weight_now: weight in the loss of the next step.

    >>> cut = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    >>> L1(target=0, weight=0.5).local_loss(cut, INFERENCE)
    tensor(1.5000)

    Raises:
        BadOptionError: an option is out of range.
    """

    def __init__(
        self,
        target: float = 6.0,
        weight: float = 0.01,
        anneal: int = 1000,
        values: str = "4",
        packer: Packer = "range",
        scale: Scale = "batch",
        grad: str = "fp32",
        pad: Pad = "query",
    ) -> None:
        require_range("target", target, 0)
        require_range("weight", weight, 0, MOST_WEIGHT)
        require_range("anneal", anneal, 0)
        super().__init__(values, packer, scale, grad, pad)
        self.target = target
        self.anneal = anneal
        self.weight = weight
        self.weight_now = weight
        self._steps = 0
        self._count = math.nan
        self._bias = 1.0
        self._asked = np.zeros(2)  # rows, and values above zero, in queries since the last step
        self._waiting: dict[int, float] = {}

    def check(self, width: int) -> None:
        super().check(width)
        if self.target > width:
            raise WidthError(
                f"a cut of width {width} cannot have {self.target:g} values above zero",
                got=f"target = {self.target:g}",
                want=f"target <= {width}",
            )

    def encode(self, cut: Tensor, context: StepContext = INFERENCE) -> Encoded:
        encoded = super().encode(cut, context)
        above = float(np.count_nonzero(encoded.saved))
        if context.training and len(cut):
            self._waiting[context.step] = above / len(cut)
        else:
            self._asked += (len(cut), above)
        return encoded

    def local_loss(self, cut: Tensor, context: StepContext) -> Tensor:
        return self.weight_now * cut.abs().sum() / max(len(cut), 1)

    def commit(self, step: int) -> None:
        super().commit(step)
        count = self._waiting.pop(step, None)
        if count is None or self.target == 0:
            return
        self._count = count if math.isnan(self._count) else _smooth(self._count, count)
        if self._asked[0] > 0:
            asked = self._asked[1] / self._asked[0]
            self._bias = min(max(asked / max(self._count, 1e-3), 0.5), 2.0)
            self._asked[:] = 0
        # A count of at least half a value is assumed, so that a cut of zeros lowers the weight
        # without making it 0.
        error = math.log(max(self._count * self._bias, 0.5) / self._target_now())
        self.weight_now = min(max(self.weight_now * math.exp(_GAIN * error), _LEAST), _MOST)
        self._steps += 1

    def formula_ratio(self, width: int) -> float:
        """Return target/d (b + ceil(log2 d)) / 32 for width d, b bits per value (thesis table 3.1).

        Without a target, the ratio is b/32.
        """
        if self.target == 0:
            return super().formula_ratio(width)
        return self.target / width * (self._code.bits + index_bits(width)) / 32

    def state_dict(self) -> Mapping[str, Tensor]:
        moving = [self.weight_now, self._steps, self._count, self._bias, *self._asked]
        waiting = [number for pair in self._waiting.items() for number in pair]
        own = {"l1": torch.tensor(moving, dtype=torch.float64)}
        own["l1-seen"] = torch.tensor(waiting, dtype=torch.float64)
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.weight_now, steps, self._count, self._bias, *asked = state["l1"].tolist()
        self._steps = int(steps)
        self._asked = np.array(asked)
        waiting = state["l1-seen"].reshape(-1, 2).tolist()
        self._waiting = {int(step): count for step, count in waiting}

    def _target_now(self) -> float:
        start = max(self._width / 2, self.target)
        share = min(1.0, self._steps / self.anneal) if self.anneal else 1.0
        return start * math.pow(self.target / start, share)


def _smooth(before: float, now: float) -> float:
    return _MEMORY * before + (1 - _MEMORY) * now
