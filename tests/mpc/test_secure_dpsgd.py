"""Roots that never clip too little, noise of many, and a training beside its plain form."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from vfl.core.errors import BadOptionError, PrivacyError
from vfl.core.seeds import Secret, generator
from vfl.mpc.many.members import LocalMembers, Member
from vfl.mpc.secure_dpsgd import (
    LocalStart,
    SecureSgd,
    agreed_key,
    inverse_root,
    noise_share,
    prepared,
    train,
    train_alone,
    train_here,
)
from vfl.privacy.accountants import GaussianSteps, epsilon_by

BITS = 20


def roots(members, values, form):
    def program(member):
        own = values if member.role == 0 else None
        x = member.share(0, values.shape, own, "values")
        return member.reveal(inverse_root(member, x, form), "roots")

    return members.run(program)[0]


def relative_errors(form, count):
    """Of roots of numbers whose logarithms are even on [2^-10, 2^20], with both ends."""
    exponents = torch.rand(count, generator=generator(0, "roots"), dtype=torch.float64) * 30 - 10
    exponents[:31] = torch.arange(31) - 10.0
    values = (2.0 ** (exponents + BITS)).round() * 2.0**-BITS
    with LocalMembers(2) as members:
        return roots(members, values, form) * values.sqrt() - 1


@pytest.mark.parametrize(("form", "least"), [("polynomial", -0.01), ("permuted", -1e-6)])
def test_roots_are_never_above_the_truth(form, least):
    found = relative_errors(form, 10_000)
    assert least < found.min()
    assert found.max() <= 1e-15


@pytest.mark.slow
def test_a_million_roots_are_never_above_the_truth():
    found = torch.cat([relative_errors("polynomial", 100_000) for _ in range(10)])
    assert found.min() > -0.01
    assert found.max() < 0


@pytest.mark.parametrize("form", ["polynomial", "permuted"])
def test_the_root_of_nothing_is_nothing(form):
    with LocalMembers(3) as members:
        assert roots(members, torch.zeros(40), form).abs().max() <= 2.0**-30


@pytest.mark.parametrize("holders", [2, 3, 5])
def test_noise_of_all_and_of_two_thirds(holders):
    """Half as much again as is asked for; what a third of the holders leaves out is spare."""
    secrets = [Secret.fresh() for _ in range(holders)]
    deviation, count = 3.0, 40_000
    with LocalMembers(holders) as members:
        parts = members.run(
            lambda m: noise_share(m, (count,), deviation, secrets[m.role % holders], 24)
        )
    noise = torch.stack([part.share for part in parts[:-1]]).double() * 2.0**-24
    assert noise.sum(0).std() == pytest.approx(deviation * 1.5**0.5, rel=0.03)
    rest = noise[: holders - holders // 3].sum(0)
    assert rest.std() > deviation * 0.98
    assert abs(float(np.corrcoef(noise[0], noise[1])[0, 1])) < 0.03


@pytest.mark.parametrize("deviation", [1.0, 1.5, 1000.0])
def test_whole_numbers_follow_the_law(deviation):
    draws = Secret.of_simulation(0, "a").discrete_normal(100_000, deviation, "law")
    numbers = np.arange(-math.ceil(6 * deviation), math.ceil(6 * deviation) + 1)
    law = np.exp(-(numbers**2) / (2 * deviation**2))
    law /= law.sum()
    assert abs(draws.mean()) < 5 * deviation / 100_000**0.5
    assert draws.std() == pytest.approx(math.sqrt((law * numbers**2).sum()), rel=0.015)
    below = np.searchsorted(np.sort(draws), numbers, side="right") / len(draws)
    # Kolmogorov and Smirnov, at a chance of 1e-6.
    assert abs(below - law.cumsum()).max() < math.sqrt(math.log(2e6) / 2 / len(draws))


def test_whole_numbers_are_one_stream_a_purpose():
    secret = Secret.of_simulation(0, "a")
    draws = secret.discrete_normal(50, 7.0, "noise", 1)
    assert (draws == secret.discrete_normal(50, 7.0, "noise", 1)).all()
    assert (draws != secret.discrete_normal(50, 7.0, "noise", 2)).any()
    with pytest.raises(ValueError, match="deviation"):
        secret.discrete_normal(5, 0.5, "noise")


TERMS = SecureSgd(
    rows=(150, 150),
    columns=5,
    classes=3,
    steps=6,
    batch_size=60,
    learning_rate=3.0,
    clip=0.5,
    noise=1e-6,
    longest=4.0,
    seed=0,
)


@pytest.fixture
def rows():
    """Rows of three classes, some of them longer than is allowed."""
    source = generator(0, "secure rows")
    centres = 2 * torch.randn(3, 5, generator=source, dtype=torch.float64)
    labels = torch.randint(3, (300,), generator=source)
    return centres[labels] + torch.randn(300, 5, generator=source, dtype=torch.float64), labels


def own_rows(terms, rows, role):
    if role == len(terms.rows):
        return None
    start = sum(terms.rows[:role])
    return tuple(each[start : start + terms.rows[role]] for each in rows)


def trained(terms, rows):
    """The weights of all holders, and what the parties sent and saw."""
    holders = len(terms.rows)
    secrets = [Secret.fresh() for _ in range(holders + 1)]
    with LocalMembers(holders, terms=asdict(terms)) as members:
        found = members.run(
            lambda m: train(m, terms, own_rows(terms, rows, m.role), secrets[m.role])
        )
        return found, members.leaks()


def in_clear(terms, rows, clipped=None):
    """The same without shares and without noise."""
    inputs, truth, _ = prepared(terms, *rows)
    weights = torch.zeros(terms.columns + 1, terms.classes, dtype=torch.float64)
    for step in range(terms.steps):
        batch = terms.batch(step)
        errors = (inputs[batch] @ weights / 4 + 0.5).clamp(0, 1) - truth[batch]
        norms = errors.norm(dim=1, keepdim=True) * inputs[batch].norm(dim=1, keepdim=True)
        factors = (terms.bound / norms).clamp(max=1)
        if clipped is not None:
            clipped.append(float((factors < 1).double().mean()))
        total = inputs[batch].T @ (errors * factors)
        weights -= terms.learning_rate / terms.batch_size * total
    return weights


@pytest.mark.parametrize(
    ("form", "rows_of"), [("permuted", (150, 150)), ("polynomial", (60, 140, 100))]
)
def test_a_training_computes_what_the_plain_one_does(rows, form, rows_of):
    terms = replace(TERMS, form=form, rows=rows_of)
    (*found, dealers), leaks = trained(terms, rows)
    assert dealers is None
    assert all(torch.equal(each, found[0]) for each in found)
    clipped = []
    plain = in_clear(terms, rows, clipped)
    assert 0.2 < np.mean(clipped) < 0.9  # both kinds of rows are there
    # Of the polynomial a clipped gradient is up to 1 % short.
    assert torch.allclose(found[0], plain, rtol=0.01, atol=0.01 if form == "polynomial" else 1e-3)
    inputs = torch.cat([rows[0], torch.ones(300, 1)], 1)
    assert ((inputs @ found[0]).argmax(1) == rows[1]).double().mean() > 0.8
    shown = {leak.observer: leak.what for leak in leaks}
    dealer = f"P{len(rows_of)}"
    assert shown.pop(dealer, None) == ("permuted values" if form == "permuted" else None)
    assert set(shown.values()) == {"result"}


def test_no_gradient_is_longer_than_the_bound(rows):
    """One row at a time, with hardly any noise: a step is its clipped gradient, rounded."""
    one = replace(
        TERMS, rows=(1, 1), steps=1, batch_size=1, learning_rate=1.0, clip=0.05, noise=1e-5
    )
    inputs, labels = rows[0] * 3, rows[1]
    for at in range(0, 12, 2):
        pair = (inputs[at : at + 2], labels[at : at + 2])
        seed = next(s for s in range(99) if replace(one, seed=s).batch(0).tolist() == [0])
        (found, *_), _ = trained(replace(one, seed=seed), pair)
        assert 0.98 * one.clip < float(found.norm()) < one.clip * (1 + 1e-5)


def test_an_empty_batch_is_noise_alone(rows):
    seed = next(s for s in range(99) if not len(replace(TERMS, batch_size=1, seed=s).batch(0)))
    terms = replace(TERMS, batch_size=1, seed=seed, steps=1, noise=2.0)
    (found, *_), _ = trained(terms, rows)
    wanted = terms.learning_rate * terms.clip * 2.0 * 1.5**0.5
    assert found.std() == pytest.approx(wanted, rel=0.6)


def test_the_statement_is_the_accountants():
    stated = replace(TERMS, noise=1.5, steps=100, seed=None).statement(1e-5)
    least = epsilon_by(GaussianSteps(1.5, 100, 60 / 300), 1e-5, "pld")
    assert least < stated.epsilon < 1.2 * least
    assert (stated.unit, stated.adversary) == ("record", "outsider with the model")
    assert any("leave their noise out" in each for each in stated.assumes)


def test_with_public_batches_the_statement_is_of_the_row_in_most_of_them():
    terms = replace(TERMS, noise=1.5, steps=40)
    counts = np.bincount(np.concatenate([terms.batch(step) for step in range(40)]), minlength=300)
    stated = terms.statement(1e-5)
    least = epsilon_by(GaussianSteps(1.5, int(counts.max())), 1e-5, "pld")
    assert counts.max() > 40 * 60 / 300
    assert stated.epsilon == pytest.approx(least, rel=1e-6)
    assert f"no row is in more than {counts.max()}" in stated.assumes[2]
    judged = LocalStart(3, 30, 1.0, 2.0, "best", judge_noise=2.0)
    secret = replace(terms, seed=None)
    assert judged.statement(terms, 1e-5).epsilon > judged.statement(secret, 1e-5).epsilon


def test_without_a_public_seed_batches_come_from_a_key_that_all_parties_agree_on(rows):
    terms = replace(TERMS, seed=None)
    with pytest.raises(PrivacyError, match="a key of the parties"):
        terms.batch(0)
    with pytest.raises(PrivacyError, match="a key of the parties"):
        TERMS.batch(0, Secret.fresh())
    with LocalMembers(3, timeout_s=60) as members:
        drawn = [members.run(lambda m: terms.batch(0, agreed_key(m)).tolist()) for _ in range(2)]
    assert all(one == first for first, *others in drawn for one in others)
    assert drawn[0] != drawn[1]


def test_rows_are_shuffled_alike_and_the_dealer_does_not_know_how(rows, monkeypatch):
    """With all rows in every batch the model is the plain one, whatever their order is."""
    terms = replace(TERMS, seed=None, batch_size=300)
    orders = []
    shuffled = Member.shuffled

    def noted(member, *tensors):
        found = shuffled(member, *tensors)
        orders.append((member.role, [a is b for a, b in zip(tensors, found, strict=True)]))
        return found

    monkeypatch.setattr(Member, "shuffled", noted)
    (found, *_), _ = trained(terms, rows)
    plain = in_clear(replace(terms, seed=0), rows)
    assert torch.allclose(found, plain, rtol=0.01, atol=0.01)
    assert sorted(orders) == [(0, [False] * 3), (1, [False] * 3), (2, [True] * 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"noise": 0.0},
        {"noise": 1e-7},
        {"clip": 1e9},
        {"longest": 40.0},
        {"learning_rate": 1e6},
        {"rows": (5,)},
        {"classes": 1},
        {"rows": (10**6, 10**6), "clip": 500.0, "batch_size": 10**6},
        {"form": "exact"},
        {"batch_size": 1000},
    ],
)
def test_terms_out_of_range(change):
    with pytest.raises(BadOptionError):
        replace(TERMS, **change)


def test_a_clip_below_rounding_is_refused():
    with pytest.raises(PrivacyError, match="rounding"):
        replace(TERMS, clip=1e-6)


ALONE = LocalStart(steps=40, batch_size=60, learning_rate=0.5, noise=1e-6)


@pytest.fixture
def parts(rows):
    """Of two holders; the second one's labels are of other classes than they say."""
    first, second = (tuple(each[half] for each in rows) for half in (slice(150), slice(150, 300)))
    return [first, (second[0], (second[1] + 1) % 3)]


@pytest.fixture
def models(parts):
    """What the holders have after training alone; of fresh batches each, which matter little."""
    return [train_alone(TERMS, ALONE, own, Secret.fresh()) for own in parts]


#: A training of one step that changes nothing to speak of.
STILL = replace(TERMS, steps=1, learning_rate=1e-6)


def is_rather(found, this, others):
    """Whether a model is far nearer to one than to all others; batches are drawn afresh."""
    return 2 * (found - this).norm() < min((found - other).norm() for other in others)


def test_a_training_begins_with_the_average_of_all_models(parts, models):
    found = train_here(STILL, parts, ALONE)
    assert is_rather(found, sum(models) / 2, models)


@pytest.mark.parametrize("judge_noise", [0.0, 0.01])
def test_or_with_the_best_that_nobody_is_told(parts, models, rows, judge_noise):
    """Public rows, and of private ones those of the first holder, say that its model is best."""
    public = (rows[0][200:], rows[1][200:])
    start = replace(ALONE, choice="best", judge_noise=judge_noise, public_rows=100)
    terms = replace(STILL, rows=(150, 30), batch_size=90)
    mine = [parts[0], tuple(each[:30] for each in parts[1])]
    found = train_here(terms, mine, start, public)
    assert is_rather(found, models[0], [models[1], sum(models) / 2])
    with LocalMembers(2) as members:
        secrets = [Secret.fresh() for _ in range(3)]
        own = [*mine, None]
        members.run(lambda m: train(m, terms, own[m.role], secrets[m.role], start, public))
        assert {leak.what for leak in members.leaks()} == {"result"}


def test_what_a_start_costs():
    terms = replace(TERMS, noise=1.5, steps=100)
    alone = replace(ALONE, noise=2.0)
    plain = terms.statement(1e-5).epsilon
    average = alone.statement(terms, 1e-5).epsilon
    public = replace(alone, choice="best", public_rows=5).statement(terms, 1e-5).epsilon
    private = replace(alone, choice="best", judge_noise=3.0).statement(terms, 1e-5).epsilon
    assert plain < average == public < private
    with pytest.raises(PrivacyError, match="choice of the best model"):
        replace(alone, choice="best")
