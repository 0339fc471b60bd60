"""Error feedback over rows: the algorithms by a loop, and the same rows at both ends of a link."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from vfl import SplitModule, split
from vfl.compression import StepContext, make
from vfl.config import Experiment
from vfl.core.errors import DataError, SpecError
from vfl.datasets import Dealing, load_bundled
from vfl.session import rules
from vfl.training.local import LocalSession

ROWS, WIDTH = 6, 5


def batches(steps):
    """Drawn cuts of three of six rows, another three in each step."""
    draw = np.random.default_rng(0)
    for _ in range(steps):
        yield draw.permutation(ROWS)[:3], draw.normal(size=(3, WIDTH)).astype(np.float32)


def sent(codec, rows, cut, step):
    context = StepContext(step, training=True, rows=rows)
    payload = codec.encode(torch.from_numpy(cut), context).payload
    return codec.decode(payload, len(cut), WIDTH, context).cut.numpy(), len(payload)


def test_ef_vfl_is_algorithm_1():
    codec, surrogates = make("error_feedback:k=2"), np.zeros((ROWS, WIDTH), np.float32)
    for step, (rows, cut) in enumerate(batches(20)):
        arrived, _ = sent(codec, rows, cut, step)
        codec.commit(step)
        for row, values in zip(rows, cut, strict=True):
            change = values - surrogates[row]
            for unit in np.argsort(-abs(change))[:2]:
                surrogates[row, unit] += change[unit]
        np.testing.assert_allclose(arrived, surrogates[rows], rtol=0, atol=1e-6)


def test_aq_sgd_sends_a_row_whole_once():
    codec, seen = make("aqsgd:values=8,scale=row"), {}
    for step, (rows, cut) in enumerate(batches(20)):
        arrived, _ = sent(codec, rows, cut, step)
        codec.commit(step)
        for row, values, got in zip(rows, cut, arrived, strict=True):
            if row not in seen:
                assert np.array_equal(got, values)
            else:  # half a step of the row's own scale, both ways
                change = values - seen[row]
                within = 0.51 * (change.max() - change.min()) / 255
                np.testing.assert_allclose(got - seen[row], change, rtol=0, atol=within)
            seen[row] = got


def test_a_step_moves_nothing_before_it_is_committed():
    codec, rows = make("error_feedback:k=1"), np.arange(2)
    cut = np.float32([[3, 2, 1, 0, 0], [0, 0, 1, 2, 3]])
    assert np.array_equal(sent(codec, rows, cut, 0)[0], sent(codec, rows, cut, 1)[0])
    codec.commit(0)
    assert sent(codec, rows, cut, 2)[0][0].tolist() == [3, 2, 0, 0, 0]


def test_steps_that_get_no_gradient_are_forgotten():
    codec = make("error_feedback:k=1")
    for step in range(500):
        sent(codec, np.arange(1), np.ones((1, WIDTH), np.float32), step)
    assert len(codec.state_dict()) < 200


def test_the_error_of_a_fixed_k_vanishes():
    """A cut that stands still arrives whole after width / k steps; plain top-k never sends it."""
    cut, rows = next(iter(batches(1)))[1], np.arange(3)
    codec, plain = make("error_feedback:k=2"), make("topk:k=2")
    for step in range(3):
        arrived, length = sent(codec, rows, cut, step)
        codec.commit(step)
    np.testing.assert_allclose(arrived, cut, atol=1e-6)
    by_plain, plain_length = sent(plain, rows, cut, 0)
    assert length == plain_length
    assert (by_plain == 0).any()


RATE = 0.1


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=300))


@pytest.fixture(scope="module")
def session(data):
    content = {
        "codec": "error_feedback:k=2",
        "parties": {
            name: {"width": 8, "bottom": "mlp:hidden=16"} for name in data if name != "label"
        },
        "label": {"top": "linear"},
        "train": {
            "epochs": 3,
            "batch_size": 40,
            "optimizer": "sgd",
            "momentum": 0,
            "learning_rate": RATE,
        },
    }
    return LocalSession(Experiment.model_validate(content), data, outputs=10)


def test_a_module_trains_what_a_run_trains(data, session):
    """The caller's positions stand for those of the exchanges."""
    bottoms = {one.name: copy.deepcopy(one.end.model["bottom"]) for one in session.clients}
    top = copy.deepcopy(session.label.model["top"])
    model = SplitModule(bottoms, top, dict.fromkeys(bottoms, 8), codec="error_feedback:k=2")
    optimizer, labels = torch.optim.SGD(model.parameters(), lr=RATE), data["label"].labels
    session.run()
    for exchange in rules.schedule(session.terms, data["label"].split):
        if exchange.trains:
            rows = torch.from_numpy(exchange.rows)
            outputs = model({name: data[name].inputs[rows] for name in bottoms}, rows=rows)
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, labels[rows]).backward()
            optimizer.step()
    trained = {one.name: one.end.model["bottom"] for one in session.clients}
    for name, bottom in trained.items():
        for ours, theirs in zip(bottoms[name].parameters(), bottom.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_both_ends_of_a_link_have_the_same_surrogates(session):
    for client in session.clients:
        there = session.label.aggregator.ends[client.name].codec.state_dict()
        here = client.end.codec.state_dict()
        assert set(here) == set(there) == {"rows", "values"}
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_trained_party_keeps_no_cut_of_any_row(session):
    """Surrogates stand in checkpoints; `vfl forget` could not take a row out of weights."""
    session.run()
    for party in (*session.clients, session.label):
        assert not [name for name in party.weights() if "codec" in name]
        state = party.training_state()["state"]
        assert [name for name in state if name.endswith("/values")]
    for client in session.clients:
        client.end.load_state_dict(client.weights())


def module(codec="error_feedback:k=3"):
    torch.manual_seed(0)
    return SplitModule({"bank": nn.Linear(6, 8)}, nn.Linear(8, 2), {"bank": 8}, codec=codec)


def cut_model(codec="error_feedback:k=3"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    return split(model, "0", torch.zeros(2, 6), codec=codec)


@pytest.mark.parametrize("build", [module, cut_model])
def test_a_module_takes_positions_from_its_caller(build):
    model, inputs = build(), torch.ones(4, 6)
    batch = {"bank": inputs} if build is module else inputs
    with pytest.raises(SpecError, match="positions"):
        model(batch)
    with pytest.raises(SpecError, match="positions"):
        model(batch, rows=torch.arange(3))
    for wrong in ([-1, 0, 1, 2], [0.0, 1.0, 2.0, 3.0], [[0, 1], [2, 3]]):
        with pytest.raises(DataError, match="rows must be positions"):
            model(batch, rows=wrong)
    model(batch, rows=[7, 3, 5, 1]).sum().backward()
    assert model.eval()(batch).shape == (4, 2)  # a query needs none
    again = build()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    (codec,) = again._codecs.values()
    assert codec.state_dict()["rows"].tolist() == [7, 3, 5, 1]


def test_tokens_have_no_positions():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    with pytest.raises(SpecError, match="tokens"):
        split(model, "0", torch.zeros(2, 3, 6), row_axes=2, codec="aqsgd")
    split(model, "0", torch.zeros(2, 3, 6), codec="aqsgd")
