"""Attacks on a private decoder: infer text if weights are known, or weights by many questions.

>>> found = layer_from_questions(torch.eye(2), torch.tensor([[1.0, 5.0], [2.0, 6.0]]), torch.eye(2))
>>> found.tolist()  # each question's outputs in an order of their own
[[5.0, 1.0], [2.0, 6.0]]

The attacks are pure functions of what P1 (the user) sees in `vfl.llm.two_party`, and of the
knowledge that the attacker is granted. `Asker` asks real questions and stores everything that P1
sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from vfl.attacks.permuted import on_grid
from vfl.llm.private_decoder import PrivateDecoder
from vfl.llm.two_party import Form
from vfl.models.decoder import Decoder, DecoderLayer, DecoderShape, KeyValues
from vfl.models.language import Front
from vfl.mpc.rules import P1

Seen = dict[str, Tensor]


class Asker:
    """P1 (the user) of a private decoder, which stores all values that it sees; a context manager.

    Args:
        model: model whose weights P0 (the model owner) holds.
        form: form (settings) of the protocols.
        watcher: role whose view is stored: P1, or P0, which sees the user's text in thesis mode on
            floats.
    """

    def __init__(self, model: Decoder, form: Form | None = None, watcher: int = P1) -> None:
        self._hidden, self._width = PrivateDecoder(model, form or Form()), model.shape.width
        self._seen: Seen = {}
        self._hidden.parties.parties[watcher].watch = self._seen.__setitem__

    def ask(self, prompt: Sequence[int]) -> Seen:
        """Ask for one next token; return what P1 sees, by layer.

        A layer's values have the axes (tokens, width), or one axis.
        """
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
    """Infer a text's words from a model's permuted vectors, as an attacker who knows the weights.

    The attack proceeds word by word: it chooses, for each position of the text, the word whose
    sorted vector is nearest to one of the observed sorted vectors that are not yet assigned to a
    word. The attack thus succeeds although the order inside each vector and the order of the
    vectors are permuted (Thomas et al. 2025, arXiv 2505.18332).

    Args:
        front: the model's embedding, and its blocks up to the observed values.
        seen: observed vectors, axes (words, values); both the order of the vectors and the order
            inside each vector are permuted.
    """
    left, every = seen.sort(1).values, torch.arange(front.words.num_embeddings)
    cache = [KeyValues() for _ in front.layers]
    found: list[int] = []
    for _ in range(len(seen)):
        grown = [each.rows(torch.zeros_like(every)) for each in cache]
        vectors = front.above(front.words(every)[:, None], grown)[:, 0]
        apart = torch.cdist(vectors.sort(1).values.double(), left.double())
        word, row = divmod(int(apart.argmin()), len(left))
        found.append(word)
        left = torch.cat([left[:row], left[row + 1 :]])
        cache = [each.rows(every[word : word + 1]) for each in grown]
    return found


def nearest_multiset(candidates: Tensor, seen: Tensor) -> int:
    """Return the index of the candidate whose sorted values are nearest to the observed ones.

    An attacker who has a list of possible texts or next words, and weights near the owner's, can
    use this function. A permuted vector identifies the text that produced it; permuted token scores
    and attention scores do so too.

    Args:
        candidates: values that each candidate would produce, axes (candidates, values).
        seen: observed values in an unknown order, axes (values,).

    >>> candidates = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 5.0]])
    >>> nearest_multiset(candidates, torch.tensor([5, 4, 0.1]))
    1
    """
    apart = candidates.sort(1).values.double() - seen.sort().values.double()
    return int(apart.square().sum(1).argmin())


def layer_from_questions(
    inputs: Tensor, seen: Tensor, start: Tensor, offset: Tensor | None = None, rounds: int = 50
) -> Tensor:
    """Compute the weights of a linear layer from its permuted outputs for many known inputs.

    The attack assigns each observed value to the output whose predicted value has the same rank.
    The attack then solves a least-squares problem for the weights, and repeats assignment and
    solution (shuffled regression, Abid et al. 2017, section 3, with known inputs). The attack
    starts from the public weights of which the owner's weights are a fine-tuned version; from other
    weights, it does not converge.

    Args:
        inputs: known inputs of the layer, axes (questions, inputs), not permuted.
        seen: observed outputs of the layer, axes (questions, outputs); each row is permuted
            separately.
        start: weights from which the attack starts, axes (inputs, outputs).
        offset: vector that a residual connection adds to the layer's outputs, axes (questions,
            outputs).
        rounds: largest number of repetitions of both steps.

    Returns:
        The weights, axes (inputs, outputs).
    """
    ranked = seen.double().sort(1).values
    inputs, weight = inputs.double(), start.double()
    added = torch.zeros_like(ranked) if offset is None else offset.double()
    for _ in range(rounds):
        predicted = inputs @ weight + added
        wanted = torch.empty_like(ranked).scatter_(1, predicted.argsort(1), ranked)
        # Of all weights that fit the outputs, take the weights nearest to `start`, because few
        # questions determine only few of the weights.
        missing = wanted - added - inputs @ start.double()
        moved = start.double() + torch.linalg.lstsq(inputs, missing, driver="gelsd").solution
        if torch.equal(moved, weight):
            break
        weight = moved
    return weight


def averaged_openings(asker: Asker, prompt: Sequence[int], times: int) -> list[Tensor]:
    """Repeat one question; return the means of all masked values that one party receives.

    With float sharing (`vfl.llm.as_printed`), the mean of each masked value tends to the value
    itself. The attacker knows the value's position, even if other steps permute the values. The
    error is L / sqrt(times) times the root mean square of the values, where L is
    `as_printed.SCALE`. The source is thesis 6.4.2, eq 6-13, which omits the factor E x^2. For
    values under a mask of each of both parties, the error is sqrt(2) times as large. With ring
    sharing, the means do not tend to the values, because the masks are uniform.

    Args:
        asker: P1's `Asker`, or that of P0 with the user's question, of a decoder in thesis mode.
        prompt: token ids.
        times: number of repetitions of the question.

    Returns:
        The means, one tensor of one axis for each opening, in the order of the openings.
    """
    total: list[Tensor] = []
    for _ in range(times):
        opened = [one for at, one in asker.ask(prompt).items() if at.startswith("opened")]
        total = [a + b for a, b in zip(total, opened, strict=True)] if total else opened
    return [each / times for each in total]


def permuted_rows(values: Tensor, bits: int, draw: torch.Generator) -> Tensor:
    """Permute each row separately, and round it as shares are rounded.

    The result imitates what P1 (the user) sees.

    Args:
        values: values that the model computes, axes (rows, values).
        bits: fraction bits.
        draw: generator from which the permutations are drawn.
    """
    orders = torch.rand(values.shape, generator=draw).argsort(1)
    return on_grid(values.double(), bits).gather(1, orders)


def pairs_of(inputs: Tensor) -> Tensor:
    """Return the product of each two values of a row.

    The attention scores of a word are linear in these products. In a text of one word, the word's
    vector x has the score ``x @ A @ x`` with itself, where A is the product of a head's query
    weights and key weights. So `layer_from_questions` can infer the symmetric part of A from the
    scores that P1 (the user) sees.

    Args:
        inputs: vectors of words, axes (questions, width).

    Returns:
        Products, axes (questions, width (width + 1) / 2); the product of two different values is
        counted twice.

    >>> pairs_of(torch.tensor([[2.0, 3.0]]))
    tensor([[ 4., 12.,  9.]])
    """
    first, second = torch.triu_indices(inputs.shape[1], inputs.shape[1])
    found: Tensor = inputs[:, first] * inputs[:, second] * (1 + (first != second).to(inputs.dtype))
    return found


def score_map(layer: DecoderLayer, shape: DecoderShape) -> Tensor:
    """Return the linear map from `pairs_of` (normed word vectors) to scores.

    The axes of the map are (pairs, heads).
    """
    made = layer.attention_in.weight.double().T.reshape(shape.width, -1, shape.head_width)
    q, k, _ = torch.split(made, [shape.heads, shape.groups, shape.groups], 1)
    k = k.repeat_interleave(shape.heads // shape.groups, 1)
    whole = q.transpose(0, 1) @ k.permute(1, 2, 0) * shape.head_width**-0.5
    first, second = torch.triu_indices(shape.width, shape.width)
    found: Tensor = ((whole + whole.transpose(1, 2)) / 2)[:, first, second].T
    return found
