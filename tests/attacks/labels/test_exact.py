"""EXACT: its candidates in closed form."""

import torch
from torch import nn

from vfl.attacks.labels.exact import gradients_of_classes
from vfl.core.seeds import generator


def test_candidates_of_a_linear_top_are_its_weights_times_what_is_left():
    """The gradient of class c is W^T (p - e_c)."""
    top, cuts = nn.Linear(4, 3), torch.randn(5, 4, generator=generator(0))
    left = top(cuts).softmax(1)[:, None] - torch.eye(3)
    wanted = left.detach() @ top.weight.detach()
    torch.testing.assert_close(gradients_of_classes(top, cuts, 3), wanted)
