"""A training under a secure sum, in one process: what it computes, what the label party sees."""

import numpy as np
import pytest
import torch

from vfl.config import Experiment
from vfl.core.errors import (
    ExposedCutError,
    NonFiniteError,
    ProtocolError,
    RingOverflowError,
    TruncatedFrameError,
)
from vfl.core.frame import Kind
from vfl.datasets import Dealing, load_bundled
from vfl.mpc.secure.masks import Ring
from vfl.session import rules
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

PARTIES = ("left", "right")
RING = Ring.of(32, 16, 2)
WIDTH = 6


def experiment(secure="sum", **changes):
    content = {
        "merge": "sum",
        "secure": secure,
        "parties": {name: {"width": WIDTH, "bottom": "mlp:hidden=16"} for name in PARTIES},
        "train": {"epochs": 2, "batch_size": 32, "checkpoint_every": 5},
    }
    return Experiment.model_validate(content | changes)


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "label", Dealing(0, limit=300))


def session(data, secure="sum", observers=(), mode="train", **changes):
    settings = experiment(secure, **changes)
    return LocalSession(settings, data, outputs=10, observers=observers, mode=mode)


class Cuts:
    """What two sessions' parties encoded, by party and step: the truth, which no observer has."""

    def __init__(self, session):
        self.of = {client.name: {} for client in session.clients}
        for client in session.clients:
            half, own = client.end, self.of[client.name]
            encode = half.codec.encode

            def noting(cut, context, encode=encode, own=own):
                own[context.step] = cut.clone()
                return encode(cut, context)

            half.codec.encode = noting


def payloads(trace, kind=Kind.CUT):
    """Each party's payloads by step, as they crossed."""
    found = {name: {} for name in PARTIES}
    for frame in trace:
        if frame.kind is kind and frame.direction == "up":
            found[frame.party][frame.step] = np.frombuffer(frame.payload, "<u4")
    return found


@pytest.fixture(scope="module")
def seen(data):
    """One training: the label party's transcript, and the cuts it does not have."""
    trace = Trace()
    masked = session(data, observers=[trace])
    cuts = Cuts(masked)
    masked.run()
    return payloads(trace), cuts.of, masked


def test_the_first_loss_is_that_of_the_plain_sum_within_the_rounding(data, seen):
    plain = session(data, "none").run()
    masked = seen[2]
    ours, theirs = (one.label.history[0]["train_loss"] for one in (masked, plain))
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert masked.label.history[-1]["train_loss"] < masked.label.history[0]["train_loss"]


def test_every_sum_is_that_of_the_cuts_to_two_to_the_minus_seventeen_each(seen):
    frames, cuts, _ = seen
    assert len(frames["left"]) > 10
    for step, words in frames["left"].items():
        rows = len(words) // WIDTH
        both = [words.tobytes(), frames["right"][step].tobytes()]
        total = RING.decode(both, rows, WIDTH).double()
        exact = cuts["left"][step].double() + cuts["right"][step].double()
        assert (total - exact).abs().max() <= 2 * 2.0**-17


def test_bytes_are_those_of_plain_float32_and_fewer_with_fewer_bits(data, seen):
    plain, masked = session(data, "none").run().ledger, seen[2].ledger
    for way in ("up", "down"):
        assert masked.bytes_by_party(way) == plain.bytes_by_party(way)
    small = session(data, "sum:bits=8").run().ledger
    rows = {row.party: row for row in plain.rows() if row.phase == "train"}
    for row in small.rows():
        if row.phase == "train" and row.direction == "up":
            assert 4 * row.payload_bytes == rows[row.party].payload_bytes


def test_what_a_party_sends_is_uniform_whatever_its_cut(seen):
    """Chi-square of all bytes of a party's words, and of what is left once its cut is known."""
    frames, cuts, _ = seen
    words = np.concatenate([frames["left"][step] for step in sorted(frames["left"])])
    true = np.concatenate(
        [RING.encode(cuts["left"][step], "left", step) for step in sorted(frames["left"])]
    )
    for values in (words, words - true):
        counts = np.bincount(values.view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)
    plain = np.bincount(true.view(np.uint8), minlength=256)
    assert ((plain - plain.mean()) ** 2 / plain.mean()).sum() > 10_000, "the test can fail"


def test_evaluations_and_predictions_are_masked_too(data):
    trace = Trace()
    trained = session(data, observers=[trace]).run()
    queries = payloads(trace, Kind.QUERY)
    assert queries["left"]
    asked = Trace()
    settings = experiment()
    predicting = LocalSession(
        settings, data, outputs=10, mode="predict", weights=trained.weights(), observers=[asked]
    )
    cuts = Cuts(predicting)
    predicting.run()
    plain = LocalSession(
        experiment("none"), data, outputs=10, mode="predict", weights=trained.weights()
    )
    torch.testing.assert_close(predicting.outputs(), plain.run().outputs(), rtol=0, atol=1e-3)
    words = payloads(asked, Kind.QUERY)["left"][0]
    own = RING.encode(cuts.of["left"][0], "left", 0)
    assert np.mean(words == own) < 0.01


@pytest.mark.parametrize("in_flight", [1, 3])
def test_going_back_to_a_checkpoint_takes_new_keys_and_changes_nothing(data, tmp_path, in_flight):
    train = {"epochs": 2, "batch_size": 32, "checkpoint_every": 5, "in_flight": in_flight}
    settings = experiment(train=train)
    whole = LocalSession(settings, data, outputs=10).run()

    def until(step, trace):
        def kill(party, direction, frame):
            if frame.step == step and direction == "down":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            LocalSession(
                settings, data, outputs=10, checkpoints=tmp_path, observers=[trace, kill]
            ).run()

    first, second = Trace(), Trace()
    until(8, first)
    until(9, second)
    before, after = (payloads(trace)["left"] for trace in (first, second))
    again = sorted(before.keys() & after.keys())
    assert again
    for step in again:
        assert np.mean(before[step] == after[step]) < 0.01
    resumed = LocalSession(settings, data, outputs=10, checkpoints=tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()


def test_a_label_party_with_columns_and_five_parties(data):
    names = ["a", "b", "c", "d", "lender"]
    rows = load_bundled("digits", names, "lender", Dealing(0, limit=300), flatten=True)
    parties = {name: {"width": WIDTH, "bottom": "mlp:hidden=16"} for name in names}
    changes = {"parties": parties, "label": {"party": "lender"}}
    plain, masked = (
        LocalSession(experiment(mode, **changes), rows, outputs=10).run()
        for mode in ("none", "sum")
    )
    losses = [one.label.history[0]["train_loss"] for one in (plain, masked)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("changes", [
    {"merge": "concat"},
    {"parties": {"left": {"width": 6}}},
    {"codec": "topk:k=2"},
    {"codec": "quantise:values=8"},
    {"defense": "potential:alpha=1"},
    {"defense": "layer_norm+dcor"},
])  # fmt: skip
def test_what_would_expose_a_cut_is_refused_when_a_side_is_built(data, changes):
    with pytest.raises(ExposedCutError):
        session(data, **changes)


@pytest.mark.parametrize("defense", ["layer_norm", "mixup"])
def test_defenses_that_need_no_single_cut_go_along(data, defense):
    masked = session(data, defense=defense, train={"epochs": 1, "batch_size": 64}).run()
    assert np.isfinite(masked.label.history[-1]["train_loss"])


def test_a_trace_is_refused(data, tmp_path):
    settings = experiment(trace={"phases": ["train"]})
    with pytest.raises(ExposedCutError, match="trace"):
        LocalSession(settings, data, outputs=10, checkpoints=tmp_path)


def test_without_keys_nothing_is_sent(data):
    masked = session(data)
    with pytest.raises(ProtocolError, match="no keys"):
        masked.clients[0].begin(next(iter(rules.schedule(masked.terms, data["label"].split))))


def broken(data, value):
    """A session whose left party's bottom gives one value that is not like the others."""
    masked = session(data)
    with torch.no_grad():
        masked.clients[0].end.model["bottom"][-1].bias[0] = value
    return masked


def test_a_value_that_would_overflow_is_named_by_party_step_and_bits(data):
    with pytest.raises(RingOverflowError, match="party 'left'") as caught:
        broken(data, 123456.0).run()
    assert caught.value.where == "step 0"
    assert caught.value.got == "35 bits needed, 16 of them behind the point"
    assert "123456" not in str(caught.value)


def test_a_party_that_lies_about_its_shape_is_named(data):
    masked = session(data)
    codec = masked.clients[1].end.codec
    encode = codec.encode
    codec.encode = lambda cut, context: encode(cut[:, :-1].contiguous(), context)
    with pytest.raises(TruncatedFrameError, match="masked payload") as caught:
        masked.run()
    assert caught.value.where == "step 0 of party 'right'"


def test_nan_stops_at_its_owner(data):
    """The label party could not see it in a sum."""
    with pytest.raises(NonFiniteError, match="party 'left'"):
        broken(data, float("nan")).run()


def test_a_session_that_goes_back_itself_takes_new_keys(data):
    trace = Trace([Kind.CUT])
    masked = session(data, observers=[trace])
    schedule = list(rules.schedule(masked.terms, data["label"].split))[:3]
    for _ in range(2):
        masked.go_on(None, schedule)
    left = [frame.payload for frame in trace if frame.party == "left" and frame.step == 1]
    assert len(left) == 2
    assert left[0] != left[1]
