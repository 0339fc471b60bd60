"""Reconstruction of words from a language model's cuts: by optimisation, search or a network.

The attacks do not compare those entries of a cut that the codec did not send.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.attacks.base import Attack, Scale, key_of, require_at_least, scale_by
from vfl.attacks.view import Grant, View
from vfl.core.errors import UserError
from vfl.core.registry import require_range
from vfl.core.seeds import scoped
from vfl.models.decoder import KeyValues
from vfl.models.language import Front
from vfl.models.lora import LoRAEmbedding
from vfl.models.optimizers import descend


def closer_vectors(
    bottom: nn.Module,
    words: nn.Embedding | LoRAEmbedding,
    cuts: Tensor,
    rows: Tensor,
    start: Tensor,
    steps: int,
    learning_rate: float,
    until: float,
) -> tuple[Tensor, int]:
    """Search for word vectors that give the cuts; return them and the number of steps used.

    For each row separately, the search minimises ||T_b(H') - h||^2 over H' by Adam, from `start`
    (thesis eq 6-2). The squared error is ill-conditioned, because the blocks of a decoder change a
    cut more than its words do. Two settings therefore find twice the words: a short memory of
    squared gradients, and a learning rate that falls to 0 along a cosine curve.

    Args:
        bottom: the bottom M_b, whose weights stay fixed. A bottom in half precision computes its
            outputs in half precision; the search itself uses float32.
        words: the bottom's embedding; T_b is the rest of the bottom, which reads word vectors.
        cuts: the cuts h, axes (rows, width).
        rows: rows of word numbers that the bottom accepts, as many rows as `cuts` has; the words
            have no effect on the result.
        start: initial word vectors H', axes (rows, words, vector width), float32.
        steps: largest number of steps.
        learning_rate: initial learning rate, relative to the standard deviation of all word
            vectors.
        until: the search ends when, in every row, the cosine between T_b(H') and h is at least this
            value; with 1, it runs all steps.
    """
    vectors = start.clone().requires_grad_()
    spread, kept = float(words.weight.detach().float().std()), cuts != 0
    optimizer = torch.optim.Adam([vectors], lr=learning_rate * spread, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    taken = 0
    for taken in range(1, steps + 1):  # noqa: B007
        with replaced(words, vectors.to(words.weight.dtype)):
            found = bottom(rows).float() * kept
        loss = (found - cuts).square().sum()
        (vectors.grad,) = torch.autograd.grad(loss, vectors)
        optimizer.step()
        schedule.step()
        if until < 1 and bool((F.cosine_similarity(found.detach(), cuts) >= until).all()):
            break
    return vectors.detach(), taken


@contextmanager
def replaced(words: nn.Embedding | LoRAEmbedding, vectors: Tensor) -> Iterator[None]:
    """Within a `with` block, make the embedding return these vectors for any words."""
    hook = words.register_forward_hook(lambda module, given, found: vectors)
    try:
        yield
    finally:
        hook.remove()


def nearest_words(vectors: Tensor, table: Tensor, count: int = 1) -> Tensor:
    """Return the words whose vectors have the highest cosines (thesis eq 6-3); axes (..., count).

    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> nearest_words(torch.tensor([[0.1, 7.0]]), table, count=2).tolist()
    [[1, 2]]
    """
    alike = F.normalize(vectors, dim=-1) @ F.normalize(table, dim=-1).T
    return alike.topk(count, dim=-1).indices


def search(
    front: Front,
    cuts: Tensor,
    candidates: Tensor | None,
    beam: int,
    prior: float,
    followers: Tensor | None,
) -> Tensor:
    """Find the words whose cuts are nearest to the given cuts, position by position.

    In a decoder's blocks, each word reads only earlier words, so the first n words determine the
    first n vectors of a cut. So, with all words as candidates and without noise, the search is
    exact.

    Args:
        front: the first part of a decoder; it must be the whole bottom.
        cuts: the given cuts, axes (rows, words x vector width).
        candidates: candidate words for each position, int64, axes (rows, words, candidates); None
            tries all words.
        beam: number of beginnings of a text to keep at each position; with noise, the beginning
            with the nearest cut may be wrong.
        prior: weight of `followers`; if the noise has standard deviation sigma, 2 sigma^2 gives the
            most probable text.
        followers: log probability of each word (second axis) after another word (first axis), axes
            (words, words).

    Returns:
        The words found, int64, axes (rows, words).
    """
    count, tokens = len(cuts), front.words.embedding_dim
    wanted = cuts.view(count, -1, tokens)
    every = torch.arange(front.words.num_embeddings).expand(count, -1)
    cost = torch.full((count, beam), torch.inf)
    cost[:, 0] = 0
    texts = torch.empty(count, beam, 0, dtype=torch.long)
    cache = [KeyValues() for _ in front.layers]
    for place in range(wanted.shape[1]):
        tried = every if candidates is None else candidates[:, place]
        choices = tried.shape[1]
        asked = tried[:, None].expand(count, beam, choices)
        grown = [each.rows(torch.arange(count * beam).repeat_interleave(choices)) for each in cache]
        found = front.above(front.words(asked.reshape(-1, 1)), grown)
        apart = found.view(count, beam, choices, tokens) - wanted[:, place, None, None]
        kept = wanted[:, place, None, None] != 0
        added = (apart * kept).square().sum(-1)
        if followers is not None and place:
            before = texts[:, :, -1:].expand_as(asked)
            added = added - prior * followers[before, asked]
        cost, chosen = (cost[:, :, None] + added).flatten(1).topk(beam, 1, largest=False)
        parent = chosen // choices
        words = asked.flatten(1).gather(1, chosen)
        older = texts.gather(1, parent[:, :, None].expand(-1, -1, place))
        texts = torch.cat([older, words[:, :, None]], 2)
        rows = (chosen + torch.arange(count)[:, None] * beam * choices).flatten()
        cache = [each.rows(rows) for each in grown]
    return texts[:, 0]


def follower_table(texts: Tensor, words: int) -> Tensor:
    """Return log probabilities of words after other words, from texts; axes (words, words).

    The probability is the mean of two: the frequency of the word pair, smoothed by the frequency of
    its second word; and the frequency of this word, with 1 added to each word's count.

    >>> table = follower_table(torch.tensor([[1, 2, 1, 2]]), 3)
    >>> [round(share, 3) for share in table[1].exp().tolist()]
    [0.095, 0.286, 0.619]
    """
    alone = torch.bincount(texts.flatten(), minlength=words).double() + 1
    pairs = torch.zeros(words, words, dtype=torch.float64)
    ones = torch.ones(texts[:, 1:].numel(), dtype=torch.float64)
    pairs.index_put_((texts[:, :-1].flatten(), texts[:, 1:].flatten()), ones, accumulate=True)
    pairs += alone / alone.sum()
    mixed = (pairs / pairs.sum(1, keepdim=True) + alone / alone.sum()) / 2
    return mixed.log().float()


class TextInversion(Attack):
    """Searches for word vectors that give the sent cuts, and takes the words nearest to them.

    The attacker has the sender's bottom; for example, it is the owner of the model, who distributed
    the bottom. The attack works for every bottom that begins with an embedding.

    Source: thesis 6.2.2.1, eq 6-2 and 6-3. The thesis ends a search when the found vectors have a
    cosine of 0.98 with the true vectors, but an attacker does not have the true vectors. So this
    search compares cuts instead.

    Args:
        steps: largest number of Adam steps.
        learning_rate: initial learning rate, relative to the standard deviation of the word
            vectors.
        until: cosine between found and sent cuts at which a search ends; 1 runs all steps.
        half: whether the sender computed in float16; then the attacker's copy of the bottom also
            does so.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "tokens"
    needs = frozenset({Grant.CUTS, Grant.OTHERS_BOTTOM})

    def __init__(
        self,
        steps: int = 1000,
        learning_rate: float = 0.3,
        until: float = 0.9999,
        half: bool = False,
    ) -> None:
        require_at_least(0, steps=steps, learning_rate=learning_rate)
        require_range("until", until, 0, 1)
        self.steps, self.learning_rate, self.until, self.half = steps, learning_rate, until, half

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        return self.nearest(view, draw)[..., 0]

    def nearest(self, view: View, draw: torch.Generator, count: int = 1) -> Tensor:
        """Return the words nearest to each found vector, int64, axes (rows, words, count)."""
        bottom = view.others_bottom().eval()
        words, cuts = embedding_of(bottom), view.targets.cuts
        table = words.weight.detach().clone()
        if self.half:
            bottom.half()
        found = []
        with torch.no_grad():
            axes = embedded(bottom, words, torch.ones(1, *view.shape))
        starts = self.started(view, draw, table, axes)
        for some, start in zip(torch.split(cuts, _ROWS), torch.split(starts, _ROWS), strict=True):
            rows = torch.ones(len(some), *view.shape)
            vectors, _ = closer_vectors(
                bottom, words, some, rows, start, self.steps, self.learning_rate, self.until
            )
            found.append(nearest_words(vectors, table, count))
        return torch.cat(found)

    def started(
        self, view: View, draw: torch.Generator, table: Tensor, axes: tuple[int, ...]
    ) -> Tensor:
        """Return the vectors with which the search starts, axes (rows, words, vector width).

        Args:
            view: the attacker's view.
            draw: generator from which all random numbers are drawn.
            table: vectors of all words, axes (words of the vocabulary, vector width).
            axes: axes of one row's vectors, (words, vector width).
        """
        return torch.randn(len(view.targets.cuts), *axes, generator=draw) * table.std()


_ROWS = 64  # number of texts in one search


def embedding_of(bottom: nn.Module) -> nn.Embedding | LoRAEmbedding:
    """Return the bottom's embedding layer.

    Raises:
        UserError: the bottom has no embedding layer.
    """
    for part in bottom.modules():
        if isinstance(part, nn.Embedding | LoRAEmbedding):
            return part
    raise UserError(
        "this attack looks for words, and the bottom reads none",
        want="a bottom that begins with an embedding: decoder_front, textcnn, gru4rec",
        fix="white_box_inversion",
    )


def embedded(
    bottom: nn.Module, words: nn.Embedding | LoRAEmbedding, row: Tensor
) -> tuple[int, ...]:
    """Return one row's word vectors as the bottom embeds them; axes (words, vector width)."""
    axes: list[tuple[int, ...]] = []
    hook = words.register_forward_hook(lambda m, given, found: axes.append(tuple(found.shape[1:])))
    try:
        bottom(row)
    finally:
        hook.remove()
    return axes[0]


class TokenSearch(Attack):
    """Tries words, one position after another, and keeps those whose cuts are nearest.

    With `candidates=0` and without noise, it finds every text exactly, because in a decoder a word
    reads only earlier words. This search is the strongest attack of this file, but it needs
    vocabulary x words forward passes for each text. With `candidates` above 0, it refines the
    result of `text_inversion`. The bottom must be a `decoder_front`, without layers that a defense
    or a codec adds.

    Args:
        candidates: number of candidate words at each position, those nearest to the result of
            `text_inversion`; 0 tries all words.
        beam: number of beginnings of a text to keep at each position.
        prior: weight of the frequencies of word pairs in the leaked texts; see `search`.
        steps: number of steps of the `text_inversion` that runs first.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "tokens"

    def __init__(
        self, candidates: int = 0, beam: int = 1, prior: float = 0.0, steps: int = 1000
    ) -> None:
        require_at_least(0, candidates=candidates, prior=prior)
        require_range("beam", beam, 1, 1024)
        self.candidates, self.beam, self.prior = candidates, beam, prior
        self.inversion = TextInversion(steps)
        leaked = {Grant.LEAKED_INPUTS} if prior else set()
        self.needs = self.inversion.needs | leaked

    @torch.no_grad()
    def run(self, view: View, draw: torch.Generator) -> Tensor:
        front, cuts = front_of(view.others_bottom().eval(), view.shape), view.targets.cuts
        near, followers = None, None
        if self.candidates:
            with torch.enable_grad():
                near = self.inversion.nearest(view, draw, self.candidates)
        if self.prior:
            followers = follower_table(view.leaked.inputs.long(), front.words.num_embeddings)
        size = max(1, _SEARCHED // (self.beam * (self.candidates or front.words.num_embeddings)))
        parts = torch.split(torch.arange(len(cuts)), size)
        return torch.cat(
            [
                search(front, cuts[part], None if near is None else near[part],
                       self.beam, self.prior, followers)
                for part in parts
            ]
        )  # fmt: skip


_SEARCHED = 20_000  # words tried in one forward pass


def front_of(bottom: nn.Module, shape: tuple[int, ...]) -> Front:
    """Return the decoder's first part; the bottom must consist only of it.

    Raises:
        UserError: the bottom is not the first part of a decoder, or has further layers.
    """
    fronts = [part for part in bottom.modules() if isinstance(part, Front)]
    row = torch.ones(1, *shape)
    if not fronts or not torch.equal(bottom(row), fronts[0](row)):
        raise UserError(
            "this attack needs a decoder's front, and this bottom is of another kind",
            want="decoder_front, with no layer of a defense or codec around it",
            fix="text_inversion",
        )
    return fronts[0]


class TwoStageInversion(TextInversion):
    """Runs `text_inversion`, starting with words that a trained network predicts from cuts.

    The network (`token_network`) finds nearly the right words, even if many blocks precede the cut.
    The gradient search then fits the words' vectors to the cut.

    Source: Chen et al. 2024, "Unveiling the Vulnerability of Private Fine-Tuning in Split-Based
    Frameworks for Large Language Models" (BiSR), section 4: a learned inversion, then optimisation.
    In the paper, the second stage also matches gradients of a training; in vfl, it compares only
    cuts.

    Args:
        steps: see `text_inversion`.
        learning_rate: learning rate of `text_inversion`.
        until: see `text_inversion`.
        half: see `text_inversion`.
        network_steps: number of Adam steps for the network, each on 512 words.
        before: number of preceding vectors that the network reads besides a word's own vector.
        hidden: number of units in the network's hidden layer.

    Raises:
        BadOptionError: an option is out of range.
    """

    needs = TextInversion.needs | {Grant.LEAKED_INPUTS}

    def __init__(
        self,
        steps: int = 200,
        learning_rate: float = 0.1,
        until: float = 0.9999,
        half: bool = False,
        network_steps: int = 300,
        before: int = 1,
        hidden: int = 512,
    ) -> None:
        super().__init__(steps, learning_rate, until, half)
        require_at_least(0, network_steps=network_steps)
        self._network = (before, hidden, network_steps)
        TokenNetwork(1, *self._network)  # refuses other options out of range

    def started(
        self, view: View, draw: torch.Generator, table: Tensor, axes: tuple[int, ...]
    ) -> Tensor:
        return table[TokenNetwork(axes[-1], *self._network).run(view, draw)]


class TokenNetwork(Attack):
    """Trains a network that maps a word's vector in the cut, and vectors before it, to the word.

    The network trains on leaked texts and their cuts; the attack needs no party's weights. So the
    attack also works if noise or codecs change the cuts.

    Source: thesis 6.2.2, following its reference 52 (an inversion model trained on pairs).

    Args:
        tokens: width of one word's vector in the cut.
        before: number of preceding vectors that the network reads besides a word's own vector.
        hidden: number of units in the network's hidden layer.
        steps: number of Adam steps, each on 512 words.
        learning_rate: Adam's learning rate.

    Raises:
        BadOptionError: an option is out of range.
    """

    goal = "tokens"
    needs = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS})

    def __init__(
        self,
        tokens: int = 64,
        before: int = 1,
        hidden: int = 512,
        steps: int = 1500,
        learning_rate: float = 0.002,
    ) -> None:
        require_at_least(1, tokens=tokens, hidden=hidden)
        require_at_least(0, before=before, steps=steps, learning_rate=learning_rate)
        self.tokens, self.before, self.hidden = tokens, before, hidden
        self.steps, self.learning_rate = steps, learning_rate

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        known, cuts = view.leaked.cuts, view.targets.cuts
        if known.shape[1] % self.tokens:
            raise UserError(
                "the width of a cut is not a multiple of the width of a word's vector",
                got=f"width {known.shape[1]}, tokens={self.tokens}",
                fix="set 'tokens' to the width of one word's vector",
            )
        texts = view.leaked.inputs.long()[:, : known.shape[1] // self.tokens]
        scale = scale_by("standard", known.view(-1, self.tokens))
        given = self._windows(scale, known).flatten(0, 1)
        # The leaked texts contain only few words of a large vocabulary.
        words, labels = torch.unique(texts.flatten(), return_inverse=True)
        with scoped(key_of(draw)):
            network = nn.Sequential(
                nn.Linear(given.shape[1], self.hidden),
                nn.GELU(),
                nn.Linear(self.hidden, len(words)),
            )
        optimizer = torch.optim.Adam(network.parameters(), self.learning_rate)
        for _ in range(self.steps):
            some = torch.randint(len(given), (512,), generator=draw)
            descend(optimizer, F.cross_entropy(network(given[some]), labels[some]))
        with torch.no_grad():
            parts = torch.split(self._windows(scale, cuts), _ROWS)
            return torch.cat([words[network(part).argmax(-1)] for part in parts])

    def _windows(self, scale: Scale, cuts: Tensor) -> Tensor:
        """Return each word's vector and those before it; axes (rows, words, features)."""
        vectors = scale(cuts.view(-1, self.tokens)).view(len(cuts), -1, self.tokens)
        padded = F.pad(vectors, (0, 0, self.before, 0))
        return torch.cat(
            [padded[:, at : at + vectors.shape[1]] for at in range(self.before + 1)], 2
        )
