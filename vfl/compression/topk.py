"""Top-k: sends the k values of largest magnitude in each row, and their indices.

`RandTopK` replaces some of these values at random in training. Both random laws (option `law`)
replace a random number m of the top k indices by the same number of other indices. For a given m,
every choice of indices is equally likely, so a law is defined by the distribution of m, for cuts of
width d:

- sequential: m = min(Binomial(k, alpha), d - k), which is exactly thesis equation (3-19);
- multinomial: k indices are drawn without replacement, where each top index has the weight
  (1 - alpha)/k and each other index alpha/(d - k), as in the authors' released code. m is the
  number of drawn indices outside the top k.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl.compression.base import INFERENCE, Counts, Decoded, StepContext, Symbols
from vfl.compression.coding import loops
from vfl.compression.coding.bits import Indices, Layout, index_bits
from vfl.compression.coding.values import Values, not_finite, value_code
from vfl.compression.packed import Chosen, PackedCodec, Pad, Scale
from vfl.core import compiled
from vfl.core.errors import UserError, WidthError
from vfl.core.frame import Payload
from vfl.core.registry import require_choice, require_range
from vfl.core.seeds import Secret

Packer = Literal["enumerative", "index", "bitmap", "range"]
Law = Literal["sequential", "multinomial"]
Draws = npt.NDArray[np.float64]
Drops = npt.NDArray[np.bool_]

#: Number of low bits of a sort key that hold the index; and the bit pattern of an infinite float32.
_INDEX_BITS, _INFINITE = 32, 0x7F800000
#: Number of random numbers that each law needs for each of a row's k indices.
DRAWS = {"sequential": 1, "multinomial": 3}


class SparseCodec(PackedCodec):
    """Base class of codecs that send k values per row; gradients are sent without indices.

    Args:
        k: number of values to send per row.
        values: format of a value: ``fp32``, ``bf16``, or 1 to 8 bits.
        packer: ``enumerative``: as few bits as a fixed number of bits per row allows. ``index``:
            each index is written separately. ``bitmap``: one bit for every possible index.
            ``range``: adaptive entropy coding; it needs values of 1 to 8 bits.
        scale: group of values with common range limits in training, if values have 1 to 8 bits: the
            whole ``batch``, each ``row``, or ``agreed`` (in training as ``batch``). A query has its
            own range limits per row. With ``agreed``, a query sends no range limits, because both
            parties store their running means.
        grad: format of a gradient: ``fp32``, ``bf16``, or 2 to 8 bits with one scale per row and
            random rounding without bias.
        pad: ``query``, ``always`` or ``no``, see `PackedCodec`; payload lengths depend on the
            values only with ``packer=range``.

    Raises:
        BadOptionError: k is below 1, or a format is unknown.
    """

    packers = get_args(Packer)

    def __init__(
        self,
        k: int,
        values: str = "fp32",
        packer: Packer = "enumerative",
        scale: Scale = "batch",
        grad: str = "fp32",
        pad: Pad = "query",
    ) -> None:
        require_range("k", k, 1)
        super().__init__(value_code(values), packer, scale, grad, pad, kept=k)
        self.k = k

    def check(self, width: int) -> None:
        self.layout(width)

    @abstractmethod
    def indices(self, cut: Tensor, context: StepContext) -> Indices:
        """Return the indices of the values in `cut` to send, increasing, axes (rows, k)."""

    def choose(self, cut: Tensor, context: StepContext) -> Chosen:
        indices = self.indices(cut, context)
        saved = torch.from_numpy(indices).to(cut.device)
        return Chosen(indices, cut.gather(1, saved).cpu().numpy(), saved)

    def place(self, indices: Indices, values: Values, width: int) -> Decoded:
        return self._spread(torch.from_numpy(indices), torch.from_numpy(values), width)

    def _spread(self, indices: Tensor, kept: Tensor, width: int) -> Decoded:
        """Return a cut of zeros except for the sent values, on the models' device."""
        where = self._where(len(indices), width)
        indices, whole = indices.to(where), torch.zeros(len(indices), width, device=where)
        return Decoded(whole.scatter_(1, indices, kept.to(where)).to(self.device), indices)

    def symbols(self, cut: Tensor, context: StepContext = INFERENCE) -> Symbols:
        indices, values, _ = self.choose(cut, context)
        kept = np.zeros(cut.shape, np.bool_)
        np.put_along_axis(kept, indices, True, axis=1)
        _, codes = self.coded(values, context)
        counts: Counts = "pooled" if self._learned(cut.shape[1], context) else "none"
        return Symbols(kept, codes.reshape(-1), 2**self._code.bits, counts)

    def encode_grad(self, grad: Tensor, saved: Any, context: StepContext = INFERENCE) -> Payload:
        return self._grad.encode(grad.to(saved.device).gather(1, saved), None, context)

    def decode_grad(
        self, payload: Payload, saved: Any, rows: int, width: int, context: StepContext = INFERENCE
    ) -> Tensor:
        kept = torch.from_numpy(self._grad.decode(payload, rows, self.k, None))
        return self._spread(saved, kept, width).cut

    def formula_ratio(self, width: int) -> float:
        """Return k/d (b + ceil(log2 d)) / 32 for width d, b bits per value (thesis table 3.1)."""
        return self.k / width * (self._code.bits + index_bits(width)) / 32

    def layout(self, width: int) -> Layout:
        if self.k > width:
            few = max(1, width // 8)
            raise WidthError(
                f"top-k keeps {self.k} values of a cut that is {width} wide",
                got=f"k = {self.k}",
                want=f"k <= {width}",
                fix=f"k={few} keeps one value in {width // few}",
            )
        return super().layout(width)


class TopK(SparseCodec):
    """Sends the k values of largest magnitude; of equal magnitudes, the lower index is sent.

    Source: Zheng, Chen, Lyu, Yao, "Reducing Communication for Split Learning by Randomized
    Top-k Sparsification", IJCAI 2023.

    Args:
        k, values, packer, scale, grad, pad: see `SparseCodec`.

    >>> import torch
    >>> f"{TopK(k=3).formula_ratio(width=128):.2%}"
    '2.86%'
    >>> cut = torch.zeros(256, 128)
    >>> training = StepContext(training=True)
    >>> len(TopK(k=3, values="8").encode(cut, training).payload)  # 256 x 43 bits and a scale
    1380
    """

    def indices(self, cut: Tensor, context: StepContext) -> Indices:
        return find_top(cut, self.k).indices


class RandTopK(SparseCodec):
    """Top-k with a random choice of indices in training; in predictions, plain top-k.

    The random numbers come from the secret of the party that encodes the cut. An observer who could
    compute the same random numbers would learn which of the sent indices have the largest
    magnitudes.

    Source: Zheng, Chen, Lyu, Yao, "Reducing Communication for Split Learning by Randomized
    Top-k Sparsification", IJCAI 2023; thesis equation (3-19).

    Args:
        k: number of values kept per row.
        alpha: total weight of the indices outside the top k, in [0, 1]; values from 0.05 to 0.1
            work well.
        law: ``sequential`` replaces each of the top k indices with probability alpha (equation
            3-19). ``multinomial`` follows the authors' released code, which replaces more of the
            top k indices.
        values, packer, scale, grad, pad: see `SparseCodec`.

    Raises:
        BadOptionError: k is below 1, alpha is outside [0, 1], or a law, value format or packer is
            unknown.

    >>> f"{RandTopK(k=6, alpha=0.1).formula_ratio(width=128):.2%}"
    '5.71%'
    """

    draws: ClassVar[bool] = True

    def __init__(
        self,
        k: int,
        alpha: float = 0.1,
        law: Law = "sequential",
        values: str = "fp32",
        packer: Packer = "enumerative",
        scale: Scale = "batch",
        grad: str = "fp32",
        pad: Pad = "query",
    ) -> None:
        super().__init__(k, values, packer, scale, grad, pad)
        require_choice("law", law, get_args(Law))
        require_range("alpha", alpha, 0, 1)
        self.alpha = alpha
        self.law: Law = law

    def indices(self, cut: Tensor, context: StepContext) -> Indices:
        top = find_top(cut, self.k)
        if not context.training:
            return top.indices
        if context.secret is None:
            raise UserError(
                "randtopk draws at random in training and received no secret",
                where=f"step {context.step}",
                fix="StepContext(step, training=True, secret=Secret.fresh())",
            )
        indices = break_ties(cut, top, context.secret, context.step)
        shape = (len(indices), DRAWS[self.law] * self.k)
        draws = context.secret.uniform(shape, "randtopk", context.step)
        return random_indices(indices, cut.shape[1], self.alpha, self.law, draws)


class Top(NamedTuple):
    """The top k indices of each row, (rows, k), and a mask of rows where the last one is tied."""

    indices: Indices
    tied: npt.NDArray[np.bool_]


def find_top(cut: Tensor, k: int) -> Top:
    """Return the indices of the k values of largest magnitude in each row, increasing.

    Of equal magnitudes, the lower index wins.

    Args:
        cut: the cut, float32, axes (rows, width).
        k: number of indices per row, at most the width.

    Raises:
        NonFiniteError: a value is NaN or Inf.
    """
    if cut.device.type != "cpu":
        return _find_top_on_card(cut, k)
    tied = np.zeros(len(cut), np.bool_)
    if compiled.COMPILED and k <= loops.MOST_INDICES:
        found = np.empty((len(cut), k), np.int64)
        if not loops.find_top(cut.contiguous().view(torch.int32).numpy(), found, tied):
            raise not_finite("a cut")
        return Top(found, tied)
    magnitude = cut.abs()
    largest, indices = (each.numpy() for each in torch.topk(magnitude, k, dim=1))
    if not largest.max(initial=0) < np.inf:  # NaN sorts above Inf, and Inf above finite values
        raise not_finite("a cut")
    size, least = magnitude.numpy(), largest[:, -1:]
    enough = size >= least
    if np.count_nonzero(enough) > indices.size:
        tied = enough.sum(axis=1) > k
        indices[tied] = _lower_of_tied(size[tied], least[tied], k)
    indices.sort(axis=1)
    return Top(indices, tied)


def _find_top_on_card(cut: Tensor, k: int) -> Top:
    """Run `find_top` on a GPU; sort keys are distinct, as they combine magnitude and index."""
    width = cut.shape[1]
    behind = torch.arange(width - 1, -1, -1, device=cut.device)
    keys = (cut.abs().view(torch.int32).long() << _INDEX_BITS) | behind
    best = torch.topk(keys, min(k + 1, width), dim=1).values
    sizes = best >> _INDEX_BITS
    indices = (width - 1 - (best[:, :k] & ((1 << _INDEX_BITS) - 1))).sort(dim=1).values
    tied = sizes[:, k - 1] == sizes[:, k] if width > k else torch.zeros_like(sizes[:, 0])
    found = torch.cat([indices, tied[:, None].long(), sizes[:, :1]], dim=1).cpu().numpy()
    if found[:, -1].max(initial=0) >= _INFINITE:
        raise not_finite("a cut")
    return Top(np.ascontiguousarray(found[:, :k]), found[:, k].astype(np.bool_))


def _lower_of_tied(size: np.ndarray, least: np.ndarray, k: int) -> Indices:
    """Return k indices per row: all with sizes above `least`, then the lowest with size `least`."""
    above, level = size > least, size == least
    room = k - above.sum(axis=1, keepdims=True)
    kept = above | (level & (level.cumsum(axis=1) <= room))
    indices: Indices = kept.nonzero()[1].reshape(-1, k)
    return indices


def random_indices(top: Indices, width: int, alpha: float, law: Law, draws: Draws) -> Indices:
    """Replace some of the top indices by random other indices; the result is increasing.

    Args:
        top: top indices, increasing, axes (rows, k).
        width: width of the cut.
        alpha: total weight of the indices outside the top k, in [0, 1].
        law: distribution of the number of replaced indices.
        draws: random numbers, uniform on [0, 1), axes (rows, `DRAWS[law]` k); a row of the result
            depends only on the same row of `draws`.
    """
    k, others = top.shape[1], width - top.shape[1]
    if law == "sequential":
        # If a random number is below alpha, it is uniform on [0, alpha), so `replace` can use the
        # same number again. If a row needs as many replacements as there are other indices, it
        # takes all of these anyway.
        drops, unit = sequential_drops(draws, others, alpha), float(alpha)
    else:
        drops, unit = multinomial_drops(draws[:, k:], others, alpha), 1.0
    indices = top.copy()
    replace = loops.replace if compiled.COMPILED else _replace
    replace(indices, drops, draws, unit, others)
    return indices


def sequential_drops(draws: Draws, others: int, alpha: float) -> Drops:
    """Mark the top indices to replace: each one with probability alpha (equation 3-19).

    At most `others` indices are marked, because there are only this many indices to replace them.

    Args:
        draws: random numbers, uniform on [0, 1), axes (rows, k).
        others: number of indices outside the top k.
        alpha: total weight of the indices outside the top k.
    """
    drops: Drops = draws < alpha
    if others < draws.shape[1]:
        drops = _smallest(draws, np.minimum(drops.sum(axis=1), others))
    return drops


def multinomial_drops(draws: Draws, others: int, alpha: float) -> Drops:
    """Mark the top indices to replace, if k indices are drawn one after another with fixed weights.

    Args:
        draws: random numbers, uniform on [0, 1), axes (rows, 2 k).
        others: number of indices outside the top k.
        alpha: total weight of the indices outside the top k.
    """
    count_draws, order_draws = np.split(draws, 2, axis=1)
    k = count_draws.shape[1]
    counts = np.zeros(len(draws), np.int64)
    for drawn in range(k):  # weights of the indices not drawn yet
        outside = alpha * (others - counts) / max(others, 1)
        inside = (1 - alpha) * (k - drawn + counts) / k
        counts += count_draws[:, drawn] * (outside + inside) < outside
    return _smallest(order_draws, counts)


def _smallest(draws: Draws, counts: npt.NDArray[np.int64]) -> Drops:
    """Mark the smallest random numbers of each row; `counts` has the number of marks per row."""
    ends = np.sort(np.pad(draws, ((0, 0), (0, 1)), constant_values=1.0), axis=1)
    smallest: Drops = draws < np.take_along_axis(ends, counts[:, None], axis=1)
    return smallest


def _replace(indices: Indices, drops: Drops, draws: Draws, unit: float, others: int) -> None:
    """Replace every marked index by a random other index; see `loops.replace`."""
    row, slot = drops.nonzero()
    first = row.searchsorted(row)
    turn = np.arange(len(row)) - first  # number of this index within its row, from 0
    numbers = (draws[row, slot] / unit * (others - turn)).astype(np.int64)
    for t in reversed(range(turn.max(initial=0))):  # turns a Lehmer code into distinct numbers
        later = (turn > t).nonzero()[0]
        numbers[later] += numbers[later] >= numbers[first[later] + t]
    # Number n stands for the n-th index that is not in the row. So each index of the row that has
    # at most n such indices below it shifts the result by one.
    before = indices[row] - np.arange(indices.shape[1])
    indices[row, slot] = numbers + (before <= numbers[:, None]).sum(axis=1)
    indices.sort(axis=1)


def break_ties(cut: Tensor, top: Top, secret: Secret, step: int) -> Indices:
    """Return the top indices; if there is a tie for the last one, a random choice decides.

    If instead the lower index always won a tie, a higher sent index of the same magnitude could
    only be a random replacement. An observer of the frame would then recognise this replacement.

    Args:
        cut: the cut, float32, axes (rows, width).
        top: indices of its k largest magnitudes, axes (rows, k).
        secret: source of the random choices; a row's choice depends on the secret, the step and the
            row's position.
        step: number of the training exchange.
    """
    tied = top.tied.nonzero()[0]
    if not len(tied):
        return top.indices
    rows = cut[torch.from_numpy(tied).to(cut.device)]
    size, chosen = np.abs(rows.cpu().numpy()), top.indices.copy()
    least = np.take_along_axis(size, chosen[tied], axis=1).min(axis=1, keepdims=True)
    draws = secret.uniform_rows(tied, size.shape[1], "ties", step)
    order = np.where(size == least, draws, np.where(size > least, -1.0, 2.0))
    k = chosen.shape[1]
    chosen[tied] = np.sort(np.argpartition(order, k - 1, axis=1)[:, :k], axis=1)
    return chosen
