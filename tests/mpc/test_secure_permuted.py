"""``secure = "permuted"``: a session whose network nobody holds, every party in this process."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    BadOptionError,
    ExposedCutError,
    PrivateLayerError,
    ProtocolError,
    RingRangeError,
    RunFolderError,
    VFLError,
    WidthError,
)
from vfl.core.seeds import Secret
from vfl.core.storage import read_json
from vfl.experiments.pages import build_report
from vfl.experiments.plan import of_experiment
from vfl.mpc.ring import decode
from vfl.mpc.secure.permuted import PermutedEnd
from vfl.mpc.three_party.network import fixed_point_rate
from vfl.mpc.three_party.training import first_weights, targets_of
from vfl.session import rules, secure_mode
from vfl.training import run as in_process
from vfl.training.local import LocalSession
from vfl.training.run import load_data, session_of
from vfl.training.specs import check_specs

HOLDERS = ("bank", "shop")
SECRETS = {name: Secret.of_simulation(7, f"first weights of {name}") for name in HOLDERS}


def settings(mode="fast", label="lender", top="linear", source="breast_cancer", rows=300, **train):
    dealer = ",dealer=notary" if label in HOLDERS else ""
    defaults = {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.5, "epochs": 2}
    return {
        "secure": f"permuted:mode={mode}{dealer}",
        "merge": "concat",
        "data": {"source": source, "validation": 0} | ({"rows": rows} if rows else {}),
        "parties": {name: {"bottom": "identity"} for name in HOLDERS},
        "label": {"party": label, "top": top},
        "train": defaults | {"batch_size": 32} | train,
    }


def given(content):
    """The experiment, with the widths that identity asks for; and its rows."""
    data = load_data(Experiment.model_validate(content))
    if content["merge"] == "concat":
        for name in HOLDERS:
            content["parties"][name]["width"] = data[name].inputs[0].numel()
    return Experiment.model_validate(content), data


def trained(content, **options):
    experiment, data = given(content)
    return session_of(experiment, data, "train", secrets=SECRETS, **options).run()


def opened(session):
    """The weights, which only both holders together can tell."""
    label, bits = session.terms.label_party, secure_mode.make(session.terms.secure).rules.bits
    shares = session.weights()
    if label in HOLDERS:
        own = shares[label].items()
        shares[label] = {
            name.removeprefix("share."): share for name, share in own if name.startswith("share.")
        }
    one, other = (shares[name] for name in HOLDERS)
    return {name: decode(one[name] + other[name], bits) for name in one}


def layers_of(session):
    return session.label.network._facts.layers


def in_clear(session, data):
    """The same training in float64 by torch's gradients: the test outputs, and the weights."""
    terms, label = session.terms, data[session.terms.label_party]
    layers, classes = layers_of(session), len(label.classes or ())
    rows = torch.cat([data[name].inputs.double().flatten(1) for name in HOLDERS], 1)
    labels = label.labels
    if not classes:
        train = labels[label.split.train].double()
        labels = (labels - train.mean()) / train.std(correction=0)
    targets = targets_of(labels, classes)
    halves = [first_weights(layers, SECRETS[name]) for name in HOLDERS]
    weights = {name: (halves[0][name] + halves[1][name]).requires_grad_() for name in halves[0]}

    def outputs(index):
        values = rows[index]
        for number, layer in enumerate(layers):
            values = values @ weights[f"{number}.weight"] + weights[f"{number}.bias"]
            values = torch.relu(values) if layer.function == "relu" else values
        return values

    for exchange in rules.schedule(terms, label.split):
        if not exchange.trains:
            continue
        index = torch.from_numpy(exchange.rows)
        divided = len(index) / (1 if classes else 2)
        times, shift = fixed_point_rate(terms.train.learning_rate / divided)
        loss = (
            binary_cross_entropy_with_logits(outputs(index), targets[index], reduction="sum")
            if classes
            else mse_loss(outputs(index), targets[index], reduction="sum") / 2
        )
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for value, gradient in zip(weights.values(), gradients, strict=True):
                value -= times / 2**shift * gradient
    with torch.no_grad():
        return outputs(torch.from_numpy(label.split.test)), weights


@pytest.mark.parametrize(
    ("mode", "source", "label", "top"),
    [
        ("fast", "breast_cancer", "lender", "linear"),
        ("thesis", "breast_cancer", "bank", "mlp:hidden=8"),
        ("fast", "digits", "shop", "mlp:hidden=16"),
    ],
)
def test_the_curve_is_that_in_clear(mode, source, label, top):
    experiment, data = given(settings(mode, label, top, source))
    session = session_of(experiment, data, "train", secrets=SECRETS).run()
    outputs, weights = in_clear(session, data)
    found = opened(session)
    for name, value in weights.items():
        error = float((found[name] - value.detach()).abs().max())
        assert error < 1e-4 * max(1.0, float(value.detach().abs().max())), name
    guess = (outputs[:, 0] > 0).long() if outputs.shape[1] == 1 else outputs.argmax(1)
    truth = data[label].labels[data[label].split.test]
    right = float((guess == truth).double().mean())
    assert session.label.history[-1]["test_accuracy"] == pytest.approx(right, abs=0.001)


def regression(folder, unit=1.0):
    draw = np.random.default_rng(0)
    columns = draw.normal(size=(200, 4))
    table = pd.DataFrame(columns, columns=list("abcd"))
    table["y"] = unit * (columns @ [3.0, -2.0, 1.0, 0.5] + 4 + 0.1 * draw.normal(size=200))
    table.to_csv(folder / "table.csv", index=False)
    content = settings(source=str(folder / "table.csv"), rows=None, epochs=10, learning_rate=0.1)
    content["label"] |= {"column": "y", "task": "regression"}
    for name, own in zip(HOLDERS, (["a", "b"], ["c", "d"]), strict=True):
        content["parties"][name]["columns"] = own
    return content


def test_a_regression_in_the_units_of_its_labels(tmp_path):
    unit = 1000.0
    experiment, data = given(regression(tmp_path, unit))
    session = session_of(experiment, data, "train", secrets=SECRETS).run()
    outputs, _ = in_clear(session, data)
    label = data["lender"]
    train, truth = (label.labels[rows].double() for rows in (label.split.train, label.split.test))
    answers = outputs[:, 0] * train.std(correction=0) + train.mean()
    rmse = float(((answers - truth) ** 2).mean().sqrt())
    assert rmse < 0.2 * unit
    assert session.label.history[-1]["test_rmse"] == pytest.approx(rmse, rel=1e-3)


def test_columns_that_are_too_large_are_named(tmp_path):
    """An outlier among the test rows, which the encoder has not seen."""
    content = regression(tmp_path)
    _, data = given(content)
    table = pd.read_csv(tmp_path / "table.csv")
    table.loc[data["shop"].split.test[0], "c"] = 1e6
    table.to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(RingRangeError) as caught:
        trained(content)
    assert caught.value.where == "test inputs of P1"
    assert caught.value.fix.startswith("scale the columns")


def test_first_weights_and_shares_are_secret():
    """Two trainings from one seed share nothing that P2 could know beforehand."""
    experiment, data = given(settings(rows=100))
    one, two = (
        session_of(
            experiment, data, "train", secrets={name: Secret.fresh() for name in HOLDERS}
        ).run()
        for _ in range(2)
    )
    assert not torch.equal(one.weights()["shop"]["0.weight"], two.weights()["shop"]["0.weight"])
    apart = opened(one)["0.weight"] - opened(two)["0.weight"]
    assert float(apart.abs().max()) > 1e-3


def test_summed_linear_bottoms_are_one_linear_layer():
    content = settings(top="linear") | {"merge": "sum"}
    content["parties"] = {name: {"bottom": "mlp:hidden=none", "width": 4} for name in HOLDERS}
    session = trained(content)
    assert [(layer.inputs, layer.outputs) for layer in layers_of(session)] == [(30, 4), (4, 1)]
    assert session.label.history[-1]["test_accuracy"] > 0.9


@pytest.fixture
def run(tmp_path):
    """A run folder of a training, with the label party's name."""

    def make(**changes):
        experiment, data = given(settings(**changes))
        in_process.train(experiment, tmp_path, "run", data=data)
        return RunFolder.open(tmp_path / "run")

    return make


@pytest.mark.parametrize("label", ["lender", "bank"])
def test_a_run_is_trained_evaluated_predicted_and_reported(run, label):
    folder = run(label=label, top="mlp:hidden=8")
    summary = read_json(folder.path / "summary.json")
    assert summary["test_accuracy"] > 0.9
    assert in_process.evaluate(folder)["test_accuracy"] == summary["test_accuracy"]
    table = pd.read_csv(in_process.predict(folder))
    assert len(table) == 60
    assert set(table["prediction"]) == {"malignant", "benign"}
    assert "permuted" in build_report(folder.path).read_text()
    helper = "lender" if label == "lender" else "notary"
    seen = {(one["observer"], one["what"].split(",")[0]) for one in summary["revealed"]}
    assert {(helper, "permuted values"), (label, "result")} <= seen
    of_values = {what for who, what in seen if who == "bank" and not what.startswith("columns")}
    assert of_values <= ({"result", "number of columns"} if label == "bank" else set())
    outputs = [one for one in summary["revealed"] if "outputs" in one["what"]]
    assert [(one["observer"], one["phase"], one["values"]) for one in outputs] == [
        (label, "evaluate", 60)
    ]
    phases = {row["phase"] for row in summary["traffic"]}
    assert phases == {"setup", "offline", "online"}
    assert {row["party"] for row in summary["traffic"]} == {*HOLDERS, helper}


def test_parts_of_two_trainings_do_not_go_together(run, tmp_path):
    folder = run()
    share = folder.party("bank") / "weights.safetensors"
    kept = share.read_bytes()
    experiment, data = given(settings())
    in_process.train(experiment.model_copy(update={"seed": 1}), tmp_path, "other", data=data)
    share.write_bytes((tmp_path / "other" / "parties" / "bank" / share.name).read_bytes())
    with pytest.raises(RunFolderError):
        in_process.evaluate(folder)
    share.write_bytes(kept)
    in_process.evaluate(folder)


@pytest.mark.parametrize("label", ["lender", "shop"])
def test_a_training_goes_on_from_its_last_checkpoint(tmp_path, label):
    content = settings(label=label, top="mlp:hidden=4", epochs=3, checkpoint_every=5)
    whole = trained(content)

    class Stopped(Exception):
        pass

    def stop(record):
        if record["epoch"] == 2:
            raise Stopped

    with pytest.raises(Stopped):
        trained(content, checkpoints=tmp_path, on_epoch=stop)
    helper = "lender" if label == "lender" else "notary"
    assert {path.name for path in tmp_path.iterdir()} == {*HOLDERS, helper}
    again = trained(content, checkpoints=tmp_path)
    assert [one["epoch"] for one in again.label.history] == [1, 2, 3]
    assert again.label.progress.train_steps == whole.label.progress.train_steps
    # New keys: the last bit of a truncation differs, as between two trainings.
    one, two = opened(again), opened(whole)
    assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
    assert again.label.history[-1]["test_accuracy"] == whole.label.history[-1]["test_accuracy"]

    def counts(session):
        # How many values lie near the wrap-around is for the shares to say, which are new.
        found = [each for each in session.revealed() if "indices" not in each.what]
        return {(each.observer, each.what, each.phase): each.times for each in found}

    assert counts(again) == counts(whole)


def test_rows_that_changed_since_the_checkpoint_are_refused(tmp_path):
    content = settings(epochs=1, checkpoint_every=3)
    experiment, data = given(content)
    session_of(experiment, data, "train", checkpoints=tmp_path).run()
    data["bank"].inputs[0, 0] += 1
    with pytest.raises(VFLError, match="changed since the checkpoint"):
        session_of(experiment, data, "train", checkpoints=tmp_path).run()


def test_validation_rows_stop_a_training_where_they_may_be_asked():
    content = settings(top="mlp:hidden=4", epochs=40, patience=2, keep="best", learning_rate=2)
    content["secure"] += ",validate=True"
    content["data"]["validation"] = 0.2
    session = trained(content)
    last = session.label.history[-1]
    assert 0 < last["best_epoch"] < len(session.label.history) < 40
    assert "those of validation rows" in secure_mode.promise(session.terms)
    (told,) = [one for one in session.revealed() if "validation outputs" in one.what]
    assert told.times == len(session.label.history)


REFUSED = [
    ({"codec": "topk:k=4"}, ExposedCutError),
    ({"defense": "anchored"}, ExposedCutError),
    ({"merge": "sum"}, ExposedCutError),
    ({"secure": "permuted:dealer=notary"}, ExposedCutError),
    ({"secure": "permuted:mode=slow"}, BadOptionError),
    ({"secure": "permuted:bits=40"}, BadOptionError),
    ({"secure": "permuted:magnitude_bits=20"}, BadOptionError),
    ({"label": {"party": "bank", "top": "linear"}}, ExposedCutError),
    ({"parties": {"bank": {"bottom": "identity"}}}, ExposedCutError),
    ({"parties": {name: {"bottom": "mlp:hidden=4"} for name in HOLDERS}}, ExposedCutError),
    ({"trace": {"phases": ["train"]}}, ExposedCutError),
    *(
        ({"train": settings()["train"] | wrong}, ExposedCutError)
        for wrong in (
            {"optimizer": "adam"},
            {"momentum": 0.9},
            {"weight_decay": 0.1},
            {"in_flight": 2},
            {"precision": "bfloat16"},
            {"compile": True},
        )
    ),
    ({"data": {"source": "breast_cancer", "validation": 0.1}}, ExposedCutError),
]


@pytest.mark.parametrize(("wrong", "error"), REFUSED, ids=[str(one) for one, _ in REFUSED])
def test_settings_that_fit_no_shared_network_are_refused(wrong, error):
    with pytest.raises(error):
        check_specs(Experiment.model_validate(settings() | wrong))


def test_a_width_a_top_and_weights_of_classes_that_do_not_fit_are_refused():
    content = settings()
    experiment, data = given(content)
    for wrong, error in (
        ({"class_weight": "balanced"}, ExposedCutError),
        ({"top": "mlp:hidden=4,batch_norm=true"}, PrivateLayerError),
    ):
        label = experiment.label.model_copy(update=wrong)
        with pytest.raises(error):
            session_of(experiment.model_copy(update={"label": label}), data, "train")
    content["parties"]["bank"]["width"] = 7
    with pytest.raises(WidthError) as caught:
        session_of(Experiment.model_validate(content), data, "train").run()
    assert caught.value.fix == "-s parties.bank.width=15"
    with pytest.raises(ExposedCutError):
        LocalSession(experiment, data, outputs=2)


@pytest.mark.parametrize("merge", ["concat", "sum"])
@pytest.mark.parametrize("told", [b"\xff" * 4, b""])
def test_columns_that_cannot_be_make_no_network(monkeypatch, merge, told):
    content = settings() | {"merge": merge}
    if merge == "sum":
        content["parties"] = {name: {"width": 4, "bottom": "mlp:hidden=none"} for name in HOLDERS}
    experiment, data = given(content)
    session, announced = session_of(experiment, data, "train"), PermutedEnd.announced
    lie = lambda end: told if end.party == "bank" else announced(end)  # noqa: E731
    monkeypatch.setattr(PermutedEnd, "announced", lie)
    with pytest.raises(ProtocolError, match="'bank' announces an invalid number"):
        session.run()


def test_a_plan_shows_who_learns_what(tmp_path):
    lines = Path("examples/network_on_shares.toml")
    facts = of_experiment(lines)
    assert "permuted values" in facts["secure"]
    assert facts["inputs"] == {"radiology": "15", "pathology": "15"}
    assert list(itertools.islice(facts, 2)) == ["parties", "label_party"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thesis", "fast"])
def test_mnist_as_in_figure_5_4(data_root, monkeypatch, mode):
    """784-128-10, half of the rows: within 0.1 point of the training in plaintext."""
    monkeypatch.setenv("VFL_DATA", str(data_root))
    content = settings(
        mode, "lender", "mlp:hidden=128", "mnist", 35_000, batch_size=128, learning_rate=0.1
    )
    experiment, data = given(content)
    session = session_of(experiment, data, "train", secrets=SECRETS).run()
    outputs, _ = in_clear(session, data)
    truth = data["lender"].labels[data["lender"].split.test]
    accuracy = float((outputs.argmax(1) == truth).double().mean())
    assert accuracy > 0.8
    print(f"{mode}: {session.label.history[-1]['test_accuracy']:.4f}, in plaintext {accuracy:.4f}")
    assert abs(session.label.history[-1]["test_accuracy"] - accuracy) <= 0.001 + 1e-9
