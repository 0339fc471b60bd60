"""What more evidence is worth, by repeated cuts, bottoms, partners (docs/results/training_attacks).

`pytest tests/attacks/test_evidence_figures.py -m slow -s` prints a line for each setting. The seeds
are none that the tests beside were written on.
"""

import numpy as np
import pytest
import torch
from recorded_digits import Recorded, left

from vfl.attacks import make
from vfl.attacks.cases import attribute_case, summed_case
from vfl.attacks.scoring import attempt
from vfl.core.seeds import generator

pytestmark = pytest.mark.slow
SEEDS = (10, 11, 12)
INVERSION = "inversion:steps=400"
PARTIES = ("bank", "shop")


def value(case, spec, draw=0):
    return attempt(case, make(spec), generator(draw)).value


def repeated(victim):
    """Accuracy of the task, shares of the error that are left, and accuracies of an attribute."""
    recalled, received = victim.recalled(), victim.received()
    bank = victim.data["bank"]
    attribute = attribute_case(recalled, bank.inputs[torch.from_numpy(bank.split.train)])
    return [
        victim.accuracy,
        left(recalled, INVERSION),
        left(recalled, f"averaging:of={INVERSION},last=10"),
        left(recalled, f"averaging:of={INVERSION}"),
        left(received, f"averaging:of={INVERSION},over=queries"),
        value(attribute, "attribute"),
        value(attribute, "averaging:of=attribute"),
    ]


@pytest.mark.parametrize("sigma", [0, 0.25, 0.5, 1])
def test_figures_of_repeated_cuts(sigma):
    defense = f"clipped_noise:norm=4,sigma={sigma}" if sigma else "none"
    found = np.array([repeated(Recorded(defense, seed=seed)) for seed in SEEDS]).mean(0)
    print(f"\n{defense}:", *(f"{one:.3f}" for one in found))
    _, single, last, every, asked, attribute, averaged = found
    if sigma:
        assert max(last, every, asked) < single - 0.2
        assert averaged > attribute + 0.02
    else:
        assert abs(every - single) < 0.1


def kept(victim, spec, k):
    """What one bottom tells, and all of them, over three leaks."""
    draws = [generator(victim.seed, "leak", draw) for draw in range(3 if k else 1)]
    cases = [victim.victims[0].case(k, draw, snapshots=victim.kept) for draw in draws]
    specs = f"{spec}:at=bottom", f"averaging:of={spec},over=snapshots"
    return [np.mean([value(case, one) for case in cases]) for one in specs]


@pytest.mark.parametrize("defense", ["none", "label_dp:epsilon=1", "dcor:alpha=1", "potential"])
def test_figures_of_kept_bottoms(defense):
    victims = [Recorded(defense, seed=seed) for seed in SEEDS]
    for spec, k in (("kmeans", 0), ("logistic", 1), ("logistic", 5)):
        one, every = np.mean([kept(victim, spec, k) for victim in victims], axis=0)
        print(f"\n{defense} {spec} k={k}: {one:.3f} {every:.3f}")
        assert every > one + 0.02 or "label_dp" not in defense  # wrong labels average out


def test_figures_of_feature_parties_together():
    victims = [Recorded(parties=PARTIES, seed=seed) for seed in SEEDS]
    for spec, k in (("kmeans", 0), ("logistic", 1), ("logistic", 5), ("fine_tuning", 5)):
        found = []
        for victim in victims:
            own, other = victim.victims
            case = own.case(k, victim.leak(), partners=[other])
            found.append([value(case, one) for one in (spec, f"pooled:of={spec}")])
        alone, pooled = np.mean(found, axis=0)
        print(f"\n{spec} k={k}: alone {alone:.3f}, together {pooled:.3f}")
        assert pooled > alone + 0.05


def test_figures_of_a_sum_and_a_partner():
    found = []
    for seed in SEEDS:
        victim = Recorded(parties=PARTIES, seed=seed, secure="sum", merge="sum")
        about = victim.experiment, victim.data, "bank", ["shop"], 200, victim.leak(), victim.weights
        case = summed_case(*about)
        found.append([left(case, spec) for spec in (INVERSION, f"subtraction:of={INVERSION}")])
    alone, colluding = np.mean(found, axis=0)
    print(f"\nsum: alone {alone:.3f}, with all but one {colluding:.3f}")
    assert colluding < alone - 0.1
