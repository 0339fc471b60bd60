"""SplitGuard in real trainings: an honest label party passes, one that hijacks is found."""

import math

import pytest
import torch
from leaking import trained
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from vfl.compression import StepContext
from vfl.core.errors import HijackError
from vfl.core.seeds import Secret, generator, scoped
from vfl.datasets import Dealing, load_bundled
from vfl.defenses import make
from vfl.defenses.split_guard import score
from vfl.session import Adversary

BANK, SHOP = (Secret.of_simulation(0, name) for name in ("bank", "shop"))
GUARD = "split_guard:start=40,share=0.2,checks=6"


class Hijacker(Adversary):
    """Feature-space hijacking: a discriminator steers cuts towards points of the label party's."""

    def __init__(self, width=16):
        with scoped(5):
            self.aim = torch.randn(64, width) + 1
            layers = nn.Linear(width, 32), nn.LeakyReLU(), nn.Linear(32, 1)
            self.judge = nn.Sequential(*layers)
        self.optimizer_of_judge = torch.optim.Adam(self.judge.parameters(), 1e-3)
        self.cuts = {}

    def received(self, party, values, context):
        self.cuts[party] = values

    def gradient(self, party, grad, context):
        cut = self.cuts[party].clone().requires_grad_()
        rows = len(cut)
        real = binary_cross_entropy_with_logits(self.judge(self.aim), torch.ones(64, 1))
        fake = binary_cross_entropy_with_logits(self.judge(cut.detach()), torch.zeros(rows, 1))
        self.optimizer_of_judge.zero_grad()
        (real + fake).backward()
        self.optimizer_of_judge.step()
        wished = binary_cross_entropy_with_logits(self.judge(cut), torch.ones(rows, 1))
        return torch.autograd.grad(wished, cut)[0]


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=1000), flatten=True)


def test_an_honest_label_party_is_left_alone_and_learned_from(data):
    session = trained(data, GUARD, epochs=12)
    scores = [client.end.state_dict()["defense/scores"] for client in session.clients]
    assert [len(found) for found in scores] == [6, 6]
    assert min(float(found.mean()) for found in scores) > 0.9
    plain = trained(data, "none", epochs=12)
    kept, lost = (one.label.history[-1]["test_accuracy"] for one in (session, plain))
    assert kept > lost - 0.03


def test_a_hijacker_is_found(data):
    with pytest.raises(HijackError) as caught:
        trained(data, GUARD, epochs=12, adversaries={"label": Hijacker()})
    assert caught.value.want == "at least 0.8"
    assert "over 6 batches of shuffled rows" in caught.value.got


def test_noise_of_the_first_batches_is_rarely_taken_for_hijacking():
    """As on a table with 12 % positives: the noise of a batch is ten times the mean of all.

    Judged by the mean of the latest scores alone, 22 of these 100 honest trainings were stopped.
    """
    rows, stopped = torch.tensor([[1.0], [2.0]]), 0
    for seed in range(100):
        guard, secret = make("split_guard:start=0"), Secret.of_simulation(seed, "bank")
        noise = 0.1 * torch.randn(200, 1, 2, generator=generator(seed, "noise"))
        try:
            for step in range(200):
                context = StepContext(step, training=True, secret=secret)
                false = guard.batch(rows, None, context)[0] is not rows
                mean = torch.full((1, 2), -0.09 if false else 0.009)
                guard.received(rows[:1], (mean + noise[step]) / math.sqrt(2), context)
        except HijackError:
            stopped += 1
    assert stopped <= 6


def test_the_score_by_hand():
    regular, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    fake = torch.tensor([0.0, -3.0])
    middle = math.sqrt(0.5)  # length of (0.5, 0.5), at 135 degrees of the fake
    sure = (3 * math.pi / 4) * (3 - middle) / (3 - middle)
    expected = (1 / (1 + math.exp(-5 * sure))) ** 2
    assert score(fake, regular, other) == pytest.approx(expected)
    assert score(regular, regular, regular) == pytest.approx(0.25)
    zero = torch.zeros(2)
    assert score(zero, zero, zero) == pytest.approx(0.25)


def context(step, secret=BANK):
    return StepContext(step, training=True, secret=secret)


class TestBatches:
    rows = torch.randn(9, 2, generator=generator(0, "rows"))
    guard = make("split_guard:start=10,share=0.2")

    def exchanged(self, secret, steps=range(400)):
        fed = [self.guard.batch(self.rows, None, context(step, secret))[0] for step in steps]
        return [step for step, rows in zip(steps, fed, strict=True) if rows is not self.rows]

    def test_rows_are_exchanged_as_often_as_said_and_after_the_start(self):
        steps = self.exchanged(BANK)
        assert min(steps) >= 10
        assert len(steps) == pytest.approx(0.2 * 390, abs=3 * math.sqrt(0.2 * 0.8 * 390))
        assert steps != self.exchanged(SHOP)  # which steps is the party's own secret

    def test_every_row_is_in_a_wrong_place(self):
        fed, _ = self.guard.batch(self.rows, None, context(self.exchanged(BANK)[0]))
        assert not (fed == self.rows).all(1).any()
        assert torch.equal(fed.sort(0).values, self.rows.sort(0).values)

    def test_the_label_partys_own_rows_stay(self):
        labels = torch.zeros(9, dtype=torch.long)
        for step in self.exchanged(BANK):
            assert self.guard.batch(self.rows, labels, context(step))[0] is self.rows

    def test_nothing_is_learned_from_a_false_batch(self):
        false, grad = self.exchanged(BANK)[0], torch.ones(9, 2)
        assert not self.guard.received(self.rows, grad, context(false)).any()
        assert self.guard.received(self.rows, grad, context(3)) is grad
