"""Top-k: the k values of largest magnitude of each row, and where they stand."""

from __future__ import annotations

from torch import Tensor

from vfl.compression.base import Moment
from vfl.compression.index_set import Places
from vfl.compression.options import Scale
from vfl.compression.select import find_top
from vfl.compression.sparse_codec import Packer, SparseCodec


class TopK(SparseCodec):
    """Keeps the k values of largest magnitude; of equal ones the one at the lower place.

    Source: Zheng, Chen, Lyu, Yao, "Reducing Communication for Split Learning by Randomized
    Top-k Sparsification", IJCAI 2023.

    Args:
        k, values, packer, scale, grad: see `SparseCodec`.

    >>> import torch
    >>> f"{TopK(k=3).formula_ratio(width=128):.2%}"
    '2.86%'
    >>> cut = torch.zeros(256, 128)
    >>> len(TopK(k=3, values="8").encode(cut, Moment(training=True)).payload)  # 256 x 43 bits + 4
    1380
    """

    def __init__(
        self,
        k: int,
        values: str = "fp32",
        packer: Packer = "enumerative",
        scale: Scale = "batch",
        grad: str = "fp32",
    ) -> None:
        super().__init__(k, values, packer, scale, grad)

    def places(self, cut: Tensor, moment: Moment) -> Places:
        return find_top(cut, self.k).places
