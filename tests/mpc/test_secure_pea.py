"""``secure = "pea"``: a session that trains on rows nobody shows, every party in this process."""

import json

import pandas as pd
import pytest
import torch

from vfl.cli import app
from vfl.config import Consent, Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    ConfigError,
    ConsentError,
    DataError,
    DisagreementError,
    ExposedCutError,
    PrivacyError,
    ProtocolError,
)
from vfl.core.storage import read_json
from vfl.models import make_bottom
from vfl.mpc.many.members import Member
from vfl.mpc.secure import pea
from vfl.mpc.stream import PadStream
from vfl.session import rules
from vfl.session.consent import check_layers
from vfl.session.dp_plan import PrivacyPlan
from vfl.session.secure_mode import make
from vfl.training.run import load_data, session_of

PARTIES = ("north", "east")
ROWS = """
name = "pea"
data = { source = "breast_cancer", validation = 0, rows = 200 }
parties = { north = { bottom = "identity" }, east = { bottom = "identity" } }
label = { party = "north", top = "linear" }
[train]
epochs = 1
batch_size = 40
optimizer = "sgd"
momentum = 0
learning_rate = 0.5
"""


def settings(secure="pea", parties=PARTIES, label="north", dp=None, **train):
    defaults = {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.5, "epochs": 1}
    return {
        "name": "pea",
        "secure": secure,
        "data": {"source": "breast_cancer", "validation": 0, "rows": 200},
        "parties": {name: {"bottom": "identity"} for name in parties},
        "label": {"party": label, "top": "linear"},
        "train": defaults | {"batch_size": 80} | train,
        "dp": dp or {"noise": 0.001, "clip": 1.0},
    }


def experiment(*given, **changed):
    return Experiment.model_validate(settings(*given, **changed))


def trained(chosen, **options):
    data = load_data(chosen)
    return session_of(chosen, data, "train", **options).run(), data


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    """The plain reference knows the batches by the order of the tables."""
    monkeypatch.setattr("vfl.mpc.many.members.Member.shuffled", lambda self, *rows: list(rows))


def in_clear(session, inputs, labels, classes=2, longest=8.0):
    """The same steps of DP-SGD in float64, without noise, from the rows themselves."""
    terms = session.terms
    rows = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    truth = torch.nn.functional.one_hot(labels.long(), classes).double()
    weights = torch.zeros(rows.shape[1], classes, dtype=torch.float64)
    for exchange in rules.schedule(terms, session.label.network.split):
        if exchange.trains:
            x, y = rows[exchange.rows], truth[exchange.rows]
            errors = (x @ weights / 4 + 0.5).clamp(0, 1) - y
            norms = errors.norm(dim=1) * x.norm(dim=1)
            scale = (terms.dp.clip / norms.clamp_min(1e-9)).clamp(max=1)
            step = terms.train.learning_rate / terms.train.batch_size
            weights -= step * (x.T @ (errors * scale[:, None]))
    return weights


def shortened(inputs, longest):
    return inputs * (longest / inputs.norm(dim=1, keepdim=True).clamp_min(longest))


@pytest.mark.parametrize("parties", [PARTIES, ("north", "east", "south")])
def test_rows_of_each_train_the_model_of_all_rows_in_clear(parties):
    session, data = trained(experiment(parties=parties))
    own = [data[name] for name in parties]
    inputs = torch.cat([one.inputs[one.split.train].double().flatten(1) for one in own])
    labels = torch.cat([one.labels[one.split.train] for one in own])
    assert sum(len(one.split.train) for one in own) == len(inputs) == 160
    wanted = in_clear(session, shortened(inputs, 8.0), labels)
    weights = session.weights()
    for name in parties:
        found = weights[name].get("weight", weights[name].get("share.weight"))
        assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()
    assert session.label.history[-1]["test_accuracy"] > 0.8


@pytest.mark.parametrize("secure", ["pea:form=permuted", "pea:divided=columns"])
def test_features_are_taken_from_rows_before_they_are_shared(secure):
    content = settings(secure, learning_rate=2.0, batch_size=60)
    content["data"] = {"source": "digits", "validation": 0, "rows": 300}
    for party in content["parties"].values():
        party["bottom"] = "hog:cell=2,orientations=4"
    session, data = trained(Experiment.model_validate(content))
    own = [data[name].inputs for name in PARTIES]
    recipe, parts = make_bottom("hog:cell=2,orientations=4"), []
    for name, pictures in zip(PARTIES, own, strict=True):
        shape = tuple(pictures.shape[1:])
        found = recipe.build(shape, recipe.columns(shape))(pictures).double()
        parts.append(found[data[name].split.train])
    together = torch.cat(parts, int("columns" in secure))
    labels = [
        data[name].labels[data[name].split.train]
        for name in PARTIES
        if data[name].labels is not None
    ]
    wanted = in_clear(session, together, torch.cat(labels), classes=10)
    found = session.weights()["east"]["weight"]
    assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()
    assert session.label.history[-1]["test_accuracy"] > 0.5


def test_columns_of_each_train_the_model_of_all_columns_in_clear():
    label = "clinic"
    session, data = trained(experiment("pea:divided=columns", label=label))
    train = data[label].split.train
    parts = [
        shortened(data[name].inputs[train].double().flatten(1), 8.0 / 2**0.5) for name in PARTIES
    ]
    wanted = in_clear(session, torch.cat(parts, 1), data[label].labels[train])
    found = session.weights()["east"]["weight"]
    assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()
    assert session.label.history[-1]["test_accuracy"] > 0.8


def test_a_file_trains_evaluates_and_predicts_by_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.toml").write_text(ROWS)
    budget = ["-s", "dp.epsilon=8", "-s", "dp.delta=1e-5"]
    app(["train", "rows.toml", "-s", "secure=pea", *budget], standalone_mode=False)
    told = capsys.readouterr().out
    assert "epsilon 8, delta 1e-05 for one record in one training" in told
    (path,) = (tmp_path / "runs").iterdir()
    summary = RunFolder.open(path).summary()
    (stated,) = summary["privacy"]
    assert stated["epsilon"] == pytest.approx(8, rel=1e-3)
    assert "no holder omits its noise" in stated["assumes"]
    for name in PARTIES:
        card = read_json(path / "parties" / name / "card.json")
        assert card["privacy"]["states"] == summary["privacy"]
        assert card["model"]["half"] == "the whole model, which every holder has"
    assert (path / "report.html").exists()
    for command in ("evaluate", "predict"):
        app([command, str(path)], standalone_mode=False)
    assert RunFolder.open(path).evaluation()["test_loss"] == pytest.approx(summary["test_loss"])
    assert len(pd.read_csv(path / "predictions.csv")) == 40


class Broken(Exception):
    """What ends a party in the middle of a training."""


def test_a_training_goes_on_after_a_party_was_lost_and_repeats_no_mask(tmp_path, monkeypatch):
    """The keys of every pad of both attempts are new, and the model is that of all steps."""
    keys, made = [], PadStream.__init__

    def noted(self, key):
        keys.append(key)
        made(self, key)

    monkeypatch.setattr(PadStream, "__init__", noted)
    chosen = experiment(checkpoint_every=2, learning_rate=0.3, batch_size=40)
    steps, step = [], pea.train_step

    def breaks(member, *rest):
        if member.role == 1:
            steps.append(1)
            if len(steps) == 4:
                raise Broken
        return step(member, *rest)

    monkeypatch.setattr(pea, "train_step", breaks)
    with pytest.raises(Broken):
        trained(chosen, checkpoints=tmp_path)
    first = len(keys)
    session, data = trained(chosen, checkpoints=tmp_path)
    assert len(steps) == 4 + PrivacyPlan.of(session.terms, 160).steps - 2, "it goes on from 2"
    pads = len(keys) // 2  # each pair has its key at two ends, and the order at every holder
    assert first
    assert len(set(keys)) == len(set(keys[:first])) + len(set(keys[first:]))
    assert pads == len(set(keys))
    own = [data[name] for name in PARTIES]
    inputs = torch.cat([one.inputs[one.split.train].double().flatten(1) for one in own])
    labels = torch.cat([one.labels[one.split.train] for one in own])
    wanted = in_clear(session, shortened(inputs, 8.0), labels)
    found = session.weights()["east"]["weight"]
    assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()


def test_a_model_that_was_revealed_is_revealed_anew_and_never_trained_anew(tmp_path):
    """A second noise would be averaged out; the same shares give the same model again."""
    chosen = experiment("pea:form=permuted", checkpoint_every=2)
    first, _ = trained(chosen, checkpoints=tmp_path)
    again, _ = trained(chosen, checkpoints=tmp_path)
    assert torch.equal(first.weights()["east"]["weight"], again.weights()["east"]["weight"])
    last = PrivacyPlan.of(first.terms, 160).steps
    own = first.label.checkpoints
    assert own.committed() == last
    for party in (*PARTIES, "dealer"):
        (tmp_path / party / "checkpoints" / f"{last:010d}.checkpoint").write_bytes(b"damaged")
    with pytest.raises(PrivacyError, match="may have been revealed"):
        trained(chosen, checkpoints=tmp_path)


def test_noise_is_new_in_every_attempt():
    chosen = experiment("pea:form=permuted", dp={"noise": 1.0})
    models = [trained(chosen)[0].weights()["east"]["weight"] for _ in "ab"]
    assert (models[0] - models[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"secure": "pea:dealer=east"}, ExposedCutError, "could undo masks"),
        ({"label": {"party": "clinic", "top": "linear"}}, ExposedCutError, "the label party too"),
        ({"label": {"party": "north"}}, ExposedCutError, "one linear layer"),
        ({"parties": {name: {} for name in PARTIES}}, ExposedCutError, "one linear layer"),
        ({"merge": "sum"}, ExposedCutError, "one linear layer"),
        (
            {"parties": {"north": {"bottom": "hog"}, "east": {"bottom": "identity"}}},
            ExposedCutError,
            "one linear layer",
        ),
        ({"codec": "randtopk:k=4"}, ExposedCutError, "codec has no effect"),
        ({"defense": "layer_norm"}, ExposedCutError, "defense has no effect"),
        ({"train": {"optimizer": "adam"}}, ExposedCutError, "train.optimizer"),
        ({"data": {"source": "breast_cancer"}}, ExposedCutError, "no epoch can be validated"),
        ({"dp": None}, PrivacyError, "without noise it would disclose facts about rows"),
        ({"dp": {"epsilon": 1, "sampling": "shuffled"}}, PrivacyError, "one public norm"),
        ({"dp": {"epsilon": 1, "quantile": 0.5}}, PrivacyError, "one public norm"),
        (
            {"parties": {n: {"bottom": "identity", "columns": ["a"]} for n in PARTIES},
             "data": {"source": "t.csv", "validation": 0},
             "label": {"party": "north", "top": "linear", "column": "y"}},
            ConfigError,
            "have all columns",
        ),
    ],
)  # fmt: skip
def test_what_has_no_place_is_refused(changed, error, said):
    content = {**settings(), **changed}
    if content["dp"] is None:
        del content["dp"]
    with pytest.raises(error, match=said):
        trained(Experiment.model_validate(content))


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ({}, None),
        ({"max_dp_epsilon": 3.0}, "dp epsilon"),
        ({"max_dp_epsilon": 4.5}, None),
        ({"min_dp_noise": 50.0}, "dp noise"),
        ({"max_memory_bytes": 1000}, "bytes of memory"),
    ],
)
def test_each_party_holds_its_own_limit_against_the_rows_of_all(limits, refused):
    """Of its own rows alone the same noise would seem to cost much more."""
    terms = session_of(chosen := experiment(dp={"epsilon": 4.0}), load_data(chosen), "train").terms
    sizes = pea.PeaLayers(training_rows=160, columns=30, classes=2, batch_rows=160)
    if refused is None:
        check_layers(terms, "east", Consent(**limits), None, sizes)
        return
    with pytest.raises(ConsentError, match=refused):
        check_layers(terms, "east", Consent(**limits), None, sizes)


def tables(folder, **renamed):
    """Rows of two parties with one table each; the second may have other columns or classes."""
    draw = torch.Generator().manual_seed(1)
    for name in PARTIES:
        numbers = torch.randn(120, 3, generator=draw).numpy()
        frame = pd.DataFrame(numbers, columns=list("abc"))
        frame["y"] = ["yes" if one > 0 else "no" for one in numbers[:, 0]]
        frame.insert(0, "id", range(120))
        if name == "east":
            frame = frame.rename(columns=renamed.get("columns", {}))
            frame["y"] = frame["y"].replace(renamed.get("classes", {}))
        frame.to_csv(folder / f"{name}.csv", index=False)
    content = settings()
    content["data"] = {"source": "north.csv", "id": "id", "validation": 0}
    content["label"]["column"] = "y"
    content["data"]["source"] = str(folder / "north.csv")
    for name in PARTIES:
        content["parties"][name]["source"] = str(folder / f"{name}.csv")
    return Experiment.model_validate(content)


def test_tables_of_each_give_its_rows(tmp_path):
    session, data = trained(tables(tmp_path))
    assert {name: len(data[name].split.train) for name in PARTIES} == {"north": 96, "east": 120}
    assert session.label.history[-1]["test_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("renamed", "error", "said"),
    [
        ({"columns": {"b": "d"}}, DisagreementError, "different columns"),
        ({"classes": {"yes": "maybe"}}, DataError, "1 of 2 classes unknown"),
    ],
)
def test_other_columns_or_classes_are_refused(tmp_path, renamed, error, said):
    with pytest.raises(error, match=said) as raised:
        trained(tables(tmp_path, **renamed))
    assert "maybe" not in str(raised.value)


def test_a_dealer_that_leaves_something_out_is_noticed(monkeypatch):
    """Its frames are numbered, so that one that is missing ends the training with an error."""
    deal = Member._deal

    def leaves_out(self, values, name, number, **rest):
        return deal(self, values, name, number + (name == "parts"), **rest)

    monkeypatch.setattr(Member, "_deal", leaves_out)
    with pytest.raises(ProtocolError, match="unexpected message"):
        trained(experiment())


def test_what_everybody_learned_is_sizes_and_the_model():
    session, _ = trained(experiment())
    found = {(one.observer, one.what) for one in session.revealed()}
    assert found == {(name, "result, model") for name in PARTIES}
    text = json.dumps(make("pea").promise(session.terms))
    assert "dealer sees no value" in text
    assert "norms of gradients" in make("pea:form=permuted").promise(session.terms)
    assert "unless it colludes with a holder" in text


def test_a_beginning_costs_its_part_of_the_budget(monkeypatch):
    """What it is `test_secure_dpsgd.py` says; here two holders and a dealer begin with it."""
    begun, started = [], pea.started
    monkeypatch.setattr(pea, "started", lambda *given: begun.append(1) or started(*given))
    budget = {"epsilon": 8.0, "delta": 1e-4}
    sessions = [
        trained(experiment(secure, dp=budget, batch_size=120))[0]
        for secure in ("pea:start=best", "pea:start=average", "pea")
    ]
    assert len(begun) == 2 * 3
    for session in sessions:
        (state,) = session.label.privacy()
        assert state.epsilon == pytest.approx(8.0, rel=1e-2)
        assert state.delta == pytest.approx(1e-4)
    thirds, halves, whole = (session.label.network._sgd.noise for session in sessions)
    assert thirds > 1.1 * halves > 1.2 * whole
    for changed in ({"dp": {"noise": 1.0}}, {"secure": "pea:divided=columns,start=average"}):
        content = settings("pea:start=average", dp=budget) | changed
        with pytest.raises(PrivacyError, match="part of the budget"):
            trained(Experiment.model_validate(content))
