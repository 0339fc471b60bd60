"""A bounded number of gradients: what travels, what moves, and what the epsilon is about."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.frame import Kind
from vfl.core.seeds import Secret
from vfl.defenses import LabelKind, make
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

PARTIES = ("left", "right")
STEPS = 4


@pytest.mark.parametrize("in_flight", [1, 3])
def test_bottoms_move_while_gradients_come_and_then_never(experiment, data, in_flight):
    """Not by an optimiser's momentum either, nor by its weight decay."""
    trace, digests = Trace(kinds=[Kind.GRAD]), {}

    def watch(party, direction, frame):
        if frame.kind is Kind.CUT:
            client = next(one for one in session.clients if one.name == party)
            digests.setdefault(party, []).append(client.weights_digest())

    spec = f"few_rounds:steps={STEPS},epochs=1"
    asked = experiment(spec, in_flight=in_flight, weight_decay=0.1)
    session = LocalSession(asked, data, outputs=10, observers=[trace, watch])
    session.run()
    for party in PARTIES:
        sent = [note for note in trace if note.party == party]
        some = [np.frombuffer(note.payload, np.uint8).any() for note in sent]
        assert some == [note.step < STEPS for note in sent]
        assert sum(some) == STEPS
        moved = len(set(digests[party]))
        assert moved == STEPS + 1
        assert len(set(digests[party][STEPS + in_flight - 1 :])) == 1


def test_dropout_and_batch_statistics_stand_still_once_frozen():
    defense = make("few_rounds:steps=1,epochs=1")
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
    bottom = defense.wrap_bottom(nn.Sequential(*layers), 2).train()
    rows = torch.randn(16, 4)
    first = bottom(defense.batch(rows, None, StepContext(0, training=True))[0])
    assert first.requires_grad
    before = {name: value.clone() for name, value in bottom.state_dict().items()}
    defense.batch(rows, None, StepContext(1, training=True))
    cuts = [bottom(rows), bottom(rows)]
    assert torch.equal(*cuts)
    assert not cuts[0].requires_grad
    assert all(torch.equal(value, before[name]) for name, value in bottom.state_dict().items())


def test_with_an_epsilon_nothing_that_is_sent_depends_on_true_labels(experiment, data, monkeypatch):
    """All labels are others, and only their answers are the same: every frame down is, too."""
    spec = f"few_rounds:steps={STEPS},epsilon=1,epochs=1"
    answers = {}

    def fixed(labels, classes, flip, draws):
        return answers.setdefault(len(labels), labels.copy())

    monkeypatch.setattr("vfl.defenses.few_rounds.respond", fixed)
    others = replace(data["label"], labels=data["label"].labels.flip(0))
    sent, losses = [], []
    for rows in (data, {**data, "label": others}):
        trace = Trace(kinds=[Kind.GRAD])
        run = LocalSession(experiment(spec), rows, outputs=10, observers=[trace]).run()
        sent.append([note.payload for note in trace])
        losses.append(run.label.history[-1]["train_loss"])
    assert sent[0] == sent[1]
    assert losses[0] != losses[1]  # the top has learned from true labels in the end


def test_answers_are_true_as_often_as_the_epsilon_says():
    """e^epsilon / (e^epsilon + K - 1), for every row once."""
    defense = make("few_rounds:steps=2,epsilon=1.5,epochs=1")
    defense.prepare(LabelKind(classes=4))
    labels = torch.arange(40_000) % 4
    assert torch.equal(defense.labels(labels, Secret.of_simulation(0, "lender")), labels)
    seen = []
    for step in range(3):
        defense.counts(torch.arange(40_000), epoch=1)
        seen.append(defense.batch(None, labels, StepContext(step, training=True))[1])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], labels)
    true = float((seen[0] == labels).double().mean())
    assert true == pytest.approx(math.exp(1.5) / (math.exp(1.5) + 3), abs=0.01)


def test_it_states_what_it_promises():
    (promise,) = make("few_rounds:steps=5,epsilon=2").privacy()
    assert (promise.epsilon, promise.delta, promise.unit) == (2, 0, "label")
    assert "validation loss" in str(promise)
    (promise,) = make("few_rounds:steps=5").privacy()
    assert promise.epsilon is None
    assert "none of the first 5 exchanges" in str(promise)


@pytest.mark.parametrize("other", ["label_free", "anchored", "pretrained"])
def test_a_bottom_is_made_in_one_way(other):
    with pytest.raises(SpecError, match="builds the whole bottom"):
        make(f"few_rounds+{other}")


def test_what_sees_true_labels_is_refused_beside_an_epsilon():
    assert make("few_rounds+potential")
    with pytest.raises(SpecError, match="epsilon of 'few_rounds' does not hold"):
        make("few_rounds:epsilon=1+confusion")
    with pytest.raises(SpecError, match="classes"):
        make("few_rounds:epsilon=1").prepare(LabelKind(classes=None))
    with pytest.raises(SpecError, match="weigh the same"):
        make("few_rounds:epsilon=1").prepare(LabelKind(classes=3, weighted=True))
