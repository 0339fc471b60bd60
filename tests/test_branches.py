"""A feature party whose rows lie at branches: one bottom, trained by all of them with noise."""

import numpy as np
import pytest
import torch
from killing import Killed, Killer, weights_apart
from pydantic import ValidationError
from torch import nn

from vfl.config import Experiment
from vfl.core.errors import PrivacyError
from vfl.core.seeds import Secret
from vfl.datasets import Dealing, load_bundled
from vfl.privacy.dpsgd import Branches, PrivateHalf
from vfl.session import Terms
from vfl.session.dp_plan import PrivacyPlan, branches_of
from vfl.training.local import LocalSession
from vfl.training.privacy_audit import audit

ROWS = 300
CLIENT = {"noise": 1.0, "unit": "client"}


def experiment(dp, branches=5, train=None, **changes):
    parties = {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in ("left", "right")}
    parties["left"]["branches"] = branches
    settings = {"epochs": 2, "batch_size": 42, "checkpoint_every": 3} | (train or {})
    content = {"parties": parties, "data": {"rows": ROWS}, "dp": dp, "train": settings}
    return Experiment.model_validate(content | changes)


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=ROWS))


def session(data, settings, folder=None, observers=()):
    return LocalSession(settings, data, outputs=10, checkpoints=folder, observers=observers)


def gradient(at, grad, norm=1.0, noise=1e-9, *, clipped, count=4):
    """What a linear half leaves at its weights, for rows at these branches; whole sums."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    branches = Branches(count, clipped)
    half = PrivateHalf(
        model, norm=norm, noise=noise, batch_size=1.0, secret=Secret(b"1" * 32), party="shop",
        branches=branches,
    )  # fmt: skip
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))[: len(at)]
    with half.recording() as calls:
        output = model(inputs)
    branches.at[7] = torch.tensor(at, dtype=torch.int64)
    half.give_gradients(output, grad, calls, 7)
    assert not branches.at
    return torch.cat([weight.grad.reshape(-1) for weight in model.parameters()]), inputs


@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_a_branch_is_clipped_as_one(norm):
    at, grad = [0, 2, 2, 0, 3], torch.linspace(-2, 2, 15).reshape(5, 3)
    found, inputs = gradient(at, grad, norm, clipped=True)
    total = torch.zeros(21)
    for branch in (0, 2, 3):
        rows = [row for row, one in enumerate(at) if one == branch]
        mean = torch.cat([(grad[rows].T @ inputs[rows]).reshape(-1), grad[rows].sum(0)]) / len(rows)
        total += mean * min(1.0, norm / float(mean.norm()))
    torch.testing.assert_close(found, total, atol=1e-5, rtol=1e-4)


def test_all_rows_of_a_branch_move_the_sum_by_one_norm():
    at, grad = [0, 1, 2] * 10, 50 * torch.randn(30, 3, generator=torch.Generator().manual_seed(2))
    with_it, _ = gradient(at, grad, clipped=True)
    empty = grad.clone()
    empty[[row for row, one in enumerate(at) if one == 2]] = 0
    without_it, _ = gradient(at, empty, clipped=True)
    assert 0.5 < float((with_it - without_it).norm()) <= 1.0 + 1e-5


def test_every_branch_adds_noise_of_its_own():
    grad = torch.zeros(5, 3)
    draws = [
        torch.cat([gradient([0] * 5, grad, norm, 2.0, clipped=False, count=count)[0]
                   for norm in np.linspace(1, 2, 40)])
        for count in (1, 9)
    ]  # fmt: skip
    assert float(draws[1].std() / draws[0].std()) == pytest.approx(3, rel=0.15)
    quiet = [gradient([0, 1, 2, 3, 3], grad + 1, clipped=False, count=count)[0] for count in (4, 9)]
    torch.testing.assert_close(*quiet)


def test_without_noise_branches_train_what_one_place_trains(data):
    dp = {"noise": 1e-10, "clip": 0.1}
    one, five = (session(data, experiment(dp, branches)).run() for branches in (1, 5))
    assert weights_apart(one.weights(), five.weights()) < 1e-4
    assert one.label.privacy() == five.label.privacy()
    noisy = session(data, experiment({"noise": 1.0})).run()
    assert weights_apart(one.weights(), noisy.weights()) > 0.01


def test_a_batch_has_all_rows_of_a_branch_or_none(data):
    settings = experiment(CLIENT, train={"epochs": 100})
    terms = Terms.of(settings, "train", "run").keyed(Secret(b"2" * 32))
    train = data["label"].split.train
    plan, of = PrivacyPlan.of(terms, len(train)), branches_of(terms, "left", train)
    sizes = np.bincount(of[train])
    assert (len(sizes), sizes.min(), sizes.max()) == (5, 42, 42)
    drawn = [rows for epoch in range(1, 101) for rows in plan.batches(terms, train)(epoch)]
    for rows in drawn:
        assert all(count in (0, 42) for count in np.bincount(of[rows], minlength=5))
    assert np.mean([len(rows) for rows in drawn]) == pytest.approx(42, rel=0.2)
    assert min(len(rows) for rows in drawn) == 0


@pytest.mark.parametrize(
    ("secure", "merge", "in_flight"),
    [("none", "concat", 3), ("sum", "sum", 1)],
)
def test_a_killed_training_of_clients_goes_on_to_the_same_models(
    data, tmp_path, secure, merge, in_flight
):
    settings = experiment(CLIENT | {"epsilon": 30.0}, merge=merge, secure=secure,
                          train={"epochs": 4, "in_flight": in_flight})  # fmt: skip
    whole = session(data, settings).run()
    (stated,) = whole.label.privacy()
    assert (stated.unit, stated.relation) == ("client", "add or remove")
    assert 0 < stated.epsilon <= 30

    with pytest.raises(Killed):
        session(data, settings, tmp_path, [Killer(8)]).run()
    resumed = session(data, settings, tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()
    assert resumed.label.privacy() == whole.label.privacy()


@pytest.mark.parametrize(
    ("dp", "changes", "why"),
    [
        (None, {}, "so they need"),
        (CLIENT, {"branches": 1}, "one party with branches, and 0 have"),
        (CLIENT | {"sampling": "shuffled"}, {}, "dp.sampling = 'poisson'"),
        ({"noise": 1.0, "quantile": 0.5}, {}, "rows together"),
    ],
)
def test_what_does_not_go_with_branches_is_refused(dp, changes, why):
    with pytest.raises(ValidationError, match=why):
        experiment(dp, **changes)


def test_an_audit_of_records_does_not_judge_a_promise_about_clients(data):
    with pytest.raises(PrivacyError, match="canaries are records"):
        audit(experiment(CLIENT), data)
