"""No bottom: the columns themselves are the cut."""

from __future__ import annotations

import math

from torch import nn

from vfl.errors import WidthError
from vfl.models.base import Bottom, Shape


class IdentityBottom(Bottom):
    """Sends the row as it is, flattened, for a label party's own columns or a baseline.

    It hides nothing: whoever receives this cut has the raw columns.

    >>> import torch
    >>> IdentityBottom().build(shape=(1, 2, 2), width=4)(torch.ones(3, 1, 2, 2)).shape
    torch.Size([3, 4])
    """

    def build(self, shape: Shape, width: int) -> nn.Module:
        columns = math.prod(shape)
        if columns != width:
            raise WidthError(
                "bottom 'identity' cannot change the width of a row",
                got=f"width {width} for rows of shape {shape}",
                want=f"width {columns}",
                fix=f"set width to {columns}, or use mlp:hidden=none",
            )
        return nn.Flatten()
