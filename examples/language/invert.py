"""Recover text from the cuts of a split language model's user; its owner attacks (thesis 6.2.2).

    python examples/language/invert.py --out inversion.csv
    python examples/language/invert.py --model smollm2 --texts 5 --out inversion_smollm2.csv

The program attacks the decoder of pretrain.py, or a published decoder. The texts come from reviews
that the decoder of pretrain.py has never seen: sentences (short) and whole reviews (long). Two
reference values accompany each accuracy of an attack. The guess is the accuracy of always answering
the most frequent word; the task's accuracy is the share of next words that the model ranks first.
Each line of the output file is one cell (one attack), written when the attack ends; cells in the
file are not computed again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import tarfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl import attacks, defenses
from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View
from vfl.attacks.scoring import Case, attempt_all
from vfl.config import read_experiment
from vfl.core.seeds import Secret, generator
from vfl.datasets.sources import read_bundled
from vfl.datasets.sources.base import SetFormat
from vfl.datasets.sources.files import data_folder
from vfl.datasets.sources.texts import REVIEWS, Texts
from vfl.models.decoder import Decoder
from vfl.models.language import Front, decoder_shape
from vfl.models.pretrained import existing_model, load_pretrained
from vfl.training import SplitModule
from vfl.training.run import load_data

LAYERS, TOKENS, WORDS = 6, 64, 5000
GRANTS = frozenset({Grant.CUTS, Grant.OTHERS_BOTTOM, Grant.LEAKED_INPUTS})


@dataclass(frozen=True)
class Cell:
    """Settings of one attack on one kind of message."""

    sweep: str
    texts: str
    front: int
    words: int
    half: bool
    codec: str
    defense: str
    attack: str


@dataclass(frozen=True)
class Found:
    """Result of the attack of one cell."""

    accuracy: float
    guess: float
    whole: float
    next_word: float
    perplexity: float
    seconds: float


INVERSION = "text_inversion:steps=400"
REFINED = "token_search:candidates=50,steps=400"
SEARCH, NETWORK = "token_search", "token_network:hidden=128,steps=300"
CODECS = ("quantise:values=4", "quantise:values=2", "quantise:values=1", "topk:k=256",
          "topk:k=64", "randtopk:k=64,alpha=0.1", "size:k=16,kind=mask")  # fmt: skip


def noise(deviation: float) -> str:
    """Return the spec of a defense that adds the noise of equation 6-4."""
    return f"clipped_noise:norm=inf,sigma={deviation}"


def cells() -> Iterator[Cell]:
    """Yield the cells (attacks) for all figures of the results page."""
    for front, texts in ((f, t) for f in range(1, LAYERS + 1) for t in ("reviews", "sentences")):
        strong = (SEARCH, NETWORK) if front in (2, 4) and texts == "reviews" else ()
        for attack in (INVERSION, REFINED, *strong):
            yield Cell("depth", texts, front, 16, False, "none", "none", attack)
    for deviation, front in ((s, f) for s in (0.5, 1, 2, 4) for f in (2, 4)):
        likely = f"prior={2 * deviation**2:g}"
        strong = (SEARCH, f"{SEARCH}:{likely}", NETWORK) if front == 2 else (f"{REFINED},{likely}",)
        for attack in (INVERSION, *strong):
            yield Cell("noise", "reviews", front, 16, False, "none", noise(deviation), attack)
    for codec, front in ((c, f) for c in CODECS for f in (2, 4)):
        for attack in (INVERSION, SEARCH if front == 2 else REFINED):
            yield Cell("codec", "reviews", front, 16, False, codec, "none", attack)
    for front in (2, 4):
        yield Cell("half", "reviews", front, 16, True, "none", "none", f"{INVERSION},half=true")
    for words, front in ((w, f) for w in (1, 3, 10, 30, 100, 300, 1000) for f in (2, 4)):
        for attack in (INVERSION, REFINED)[: 2 if words < 300 else 1]:
            yield Cell("length", "reviews", front, words, False, "none", "none", attack)


DEEP = (10, 20)
#: Defenses that replace words before the front model reads the text.
SANITISED = ("santext", "custext")
DEEP_INVERSION = "text_inversion:steps=150"
DEEP_REFINED = "token_search:candidates=50,steps=150"
TWO_STAGES = "two_stage_inversion:steps=60,network_steps=150,hidden=256"


def deep_cells() -> Iterator[Cell]:
    """Yield cells for a published model; the cut is after a third and two thirds of its blocks."""
    for front in DEEP:
        for attack in (TWO_STAGES, DEEP_INVERSION, DEEP_REFINED):
            yield Cell("depth", "reviews", front, 16, False, "none", "none", attack)
    for deviation, front in ((s, f) for s in (1, 4) for f in DEEP):
        for attack in (TWO_STAGES, DEEP_INVERSION):
            yield Cell("noise", "reviews", front, 16, False, "none", noise(deviation), attack)
    codecs = (
        "quantise:values=8,scale=row",
        "quantise:values=4,scale=row,outliers=4",
        "topk:k={quarter},packer=index",
    )
    for codec, front in ((c, f) for c in codecs for f in DEEP):
        yield Cell("codec", "reviews", front, 16, False, codec, "none", TWO_STAGES)
    for law, front in ((d, f) for d in ("santext:epsilon=6", "custext:epsilon=3") for f in DEEP):
        yield Cell("sanitised", "reviews", front, 16, False, "none", law, TWO_STAGES)
    for words, front in ((w, f) for w in (4, 64) for f in DEEP):
        for attack in (TWO_STAGES, DEEP_INVERSION):
            yield Cell("length", "reviews", front, words, False, "none", "none", attack)


class Bench:
    """The decoder model to attack, and texts that it was not trained on.

    Attributes:
        leaked: texts that the attacker knows together with the texts' cuts.
        by_token: whether a row of the codec, which has its own scale, is a token; otherwise a row
            is a whole text.
    """

    leaked = 600
    by_token = False

    def __init__(self, experiment: Path, count: int) -> None:
        asked = read_experiment(experiment)
        own = load_data(asked)[asked.feature_parties[0]]
        train, test = torch.from_numpy(own.split.train), torch.from_numpy(own.split.test)
        self.known, unseen = own.inputs[train], own.inputs[test]
        sentences = numbered_sentences(own.inputs, train, test)
        self.texts = {"reviews": unseen, "sentences": sentences}
        self.count = count
        self.model = load_pretrained(existing_model("reviews"))
        if self.model.shape != decoder_shape(WORDS, TOKENS, LAYERS, heads=4):
            raise SystemExit("the model 'reviews' has other sizes: run pretrain.py again")
        self.model.requires_grad_(requires_grad=False)

    @classmethod
    def of_published(cls, name: str, count: int) -> Bench:
        """Return a published decoder and reviews as its tokens; the last 400 are attacked."""
        made = cls.__new__(cls)
        form = SetFormat(length=1000, tokenizer=name)
        cells = read_bundled("review_polarity", form=form).cells
        rows = torch.from_numpy(cells.rows(np.arange(0)))
        # A row of `Bench` numbers tokens from 1 on, but this front model needs the token ids
        # themselves.
        made.known, made.texts = (rows[:1600] - 1).clamp(0), {"reviews": (rows[1600:] - 1).clamp(0)}
        made.by_token = True
        made.count, made.model = count, load_pretrained(existing_model(name), "body")
        made.model.requires_grad_(requires_grad=False)
        return made

    def run(self, cell: Cell) -> Found:
        """One figure."""
        count = max(1, self.count * 30 // max(cell.words, 30))
        rows = self.texts[cell.texts]
        whole = (rows[:, : cell.words] > 0).all(1)
        rows = rows[whole][:count, : cell.words]
        known = self.known[(self.known[:, : cell.words] > 0).all(1)][: self.leaked, : cell.words]
        front = Front(self.model.tokens, self.model.layers[: cell.front], cell.words)
        width = self.model.shape.width * (1 if self.by_token else cell.words)
        sent = SplitModule(
            {"user": nn.Identity()}, nn.Identity(), {"user": width},
            codec=cell.codec.format(quarter=width // 4),
            defense="none" if cell.defense.startswith(SANITISED) else cell.defense,
        ).eval()  # fmt: skip
        attack = attacks.make(cell.attack)
        if Grant.LEAKED_INPUTS not in attack.needs:
            known = known[:1]  # the program does not compute values that the attack does not use
        with torch.no_grad():
            front.to(torch.float16 if cell.half else torch.float32)
            below = self.sanitised(front, cell.defense, width)
            found = (below(some).float() for some in (rows, known))
            cuts, leaked = (
                cut if cell.half else sent({"user": cut.view(-1, width)}).view(cut.shape)
                for cut in found
            )
            front.float()
            next_word, perplexity = self.task(cell.front, cuts, rows)
        held = Holdings(
            Evidence(cuts=cuts), Evidence(known, leaked),
            others_bottom=lambda: Front(*copied(self.model, cell.front), cell.words),
            shape=(cell.words,),
        )  # fmt: skip
        view = View(ThreatModel("label party", "inference", GRANTS), 2, held)
        case = Case(view, torch.zeros(len(rows), dtype=torch.long), rows)
        started = time.perf_counter()
        accuracy, whole_texts = attempt_all(case, attack, generator(0, "invert", cell.sweep))
        seconds = time.perf_counter() - started
        return Found(
            accuracy.value, accuracy.guess, whole_texts.value, next_word, perplexity, seconds
        )

    def sanitised(self, front: Front, defense: str, width: int) -> nn.Module:
        """Return the front model; a defense that replaces words replaces them before it."""
        if not defense.startswith(SANITISED):
            return front
        law = defenses.make(defense)
        made = law.wrap_bottom(front, width)
        law.fit(made, self.known[:1], Secret.fresh())
        return made

    def task(self, front: int, cuts: Tensor, rows: Tensor) -> tuple[float, float]:
        """Return the fraction of next words that the model ranks first, and the perplexity.

        Both values are NaN for texts of a single word.
        """
        if rows.shape[1] < 2:
            return math.nan, math.nan
        above = Front(self.model.tokens, self.model.layers[front:], rows.shape[1])
        hidden = above.above(cuts.view(len(rows), -1, self.model.shape.width))
        logits = self.model.head(self.model.norm(hidden))[:, :-1].flatten(0, 1)
        wanted = rows[:, 1:].flatten().long()
        right = float((logits.argmax(1) == wanted).double().mean())
        return right, float(F.cross_entropy(logits, wanted).exp())


def copied(model: Decoder, front: int) -> tuple[nn.Embedding, list[nn.Module]]:
    """Return copies of the embedding and the first blocks, which an attacker may change."""
    return copy.deepcopy(model.tokens), [copy.deepcopy(one) for one in model.layers[:front]]


def numbered_sentences(reviews: Tensor, train: Tensor, test: Tensor) -> Tensor:
    """Return the sentences of the test reviews (lines of the file) as numbers of known words."""
    found: dict[tuple[str, str], str] = {}
    with tarfile.open(data_folder(None) / REVIEWS) as archive:
        for member in archive:  # in the order of the file, which differs from the order of the rows
            side, _, name = member.name.removeprefix("txt_sentoken/").partition("/")
            if side in ("neg", "pos") and name:
                found[name, side] = archive.extractfile(member).read().decode("latin-1")
    of_side = [[found[key] for key in sorted(found) if key[1] == side] for side in ("neg", "pos")]
    texts = [text for pair in zip(*of_side, strict=True) for text in pair]
    sentences = [line for row in test.tolist() for line in texts[row].splitlines()]
    rows = torch.from_numpy(Texts.of([*texts, *sentences], 1000, WORDS).rows(train.numpy()))
    assert torch.equal(rows[: len(texts)], reviews), "this is not the experiment's data file"
    return rows[len(texts) :]


def main() -> None:
    """Run the cells (attacks) that the output file does not contain yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("inversion.csv"))
    parser.add_argument("--model", help="a published decoder, such as smollm2")
    parser.add_argument(
        "--texts", type=int, default=8, help="texts per attack; fewer if they are long"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        help="studies to run: depth, length, half, noise, codec, sanitised",
    )
    parser.add_argument("--most", type=int, help="largest number of attacks; rerun to go on")
    arguments = parser.parse_args()
    names = [field.name for kind in (Cell, Found) for field in fields(kind)]
    done: set[tuple[str, ...]] = set()
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            done = {tuple(row[: len(fields(Cell))]) for row in csv.reader(file)}
    else:
        with arguments.out.open("w", newline="") as file:
            csv.writer(file).writerow(names)
    if arguments.model:
        bench, wanted = Bench.of_published(arguments.model, arguments.texts), deep_cells()
    else:
        bench = Bench(Path(__file__).parent / "reviews.toml", arguments.texts)
        wanted = cells()
    every = ((cell, tuple(str(value) for value in astuple(cell))) for cell in wanted)
    asked = [
        (cell, about)
        for cell, about in every
        if about not in done and (not arguments.sweep or cell.sweep in arguments.sweep)
    ]
    for cell, about in asked[: arguments.most]:
        found = bench.run(cell)
        print(f"{found.accuracy:.3f} {found.guess:.3f} {found.seconds:6.1f} s ", *about, flush=True)
        with arguments.out.open("a", newline="") as file:
            csv.writer(file).writerow([*about, *(f"{value:.4g}" for value in astuple(found))])


if __name__ == "__main__":
    main()
