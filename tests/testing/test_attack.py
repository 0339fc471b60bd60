"""Attacks that break the contract, each found by the test that is there for it."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from vfl.attacks import ATTACKS, Attack, Grant, SentCuts
from vfl.attacks.view import IN_TRAINING
from vfl.core.errors import NonFiniteError, NotGrantedError
from vfl.testing import AttackContract, GradientAttackContract, InputAttackContract

TESTS = [name for name in dir(AttackContract) if name.startswith("test_")]
REFUSED = (AssertionError, NonFiniteError, NotGrantedError, pytest.fail.Exception)


class Means(Attack):
    """A sound attack, which all broken ones are made of: the nearest class mean."""

    needs = frozenset({Grant.CUTS, Grant.LEAKED})

    def run(self, view, draw):
        known, labels = view.leaked.cuts, view.leaked.labels
        means = torch.stack([known[labels == code].mean(0) for code in range(view.classes)])
        return -torch.cdist(view.targets.cuts, means)


class Guessing(Means):
    def run(self, view, draw):
        return torch.rand(super().run(view, draw).shape, generator=draw)


class Clairvoyant(Means):
    """Knows in which order a test asks."""

    def run(self, view, draw):
        rows = super().run(view, draw)
        return torch.eye(view.classes)[torch.arange(15, 15 + len(rows)) % view.classes]


class Codes(Means):
    def run(self, view, draw):
        return super().run(view, draw).argmax(1)


class OneRowLess(Means):
    def run(self, view, draw):
        return super().run(view, draw)[1:]


class Doubles(Means):
    def run(self, view, draw):
        return super().run(view, draw).double()


class NotFinite(Means):
    def run(self, view, draw):
        return super().run(view, draw).index_fill(0, torch.tensor([3]), torch.nan)


class Vague(Means):
    """Names a grant that it has no use for."""

    needs = Means.needs | {Grant.PRIOR}


class Greedy(Means):
    """Uses a grant that it does not name."""

    def run(self, view, draw):
        return super().run(view, draw) * view.prior


class Reading(Means):
    """Looks at labels that it does not ask for, and says nothing of them."""

    needs = frozenset({Grant.CUTS, Grant.UNLABELLED})
    goal = "clusters"

    def run(self, view, draw):
        assert view.unlabelled.rows
        return super().run(view, draw).argmax(1)


class Burglar(Means):
    """Goes around the view."""

    def run(self, view, draw):
        return super().run(view, draw) * view._holdings.prior.sum()


class OfTheGlobalGenerator(Means):
    def run(self, view, draw):
        return super().run(view, draw) + 1e-6 * torch.rand(1)


class OfNumpysGenerator(Means):
    def run(self, view, draw):
        return super().run(view, draw) + 1e-6 * np.random.rand()


class Reseeding(Means):
    """The same each time, and so is whatever comes after it."""

    def run(self, view, draw):
        torch.manual_seed(0)
        return super().run(view, draw)


class Unrepeatable(Means):
    runs = 0

    def run(self, view, draw):
        type(self).runs += 1
        return super().run(view, draw) + self.runs


class Centring(Means):
    def run(self, view, draw):
        view.targets.cuts.sub_(1)
        return super().run(view, draw)


class Tracking(Means):
    def run(self, view, draw):
        view.targets.cuts.requires_grad_()
        return super().run(view, draw).detach()


class ScalingWhatIsKept(Means):
    """The victim computes it once for all attacks."""

    needs = Means.needs | {Grant.INPUTS, Grant.BOTTOM}

    def run(self, view, draw):
        assert view.targets.inputs is not None
        view.targets.before.mul_(2)
        return super().run(view, draw)


class Loading(Means):
    """A sound one: what it imports when it is first run draws of a shared generator."""

    loaded = False

    def run(self, view, draw):
        if not type(self).loaded:
            type(self).loaded = bool(random.random())
        return super().run(view, draw)


@pytest.fixture
def broken(request, monkeypatch):
    monkeypatch.setattr(ATTACKS, "_members", {"broken": request.param})


@pytest.mark.parametrize("test", TESTS)
def test_the_attack_that_all_are_made_of_is_sound(monkeypatch, test):
    monkeypatch.setattr(ATTACKS, "_members", {"means": Means})
    getattr(AttackContract(), test)("means")


def test_the_attack_that_happens_to_run_first_is_no_worse(monkeypatch):
    monkeypatch.setattr(ATTACKS, "_members", {"loading": Loading})
    monkeypatch.setattr(Loading, "loaded", False)
    AttackContract().test_attack_succeeds_on_a_leaking_victim_without_side_effects("loading")


WINS = "attack_succeeds_on_a_leaking_victim_without_side_effects"
GUESS = "attack_only_guesses_if_nothing_leaks"
BROKEN = [
    (Guessing, WINS, "accuracy 0"),
    (Clairvoyant, GUESS, "it beats its guess"),
    (Codes, WINS, "a guess has an unexpected shape"),
    (OneRowLess, WINS, "a guess has an unexpected shape"),
    (Doubles, WINS, "a guess has an unexpected type"),
    (NotFinite, WINS, "holds NaN"),
    (Vague, "every_declared_grant_is_used", "DID NOT RAISE"),
    (Greedy, WINS, "not granted"),
    (Reading, WINS, "not granted"),
    (Burglar, WINS, "evidence that the attack was not granted changes its guess"),
    (OfTheGlobalGenerator, WINS, "changed: torch"),
    (OfNumpysGenerator, WINS, "changed: numpy"),
    (Reseeding, WINS, "changed: torch"),
    (Unrepeatable, WINS, "not repeatable"),
    (Centring, WINS, r"in place: .*targets\.cuts"),
    (Tracking, WINS, r"in place: .*targets\.cuts"),
    (ScalingWhatIsKept, WINS, r"in place: .*before"),
]


def test_every_test_of_the_contract_finds_something():
    assert {f"test_{test}" for _, test, _ in BROKEN} == set(TESTS)


@pytest.mark.parametrize(("broken", "test", "why"), BROKEN, indirect=["broken"])
def test_the_contract_finds_an_attack_that_breaks_it(broken, test, why):
    with pytest.raises(REFUSED, match=why):
        getattr(AttackContract(), f"test_{test}")("broken")


class Silencing(Attack):
    """Turns the recorded gradients into directions, for everybody after it too."""

    needs = frozenset({Grant.GRADIENTS})

    def run(self, view, draw):
        for one in view.exchanges:
            one.gradients.div_(one.gradients.norm())
        return torch.zeros(view.targets.rows, view.classes)


class Rescaling(Attack):
    """Standardises the columns that leaked where they are."""

    goal = "inputs"
    needs = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS})

    def run(self, view, draw):
        mean = view.leaked.inputs.mean(0)
        view.leaked.inputs.sub_(mean)
        return mean.expand(len(view.targets.cuts), *mean.shape)


class Labelled(Rescaling):
    """Takes the mean of the true class's rows, and does not ask for the labels of either."""

    def run(self, view, draw):
        known, labels = view.leaked.inputs, view._holdings.leaked.labels
        means = torch.stack([known[labels == code].mean(0) for code in range(view.classes)])
        return means[view._holdings.targets.labels]


def loses(contract, score):
    """For what wins nothing, so that the clauses behind its score are reached."""


@pytest.mark.parametrize(
    ("broken", "contract", "test", "why"),
    [
        (Silencing, GradientAttackContract, WINS, "gradients"),
        (Rescaling, InputAttackContract, WINS, r"leaked\.inputs"),
        (Labelled, InputAttackContract, WINS, "evidence that the attack was not granted|index"),
        (Labelled, InputAttackContract, GUESS, "it beats its guess"),
    ],
    indirect=["broken"],
)
def test_contracts_of_other_views_find_it_too(monkeypatch, broken, contract, test, why):
    monkeypatch.setattr(contract, "require_win", loses)
    with pytest.raises(REFUSED, match=why):
        getattr(contract(), f"test_{test}")("broken")


@pytest.mark.parametrize("broken", [Rescaling], indirect=True)
def test_inputs_that_are_no_better_than_the_mean_do_not_win(broken):
    with pytest.raises(AssertionError, match=r"\d of \d"):
        getattr(InputAttackContract(), f"test_{WINS}")("broken")


class AskedAgainWithPartner(AttackContract):
    """The attacker sent every cut twice, and another party tells it all it has."""

    def case(self, leaking, grants):
        everything = frozenset(Grant) - IN_TRAINING
        base, partner = (super(type(self), self).case(leaking, everything) for _ in range(2))
        own = base.view._holdings.targets
        rows = torch.arange(len(own.cuts))
        sent = [SentCuts(time, time, rows, own.cuts.clone()) for time in (1, 2)]
        held = replace(own, sent=lambda: sent)
        view = base.view.instead(targets=held, partners=[partner.view])
        return replace(base, view=view.only(grants))


class WithPartner(Means):
    """A sound one: the nearest class mean by two parties."""

    needs = Means.needs | {Grant.PARTNERS}

    def run(self, view, draw):
        return sum(Means.run(self, one, draw) for one in (view, *view.partners))


class OfTwo(Means):
    """A sound one: the nearest class mean of cuts that were sent twice."""

    needs = Means.needs | {Grant.QUERIES}

    def run(self, view, draw):
        first, second = view.targets.sent
        return Means.run(self, view.with_cuts({"targets": (first.cuts + second.cuts) / 2}), draw)


class Emptying(OfTwo):
    def run(self, view, draw):
        found = super().run(view, draw)
        for one in view.targets.sent:
            one.cuts.zero_()
        return found


class EmptyingPartners(WithPartner):
    def run(self, view, draw):
        found = super().run(view, draw)
        view.partners[0].targets.cuts.zero_()
        return found


class RobbingPartners(WithPartner):
    def run(self, view, draw):
        return super().run(view, draw) + (view.partners[0]._holdings.bottom is None)


@pytest.mark.parametrize("broken", [WithPartner, OfTwo], indirect=True)
@pytest.mark.parametrize("test", TESTS)
def test_sound_attacks_on_what_others_hold_and_hear_pass(broken, test):
    getattr(AskedAgainWithPartner(), test)("broken")


@pytest.mark.parametrize(
    ("broken", "test", "why"),
    [
        (Emptying, WINS, r"sent\[1\]\.cuts"),
        (EmptyingPartners, WINS, r"partners\[0\]\.targets\.cuts"),
        (RobbingPartners, WINS, "evidence that the attack was not granted"),
    ],
    indirect=["broken"],
)
def test_what_others_hold_and_hear_is_guarded_too(broken, test, why):
    with pytest.raises(AssertionError, match=why):
        getattr(AskedAgainWithPartner(), f"test_{test}")("broken")


def test_a_contract_without_specs_is_an_error():
    class TestNothing(AttackContract):
        pass

    with pytest.raises(ValueError, match="names no attack"):
        TestNothing().pytest_generate_tests(None)
