"""Every place that states an epsilon, beside what a peer who chooses all terms can measure.

Gaussian mechanisms are compared in one number: how far two neighbouring inputs move everything
that is released, in deviations of its noise. It is measured with the noise left out. Others are
compared by the law of their answers.
"""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from vfl import tensors
from vfl.compression import StepContext
from vfl.core.errors import ConsentError
from vfl.core.seeds import Secret
from vfl.defenses import LabelKind, label_dp, make
from vfl.horizontal import Averager, ClientState, ClientTrainer, Update, add_noise, plan_noise
from vfl.horizontal.client import build_model, flat, layers_of
from vfl.horizontal.settings import HorizontalSettings
from vfl.mpc.many.members import LocalMembers
from vfl.mpc.secure_dpsgd import (
    LocalStart,
    SecureSgd,
    _clipped_sum,
    _scores,
    shared_rows,
    train_alone,
)
from vfl.privacy import kernel
from vfl.privacy.accountants import epsilon_of, gaussian_epsilon
from vfl.privacy.dpsgd import Branches
from vfl.privacy.projection import private_projection
from vfl.session.dp_plan import PrivacyPlan
from vfl.tensors.private import Budget, Plan, Teacher, described, tally
from vfl.tensors.workers import Votes
from vfl.trees.bins import randomised
from vfl.trees.grow import Layout
from vfl.trees.mode import Trees

ROOT = Path(__file__).parents[2] / "vfl"
SECRET = Secret(b"k" * 32)
DELTA = 1e-5
#: Of what float64 sums round.
CLOSE = 1 + 1e-6
#: Where an epsilon is stated, and the tests that measure it.
CASES: dict[str, list[str]] = {}


def measures(*places):
    def noted(test):
        for place in places:
            CASES.setdefault(place, []).append(test.__name__)
        return test

    return noted


def stated_places():
    """File and function of each statement with an epsilon; `replace` may give it another one."""
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "PrivacyStatement(" not in text and "epsilon=" not in text:
            continue
        found = [(one, []) for one in ast.parse(text).body]
        while found:
            node, inside = found.pop()
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                inside = [*inside, node.name]
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                by_name = any(each.arg == "epsilon" for each in node.keywords)
                states = name == "PrivacyStatement" and (by_name or len(node.args) > 2)
                if states or (name == "replace" and by_name):
                    yield f"{path.relative_to(ROOT)}:{'.'.join(inside)}"
            found += [(each, inside) for each in ast.iter_child_nodes(node)]


class EvenDraws:
    """Draws from 0 to 1 at even distances, every pair of them once."""

    def uniform(self, shape, *purpose):
        side = round(shape[1] ** 0.5)
        one = (np.arange(side) + 0.5) / side
        return np.stack([np.repeat(one, side), np.tile(one, side)])


@measures("trees/mode.py:Trees.privacy")
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bin_of_a_cell_tells_as_much_as_its_epsilon(epsilon):
    (stated,) = Trees(epsilon=epsilon).privacy()
    layout, side = Layout((7,), (False,)), 700
    laws = []
    for cell in (2, layout.width - 1):
        bins = np.full((side**2, 1), cell, np.uint8)
        drawn = randomised(bins, layout, epsilon, EvenDraws())
        laws.append(np.bincount(drawn[:, 0], minlength=layout.width) / side**2)
    measured = np.abs(np.log(laws[0]) - np.log(laws[1])).max()
    assert measured == pytest.approx(stated.epsilon, abs=0.02)


def test_every_statement_of_an_epsilon_is_measured():
    assert set(stated_places()) == {*CASES, "privacy/statement.py:added"}  # sums of these


class Released:
    """What was released since, with its noise left out, each number in its deviations."""

    def __init__(self, monkeypatch):
        self.parts = []
        zeros = lambda secret, count, *purpose: torch.zeros(count, dtype=torch.float64)  # noqa: E731
        monkeypatch.setattr(kernel, "normal_draws", zeros)
        release = kernel.release

        def noted(laws, *rest):
            found = release(laws, *rest)
            deviations = [torch.full((law.count,), law.deviation) for law in laws]
            self.parts.append(found / torch.cat(deviations).double())
            return found

        monkeypatch.setattr(kernel, "release", noted)

    def of(self, run):
        self.parts.clear()
        run()
        return torch.cat(self.parts)


@pytest.fixture
def released(monkeypatch):
    return Released(monkeypatch)


def allowed(moved, epsilon, delta=DELTA):
    """Whether a Gaussian mechanism of this distance is within an epsilon."""
    return not moved or gaussian_epsilon(1.0, moved * (1 - 1e-6), delta) <= epsilon


# --- trainings with [dp] ------------------------------------------------------------------------


class Twisted(nn.Module):
    """A layer without a rule: a backward pass a row."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, rows):
        return rows * self.scale


HALVES = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3)),
    "no rule": lambda: nn.Sequential(Twisted(), nn.Linear(5, 3)),
}


@measures("session/dp_plan.py:PrivacyPlan.statement")
@pytest.mark.parametrize("network", HALVES)
@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("by", ["half", "layer"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["poisson", "shuffled"])
@pytest.mark.parametrize("branches", [None, Branches(3, False), Branches(3, True)])
def test_one_row_or_branch_in_all_halves(released, network, quantile, by, shuffled, branches):
    """One step of three halves, whose gradients are as large as a peer likes."""
    clients = 3 if branches is not None and branches.clipped else 0
    plan = PrivacyPlan(6, 6, 1, 1, 2.0, DELTA, "rdp", 3, shuffled, clients)
    dp = SimpleNamespace(clips={"b": 1e-4}, clip=30.0, clip_by=by, quantile=quantile)
    terms, shapes = SimpleNamespace(dp=dp), [(5,)]
    torch.manual_seed(0)
    halves = []
    for party in "abc":
        model = HALVES[network]()
        half = plan.half(terms, party, model, model, shapes, SECRET, branches)
        halves.append((half, model))
    rows, grads = torch.randn(6, 5), 1e6 * torch.randn(6, 3)
    at = torch.tensor([0, 1, 2, 0, 1, 2])

    def step(kept, rows, grads):
        for half, model in halves:
            half.restore([*half.clipper.norms.clone().fill_(10.0)] if quantile else [])
            if branches is not None:
                branches.at[0] = at[kept]
            with half.recording() as calls:
                output = model(rows[kept])
            half.give_gradients(output, grads[kept], calls, 0)

    everything = torch.arange(6)
    whole = released.of(lambda: step(everything, rows, grads))
    for one in range(3):
        others = everything[at != one] if clients else everything[everything != one]
        if shuffled:
            other_rows, other_grads = rows.clone(), grads.clone()
            gone = at == one if clients else everything == one
            other_grads[gone] *= -1
            if quantile:
                other_grads[gone] = 0
            others = released.of(lambda r=other_rows, g=other_grads: step(everything, r, g))
        else:
            others = released.of(lambda kept=others: step(kept, rows, grads))
        moved = float((whole - others).norm())
        assert moved > 0
        assert allowed(moved, plan.statement(1).epsilon)


@measures("session/dp_plan.py:PrivacyPlan.statement")
def test_a_row_that_leaves_its_place_empty_where_rounding_decides_every_gradient(released):
    """Weights take what is left of a float32 sum times 1e12, and the loss takes its sign."""
    draw = torch.Generator().manual_seed(0)
    rows, first = torch.randn(70, 7, generator=draw), torch.randn(1, 7, generator=draw)
    rows -= (rows @ first.T) / (first @ first.T) * first
    model = nn.Sequential(nn.Linear(7, 1, bias=False), nn.Linear(1, 1))
    plan = PrivacyPlan(70, 70, 1, 1, 2.0, DELTA, "rdp", 1, False)
    dp = SimpleNamespace(clips={}, clip=1.0, clip_by="half", quantile=None)
    half = plan.half(SimpleNamespace(dp=dp), "a", model, model, [(7,)], SECRET)
    with torch.no_grad():
        for weight, value in zip(model.parameters(), (first, 1e12, 0.0), strict=True):
            weight.copy_(torch.as_tensor(value))

    def step(taken):
        with half.recording() as calls:
            output = model(rows * taken)
        half.give_gradients(output, output.detach() * taken, calls, 0)

    whole, moved = released.of(lambda: step(torch.ones(70, 1))), []
    for row in range(0, 70, 9):
        taken = torch.ones(70, 1).index_fill(0, torch.tensor([row]), 0.0)
        moved.append(float((whole - released.of(lambda t=taken: step(t))).norm()))
    # How a row is rounded is the machine's affair; a row whose output is 0 moves nothing.
    assert 0 < max(moved) <= CLOSE / plan.noise


# --- horizontal trainings -----------------------------------------------------------------------


def horizontal(**changed):
    base = {"source": "digits", "model": "mlp:hidden=4", "clients": 2, "sampled": 2, "rounds": 1}
    base |= {"batch_size": 8, "epsilon": 2.0, "learning_rate": 5.0, "clip_norm": 0.5}
    return HorizontalSettings(**base | {"sensitivity": "rigorous", "clip": "fixed"} | changed)


@measures("horizontal/plan.py:_statement")
@pytest.mark.parametrize("clip", ["fixed", "quantile"])
@pytest.mark.parametrize("noise", ["client", "steps"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_one_row_of_a_client(released, noise, clip, local_steps):
    settings = horizontal(noise=noise, clip=clip, local_steps=local_steps, batch_size=20)
    plan = plan_noise(settings, 20)
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(20, 5, generator=draw), torch.randint(3, (20,), generator=draw)

    def round_of(inputs, labels):
        trainer = ClientTrainer(settings, plan, inputs, labels, 3)
        layers = {number: flat(one) * 3 for number, one in enumerate(layers_of(trainer.model))}
        update, _ = trainer.update(layers, ClientState(), 1, SECRET)
        add_noise(update, SECRET, 1)

    whole = released.of(lambda: round_of(inputs, labels))
    for row in range(4):
        if noise == "client":
            other, others = inputs.clone(), labels.clone()
            other[row] *= -100
            others[row] = (others[row] + 1) % 3
        else:
            # One step alone: later ones are taken at weights that are already released.
            other, others = (torch.cat([one[:row], one[row + 1 :]]) for one in (inputs, labels))
        found = released.of(lambda a=other, b=others: round_of(a, b))
        moved = float((whole - found).norm())
        assert moved > 0
        if noise == "client" or local_steps == 1:
            assert allowed(moved, plan.statements[0].epsilon)


@measures("horizontal/plan.py:_statement")
@pytest.mark.parametrize("clip", ["fixed", "quantile"])
def test_one_client_at_the_server(released, clip):
    settings = horizontal(noise="server", clip=clip)
    plan, model = plan_noise(settings, 20), build_model(settings, (5,), 3)
    count = [len(flat(one)) for one in layers_of(model)]
    draw = torch.Generator().manual_seed(0)
    updates = [
        Update({n: 1e9 * torch.randn(size, generator=draw) for n, size in enumerate(count)}, one)
        for one in (0, 1, 1)
    ]
    first = released.of(lambda: Averager(settings, plan, model, SECRET).absorb(updates, 1))
    for left in range(3):
        rest = [one for at, one in enumerate(updates) if at != left]
        found = released.of(lambda r=rest: Averager(settings, plan, model, SECRET).absorb(r, 1))
        assert allowed(float((first - found).norm()), plan.statements[0].epsilon)


# --- workers ------------------------------------------------------------------------------------


def worker_plan(loss, *layers):
    request = {"layers": described(nn.Sequential(*layers)), "clip": 1.0, "noise": 2.0}
    return Plan(request | {"rate": 1.0, "loss": loss})


@measures("tensors/private.py:PrivateTraining.statement")
@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_a_row_at_a_worker_where_rounding_decides_every_gradient(released, loss):
    """Weights of the leader take what is left of a float32 sum times 1e12."""
    draw = torch.Generator().manual_seed(0)
    rows, first = torch.randn(70, 7, generator=draw), torch.randn(1, 7, generator=draw)
    rows -= (rows @ first.T) / (first @ first.T) * first
    plan = worker_plan(loss, nn.Linear(7, 1, bias=False), nn.Linear(1, 1))
    weights, labels = [first, torch.tensor([[1e12]]), torch.zeros(1)], torch.zeros(70, 1)
    whole = released.of(lambda: plan.gradients(rows, labels, weights))
    for row in range(0, 70, 9):
        kept = torch.arange(70) != row
        found = released.of(lambda k=kept: plan.gradients(rows[k], labels[k], weights))
        assert float((whole - found).norm()) <= CLOSE / plan.noise


@measures("tensors/private.py:PrivateTraining.statement")
def test_a_label_at_a_worker_where_rows_have_as_many_steps_as_a_batch_rows(released):
    steps = 12
    plan = worker_plan("cross_entropy", nn.Linear(3, steps, bias=False))
    rows, labels = torch.zeros(steps, steps, 3), torch.zeros(steps)
    rows[:, 0] = 1
    weights = [torch.zeros(steps, 3)]
    other = labels.clone()
    other[0] = 1
    try:
        whole = released.of(lambda: plan.gradients(rows, labels, weights))
    except RuntimeError:
        return
    found = released.of(lambda: plan.gradients(rows, other, weights))
    assert float((whole - found).norm()) <= 2 * CLOSE / plan.noise


@measures("tensors/private.py:promise_of")
def test_a_record_in_all_that_an_owner_granted():
    """Tables and teachers are spent to the last step; all steps together stay within the sum."""
    (alice,) = tensors.virtual("alice")
    for tag in ("x", "y"):
        alice.load(torch.ones(9, 2), tag=tag)
        alice.grant(tag, epsilon=0.5)
    alice.grant("y", epsilon=0.25, delta=2e-5)  # once more: what was spent before stays spent
    alice.teach("network", nn.Identity(), "bob", epsilon=1.0, delta=1e-6)
    whole = alice.granted()
    assert (whole.epsilon, whole.delta) == (2.25, pytest.approx(4.1e-5))
    spent = []
    for budget in (Budget(0.5, 1e-5), Budget(0.5, 1e-5), Budget(0.25, 2e-5), Budget(1.0, 1e-6)):
        left = iter(range(10_000))
        with pytest.raises(ConsentError):
            all(budget.take(9.0, 1.0, "alice") is None for _ in left)
        assert next(left) < 9_999
        spent += budget.spent
    together = math.sqrt(sum(one.steps for one in spent)) / 9.0
    assert 0.5 < gaussian_epsilon(1.0, together, whole.delta) <= whole.epsilon


@measures("tensors/private.py:pate")
def test_a_vote_among_teachers(monkeypatch):
    """One teacher moves two counts by 1; a threshold measures the noise that each count gets."""
    sigma, asked = 4.0, Budget(1e6, DELTA)
    teacher = Teacher(nn.Identity(), "aggregator", asked)

    def most(scores, value):
        monkeypatch.setattr(Secret, "normal", lambda _, shape, *purpose: np.full(shape, value))
        votes = [teacher.vote(one[None], sigma, "a worker") for one in scores]
        votes[0] = Votes(votes[0].ones, 1.0, b"")  # who wants less noise gets the others'
        passed = [float(tally(votes, at / 8, SECRET)[0]) >= 0 for at in range(80)]
        return passed.index(False) / 8 if False in passed else math.inf

    scores = torch.eye(3)[[0, 0, 1]]
    other = torch.eye(3)[[0, 1, 1]]
    assert most(scores, 0.0) == most(other, 0.0) == 2.125
    assert most(torch.eye(3)[[0, 0, 0]], 0.0) - most(scores, 0.0) == 1.0
    deviation = most(scores, 1.0) - most(scores, 0.0)
    assert math.sqrt(2) / deviation <= CLOSE / asked.spent[0].noise
    stated = epsilon_of(asked.spent[0], DELTA)
    assert allowed(math.sqrt(2 * asked.spent[0].steps) / deviation, stated)


# --- noise on rows ------------------------------------------------------------------------------


@measures("defenses/noise.py:RowNoise.promise")
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("sigma", [0.01, 4.0, 1e6])
@pytest.mark.parametrize("kind", ["clipped_noise", "gradient_noise"])
def test_two_rows_of_any_length(monkeypatch, law, sigma, kind):
    draw = "laplace" if law == "laplace" else "normal"
    context = StepContext(0, training=True, secret=SECRET)
    defense = make(f"{kind}:norm=0.1,sigma={sigma},law={law}")
    rows = torch.cat([torch.tensor([[1e30, 0], [-1e30, 0], [1e-30, 1e-30], [0, math.inf]]),
                      torch.randn(60, 2)])  # fmt: skip
    # An epsilon is of a row's own gradient, and what travels is of their mean.
    unit = 1 if kind == "clipped_noise" else len(rows)

    def sent(value):
        monkeypatch.setattr(Secret, draw, lambda _, shape, *purpose: np.full(shape, value))
        if kind == "clipped_noise":
            found = defense.embedding(rows, context)
        else:
            found = defense.gradient(rows / unit, torch.zeros(len(rows)), context)
        return found.double() * unit

    exact, noisy = sent(0.0), sent(32.0)  # the grid rounds a smaller draw by a larger share
    (promise,) = defense.privacy()
    scale = float((noisy - exact).abs().min()) / 32
    power = 1 if law == "laplace" else 2
    moved = float(torch.cdist(exact, exact, p=power).max()) / scale
    assert moved > 0 or sigma > 1e5  # the grid is then wider than the rows
    if law == "laplace":
        assert moved <= promise.epsilon * CLOSE
    else:
        assert allowed(moved, promise.epsilon, promise.delta)


@measures("defenses/tpsl.py:TranscriptPrivacy.privacy")
@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_a_label_in_the_gradient_of_its_logits(monkeypatch, classes, epsilon):
    defense, rows = make(f"tpsl:epsilon={epsilon}"), 64
    logits = 4 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))

    def gradient(label, value):
        monkeypatch.setattr(Secret, "laplace", lambda _, shape, *purpose: np.full(shape, value))
        leaf, labels = logits.clone().requires_grad_(), torch.full((rows,), label)
        loss = cross_entropy(leaf, labels)
        extra = defense.loss({}, labels, leaf, StepContext(0, training=True, secret=SECRET))
        (loss if extra is None else loss + extra).backward()
        return leaf.grad.double() * rows

    scale = float((gradient(0, 1.0) - gradient(0, 0.0)).abs().min())
    exact = torch.stack([gradient(label, 0.0) for label in range(classes)])
    if classes == 2:  # noise lies along (1, -1), so nothing may lie beside it
        assert not exact.sum(2).any()
        exact = exact[:, :, :1]
    moved = max(float((one - two).abs().sum(1).max()) for one in exact for two in exact)
    assert moved <= epsilon * scale * CLOSE


# --- randomised labels --------------------------------------------------------------------------

GRID = 60  # of each draw


def grid_draws(shape, axes=2):
    """Even draws, in place of random ones: shares of answers are then exact up to the grid."""
    points = (np.arange(GRID) + 0.5) / GRID
    if axes == 3:
        draws = np.stack([np.full(GRID**2, 0.0), *(each.ravel() for each in
                         np.meshgrid(points, points))], 1)  # fmt: skip
    else:
        draws = np.stack([each.ravel() for each in np.meshgrid(points, points)], 1)
    assert shape == draws.shape
    return draws


def worst_ratio(answer, classes):
    """The largest ratio of the shares of one answer under two labels."""
    shares = [
        np.bincount(answer(torch.full((GRID**2,), label)), minlength=classes) / GRID**2
        for label in range(classes)
    ]
    table = np.array(shares)
    table = table[:, table.any(0)]
    return float((table.max(0) / table.min(0)).max()) if table.min() else math.inf


@measures("defenses/label_dp.py:_promise", "defenses/few_rounds.py:FewRounds.privacy")
@pytest.mark.parametrize(
    ("spec", "classes"),
    [
        # Probabilities of answers are whole parts of the grid: e^epsilon = 2, 5, 9.
        (f"label_dp:epsilon={math.log(2)}", 4),
        (f"label_dp:epsilon={math.log(9)}", 2),
        ("label_dp:flip=0.5", 4),
        (f"label_dp:epsilon={math.log(2)},prior=0.4-0.3-0.2-0.1", 4),
        (f"label_dp:epsilon={math.log(5)},prior=0.9-0.05-0.05-0", 4),
        (f"label_dp:epsilon={math.log(4)},prior=0.4-0.4-0.1-0.1", 4),
        (f"label_dp_two_stage:epsilon={math.log(2)},epochs=1", 4),
        (f"few_rounds:steps=5,epsilon={math.log(2)}", 4),
    ],
)
def test_answers_of_one_label(monkeypatch, spec, classes):
    axes = 3 if "two_stage" in spec else 2
    monkeypatch.setattr(Secret, "uniform", lambda _, shape, *purpose: grid_draws(shape, axes))
    defense = make(spec)
    defense.prepare(LabelKind(classes))
    (promise,) = [one for one in defense.privacy() if one.epsilon is not None]

    def answer(labels):
        found = defense.labels(labels, SECRET)
        if "few_rounds" in spec:
            assert torch.equal(found, labels)  # the top learns from these once nothing is sent
            defense.counts(torch.arange(len(labels)), 1)
            found = defense.batch(None, found, StepContext(0, training=True))[1]
        return found.numpy()

    worst = math.log(worst_ratio(answer, classes))
    assert worst <= promise.epsilon + 1e-6


@measures("defenses/label_dp.py:_promise")
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 45.0, 700.0])
@pytest.mark.parametrize("classes", [2, 3, 1000])
def test_no_flip_is_rounded_down(epsilon, classes):
    """A share of 53 bits that a flip is compared with: it is never less than the flip."""
    flip = label_dp.flip_of(epsilon, classes)
    drawn = math.ceil(flip * 2**53) / 2**53
    assert math.log((1 - drawn) * (classes - 1) / drawn) <= epsilon + 1e-12


# --- shares -------------------------------------------------------------------------------------


def shares_of(rows, classes=6, **changed):
    base = {"columns": 4, "classes": classes, "steps": 1, "batch_size": sum(rows)}
    base |= {"learning_rate": 1.0, "clip": 0.5, "noise": 2.0, "seed": 0}
    return SecureSgd(rows=rows, **base | changed)


@measures(
    "mpc/secure_dpsgd.py:SecureSgd.statement",
    "mpc/secure_dpsgd.py:LocalStart.statement",
    "mpc/secure/pea.py:PeaEnd.privacy",
)
def test_a_row_of_a_holder(released):
    """It moves the clipped sum by at most the clip, scores by 1, and its owner's own model."""
    draw = torch.Generator().manual_seed(0)
    terms = shares_of((4, 4))
    inputs = 10.0 ** torch.tensor([3.0, -2, 0, 1])[:, None] * torch.randn(4, 4, generator=draw)
    parts = [(inputs, torch.tensor([0, 1, 2, 5])), (inputs.flip(0), torch.tensor([5, 4, 3, 0]))]
    models = [2.0**6 * torch.randn(5, 6, generator=draw).double() for _ in range(3)]

    def program(member):
        own = None if member.deals else parts[member.role]
        rows = shared_rows(member, terms, own)
        given = [member.share(0, (5, 6), one if member.role == 0 else None, "m") for one in models]
        found = []
        for left in (None, 0, 3, 5):
            at = torch.tensor([row for row in range(8) if row != left])
            some = rows.rows(at)
            total = _clipped_sum(member, terms, given[0], some)
            scores = _scores(member, terms, given, some.inputs, some.truth)
            found.append((member.reveal(total, "sum"), member.reveal(scores, "scores")))
        return found

    with LocalMembers(2) as members:
        (whole, judged), *others = members.run(program)[0]
    most = (1 + (terms.classes + 2) * 2.0**-20) * math.sqrt(len(models))
    for total, scores in others:
        assert 0 < float((whole - total).norm()) <= terms.clip * CLOSE
        assert float((judged - scores).norm()) <= most
    start = LocalStart(steps=1, batch_size=4, learning_rate=1.0, noise=2.0)
    alone = released.of(lambda: train_alone(terms, start, parts[0], SECRET))
    for row in range(4):
        kept = torch.arange(4) != row
        rest = tuple(one[kept] for one in parts[0])
        found = released.of(lambda r=rest: train_alone(terms, start, r, SECRET))
        assert float((alone - found).norm()) <= CLOSE / start.noise


# --- directions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e38])
def test_a_row_of_a_projection(released, scale):
    rows = scale * torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    whole = released.of(lambda: private_projection(rows, 2, noise=3.0, secret=SECRET))
    rest = released.of(lambda: private_projection(rows[1:], 2, noise=3.0, secret=SECRET))
    assert float((whole - rest).norm()) <= CLOSE / 3.0  # rows below every norm here are 0


# --- draws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["normal", "laplace", "kernel"])
def test_the_tail_of_a_law_has_no_gaps_as_wide_as_a_grid(monkeypatch, law):
    """Two draws of neighbouring 64 bits in the tail, where numbers would tell what is below."""
    found = []
    for word in (2**64 - 2**30, 2**64 - 2**30 + 1):
        if law == "kernel":
            word = (word >> 11) | ((word & 2047) << 53)  # the lower 53 bits count there
        words = word.to_bytes(8, "little") + bytes(8)
        monkeypatch.setattr(Secret, "stream", lambda *_, w=words: w)
        whole = np.frombuffer(words, np.int64)
        monkeypatch.setattr(Secret, "words", lambda *_, w=whole: w.copy())
        if law == "kernel":
            found.append(float(kernel.normal_draws(SECRET, 1)[0]))
        else:
            found.append(float(getattr(SECRET, law)((1,))[0]))
    assert abs(found[0]) > 6.5
    assert 0 < abs(found[1] - found[0]) < 2.0**-24
