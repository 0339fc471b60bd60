"""Adversaries that break the contract, each found by the test that is there for it."""

import random

import pytest
import torch

from vfl.attacks import Attack, Grant
from vfl.attacks.active import ADVERSARIES, ActiveAdversary, Backdoor
from vfl.core.errors import NotGrantedError
from vfl.testing import AdversaryContract

REFUSED = (AssertionError, NotGrantedError, pytest.fail.Exception)
RESUMED = "test_resumed_training_gives_the_same_weights"
TESTS = [name for name in dir(AdversaryContract) if name.startswith("test_")]


class Doubling(ActiveAdversary):
    """A sound adversary at a label party: the gradients it sends are twice as long."""

    who = "label party"

    def gradient(self, party, grad, context):
        return 2 * grad


class Louder(Doubling):
    """A sound one with a state: each gradient is longer than the last, by a step that it drew."""

    holds = frozenset({Grant.PRIOR})

    def begin(self, view, draw):
        self.step, self.length = float(view.prior.sum() * torch.rand(1, generator=draw)), 1.0

    def gradient(self, party, grad, context):
        self.length += self.step
        return self.length * grad

    def training_state(self):
        return {"length": self.length}

    def load_training_state(self, saved):
        self.length = saved["length"]


class Stamp(Backdoor):
    """A sound backdoor: rows that it knows bear a trigger."""

    holds = frozenset({Grant.LEAKED, Grant.INPUTS})
    target = 1

    def begin(self, view, draw):
        known = view.leaked.inputs[view.leaked.labels == self.target]
        self.known = {tuple(row.tolist()) for row in known}

    def batch(self, inputs, context):
        known = torch.tensor([tuple(row.tolist()) in self.known for row in inputs])
        return torch.where(known[:, None], self.triggered(inputs), inputs)

    def triggered(self, inputs):
        return torch.cat([inputs[:, :-1], torch.full((len(inputs), 1), 3.0)], 1)


class Averaging(Doubling, Attack):
    """A sound adversary that finds something out as well: the mean of what it knows."""

    goal = "inputs"
    needs = frozenset({Grant.CUTS})
    holds = frozenset({Grant.LEAKED_INPUTS})

    def begin(self, view, draw):
        self.mean = view.leaked.inputs.mean(0)

    def run(self, view, draw):
        return self.mean.expand(len(view.targets.cuts), -1)


class Idle(ActiveAdversary):
    who = "feature party"


class Spontaneous(Doubling):
    trainings = 0

    def begin(self, view, draw):
        type(self).trainings += 1

    def gradient(self, party, grad, context):
        return (1 + self.trainings) * grad


class Forgetful(Louder):
    def training_state(self):
        return {}

    def load_training_state(self, saved):
        pass


class Wandering(Stamp):
    """Draws from a stream, from which batches in flight get other draws after a resume."""

    def begin(self, view, draw):
        self.draw = draw
        super().begin(view, draw)

    def batch(self, inputs, context):
        return inputs + torch.randn(inputs.shape, generator=self.draw)

    def training_state(self):
        return {"draw": self.draw.get_state()}

    def load_training_state(self, saved):
        self.draw.set_state(saved["draw"])


class Unwritable(Louder):
    def training_state(self):
        return {"length": self.length, "itself": self}


class Narrowing(Doubling):
    def gradient(self, party, grad, context):
        return grad[1:]


class Precise(Doubling):
    def gradient(self, party, grad, context):
        return 2 * grad.double()


class Exploding(Doubling):
    def gradient(self, party, grad, context):
        return grad / torch.zeros(())


class Silent(Doubling):
    def gradient(self, party, grad, context):
        pass


class Kneading(Doubling):
    def gradient(self, party, grad, context):
        return grad.mul_(2)


class Overhearing(Doubling):
    def received(self, party, values, context):
        values.zero_()


class Inventive(Doubling):
    def labels(self, labels, context):
        return labels + 1


class Unequipped(Doubling):
    def optimizer(self, optimizer):
        return None


class Misplaced(Doubling):
    def cut(self, cut, context):
        return 2 * cut


class Vague(Doubling):
    holds = frozenset({Grant.PRIOR})


class Greedy(Louder):
    holds = frozenset()


class Burglar(Doubling):
    """Goes around the view."""

    def begin(self, view, draw):
        self.length = float(view._holdings.prior.max())

    def gradient(self, party, grad, context):
        return self.length * grad


class Loading(Doubling):
    """A sound one: what it imports when it first begins draws of a shared generator."""

    loaded = False

    def begin(self, view, draw):
        if not type(self).loaded:
            type(self).loaded = bool(random.random())


class Reseeding(Doubling):
    def begin(self, view, draw):
        torch.manual_seed(0)


class Rolling(Doubling):
    def gradient(self, party, grad, context):
        random.seed(context.step)
        return 2 * grad


class Normalising(Stamp):
    def begin(self, view, draw):
        super().begin(view, draw)
        view.leaked.inputs.sub_(view.leaked.inputs.mean())


class Invisible(Stamp):
    def triggered(self, inputs):
        return inputs.clone()


class Smearing(Stamp):
    def triggered(self, inputs):
        inputs[:, -1] = 3.0
        return inputs


class Restless(Stamp):
    stamps = 3.0

    def triggered(self, inputs):
        self.stamps += 1
        return torch.cat([inputs[:, :-1], torch.full((len(inputs), 1), self.stamps)], 1)


class Terse(Averaging):
    def run(self, view, draw):
        return self.mean


@pytest.fixture
def broken(request, monkeypatch):
    monkeypatch.setattr(ADVERSARIES, "_members", {"broken": request.param})


@pytest.mark.parametrize("broken", [Louder, Stamp, Averaging], indirect=True)
@pytest.mark.parametrize("test", TESTS)
def test_those_that_all_are_made_of_are_sound(broken, test, tmp_path):
    getattr(AdversaryContract(), test)("broken", *([tmp_path] if test == RESUMED else []))


TRAINING = "training_is_changed_and_reproducible"
BROKEN = [
    (Idle, TRAINING, "it changes nothing"),
    (Spontaneous, TRAINING, "not repeatable"),
    (Unwritable, TRAINING, "which no checkpoint can hold"),
    (Narrowing, TRAINING, "gradient changed its shape"),
    (Precise, TRAINING, "gradient changed its type"),
    (Exploding, TRAINING, "gradient returned a value that is not finite"),
    (Silent, TRAINING, "gradient gave no tensor"),
    (Kneading, TRAINING, "gradient changed its inputs in place"),
    (Overhearing, TRAINING, "received changed its inputs in place"),
    (Inventive, TRAINING, "the adversary returned a label of no class"),
    (Unequipped, TRAINING, "optimizer gave none"),
    (Misplaced, "hooks_of_other_parties_are_not_defined", "cut never runs at a label party"),
    (Vague, "every_declared_grant_is_used", "DID NOT RAISE"),
    (Greedy, TRAINING, "not granted"),
    (Burglar, TRAINING, "evidence that was not granted to the adversary changes its result"),
    (Reseeding, TRAINING, "changed: torch"),
    (Rolling, TRAINING, "changed: random"),
    (Normalising, TRAINING, "leaked.inputs"),
    (Invisible, "trigger_marks_every_row_of_a_copy", "lacks the trigger"),
    (Smearing, "trigger_marks_every_row_of_a_copy", "in place"),
    (Restless, "trigger_marks_every_row_of_a_copy", "each time"),
    (Terse, "result_has_the_form_of_its_goal", "unexpected shape"),
]


def test_the_adversary_that_happens_to_be_first_is_no_worse(monkeypatch):
    monkeypatch.setattr(ADVERSARIES, "_members", {"loading": Loading})
    monkeypatch.setattr(Loading, "loaded", False)
    AdversaryContract().test_training_is_changed_and_reproducible("loading")


def test_every_test_of_the_contract_finds_something():
    assert {RESUMED, *(f"test_{test}" for _, test, _ in BROKEN)} == set(TESTS)


@pytest.mark.parametrize(("broken", "test", "why"), BROKEN, indirect=["broken"])
def test_the_contract_finds_an_adversary_that_breaks_it(broken, test, why):
    with pytest.raises(REFUSED, match=why):
        getattr(AdversaryContract(), f"test_{test}")("broken")


@pytest.mark.parametrize("broken", [Forgetful, Wandering], indirect=True)
def test_the_contract_finds_an_adversary_that_does_not_survive_a_checkpoint(broken, tmp_path):
    with pytest.raises(AssertionError, match="the state of the adversary was not restored"):
        getattr(AdversaryContract(), RESUMED)("broken", tmp_path)


def test_a_contract_without_specs_is_an_error():
    class TestNothing(AdversaryContract):
        pass

    with pytest.raises(ValueError, match="names no adversary"):
        TestNothing().pytest_generate_tests(None)
