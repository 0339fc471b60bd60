"""Which bottoms give their pictures away, and to which attack (docs/results/training_attacks.md).

`pytest tests/attacks/inputs/test_input_figures.py -m slow -s` prints a line for each bottom.
"""

import pytest
from bottoms import BOTTOMS, convolutions, victim

from vfl.attacks import make
from vfl.attacks.scoring import attempt
from vfl.core.seeds import generator

SEEDS = (10,)
PASSIVE = ("inversion:steps=300", "pseudo_client:steps=400", "unsplit")


def left(case, attack, seed):
    """The share of the mean picture's squared error that is left."""
    score = attempt(case, attack, generator(seed, "input"))
    return score.value / score.guess


def test_convolutions_that_were_not_tampered_with_are_read():
    case, _ = victim(convolutions, 0, 2)
    assert left(case, make("pseudo_client:steps=200"), 0) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("bottom", BOTTOMS)
def test_figures_of_bottoms(bottom):
    found = {name: [] for name in (*PASSIVE, "hijacking")}
    for seed in SEEDS:
        case, _ = victim(bottom, seed)
        for spec in PASSIVE:
            found[spec].append(left(case, make(spec), seed))
        case, adversary = victim(bottom, seed, 20, "hijacking:critic_steps=3,learning_rate=0.003")
        found["hijacking"].append(left(case, adversary, seed))
    shown = (f"{name} {' '.join(f'{one:.2f}' for one in each)}" for name, each in found.items())
    print(f"\n{bottom.__name__}: {'; '.join(shown)}")
    assert max(found["pseudo_client:steps=400"]) < 0.8
    assert (max(found["hijacking"]) < 0.5) == (bottom in BOTTOMS[:2])
