"""A codec that packs by a layout, which may learn; a member says what travels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, get_args

import torch
from torch import Tensor

from vfl.compression.base import Codec, Moment
from vfl.compression.gradients import GradientCode
from vfl.compression.layout import Layout
from vfl.compression.options import Scale
from vfl.compression.values import ValueCode
from vfl.options import require_choice

_Layout = TypeVar("_Layout", bound=Layout)


class LayoutCodec(Codec, Generic[_Layout]):
    """What codecs with a value code, a layout and a gradient code have in common.

    Args:
        code: spells the values.
        packer: name of the layout, one of `packers`; "range" learns.
        packers: the layouts there are.
        scale: ``batch`` or ``row``, what shares a scale in training; a query has one a row.
        grad: ``fp32``, ``bf16``, or the bits of a gradient from 2 to 8.

    Raises:
        BadOptionError: an unknown packer, scale or format of gradients.
    """

    def __init__(
        self, code: ValueCode, packer: str, packers: Sequence[str], scale: Scale, grad: str
    ) -> None:
        require_choice("packer", packer, packers)
        require_choice("scale", scale, get_args(Scale))
        self.packer = packer
        self._code = code
        self._per_row = scale == "row"
        self._grad = GradientCode(grad)
        self._layout: _Layout | None = None
        self._width = 0

    @property
    def learns(self) -> bool:
        return self.packer == "range"

    def commit(self, step: int) -> None:
        if self._layout is not None:
            self._layout.commit(step)

    def state_dict(self) -> Mapping[str, Tensor]:
        if self._layout is None or not (state := self._layout.state_dict()):
            return {}
        return {"width": torch.tensor(self._width), **state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if "width" in state:
            self.layout(int(state["width"])).load_state_dict(state)

    def layout(self, width: int) -> _Layout:
        """The layout for a cut of this width; made once, for it may learn.

        Raises:
            WidthError: there is none.
        """
        if self._layout is None or self._width != width:
            self._layout, self._width = self.new_layout(width), width
        return self._layout

    @abstractmethod
    def new_layout(self, width: int) -> _Layout:
        """A layout that has learned nothing; see `layout`."""

    def is_per_row(self, moment: Moment) -> bool:
        """Whether every row has a scale of its own."""
        return self._per_row or not moment.training


def step_of(moment: Moment) -> int | None:
    """The training step a layout may learn from; None for a query."""
    return moment.step if moment.training else None
