"""DP-SGD in a whole split training: budgets, empty batches, resumes, and what is refused."""

import json

import numpy as np
import pytest
import torch
from killing import Killed, Killer, weights_apart
from played_session import PARTY, PlayedSession, stand_in
from pydantic import ValidationError
from sealed import weights_at
from stand_in_flower import Flower

from vfl.config import Experiment
from vfl.core.errors import ConfigError, PrivacyError, VFLError
from vfl.core.frame import Kind
from vfl.core.seeds import Secret
from vfl.datasets import Dealing, load_bundled
from vfl.experiments.pages import build_report
from vfl.experiments.plan import of_experiment as plan_of
from vfl.session import PartyFolder, Terms, rules
from vfl.session.dp_plan import PrivacyPlan
from vfl.training.local import LocalSession
from vfl.training.run import train
from vfl.training.specs import read_checked

ROWS = 400
#: So little noise and so wide a norm that it is the training without.
ALL_BUT_NONE = {"noise": 1e-10, "clip": 1e2, "sampling": "shuffled"}


def experiment(dp=None, **changes):
    content = {
        "parties": {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in ("left", "right")},
        "data": {"rows": ROWS},
        "train": {"epochs": 3, "batch_size": 28, "checkpoint_every": 5},
    }
    train = content["train"] | changes.pop("train", {})
    return Experiment.model_validate(content | {"dp": dp, "train": train} | changes)


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=ROWS))


def session(data, settings, folder=None, observers=()):
    return LocalSession(settings, data, outputs=10, checkpoints=folder, observers=observers)


@pytest.mark.parametrize(
    "changes", [{}, {"train": {"in_flight": 3}}, {"merge": "sum"}], ids=["plain", "piped", "sum"]
)
def test_without_noise_and_clipping_it_is_the_training_it_was(data, changes):
    """28 divides the 280 training rows, so a batch has the rows that it is divided by."""
    changes = {"train": {"optimizer": "sgd", "learning_rate": 0.05}} | changes
    changes["train"] = {"optimizer": "sgd", "learning_rate": 0.05} | changes["train"]
    assert len(data["label"].split.train) % 28 == 0
    plain = session(data, experiment(**{**changes})).run()
    private = session(data, experiment(ALL_BUT_NONE, **{**changes})).run()
    assert weights_apart(plain.weights(), private.weights()) < 1e-4
    noisy = session(data, experiment({"noise": 1.0}, **{**changes})).run()
    assert weights_apart(plain.weights(), noisy.weights()) > 0.01


def test_a_budget_alone_gives_the_noise_that_spends_it(data):
    private = session(data, experiment({"epsilon": 4.0})).run()
    spent = [record["epsilon"] for record in private.label.history]
    assert len(spent) == 3
    assert np.all(np.diff(spent) > 0)
    assert 3.99 < spent[-1] <= 4.0
    (stated,) = private.label.privacy()
    assert (stated.epsilon, stated.unit) == (spent[-1], "record")
    assert stated.adversary == "outsider with the model"


def test_training_ends_before_the_step_that_exceeds_the_budget(data):
    settings = experiment({"epsilon": 4.0, "noise": 1.5}, train={"epochs": 50})
    private = session(data, settings).run()
    rows = len(data["label"].split.train)
    plan = PrivacyPlan.of(private.terms, rows)
    steps = private.label.progress.train_steps
    assert steps == plan.steps < 50 * plan.a_epoch
    assert plan.epsilon(steps) <= 4.0 < plan.epsilon(steps + 1)
    assert "test_accuracy" in private.label.history[-1]
    assert private.label.history[-1]["epsilon"] == private.label.privacy()[0].epsilon


def test_shuffled_batches_are_accounted_by_epochs(data):
    private = session(data, experiment({"noise": 4.0, "sampling": "shuffled"})).run()
    (stated,) = private.label.privacy()
    assert stated.relation == "replace"
    assert stated.accountant == "analytic Gaussian mechanism"
    drawn = PrivacyPlan.of(Terms.of(experiment({"noise": 4.0}), "train", "run"), 280)
    assert stated.epsilon > drawn.epsilon(drawn.steps)


def test_rows_are_drawn_alike_for_all_and_from_no_public_seed(data):
    settings, split = experiment({"noise": 1.0}, train={"batch_size": 3}), data["label"].split
    terms = Terms.of(settings, "train", "run")

    def batches(one):
        return [each.rows.tolist() for each in rules.schedule(one, split) if each.trains]

    mine, again = terms.keyed(Secret(b"1" * 32)), terms.keyed(Secret(b"1" * 32))
    assert batches(mine) == batches(again)
    assert batches(mine) != batches(terms.keyed(Secret(b"2" * 32)))
    assert batches(mine) != batches(terms)
    sizes = np.array([len(rows) for rows in batches(mine)])
    assert (sizes == 0).any()
    assert abs(sizes.mean() - 3) < 4 * np.sqrt(3 / len(sizes))
    assert 2.2 < sizes.var() < 4  # of a binomial law, 2.97
    assert terms.keyed(Secret(b"1" * 32)).dp.key not in json.dumps(mine.public())
    assert mine.dp.key not in str(mine.settings()) + repr(mine)


CODECS = (
    "none",
    "topk:k=2,values=8,scale=row",
    "quantise:values=2,packer=range,scale=row",
    "relu:scale=row,grad=4",
)


@pytest.mark.parametrize("codec", CODECS)
def test_empty_batches_go_through_every_codec_that_is_allowed(data, codec):
    empty = []

    def watch(party, direction, frame):
        if frame.kind in (Kind.CUT, Kind.GRAD) and not frame.payload:
            empty.append((party, direction, frame.step))

    settings = experiment({"noise": 1.0}, codec=codec, train={"batch_size": 2, "epochs": 1})
    private = session(data, settings, observers=[watch]).run()
    steps = {step for _, _, step in empty}
    assert len(steps) > 5
    assert len(empty) == 4 * len(steps)
    assert np.isfinite(private.label.history[-1]["train_loss"])


def test_a_check_tells_steps_noise_and_epsilon_before_anything_runs(tmp_path):
    path = tmp_path / "private.toml"
    lines = ['[parties.left]', '[parties.right]', '[dp]', 'epsilon = 4.0', 'noise = 1.5',
             '[train]', 'epochs = 40', 'batch_size = 28', '[data]', 'rows = 400']  # fmt: skip
    path.write_text("\n".join(lines))
    facts = plan_of(path)
    assert facts["steps_per_epoch"] == 10
    assert facts["epochs"] < 40
    assert "for one record in one training" in facts["privacy"]
    assert facts["privacy"].endswith("joint sensitivity 1.732; total noise 1.5")


@pytest.mark.parametrize(
    ("in_flight", "more"), [(1, {}), (3, {"quantile": 0.5, "clip_by": "layer"})]
)
def test_a_killed_training_goes_on_to_the_same_models_and_the_same_budget(
    data, tmp_path, in_flight, more
):
    settings = experiment(
        {"epsilon": 3.0, "noise": 1.5} | more, train={"epochs": 40, "in_flight": in_flight}
    )
    undisturbed = session(data, settings).run()
    for at in (7, 16, 23):
        with pytest.raises(Killed):
            session(data, settings, tmp_path, [Killer(at)]).run()
    resumed = session(data, settings, tmp_path).run()
    assert resumed.weights_digest() == undisturbed.weights_digest()
    assert resumed.label.privacy() == undisturbed.label.privacy()
    assert [one["epsilon"] for one in resumed.label.history] == [
        one["epsilon"] for one in undisturbed.label.history
    ]


def test_a_run_states_it_in_summary_card_and_report(tmp_path):
    summary = train(experiment({"epsilon": 4.0}), tmp_path, "run")
    (stated,) = summary["privacy"]
    assert (stated["unit"], stated["relation"]) == ("record", "add or remove")
    folder = tmp_path / "run"
    card = PartyFolder(folder / "parties" / "left").card()
    (told,) = card["privacy"]["states"]
    assert told["epsilon"] == pytest.approx(stated["epsilon"])
    assert "key" not in card["terms"]["dp"]
    page = build_report(folder).read_text()
    assert "Epsilon by epoch" in page
    assert "for one record in one training" in page


REFUSED = [
    ({"parties": {"left": {"bottom": "mlp:batch_norm=true"}}}, "BatchNorm1d"),
    ({"label": {"top": "mlp:batch_norm=true"}}, "BatchNorm1d"),
    ({"codec": "size:k=4"}, "layers that it trains"),
    ({"codec": "l1:target=3"}, "a separate loss"),
    ({"codec": "topk:k=2,values=8"}, "a scale that the rows"),
    ({"codec": "quantise:values=2"}, "a scale that the rows"),
    ({"defense": "dcor:alpha=1"}, "loss"),
    ({"defense": "potential:alpha=1"}, "loss"),
    ({"defense": "mixup"}, "batch"),
    ({"defense": "gradient_averaging"}, "gradient"),
    ({"defense": "clipped_noise:sigma=4"}, "one exchange"),
    ({"defense": "tpsl:epsilon=1"}, "loss"),
    ({"label": {"class_weight": "balanced"}}, "weight"),
    ({"dp": {"noise": 1e-3, "epsilon": 0.1}}, "not allow a single step"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_would_make_the_promise_untrue_is_refused(data, changes, why):
    changes = {"dp": {"noise": 1.0}} | changes
    if "parties" in changes:
        changes["parties"] = {"left": {"width": 8} | changes["parties"]["left"], "right": {}}
    with pytest.raises(PrivacyError) as caught:
        session(data, experiment(**changes))
    assert why in str(caught.value)


def test_a_file_is_told_all_that_its_promise_forbids_at_once(tmp_path):
    path = tmp_path / "private.toml"
    lines = ['codec = "topk:k=2,values=8"', 'defense = "mixup"']
    lines += ["[parties.left]", "[parties.right]", "[dp]", "epsilon = 4.0"]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        read_checked(path)
    told = str(caught.value)
    assert "private.toml:1: codec: [dp] bounds the effect of one row" in told
    assert "private.toml:2: defense: [dp] clips a row's gradient, and Mixup may mix rows" in told


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secure": "permuted"}, "no party has a model whose gradients"),
        ({"dp": {}}, "needs an epsilon"),
        ({"dp": {"epsilon": 1, "noise": 1}, "train": {"keep": "best"}}, "keep = 'last'"),
        ({"train": {"precision": "bfloat16"}}, "float32"),
        ({"dp": {"noise": 1, "clips": {"nobody": 1.0}}}, "has a name that is no party"),
    ],
)
def test_settings_that_do_not_go_together(changes, why):
    with pytest.raises((ConfigError, ValidationError), match=why):
        experiment(**({"dp": {"noise": 1.0}} | changes))


@pytest.mark.parametrize("defense", ["layer_norm+label_dp:flip=0.2"])
def test_defenses_that_leave_rows_apart_are_allowed(data, defense):
    private = session(data, experiment({"epsilon": 8.0}, defense=defense)).run()
    label, record = private.label.privacy()
    assert (label.unit, record.unit) == ("label", "record")


def test_a_clip_norm_of_one_party(data):
    dp = {"noise": 1.0, "clips": {"left": 0.25, "label": 2.0}}
    private = session(data, experiment(dp))
    norms = {one.name: one.end.private.clipper.norms.item() for one in private.clients}
    assert norms == {"left": 0.25, "right": 1.0}
    assert private.label.private.clipper.norms.item() == 2.0


def norms_before(session):
    halves = [one.end.private for one in session.clients] + [session.label.private]
    return [half.clipper.norms.tolist() for half in halves]


def test_clip_norms_that_follow_a_quantile_start_alike_and_part(data):
    settings = experiment({"noise": 1.0, "quantile": 0.5, "clip_by": "layer", "clip": 3.0})
    made = session(data, settings)
    np.testing.assert_allclose(norms_before(made), 3 / np.sqrt(2))
    followed = norms_before(made.run())
    assert len({norm for norms in followed for norm in norms}) == 6


def test_empty_batches_go_through_a_secure_sum(data):
    """Sums are exact to 2^-17, so that losses are those of the open sum but for rounding."""
    train = {"batch_size": 2, "epochs": 1, "optimizer": "sgd", "learning_rate": 0.05}
    open_sum = session(data, experiment({"noise": 1.0}, merge="sum", train=train)).run()
    empty = []

    def watch(party, direction, frame):
        if frame.kind is Kind.CUT and not frame.payload:
            empty.append(frame.step)

    hidden = experiment({"noise": 1.0}, merge="sum", secure="sum", train=train)
    masked = session(data, hidden, observers=[watch]).run()
    assert len(empty) > 10
    assert masked.label.privacy() == open_sum.label.privacy()
    assert np.isfinite(masked.label.history[-1]["train_loss"])
    quiet = [
        session(data, experiment({"noise": 1e-9, "clip": 100.0}, merge="sum", secure=secure,
                                 train=train)).run()
        for secure in ("none", "sum")
    ]  # fmt: skip
    assert weights_apart(*(one.weights() for one in quiet)) < 1e-3


def test_a_label_party_without_weights_takes_no_share_of_the_noise(data, monkeypatch):
    def plan(**changes):
        settings = experiment({"noise": 1.0}, merge="sum", **changes)
        terms = Terms.of(settings, "train", "run")
        return PrivacyPlan.of(terms, ROWS), terms

    parties = {name: {"width": 10, "bottom": "mlp:hidden=none"} for name in ("left", "right")}
    two, of_two = plan(parties=parties, label={"top": "identity"})
    three, of_three = plan(parties=parties)
    assert (two.halves, three.halves) == (2, 3)
    assert two.sensitivity(of_two) == pytest.approx(2**0.5)
    assert three.sensitivity(of_three) == pytest.approx(3**0.5)
    own, _ = plan(parties=parties | {"label": parties["left"]}, label={"top": "identity"})
    assert own.halves == 3
    whole = Terms.of

    def uncounted(*asked):
        terms = whole(*asked)
        return terms.model_copy(update={"dp": terms.dp.model_copy(update={"label_trains": False})})

    monkeypatch.setattr(Terms, "of", uncounted)
    with pytest.raises(PrivacyError, match="count no weights of the label party"):
        session(data, experiment({"noise": 1.0}))


class Session(PlayedSession):
    """Two feature parties and a lender over real streams."""

    def __init__(self, folder, flower, content):
        super().__init__(folder, flower, content)
        self.write_tables(("bank", "shop"))

    def write(self, name, more):
        super().write(name, PARTY.format(name=name, more=more))


@pytest.fixture
def federated(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    content = {
        "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in ("bank", "shop")},
        "label": {"party": "lender", "top": "linear"},
        "train": {"epochs": 2, "batch_size": 1},
        "dp": {"epsilon": 5.0},
        "federation": {"rejoin_window_s": 0.2, "max_restarts": 0, "join_timeout_s": 300.0},
    }
    return Session(tmp_path, Flower(("bank", "shop"), tells=True), content)


def test_parties_of_their_own_processes_train_and_answer_with_it(federated):
    seen = federated.play()
    sizes = {len(payload) for _, way, kind, _, payload in seen if kind is Kind.CUT and way == "up"}
    assert 0 in sizes
    summary = json.loads((federated.run / "summary.json").read_text())
    (stated,) = summary["privacy"]
    assert 4.99 < stated["epsilon"] <= 5.0
    parts = federated.folder / "bank" / "store" / "runs" / "run" / "parties" / "bank"
    weights = weights_at(parts / "weights.safetensors")
    assert all(torch.isfinite(one).all() for one in weights.values())
    (told,) = PartyFolder(parts).card()["privacy"]["states"]
    assert told["unit"] == "record"
    federated.play("evaluate")


def test_terms_without_a_key_are_refused_by_a_feature_party(federated, monkeypatch):
    monkeypatch.setattr("played_session.own_terms", lambda experiment, mode, run, party: Terms.of(
        experiment, mode, run))  # fmt: skip
    with pytest.raises(VFLError):
        federated.play()
    assert any(isinstance(one, PrivacyError) for one in federated.flower.failures)
