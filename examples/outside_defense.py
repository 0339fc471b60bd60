"""A defense from outside the package, in one file: clip the rows of a cut, then add noise.

Registered here for this process; a package of your own declares an entry point instead:

    [project.entry-points."vfl.defenses"]
    clipped_noise = "my_package.clipped_noise:ClippedNoise"
"""

from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from vfl import VFLClassifier
from vfl.compression import Moment
from vfl.defenses import DEFENSES, Defense, PrivacyStatement, Side


class ClippedNoise(Defense):
    """Each row of the cut is clipped to a norm and gets Gaussian noise, from the party's secret."""

    side: ClassVar[Side] = "feature"

    def __init__(self, norm: float = 4.0, sigma: float = 0.1) -> None:
        self.norm = norm
        self.sigma = sigma

    def embedding(self, cut: Tensor, moment: Moment) -> Tensor:
        norms = cut.norm(dim=1, keepdim=True).clamp_min(1e-12)
        clipped = cut * (self.norm / norms).clamp(max=1.0)
        if moment.secret is None:  # inference: the same row always gives the same answer
            return clipped
        uniform = moment.secret.uniform(tuple(cut.shape), "clipped_noise", moment.step)
        gauss = torch.erfinv(torch.tensor(2 * uniform - 1).clamp(-1 + 1e-12, 1 - 1e-12)) * 2**0.5
        return clipped + self.sigma * self.norm * gauss.float()

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        step = NormalDist().cdf(1 / self.sigma)
        against = f"whoever sees one noisy cut of one step; tells two rows apart at most {step:.0%}"
        return (PrivacyStatement(protects="inputs", against=against),)


DEFENSES.register("clipped_noise", ClippedNoise)

if __name__ == "__main__":
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    for spec in ("none", "clipped_noise:norm=4,sigma=0.1", "clipped_noise:norm=4,sigma=1"):
        model = VFLClassifier(2, defense=spec, random_state=0).fit(X[:400], y[:400])
        print(f"{spec:<32} accuracy {model.score(X[400:], y[400:]):.3f}")
