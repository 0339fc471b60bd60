"""Randomised top-k: in training, some of the k largest give way to random others."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from vfl.compression.base import Moment
from vfl.compression.index_set import Places
from vfl.compression.options import Scale
from vfl.compression.select import DRAWS, Law, find_top, random_places
from vfl.compression.sparse_codec import Packer, SparseCodec
from vfl.compression.ties import broken_at_random
from vfl.errors import BadOptionError, UserError
from vfl.options import require_choice


class RandTopK(SparseCodec):
    """Top-k whose choice is random in training; at inference it is plain top-k.

    The draws come from the encoding party's secret: whoever could repeat them would learn which
    of the places that travel are the largest.

    Source: Zheng, Chen, Lyu, Yao, "Reducing Communication for Split Learning by Randomized
    Top-k Sparsification", IJCAI 2023; thesis equation (3-19).

    Args:
        k: values kept of each row.
        alpha: weight of the places outside the top k, in [0, 1]; 0.05 to 0.1 is good.
        law: ``sequential`` replaces each of the top k with probability alpha (equation 3-19);
            ``multinomial`` is what the authors' released program does, which replaces more.
        values, packer, scale, grad: see `SparseCodec`.

    Raises:
        BadOptionError: k below 1, alpha outside [0, 1], or an unknown law, format of
            values or packer.

    >>> f"{RandTopK(k=6, alpha=0.1).formula_ratio(width=128):.2%}"
    '5.71%'
    """

    def __init__(
        self,
        k: int,
        alpha: float = 0.1,
        law: Law = "sequential",
        values: str = "fp32",
        packer: Packer = "enumerative",
        scale: Scale = "batch",
        grad: str = "fp32",
    ) -> None:
        super().__init__(k, values, packer, scale, grad)
        require_choice("law", law, get_args(Law))
        if not 0 <= alpha <= 1:
            raise BadOptionError(
                "alpha is a probability",
                where="option 'alpha'",
                got=str(alpha),
                want="0 to 1",
                fix="alpha=0.1",
            )
        self.alpha = alpha
        self.law: Law = law

    def places(self, cut: Tensor, moment: Moment) -> Places:
        top = find_top(cut, self.k)
        if not moment.training:
            return top.places
        if moment.secret is None:
            raise UserError(
                "randtopk draws at random in training and was given no secret",
                where=f"step {moment.step}",
                fix="Moment(step, training=True, secret=Secret.fresh())",
            )
        places = broken_at_random(cut, top, moment)
        shape = (len(places), DRAWS[self.law] * self.k)
        draws = moment.secret.uniform(shape, "randtopk", moment.step)
        return random_places(places, cut.shape[1], self.alpha, self.law, draws)
