"""Shared first layers with a third party that only deals, in one process."""

import pytest
import torch
from shared_layers import DEALER, LABEL, exact, fresh, joined, joined_words, session, start_from

from vfl.core.errors import (
    AuthenticationError,
    ExposedCutError,
    ProtocolError,
    ReusedPadError,
    RingRangeError,
    RunFolderError,
    TruncatedFrameError,
)
from vfl.core.frame import LIMIT_BYTES, Frame, Kind
from vfl.core.seeds import Secret
from vfl.datasets import load_bundled
from vfl.mpc.secure.beaver import DealerEnd, partner_of
from vfl.mpc.secure.shared_layer import WEIGHT_BITS, first_weights
from vfl.session import rules
from vfl.session.trace import Trace

TANH = "mlp:hidden=32,activation=tanh"


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["bank"], 0, LABEL, limit=300)


@pytest.fixture(scope="module")
def two():
    return load_bundled("digits", ["bank", "shop"], 0, LABEL, limit=300)


@pytest.mark.parametrize(
    ("parties", "top", "rate", "batch"),
    [
        (("bank",), TANH, 0.05, 64),
        pytest.param(("bank",), TANH, 0.3, 32, marks=pytest.mark.slow),
        pytest.param(("bank", "shop"), TANH, 0.05, 64, marks=pytest.mark.slow),
        (("bank", "shop", "clinic"), TANH, 0.3, 32),
        (("bank", LABEL), TANH, 0.3, 32),
    ],
)
def test_a_training_computes_what_the_plain_one_does(parties, top, rate, batch):
    """The whole of digits; the bound is that of `test_shared_layer`, for the same reasons."""
    data = load_bundled("digits", parties, 0, LABEL, flatten=LABEL in parties)
    bottoms, train = fresh(data), {"epochs": 6, "learning_rate": rate, "batch_size": batch}
    label = {"party": LABEL, "top": top}
    own = {LABEL: fresh(data)[LABEL]} if LABEL in parties else {}
    shared = start_from(session(data, bottoms=own, train=train, label=label), bottoms).run()
    plain = session(data, "none", bottoms=bottoms, train=train, label=label).run()
    ours, theirs = (one.label.history[-1] for one in (shared, plain))
    weights = shared.weights()
    apart = max(
        float((joined(weights, one.name) - exact(one)).abs().max()) for one in plain.clients
    )
    accuracies = ours["test_accuracy"], theirs["test_accuracy"]
    print(f"{parties}, rate {rate}: accuracies {accuracies}, weights {apart:.1e} apart")
    assert apart < 1e-5
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
    assert accuracies[0] == pytest.approx(accuracies[1], abs=1e-3)
    assert accuracies[0] > 0.5


def test_it_trains_the_very_weights_of_the_form_in_which_the_label_party_deals(two):
    """All arithmetic is exact in the ring, so who holds which share makes no difference at all."""
    bottoms = fresh(two)
    ours = start_from(session(two), bottoms).run()
    weights, order = {}, tuple(bottoms)
    first = start_from(session(two), bottoms).weights()
    for name in order:
        weights.setdefault(name, {})["own"] = first[name]["own"]
        other = weights.setdefault(partner_of(name, order), {})
        other["other"] = first[LABEL][f"codec-{name}/share"]
    theirs = session(two, "beaver", weights=weights).run()
    assert ours.label.history[-1]["train_loss"] == theirs.label.history[-1]["train_loss"]
    left, right = ours.weights(), theirs.weights()
    for name in order:
        other = right[partner_of(name, order)]["other"]
        assert torch.equal(joined_words(left, name), right[name]["own"] + other)
    assert all(torch.equal(left[LABEL][key], value) for key, value in right[LABEL].items())


def test_no_party_has_weights_and_every_share_is_as_good_as_random(data):
    weights = session(data).run().weights()
    assert set(weights) == {"bank", LABEL}, "the dealer keeps nothing"
    for share in (weights["bank"]["own"], weights[LABEL]["codec-bank/share"]):
        assert (share.double() * 2.0**-WEIGHT_BITS).abs().max() > 2**20
    assert joined(weights, "bank").abs().max() < 4


def test_both_halves_of_the_first_weights_come_from_their_holders_secrets(data):
    one = session(data, bottoms=fresh(data))
    one.begin()
    weights, columns = one.weights(), data["bank"].inputs[0].numel() + 1
    for party, share in (("bank", "own"), (LABEL, "codec-bank/share")):
        secret = Secret.of_simulation(one.terms.seed, party)
        assert torch.equal(weights[party][share], first_weights(columns, 12, secret, "bank"))


def test_evaluation_and_prediction_run_forward_on_the_kept_shares(data):
    trained = session(data).run()
    weights, bottoms = trained.weights(), fresh(data)
    layer = joined(weights, "bank")
    with torch.no_grad():
        bottoms["bank"][-1].weight.copy_(layer[:-1].t())
        bottoms["bank"][-1].bias.copy_(layer[-1])
    asked = session(data, mode="predict", weights=weights).run()
    top = {key: value for key, value in weights[LABEL].items() if "/" not in key}
    plain = session(data, "none", mode="predict", bottoms=bottoms, weights={LABEL: top}).run()
    torch.testing.assert_close(asked.outputs(), plain.outputs(), rtol=0, atol=1e-3)
    again = session(data, mode="evaluate", weights=weights).run()
    told = again.label.history[-1]["test_loss"]
    assert told == pytest.approx(trained.label.history[-1]["test_loss"], abs=1e-6)


def test_going_back_to_a_checkpoint_takes_new_keys_and_changes_nothing(data, tmp_path):
    bottoms = fresh(data)
    whole = start_from(session(data), bottoms).run()

    def until(step, trace):
        def kill(party, direction, frame):
            if (party, frame.step, frame.kind) == ("bank", step, Kind.GRAD):
                raise KeyboardInterrupt

        one = session(data, checkpoints=tmp_path, observers=[trace, kill])
        with pytest.raises(KeyboardInterrupt):
            start_from(one, bottoms).run()

    first, second = Trace(Kind), Trace(Kind)
    until(8, first)
    until(9, second)
    before, after = (
        {(frame.party, frame.direction, frame.kind, frame.step): bytes(frame.payload)
         for frame in trace if frame.kind is not Kind.PROTOCOL and len(frame.payload) > 4}
        for trace in (first, second)
    )  # fmt: skip
    again = before.keys() & after.keys()
    assert {party for party, *_ in again} == {"bank", DEALER}
    assert len(again) > 8
    assert all(before[key] != after[key] for key in again)
    resumed = session(data, checkpoints=tmp_path).run()
    left, right = resumed.weights(), whole.weights()
    assert torch.equal(joined_words(left, "bank"), joined_words(right, "bank"))
    for key, value in right[LABEL].items():
        assert torch.equal(left[LABEL][key], value) is not key.endswith("share"), key


def test_the_best_epochs_weights_are_kept_at_every_party(data):
    bottoms, train = fresh(data), {"epochs": 8, "learning_rate": 0.6, "keep": "best"}
    kept = start_from(session(data, train=train), bottoms).run()
    best = kept.label.stopping.best_epoch
    assert best > 0
    until = session(data, train=train | {"epochs": best, "keep": "last"})
    start_from(until, bottoms).run()
    assert kept.label.history[-1]["test_loss"] == until.label.history[-1]["test_loss"]


def test_defenses_of_labels_and_gradients_go_along(data):
    for defense in ("gradient_noise:norm=1,sigma=0.1", "label_dp:epsilon=3"):
        losses = session(data, defense=defense).run().label.history
        assert losses[-1]["train_loss"] < 2.5


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"merge": "concat"}, "merge = 'sum'"),
        ({"codec": "quantise:values=8"}, "codec = 'none'"),
        ({"defense": "layer_norm"}, "at the label party"),
        ({"train": {"optimizer": "adam"}}, "sgd"),
        ({"train": {"in_flight": 2}}, "train.in_flight = 1"),
        ({"secure": "beaver:dealer=bank"}, "a third party that has no columns"),
        ({"secure": "beaver:dealer=label.party"}, "the name of a third party"),
    ],
)
def test_what_would_expose_weights_or_cuts_is_refused(data, changes, word):
    changes = dict(changes)
    secure = changes.pop("secure", f"beaver:dealer={DEALER}")
    with pytest.raises(ExposedCutError) as caught:
        session(data, secure, **changes)
    assert word in str(caught.value)


def first_exchange(session):
    return next(iter(rules.schedule(session.terms, session.label.data.split)))


def ask(session, step, rows=3):
    """The label party asks the dealer for a training exchange of so many rows."""
    asked = Frame(Kind.OPENING, step, rows.to_bytes(4, "little"))
    session.label.aggregator.helpers[0].send(asked)


def test_without_keys_nothing_is_sent_and_nothing_dealt(data):
    one = session(data)
    with pytest.raises(ProtocolError, match="no keys"):
        one.clients[0].begin(first_exchange(one))
    one.label.ends["bank"].link.send(Frame(Kind.OPENING, 0, (3).to_bytes(4, "little")))
    ask(one, 0)
    with pytest.raises(ProtocolError, match="out of turn"):
        one.helper.serve()


def test_an_exchange_is_opened_and_dealt_once_in_an_attempt(data):
    one = session(data)
    one.begin()
    exchange = first_exchange(one)
    one.clients[0].begin(exchange)
    with pytest.raises(ReusedPadError):
        one.clients[0].begin(exchange)
    ask(one, 7)
    assert one.helper.serve()
    for step in (7, 6):
        ask(one, step)
        with pytest.raises(ReusedPadError):
            one.helper.serve()


def columns_come(session, payload):
    """The label party names columns, and the dealer takes them."""
    session.label.aggregator.helpers[0].send(Frame(Kind.PROTOCOL, 1, payload))
    session.helper.begin({"bank": bytes(32)})


@pytest.mark.parametrize("rows", [0, LIMIT_BYTES // (8 * 65) + 1, 2**32 - 1])
def test_a_dealer_draws_no_masks_for_rows_that_fit_no_frame(data, rows):
    one = session(data)
    one.begin()
    ask(one, 0, rows)
    with pytest.raises(ProtocolError, match="fits no frame"):
        one.helper.serve()


def test_a_dealer_is_told_columns_once_an_attempt_and_only_such_as_can_be(data):
    one = session(data)
    one.begin()
    with pytest.raises(ProtocolError, match="twice"):
        columns_come(one, (65).to_bytes(4, "little"))
    for columns in (0, 2**15 + 1, 2**32 - 1):
        one.helper.introduce()
        with pytest.raises(ProtocolError, match="so many columns"):
            columns_come(one, columns.to_bytes(4, "little"))
    with pytest.raises(TruncatedFrameError):
        columns_come(one, bytes(3))


@pytest.fixture
def meddle(data, monkeypatch):
    """Runs a session in which some frames of one party arrive changed; the error that ends it."""

    def ended(party, change, kind, error, step=2):
        one = session(data)
        inner = one.label.aggregator.helpers[0] if party == DEALER else one.label.ends[party].link
        receive = type(inner).receive

        def changed(link):
            frame = receive(link)
            if link is inner and (frame.kind, frame.step) == (kind, step):
                frame = Frame(kind, frame.step, change(bytes(frame.payload)))
            return frame

        monkeypatch.setattr(type(inner), "receive", changed)
        with pytest.raises(error) as caught:
            one.run()
        return caught.value

    return ended


@pytest.mark.parametrize("change", [lambda payload: payload[:-8], lambda payload: payload + b"\0"])
@pytest.mark.parametrize(
    ("party", "kind"),
    [(DEALER, Kind.OPENING), (DEALER, Kind.GRAD), ("bank", Kind.OPENING), ("bank", Kind.CUT)],
)
def test_a_message_of_another_length_is_refused_with_its_sender(meddle, party, kind, change):
    error = meddle(party, change, kind, TruncatedFrameError)
    assert error.where == f"step 2 of party '{party}'"


def test_keys_of_another_length_are_refused(meddle):
    error = meddle(DEALER, lambda payload: payload[:-1], Kind.PROTOCOL, TruncatedFrameError, step=1)
    assert DEALER in error.where


def test_a_relay_that_puts_its_own_keys_in_the_dealers_place_is_noticed(meddle):
    """Otherwise the label party could agree on the masks of the inputs itself."""
    flip = lambda payload: bytes([payload[0] ^ 1]) + payload[1:]  # noqa: E731
    error = meddle(DEALER, flip, Kind.PROTOCOL, AuthenticationError, step=0)
    assert error.code == "V404"
    assert f"'{DEALER}'" in error.what


@pytest.mark.parametrize("told", [b"", bytes(4), b"\xff" * 4])
def test_a_party_that_lies_about_its_columns_is_named(data, told):
    one = session(data)
    half = one.clients[0].end
    half.introduce = lambda: half.link.send(Frame(Kind.PROTOCOL, 1, told))
    with pytest.raises(ProtocolError, match="'bank'"):
        one.run()


def test_columns_that_do_not_fit_are_named_before_anything_is_sent(data):
    trace = Trace(Kind)
    one = session(data, observers=[trace])
    one.clients[0].inputs = one.clients[0].inputs * 1e6
    with pytest.raises(RingRangeError, match="'bank'"):
        one.run()
    assert {frame.kind for frame in trace} == {Kind.PROTOCOL}


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
def test_outputs_near_the_end_of_the_ring_are_refused_in_every_mode(data, mode):
    """Of 2^11 they may use half: a bias of 900 passes, and one of 1100 has not wrapped yet."""
    weights = session(data, train={"epochs": 1}).run().weights()
    weights["bank"]["own"][-1] += 900 << WEIGHT_BITS
    if mode != "train":
        session(data, mode=mode, weights=weights).run()
    weights["bank"]["own"][-1] += 200 << WEIGHT_BITS
    with pytest.raises(RingRangeError) as caught:
        session(data, mode=mode, weights=weights).run()
    assert caught.value.where.startswith("first layer, step")
    assert caught.value.got == "11 bits before the point"


def test_shares_of_another_layer_or_none_are_refused(data):
    weights = session(data, train={"epochs": 1}).run().weights()
    key = "codec-bank/share"
    wrong = weights[LABEL] | {key: weights[LABEL][key][:-1]}
    with pytest.raises(RunFolderError, match="party 'bank'"):
        session(data, mode="evaluate", weights=weights | {LABEL: wrong}).run()
    none = {name: value for name, value in weights[LABEL].items() if name != key}
    with pytest.raises(RunFolderError, match="no share"):
        session(data, mode="evaluate", weights=weights | {LABEL: none})
    with pytest.raises(RunFolderError, match="no shares"):
        session(data, mode="evaluate", weights=weights | {"bank": {}})


def test_secrets_are_in_no_repr(data):
    one = session(data)
    one.begin()
    assert isinstance(one.helper, DealerEnd)
    shown = repr(one.helper._dealers) + repr(one.clients[0].end._attempt)
    assert "b'" not in shown
