"""Leakage of a private decoder's permuted values: tables of docs/results/language_models.md.

    python scripts/attack_permuted_decoder.py
    python scripts/attack_permuted_decoder.py --model FOLDER --question "a text"
    python scripts/attack_permuted_decoder.py --model FOLDER --texts 8
    python scripts/attack_permuted_decoder.py --model FOLDER --texts 8 --attention

This program draws permutations and rounds values as `vfl.llm.two_party` does;
tests/attacks/permuted compares the result with the values that P1 really receives. The decoder is
random: it has width 32, 4,000 tokens and one block. With --model the decoder is a real model whose
weights the attacker knows, and the attacked text is the question. With --texts the owner has
fine-tuned the decoder, and the attacker knows only the public weights from before the fine-tuning.
A table states how often the attack infers the right word among candidates, and for which fraction
of a vector's positions it recovers the order. With --attention the real protocol runs on the
model's first block, with and without protected scores; the attacker of protected scores sees the
opened values of their exponents.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vfl.attacks.permuted import by_rank
from vfl.core.seeds import generator, scoped
from vfl.llm.attack import (
    Asker,
    averaged_openings,
    layer_from_questions,
    nearest_multiset,
    pairs_of,
    permuted_rows,
    score_map,
    words_from_multisets,
)
from vfl.llm.project import needed_bits
from vfl.llm.text import read_tokenizer
from vfl.llm.two_party import Form
from vfl.models.decoder import Decoder, DecoderLayer, DecoderShape, KeyValues, Rotation, cached
from vfl.models.language import Front
from vfl.models.pretrained import load_pretrained
from vfl.mpc.rules import P0, P1

WIDTH, WORDS, BITS, TEXTS, LENGTH = 32, 4000, 30, 5, 12
#: Number of candidate words for the attacker of a real model.
CANDIDATES = 500
with warnings.catch_warnings(action="ignore"):  # this program attacks an insecure variant
    FLOATS = Form("thesis", sharing="insecure_float")


def decoder(layers: int) -> Decoder:
    """Build a random decoder with this number of blocks."""
    shape = DecoderShape(
        vocabulary=WORDS,
        width=WIDTH,
        layers=layers,
        heads=2,
        positions="rotary",
        norm="rms",
        bias=False,
    )
    with scoped(6):
        return Decoder(shape).requires_grad_(requires_grad=False)


def texts_read(layers: int, deviation: float) -> float:
    """Return the fraction of words inferred from noisy permuted vectors after `layers` blocks."""
    model, draw = decoder(max(layers, 1)), generator(0, "texts")
    front, right = Front(model.tokens, model.layers[:layers], LENGTH), 0
    for _ in range(TEXTS):
        text = torch.randint(WORDS, (1, LENGTH), generator=draw)
        vectors = front.above(front.words(text))[0]
        vectors = vectors + deviation * torch.randn(vectors.shape, generator=draw)
        seen = permuted_rows(vectors, BITS, draw)[torch.randperm(LENGTH, generator=draw)]
        found = torch.tensor(words_from_multisets(front, seen.float()))
        right += int((found == text[0]).sum())
    return right / (TEXTS * LENGTH)


def question_read(folder: Path, question: str, layers: int, places: int) -> tuple[list[str], int]:
    """Infer a text's words from a model's permuted vectors; return them and how many are right.

    Args:
        folder: folder of the model.
        question: the text that the attack infers.
        layers: number of blocks before the attacked vectors.
        places: number of fraction bits of the values that P1 sees.
    """
    model, tokenizer = load_pretrained(folder), read_tokenizer(folder)
    assert isinstance(model, Decoder), "tokens are read"
    text, draw = tokenizer.encode(question), generator(0, "orders")
    front = Front(model.tokens, model.layers[:layers], len(text))
    with torch.no_grad():
        vectors = front.above(front.words(torch.tensor([text])))[0]
        seen = permuted_rows(vectors, places, draw)[torch.randperm(len(text), generator=draw)]
        found = words_from_multisets(front, seen.float())
    right = (Counter(found) & Counter(text)).total()
    return [tokenizer.decode([each]) for each in found], right


def fine_tuned(model: Decoder, change: float) -> Decoder:
    """Return the model with noise on all blocks' weights, relative to their deviation."""
    owner = copy.deepcopy(model)
    with scoped(8):
        for layer in owner.layers:
            for weight in layer.parameters():
                if weight.dim() == 2:
                    weight += change * weight.std() * torch.randn(weight.shape)
    return owner


def attention_scores(layer: DecoderLayer, x: Tensor, keys: Tensor, shape: DecoderShape) -> Tensor:
    """Return a token's attention scores to all tokens so far; axes (texts, heads x tokens).

    Args:
        layer: the block.
        x: vectors of the current token, axes (texts, 1, width).
        keys: rotated keys of all tokens so far, including the current one, axes (texts, groups,
            tokens, head width).
        shape: shape of the model.
    """
    made = layer.attention_in(layer.attention_norm(x))[..., : shape.queries]
    q = made.view(len(x), 1, -1, shape.head_width).transpose(1, 2)
    q = Rotation.at(keys.shape[2] - 1, 1, shape).turn(q)
    k = keys.repeat_interleave(shape.heads // shape.groups, 1)
    return (q @ k.transpose(2, 3)).flatten(1) * shape.head_width**-0.5


@torch.no_grad()
def seen_values(
    model: Decoder, before: Tensor, words: Tensor, blocks: Sequence[int]
) -> dict[str, Tensor]:
    """Return the ordered values that P1 sees for several next words; axes (words, values).

    Args:
        model: the owner's model, or the public model.
        before: the text before the candidate words, axes (words before,).
        words: the candidates for the next word, axes (words,).
        blocks: numbers of blocks; the values after each of these numbers of blocks are returned.
    """
    text, x, found = model.tokens(before)[None], model.tokens(words)[:, None], {}
    for index, layer in enumerate(model.layers):
        cache = KeyValues()
        text = layer(text, cache)
        cache, earlier = cache.rows(torch.zeros_like(words)), x
        x = layer(x, cache)
        if index in blocks:
            found[f"{index} blocks" if index else "the embedding"] = earlier[:, 0]
            scores = attention_scores(layer, earlier, cache.keys, model.shape)
            found[f"attention in block {index + 1}"] = scores
    found["scores of all tokens"] = model.head(model.norm(x[:, 0]))
    return found


def read_beside_public_weights(
    folder: Path, texts: int, changes: Sequence[float], blocks: Sequence[int]
) -> Iterator[tuple[float, str, float, float]]:
    """Yield, per size of change and kind of value, how many words and positions the attack infers.

    The attacker knows the public weights and the words before the attacked word, and chooses among
    `CANDIDATES` words. The order of positions is inferred by an attacker that knows the whole text,
    as the user does.

    Args:
        folder: folder of the model.
        texts: number of texts, each of `LENGTH` random tokens.
        changes: sizes of the change between the public weights and the owner's; see `fine_tuned`.
        blocks: numbers of blocks before the attacked values.
    """
    public, draw = load_pretrained(folder), generator(0, "candidates")
    assert isinstance(public, Decoder), "tokens are read"
    public.requires_grad_(requires_grad=False)
    known = public.shape.vocabulary
    rows = torch.randint(known, (texts, LENGTH - 1 + CANDIDATES), generator=draw)
    before, words = rows[:, : LENGTH - 1], rows[:, LENGTH - 1 :]
    guesses = [seen_values(public, *each, blocks) for each in zip(before, words, strict=True)]
    for change in changes:
        owner = fine_tuned(public, change)
        right: Counter[str] = Counter()
        ordered: dict[str, list[float]] = {}
        for text, guessed in enumerate(guesses):
            secrets = seen_values(owner, before[text], words[text, :1], blocks)
            for name, secret in secrets.items():
                bits = 16 if name == "the embedding" else 14 if name.startswith("scores") else 11
                (seen,) = permuted_rows(secret, bits, draw).float()
                right[name] += nearest_multiset(guessed[name], seen) == 0
                found = secret[0][by_rank(guessed[name][0], secret[0])] == secret[0]
                ordered.setdefault(name, []).append(float(found.double().mean()))
        for name, shares in ordered.items():
            yield change, name, right[name] / texts, sum(shares) / texts


def seen_of_attention(seen: dict[str, Tensor], scores: int) -> Tensor:
    """Return the attention scores that P1 sees, or the opened values of their exponents."""
    if "layers.0.attention" in seen:
        found = seen["layers.0.attention"]
        # attention masks later tokens, so their scores are the smallest
        return found[found.argsort(descending=True)][:scores]
    opened = [each for name, each in seen.items() if name.startswith("opened")]
    return [each for each in opened if each.numel() == scores][1] * 2.0**-13


def words_read_from_attention(folder: Path, texts: int, form: Form) -> float:
    """Return the share of texts whose last word is inferred from all scores of the first block.

    The attacker knows the weights and all words but the last one, which is one of `CANDIDATES`
    words.
    """
    model, draw = load_pretrained(folder), generator(0, "candidates")
    assert isinstance(model, Decoder), "tokens are read"
    model.layers, model.shape = model.layers[:1], replace(model.shape, layers=1)
    shape, right = model.shape, 0
    model.requires_grad_(requires_grad=False)
    form = replace(form, **needed_bits(model))
    with Asker(model, form) as asker:
        for _ in range(texts):
            row = torch.randint(shape.vocabulary, (LENGTH - 1 + CANDIDATES,), generator=draw)
            before, words = row[: LENGTH - 1], row[LENGTH - 1 :]
            prompts = torch.cat([before.expand(CANDIDATES, -1), words[:, None]], 1)
            made = model.layers[0].attention_in(
                model.layers[0].attention_norm(model.tokens(prompts))
            )
            q, k, _ = (
                made.unflatten(-1, (-1, shape.head_width))
                .transpose(1, 2)
                .split([shape.heads, shape.groups, shape.groups], 1)
            )
            turn = Rotation.at(0, LENGTH, shape).turn
            k = turn(k).repeat_interleave(shape.heads // shape.groups, 1)
            now = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            guesses = (turn(q) @ k.mT)[..., now].flatten(1) * shape.head_width**-0.5
            seen = seen_of_attention(asker.ask(prompts[0].tolist()), guesses.shape[1])
            right += nearest_multiset(guesses, seen) == 0
    return right / texts


def left_unknown_of_scores(change: float, questions: int, form: Form) -> float:
    """Return the share of a change of query-key products that one-word questions do not determine.

    The answers come from the real protocol, on a model whose vocabulary has that many words.
    """
    shape = replace(decoder(1).shape, vocabulary=questions)
    with scoped(6):
        public = Decoder(shape).requires_grad_(requires_grad=False)
    owner = copy.deepcopy(public)
    with scoped(8):
        weight = owner.layers[0].attention_in.weight
        weight += change * weight.std() * torch.randn(weight.shape)
    start, wanted = (score_map(one.layers[0], shape) for one in (public, owner))
    with Asker(owner, form) as asker:
        seen = [seen_of_attention(asker.ask([word]), shape.heads) for word in range(questions)]
    inputs = pairs_of(F.rms_norm(public.tokens.weight.double(), (shape.width,), eps=1e-5))
    found = layer_from_questions(inputs, torch.stack(seen), start)
    return float((found - wanted).norm() / (start - wanted).norm())


def left_unknown(change: float, questions: int) -> float:
    """Return the share of a change by fine-tuning that one-word questions do not determine."""
    base, draw = decoder(1), generator(0, "orders")
    owner = copy.deepcopy(base)
    with scoped(8):
        for name in ("attention_in", "attention_out", "mlp_in"):
            weight = getattr(owner.layers[0], name).weight
            weight += change * weight.std() * torch.randn(weight.shape)

    def normed(vectors: Tensor) -> Tensor:
        return F.rms_norm(vectors, (WIDTH,), eps=1e-5)

    def maps(model: Decoder) -> tuple[Tensor, Tensor]:
        """Return the maps of one-word attention and the next layer, axes (inputs, outputs)."""
        block = model.layers[0]
        value = block.attention_in.weight.double()[2 * WIDTH :].T
        return value @ block.attention_out.weight.double().T, block.mlp_in.weight.double().T

    (public, start), (secret, wanted) = maps(base), maps(owner)
    vectors = base.tokens.weight.double()[:questions]
    middle = vectors + normed(vectors) @ secret
    attention = layer_from_questions(
        normed(vectors), permuted_rows(middle, BITS, draw), public, vectors
    )
    inputs = normed(vectors + normed(vectors) @ attention)
    found = layer_from_questions(inputs, permuted_rows(normed(middle) @ wanted, BITS, draw), start)
    return float((found - wanted).norm() / (start - wanted).norm())


def averaged(times: int) -> tuple[float, float, float]:
    """Average float shares over `times`; return errors of P0's words and P1's key, and words read.

    Errors are relative to the assumed standard deviation of a share, which is 1.
    """
    shape = DecoderShape(
        vocabulary=200, width=WIDTH, layers=1, heads=2, positions="rotary", norm="rms", bias=False
    )
    with scoped(6):
        model = Decoder(shape).requires_grad_(requires_grad=False)
    text = torch.randint(200, (LENGTH,), generator=generator(0, "texts"))
    with cached(model) as caches:
        model(text[None])
    found = []
    for watcher in (P0, P1):
        with warnings.catch_warnings(action="ignore"), Asker(model, FLOATS, watcher) as asker:
            found.append(averaged_openings(asker, text.tolist(), times)[0])
    vectors, keys = found[0].reshape(LENGTH, WIDTH), caches[0].keys.reshape(-1).double()
    words = model.tokens.weight.double()
    read = torch.cdist(vectors, words).argmin(1) == text
    errors = (vectors - words[text], found[1] - keys)
    first, second = (float(each.square().mean().sqrt()) for each in errors)
    return first, float(read.double().mean()), second


def main() -> None:
    """Print the tables of leakage."""
    parser = argparse.ArgumentParser(description="Leakage of a decoder's permuted values.")
    parser.add_argument("--model", type=Path, help="folder of a real model")
    parser.add_argument("--question", default="My doctor says that I have diabetes")
    parser.add_argument("--texts", type=int, help="number of texts to attack in a fine-tuned model")
    parser.add_argument(
        "--attention", action="store_true", help="attack the attention scores of the first block"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="*",
        default=[0, 1],
        help="for each attack, the number of blocks before the attacked values",
    )
    options = parser.parse_args()
    protected = Form(protect="scores", score_bits=6)
    if options.model is not None and options.attention:
        for form in (Form(), protected):
            share = words_read_from_attention(options.model, options.texts or 8, form)
            print(f"protect = {form.protect}: share {share:.3f} of words inferred", flush=True)
        print(f"guess: {1 / CANDIDATES:.3f}")
        return
    if options.model is not None and options.texts:
        print("| change | P1 sees | words found | places in order |\n| --- | --- | --- | --- |")
        for change, name, words, places in read_beside_public_weights(
            options.model, options.texts, (0.0, 0.01, 0.03, 0.1, 0.3), options.blocks
        ):
            print(f"| {change:g} | {name} | {words:.2f} | {places:.3f} |", flush=True)
        return
    if options.model is not None:
        for layers in options.blocks:
            # `vfl.llm.private_decoder` shows P1 more bits in the first norm than in later norms.
            bits = 11 if layers else 16
            words, right = question_read(options.model, options.question, layers, bits)
            print(
                f"after {layers} blocks: {right} of {len(words)} words right: {words}", flush=True
            )
        return
    print("| vectors behind | noise 0 | 0.1 | 0.3 | guess |\n| --- | --- | --- | --- | --- |")
    for layers in (0, 1, 2):
        shares = [f"{100 * texts_read(layers, one):.0f} %" for one in (0, 0.1, 0.3)]
        print(f"| {layers} blocks | {' | '.join(shares)} | {100 / WORDS:.2f} % |", flush=True)
    counts = (16, 32, 64, 128, 256, 512, 1024)
    print(f"\n| change | {' | '.join(map(str, counts))} |\n|{' --- |' * (len(counts) + 1)}")
    for change in (0.03, 0.1, 0.3, 1.0):
        shares = [f"{left_unknown(change, one):.3f}" for one in counts]
        print(f"| {change:g} | {' | '.join(shares)} |", flush=True)
    print("\n| change of scores' weights | questions | left unknown | protected |")
    print("| --- | --- | --- | --- |")
    for change, count in ((0.03, 256), (0.03, 640)):
        shares = [left_unknown_of_scores(change, count, one) for one in (Form(), protected)]
        print(f"| {change:g} | {count} | {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)
    print("\n| asked | P0: words' vectors | words read | P1: keys |\n| --- | --- | --- | --- |")
    for times in (1, 100, 2500):
        vectors, read, keys = averaged(times)
        print(f"| {times:,} | {vectors:.2f} | {100 * read:.0f} % | {keys:.2f} |", flush=True)


if __name__ == "__main__":
    main()
