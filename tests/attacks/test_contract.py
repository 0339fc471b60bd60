"""Every attack under the contract that outside packages use too."""

import copy
import inspect
import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from torch import nn

from vfl.attacks import ATTACKS, Evidence, Grant, Holdings, SentCuts, ThreatModel, View
from vfl.attacks.active import ADVERSARIES
from vfl.attacks.base import fit, through
from vfl.attacks.cases import draw_leak
from vfl.attacks.labels.regression import predicted
from vfl.attacks.scoring import Case, attempt
from vfl.attacks.view import IN_TRAINING
from vfl.core.errors import BadOptionError
from vfl.core.products import members_of
from vfl.core.registry import parse
from vfl.core.seeds import generator, scoped
from vfl.models.language import DecoderFront
from vfl.testing import AttackContract, GradientAttackContract, InputAttackContract

SPECS = [
    "adaptive:candidates=6",
    "fine_tuning:at=before",
    "logistic",
    "logistic:scaler=none,at=inputs",
    "svm:scaler=none,at=bottom",
    "nearest_mean",
    "knn",
    "label_propagation",
    "joined_propagation",
    "label_propagation:of=cut+inputs,scaler=whiten,teacher=mlp:at=inputs/steps=40",
    "label_propagation:at=cut+before+inputs,scaler=shrink,components=4",
    "discriminant:at=cut+inputs,columns=3,steps=2,teacher=propagation",
    "discriminant:scaler=standard,weight=0.1,shrink=0.1",
    "ridge",
    "ridge:scaler=zca,unlabelled=self_training,rounds=2",
    "svm:scaler=rank,teacher=propagation",
    "knn:scaler=batch,at=cut+before",
    "trees:steps=10,teacher=propagation",
    "mlp:steps=60,loss=robust,teacher=propagation,scaler=whiten",
    "mlp:steps=60,unlabelled=mixmatch",
    "logistic:at=cut+inputs,unlabelled=co_training,rounds=2",
    "self_training:scaler=whiten,rounds=2",
    "teacher_student:student=top,rounds=1",
    "teacher_student:teacher=scratch,scaler=none,at=before",
    "unfreeze:steps=50",
    "model_completion:steps=60,bottom_learning_rate=0.001",
    "kmeans",
    "gaussian_mixture",
    "gaussian_mixture:covariance=full,at=before",
    "gaussian_mixture:columns=4",
    "spectral",
    "spectral:most=100,at=inputs",
    "scratch:steps=300,unlabelled=true,rounds=1",
]


class Few:
    """What takes no win, such as whether it is repeatable, shows after a few steps as well."""

    def pytest_generate_tests(self, metafunc):
        if "spec" in metafunc.fixturenames:
            whole = metafunc.function.__name__.startswith("test_attack_")
            few = [re.sub(r"(steps|rounds)=\d+", r"\1=2", spec) for spec in self.specs]
            metafunc.parametrize("spec", self.specs if whole else few)


class TestAttacks(Few, AttackContract):
    specs = SPECS


class TestNumbers(AttackContract):
    """A label is a number: a direction of the rows with a little noise, or nothing of them."""

    specs = (
        "regression",
        "regression:scaler=none,at=inputs,strength=10",
        "regression:learner=kernel,strength=100",
        "regression:learner=scratch",
    )
    classes, width, leaks, wins = 1, 3, 60, 0.85

    def case(self, leaking, grants):
        base, draw = super().case(False, frozenset(Grant) - IN_TRAINING), generator(0, "numbers")
        groups = {name: getattr(base.view, name) for name in ("targets", "leaked", "unlabelled")}
        numbers = {}
        for name, seen in groups.items():
            numbers[name] = torch.randn(seen.rows, generator=draw)
            if leaking:
                numbers[name] = 0.1 * numbers[name] + 7 * seen.inputs[:, 0] - 40
        leaked = replace(base.view._holdings.leaked, labels=numbers["leaked"])
        held = replace(base.view._holdings, leaked=leaked)
        threat = ThreatModel("feature party", "inference", grants)
        return Case(View(threat, 1, held), numbers["targets"])


def test_neighbours_say_the_numbers_of_leaked_rows_again():
    known, wanted = torch.randn(9, 2, generator=generator(1)), torch.arange(9.0)
    found = predicted(known, wanted, known, "neighbours")
    assert torch.allclose(found, wanted, atol=1e-3)


def test_ridge_and_kernel_ridge_as_scikit_learn_has_them():
    draw = generator(2)
    known, wanted = torch.randn(12, 3, generator=draw), torch.randn(12, generator=draw)
    asked, wanted = torch.randn(5, 3, generator=draw), wanted - wanted.mean()
    ridge = Ridge(alpha=1 / 7).fit(known.numpy(), wanted.numpy())
    found = predicted(known, wanted, asked, strength=7)
    assert found.numpy() == pytest.approx(ridge.predict(asked.numpy()), abs=1e-5)
    gamma = 1 / (3 * known.numpy().var())
    kernel = KernelRidge(alpha=1 / 7, kernel="rbf", gamma=gamma).fit(known.numpy(), wanted.numpy())
    found = predicted(known, wanted, asked, "kernel", 7)
    assert found.numpy() == pytest.approx(kernel.predict(asked.numpy()), abs=1e-5)


def test_one_number_is_said_of_every_row():
    case = TestNumbers().case(True, frozenset(Grant) - IN_TRAINING)
    leaked = case.view._holdings.leaked
    alone = Evidence(leaked.inputs[:1], leaked.cuts[:1], leaked.labels[:1])
    for learner in ("ridge", "kernel", "neighbours", "scratch"):
        attack = ATTACKS.make(f"regression:learner={learner}")
        found = attack.run(case.view.instead(leaked=alone), generator(0))
        assert found.tolist() == [leaked.labels[0].item()] * case.view.targets.rows


class TestScoresOfARareClass(AttackContract):
    """One row in four is positive, and lies apart from the others or not."""

    specs = ("principal", "principal:at=inputs")
    classes = 2

    def case(self, leaking, grants):
        positive = torch.arange(self.rows) % 4 == 0
        rows = torch.randn(self.rows, self.width, generator=generator(0, "rare"))
        rows[:, 2] -= 6.0 * leaking * positive
        threat = ThreatModel("feature party", "inference", grants)
        view = View(threat, self.classes, Holdings(Evidence(inputs=rows, cuts=rows)))
        return Case(view, positive.long(), positive=positive)


class TestNoisyCuts(AttackContract):
    """16 cuts of each row were recorded, each with noise far larger than the classes lie apart."""

    specs = (
        "averaging",
        "averaging:of=gaussian_mixture,last=14",
        "averaging:over=queries",
        "averaging:of=logistic",
    )

    def case(self, leaking, grants):
        base = super().case(leaking, frozenset(Grant) - IN_TRAINING)
        groups = {name: getattr(base.view, name) for name in ("targets", "leaked", "unlabelled")}
        draw = generator(0, "noisy")
        held = {}
        for name, seen in groups.items():
            cuts = seen.cuts + 5 * torch.randn(16, seen.rows, self.width, generator=draw)
            orders = [torch.randperm(seen.rows, generator=draw) for _ in cuts]
            sent = [SentCuts(n, n, order, cuts[n][order]) for n, order in enumerate(orders)]
            labels = seen.labels if name == "leaked" else None
            held[name] = Evidence(cuts=cuts[-1], labels=labels, sent=lambda found=sent: found)
        threat = ThreatModel("label party", "training", grants)
        return replace(base, view=View(threat, self.classes, Holdings(**held)))

    def test_one_noisy_cut_is_not_enough(self):
        single = self._attempt(ATTACKS.make("kmeans"), leaking=True)
        assert single.value < 0.75 < self._attempt(ATTACKS.make("averaging"), leaking=True).value


class TestSnapshots(AttackContract):
    """The bottom of each epoch is off in some other way, and right on average."""

    specs = ("averaging:over=snapshots", "averaging:of=logistic,over=snapshots,last=12")

    def case(self, leaking, grants):
        base = super().case(leaking, frozenset(Grant) - IN_TRAINING)
        turned, draw = base.view.bottom(), generator(0, "snapshots")
        off = [torch.randn(self.width, self.width, generator=draw) for _ in range(16)]

        class Off(nn.Module):
            def __init__(self, by):
                super().__init__()
                self.by = by

            def forward(self, rows):
                return turned(rows) + rows @ self.by

        view = base.view.instead(snapshots=[lambda by=by: Off(by) for by in off])
        return replace(base, view=view.only(grants))


class TestPooled(AttackContract):
    """Each party's columns tell one class from the others, and all of them every class."""

    specs = ("pooled:of=kmeans", "pooled", "pooled:of=fine_tuning", "pooled:of=unfreeze")
    classes, width = 3, 4

    def case(self, leaking, grants):
        draw = generator(0, "pooled", int(leaking))
        labels = torch.arange(self.rows) % self.classes
        leaked = draw_leak(labels, self.leaks, draw)
        rest = torch.ones(self.rows, dtype=torch.bool)
        rest[leaked] = False

        def held(code):
            inputs = torch.randn(self.rows, self.width, generator=draw)
            inputs[:, 0] += 8 * leaking * (labels == code)
            with scoped(code):
                bottom = nn.Linear(self.width, self.width)
            cuts = through(bottom, inputs)
            return Holdings(
                targets=Evidence(inputs[rest], cuts[rest]),
                leaked=Evidence(inputs[leaked], cuts[leaked], labels[leaked]),
                unlabelled=Evidence(inputs[rest], cuts[rest]),
                bottom=lambda: copy.deepcopy(bottom),
                new_top=lambda width: nn.Linear(width, self.classes),
            )

        def threat(grants, **colluding):
            return ThreatModel("feature party", "inference", grants, **colluding)

        everything = frozenset(Grant) - IN_TRAINING
        others = [View(threat(everything), self.classes, held(code)) for code in (1, 2)]
        holdings = replace(held(0), partners=others)
        names = ("shop", "post") if Grant.PARTNERS in grants else ()
        return Case(View(threat(grants, colluding=names), self.classes, holdings), labels[rest])

    def test_one_alone_is_not_enough(self):
        attack = ATTACKS.make("logistic")
        alone = attempt(self.case(True, attack.needs), attack, generator(0, "draw"))
        assert alone.value < 0.75


class TestGradientAttacks(GradientAttackContract):
    specs = (
        "gradient_similarity",
        "gradient_similarity:epochs=2,rounds=0",
        "gradient_teacher:epochs=2,steps=40",
        "gradient_mixture:steps=40",
        "gradient_mixture:epochs=1,steps=0",
        "batch_sums",
        "batch_sums:penalty=1",
        "surrogate",
        "exact",
        "exact:epochs=2",
    )
    epochs = 3


class TestGradientAttacksOnTwoClasses(GradientAttackContract):
    specs = (
        "gradient_norm:epochs=2", "gradient_direction", "gradient_direction:epochs=2",
        "gradient_mixture:steps=40", "batch_sums:epochs=2", "gradient_teacher:epochs=2,steps=40",
    )  # fmt: skip
    classes, positive = 2, 0.1


class TestGradientAttacksWhereTheFirstClassIsRarer(GradientAttackContract):
    specs = ("gradient_direction",)
    classes, positive = 2, 0.9


class TestDirectLabel(GradientAttackContract):
    specs = ("direct_label", "direct_label:epochs=2")
    width = 3
    top = "identity"


class TestInputAttacks(Few, InputAttackContract):
    specs = (
        "inversion:steps=200",
        "white_box_inversion:steps=150",
        "pseudo_client:steps=200,learning_rate=0.01,align=10",
        "sdar:steps=100,learning_rate=0.01",
    )


class TestSubtraction(Few, InputAttackContract):
    """The label party was sent sums of the victim's cuts and of another party's larger ones."""

    specs = ("subtraction:of=white_box_inversion:steps=150",)

    def case(self, leaking, grants):
        base = super().case(leaking, frozenset(Grant) - IN_TRAINING)
        draw, groups = generator(0, "sums"), ("targets", "leaked")
        cuts = {name: getattr(base.view, name).cuts for name in groups}
        theirs = {name: 5 * torch.randn(one.shape, generator=draw) for name, one in cuts.items()}
        held = Holdings(*(Evidence(cuts=theirs[name]) for name in groups))
        partner = ThreatModel("feature party", "inference", frozenset(Grant) - IN_TRAINING)
        view = base.view.with_cuts({name: cuts[name] + theirs[name] for name in groups})
        view = view.instead(partners=[View(partner, self.classes, held)])
        return replace(base, view=view.only(grants))

    def test_the_sum_is_not_enough(self):
        attack = ATTACKS.make("inversion:steps=200")
        alone = attempt(self.case(True, attack.needs), attack, generator(0, "draw"))
        assert alone.value > 0.8 * alone.guess


class TestGenerative(Few, InputAttackContract):
    """Of four columns two resemble the label party's own; the predictions tell of the others."""

    specs = ("generative:steps=300,learning_rate=0.01",)
    joint, wins = True, 0.8

    def test_its_own_cuts_may_come_first(self):
        attack = ATTACKS.make("generative:steps=20")
        view, top = self.case(True, attack.needs).view, self.case(True, attack.needs).view.top()
        victims, own = top.weight.split([2 * self.width, 2], 1)
        turned = nn.Linear(2 * self.width + 2, self.classes)
        turned.load_state_dict({"weight": torch.cat([own, victims], 1), "bias": top.bias})

        def turn(victims, own):
            return torch.cat([own, victims], 1)

        other = view.instead(merge=turn, top=lambda: copy.deepcopy(turned))
        found, wanted = (attack.run(one, generator(0, "draw")) for one in (other, view))
        assert torch.allclose(found, wanted, atol=1e-4)


class TestPictures(Few, InputAttackContract):
    """A bottom whose architecture leaves one number open."""

    specs = (
        "inversion:steps=200",
        "unsplit:rounds=10,input_learning_rate=0.05",
        "fora:steps=100,learning_rate=0.01",
        "sdar:steps=100,learning_rate=0.01,labels=no",
    )

    def recipe(self):
        return nn.Sequential(nn.PReLU(), nn.Flatten())

    def _rows(self, draw):
        """Pictures of 4 x 2: a bright corner for each class."""
        inputs, labels = super()._rows(draw)
        return inputs.repeat_interleave(2, dim=1).view(-1, 1, 4, 2), labels


class TestLabelsOfAUShape(TestPictures):
    """The server has neither labels of the rows nor the last layers."""

    specs = ("sdar_labels:steps=100,learning_rate=0.01",)
    wins = 0.9
    require_win = AttackContract.require_win
    require_guess = AttackContract.require_guess


class TestAttribute(AttackContract):
    specs = (
        "attribute",
        "attribute:of=adaptive:at=cut/candidates=6",
        "attribute:of=label_propagation:at=cut+inputs/mix=0.95",
    )

    def case(self, leaking, grants):
        draw = generator(0, "attribute", int(leaking))
        values = torch.arange(self.rows) % self.classes
        means = 4 * leaking * torch.eye(self.classes, self.width)[values]
        cuts = means + torch.randn(self.rows, self.width, generator=draw)
        own = torch.randn(self.rows, 3, generator=draw)
        view = View(
            ThreatModel("label party", "inference", grants),
            self.classes,
            Holdings(
                Evidence(own[60:], cuts[60:]), Evidence(own[:60], cuts[:60], labels=values[:60])
            ),
        )
        return Case(view, values[60:])

    def test_own_columns_that_say_nothing_are_the_guess(self):
        attack = ATTACKS.make("attribute:of=logistic:at=inputs")
        self.require_guess(self._attempt(attack, leaking=True))

    @pytest.mark.parametrize("of", ["kmeans", "unfreeze", "logistic:at=bottom"])
    def test_what_a_label_party_does_not_hold_is_refused(self, of):
        with pytest.raises(BadOptionError, match="option 'of'"):
            ATTACKS.make(f"attribute:of={of}")


class TestTexts(Few, AttackContract):
    """Texts of six words through the front of a decoder; or cuts of other texts."""

    specs = (
        "text_inversion:steps=80,half=true",
        "token_search:beam=2,prior=0.01",
        "token_search:candidates=3,steps=60",
        "token_network:tokens=16,steps=150,hidden=64",
        "two_stage_inversion:steps=20,network_steps=150,hidden=64",
    )
    rows, leaks, words = 160, 120, 20

    def case(self, leaking, grants):
        draw = generator(0, "texts", int(leaking))
        texts = torch.randint(1, self.words, (self.rows, 6), generator=draw).float()
        with scoped(7):
            recipe = DecoderFront(words=self.words, tokens=16, layers=1, heads=2, front=1)
            front = recipe.build((6,), 96)
        cuts = through(front, texts)
        known, rest = slice(self.leaks), slice(self.leaks, None)
        if not leaking:
            cuts = cuts[torch.randperm(self.rows, generator=draw)]
        holdings = Holdings(
            targets=Evidence(cuts=cuts[rest]),
            leaked=Evidence(texts[known], cuts[known]),
            others_bottom=lambda: copy.deepcopy(front),
            shape=(6,),
        )
        threat = ThreatModel("label party", "inference", grants)
        labels = torch.zeros(self.rows - self.leaks, dtype=torch.long)
        return Case(View(threat, self.classes, holdings), labels, texts[rest])


class TestMembership(Few, AttackContract):
    """Half the rows were trained on, until they were learned by heart; or none of them."""

    specs = ("membership", "likelihood_ratio:shadows=4,steps=100")
    width = 16
    wins = 0.8

    @classmethod
    @cache
    def trained(cls, leaking):
        draw = generator(0, "membership")
        rows = 2 * cls.rows
        inputs = torch.randn(rows, cls.width, generator=draw)
        noise = 3 * torch.randn(rows, generator=draw)
        labels = (inputs[:, 0] + noise > 0).long()
        member = torch.arange(cls.rows) % 2 == 0
        trained = torch.nonzero(member)[:, 0] if leaking else torch.arange(cls.rows, rows)[::2]
        with scoped(4):
            net = nn.Sequential(nn.Linear(cls.width, 128), nn.ReLU(), nn.Linear(128, cls.classes))
        fit(net, inputs[trained], labels[trained], 200, 0.03, draw)
        return inputs, labels, member, net

    def case(self, leaking, grants):
        inputs, labels, member, net = self.trained(leaking)
        holdings = Holdings(
            targets=Evidence(
                inputs[: self.rows], None, labels[: self.rows], through(net, inputs[: self.rows])
            ),
            leaked=Evidence(inputs[self.rows :], labels=labels[self.rows :]),
            new_bottom=lambda: nn.Sequential(nn.Linear(self.width, 128), nn.ReLU()),
            new_top=lambda width: nn.Linear(width, self.classes),
        )
        view = View(ThreatModel("outsider", "inference", grants), self.classes, holdings)
        return Case(view, labels[: self.rows], positive=member)


CONTRACTS = (
    TestAttacks,
    TestNumbers,
    TestScoresOfARareClass,
    TestNoisyCuts,
    TestSnapshots,
    TestPooled,
    TestGradientAttacks,
    TestGradientAttacksOnTwoClasses,
    TestGradientAttacksWhereTheFirstClassIsRarer,
    TestDirectLabel,
    TestInputAttacks,
    TestSubtraction,
    TestGenerative,
    TestPictures,
    TestLabelsOfAUShape,
    TestAttribute,
    TestTexts,
    TestMembership,
)


def test_every_attack_is_under_contract():
    specs = [spec for contract in CONTRACTS for spec in contract.specs]
    of_products = set(members_of("vfl.attacks"))  # whose rooms have tests of their own
    assert {parse(spec)[0] for spec in specs} == set(ATTACKS.names()) - of_products


def kinds():
    """Every attack and adversary that there is."""
    return [family.member(name) for family in (ATTACKS, ADVERSARIES) for name in family.names()]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_options_out_of_range_are_refused(kind):
    options = inspect.signature(kind.__init__).parameters.values()
    for name in [one.name for one in options if one.annotation in ("int", "float")]:
        for wrong in (math.nan, math.inf, *(() if name == "value" else (-1,))):
            with pytest.raises(BadOptionError, match=f"option '{name}'"):
                kind(**{name: wrong})
