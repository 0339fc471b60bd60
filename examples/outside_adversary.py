"""An adversary from outside the package, in one file: a feature party that swaps rows.

This file registers the adversary in the process that runs the file. A package instead declares its
member in the package's pyproject.toml:

    [project.entry-points."vfl.adversaries"]
    shuffling = "my_package.shuffling:Shuffling"

The package tests the adversary with `vfl.testing`:

    class TestMine(AdversaryContract):
        specs = ["shuffling", "shuffling:share=1"]

`vfl grid --adversary shuffling` trains a victim against this adversary for every defense of a grid.
"""

import torch
from torch import Tensor

from vfl.attacks.active import ADVERSARIES, ActiveAdversary, make_adversary
from vfl.attacks.base import key_of
from vfl.attacks.view import View
from vfl.compression import StepContext
from vfl.core.seeds import generator


class Shuffling(ActiveAdversary):
    """Permutes a fraction of the rows of each training batch's cut."""

    who = "feature party"
    spoils = True  # a grid measures how often the trained network then predicts wrongly

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def begin(self, view: View, draw: torch.Generator) -> None:
        self.key = key_of(draw)

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        if not context.training:
            return cut
        # The draw depends only on the step, because a resumed training computes batches in flight
        # again.
        draw = generator(self.key, "shuffling", context.step)
        chosen = torch.nonzero(torch.rand(len(cut), generator=draw) < self.share)[:, 0]
        sent = cut.clone()
        sent[chosen] = cut[chosen[torch.randperm(len(chosen), generator=draw)]]
        return sent


ADVERSARIES.register("shuffling", Shuffling)

if __name__ == "__main__":
    from vfl.attacks.cases import begin
    from vfl.config import Experiment
    from vfl.datasets import Dealing, load_bundled
    from vfl.training.local import LocalSession

    data = load_bundled("digits", ["bank", "shop"], "lender", Dealing(0))
    experiment = Experiment.model_validate(
        {"parties": {"bank": {}, "shop": {}}, "label": {"party": "lender"}, "train": {"epochs": 5}}
    )
    for spec in ("none", "shuffling", "shuffling:share=1"):
        adversaries = {}
        if spec != "none":
            adversaries["bank"] = make_adversary(spec)
            begin(adversaries["bank"], experiment, data, "bank", 0, generator(0, "adversary"))
        session = LocalSession(experiment, data, outputs=10, adversaries=adversaries).run()
        print(f"{spec:<20} test accuracy {session.label.history[-1]['test_accuracy']:.3f}")
