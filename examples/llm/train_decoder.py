"""Train a small decoder and its tokenizer on film reviews within minutes, for `vfl llm demo`.

    VFL_DATA=folder_with_review-polarity python examples/llm/train_decoder.py --minutes 8

The tokenizer is a byte-pair encoding with 1,024 tokens (Sennrich et al. 2016), and the decoder has
LLaMA's components and one million weights. Both are written to the user's cache folder, in which
the demo looks for them. Every fiftieth review is held out and written to apart.txt; the printed
loss is the loss on the held-out reviews. The learning rate falls with the remaining time, so that
the training also ends in time on a slow machine, with a worse model.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import tarfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vfl.llm.project import demo_folder
from vfl.llm.text import BytePairs
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import save_decoder

ARCHIVE = "review-polarity/review_polarity.tar.gz"
CONTEXT, BATCH, RATE = 96, 12, 3e-3


def reviews(archive: Path) -> list[str]:
    """Return the texts of the reviews, in the order of their file names."""
    with tarfile.open(archive) as tar:
        files = sorted((one for one in tar if one.name.endswith(".txt")), key=lambda one: one.name)
        found = []
        for one in files:
            content = tar.extractfile(one)
            assert content is not None, "a text is a file"
            text = content.read().decode("latin-1")
            found.append(re.sub(r"\s+", " ", text).strip())
    return found


def learn_pairs(texts: list[str], vocabulary: int, words: int = 20_000) -> BytePairs:
    """Learn byte-pair encoding: repeatedly merge the most frequent pair of tokens."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(BytePairs.pieces(text))
    table = [(list(piece.encode()), count) for piece, count in counts.most_common(words)]
    pairs: Counter[tuple[int, int]] = Counter()
    places: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    def count_word(place: int, sign: int) -> None:
        tokens, times = table[place]
        for pair in pairwise(tokens):
            pairs[pair] += sign * times
            places[pair].add(place)

    for place in range(len(table)):
        count_word(place, 1)
    merges: list[tuple[int, int]] = []
    while 256 + len(merges) < vocabulary:
        best = max(pairs, key=pairs.__getitem__)
        merges.append(best)
        for place in sorted(places.pop(best)):
            count_word(place, -1)
            BytePairs.join(table[place][0], best, 255 + len(merges))
            count_word(place, 1)
        del pairs[best]
    return BytePairs(merges)


def loss_of(model: Decoder, rows: Tensor) -> Tensor:
    """Return the loss of predicting each next token; `rows` has axes (texts, steps + 1)."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(tokens: Tensor, held: Tensor, minutes: float, seed: int = 0) -> Decoder:
    """Train for as many steps as the given minutes allow."""
    torch.manual_seed(seed)
    shape = DecoderShape(
        vocabulary=1024,
        width=128,
        layers=4,
        heads=4,
        inner=384,
        context=256,
        positions="rotary",
        norm="rms",
        mlp="silu",
        bias=False,
    )
    model = Decoder(shape)
    torch.nn.init.normal_(model.tokens.weight, std=0.02)
    for name, weight in model.named_parameters():
        if name.endswith("_out.weight"):
            with torch.no_grad():
                weight.mul_((2 * shape.layers) ** -0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    tests = held[: len(held) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[:64]
    began, step, told = time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH, 1))
        loss = loss_of(model, tokens[starts + torch.arange(CONTEXT + 1)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if share > told:
            with torch.no_grad():
                apart = float(loss_of(model, tests))
            print(f"step {step}, {share:.0%}: test loss {apart:.3f}", flush=True)
            told += 0.1
    return model


def main() -> None:
    """Train the decoder, and store it with its tokenizer."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, default=Path(os.environ.get("VFL_DATA", ".")))
    options.add_argument("--minutes", type=float, default=8.0)
    options.add_argument("--folder", type=Path, default=demo_folder())
    given = options.parse_args()
    texts = reviews(given.data / ARCHIVE)
    held = [text for place, text in enumerate(texts) if place % 50 == 0]
    seen = [text for place, text in enumerate(texts) if place % 50]
    pairs = learn_pairs(seen, 1024)
    print("the tokenizer is learned", flush=True)
    one, other = (torch.tensor(pairs.encode("\n".join(each))) for each in (seen, held))
    print(f"{len(one)} tokens to train on, {len(other)} tokens to test on", flush=True)
    model = train(one, other, given.minutes)
    pairs.save(given.folder)
    (given.folder / "apart.txt").write_text("\n".join(held), encoding="utf-8")
    save_decoder(given.folder, model)
    print(f"wrote {given.folder}; now: vfl llm demo")


if __name__ == "__main__":
    main()
