"""Learning with noise at workers: what leaves them, what an owner grants, and votes of teachers."""

import math
import secrets

import pytest
import torch
from torch import nn
from torch.nn import functional

from vfl import tensors
from vfl.core.errors import ConsentError, RunFolderError, UserError
from vfl.privacy.accountants import GaussianSteps, epsilon_by, epsilon_of
from vfl.tensors.budgets import MOST_KINDS, BudgetLedger
from vfl.tensors.keys import seal
from vfl.tensors.private import Budget, Plan, built, described
from vfl.tensors.wire import packed

ROWS = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
LABELS = (ROWS @ torch.tensor([[1.0], [-2.0], [0.5]])) + 0.25


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loaded(worker, epsilon=1e6):
    x, y = worker.load(ROWS, tag="x"), worker.load(LABELS, tag="y")
    if epsilon:
        for tag in "xy":
            worker.grant(tag, epsilon=epsilon)
    return x, y


def gradient_of(row, model, clip):
    """Of one row's loss, scaled down to the norm: the definition."""
    model.zero_grad()
    functional.mse_loss(model(ROWS[row : row + 1]), LABELS[row : row + 1]).backward()
    flat = torch.cat([each.grad.reshape(-1) for each in model.parameters()])
    return flat * min(1.0, clip / float(flat.norm()))


def test_gradients_are_sums_of_clipped_rows_and_noise_of_the_stated_size(workers):
    plan = Plan({"layers": described(network()), "clip": 0.5, "noise": 0.01, "rate": 1.0,
                 "loss": "mse"})  # fmt: skip
    model = network()
    plan.model.load_state_dict(model.state_dict())
    found = torch.cat([each.reshape(-1) for each in plan.gradients(ROWS, LABELS)])
    want = sum(gradient_of(row, model, 0.5) for row in range(200)) / 200
    assert torch.allclose(found, want, atol=6 * 0.01 * 0.5 / 200)
    plan.noise = 100.0
    draws = torch.cat(
        [each.reshape(-1) for _ in range(40) for each in plan.gradients(ROWS, LABELS)]
    )
    assert float(draws.std()) == pytest.approx(100 * 0.5 / 200, rel=0.1)


def test_each_row_is_in_a_batch_by_chance(workers):
    plan = Plan({"layers": described(nn.Linear(1, 1)), "clip": 10.0, "noise": 0.01, "rate": 0.25,
                 "loss": "mse"})  # fmt: skip
    plan.noise = 1e-9  # none worth the name
    for weight in plan.weights:
        weight.data.zero_()
    ones = torch.ones(400, 1)
    counts = torch.tensor([-float(plan.gradients(ones, ones / 2)[1]) * 100 for _ in range(200)])
    assert float(counts.mean()) == pytest.approx(100, abs=3)
    assert float(counts.std()) == pytest.approx(math.sqrt(400 * 0.25 * 0.75), rel=0.2)


def test_a_training_over_workers_learns_and_states_what_it_costs(workers):
    tables = [loaded(worker) for worker in workers]
    model = network()
    before = functional.mse_loss(model(ROWS), LABELS).item()
    training = tensors.PrivateTraining(
        model, [x for x, _ in tables], [y for _, y in tables], noise=1.0, batch_size=50
    )
    rule = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(60):
        training.step()
        rule.step()
    assert functional.mse_loss(model(ROWS), LABELS).item() < before / 5
    statement = training.statement(1e-5)
    most = max(training._steps)
    assert sum(training._steps) == 60
    assert statement.epsilon == epsilon_of(GaussianSteps(1.0, most, 0.25), 1e-5)
    assert statement.unit == "record"
    for hidden, _ in tables:
        with pytest.raises(ConsentError):
            hidden.get()


def test_a_module_at_the_worker_gets_its_gradient_there(workers):
    alice = workers[0]
    x, y = loaded(alice)
    model = tensors.send(network(), alice)
    training = tensors.PrivateTraining(model, [x], [y], noise=1.0)
    training.step()
    before = [each.get() for each in model.parameters()]
    grads = [each.grad.get() for each in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for old, grad, new in zip(before, grads, model.parameters(), strict=True):
        assert torch.allclose(new.get(), old - 0.1 * grad)


def test_the_owner_grants_it_and_no_more_than_that(workers):
    alice = workers[0]
    x, y = loaded(alice, epsilon=0)
    training = tensors.PrivateTraining(network(), [x], [y], noise=2.0, batch_size=20)
    with pytest.raises(ConsentError, match="grants no training"):
        training.step()
    hidden = nn.Sequential(nn.Linear(3, 1, bias=False))
    hidden[0]._parameters["weight"] = alice.load(ROWS[:1])
    seen = [tensors.send(ROWS, alice)], [tensors.send(LABELS, alice)]
    of_hidden = tensors.PrivateTraining(hidden, *seen)
    with pytest.raises(ConsentError, match="refuses gradients"):
        of_hidden.step()
    for tag in "xy":
        alice.grant(tag, epsilon=1.0)
    with pytest.raises(ConsentError, match="is spent"):
        spend(training, 10_000)
    assert 0.95 < training.statement(1e-5).epsilon <= 1.0
    other = tensors.PrivateTraining(network(), [x], [y], noise=8.0, batch_size=20)
    with pytest.raises(ConsentError, match="is spent"):  # whoever asks next, and however
        spend(other, 100_000)
    spent = alice.budgets[x.number].spent
    assert len(spent) == 2
    assert sum(each.steps for each in spent[:1]) == training._steps[0]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(("weight", "value"), [(3e38, 5.0), (1e25, 1e25), (math.nan, 1.0)])
def test_no_weights_show_through_the_noise_that_a_row_is_there(dense, weight, value):
    """A hostile leader takes weights that overflow for one row alone: NaN would tell of it."""
    plan = Plan({"layers": described(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))), "clip": 1.0,
                 "noise": 1.0, "rate": 1.0, "loss": "mse"})  # fmt: skip
    plan.dense = dense
    rows, labels = torch.zeros(50, 1), torch.zeros(50, 1)
    rows[7] = value
    hostile = [torch.full_like(each, weight) for each in plan.weights]
    for each in plan.gradients(rows, labels, hostile):
        assert each.isfinite().all()


def test_a_small_clip_bounds_a_row_whose_gradient_underflows():
    """Squares of 1e-23 are 0 in float32: a norm of 0 would leave a gradient of 1e-4 unclipped."""
    layers = [["linear", [1, 1], False], ["linear", [1, 1], False]]
    request = {"layers": layers, "noise": 0.01, "rate": 1.0, "loss": "mse"}
    plan = Plan(request | {"clip": 1e-6})
    hostile = [torch.full((1, 1), 1e19), torch.full((1, 1), 1e-23)]
    found = plan.gradients(torch.ones(1, 1), torch.full((1, 1), 1e-4), hostile)
    assert max(float(each.abs().max()) for each in found) < 2e-6
    with pytest.raises(UserError, match="clip"):
        Plan(request | {"clip": 1e-30})


def test_who_changes_a_granted_table_trains_no_more_on_it(workers):
    """One record in every row would be hidden by the noise of one row."""
    alice = workers[0]
    x, y = loaded(alice)
    training = tensors.PrivateTraining(network(), [x], [y], noise=4.0, batch_size=20)
    training.step()
    x.detach().copy_(x[5:6])
    with pytest.raises(ConsentError, match="was changed"):
        training.step()


def test_a_budget_counts_steps_of_several_kinds():
    budget = Budget(2.0, 1e-5)

    def take(noise, times):
        for _ in range(times):
            budget.take(noise, 0.1, "alice")

    take(4.0, 10)
    with pytest.raises(ConsentError):
        take(1.0, 10**6)
    assert epsilon_by(budget.spent, 1e-5, "rdp") <= 2.0


def kept_worker(folder, epsilon, tag="x"):
    worker = tensors.Worker("alice", ledger=BudgetLedger(folder, "alice"))
    x = worker.load(ROWS, tag=tag)
    worker.grant(tag, epsilon=epsilon)
    return worker, x


def train_on(worker, x, steps, noise=4.0):
    """Steps on hidden rows, with labels that everybody has."""
    y = tensors.send(LABELS, worker)
    training = tensors.PrivateTraining(network(), [x], [y], noise=noise, batch_size=20)
    for done in range(steps):
        try:
            training.step()
        except ConsentError:
            return done
    return steps


@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_that_starts_again_has_what_was_left(tmp_path, killed):
    whole = train_on(*kept_worker(tmp_path / "whole", 1.0), 10_000)
    assert 70 < whole < 10_000
    first = kept_worker(tmp_path / "kept", 1.0)
    assert train_on(*first, 3) == 3
    if not killed:
        first[0].stop()
    again = kept_worker(tmp_path / "kept", 1.0)
    left = train_on(*again, 10_000)
    assert left == whole - 3 if not killed else whole - 3 - 64 <= left < whole - 3
    assert train_on(*kept_worker(tmp_path / "kept", 1.0), 1, noise=50.0) <= 1
    third, x = kept_worker(tmp_path / "kept", 1.0)
    assert train_on(third, x, 1) == 0
    assert epsilon_by(third.budgets[x.number].spent, 1e-5, "rdp") <= 1.0
    other = kept_worker(tmp_path / "kept", 1.0, tag="z")
    assert train_on(*other, 1) == 1  # another table
    larger = kept_worker(tmp_path / "kept", 1.1)
    assert 0 < train_on(*larger, 10_000) < whole  # its owner grants more


def test_two_workers_do_not_spend_one_budget(tmp_path):
    with (
        BudgetLedger(tmp_path, "alice").alone(),
        pytest.raises(RunFolderError, match="another process"),
        BudgetLedger(tmp_path, "alice").alone(),
    ):
        pass


def test_a_budget_of_a_table_whose_name_is_no_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="another name"):
        kept_worker(tmp_path, 1.0, tag="../x")


def test_a_damaged_budget_is_no_new_one(tmp_path):
    worker, x = kept_worker(tmp_path, 1.0)
    train_on(worker, x, 1)
    path = tmp_path / "x.json"
    path.write_text(path.read_text().replace('"steps": 6', '"steps": 1'))
    with pytest.raises(RunFolderError):
        kept_worker(tmp_path, 1.0)


def test_a_leader_that_changes_the_noise_at_every_step_is_refused_some_day():
    budget = Budget(10.0, 1e-5)
    for kind in range(MOST_KINDS):
        budget.take(50.0 + kind, 0.1, "alice")
    with pytest.raises(ConsentError, match="too many kinds"):
        budget.take(2.0, 0.1, "alice")
    budget.take(50.0 + MOST_KINDS - 1, 0.1, "alice")


def test_networks_that_a_worker_makes():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
                          nn.Linear(8, 2, bias=False))  # fmt: skip
    again = built(described(model))
    again.load_state_dict(model.state_dict())
    image = torch.randn(5, 1, 4, 4)
    assert torch.equal(again(image), model(image))
    with pytest.raises(UserError, match="BatchNorm1d"):
        described(nn.Sequential(nn.BatchNorm1d(3)))
    for bad in [
        [["exec", ["x"]]],
        [["linear", [10**9, 10**9], True]],
        [["linear", ["a", 1], True]],
    ]:
        with pytest.raises(UserError, match="cannot build a network"):
            built(bad)


def test_a_step_over_processes(everywhere):
    if everywhere is None:
        pytest.skip("the others are of one process")
    rows = [tensors.find(worker, "rows") for worker in everywhere]
    labels = [tensors.send(torch.ones(2, 1), worker) for worker in everywhere]
    model = nn.Sequential(nn.Linear(3, 1))
    training = tensors.PrivateTraining(model, rows, labels, noise=5.0, batch_size=2)
    training.step()
    assert [each.grad.shape for each in model.parameters()] == [(1, 3), (1,)]


def spend(training, most):
    for _ in range(most):
        training.step()


def teachers(count):
    """Networks that mostly say the sign of the first column."""
    torch.manual_seed(0)
    made = []
    for _ in range(count):
        model = nn.Sequential(nn.Linear(3, 2))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]) + torch.randn(2, 3) / 4)
            model[0].bias.zero_()
        made.append(model)
    return made


def test_teachers_vote_and_nobody_sees_a_vote(workers):
    owners = tensors.virtual(*(f"owner {at}" for at in range(20)))
    carol = workers[2]
    for owner, model in zip(owners, teachers(20), strict=True):
        owner.teach("teacher", model, "carol", epsilon=300.0)
    pairs = [(owner, "teacher") for owner in owners]
    truth = (ROWS[:, 0] > 0).long()
    labels, statement = tensors.pate(pairs, ROWS, carol, sigma=2.0, threshold=12.0)
    answered = labels >= 0
    assert 0.5 < answered.float().mean() < 1
    assert (labels[answered] == truth[answered]).float().mean() > 0.95
    assert (labels != tensors.pate(pairs, ROWS, carol, sigma=2.0, threshold=12.0)[0]).any()
    assert statement.epsilon == epsilon_of(GaussianSteps(2 / math.sqrt(2), len(ROWS)), 1e-5)
    number, shape = owners[0].vote("teacher", ROWS, 2.0)
    with pytest.raises(ConsentError, match="does not let me"):
        tensors.PointerTensor(owners[0], number, shape).get()
    with pytest.raises(ConsentError, match="does not let alice"):
        tensors.pate(pairs, ROWS, workers[0], sigma=2.0)
    with pytest.raises(UserError, match="does not accept"):
        owners[0].vote("teacher", ROWS[:, :2], 2.0)


def test_votes_are_counted_once_with_the_noise_that_was_paid_for(any_workers):
    *_, carol = any_workers
    (owner,) = tensors.virtual("owner")
    owner.teach("teacher", teachers(1)[0], carol.name, epsilon=2.0)
    number, _ = owner.vote("teacher", ROWS[:9], 40.0)
    parcels = [owner.pack(number, carol.name, carol.public_key()) for _ in range(2)]
    one, again = (carol.accept(each)[0] for each in parcels)
    seen = [carol.tally([one], -1e9).float()]
    for numbers in ([again], [one], [again, again]):
        with pytest.raises(ConsentError, match="counted only once"):
            carol.tally(numbers, -1e9)
    for _ in range(40):  # noise of 40 hides one vote
        other, _ = owner.vote("teacher", ROWS[:9], 4000.0)
        moved, _ = carol.accept(owner.pack(other, carol.name, carol.public_key()))
        seen.append(carol.tally([moved], -1e9).float())
    assert 0.3 < torch.stack(seen).mean() < 0.7
    with pytest.raises(ConsentError, match="is spent"):
        owner.vote("teacher", ROWS, 4.0)
    with pytest.raises(UserError, match="vote"):
        carol.tally([carol.store(torch.ones(2, 2))[0]], 0.0)


@pytest.mark.parametrize(
    "forged",
    [torch.full((9, 2), 2**62 + 511), torch.full((9, 2), math.nan), torch.ones(9, 2).long(),
     torch.ones(2, dtype=torch.int64)],
)  # fmt: skip
def test_nobody_adds_votes_that_round_the_noise_away(any_workers, forged):
    """Next to 2^62 a vote decides how a count is rounded, and noise of 40 is lost."""
    *_, carol = any_workers
    parcel = packed({"value": forged, "readers": None, "votes": [0.01, secrets.token_bytes(16)]})
    number, _ = carol.accept(seal(carol.public_key(), parcel))
    with pytest.raises(UserError, match="vote"):
        carol.tally([number], 0.0)
