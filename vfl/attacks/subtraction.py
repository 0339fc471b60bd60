"""Subtraction: what is left of a sum of cuts once the partners' own are taken off it."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.attacks.threat import Grant
from vfl.attacks.view import View, groups_of
from vfl.attacks.wrapper import Wrapper


class Subtraction(Wrapper):
    """Takes the partners' cuts off the sum that a label party learned, and attacks what is left.

    A secure sum tells the label party the sum of all cuts. With all feature parties but one it
    learns that one's cut, to the last bit; with fewer, the sum of those that do not collude.

    Args:
        of: the other attack, by name or as a spec of one option.

    Raises:
        SpecError: no such attack.
        BadOptionError: an attack that reads no cut.
    """

    def __init__(self, of: str = "inversion") -> None:
        super().__init__(of, {Grant.PARTNERS})

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        left = {}
        for name in groups_of(self.inner.needs):
            theirs = [getattr(one, name).cuts for one in view.partners]
            left[name] = getattr(view, name).cuts - torch.stack(theirs).sum(0)
        return self.inner.run(view.with_cuts(left), draw)
