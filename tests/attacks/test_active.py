"""Active adversaries in sessions: what each does to a training, and what comes of it."""

from dataclasses import replace

import pytest
import torch

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View
from vfl.attacks.active import ADVERSARIES, ActiveAdversary, make_adversary
from vfl.attacks.active.begin import begin
from vfl.attacks.case import Case, attempt
from vfl.compression import Moment
from vfl.config import Experiment
from vfl.datasets import load_bundled
from vfl.errors import BadOptionError, DataError, NotGrantedError, TooFewRowsError, UserError
from vfl.local import LocalSession
from vfl.models import make_bottom
from vfl.registry import parse
from vfl.seeds import generator

SPECS = {
    "bank": ["malicious_optimizer", "malicious_optimizer:gain=3,most=10", "replacement:target=3"],
    "lender": ["hijacking", "hijacking:victim=bank,critic_steps=2", "noisy_labels"],
}
ALL = [(party, spec) for party, specs in SPECS.items() for spec in specs]
EVERYTHING = frozenset(Grant) - {Grant.GRADIENTS}
WIDTH = 10


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["bank", "shop"], 0, "lender", limit=400, validation=0.2)


def experiment(**changes):
    settings = {
        "parties": {name: {"width": WIDTH, "bottom": "mlp:hidden=16"} for name in ("bank", "shop")},
        "label": {"party": "lender"},
        "train": {"epochs": 2, "batch_rows": 40, "learning_rate": 0.01},
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


def test_every_adversary_is_under_test():
    assert {parse(spec)[0] for _, spec in ALL} == set(ADVERSARIES.names())


@pytest.mark.parametrize(("party", "spec"), ALL)
def test_a_training_goes_through_and_is_repeatable(party, spec, data):
    first, second = (session(data, {party: begun(spec, data)}) for _ in range(2))
    assert first.weights_digest() == second.weights_digest() != session(data).weights_digest()


class Killed(BaseException):
    """Stands for a process that ends."""


@pytest.mark.parametrize(
    ("party", "spec", "in_flight"),
    [
        ("bank", "malicious_optimizer", 1),
        ("bank", "replacement:target=3", 1),
        ("bank", "replacement:target=3", 3),  # batches in flight are fed again
        ("lender", "hijacking", 1),
        ("lender", "noisy_labels", 3),
    ],
)
def test_a_training_that_is_resumed_ends_as_one_that_was_not(
    party, spec, in_flight, data, tmp_path, monkeypatch
):
    train = {"epochs": 1, "batch_rows": 40, "learning_rate": 0.01, "checkpoint_every": 2}
    settings = experiment(train=train | {"in_flight": in_flight})

    def prepared(folder):
        return LocalSession(
            settings, data, outputs=10, adversaries={party: begun(spec, data)}, checkpoints=folder
        )

    whole, left, finish = prepared(None).run(), iter(range(5)), LocalSession._finish

    def dying(self, exchange):
        if next(left, None) is None:
            raise Killed
        finish(self, exchange)

    monkeypatch.setattr(LocalSession, "_finish", dying)
    with pytest.raises(Killed):
        prepared(tmp_path).run()
    monkeypatch.setattr(LocalSession, "_finish", finish)
    assert (tmp_path / "lender" / "checkpoints" / "committed.json").exists()
    assert prepared(tmp_path).run().weights_digest() == whole.weights_digest()


@pytest.mark.parametrize(("party", "spec"), ALL)
def test_what_it_holds_is_made_of_a_party_s_rows(party, spec, data):
    """`begin` gives what `holds` names; a feature party knows as many rows a class as there are."""
    adversary = make_adversary(spec)
    begin(adversary, experiment(), data, "bank", 1000, generator(0, "begin"))
    train = {"epochs": 1, "batch_rows": 40, "learning_rate": 0.01}
    weights = session(data, {party: adversary}, train=train).weights()
    assert all(torch.isfinite(one).all() for own in weights.values() for one in own.values())


@pytest.mark.parametrize(("party", "spec"), ALL)
def test_an_adversary_is_of_a_kind_and_uses_what_it_holds(party, spec, data):
    adversary = make_adversary(spec)
    assert isinstance(adversary, ActiveAdversary)
    assert adversary.who == {"bank": "feature party", "lender": "label party"}[party]
    for grant in adversary.holds:
        threat = ThreatModel(adversary.who, "training", adversary.holds - {grant})
        with pytest.raises(NotGrantedError):
            adversary.begin(View(threat, 10, Holdings(leaked=Evidence())), generator(0))


def test_only_who_needs_known_rows_misses_them():
    bare = load_bundled("digits", ["bank", "shop"], 0, "lender", limit=100, validation=0.0)
    begin(make_adversary("noisy_labels"), experiment(), bare, "bank", 50, generator(0, "begin"))
    with pytest.raises(TooFewRowsError, match="there are none for it"):
        begin(make_adversary("hijacking"), experiment(), bare, "bank", 50, generator(0, "begin"))


@pytest.mark.parametrize(("party", "spec"), ALL)
def test_the_global_generator_is_left_alone(party, spec, data):
    state = torch.random.get_rng_state()
    session(data, {party: begun(spec, data)})
    assert torch.equal(torch.random.get_rng_state(), state)


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


def test_a_resumed_optimiser_stretches_on():
    weight = torch.nn.Parameter(torch.zeros(1))
    first, second = (
        make_adversary("malicious_optimizer").optimizer(torch.optim.Adam([weight], lr=0.1))
        for _ in range(2)
    )
    weight.grad = torch.ones(1)
    first.step()
    second.load_state_dict(first.state_dict())
    before = weight.detach().clone()
    first.step()
    by_first = weight.detach() - before
    with torch.no_grad():
        weight.copy_(before)
    second.step()
    assert torch.equal(weight.detach() - before, by_first)


def test_labels_are_wrong_as_often_as_asked():
    adversary = make_adversary("noisy_labels:share=0.3")
    adversary.begin(View(ThreatModel("label party", "training", frozenset()), 10, Holdings()),
                    generator(0))  # fmt: skip
    labels = torch.arange(20000) % 10
    found = adversary.labels(labels, Moment())
    assert float((found != labels).double().mean()) == pytest.approx(0.3, abs=0.015)
    shifts = ((found - labels) % 10)[found != labels].bincount(minlength=10)
    assert shifts[0] == 0
    assert shifts[1:].min() > 0.8 * shifts[1:].max()


def test_a_trigger_comes_to_stand_for_a_class(data):
    """The label party never sees a wrong label, and answers as well as before."""
    backdoor = begun("replacement:target=3,share=1,columns=2", data, leaks=240)
    train = {"epochs": 12, "batch_rows": 40, "learning_rate": 0.01}
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


def test_the_trigger_is_a_corner_or_the_last_columns():
    backdoor = make_adversary("replacement:columns=2,value=9")
    picture = backdoor.triggered(torch.zeros(1, 2, 4, 4))
    assert int((picture == 9).sum()) == 2 * 2 * 2
    assert (picture[:, :, 2:, 2:] == 9).all()
    assert backdoor.triggered(torch.zeros(2, 5)).tolist() == [[0, 0, 0, 9, 9]] * 2


def test_only_known_rows_are_replaced(data):
    backdoor = begun("replacement:target=3,share=1,columns=2", data, leaks=100)
    inputs = data["bank"].inputs[torch.from_numpy(data["lender"].split.train)[:200]]
    labels = data["lender"].labels[torch.from_numpy(data["lender"].split.train)[:200]]
    changed = (backdoor.batch(inputs, Moment(training=True)) != inputs).flatten(1).any(1)
    assert changed.tolist() == ((labels == 3) & (torch.arange(200) < 100)).tolist()


def test_a_bent_bottom_is_read_by_the_decoder(data):
    """Of one party's cut nothing but codes is left: its owner's labels are not learned."""
    alone = {"bank": data["bank"], "lender": data["lender"]}
    settings = {"parties": {"bank": {"width": WIDTH, "bottom": "mlp:hidden=16"}},
                "train": {"epochs": 40, "batch_rows": 40, "learning_rate": 0.002}}  # fmt: skip
    adversary = begun("hijacking:critic_steps=3", data, leaks=80, part="validation")
    bent = session(alone, {"lender": adversary}, **settings)
    test = torch.from_numpy(data["lender"].split.test)
    inputs = data["bank"].inputs[test]
    with torch.no_grad():
        cuts = bent.clients[0].half.model.eval()["bottom"](inputs)
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
    with pytest.raises(DataError, match="no leaked row is of the backdoor's class"):
        begun("replacement:target=11", data)
    with pytest.raises(UserError, match="decodes what it bent itself"):
        make_adversary("hijacking").run(None, generator(0))
