"""Tests that every merger must pass; an author of a plug-in subclasses `MergerContract`.

    class TestMine(MergerContract):
        specs = ["mine:heads=2"]

pytest then runs every test of the contract once for each spec (name and options of a member).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl.core.seeds import generator, scoped
from vfl.models import make_merger
from vfl.testing.base import Contract, global_states, require_still

_ROWS = 6


class MergerContract(Contract):
    """Properties of every merger of cuts.

    Attributes:
        widths: widths of the cuts under test.
    """

    family = "merger"
    widths: tuple[int, ...] = (4, 4, 4)

    def cuts(self) -> list[Tensor]:
        """Return the cuts to merge, each with axes (rows, width)."""
        drawn = generator(0, "merger")
        return [torch.randn(_ROWS, width, generator=drawn) for width in self.widths]

    def build(self, spec: str) -> nn.Module:
        """Build the merger's module from a spec."""
        with scoped(1):
            return make_merger(spec).build(self.widths)

    def test_merged_cut_has_the_declared_width(self, spec: str) -> None:
        merged = self.build(spec)(*self.cuts())
        assert merged.shape == (_ROWS, make_merger(spec).width(self.widths))
        assert merged.dtype == torch.float32

    def test_rows_are_merged_independently(self, spec: str, training: bool) -> None:
        merger, cuts = self.build(spec).train(training), self.cuts()
        whole = merger(*cuts)
        for row in range(_ROWS):
            alone = merger(*(cut[row : row + 1] for cut in cuts))
            assert torch.allclose(alone, whole[row : row + 1], atol=1e-5), (
                "another batch, another row"
            )

    def test_every_cut_receives_a_gradient(self, spec: str) -> None:
        cuts = [cut.requires_grad_() for cut in self.cuts()]
        merged = self.build(spec)(*cuts)
        weights = torch.arange(1.0, merged.shape[1] + 1)
        (merged * weights).sum().backward()
        for cut in cuts:
            assert cut.grad is not None, "a cut has no gradient"
            assert bool(cut.grad.isfinite().all()), "a gradient is not finite"
            assert bool(cut.grad.any()), "a cut changes nothing"

    def test_merge_is_deterministic_without_side_effects(self, spec: str, training: bool) -> None:
        merger, cuts, states = self.build(spec).train(training), self.cuts(), global_states()
        again, once = merger(*cuts), merger(*cuts)
        require_still(states)
        assert torch.equal(again, once), "two equal calls differ"
        assert all(map(torch.equal, cuts, self.cuts())), "a cut was changed"

    def test_initial_weights_follow_from_the_seed(self, spec: str) -> None:
        first, second = self.build(spec).state_dict(), self.build(spec).state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
