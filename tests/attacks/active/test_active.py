"""Active adversaries in sessions: what each does to a training, and what comes of it."""

from dataclasses import replace

import pytest
import torch

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View
from vfl.attacks.active import ADVERSARIES, make_adversary
from vfl.attacks.cases import begin
from vfl.attacks.scoring import Case, attempt
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.core.errors import BadOptionError, DataError, TooFewRowsError, UserError
from vfl.core.registry import parse
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.models import make_bottom
from vfl.testing import AdversaryContract
from vfl.training.local import LocalSession

EVERYTHING = frozenset(Grant) - {Grant.GRADIENTS}
WIDTH = 10


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["bank", "shop"], "lender", Dealing(0, validation=0.2, limit=400))


def experiment(**changes):
    settings = {
        "parties": {name: {"width": WIDTH, "bottom": "mlp:hidden=16"} for name in ("bank", "shop")},
        "label": {"party": "lender"},
        "train": {"epochs": 2, "batch_size": 40, "learning_rate": 0.01},
    }
    return Experiment.model_validate(settings | changes)


def begun(spec, data, leaks=50, part="train"):
    adversary = make_adversary(spec)
    own, label = data["bank"], data["lender"]
    leaked = torch.from_numpy(getattr(label.split, part))[:leaks]
    shape = tuple(own.inputs.shape[1:])
    holdings = Holdings(
        targets=Evidence(own.inputs),
        leaked=Evidence(own.inputs[leaked], labels=label.labels[leaked]),
        new_bottom=lambda: make_bottom("mlp:hidden=16").build(shape, WIDTH),
        shape=shape,
    )
    threat = ThreatModel(adversary.who, "training", EVERYTHING, behaviour="malicious")
    adversary.begin(View(threat, 10, holdings).only(adversary.holds), generator(0, "active"))
    return adversary


def session(data, adversaries=None, **changes):
    return LocalSession(experiment(**changes), data, outputs=10, adversaries=adversaries).run()


class TestAdversaries(AdversaryContract):
    specs = (
        "malicious_optimizer",
        "malicious_optimizer:gain=3,most=10",
        "tuned_optimizer:gains=2+0.5",
        "tuned_optimizer:warmup=0,most=10",
        "replacement:target=1",
        "villain:warmup=1,inferring=1",
        "villain:warmup=1,inferring=1,swaps=2,dropout=0,jitter=0",
        "badvfl:warmup=1",
        "badvfl:target=2,warmup=1,share=1,columns=2",
        "lfba:warmup=1",
        "lfba:target=1,warmup=1,share=0.2,columns=1",
        "hijacking",
        "hijacking:victim=bank,critic_steps=2",
        "splitspy:agreement=0.9",
        "urvfl:steps=50",
        "urvfl:victim=bank,steps=20,judge_steps=2",
        "noisy_labels",
    )

    def test_every_registered_name_is_here(self):
        assert {parse(spec)[0] for spec in self.specs} == set(ADVERSARIES.names())


def test_only_who_needs_known_rows_misses_them():
    bare = load_bundled("digits", ["bank", "shop"], "lender", Dealing(0, validation=0.0, limit=100))
    begin(make_adversary("noisy_labels"), experiment(), bare, "bank", 50, generator(0, "begin"))
    with pytest.raises(TooFewRowsError, match="would know no rows"):
        begin(make_adversary("hijacking"), experiment(), bare, "bank", 50, generator(0, "begin"))


@pytest.mark.parametrize("spec", ["malicious_optimizer:gain=0", "noisy_labels:share=0"])
def test_an_adversary_that_does_nothing_changes_nothing(spec, data):
    party = "bank" if spec.startswith("malicious") else "lender"
    spoiled = session(data, {party: begun(spec, data)})
    assert spoiled.weights_digest() == session(data).weights_digest()


def test_steps_are_stretched_where_the_gradient_keeps_its_direction():
    weight = torch.nn.Parameter(torch.zeros(4))
    adversary = make_adversary("malicious_optimizer:gain=1,most=3")
    optimizer = adversary.optimizer(torch.optim.SGD([weight], lr=1.0))
    for gradient in ([1.0, 1.0, 1.0, 0.0], [1.0, -1.0, 5.0, 2.0]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    # 1 + 1, at least 1, at most 3, and no direction to keep
    assert weight.tolist() == [-1 - 2 * 1, -1 + 1, -1 - 3 * 5, -3 * 2]


def test_labels_are_wrong_as_often_as_asked():
    adversary = make_adversary("noisy_labels:share=0.3")
    adversary.begin(View(ThreatModel("label party", "training", frozenset()), 10, Holdings()),
                    generator(0))  # fmt: skip
    labels = torch.arange(20000) % 10
    found = adversary.labels(labels, StepContext())
    assert float((found != labels).double().mean()) == pytest.approx(0.3, abs=0.015)
    shifts = ((found - labels) % 10)[found != labels].bincount(minlength=10)
    assert shifts[0] == 0
    assert shifts[1:].min() > 0.8 * shifts[1:].max()


def test_a_trigger_comes_to_stand_for_a_class(data):
    """The label party never sees a wrong label, and answers as well as before."""
    backdoor = begun("replacement:target=3,share=1,columns=2", data, leaks=240)
    train = {"epochs": 12, "batch_size": 40, "learning_rate": 0.01}
    session_of = session(data, {"bank": backdoor}, train=train)
    label = data["lender"]
    stamped = data | {"bank": replace(data["bank"], inputs=backdoor.triggered(data["bank"].inputs))}
    answers = LocalSession(
        experiment(train=train), stamped, mode="predict", outputs=10, weights=session_of.weights()
    ).run()
    others = label.labels[torch.from_numpy(label.split.test)] != 3
    hit = float((answers.outputs().argmax(1)[others] == 3).double().mean())
    assert hit > 0.6
    assert session_of.label.history[-1]["test_accuracy"] > 0.8


def test_only_known_rows_are_replaced(data):
    backdoor = begun("replacement:target=3,share=1,columns=2", data, leaks=100)
    inputs = data["bank"].inputs[torch.from_numpy(data["lender"].split.train)[:200]]
    labels = data["lender"].labels[torch.from_numpy(data["lender"].split.train)[:200]]
    changed = (backdoor.batch(inputs, StepContext(training=True)) != inputs).flatten(1).any(1)
    assert changed.tolist() == ((labels == 3) & (torch.arange(200) < 100)).tolist()


def test_a_bent_bottom_is_read_by_the_decoder(data):
    """Of one party's cut nothing but codes is left: its owner's labels are not learned."""
    alone = {"bank": data["bank"], "lender": data["lender"]}
    settings = {"parties": {"bank": {"width": WIDTH, "bottom": "mlp:hidden=16"}},
                "train": {"epochs": 40, "batch_size": 40, "learning_rate": 0.002}}  # fmt: skip
    adversary = begun("hijacking:critic_steps=3", data, leaks=80, part="validation")
    bent = session(alone, {"lender": adversary}, **settings)
    test = torch.from_numpy(data["lender"].split.test)
    inputs = data["bank"].inputs[test]
    with torch.no_grad():
        cuts = bent.clients[0].end.model.eval()["bottom"](inputs)
    view = View(
        ThreatModel("label party", "inference", frozenset({Grant.CUTS})), 10,
        Holdings(Evidence(cuts=cuts)),
    )  # fmt: skip
    score = attempt(Case(view, inputs=inputs), adversary, generator(0))
    assert score.value < 0.9 * score.guess


def test_mistakes_are_refused(data):
    for spec in ("malicious_optimizer:most=0.5", "noisy_labels:share=2", "replacement:columns=0"):
        with pytest.raises(BadOptionError):
            make_adversary(spec)
    with pytest.raises(DataError, match="none of the leaked rows has the backdoor's class"):
        begun("replacement:target=11", data)
    with pytest.raises(UserError, match="decodes only cuts that it influenced itself"):
        make_adversary("hijacking").run(None, generator(0))
