"""Words out of cuts: against trying every text, under noise and codecs, and what is refused."""

import copy
import itertools

import pytest
import torch
from torch import nn

from vfl import compression
from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.inputs.texts import closer_vectors, follower_table, search
from vfl.attacks.scoring import Case, attempt_all, token_accuracy
from vfl.compression import StepContext
from vfl.core.errors import UserError
from vfl.core.seeds import generator, scoped
from vfl.models.language import DecoderFront

GRANTS = frozenset({Grant.CUTS, Grant.OTHERS_BOTTOM, Grant.LEAKED_INPUTS})


def front_of(words, tokens=8, layers=2, steps=3):
    with scoped(9):
        recipe = DecoderFront(words=words, tokens=tokens, layers=layers, heads=2, front=layers)
        return recipe.build((steps,), steps * tokens).eval().requires_grad_(requires_grad=False)


def case_of(bottom, texts, cuts, known=None):
    known = texts if known is None else known
    leaked = Evidence(known, bottom(known).detach())
    held = Holdings(
        Evidence(cuts=cuts),
        leaked,
        others_bottom=lambda: copy.deepcopy(bottom),
        shape=tuple(texts.shape[1:]),
    )
    view = View(ThreatModel("label party", "inference", GRANTS), 2, held)
    return Case(view, torch.zeros(len(texts)).long(), texts)


def score(spec, case):
    return attempt_all(case, make(spec), generator(0, "draw"))[0].value


def test_a_wide_search_is_the_nearest_of_all_texts():
    front = front_of(words=4)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    cuts = front(every[::7].float())
    cuts = cuts + 1.5 * torch.randn(cuts.shape, generator=generator(0, "noise"))
    nearest = every[torch.cdist(cuts, front(every.float())).argmin(1)]
    assert torch.equal(search(front, cuts, None, 16, 0.0, None), nearest)
    assert not torch.equal(search(front, cuts, None, 1, 0.0, None), nearest)  # greedy is not


def test_a_word_follows_another_as_often_as_counted():
    texts = [[1, 2, 2], [3, 1, 2]]
    table = follower_table(torch.tensor(texts), 5)
    flat = [word for text in texts for word in text]
    alone = [(flat.count(word) + 1) / (len(flat) + 5) for word in range(5)]
    pairs = [pair for text in texts for pair in itertools.pairwise(text)]
    for first, second in itertools.product(range(5), repeat=2):
        starts = sum(one == first for one, _ in pairs)
        counted = (pairs.count((first, second)) + alone[second]) / (starts + 1)
        assert table[first, second].exp() == pytest.approx((counted + alone[second]) / 2)


def test_what_often_follows_helps_against_noise():
    """Word n is followed by n + 1 mostly."""
    draw = generator(0, "followers")
    starts = torch.randint(30, (150, 1), generator=draw)
    texts = ((starts + torch.arange(8)) % 30 + 1).float()
    front = front_of(words=31, steps=8)
    cuts = front(texts)
    noisy = cuts + 1.5 * torch.randn(cuts.shape, generator=draw)
    case = case_of(front, texts[:40], noisy[:40], texts[40:])
    alone, helped = score("token_search", case), score("token_search:prior=4.5", case)
    wide = score("token_search:prior=4.5,beam=8", case)
    assert alone < helped - 0.15 < wide - 0.15


def test_entries_that_a_codec_left_out_do_not_count():
    draw = generator(0, "sparse")
    texts = torch.randint(1, 40, (20, 4), generator=draw).float()
    front = front_of(words=40, tokens=16, layers=1, steps=4)
    codec, cuts = compression.make("topk:k=24"), front(texts)
    payload, _ = codec.encode(cuts, StepContext())
    decoded = codec.decode(payload, 20, 64, StepContext()).cut
    case = case_of(front, texts, decoded)
    assert int((decoded != 0).sum(1).max()) == 24
    assert score("token_search", case) > 0.9
    assert score("text_inversion:steps=100,learning_rate=0.1", case) > 0.2  # of 1 / 40


def test_vectors_are_found_through_layers_around_the_bottom_and_the_search_ends():
    texts = torch.randint(1, 20, (10, 3), generator=generator(0, "around")).float()
    with scoped(2):
        around = nn.Sequential(front_of(words=20), nn.Linear(24, 24))
    case = case_of(around, texts, around(texts).detach())
    assert score("text_inversion:steps=200", case) > 0.95
    with pytest.raises(UserError, match="front, and this bottom is of another kind"):
        score("token_search", case)
    words = around[0].words
    start = words(texts.long()).detach()
    cuts = around(texts).detach()
    found, steps = closer_vectors(around, words, cuts, texts, start, 50, 0.1, 0.999)
    assert steps == 1
    assert torch.allclose(found, start, atol=0.2)


def test_two_stages_read_words_that_the_network_never_saw():
    draw = generator(0, "two stages")
    texts = torch.randint(1, 40, (90, 5), generator=draw).float()
    front = front_of(words=40, tokens=16, steps=5)
    case = case_of(front, texts[:20], front(texts[:20]).detach(), texts[20:].clamp(max=30))
    network = score("token_network:tokens=16,steps=60,hidden=64", case)
    few = score("text_inversion:steps=30,learning_rate=0.1", case)
    both = score("two_stage_inversion:steps=30,network_steps=60,hidden=64", case)
    assert both > max(network, few)
    assert network < 0.8  # a quarter of the words is in no known text


def test_a_bottom_without_words_is_refused():
    rows = torch.randn(4, 3)
    bottom = nn.Linear(3, 3)
    with pytest.raises(UserError, match="reads none"):
        score("text_inversion", case_of(bottom, rows, bottom(rows).detach()))
    with pytest.raises(UserError, match="not a multiple"):
        score("token_network:tokens=2", case_of(bottom, rows, bottom(rows).detach()))


def test_accuracy_is_the_mean_of_each_texts_share_and_padding_is_no_word():
    draw = generator(0, "accuracy")
    texts, guess = (torch.randint(0, 3, (30, 5), generator=draw) for _ in range(2))
    texts[4] = 0  # a text of padding alone is none
    shares = []
    for text, found in zip(texts.tolist(), guess.tolist(), strict=True):
        pairs = [(a, b) for a, b in zip(text, found, strict=True) if a]
        if pairs:
            shares.append(sum(a == b for a, b in pairs) / len(pairs))
    assert token_accuracy(guess, texts) == pytest.approx(sum(shares) / len(shares))
