"""Pretrain the decoder model that the programs in this folder use; this takes a minute on one core.

The decoder learns to predict the next word on the training rows of reviews.toml, from up to 1,000
words of each row, and never reads another row. The weights are written to the folder in
`VFL_MODELS`, or else to ``~/.cache/vfl/models``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from vfl.config import read_experiment
from vfl.core.seeds import scoped
from vfl.models.decoder import Decoder
from vfl.models.language import decoder_shape, save_pretrained
from vfl.training.run import load_data

HERE = Path(__file__).parent
PADDING = 0


def training_rows(file: Path) -> torch.Tensor:
    """Return the word indices of the reviews on which an experiment trains."""
    experiment = read_experiment(file)
    data = load_data(experiment)
    party = data[experiment.feature_parties[0]]
    return party.inputs[torch.from_numpy(party.split.train)].long()


def main() -> None:
    """Train the decoder, and store its weights under the given name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="reviews")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument(
        "--window", type=int, default=128, help="number of words in a training text"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    rows = training_rows(HERE / "reviews.toml")
    stream = rows[rows != PADDING]
    draw = torch.Generator().manual_seed(0)
    with scoped(0):
        model = Decoder(decoder_shape(words=5000, tokens=64, layers=arguments.layers, heads=4))
        torch.nn.init.normal_(model.tokens.weight, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.learning_rate, arguments.steps, pct_start=0.1
    )
    inside = torch.arange(arguments.window + 1)
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(stream) - len(inside), (arguments.batch, 1), generator=draw)
        texts = stream[starts + inside]
        loss = F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == arguments.steps:
            print(f"step {step:5}   loss {loss.item():.3f}", flush=True)
    print(f"weights   {save_pretrained(arguments.name, model)}")


if __name__ == "__main__":
    main()
