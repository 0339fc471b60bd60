"""An attack from outside the package, in one file: classes by the nearest mean of their cuts.

This file registers the attack in the process that runs the file. A package instead declares its
member in the package's pyproject.toml:

    [project.entry-points."vfl.attacks"]
    mahalanobis = "my_package.mahalanobis:Mahalanobis"

The package tests the attack with `vfl.testing`, on victims that leak labels and on victims that do
not:

    class TestMine(AttackContract):
        specs = ["mahalanobis", "mahalanobis:shrink=0.5"]

`vfl grid` and `vfl attack` accept this attack by its spec, like any other attack.
"""

import torch
from torch import Tensor

from vfl.attacks import ATTACKS, Attack, Grant, View, make


class Mahalanobis(Attack):
    """Scores a class by the Mahalanobis distance between a cut and its leaked rows' mean."""

    goal = "labels"
    needs = frozenset({Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED})

    def __init__(self, shrink: float = 0.01) -> None:
        self.shrink = shrink

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        known, labels = view.leaked.cuts, view.leaked.labels
        means = torch.stack([known[labels == one].mean(0) for one in range(view.classes)])
        spread = torch.cov(view.unlabelled.cuts.T)
        round_one = torch.eye(len(spread)) * spread.diagonal().mean().clamp_min(1e-12)
        factor = torch.linalg.cholesky((1 - self.shrink) * spread + self.shrink * round_one)
        cuts = torch.linalg.solve_triangular(factor, view.targets.cuts.T, upper=False).T
        means = torch.linalg.solve_triangular(factor, means.T, upper=False).T
        return -torch.cdist(cuts, means)


ATTACKS.register("mahalanobis", Mahalanobis)

if __name__ == "__main__":
    from vfl.attacks.baselines import label_free
    from vfl.attacks.cases import Victim
    from vfl.attacks.scoring import attempt
    from vfl.config import Experiment
    from vfl.core.seeds import generator
    from vfl.datasets import Dealing, load_bundled
    from vfl.training.local import LocalSession

    data = load_bundled("digits", ["bank"], "lender", Dealing(0))
    experiment = Experiment.model_validate(
        {"parties": {"bank": {}}, "label": {"party": "lender"}, "train": {"epochs": 5}}
    )
    session = LocalSession(experiment, data, outputs=10).run()
    victim = Victim(experiment, data, "bank", session.weights()["bank"])
    for k in (1, 5, 20):
        case = victim.case(k, generator(0, "leak"))
        score = attempt(case, make("mahalanobis"), generator(0))
        raw = label_free(case, "raw", 32, generator(0))
        beside = attempt(raw, make("mahalanobis"), generator(0))
        print(f"k={k:<3} reaches {score.value:.3f}  on raw columns {beside.value:.3f}", end="  ")
        print(f"guess {score.guess:.3f}")
