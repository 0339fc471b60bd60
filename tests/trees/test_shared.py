"""Trees on shares of gradients: the same trees, and what each party gets to see on the way."""

import json
import threading

import numpy as np
import pandas as pd
import pytest
from played_session import stand_in
from pydantic import ValidationError
from trees_session import ACCEPTS, CONTENT, OTHERS, TreesSession, lose_once

from vfl.config import Experiment
from vfl.core.errors import BadOptionError, DataError, ExposedCutError, ProtocolError, SpecError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import read_json
from vfl.session import secure_mode
from vfl.training.run import train
from vfl.trees import histograms, shared
from vfl.trees.histograms import Local
from vfl.trees.mode import Trees

SPEC = "trees:max_bin=16,protect=shared"


def content(spec, **more):
    breast_cancer = {"source": "breast_cancer", "validation": 0.2}
    return {"model": spec, "data": breast_cancer, "parties": {"a": {}, "b": {}}} | more


def trained(folder, spec, **more):
    return train(Experiment.model_validate(content(spec, **more)), folder, "run")


class Rounded(Local):
    """Histograms of gradients as shares have them."""

    def start(self, gradients, rows, columns=None):
        units = shared.units_of(gradients[rows])
        own, gradients = shared.rounded(gradients[rows], units), np.zeros(gradients.shape)
        gradients[rows] = own * units
        super().start(gradients, rows)


@pytest.mark.parametrize("nodes", ["known", "hidden"])
@pytest.mark.parametrize(
    "options",
    [
        "",
        ",grow_policy=lossguide,max_leaves=9,max_depth=0",
        ",subsample=0.6,colsample_bytree=0.5",
        ",epsilon=2",
    ],
    ids=["all", "leaves", "drawn", "noise"],
)
def test_the_trees_are_those_of_all_columns_in_one_place(tmp_path, monkeypatch, nodes, options):
    more = {"train": {"epochs": 4}, "label": {"party": "b"}}
    monkeypatch.setattr("vfl.trees.ends.Local", Rounded)
    central = trained(tmp_path / "order", SPEC.replace("shared", "order") + options, **more)
    found = trained(tmp_path / "shared", f"{SPEC},nodes={nodes}{options}", **more)
    assert found["weights_sha256"] == central["weights_sha256"]


def test_several_classes_take_a_tree_each(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.normal(size=(200, 4)).round(1), columns=list("abcd"))
    table["kind"] = np.digitize(table.a + table.c, [-1, 1])
    table.to_csv(tmp_path / "table.csv", index=False)
    parties = {"one": {"columns": ["a", "b"]}, "two": {"columns": ["c", "d"]}}
    more = {
        "data": {"source": str(tmp_path / "table.csv")},
        "parties": parties,
        "label": {"party": "two", "column": "kind"},
        "train": {"epochs": 2},
    }
    monkeypatch.setattr("vfl.trees.ends.Local", Rounded)
    central = trained(tmp_path / "order", SPEC.replace("shared", "order"), **more)
    found = trained(tmp_path / "shared", SPEC, **more)
    assert found["weights_sha256"] == central["weights_sha256"]


@pytest.mark.parametrize("nodes", ["known", "hidden"])
def test_missing_cells_and_categories_of_any_party_have_their_places(tmp_path, monkeypatch, nodes):
    """The label party's columns have fewer bins than those of others, in wider histograms."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"age": draw.normal(size=300), "member": draw.integers(0, 2, 300) * 1.0})
    table["city"] = draw.choice(["ulm", "bonn", "jena", "kiel"], 300)
    table["kind"] = draw.choice(["a", "b", "c"], 300)
    for name in table:
        table.loc[draw.random(300) < 0.3, name] = None
    score = table.member.fillna(2) + (table.kind == "b") - table.age.fillna(-1)
    table["paid"] = (score + draw.normal(size=300) > 0.5).astype(int)
    table.to_csv(tmp_path / "table.csv", index=False)
    parties = {"one": {"columns": ["age", "city"]}, "two": {"columns": ["member", "kind"]}}
    more = {
        "data": {"source": str(tmp_path / "table.csv")},
        "parties": parties,
        "label": {"party": "two", "column": "paid"},
        "train": {"epochs": 4},
    }
    monkeypatch.setattr("vfl.trees.ends.Local", Rounded)
    central = trained(tmp_path / "order", SPEC.replace("shared", "order"), **more)
    found = trained(tmp_path / "shared", f"{SPEC},nodes={nodes}", **more)
    assert found["weights_sha256"] == central["weights_sha256"]


@pytest.mark.parametrize("nodes", ["known", "hidden"])
def test_no_sum_of_one_holder_of_shares_comes_to_the_label_party(tmp_path, monkeypatch, nodes):
    """It knows each pad of a feature party, so a sum of pads alone would tell whose they are."""
    end, shown, us = shared.SharedFeatureEnd, [], threading.local()
    plain, send_sums = shared.sums_of, end._send_sums

    def noting(*about):
        found = plain(*about)
        if getattr(us, "feature_party", False):  # the helper sums in a thread of its own
            shown.append(found)
        return found

    def sending(own, asked, step):
        shown.clear()
        before, sent, us.feature_party = own.link.send, [], True
        own.link.send = lambda frame: (sent.append(bytes(frame.payload)), before(frame))
        try:
            send_sums(own, asked, step)
        finally:
            own.link.send = before
        found = np.frombuffer(b"".join(sent), "<u8")
        assert not (found == np.concatenate([one.ravel() for one in shown])).any()

    monkeypatch.setattr(shared, "sums_of", noting)
    monkeypatch.setattr(end, "_send_sums", sending)
    more = {"parties": {"a": {}}, "train": {"epochs": 1}}
    figures = train(
        Experiment.model_validate(content(f"{SPEC},nodes={nodes}", **more)), tmp_path, "run"
    )
    assert figures["test_auc"] > 0.9, "both pads cancel"


def test_rounding_keeps_sums_exact_and_rows_close():
    draw = np.random.default_rng(0)
    gradients = np.stack([draw.normal(size=5000), draw.random(5000)], axis=1) * [1e-3, 1e4]
    units = shared.units_of(gradients)
    whole = shared.rounded(gradients, units)
    assert (np.abs(whole * units - gradients) <= units / 2).all()
    assert np.abs(whole[:, 0]).sum() < 2**31 <= 2 * np.abs(whole[:, 0]).sum() + 2 * 5001
    parts = np.array_split(draw.permutation(5000), 7)
    elements = shared.packed(whole)
    masks = draw.integers(0, 2**64, 5000, np.uint64)
    for rows in (*parts, np.array([], int)):
        sums = np.stack([(elements[rows] - masks[rows]).sum(), masks[rows].sum()]).sum(axis=0)
        np.testing.assert_array_equal(shared.opened(sums[None])[0], whole[rows].sum(axis=0))


def test_rows_without_gradients_have_sums_of_zero():
    units = shared.units_of(np.zeros((3, 2)))
    assert not shared.rounded(np.zeros((3, 2)), units).any()
    np.testing.assert_array_equal(units, [1, 1])


@pytest.mark.parametrize("compiled", [True, False])
def test_sums_over_bins_are_those_of_a_loop(monkeypatch, compiled):
    monkeypatch.setattr(histograms, "COMPILED", compiled)
    draw = np.random.default_rng(0)
    bins, nodes = draw.integers(0, 5, (50, 3), np.uint8), draw.integers(0, 4, 50, np.uint8)
    elements = draw.integers(0, 2**64, 50, np.uint64)
    with np.errstate(over="ignore"):  # what a ring is for
        found = shared.sums_of(bins, nodes, 2, elements, 5)
    want = np.zeros((2, 3, 5), object)
    for row in range(50):
        if nodes[row] < 2:
            for column in range(3):
                want[nodes[row], column, bins[row, column]] += int(elements[row])
    np.testing.assert_array_equal(found, (want % 2**64).astype(np.uint64))


class SharedSession(TreesSession):
    """The parties of a session of trees, and a notary that helps."""

    def __init__(self, folder, nodes):
        super().__init__(folder)
        self._content = self._content | {"model": f"{SPEC},helper=notary,nodes={nodes}"}
        self.flower.parties = (*OTHERS, "notary")
        (folder / "notary").mkdir()
        self.describe("notary", ACCEPTS)
        self.introduce(*OTHERS, "notary")

    def describe(self, name, more=""):
        if name == "notary":
            self.write(name, f'party = "notary"\nrole = "dealer"\n{more}')
        else:
            super().describe(name, more)

    def disclosed(self, name):
        return read_json(self.kept(name).path / "disclosed-train.json")["disclosed"]


@pytest.fixture(params=["known", "hidden"])
def session(request, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    return SharedSession(tmp_path, request.param)


def test_a_federation_grows_the_trees_of_one_process_and_answers_without_the_helper(session):
    session.play()
    assert not session.flower.failures
    figures = read_json(session.run / "summary.json")
    assert figures["test_auc"] > 0.85
    everybody = (*OTHERS, "lender")
    sources = {name: {"source": str(session.folder / name / "party.toml")} for name in everybody}
    whole = {**session._content, "parties": sources, "label": {"party": "lender", "column": "paid"}}
    alone = train(Experiment.model_validate(whole), session.folder, "alone")
    assert alone["weights_sha256"] == figures["weights_sha256"]
    session.flower.parties = OTHERS
    session.play(mode="evaluate")
    assert read_json(session.run / "evaluations/0001.json")["test_auc"] == figures["test_auc"]
    seen = session.play(mode="predict")
    assert {party for party, *_ in seen} == set(OTHERS)
    assert not session.flower.failures


def test_a_training_goes_on_when_the_helper_was_lost(session, monkeypatch):
    session.play()
    whole = read_json(session.run / "summary.json")
    lose_once(monkeypatch, "notary", 5)
    for name in (*OTHERS, "lender", "notary"):
        (session.folder / name / "store").rename(session.folder / name / "before")
        session.describe(name, ACCEPTS)
    session.play(federation=CONTENT["federation"] | {"max_restarts": 1})
    assert "restart 1 of 1" in (session.run / "notes.txt").read_text()
    assert read_json(session.run / "summary.json")["weights_sha256"] == whole["weights_sha256"]


def test_only_known_nodes_are_shown(tmp_path):
    """Hidden nodes: no party but the label party gets anything that depends on a node's rows."""
    seen = {}
    for nodes in ("known", "hidden"):
        figures = trained(tmp_path / nodes, f"{SPEC},nodes={nodes}", train={"epochs": 1})
        seen[nodes] = {(one["observer"], one["what"]) for one in figures["revealed"]}
    rows = {("helper", "rows of nodes, permuted"), ("a", "rows of nodes"), ("b", "rows of nodes")}
    assert seen["known"] - seen["hidden"] == rows
    assert not seen["hidden"] - seen["known"]
    assert not any("cut" in what for _, what in seen["known"]), "no party has one"


@pytest.mark.parametrize(
    ("spec", "kind", "told"),
    [
        ("trees:protect=shared,helper=a", ExposedCutError, "helper 'a'"),
        ("trees:protect=shared,helper=label", ExposedCutError, "helper 'label'"),
        ("trees:protect=shared,nodes=some", (SpecError, BadOptionError), "hidden"),
    ],
)
def test_a_helper_has_no_data(tmp_path, spec, kind, told):
    with pytest.raises(kind, match=told):
        trained(tmp_path, spec, train={"epochs": 1})


class Asking:
    """A label party that sends what it likes."""

    def __init__(self, *payloads):
        self.frames = [Frame(Kind.PROTOCOL, 1, payload) for payload in payloads]
        self.sent = []

    def receive(self):
        return self.frames.pop(0)

    def send(self, frame):
        self.sent.append(frame)


def feature_end(*payloads):
    """A feature party's end with two columns of eight rows, six of which train."""
    end = object.__new__(shared.SharedFeatureEnd)
    end.party, end.link, end._mode = "bank", Asking(*payloads), Trees(protect="shared")
    end._terms = type("Terms", (), {"label_party": "lender"})
    end._seen, end._answered = {}, []
    layout = shared.Layout((3, 3), (False, False))
    end._own = type("Binning", (), {"layout": layout})
    end._known, end._training = np.zeros((8, 2), np.uint8), 6
    end._nodes, end._elements = np.zeros(8, np.uint32), np.zeros(6, np.uint64)
    end._hidden_sums, end._last_node, end._summed = 0, 0, end._known[:6]
    return end


@pytest.mark.parametrize(
    "payloads",
    [
        [b"?"],
        [b"S{"],
        [b"S[1]"],
        [b'S{"count": 0}'],
        [b'S{"count": 17, "nodes": [0]}'],
        [b'S{"count": 1, "nodes": [-1]}', bytes(8)],
        [b'S{"count": 1, "nodes": [16]}', bytes(8)],
        [b'S{"count": 1, "nodes": "all"}', bytes(8)],
        [b'S{"count": 1, "nodes": [0]}', bytes(7)],
        [b'D{"nodes": null, "splits": [[2, 1, false]]}'],
        [b'D{"nodes": null, "splits": 3}'],
        [b'D{"nodes": [16], "splits": [[0, 1, false]]}'],
        [b"T"],
        [b'T{"columns": "all"}'],
        [b'T{"columns": [2]}'],
        [b'T{"columns": [1, 0]}'],
        [b'D{"nodes": [0, 1], "splits": [[0, 1, false]]}'],
        [b'D{"nodes": null, "splits": [[0, 1, false]]}'],
    ],
    ids=lambda payloads: payloads[0].decode(),
)
def test_a_request_that_cannot_be_is_refused(payloads):
    end = feature_end(*payloads)
    with pytest.raises(ProtocolError):
        end._serve(1)
    assert not end.link.sent


def test_nobody_sums_columns_that_a_tree_may_not_split(tmp_path, monkeypatch):
    """Neither all columns of others while the label party's own are split, nor those not drawn."""
    plain, summed = shared.sums_of, []

    def noting(bins, *about):
        summed.append(bins.shape[1])
        return plain(bins, *about)

    monkeypatch.setattr(shared, "sums_of", noting)
    more = {"label": {"party": "b"}, "train": {"epochs": 1}}
    trained(tmp_path / "own", f"{SPEC},own_rounds=1,max_depth=2", **more)
    assert len(summed) == 2, "the label party's, of the root and of a child"
    summed.clear()
    trained(tmp_path / "drawn", f"{SPEC},colsample_bytree=0.1", **more)
    assert max(summed) <= 3


def test_splits_that_were_not_taken_may_not_be_asked_for():
    asked = b'D{"nodes": [0], "splits": [[0, 1, false]]}'
    end = feature_end(asked, b"E" + json.dumps([]).encode())
    end._splits = []
    with pytest.raises(ProtocolError, match="splits that its trees do not have"):
        end.train(type("Exchange", (), {"step": 1}))


def test_sides_of_a_fresh_training_may_not_be_asked_for_before_it_begins():
    end = feature_end(b'D{"nodes": null, "splits": [[0, 1, false]]}', b"E")
    end._splits = []
    end.link.frames = [Frame(Kind.PROTOCOL, 0, frame.payload) for frame in end.link.frames]
    assert end._serve(0) == b""
    with pytest.raises(ProtocolError, match="splits that its trees do not have"):
        end._require_taken(end._splits, 0)


@pytest.mark.parametrize(
    "wrong", [{"rows": (-1, 0, 0)}, {"rows": (1, 0, 1 << 40)}, {"columns": (0,)}, {"widths": (1,)}]
)
def test_sizes_that_no_session_has_are_refused(wrong):
    with pytest.raises(ValidationError):
        shared.Facts(**{"rows": (9, 0, 1), "columns": (3,), "widths": (5,)} | wrong)


def test_gradients_beyond_all_numbers_are_named():
    with pytest.raises(DataError, match="learning_rate"):
        shared.units_of(np.array([[np.inf, 1.0], [0.0, 1.0]]))


def test_spec_names_the_helper():
    mode = secure_mode.make("trees:protect=shared,helper=notary")
    assert mode.third_party("lender") == "notary"
    assert secure_mode.make("trees").third_party("lender") is None
