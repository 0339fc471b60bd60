"""The label party's own side of a round; whole sessions are in test_local.py."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from vfl.config import Experiment
from vfl.core.errors import DataError, NonFiniteError, WidthError
from vfl.core.storage import weights_digest
from vfl.datasets import Dealing, load_bundled
from vfl.defenses import DEFENSES, Defense
from vfl.session import Adversary, rules
from vfl.training.local import LocalSession

PARTIES = ["bank", "shop"]


@pytest.fixture(scope="module")
def data():
    parties = [*PARTIES, "lender"]
    return load_bundled("digits", parties, "lender", Dealing(1, limit=200), flatten=True)


def session_of(data, parties=PARTIES, experiment=None, **options):
    settings = {
        "parties": {name: {"width": 10} for name in parties},
        "label": {"party": "lender"},
        "train": {"epochs": 1, "batch_size": 20, "optimizer": "sgd", "learning_rate": 0.1},
    }
    checked = Experiment.model_validate(settings | (experiment or {}))
    return LocalSession(checked, data, outputs=10, **options)


def digests(session):
    return {party: weights_digest(weights) for party, weights in session.weights().items()}


class BreaksAt(Adversary):
    """Sends one party a gradient that is not finite."""

    def __init__(self, step):
        self.step = step

    def gradient(self, party, grad, context):
        return grad * math.nan if (party, context.step) == ("shop", self.step) else grad


def test_a_broken_gradient_leaves_every_weight_as_it_was(data):
    parties = [*PARTIES, "lender"]
    broken = session_of(data, parties, adversaries={"lender": BreaksAt(3)})
    with pytest.raises(NonFiniteError, match="gradient of party 'shop'") as caught:
        broken.run()
    assert caught.value.where == "step 3"
    stopped = session_of(data, parties)
    exchanges = list(rules.schedule(stopped.terms, data["lender"].split))[:3]
    stopped.label.run(exchanges, stopped.clients)
    assert digests(broken) == digests(stopped)
    assert digests(broken) != digests(session_of(data, parties))


def test_columns_of_its_own_that_break_the_loss(data):
    own = data["lender"].inputs.clone()
    own[data["lender"].split.train[0]] = math.inf
    lender = replace(data["lender"], inputs=own)
    session = session_of(data | {"lender": lender}, [*PARTIES, "lender"])
    with pytest.raises(NonFiniteError, match="loss of party 'lender' holds NaN or Inf"):
        session.run()
    assert all(torch.isfinite(weights).all() for weights in session.label.weights().values())


@pytest.mark.parametrize("frozen", [False, True], ids=["no weights", "frozen weights"])
def test_a_top_that_learns_nothing(data, frozen):
    """The sum of the cuts is the output, or a fixed layer makes it."""
    top = nn.Linear(10, 10).requires_grad_(False) if frozen else nn.Identity()
    before = weights_digest(top.state_dict())
    session = session_of(data, experiment={"merge": "sum"}, top=top)
    start = digests(session)
    session.run()
    assert weights_digest(top.state_dict()) == before
    changed = {party for party, digest in digests(session).items() if digest != start[party]}
    assert changed == set(PARTIES)


def test_a_bottom_of_its_own_has_the_agreed_width(data):
    own = nn.Sequential(nn.Flatten(), nn.Linear(data["lender"].inputs.shape[1], 9))
    session = session_of(data, [*PARTIES, "lender"], bottoms={"lender": own})
    with pytest.raises(WidthError, match="bottom model of party 'lender'") as caught:
        session.run()
    assert (caught.value.got, caught.value.want) == ("(20, 9)", "(20, 10)")


def test_a_label_party_listed_with_columns_it_lacks(data):
    lender = replace(data["lender"], inputs=None)
    with pytest.raises(DataError, match="'lender' is listed with columns but has none"):
        session_of(data | {"lender": lender}, [*PARTIES, "lender"])


class Noted(Defense):
    """Notes what the label party's hooks meet; it moves labels on by one and doubles outputs."""

    notes: ClassVar[list] = []

    def labels(self, labels, secret):
        self.notes.append(("labels", len(labels)))
        return (labels + 1) % 10

    def logits(self, logits, context):
        self.notes.append(("logits", context.training))
        return logits * 2

    def loss(self, cuts, labels, logits, context):
        self.notes.append(("loss", tuple(cuts), labels.tolist()))
        return None


class Pushing(Defense):
    def loss(self, cuts, labels, logits, context):
        return 3 * logits.sum()


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr(DEFENSES, "_members", DEFENSES._members | {"noted": Noted})
    monkeypatch.setattr(Noted, "notes", [])
    return Noted.notes


def test_the_hooks_of_a_defense_at_the_label_party(data, noted):
    raw = []
    session = session_of(data, [*PARTIES, "lender"], experiment={"defense": "noted"})
    session.label.model["top"].register_forward_hook(lambda top, given, out: raw.append(out))
    session.run()
    split, labels = data["lender"].split, data["lender"].labels
    assert noted[0] == ("labels", len(split.train))
    first = next(iter(rules.schedule(session.terms, split)))
    assert noted[1] == ("logits", True)
    # The loss is of the cuts that were sent, without the label party's own.
    assert noted[2] == ("loss", ("bank", "shop"), ((labels[first.rows] + 1) % 10).tolist())
    assert noted[-1] == ("logits", False)
    # Whoever evaluates looks at the true labels, and at outputs as the defense gives them.
    last = raw[-1].detach() * 2
    test_loss = nn.functional.cross_entropy(last, labels[split.test])
    assert session.label.history[-1]["test_loss"] == pytest.approx(float(test_loss), rel=1e-5)


class Softened(Defense):
    """Trains on outputs minus one and even chances; predicts outputs times 100."""

    def targets(self, targets, classes, context):
        assert context.secret is not None
        return torch.full((len(targets), classes), 1 / classes)

    def logits(self, logits, context):
        return logits - 1 if context.training else 100 * logits


def test_targets_are_what_the_loss_is_taken_of_and_figures_are_of_predictions(data, monkeypatch):
    monkeypatch.setitem(DEFENSES._members, "softened", Softened)
    raw = []
    session = session_of(data, experiment={"defense": "softened"})
    session.label.model["top"].register_forward_hook(
        lambda top, given, out: raw.append(out.detach())
    )
    first = next(iter(rules.schedule(session.terms, data["lender"].split)))
    session.label.run([first], session.clients)
    figures = session.label.history[0]
    even = -torch.log_softmax(raw[0] - 1, dim=1).mean()
    assert figures["train_loss"] == pytest.approx(float(even), rel=1e-5)
    right = (raw[0].argmax(1) == data["lender"].labels[first.rows]).float().mean()
    assert figures["train_accuracy"] == pytest.approx(float(right))


def test_the_loss_of_a_defense_is_added(data, monkeypatch):
    """Gradients of a mean cross-entropy at the outputs add up to zero, those of 3 sum to 3 each."""
    monkeypatch.setattr(DEFENSES, "_members", DEFENSES._members | {"pushing": Pushing})
    top = nn.Linear(20, 10)
    session = session_of(data, experiment={"defense": "pushing"}, top=top)
    first = next(iter(rules.schedule(session.terms, data["lender"].split)))
    session.label.run([first], session.clients)
    assert float(top.bias.grad.sum()) == pytest.approx(3 * len(first.rows) * 10, rel=1e-5)
