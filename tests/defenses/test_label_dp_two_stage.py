"""Label DP in two stages: what travels before the second, the law of its answers, checkpoints."""

import itertools
import math

import numpy as np
import pytest
import torch

from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.core.errors import BadOptionError, SpecError
from vfl.core.seeds import Secret
from vfl.datasets import Dealing, load_bundled
from vfl.defenses import LabelKind, make
from vfl.session import Adversary, rules
from vfl.training.local import LocalSession

LENDER = Secret.of_simulation(0, "lender")
ROWS, CLASSES = 40_000, 3
ALL = torch.arange(ROWS)


def begun(labels, epsilon=1.0):
    defense = make(f"label_dp_two_stage:epsilon={epsilon},epochs=1")
    defense.prepare(LabelKind(CLASSES, epochs=2))
    defense.labels(labels, LENDER)
    return defense


def told(labels, logits, epsilon=1.0):
    """The labels of the second stage, and which rows are late; the same logits for every row."""
    defense = begun(labels, epsilon)
    early = defense.counts(ALL, 1)
    defense.logits(torch.tensor([logits]).expand(ROWS, -1), StepContext(training=True))
    assert defense.counts(ALL, 2) is None
    return defense.batch(None, ALL, StepContext(training=True))[1], ~early


@pytest.mark.parametrize("logits", [(0.0, 0.0, 0.0), (2.0, 0.0, -1.0), (9.0, 0.0, 0.0)])
def test_no_answer_tells_labels_apart_by_more_than_epsilon(logits):
    """Counts of both stages; five deviations of a count are allowed for."""
    for stage in (0, 1):
        laws = []
        for label in range(CLASSES):
            labels, late = told(torch.full((ROWS,), label), logits)
            laws.append(np.bincount(labels[late == bool(stage)], minlength=CLASSES) / (ROWS / 2))
        slack = 5 * math.sqrt(2 / ROWS)
        for first, second in itertools.permutations(laws, 2):
            assert (first <= math.e * second + slack).all()


def test_a_good_prior_keeps_more_labels_true_at_the_same_epsilon():
    labels = torch.zeros(ROWS, dtype=torch.int64)
    (even, late), (sure, _) = told(labels, (0.0, 0.0, 0.0)), told(labels, (2.0, 0.0, -1.0))
    plain = math.e / (math.e + 2)
    assert float((even[late] == 0).double().mean()) == pytest.approx(plain, abs=0.01)
    assert float((sure[late] == 0).double().mean()) > plain + 0.2
    assert torch.equal(even[~late], sure[~late])


def test_before_the_second_stage_nothing_depends_on_a_late_label():
    labels = ALL % CLASSES
    first, late = begun(labels), ~begun(labels).counts(ALL, 1)
    second = begun(torch.where(late, (labels + 1) % CLASSES, labels))
    for defense in (first, second):
        defense.counts(ALL, 1)
    seen, again = (
        defense.batch(None, labels, StepContext(training=True))[1] for defense in (first, second)
    )
    assert torch.equal(seen, again)
    assert (seen[late] == 0).all()


class Listener(Adversary):
    """Keeps which rows of each step came back with a gradient of zeros."""

    def __init__(self):
        self.silent = {}

    def received(self, party, values, context):
        if context.training:
            self.silent[context.step] = (values == 0).all(1).numpy()


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["bank"], "lender", Dealing(0, validation=0.2, limit=600))


def experiment(defense, epochs=4):
    return Experiment.model_validate(
        {
            "parties": {"bank": {"width": 16, "bottom": "mlp:hidden=32"}},
            "label": {"party": "lender"},
            "defense": defense,
            "train": {"epochs": epochs, "batch_size": 32, "learning_rate": 0.01,
                      "checkpoint_every": 7},
        }
    )  # fmt: skip


def test_in_a_training_late_rows_are_silent_in_the_first_stage_only(data):
    spy = Listener()
    asked = experiment("label_dp_two_stage:epsilon=3,epochs=2")
    session = LocalSession(asked, data, outputs=10, adversaries={"bank": spy}).run()
    silent = {1: set(), 2: set(), 3: set(), 4: set()}
    for exchange in rules.schedule(session.terms, data["lender"].split):
        if exchange.trains:
            silent[exchange.epoch] |= set(exchange.rows[spy.silent[exchange.step]])
    share = len(silent[1]) / len(data["lender"].split.train)
    assert share == pytest.approx(0.5, abs=0.1)
    assert silent[1] == silent[2]
    assert not silent[3] | silent[4]
    assert session.label.history[-1]["test_accuracy"] > 0.6


def test_what_it_cannot_serve_is_refused(data):
    for options in ("epsilon=-1", "epsilon=inf", "epochs=0", "share=0", "share=1"):
        with pytest.raises(BadOptionError):
            make(f"label_dp_two_stage:{options}")
    for company in ("label_dp:epsilon=1", "potential", "mixup", "marvell"):
        with pytest.raises(SpecError, match="looks at labels"):
            make(f"label_dp_two_stage+{company}")
        with pytest.raises(SpecError, match="looks at labels"):
            make(f"{company}+label_dp_two_stage")
    with pytest.raises(SpecError, match="every row to weigh the same"):
        make("label_dp_two_stage").prepare(LabelKind(2, weighted=True))
    with pytest.raises(SpecError, match="ends before the second stage") as caught:
        LocalSession(experiment("label_dp_two_stage", epochs=5), data, outputs=10)
    assert (caught.value.got, caught.value.where) == ("5 epochs", "defense")
    kept = begun(ALL % CLASSES).state_dict()
    fewer = make("label_dp_two_stage")
    fewer.prepare(LabelKind(CLASSES))
    fewer.labels(torch.zeros(10, dtype=torch.int64), LENDER)
    with pytest.raises(SpecError, match="needs the same labels as in the first stage") as caught:
        fewer.load_state_dict(kept)
    assert caught.value.got == "10 training rows"


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1, 2, 3])
def test_figures_on_digits_beside_one_stage(epsilon):
    """Five seeds that no choice was made on; the table of docs/results/defenses.md."""
    specs = f"label_dp:epsilon={epsilon}", f"label_dp_two_stage:epsilon={epsilon},epochs=10"
    found = []
    for seed in range(10, 15):
        digits = load_bundled("digits", ["bank"], "lender", Dealing(seed))
        content = experiment("none", epochs=20).model_dump(exclude_unset=True) | {"seed": seed}
        content["train"] |= {"learning_rate": 0.002}
        content["parties"]["bank"] |= {"width": 32, "bottom": "mlp:hidden=64"}
        found.append([_accuracy(content | {"defense": spec}, digits) for spec in specs])
    (plain, staged), (dev, devs) = np.mean(found, 0), np.std(found, 0, ddof=1)
    print(f"\nepsilon {epsilon}: one stage {plain:.3f} ({dev:.3f}), two {staged:.3f} ({devs:.3f})")
    assert staged > plain - 0.01


def _accuracy(content, digits):
    session = LocalSession(Experiment.model_validate(content), digits, outputs=10).run()
    return session.label.history[-1]["test_accuracy"]
