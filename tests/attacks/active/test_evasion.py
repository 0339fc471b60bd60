"""SplitSpy and URVFL: what each sends where, and that SplitGuard lets them pass."""

import pytest
import torch
from torch import nn

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View
from vfl.attacks.active import make_adversary
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.core.errors import HijackError
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession

TRAINING = StepContext(training=True)
GUARD = "split_guard:start=60,share=0.2,checks=6"


def begun(spec, inputs, labels, bottom, top, classes):
    adversary = make_adversary(spec)
    held = Holdings(
        leaked=Evidence(inputs, labels=labels),
        new_bottom=bottom,
        new_top=top,
        shape=tuple(inputs.shape[1:]),
    )
    grants = frozenset(Grant) - {Grant.GRADIENTS}
    threat = ThreatModel("label party", "training", grants, behaviour="malicious")
    adversary.begin(View(threat, classes, held).only(adversary.holds), generator(0, "active"))
    return adversary


def two_classes(spec):
    draw = generator(0, "rows")
    labels = torch.arange(40) % 2
    inputs = 4.0 * torch.eye(2, 3)[labels] + torch.randn(40, 3, generator=draw)
    adversary = begun(
        spec, inputs, labels, lambda: nn.Linear(3, 4), lambda width: nn.Linear(width, 2), 2
    )
    return adversary, inputs @ torch.randn(3, 4, generator=draw), labels


def sent(adversary, cuts, labels):
    """What a party gets for a batch whose gradient of the task is one everywhere."""
    adversary.labels(labels, TRAINING)
    adversary.received("bank", cuts, TRAINING)
    return adversary.gradient("bank", torch.ones_like(cuts), TRAINING)


def test_splitspy_sends_the_gradient_of_the_task_for_false_rows_alone():
    adversary, cuts, labels = two_classes("splitspy:learning_rate=0.02")
    for _ in range(80):
        bent = sent(adversary, cuts, labels)
    assert not torch.equal(bent, torch.ones_like(cuts))
    usual = adversary.training_state()["usual"]
    assert usual > 0.9
    assert torch.equal(sent(adversary, cuts.roll(1, 0), labels), torch.ones_like(cuts))
    assert adversary.training_state()["usual"] == usual, "it learned from false rows"


def test_each_party_is_bent_by_its_own_cuts():
    adversary, cuts, labels = two_classes("hijacking")
    alone = sent(adversary, cuts, labels)
    adversary.received("shop", cuts + 1, TRAINING.__class__(training=False))
    assert torch.equal(adversary.gradient("bank", torch.ones_like(cuts), TRAINING), alone)
    adversary._cuts["shop"] = cuts + 1
    assert torch.equal(adversary.gradient("bank", torch.ones_like(cuts), TRAINING), alone)


def test_gradients_of_urvfl_are_those_of_its_discriminator_and_depend_on_labels():
    adversary, cuts, labels = two_classes("urvfl:steps=5")
    found = sent(adversary, cuts, labels)
    leaf = cuts.clone().requires_grad_()
    answers = adversary._judge(leaf).log_softmax(1)
    wanted = -sum(answers[row, label] for row, label in enumerate(labels.tolist())) / len(labels)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaf)[0])
    adversary.labels(1 - labels, TRAINING)
    assert not torch.allclose(adversary.gradient("bank", found, TRAINING), found)


def convolution():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "passes"),
    [
        ("hijacking:critic_steps=3,learning_rate=0.003", False),
        ("splitspy:critic_steps=3,learning_rate=0.003", True),
    ],
)
def test_split_guard_finds_hijacking_and_not_splitspy(spec, passes):
    data = load_bundled("digits", ["bank"], "lender", Dealing(0, validation=0.2))
    inputs, label = data["bank"].inputs, data["lender"]
    known, test = (torch.from_numpy(part) for part in (label.split.validation, label.split.test))
    adversary = begun(
        spec, inputs[known], label.labels[known], convolution, lambda w: nn.Linear(w, 10), 10
    )
    experiment = Experiment.model_validate(
        {
            "defense": GUARD,
            "parties": {"bank": {"width": 256}},
            "label": {"party": "lender"},
            "train": {"epochs": 12, "batch_size": 32},
        }
    )
    session = LocalSession(
        experiment,
        data,
        outputs=10,
        bottoms={"bank": convolution()},
        adversaries={"lender": adversary},
    )
    if not passes:
        with pytest.raises(HijackError):
            session.run()
        return
    cuts = session.run().clients[0].cut(test)
    threat = ThreatModel("label party", "inference", adversary.needs, behaviour="malicious")
    found = adversary.run(View(threat, 10, Holdings(Evidence(None, cuts))), generator(0))
    mean = inputs[known].mean(0)
    assert (found - inputs[test]).square().mean() < 0.5 * (mean - inputs[test]).square().mean()
