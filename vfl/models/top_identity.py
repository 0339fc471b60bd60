"""No top: what the parties sent is the answer."""

from __future__ import annotations

from torch import nn

from vfl.errors import WidthError
from vfl.models.base import Top


class IdentityTop(Top):
    """The merged cut itself as outputs; with `merge = "sum"`, each party adds to every output.

    Whoever receives its gradient has the labels: see the attack `direct_label`.

    >>> IdentityTop().build(width=3, outputs=3)
    Identity()
    """

    def build(self, width: int, outputs: int) -> nn.Module:
        if width != outputs:
            raise WidthError(
                "top 'identity' cannot change the width of the merged cut",
                got=f"width {width} for {outputs} outputs",
                want=f"width {outputs}",
                fix=f"set the parties' width to {outputs} with merge = sum, or use linear",
            )
        return nn.Identity()
