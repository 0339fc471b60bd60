"""Tests that every bottom and top model must pass; plug-in authors subclass a contract.

    class TestMine(BottomContract):
        specs = ["mine:hidden=8"]
        shape, width = (12,), 4

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.core.seeds import generator, scoped
from vfl.models import make_bottom, make_top
from vfl.testing.base import Contract, global_states, require_still

_ROWS = 5


class _ModelContract(Contract):
    """Properties of every bottom or top model.

    Attributes:
        width: number of columns of the model's output.
    """

    width: int = 4

    def build(self, spec: str) -> nn.Module:
        """Build the model of a spec."""
        raise NotImplementedError

    def rows(self) -> Tensor:
        """Return rows that the model accepts, axes (rows, ...)."""
        raise NotImplementedError

    def test_output_has_the_declared_shape(self, spec: str) -> None:
        made = self._built(spec).eval()(self.rows())
        assert made.shape == (_ROWS, self.width)
        assert made.dtype == torch.float32

    def test_output_does_not_depend_on_the_batch(self, spec: str) -> None:
        model, rows = self._built(spec).eval(), self.rows()
        whole = model(rows)
        for row in range(_ROWS):
            assert torch.allclose(model(rows[row : row + 1]), whole[row : row + 1], atol=1e-4)

    def test_initial_weights_follow_from_the_seed(self, spec: str) -> None:
        states = global_states()
        first, second = self._built(spec).state_dict(), self._built(spec).state_dict()
        require_still(states)
        assert all(torch.equal(first[name], second[name]) for name in first)

    def _built(self, spec: str) -> nn.Module:
        with scoped(3):
            return self.build(spec)


class BottomContract(_ModelContract):
    """Properties of every bottom model.

    Attributes:
        shape: shape of one row under test.
        whole: upper bound (exclusive) of the integers in a row; 0 means that rows contain real
            numbers.
    """

    family = "bottom"
    shape: tuple[int, ...] = (6,)
    whole: int = 0

    def build(self, spec: str) -> nn.Module:
        return make_bottom(spec).build(self.shape, self.width)

    def rows(self) -> Tensor:
        drawn, axes = generator(0, "bottom"), (_ROWS, *self.shape)
        if self.whole:
            return torch.randint(self.whole, axes, generator=drawn).float()
        return torch.randn(axes, generator=drawn)


class TopContract(_ModelContract):
    """Properties of every top model.

    Attributes:
        merged: number of columns of the merged cut, the input of the top models under test.
    """

    family = "top"
    merged: int = 8

    def build(self, spec: str) -> nn.Module:
        return make_top(spec).build(self.merged, self.width)

    def rows(self) -> Tensor:
        return torch.randn(_ROWS, self.merged, generator=generator(0, "top"))
