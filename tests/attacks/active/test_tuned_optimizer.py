"""A malicious optimiser that tunes its gain: which gains it tries, keeps, and applies."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vfl.attacks import Evidence, Holdings, ThreatModel, View
from vfl.attacks.active import make_adversary
from vfl.attacks.active.tuned_optimizer import held_out_auc
from vfl.attacks.cases import begin
from vfl.attacks.labels.adaptive import stratified_folds
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.core.errors import BadOptionError, DataError
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession

ROWS, BATCH, CLASSES = 120, 30, 2
LABELS = torch.arange(ROWS) % CLASSES
#: The first column is the row's label; a stand-in for a bottom reads it.
INPUTS = torch.cat([LABELS[:, None], torch.ones(ROWS, 1)], 1).float()


class Victim:
    """Trains epoch by epoch; its bottom separates the classes by `separation(gain, epoch)`."""

    def __init__(self, spec, separation, seed=0, known=60):
        self.adversary, self.separation, self.seed = make_adversary(spec), separation, seed
        self.gains = []
        holdings = Holdings(
            targets=Evidence(INPUTS), leaked=Evidence(INPUTS[:known], labels=LABELS[:known])
        )
        threat = ThreatModel(
            "feature party", "training", self.adversary.holds, behaviour="malicious"
        )
        self.adversary.begin(View(threat, CLASSES, holdings), generator(0, "begin"))
        self.adversary.model(self.cuts_of)

    def cuts_of(self, inputs):
        epoch = len(self.gains) - 1
        noise = torch.randn(len(inputs), 3, generator=generator(self.seed, "noise", epoch))
        return noise + self.separation(self.gains[-1], epoch) * inputs[:, :1]

    def train(self, epochs):
        """Return the gain of each epoch; a batch's first hook is `batch`, its last is the step."""
        for _ in range(epochs):
            for part, rows in enumerate(torch.arange(ROWS).split(BATCH)):
                context = StepContext(part, training=True, rows=rows.numpy())
                assert torch.equal(self.adversary.batch(INPUTS[rows], context), INPUTS[rows])
                if not part:
                    self.gains.append(self.adversary.gain)
                assert self.adversary.gain == self.gains[-1], "the gain changed within an epoch"
        return self.gains


def test_each_gain_is_tried_in_both_orders_and_the_best_one_is_kept():
    """The network learns in each epoch, and gain 1 discloses most."""
    victim = Victim(
        "tuned_optimizer:gains=0+1+3,warmup=2",
        lambda gain, epoch: 0.05 * epoch + {0: 0.0, 1: 1.0, 3: 0.3}[gain],
    )
    assert victim.train(12) == [0, 0, 0, 1, 3, 3, 1, 0, 1, 1, 1, 1]


def test_a_kept_gain_whose_score_falls_is_replaced():
    victim = Victim(
        "tuned_optimizer:gains=0+2,warmup=0",
        lambda gain, epoch: 2.0 if gain and epoch < 5 else 0.3,
    )
    assert victim.train(7) == [0, 2, 2, 0, 2, 2, 0]


def test_a_trend_alone_does_not_decide_between_gains():
    """Each epoch separates the classes more, whatever the gain; either gain is kept as often."""
    kept = [
        Victim(
            "tuned_optimizer:gains=0+2,warmup=0", lambda _, epoch: 0.5 + 0.3 * epoch, seed
        ).train(5)[-1]
        for seed in range(40)
    ]
    assert 10 <= kept.count(2) <= 30


def test_steps_are_those_of_a_malicious_optimizer_with_the_gain_of_the_epoch():
    victim = Victim("tuned_optimizer:gains=0+2,most=4,warmup=0", lambda gain, _: gain)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = victim.adversary.optimizer(torch.optim.SGD([weight], lr=1.0))
    lengths = []
    for _ in range(6):
        victim.train(1)
        before, weight.grad = float(weight.detach()), torch.tensor([1.0])
        optimizer.step()
        lengths.append(before - float(weight.detach()))
    assert victim.gains == [0, 2, 2, 0, 2, 2]
    assert lengths == [1 + gain for gain in victim.gains]


def test_a_training_ends_with_a_gain_that_scored_at_least_as_high_as_honest_steps():
    data = load_bundled("digits", ["bank", "shop"], "lender", Dealing(2, validation=0.2, limit=400))
    party = {"width": 10, "bottom": "mlp:hidden=16"}
    train = {"epochs": 10, "batch_size": 20, "learning_rate": 0.05, "optimizer": "sgd"}
    experiment = Experiment.model_validate(
        {"parties": {"bank": party, "shop": party}, "label": {"party": "lender"}, "train": train}
        | {"seed": 2}
    )
    adversary = make_adversary("tuned_optimizer:gains=0+4")
    begin(adversary, experiment, data, "bank", 8, generator(2, "adversary"))
    LocalSession(experiment, data, outputs=10, adversaries={"bank": adversary}).run()
    tried = adversary.training_state()["tried"]
    honest, tampering = (tried[:4][tried[:4, 0] == position, 1].mean() for position in (0, 1))
    assert tried[:4, 0].tolist() == [0, 1, 1, 0]
    assert tampering > honest
    assert tried[4:, 0].tolist() == [1, 1, 1, 1]


def test_the_score_is_that_of_a_logistic_regression_on_rows_that_were_not_held_out():
    cuts = torch.randn(ROWS, 3, generator=generator(1, "noise")) + 0.8 * LABELS[:, None]
    right = []
    for held in stratified_folds(LABELS, CLASSES, generator(0, "folds")):
        mean, spread = cuts[~held].mean(0), cuts[~held].std(0)
        model = LogisticRegression().fit((cuts[~held] - mean) / spread, LABELS[~held])
        found = model.decision_function((cuts[held] - mean) / spread)
        right.append(roc_auc_score(LABELS[held], found))
    score = held_out_auc(cuts, LABELS, CLASSES, generator(0, "folds"))
    assert score == pytest.approx(np.mean(right), abs=1e-4)
    shuffled = LABELS[torch.randperm(ROWS, generator=generator(2))]
    assert held_out_auc(cuts, shuffled, CLASSES, generator(0, "folds")) < 0.65


def test_cuts_that_are_not_finite_score_lowest():
    victim = Victim(
        "tuned_optimizer:gains=0+2,warmup=0", lambda gain, _: float("nan") if gain else 0.0
    )
    assert victim.train(5)[-1] == 0
    tried = victim.adversary.training_state()["tried"]
    assert tried[:, 0].tolist() == [0, 1, 1, 0]
    assert tried[1:3, 1].tolist() == [0, 0]


@pytest.mark.parametrize("gains", ["1", "0+0", "0+-1", "0+nan", "0+fast", "0+", "1e+9+1"])
def test_gains_that_are_no_list_are_refused(gains):
    with pytest.raises(BadOptionError, match="option 'gains'"):
        make_adversary(f"tuned_optimizer:gains={gains}")


def test_two_known_rows_of_each_class_are_needed():
    Victim("tuned_optimizer", None, known=4)
    with pytest.raises(DataError, match="too few leaked rows"):
        Victim("tuned_optimizer", None, known=3)


def test_a_bottom_without_weights_is_scored_like_any_other():
    data = load_bundled("digits", ["bank", "shop"], "lender", Dealing(0, validation=0.2, limit=200))
    width = data["bank"].inputs.flatten(1).shape[1]
    experiment = Experiment.model_validate(
        {
            "parties": {"bank": {"width": width}, "shop": {}},
            "label": {"party": "lender"},
            "train": {"epochs": 3},
        }
    )
    adversary = make_adversary("tuned_optimizer")
    begin(adversary, experiment, data, "bank", 4, generator(0, "adversary"))
    bottoms = {"bank": torch.nn.Flatten()}
    adversaries = {"bank": adversary}
    LocalSession(experiment, data, outputs=10, bottoms=bottoms, adversaries=adversaries).run()
    assert len(adversary.training_state()["tried"]) == 1
