"""Pooling: feature parties lay their columns and cuts side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vfl.attacks.evidence import Evidence
from vfl.attacks.joint import JointBottom
from vfl.attacks.threat import Grant
from vfl.attacks.view import Seen, View, groups_of
from vfl.attacks.wrapper import Wrapper


class Pooled(Wrapper):
    """Hands what colluding feature parties hold of each row, as one row, to another attack.

    Their columns stand side by side, and so do their cuts; their bottoms are one bottom. What each
    party's columns tell of the labels is told together, as in the network itself.

    Args:
        of: the other attack, by name or as a spec of one option.

    Raises:
        SpecError: no such attack.
    """

    def __init__(self, of: str = "logistic") -> None:
        super().__init__(of, {Grant.PARTNERS}, cuts=False)

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        views = [view, *view.partners]
        groups = {
            name: self._together([getattr(one, name) for one in views], name == "leaked")
            for name in groups_of(self.inner.needs)
        }

        def joint(bottoms: list[nn.Module]) -> JointBottom:
            return JointBottom(bottoms, [one.targets.inputs.shape[1:] for one in views], False)

        together = view.instead(
            bottom=lambda: joint([one.bottom() for one in views]),
            new_bottom=lambda: joint([one.new_bottom() for one in views]),
            **groups,
        )
        return self.inner.run(together, draw)

    def _together(self, seen: Sequence[Seen], leaked: bool) -> Evidence:
        """One group of rows as all hold it, as far as the other attack asks for it."""
        asked = self.inner.needs
        inputs = [one.inputs.flatten(1) for one in seen] if Grant.INPUTS in asked else []
        cuts = [one.cuts for one in seen] if Grant.CUTS in asked else []
        return Evidence(
            torch.cat(inputs, 1) if inputs else None,
            torch.cat(cuts, 1) if cuts else None,
            seen[0].labels if leaked else None,
        )
