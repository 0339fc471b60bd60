"""Fixed synthetic rows and fresh networks, drawn from the seed alike in every process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vfl import models
from vfl.bench.workloads import FEATURE_PARTIES, LABEL_PARTY, Workload
from vfl.core.seeds import derive, generator, scoped
from vfl.datasets import PartyData, Split
from vfl.datasets.party import digest_of


def synthetic(workload: Workload, seed: int) -> dict[str, PartyData]:
    """Every party's rows: normal inputs, and the labels a random linear map gives them."""
    rows = np.arange(workload.rows)
    split = Split(train=rows, validation=rows[:0], test=rows[:0])
    digest = digest_of(rows)
    inputs = {name: _normal(seed, name, workload.rows, *workload.shape) for name in FEATURE_PARTIES}
    scores = torch.zeros(workload.rows, workload.outputs)
    for name, own in inputs.items():
        flat = own.flatten(start_dim=1)
        scores += flat @ _normal(seed, f"teacher-{name}", flat.shape[1], workload.outputs)
    parties = {
        name: PartyData(name, own, None, None, split, digest) for name, own in inputs.items()
    }
    classes = tuple(range(workload.outputs))
    label = PartyData(LABEL_PARTY, None, scores.argmax(dim=1), classes, split, digest)
    return parties | {LABEL_PARTY: label}


def fresh_bottom(workload: Workload, seed: int, party: str) -> nn.Module:
    """One feature party's half."""
    with scoped(derive(seed, "bench", "weights", party)):
        return models.make_bottom(workload.bottom).build(workload.shape, workload.width)


def fresh_top(workload: Workload, seed: int) -> nn.Module:
    """The label party's half."""
    with scoped(derive(seed, "bench", "weights", LABEL_PARTY)):
        return models.make_top(workload.top).build(workload.merged_width, workload.outputs)


class Monolith(nn.Module):
    """The whole network as one module: what the parties train together, uncut."""

    def __init__(self, bottoms: Sequence[nn.Module], top: nn.Module) -> None:
        super().__init__()
        self.bottoms = nn.ModuleList(bottoms)
        self.top = top

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Logits from each bottom's inputs, axes (rows, ...), in party order."""
        cuts = [bottom(own) for bottom, own in zip(self.bottoms, inputs, strict=True)]
        logits: Tensor = self.top(torch.cat(cuts, dim=1))
        return logits


def _normal(seed: int, purpose: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "bench", "data", purpose))
