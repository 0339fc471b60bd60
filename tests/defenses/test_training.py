"""Whole trainings with defenses that own losses or models: what is computed, and resumed."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from vfl import VFLClassifier, VFLRegressor
from vfl.core.errors import SpecError
from vfl.core.frame import Kind
from vfl.core.seeds import permutation
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

PARTIES = ("left", "right")
#: One that trains in every place, and two that look at the inputs first.
SPECS = [
    "potential:alpha=0.5+dcor+nopeek+probe:support=5+bottleneck+confusion",
    "label_free:features=32",
    "anchored+probe:support=5",
    "label_free:kind=autoencoder,epochs=1",
    "pretrained:epochs=1",
    "few_rounds:steps=8,epochs=1",
    "few_rounds:steps=8,epsilon=1,kind=vicreg,epochs=1",
    "label_dp_two_stage:epsilon=3,epochs=1",
]


def energy_of(cut, labels):
    """Mean of 1 / angle over ordered same-class pairs, with a mask over all pairs."""
    units = cut / cut.norm(dim=1, keepdim=True)
    same = torch.eq(labels[:, None], labels).fill_diagonal_(False)
    angles = torch.arccos((units @ units.T)[same].clamp(1e-4 - 1, 1 - 1e-4))
    return (1 / angles).mean()


def test_a_split_training_minimises_what_one_network_would(experiment, data):
    session = LocalSession(experiment("potential:alpha=2"), data, outputs=10)
    bottoms = [copy.deepcopy(client.end.model["bottom"]) for client in session.clients]
    top = copy.deepcopy(session.label.model["top"])
    session.run()
    assert [type(layer).__name__ for layer in bottoms[0]][-1] == "LayerNorm"
    weights = [w for part in (*bottoms, top) for w in part.parameters()]
    steps = torch.optim.Adam(weights, lr=0.01)
    labels, train = data["label"].labels, data["label"].split.train
    for epoch in (1, 2):
        order = torch.from_numpy(train[permutation(0, len(train), "order", epoch)])
        for rows in order.split(32):
            cuts = [
                bottom(data[name].inputs[rows])
                for bottom, name in zip(bottoms, PARTIES, strict=True)
            ]
            loss = nn.functional.cross_entropy(top(torch.cat(cuts, 1)), labels[rows])
            loss = loss + 2 * sum(energy_of(cut, labels[rows]) for cut in cuts)
            steps.zero_grad()
            loss.backward()
            steps.step()
    trained = [client.end.model["bottom"] for client in session.clients]
    for ours, plain in zip((*trained, session.label.model["top"]), (*bottoms, top), strict=True):
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


class Killed(Exception):
    """Stands for a process that ends between two frames."""


def killer(step):
    def watch(party, direction, frame):
        if frame.step == step and direction == "down":
            raise Killed

    return watch


@pytest.mark.parametrize(
    ("spec", "in_flight"), [*((spec, 1) for spec in SPECS), (SPECS[0], 3), (SPECS[-2], 3)]
)
def test_it_goes_on_after_a_kill_to_the_same_weights(experiment, data, tmp_path, spec, in_flight):
    settings = experiment(spec, in_flight=in_flight, codec="randtopk:k=4,grad=4")
    whole = LocalSession(settings, data, outputs=10).run()
    for step in (7, 12):  # in either epoch, behind a checkpoint
        with pytest.raises(Killed):
            LocalSession(
                settings, data, outputs=10, checkpoints=tmp_path, observers=[killer(step)]
            ).run()
    resumed = LocalSession(settings, data, outputs=10, checkpoints=tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()
    last = [session.label.history[-1] for session in (whole, resumed)]
    assert last[0]["test_loss"] == last[1]["test_loss"]


@pytest.mark.parametrize("spec", SPECS)
def test_a_prediction_uses_what_was_trained(experiment, data, spec):
    """Weights come back into new sessions, where nothing is fitted or drawn again."""
    trained = LocalSession(experiment(spec), data, outputs=10).run()
    asked = LocalSession(
        experiment(spec), data, mode="evaluate", outputs=10, weights=trained.weights()
    ).run()
    assert asked.label.history[-1]["test_loss"] == trained.label.history[-1]["test_loss"]


@pytest.mark.parametrize("kind", ["pca", "autoencoder"])
def test_no_label_reaches_a_label_free_party(experiment, data, kind):
    """Bottoms are those of other labels, gradients are zeros, and the top still learns."""
    settings = experiment(f"label_free:kind={kind},features=64,epochs=3")
    others = replace(data["label"], labels=data["label"].labels.flip(0))
    trace = Trace(kinds=[Kind.GRAD])
    true = LocalSession(settings, data, outputs=10, observers=[trace]).run()
    false = LocalSession(settings, {**data, "label": others}, outputs=10).run()
    assert [c.weights_digest() for c in true.clients] == [c.weights_digest() for c in false.clients]
    assert not any(np.frombuffer(note.payload, np.uint8).any() for note in trace)
    losses = [record["train_loss"] for record in true.label.history]
    assert losses[-1] < losses[0]


def test_an_estimator_fits_once_and_goes_on():
    X, y = load_digits(return_X_y=True)
    model = VFLClassifier(2, defense="label_free:features=32", epochs=1, random_state=0)
    model.partial_fit(X, y, classes=range(10))
    first = {party: kept["state"] for party, kept in model._states.items() if party != "label"}
    model.partial_fit(X * 2, y)
    assert len(first) == 2
    for party, before in first.items():
        now = model._states[party]["state"]
        assert all(torch.equal(before[name], value) for name, value in now.items())


@pytest.mark.parametrize("spec", ["potential", "probe", "none+confusion"])
def test_classes_are_needed_for_some(spec):
    X, _ = load_digits(return_X_y=True)
    with pytest.raises(SpecError, match="labels of a regression are numbers"):
        VFLRegressor(2, defense=spec, epochs=1).fit(X[:50], X[:50, 20])


@pytest.mark.parametrize("spec", ["dcor", "bottleneck", "label_free:features=16"])
def test_a_regression_may_use_the_others(spec):
    X, _ = load_digits(return_X_y=True)
    model = VFLRegressor(2, defense=spec, epochs=1, random_state=0).fit(X[:200, :32], X[:200, 40])
    assert np.isfinite(model.predict(X[:5, :32])).all()
