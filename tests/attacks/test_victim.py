"""A finished run as a case: the cuts are those that travel, and the rows those of the split."""

import numpy as np
import pytest
import torch

from vfl import compression
from vfl.attacks import Grant, make
from vfl.attacks.base import before_last, features, through
from vfl.attacks.cases import Setting, Victim
from vfl.attacks.scoring import attempt
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    ExposedCutError,
    NotGrantedError,
    RunFolderError,
    TooFewRowsError,
    UserError,
)
from vfl.core.frame import Kind
from vfl.core.seeds import generator
from vfl.defenses import DEFENSES, Defense
from vfl.session.trace import EVALUATION, Trace
from vfl.training import run


def experiment(**settings):
    parties = {name: {"width": 8, "bottom": "mlp:hidden=16"} for name in ("left", "right")}
    content = {
        "name": "attacked",
        "data": {"source": "digits", "rows": 400},
        "parties": parties,
        "label": {"top": "linear"},
        "train": {"epochs": 4, "batch_size": 32},
    }
    return Experiment.model_validate(content | settings)


@pytest.fixture(scope="module", params=["none", "topk:k=2,values=4", "size:k=3"])
def trained(request, tmp_path_factory):
    asked = experiment(codec=request.param, defense="layer_norm")
    root = tmp_path_factory.mktemp("runs")
    run.train(asked, root, "one")
    data = run.load_data(asked)
    return (
        RunFolder.open(root / "one"),
        data,
        Victim.of_run(RunFolder.open(root / "one"), data, "left"),
    )


def leak():
    return generator(0, "leak")


def test_cuts_are_what_the_label_party_decodes(trained):
    folder, data, victim = trained
    trace = Trace(EVALUATION, ["left"])
    asked = folder.experiment()
    weights = {name: run.PartyFolder(folder.party(name)).weights() for name in data}
    run.session_of(asked, data, "predict", weights=weights, observers=[trace]).run()
    codec, rows = compression.make(asked.codec), len(data["left"].split.test)
    (frame,) = [one for one in trace if one.kind is Kind.QUERY]
    width = codec.wire_width(8)
    decoded = codec.decode(frame.payload, rows, width, StepContext(frame.step)).cut
    assert torch.equal(victim.case(1, leak()).view.targets.cuts, decoded)


def test_the_bottom_gives_the_cut_before_the_codec(trained):
    folder, _, victim = trained
    view = victim.case(1, leak()).view
    found, cuts = through(view.bottom(), view.targets.inputs), view.targets.cuts
    codec = compression.make(folder.experiment().codec)
    if folder.experiment().codec == "none":
        assert torch.allclose(found.mean(1), torch.zeros(len(found)), atol=1e-5)  # layer norm
    expected = codec.decode(codec.encode(found).payload, *found.shape).cut
    assert torch.allclose(expected, cuts, atol=1e-6)


def test_rows_are_those_of_the_split(trained):
    _, data, victim = trained
    labels, split = data["label"].labels, data["left"].split
    case = victim.case(2, leak(), Setting(targets="validation", leaks="test", unlabelled="train"))
    view, inputs = case.view, data["left"].inputs
    assert torch.equal(case.labels, labels[split.validation])
    assert torch.equal(view.targets.inputs, inputs[split.validation])
    assert torch.equal(view.unlabelled.inputs, inputs[split.train])
    assert view.leaked.labels.bincount().tolist() == [2] * 10
    test = {tuple(row.flatten().tolist()) for row in inputs[split.test]}
    assert {tuple(row.flatten().tolist()) for row in view.leaked.inputs} <= test
    shares = np.bincount(labels[split.train]) / len(split.train)
    assert np.allclose(view.prior.numpy(), shares)


def test_rows_that_leak_are_not_attacked_as_well(trained):
    with pytest.raises(UserError, match="rows that the attacker already knows cannot be attacked"):
        trained[2].case(1, leak(), Setting(leaks="test"))


def test_without_leaks_none_are_granted(trained):
    threat = trained[2].case(0, leak()).view.threat
    assert Grant.LEAKED not in threat.grants
    assert threat.counterfactual == frozenset()


def test_the_layer_before_the_cut_is_run_once_for_all_cases(trained, monkeypatch):
    victim = trained[2]
    views = [victim.case(1, generator(0, "leak", draw)).view for draw in (0, 1)]
    plain = before_last(views[0].bottom(), views[0].targets.inputs)
    assert torch.equal(features(views[0], views[0].targets, "before"), plain)
    monkeypatch.setattr("vfl.attacks.base.before_last", None)
    assert torch.equal(features(views[1], views[1].unlabelled, "before"), plain)
    with pytest.raises(NotGrantedError):
        features(views[0].only({Grant.INPUTS}), views[0].only({Grant.INPUTS}).targets, "before")


def around_bottoms():
    """Specs of the defenses that put something around a bottom."""
    kinds = {name: DEFENSES.member(name) for name in DEFENSES.names()}
    around = {n: kind for n, kind in kinds.items() if kind.wrap_bottom is not Defense.wrap_bottom}
    return [name for name, kind in around.items() if not kind.of_words]  # columns are no words


@pytest.mark.parametrize(
    "asked",
    [{"defense": spec} for spec in ["none", *around_bottoms()]]
    + [{"codec": "sign:width=4"}]
    + [{"defense": "passport", "codec": "size:k=3"}],
    ids=str,
)
def test_the_layer_before_the_cut_is_the_bottoms_own(asked, tmp_path):
    told = experiment(**asked, train={"epochs": 1, "batch_size": 32})
    run.train(told, tmp_path, "one")
    folder, data = RunFolder.open(tmp_path / "one"), run.load_data(told)
    case = Victim.of_run(folder, data, "left").case(2, leak())
    rows = case.view.targets.inputs.flatten(1)
    expected = rows  # before principal components, which nothing trained
    if asked.get("defense") != "label_free":
        weights = run.PartyFolder(folder.party("left")).weights().values()
        bias, weight = sorted(
            (one for one in weights if one.shape[:1] == (16,)), key=torch.Tensor.dim
        )
        expected = torch.relu(rows @ weight.T + bias)
    found = features(case.view, case.view.targets, "before")
    assert torch.allclose(found, expected, atol=1e-6)
    assert attempt(case, make("fine_tuning:at=before,steps=1"), leak()).measure == "accuracy"


def test_what_cannot_be_attacked_is_refused(trained):
    folder, data, victim = trained
    with pytest.raises(RunFolderError):
        Victim.of_run(folder, data, "nobody")
    for party in ("label", "middle"):
        with pytest.raises(UserError, match="no feature party"):
            Victim(folder.experiment(), data, party, {})
    with pytest.raises(TooFewRowsError):
        victim.case(500, leak())


def test_a_run_with_shared_first_layers_has_no_bottom_to_attack(tmp_path):
    parties = {name: {"width": 8, "bottom": "mlp:hidden=none"} for name in ("left", "right")}
    train = {"epochs": 1, "optimizer": "sgd", "momentum": 0}
    asked = experiment(secure="beaver", merge="sum", parties=parties, train=train)
    run.train(asked, tmp_path, "shared")
    with pytest.raises(ExposedCutError, match="no party has a bottom"):
        Victim.of_run(RunFolder.open(tmp_path / "shared"), run.load_data(asked), "left")
