"""Clipping, noise and averaging of a horizontal training, against loops and closed forms."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from horizontal_party import SMALL
from torch import nn

from vfl.core.errors import ConfigError, PeerFailedError, PrivacyError
from vfl.core.seeds import Secret
from vfl.horizontal import (
    Averager,
    ClientState,
    ClientTrainer,
    NoisePlan,
    Update,
    add_noise,
    most_rounds,
    participants,
    plan_noise,
    simulate,
)
from vfl.horizontal.client import build_model, flat, layers_of
from vfl.horizontal.plan import classic_multiplier, update_sensitivity
from vfl.horizontal.settings import HorizontalSettings, HorizontalStudy, read_horizontal
from vfl.horizontal.study import train_study
from vfl.privacy.accountants import GaussianSteps, epsilon_of, gaussian_epsilon
from vfl.privacy.dpsgd import RowClipper

NO_DP = {"clip": "none", "noise": "none"}


def settings(**changed):
    return HorizontalSettings(**SMALL | changed)


def rows(count=20, width=5, classes=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, width, generator=draw)
    return inputs, torch.randint(classes, (count,), generator=draw)


def first_layers(model):
    return {number: flat(one) for number, one in enumerate(layers_of(model))}


# --- what one record can change -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paper", "rigorous"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_records_worst_case_is_within_the_rigorous_bound_alone(kind, steps):
    """A loss whose gradients all turn round once the weight has passed a point.

    Full batches of b rows; row 0 is replaced. The worst case is built, not drawn: each row pulls
    its one weight up by the clip norm, until the weight is beyond a place that only row 0's other
    value reaches in the first step; then each pulls down.
    """
    norm, rate, batch = 1.0, 0.1, 10

    def trained(first):
        weight = 0.0
        place = rate * norm * (batch - 0.5) / batch  # between what the two data sets reach
        for step in range(steps):
            pulls = [first if step == 0 else norm, *[norm] * (batch - 1)]
            beyond = step > 0 and weight > place * (1 if step == 1 else 0)
            weight += rate * sum(pulls) / batch * (-1 if beyond and first > 0 else 1)
        return weight

    moved = abs(trained(norm) - trained(-norm))
    bound = update_sensitivity([norm] * steps, rate, batch, kind)
    assert (moved <= bound + 1e-12) == (kind == "rigorous" or steps == 1)


def test_the_papers_noise_is_its_formula():
    asked = settings(epsilon=0.5, delta=1e-5, rounds=50, local_steps=5, batch_size=1000)
    plan = plan_noise(asked, rows=1000)
    sigma = math.sqrt(2 * math.log(1.25 / (1e-5 / 50))) / (0.5 / 50)
    assert plan.multiplier == pytest.approx(sigma)
    claim, proof = plan.statements
    assert (claim.epsilon, claim.unit, claim.relation) == (0.5, "record", "replace")
    assert any("proven for one local step alone" in one for one in claim.assumes)
    assert any("percentiles" in one for one in claim.assumes + proof.assumes)
    assert proof.epsilon > 10 * claim.epsilon


def test_with_one_local_step_the_proven_epsilon_is_below_the_claimed_one():
    """Exact composition beats basic composition where the sensitivity is right."""
    asked = settings(epsilon=0.5, rounds=50, local_steps=1, clip="fixed")
    claim, proof = plan_noise(asked, rows=100).statements
    assert proof.epsilon < claim.epsilon
    assert claim.assumes == proof.assumes == ("a person has one record at one client",)


@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("rounds", [2, 10, 50])
def test_the_proven_epsilon_is_of_all_rounds_that_a_client_takes_part_in(rounds, local_steps):
    """T Gaussian releases of one deviation are one with it divided by sqrt(T)."""
    asked = settings(epsilon=0.5, rounds=rounds, local_steps=local_steps, batch_size=100)
    taken = Counter(one for number in range(1, rounds + 1) for one in participants(asked, number))
    plan = plan_noise(asked, rows=100)
    moved = (1 / 100 + (local_steps - 1)) / (local_steps / 100)  # rigorous over the paper's
    once = plan.multiplier / moved
    expected = gaussian_epsilon(once / math.sqrt(max(taken.values())), 1.0, asked.delta)
    assert plan.statements[1].epsilon == pytest.approx(expected)


@pytest.mark.parametrize("clip", ["fixed", "quantile"])
@pytest.mark.parametrize("noise", ["client", "steps", "server"])
def test_the_noise_is_paid_for_by_every_release_there_is(noise, clip):
    """Counted anew: a client's rounds, each of its local steps, or all rounds of the server."""
    asked = settings(epsilon=2.0, noise=noise, sensitivity="rigorous", clip=clip, rounds=7)
    plan = plan_noise(asked, rows=100)
    released = plan.multiplier**-2 + (plan.counts**-2 if clip == "quantile" else 0)
    taken = Counter(one for number in range(1, 8) for one in participants(asked, number))
    rate, steps = {
        "client": (1.0, max(taken.values())),
        "steps": (16 / 100, max(taken.values()) * 2),
        "server": (3 / 6, 7),
    }[noise]
    (statement,) = plan.statements
    spent = epsilon_of(GaussianSteps(released**-0.5, steps, rate), asked.delta)
    assert spent == pytest.approx(statement.epsilon, rel=1e-4)
    assert 1.9 < spent <= 2.0 * (1 + 1e-6)
    who = {"server": ("client", "outsider with the model")}
    assert (statement.unit, statement.adversary) == who.get(noise, ("record", "partner"))


def test_the_classic_formula_is_not_used_above_one():
    above = classic_multiplier(epsilon=4.0, delta=1e-5, rounds=1)
    assert gaussian_epsilon(above, 1.0, 1e-5) <= 4.0 + 1e-6


def test_clients_of_a_round_are_public_and_counted():
    asked = settings(epsilon=1.0, rounds=40)
    taken = [participants(asked, number) for number in range(1, 41)]
    assert all(len(set(one)) == 3 for one in taken)
    counts = np.bincount(np.concatenate(taken), minlength=6)
    assert counts.min() > 0
    assert most_rounds(asked) == counts.max() < 40
    secret = settings(epsilon=1.0, rounds=40, noise="server", clip="fixed")
    assert most_rounds(secret) == 40  # no party can compute which clients the server draws


# --- a client -----------------------------------------------------------------------------------


def one_row_at_a_time(model, inputs, labels):
    weights = list(model.parameters())
    found = []
    for row in range(len(labels)):
        loss = F.cross_entropy(model(inputs[row : row + 1]), labels[row : row + 1])
        grads = torch.autograd.grad(loss, weights)
        found.append(torch.cat([one.reshape(-1) for one in grads]))
    return torch.stack(found)


class Odd(nn.Module):
    """A layer with weights that no rule knows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, rows):
        return rows * self.scale


@pytest.mark.parametrize("odd", [False, True])
def test_norms_of_rows_are_those_of_a_loop(odd):
    inputs, labels = rows()
    model = nn.Sequential(Odd() if odd else nn.Identity(), nn.Linear(5, 4), nn.ReLU())
    model.append(nn.Linear(4, 3))
    clipper = RowClipper(model, 1.0)
    with clipper.recording() as calls:
        output = model(inputs)
    loss = F.cross_entropy(output, labels, reduction="sum")
    (grad,) = torch.autograd.grad(loss, [output], retain_graph=True)
    (found,) = clipper.row_norms(output, grad, list(model.parameters()), calls)
    expected = one_row_at_a_time(model, inputs, labels).double().norm(dim=1)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("percentile", [0, 30, 100])
def test_a_percentile_step_is_that_of_a_loop(percentile):
    inputs, labels = rows()
    asked = settings(epsilon=1.0, percentile=percentile, batch_size=20, local_steps=2)
    trainer = ClientTrainer(asked, NoisePlan(), inputs, labels, 3)
    model = build_model(asked, (5,), 3)
    update, state = trainer.update(
        first_layers(model), ClientState(), 1, Secret.of_simulation(0, "a")
    )
    seen = np.zeros(0, np.float32)
    for _ in range(2):
        each = one_row_at_a_time(model, inputs, labels)
        norms = each.norm(dim=1)
        seen = np.concatenate([seen, norms.numpy()])
        norm = np.percentile(seen, percentile)
        mean = (each * (norm / norms).clamp(max=1)[:, None]).mean(0)
        with torch.no_grad():
            parts = torch.split(mean, [one.numel() for one in model.parameters()])
            for weight, part in zip(model.parameters(), parts, strict=True):
                weight -= asked.learning_rate * part.view_as(weight)
    fresh = first_layers(build_model(asked, (5,), 3))
    for number, layer in first_layers(model).items():
        assert torch.allclose(update.layers[number], layer - fresh[number], atol=1e-5)
    assert np.allclose(np.sort(state.norms), np.sort(seen), atol=1e-5)
    if percentile == 100:  # nothing is clipped
        plain = ClientTrainer(settings(**NO_DP, batch_size=20), NoisePlan(), inputs, labels, 3)
        same, _ = plain.update(fresh, ClientState(), 1, Secret.of_simulation(0, "a"))
        for number in fresh:
            assert torch.allclose(same.layers[number], update.layers[number], atol=1e-5)


@pytest.mark.parametrize("kind", ["paper", "rigorous"])
def test_what_leaves_a_client_has_the_noise_of_its_formula(kind):
    inputs, labels = rows(count=40)
    asked = settings(
        model="mlp:hidden=2000", epsilon=1.0, clip="fixed", sensitivity=kind, clip_norm=0.3
    )
    plan = plan_noise(asked, 40)
    trainer = ClientTrainer(asked, plan, inputs, labels, 3)
    secret = Secret.fresh()
    layers = first_layers(trainer.model)
    update, _ = trainer.update(layers, ClientState(), 1, secret)
    eta, steps, batch = asked.learning_rate, asked.local_steps, asked.batch_size
    moved = {
        "paper": 2 * eta * steps * 0.3 / batch,
        "rigorous": 2 * eta * 0.3 / batch + 2 * eta * 0.3 * (steps - 1),
    }[kind]
    assert update.deviation == pytest.approx(plan.multiplier * moved)
    noisy = add_noise(update, secret, 1)
    noise = noisy.layers[0] - update.layers[0]
    assert float(noise.std()) == pytest.approx(update.deviation, rel=0.03)
    assert noisy.deviation == 0
    assert torch.equal(noisy.layers[0], add_noise(update, secret, 1).layers[0])
    other = replace(update, layers={**update.layers, 0: update.layers[0] + 1e-3})
    assert not torch.allclose(add_noise(other, secret, 1).layers[0] - other.layers[0], noise)


def test_noise_in_every_step_is_there_without_rows():
    """A Poisson batch may be empty; its step is noise alone, or its emptiness would show."""
    inputs, labels = rows(count=2000)
    asked = settings(
        model="mlp:hidden=2000", epsilon=1.0, clip="fixed", noise="steps", batch_size=1,
        local_steps=1, sensitivity="rigorous",
    )  # fmt: skip
    trainer = ClientTrainer(asked, NoisePlan(2.0), inputs, labels, 3)
    layers, sizes = first_layers(trainer.model), set()
    for number in range(12):
        secret = Secret.of_simulation(number, "a")
        sizes.add(len(next(trainer._batches(1, secret))))
        update, _ = trainer.update(layers, ClientState(), 1, secret)
        deviation = asked.learning_rate * 2.0 * asked.clip_norm / asked.batch_size
        assert float(update.layers[0].std()) == pytest.approx(deviation, rel=0.05)
    assert 0 in sizes
    assert len(sizes) > 2


def test_a_private_quantile_follows_the_rows_norms():
    inputs, labels = rows(count=200)
    asked = settings(
        epsilon=1.0, clip="quantile", noise="steps", sensitivity="rigorous", percentile=60,
        batch_size=200, local_steps=60, learning_rate=1e-6,
    )  # fmt: skip
    trainer = ClientTrainer(asked, NoisePlan(1e-9, 1e-9), inputs, labels, 3)
    model = build_model(asked, (5,), 3)
    norms = one_row_at_a_time(model, inputs, labels).norm(dim=1)
    _, state = trainer.update(first_layers(model), ClientState(), 1, Secret.fresh())
    assert state.norm == pytest.approx(float(norms.quantile(0.6)), rel=0.1)


def test_a_model_whose_rows_depend_on_each_other_is_refused():
    inputs, labels = rows()
    asked = settings(epsilon=1.0, model="mlp:hidden=8,batch_norm=yes")
    with pytest.raises(PrivacyError, match="BatchNorm"):
        ClientTrainer(asked, NoisePlan(), inputs, labels, 3)


def test_of_layers_the_most_changed_ones_travel():
    inputs, labels = rows()
    asked = settings(**NO_DP, layers=0.5, learning_rate=0.5)
    trainer = ClientTrainer(asked, NoisePlan(), inputs, labels, 3)
    layers = first_layers(trainer.model)
    update, _ = trainer.update(layers, ClientState(), 1, Secret.fresh())
    whole = ClientTrainer(settings(**NO_DP, learning_rate=0.5), NoisePlan(), inputs, labels, 3)
    every, _ = whole.update(layers, ClientState(), 1, Secret.fresh())
    (sent,) = update.layers
    alike = [
        np.corrcoef(layers[number], layers[number] + every.layers[number])[0, 1]
        for number in layers
    ]
    assert sent == int(np.argmin(alike))


# --- the server ---------------------------------------------------------------------------------


def test_federated_averaging_is_that_of_a_loop():
    """McMahan et al. 2017, algorithm 1, with every client and full batches: one gradient step."""
    asked = settings(**NO_DP, sampled=6, rounds=1, local_steps=1, batch_size=100_000)
    outcome = simulate(asked)
    from vfl.horizontal.simulation import shared_rows

    data = shared_rows(asked)
    model = build_model(asked, tuple(data.inputs.shape[1:]), data.outputs)
    grads = []
    for own in data.train:
        loss = F.cross_entropy(model(data.inputs[own]), data.labels[own])
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for weight, *each in zip(model.parameters(), *grads, strict=True):
        weight.data -= asked.learning_rate * sum(each) / 6
    for number, layer in first_layers(model).items():
        assert torch.allclose(outcome.layers[number], layer, atol=1e-6)
    with torch.no_grad():
        right = model(data.inputs[data.test]).argmax(1) == data.labels[data.test]
    assert outcome.tests[-1]["accuracy"] == pytest.approx(float(right.float().mean()))


def averager(plan=None, **changed):
    asked = settings(
        epsilon=8.0, noise="server", sensitivity="rigorous", clip="quantile", **changed
    )
    return Averager(asked, plan or NoisePlan(), nn.Linear(2, 2), Secret.fresh())


def norms_of_clients(count, seed=0):
    """Log-normal around a median of 1, as in Andrew et al. 2021."""
    return np.exp(np.random.default_rng(seed).normal(size=count))


@pytest.mark.parametrize(("start", "percentile"), [(0.1, 50), (3.0, 30), (1.0, 80)])
def test_the_clip_norm_converges_to_the_quantile(start, percentile):
    norms = norms_of_clients(100)
    server = averager(
        NoisePlan(0.0, counts=1.0), clients=100, sampled=100, clip_norm=start, percentile=percentile
    )
    seen = []
    for number in range(200):
        within = [int(one <= server.norm) for one in norms]
        server._follow(within, number)
        seen.append(server.norm)
    assert np.mean(seen[100:]) == pytest.approx(np.quantile(norms, percentile / 100), rel=0.1)


def test_a_server_never_follows_a_count_without_noise():
    server = averager(NoisePlan(1.0, counts=0.0), clients=100, sampled=100)
    with pytest.raises(ValueError, match=r"positive|domain"):
        server._follow([1], 1)


def test_a_norm_never_moves_by_more_than_noise_may():
    server, norms = averager(NoisePlan(0.0, counts=1e9), clients=100, sampled=100), [1.0]
    for number in range(20):
        norms.append(server.norm)
        server._follow([1], number)
    assert np.abs(np.diff(np.log(norms))).max() <= 0.2 * 1.5 + 1e-9


def test_the_server_adds_its_noise_to_the_sum():
    plan = plan_noise(
        settings(epsilon=2.0, noise="server", sensitivity="rigorous", clip="fixed"), 10
    )
    asked = settings(epsilon=2.0, noise="server", sensitivity="rigorous", clip="fixed")
    model = nn.Linear(300, 300)
    server = Averager(asked, plan, model, Secret.fresh())
    before = server.layers[0].clone()
    server.absorb([], 1)  # nobody came, which must not show
    moved = server.layers[0] - before
    expected = plan.multiplier * asked.clip_norm / asked.sampled
    assert float(moved.std()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "layers",
    [{0: torch.full((6,), math.nan)}, {0: torch.zeros(5)}, {7: torch.zeros(6)}, {}],
    ids=["not finite", "another size", "no such layer", "nothing"],
)
def test_an_update_that_does_not_fit_is_refused(layers):
    with pytest.raises(PeerFailedError, match="does not fit"):
        averager().absorb([Update(layers)], 1)


def test_clients_come_by_themselves_where_the_server_adds_noise():
    server = averager(clients=1000, sampled=100)
    counts = [len(server.participants(number)) for number in range(50)]
    assert np.mean(counts) == pytest.approx(100, rel=0.1)
    assert np.var(counts) == pytest.approx(90, rel=0.7)


# --- settings, and a study that goes on ---------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"epsilon": None}, "needs epsilon"),
        ({"noise": "none"}, "guarantees no epsilon"),
        ({"clip": "none"}, "needs a clip"),
        ({"sensitivity": "rigorous"}, "clip = 'quantile', its private form"),
        ({"noise": "server"}, "clip = 'quantile', its private form"),
        ({"clip": "quantile"}, "needs sensitivity = 'rigorous'"),
        ({"sampled": 51}, "sampled = 51 is above clients = 50"),
        ({"noise": "steps", "clip": "fixed", "layers": 0.5}, "layers below 1"),
        ({"clip": "quantile", "sensitivity": "rigorous", "percentile": 0}, "above 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_the_reason(changed, told):
    study = HorizontalStudy(variants={"odd": {"epsilon": 1.0} | changed})
    if changed.get("epsilon", 0) is None:
        study = HorizontalStudy(variants={"odd": {"epsilon": "unset"}})
    with pytest.raises(ConfigError, match=told):
        study.trainings()


def test_a_study_trains_every_combination_once_and_goes_on(tmp_path):
    study = HorizontalStudy(
        horizontal=settings(epsilon=1.0, rounds=1, name="small"),
        variants={"private": {}, "plain": NO_DP | {"epsilon": "unset"}},
        sweep={"seed": [0, 1]},
    )
    done = train_study(study, tmp_path)
    titles = ["private seed=0", "private seed=1", "plain seed=0", "plain seed=1"]
    assert [one.title for one in done] == titles
    (first, *_) = files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 4
    first.unlink()
    stamps = {one: one.stat().st_mtime_ns for one in files[1:]}
    again = train_study(study, tmp_path)
    assert {one: one.stat().st_mtime_ns for one in files[1:]} == stamps
    accuracies = [[one.record["accuracy"] for one in each] for each in (done, again)]
    assert accuracies[0] == accuracies[1]
    told = json.loads(first.read_text())
    assert {"accuracy", "loss", "tests", "privacy", "seconds", "settings"} <= set(told)


def test_the_example_names_trainings_that_all_learn():
    """Each variant of the example, small and on digits; none is private enough to be blind."""
    small = ["source=digits", "clients=4", "sampled=4", "rounds=6", "batch_size=200",
             "learning_rate=0.3", "local_steps=5"]  # fmt: skip
    path = Path(__file__).parents[2] / "examples" / "horizontal.toml"
    study = read_horizontal(path, [f"horizontal.{one}" for one in small])
    trainings = dict(study.trainings())
    assert {"adp_fl", "fedavg", "dp_fl", "layer_based", "cdp_fl", "andrew", "dp_sgd"} == set(
        trainings
    )
    accuracies = {}
    for title, asked in trainings.items():
        budget = {} if asked.noise == "none" else {"epsilon": 10_000.0}
        accuracies[title] = simulate(asked.model_copy(update=budget)).tests[-1]["accuracy"]
    assert min(accuracies.values()) > 0.5, accuracies
