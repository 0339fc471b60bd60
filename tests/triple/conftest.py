import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from vfl.config import Experiment
from vfl.core.seeds import permutation
from vfl.mpc.network import fixed_point_rate
from vfl.session.schedule import batches
from vfl.training.run import load_data
from vfl.triple.plan import Part, Plan, seats
from vfl.triple.program import first_weights


@pytest.fixture
def experiment():
    """Two parties with columns; the label party is the third unless a holder is named."""

    def make(source="breast_cancer", label="lender", rows=None, **train):
        settings = {
            "data": {"source": source} | ({"rows": rows} if rows else {}),
            "parties": {"bank": {}, "shop": {}},
            "label": {"party": label},
            "train": {"epochs": 2, "batch_rows": 32} | train,
        }
        return Experiment.model_validate(settings)

    return make


@pytest.fixture
def in_clear():
    """The network of a card trained in float64 by torch's gradients; its test outputs."""

    def train(card, experiment):
        plan = Plan.model_validate(card["plan"])
        data, names = load_data(experiment), seats(experiment)
        parts = [Part.of(data[name], plan, role) for role, name in enumerate(names) if name in data]
        rows = torch.cat([parts[0].train, parts[1].train], 1)
        test = torch.cat([parts[0].test, parts[1].test], 1)
        targets = parts[plan.label_role].train_targets
        halves = [first_weights(plan, holder) for holder in (0, 1)]
        weights = {name: (halves[0][name] + halves[1][name]).requires_grad_() for name in halves[0]}
        for epoch in range(plan.epochs):
            order = torch.from_numpy(permutation(plan.seed + epoch, len(rows), "mpc", 0))
            for positions in batches(order.numpy(), plan.batch_rows):
                index = torch.from_numpy(positions)
                divided = len(index) / (1 if plan.classes else 2)
                times, shift = fixed_point_rate(plan.learning_rate / divided)
                outputs = forward(plan, weights, rows[index])
                loss = (
                    binary_cross_entropy_with_logits(outputs, targets[index], reduction="sum")
                    if plan.classes
                    else mse_loss(outputs, targets[index], reduction="sum") / 2
                )
                gradients = torch.autograd.grad(loss, list(weights.values()))
                with torch.no_grad():
                    for value, gradient in zip(weights.values(), gradients, strict=True):
                        value -= times / 2**shift * gradient
        with torch.no_grad():
            return forward(plan, weights, test), weights, parts[plan.label_role].test_labels

    return train


def forward(plan, weights, values):
    for index, layer in enumerate(plan.layers):
        values = values @ weights[f"{index}.weight"] + weights[f"{index}.bias"]
        values = torch.relu(values) if layer.function == "relu" else values
    return values
