"""Tests that every augmentation must pass; plug-in authors subclass `AugmentationContract`.

    class TestMine(AugmentationContract):
        specs = ["mine:angle=10"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vfl.core.seeds import generator, scoped
from vfl.datasets.augment import AUGMENTATIONS, Augmentation
from vfl.testing.base import Contract, global_states, require_still

_ROWS = 6


class AugmentationContract(Contract):
    """Properties of every augmentation of training rows.

    Attributes:
        shape: shape of the rows under test.
    """

    family = "augmentation"
    shape: ClassVar[tuple[int, ...]] = (2, 8, 6)

    def rows(self) -> Tensor:
        """Return the rows that an augmentation changes."""
        return torch.rand(_ROWS, *self.shape, generator=generator(0, "augment")) + 1

    def make(self, spec: str) -> Augmentation:
        """Build the augmentation that a spec names."""
        made = AUGMENTATIONS.make(spec)
        made.check(self.shape)
        return made

    def test_shape_and_dtype_are_kept(self, spec: str) -> None:
        rows = self.rows()
        with scoped(1):
            changed = self.make(spec)(rows)
        assert (changed.shape, changed.dtype) == (rows.shape, rows.dtype)
        assert torch.equal(rows, self.rows()), "the augmentation changed its input rows in place"

    def test_randomness_follows_the_callers_seed(self, spec: str) -> None:
        made, states = self.make(spec), global_states()
        with scoped(1):
            first = made(self.rows())
        with scoped(1):
            again = made(self.rows())
        with scoped(2):
            other = made(self.rows())
        require_still(states)
        assert torch.equal(first, again), (
            "with the same seed, the augmentation changes rows differently"
        )
        assert not torch.equal(first, other), "another seed changes nothing"

    def test_each_row_is_changed_independently(self, spec: str) -> None:
        made, rows = self.make(spec), self.rows()
        with scoped(1):
            whole = made(rows)
        for one in range(_ROWS):
            others = torch.zeros_like(rows)
            others[one] = rows[one]
            with scoped(1):
                assert torch.equal(made(others)[one], whole[one]), "another batch, another row"
