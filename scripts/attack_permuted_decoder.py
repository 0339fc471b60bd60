"""Leakage of a private decoder's permuted values: tables of docs/results/language_models.md.

    python scripts/attack_permuted_decoder.py
    python scripts/attack_permuted_decoder.py --model FOLDER --question "a text"

Orders and rounding are those of `vfl.llm.two_party`, drawn here; tests/attacks/permuted compares
them with P1's real view. The decoder is random: 32 numbers a token, 4,000 tokens, one block. With
--model it is a real one, whose weights the attacker knows, and the text is the question.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vfl.core.seeds import generator, scoped
from vfl.llm.attack import (
    Asker,
    averaged_openings,
    layer_from_questions,
    permuted_rows,
    words_from_multisets,
)
from vfl.llm.text import read_tokenizer
from vfl.llm.two_party import Form
from vfl.models.decoder import Decoder, DecoderShape, cached
from vfl.models.language import Front
from vfl.models.pretrained import load_pretrained
from vfl.mpc.rules import P0, P1

WIDTH, WORDS, BITS, TEXTS, LENGTH = 32, 4000, 30, 5, 12
with warnings.catch_warnings(action="ignore"):  # here it is broken
    FLOATS = Form("thesis", sharing="insecure_float")


def decoder(layers: int) -> Decoder:
    """Build a random decoder."""
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
    """Return the share of words read from noisy permuted vectors after some blocks."""
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
    """Return the words read from a real model's text after some blocks, and how many are right.

    Args:
        folder: folder of the model.
        question: the text; its first tokens are attacked.
        layers: number of blocks before the attack.
        places: fraction bits that P1 sees.
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


def left_unknown(change: float, questions: int) -> float:
    """Return the share of a fine-tuned layer's change that one-word questions leave unknown."""
    base, draw = decoder(1), generator(0, "orders")
    owner = copy.deepcopy(base)
    with scoped(8):
        for name in ("attention_in", "attention_out", "mlp_in"):
            weight = getattr(owner.layers[0], name).weight
            weight += change * weight.std() * torch.randn(weight.shape)

    def normed(vectors: Tensor) -> Tensor:
        return F.rms_norm(vectors, (WIDTH,), eps=1e-5)

    def maps(model: Decoder) -> tuple[Tensor, Tensor]:
        """Return maps of attention over one word and of the next layer, axes (inputs, outputs)."""
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
    """Average over float shares: P0's error of words' vectors, words it reads, P1's error of keys.

    Errors are in units of a share's assumed size, 1.
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
    """Print the tables."""
    parser = argparse.ArgumentParser(description="What permuted values of a decoder give away.")
    parser.add_argument("--model", type=Path, help="folder of a real model")
    parser.add_argument("--question", default="My doctor says that I have diabetes")
    parser.add_argument("--blocks", type=int, nargs="*", default=[0, 1], help="attacked behind")
    options = parser.parse_args()
    if options.model is not None:
        for layers in options.blocks:
            bits = 11 if layers else 16  # `vfl.llm.private_decoder` shows the first norm more
            words, right = question_read(options.model, options.question, layers, bits)
            print(f"behind {layers} blocks: {right} of {len(words)} words: {words}", flush=True)
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
    print("\n| asked | P0: words' vectors | words read | P1: keys |\n| --- | --- | --- | --- |")
    for times in (1, 100, 2500):
        vectors, read, keys = averaged(times)
        print(f"| {times:,} | {vectors:.2f} | {100 * read:.0f} % | {keys:.2f} |", flush=True)


if __name__ == "__main__":
    main()
