"""Rows that a feature party lacks: left out, or with a learned vector in the place of their cut."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from killing import Killed, Killer
from served import Serving, predicted, same, settings
from sklearn.datasets import load_breast_cancer

from vfl.config import Experiment, with_overrides
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, MisalignedError, SpecError, VFLError
from vfl.core.frame import Kind
from vfl.experiments.attack_grid import attack_finished_run
from vfl.experiments.cells import Cell, GridFolder
from vfl.experiments.scheduler import run_cells
from vfl.serving.local import serve
from vfl.session import Exchange, rules
from vfl.session.schedule import own_rows
from vfl.training.alignment import align
from vfl.training.local import LocalSession
from vfl.training.run import evaluate, load_data, predict, train

SHARES = {"clinic": 0.7, "laboratory": 0.8}


def tables(folder, seed=0, shares: Mapping[str, float] = SHARES):
    """Breast cancer as three owners have it: labels of all rows, columns of some."""
    cells = load_breast_cancer(as_frame=True)
    frame = cells.data.assign(patient=[f"P{n:04d}" for n in range(len(cells.data))])
    drawn = np.random.default_rng(seed)
    columns = {"clinic": list(cells.data)[:10], "laboratory": list(cells.data)[20:]}
    for party, share in shares.items():
        own = frame[["patient", *columns[party]]].sample(frac=share, random_state=drawn)
        stranger = own.head(30).assign(patient=[f"{party[0]}{n}" for n in range(30)])
        pd.concat([own, stranger]).sample(frac=1, random_state=drawn).to_csv(
            folder / f"{party}.csv", index=False
        )
    labels = frame[["patient"]].assign(benign=cells.target)
    labels.sample(frac=1, random_state=drawn).to_csv(folder / "registry.csv", index=False)


def experiment(folder, *settings, **more):
    content = {
        "data": {
            "source": str(folder / "registry.csv"),
            "id": "patient",
            "missing_rows": "token",
            "test": 0.3,
        },
        "parties": {
            name: {"source": str(folder / f"{name}.csv"), "width": 6, "bottom": "mlp:hidden=16"}
            for name in SHARES
        },
        "label": {"column": "benign", "party": "registry"},
        "train": {"epochs": 3, "batch_size": 40, "checkpoint_every": 4},
    }
    return with_overrides(Experiment.model_validate(content | more), settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables")
    tables(path)
    return path


@pytest.fixture(scope="module")
def data(folder):
    return load_data(experiment(folder))


def owned(folder, party):
    return set(pd.read_csv(folder / f"{party}.csv")["patient"])


def test_rows_are_those_the_label_party_shares_with_anybody(folder, data):
    registry, clinic, laboratory = (
        owned(folder, name) for name in ("registry", "clinic", "laboratory")
    )
    ids = data["registry"].ids.tolist()
    assert set(ids) == registry & (clinic | laboratory)
    for name, own in (("clinic", clinic), ("laboratory", laboratory)):
        has = np.array([one in own for one in ids])
        np.testing.assert_array_equal(data[name].held[name], has)
        assert list(data[name].held) == [name]  # what others have is not told
        inputs = data[name].inputs.numpy()
        assert np.isfinite(inputs[has]).all()
        assert np.isnan(inputs[~has]).all()
    complete = [one in clinic & laboratory for one in ids]
    assert data["registry"].complete.tolist() == complete


def test_complete_rows_are_split_as_an_intersection_splits_them(folder, data):
    alone = load_data(experiment(folder, "data.missing_rows=intersection"))["registry"]
    both, complete = data["registry"], data["registry"].complete
    assert alone.complete is None
    for part in ("train", "validation", "test"):
        rows = getattr(both.split, part)
        known = rows[complete[rows]]
        assert both.ids[known].tolist() == alone.ids[getattr(alone.split, part)].tolist()
        assert len(rows) > len(known)


def test_too_few_others_to_split_are_training_rows(tmp_path):
    tables(tmp_path, shares={"clinic": 1.0, "laboratory": 568 / 569})
    data = load_data(experiment(tmp_path))["registry"]
    (lacking,) = np.flatnonzero(~data.complete)
    assert lacking in data.split.train


class Sent:
    """Counts frames, and their rows by their size."""

    def __init__(self):
        self.frames = []

    def __call__(self, party, direction, frame):
        if frame.kind in (Kind.CUT, Kind.QUERY, Kind.GRAD):
            self.frames.append((party, frame.kind, frame.step, len(frame.payload)))


def test_only_cuts_of_own_rows_are_sent(folder, data):
    sent = Sent()
    session = LocalSession(experiment(folder), data, outputs=2, observers=[sent]).run()
    held = data["registry"].held
    found = {(party, kind, step): size for party, kind, step, size in sent.frames}
    expected = {}
    for exchange in rules.schedule(session.terms, data["registry"].split):
        for party in SHARES:
            rows = int(held[party][exchange.rows].sum())
            kinds = (Kind.CUT, Kind.GRAD) if exchange.trains else (Kind.QUERY,)
            if rows > exchange.trains:
                expected |= {(party, kind, exchange.step): rows * 6 * 4 for kind in kinds}
    assert found == expected


def test_a_party_without_any_row_of_a_batch_sits_it_out(folder, data):
    exchange = Exchange(0, "train", 1, np.arange(8), last=False)
    for has, at in (([], []), ([3], []), ([3, 5], [3, 5])):
        held = np.isin(np.arange(8), has)
        assert own_rows(exchange, held).tolist() == at
    query = replace(exchange, phase="test")
    assert own_rows(query, np.arange(8) == 3).tolist() == [3]
    alone = replace(exchange, rows=np.array([3]))
    assert own_rows(alone, np.arange(8) == 3).tolist() == [0]


def independent(session, data, exchange):
    """What the label party's outputs should be, from the parties' own modules alone."""
    label, rows = session.label, torch.from_numpy(exchange.rows)
    parts = []
    for client in session.clients:
        vector = label.model["missing"].vectors[client.name]
        held = data[client.name].held[client.name]
        whole = []
        for row in rows.tolist():
            inputs = data[client.name].inputs[row : row + 1]
            whole.append(client.end.model["bottom"](inputs) if held[row] else vector[None])
        parts.append(torch.cat(whole))
    return label.model["top"](torch.cat(parts, 1))


def test_a_step_moves_bottoms_top_and_vectors_by_the_gradients_of_one_network(folder, data):
    settings = experiment(
        folder, "train.optimizer=sgd", "train.momentum=0", "train.learning_rate=0.1"
    )
    session = LocalSession(settings, data, outputs=2)
    with torch.no_grad():
        for vector in session.label.model["missing"].parameters():
            vector.copy_(torch.linspace(-1, 1, 6))
    first = next(iter(rules.schedule(session.terms, data["registry"].split)))
    modules = [session.label.model, *(client.end.model for client in session.clients)]
    for module in modules:
        module.train()
    outputs = independent(session, data, first)
    truth = data["registry"].labels[torch.from_numpy(first.rows)]
    weights = [weight for module in modules for weight in module.parameters()]
    grads = torch.autograd.grad(torch.nn.functional.cross_entropy(outputs, truth), weights)
    want = [(weight - 0.1 * grad).detach() for weight, grad in zip(weights, grads, strict=True)]
    session.go_on(None, [first])
    for weight, moved in zip(weights, want, strict=True):
        torch.testing.assert_close(weight.detach(), moved, rtol=1e-4, atol=1e-6)
    vectors = session.label.model["missing"].vectors
    assert all(bool((vector != torch.linspace(-1, 1, 6)).all()) for vector in vectors.values())


HARD = {
    "row state": (
        "codec=error_feedback:k=2",
        "train.in_flight=3",
        "train.batch_size=4",
        "train.checkpoint_every=7",
    ),
    "codec": ("codec=randtopk:k=3,alpha=0.2,values=8",),
    "in flight": ("train.in_flight=3", "train.batch_size=4", "train.checkpoint_every=7"),
    "early": ("train.patience=1", "train.keep=best", "train.epochs=6", "train.learning_rate=0.05"),
}


@pytest.mark.parametrize("name", HARD)
def test_it_goes_on_bit_for_bit(folder, tmp_path, name):
    """With 4 rows a batch parties sit out some exchanges, also while gradients are in flight."""
    settings = experiment(folder, *HARD[name])
    data = load_data(settings)
    whole = LocalSession(settings, data, outputs=2).run()
    exchanges = list(rules.schedule(whole.terms, data["registry"].split))
    if "train.batch_size=4" in HARD[name]:
        out = [
            len(own_rows(one, held)) == 0
            for one in exchanges
            for held in data["registry"].held.values()
        ]
        assert any(out)
    for share in (0.3, 0.7):
        step = int(share * whole.label.progress.train_steps)
        with pytest.raises(Killed):
            LocalSession(
                settings, data, outputs=2, checkpoints=tmp_path, observers=[Killer(step)]
            ).run()
    resumed = LocalSession(settings, data, outputs=2, checkpoints=tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()
    assert resumed.ledger.bytes_by_party("up") == whole.ledger.bytes_by_party("up")
    last = [
        {k: v for k, v in one.label.history[-1].items() if k != "seconds"}
        for one in (whole, resumed)
    ]
    assert last[0] == last[1]


def test_a_verdict_reaches_a_party_without_validation_rows(folder, data):
    lost = data["registry"].held["clinic"].copy()
    lost[data["registry"].split.validation] = False
    held = data["registry"].held | {"clinic": lost}
    without = data | {
        "registry": replace(data["registry"], held=held),
        "clinic": replace(data["clinic"], held={"clinic": lost}),
    }
    settings = experiment(folder, "train.patience=1", "train.keep=best", "train.learning_rate=0.1")
    session = LocalSession(settings, without, outputs=2).run()
    best = {client.stopping.best_epoch for client in session.clients}
    assert best == {session.label.stopping.best_epoch}


def test_figures_of_rows_that_all_have_stand_beside_the_others(folder, data, tmp_path):
    summary = train(experiment(folder), tmp_path, "run", data=data)
    label = data["registry"]
    rows = label.split.test
    complete = label.complete[rows]
    assert summary["test_complete_rows"] == complete.sum()
    assert summary["test_missing_rows"] == (~complete).sum()
    table = pd.read_csv(predict(RunFolder.open(tmp_path / "run")))
    assert table["id"].tolist() == label.ids[rows].tolist()
    right = (table["prediction"] == label.labels[torch.from_numpy(rows)].numpy()).to_numpy()
    assert right.mean() == pytest.approx(summary["test_accuracy"])
    assert right[complete].mean() == pytest.approx(summary["test_complete_accuracy"])
    assert right[~complete].mean() == pytest.approx(summary["test_missing_accuracy"])
    again = evaluate(RunFolder.open(tmp_path / "run"))
    for name, value in summary.items():
        if name.startswith("test_"):
            assert again[name] == value


def test_what_is_missing_at_prediction_does_not_depend_on_who_shares_the_batch(folder, data):
    session = LocalSession(experiment(folder), data, outputs=2).run()
    rows = data["registry"].split.test[:40]
    weights = session.weights()

    def ask(rows):
        asked = {
            name: replace(own, split=replace(own.split, test=rows)) for name, own in data.items()
        }
        return (
            LocalSession(experiment(folder), asked, mode="predict", outputs=2, weights=weights)
            .run()
            .outputs()
        )

    torch.testing.assert_close(
        ask(rows), torch.cat([ask(rows[[n]]) for n in range(40)]), rtol=0, atol=0
    )


def test_with_every_row_nothing_changes(tmp_path):
    """The same weights as an intersection's; the vectors stay at zero."""
    tables(tmp_path, shares={"clinic": 1.0, "laboratory": 1.0})
    sessions = {}
    for way in ("intersection", "token"):
        settings = experiment(tmp_path, f"data.missing_rows={way}")
        sessions[way] = LocalSession(settings, load_data(settings), outputs=2).run().weights()
    for party, weights in sessions["intersection"].items():
        for name, value in weights.items():
            assert torch.equal(value, sessions["token"][party][name])
    extra = sessions["token"]["registry"].keys() - sessions["intersection"]["registry"].keys()
    assert extra == {f"missing.vectors.{name}" for name in SHARES}
    assert not any(sessions["token"]["registry"][name].any() for name in extra)


REFUSED = {
    "secure=sum": ("merge=sum", "secure=sum"),
    "a trace": ("trace.phases=train",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_it_says_why(folder, name):
    with pytest.raises(ConfigError, match="missing_rows = 'token' is not possible here"):
        experiment(folder, *REFUSED[name])


@pytest.mark.parametrize("defense", ["label_dp_two_stage:epsilon=2,epochs=1", "label_free"])
def test_a_defense_of_single_rows_is_not_refused(folder, data, defense):
    settings = experiment(folder, f"defense={defense}", "train.epochs=2")
    assert "test_missing_loss" in LocalSession(settings, data, outputs=2).run().label.history[-1]


def test_one_table_has_no_missing_rows():
    with pytest.raises(ConfigError, match="separate tables"):
        with_overrides(
            Experiment.model_validate({"parties": {"left": {}}}), ["data.missing_rows=token"]
        )


@pytest.mark.parametrize("defense", ["mixup", "dcor", "max_norm+potential"])
def test_a_defense_of_whole_cuts_is_refused(folder, data, defense):
    with pytest.raises(SpecError, match="every party's cut of every row"):
        LocalSession(experiment(folder, f"defense={defense}"), data, outputs=2)


def test_what_needs_every_cut_refuses_such_a_run(folder, data, tmp_path):
    settings = experiment(folder)
    train(settings, tmp_path, "run", data=data)
    run = RunFolder.open(tmp_path / "run")
    with pytest.raises(VFLError, match="every party's cut of every row"):
        attack_finished_run(run, experiment(folder, "grid.attacks=kmeans").grid)
    cell = Cell(settings, "one", {}, victim="none")
    with pytest.raises(ConfigError, match="every party's cut of every row"):
        run_cells(GridFolder(tmp_path / "grid"), [cell])


def test_a_served_row_is_the_predicted_one_and_says_who_lacked_it(folder, data, tmp_path):
    train(experiment(folder), tmp_path, "run", data=data)
    run = RunFolder.open(tmp_path / "run")
    predict(run)
    expected = predicted(run.path)
    serving = Serving(run.path, lambda: serve(run.path, settings(cache_rows=20)))
    try:
        serving.client.wait_ready()
        for batch in (list(expected), list(expected)[-20:], list(expected)[-20:]):
            status, told = serving.client.predict(*batch)
            assert status == 200
            for answer, row in zip(told["predictions"], batch, strict=True):
                assert same(answer, expected[row])
                assert answer["missing"] == [n for n in SHARES if row not in owned(folder, n)]
    finally:
        serving.stop()


def test_a_private_alignment_finds_the_rows_that_an_open_join_finds(folder, data, tmp_path):
    settings = experiment(folder)
    done = align(settings, "ecdh", tmp_path)
    assert align(settings, "ecdh", tmp_path).reused
    aligned = load_data(experiment(folder, f"data.alignment={tmp_path}"))
    registry, private = data["registry"], aligned["registry"]
    assert done.common == registry.complete.sum() == private.complete.sum()
    assert set(private.ids) == set(registry.ids)
    for name in SHARES:
        has = dict(zip(registry.ids, data[name].held[name], strict=True))
        np.testing.assert_array_equal(private.held[name], [has[one] for one in private.ids])
        np.testing.assert_array_equal(aligned[name].held[name], private.held[name])
        assert torch.isfinite(aligned[name].inputs).all(1).tolist() == private.held[name].tolist()
    session = LocalSession(settings, aligned, outputs=2).run()
    assert session.label.history[-1]["test_missing_accuracy"] > 0.7
    with pytest.raises(MisalignedError, match="another treatment of rows"):
        load_data(
            experiment(folder, f"data.alignment={tmp_path}", "data.missing_rows=intersection")
        )
