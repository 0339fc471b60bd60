"""What a private decoder gives away: texts to who knows its weights, weights to who asks often.

>>> shares = float_shares(torch.tensor([3.0, -1.0]), 100.0, 4, torch.Generator().manual_seed(0))
>>> shares.shape  # so often was the value shared anew
torch.Size([4, 2])

Pure functions of what P1 of `vfl.mpc.two_party` sees and of what is granted; `Asker` asks for real
and keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from vfl.attacks.permuted import on_grid
from vfl.models.decoder import Cache, Decoder
from vfl.models.language import Front
from vfl.mpc.private_decoder import PrivateDecoder
from vfl.mpc.rules import P1
from vfl.mpc.two_party import Form

Seen = dict[str, Tensor]


class Asker:
    """P1 of a private decoder, which keeps all it sees; a context manager.

    Args:
        model: P0's.
        form: of the computation.
    """

    def __init__(self, model: Decoder, form: Form | None = None) -> None:
        self._hidden, self._width = PrivateDecoder(model, form or Form()), model.shape.width
        self._seen: Seen = {}
        self._hidden.parties.parties[P1].watch = self._seen.__setitem__

    def ask(self, prompt: Sequence[int]) -> Seen:
        """What P1 sees of one next token, by layer; before a norm axes (words, width), else one."""
        self._seen.clear()
        self._hidden.generate(prompt, 1)
        axes = {True: (-1, self._width), False: (-1,)}
        return {at: one.reshape(axes[at.endswith("norm")]) for at, one in self._seen.items()}

    def __enter__(self) -> Asker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hidden.close()


def words_from_multisets(front: Front, seen: Tensor) -> list[int]:
    """The text behind permuted vectors, for who knows the weights and did not ask.

    Word by word: that whose sorted vector is nearest to a sorted vector that is left, whichever
    place it had. No order inside or among vectors protects (Thomas et al. 2025, arXiv 2505.18332).

    Args:
        front: embedding and the blocks below the values.
        seen: axes (words, tokens); each vector in an order of its own, and so are the vectors.
    """
    left, every = seen.sort(1).values, torch.arange(front.words.num_embeddings)
    cache: Cache = []
    found: list[int] = []
    for _ in range(len(seen)):
        grown = [tuple(part.expand(len(every), -1, -1, -1) for part in pair) for pair in cache]
        vectors = front.above(front.words(every)[:, None], grown)[:, 0]  # type: ignore[arg-type]
        apart = torch.cdist(vectors.sort(1).values.double(), left.double())
        word, row = divmod(int(apart.argmin()), len(left))
        found.append(word)
        left = torch.cat([left[:row], left[row + 1 :]])
        cache = [(keys[word : word + 1], values[word : word + 1]) for keys, values in grown]
    return found


def layer_from_questions(
    inputs: Tensor, seen: Tensor, start: Tensor, offset: Tensor | None = None, rounds: int = 50
) -> Tensor:
    """The weights of a linear layer from permuted outputs of many known inputs.

    Give each value to the output that predicts one of its rank, solve least squares, and again
    (shuffled regression, Abid et al. 2017, section 3, with the inputs known). It begins from public
    weights that the owner's were fine-tuned from; from others it ends nowhere near.

    Args:
        inputs: axes (questions, inputs), in their order.
        seen: axes (questions, outputs), each row in an order of its own.
        start: axes (inputs, outputs).
        offset: what is added to the outputs, alike; of a residual connection.
        rounds: at most so many.

    Returns:
        Axes (inputs, outputs).
    """
    ranked = seen.double().sort(1).values
    inputs, weight = inputs.double(), start.double()
    added = torch.zeros_like(ranked) if offset is None else offset.double()
    for _ in range(rounds):
        predicted = inputs @ weight + added
        wanted = torch.empty_like(ranked).scatter_(1, predicted.argsort(1), ranked)
        # Of all weights that fit, those nearest to the start: few questions change little.
        missing = wanted - added - inputs @ start.double()
        moved = start.double() + torch.linalg.lstsq(inputs, missing, driver="gelsd").solution
        if torch.equal(moved, weight):
            break
        weight = moved
    return weight


def float_shares(values: Tensor, scale: float, times: int, draw: torch.Generator) -> Tensor:
    """P1's shares of values that are shared anew, as floats: x - D with E D^2 = scale^2 E x^2.

    The thesis' float sharing (6.4.2, eq 6-12), which nothing else here uses.

    Returns:
        Axes (times, *values).
    """
    spread = scale * values.double().square().mean().sqrt()
    noise = torch.randn(times, *values.shape, generator=draw, dtype=torch.float64)
    return values.double() - spread * noise


def averaged_error(values: Tensor, scale: float, times: int, draw: torch.Generator) -> float:
    """What averaging such shares leaves, in units of the values' own root mean square.

    It is scale / sqrt(times): the thesis' eq 6-13 with the factor E x^2 that it leaves out.

    >>> draw = torch.Generator().manual_seed(0)
    >>> round(averaged_error(torch.ones(2000), 10.0, 100, draw), 1)
    1.0
    """
    total, left = torch.zeros_like(values, dtype=torch.float64), times
    while left:
        some = min(left, 256)
        total += float_shares(values, scale, some, draw).sum(0)
        left -= some
    wrong = (total / times - values).square().mean().sqrt()
    return float(wrong / values.double().square().mean().sqrt())


def permuted_rows(values: Tensor, bits: int, draw: torch.Generator) -> Tensor:
    """Each row in an order of its own, rounded as shares are; what `Asker` sees, for large counts.

    Args:
        values: axes (rows, values).
        bits: fraction bits.
        draw: the orders.
    """
    orders = torch.rand(values.shape, generator=draw).argsort(1)
    return on_grid(values.double(), bits).gather(1, orders)
