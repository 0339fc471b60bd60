"""A training whose first layers are shared, in one process: what it computes, what it refuses."""

import pytest
import torch
from shared_layers import TRAIN, encode_weights

from vfl import models
from vfl.config import Experiment
from vfl.core.errors import (
    AuthenticationError,
    ExposedCutError,
    ProtocolError,
    ReusedPadError,
    RingRangeError,
    RunFolderError,
    TruncatedFrameError,
)
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret, generator, scoped
from vfl.datasets import load_bundled
from vfl.mpc.secure.beaver import owner_of, partner_of
from vfl.mpc.secure.shared_layer import INPUT_BITS, WEIGHT_BITS, first_weights
from vfl.session import Adversary, rules
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

PARTIES = ("left", "right")
WIDTH = 12


def experiment(secure="beaver", train=None, parties=PARTIES, **changes):
    content = {
        "merge": "sum",
        "secure": secure,
        "parties": {name: {"width": WIDTH, "bottom": "mlp:hidden=none"} for name in parties},
        "label": {"top": "mlp:hidden=32"},
        "train": TRAIN | (train or {}),
    }
    return Experiment.model_validate(content | changes)


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, 0, "label", limit=300)


def session(data, secure="beaver", **more):
    kept = {key: more.pop(key) for key in ("observers", "mode", "weights", "bottoms", "checkpoints",
                                           "adversaries") if key in more}  # fmt: skip
    return LocalSession(experiment(secure, **more), data, outputs=10, **kept)


def fresh(data):
    """A bottom for every party with columns."""
    made = {}
    for number, name in enumerate(name for name in data if data[name].inputs is not None):
        with scoped(number):
            shape = tuple(data[name].inputs.shape[1:])
            made[name] = models.make_bottom("mlp:hidden=none").build(shape, WIDTH)
    return made


def shares_of(bottoms):
    """Uniform shares of these bottoms, by party, as its weights."""
    draw, order = generator(0, "shares"), tuple(bottoms)
    whole = {name: encode_weights(bottom[-1]) for name, bottom in bottoms.items()}
    own = {
        name: torch.randint(-(2**63), 2**63 - 1, words.shape, generator=draw)
        for name, words in whole.items()
    }
    other = {partner_of(name, order): whole[name] - own[name] for name in order}
    return {name: {"own": own[name], "other": other[name]} for name in order}


def joined(weights, name):
    """A party's layer, from both its shares: what nobody has; float64, (columns + 1, width)."""
    order = tuple(part for part in weights if "own" in weights[part])
    other = weights[partner_of(name, order)]["other"]
    return (weights[name]["own"] + other).double() * 2.0**-WEIGHT_BITS


@pytest.mark.parametrize(
    ("top", "rate", "batch", "bound"),
    [
        pytest.param("mlp:hidden=32", 0.3, 32, 1e-5, marks=pytest.mark.slow),
        ("mlp:hidden=32,activation=tanh", 0.05, 64, 1e-5),
        # One ReLU falls on the other side of zero.
        pytest.param("mlp:hidden=32", 0.05, 64, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_a_training_computes_what_the_plain_one_does(top, rate, batch, bound):
    """The whole of digits: the same accuracy, and weights within the bound the page states.

    A step's error is that of inputs rounded to 2^-14 and gradients to 2^-27, and what follows from
    both; it adds up over the steps, 400 of them at most. Only where a ReLU of the top gets a number
    that is zero but for that error may a whole row's gradient differ.
    """
    data = load_bundled("digits", PARTIES, 0, "label")
    bottoms = fresh(data)
    train = {"epochs": 10, "learning_rate": rate, "batch_size": batch}
    shared, plain = (
        session(data, secure, train=train, label={"top": top}, **start).run()
        for secure, start in (
            ("beaver", {"weights": shares_of(bottoms)}),
            ("none", {"bottoms": bottoms}),
        )
    )
    ours, theirs = (one.label.history[-1] for one in (shared, plain))
    weights, apart = shared.weights(), 0.0
    for client in plain.clients:
        layer = client.end.model["bottom"][-1]
        exact = encode_weights(layer).double() * 2.0**-WEIGHT_BITS
        apart = max(apart, float((joined(weights, client.name) - exact).abs().max()))
    accuracies = ours["test_accuracy"], theirs["test_accuracy"]
    print(f"{top}, rate {rate}: accuracies {accuracies}, weights {apart:.1e} apart")
    assert apart < bound
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=bound)
    assert accuracies[0] == pytest.approx(accuracies[1], abs=1e-3)
    assert accuracies[0] > 0.5


def test_the_first_outputs_are_those_of_the_plain_sum_within_the_rounding(data):
    bottoms = fresh(data)
    sums = []
    starts = {"none": {"bottoms": bottoms}, "beaver": {"weights": shares_of(bottoms)}}
    for secure, start in starts.items():
        one = session(data, secure, **start)
        found = one.label.aggregator.cuts
        taken = []

        def noting(exchange, found=found, taken=taken):
            cuts = found(exchange)
            taken.append(sum(cut.detach() for cut in cuts.values()))
            return cuts

        one.label.aggregator.cuts = noting
        one.run()
        sums.append(taken[0].double())
    most = max(bottom[-1].weight.abs().sum(1).max().item() for bottom in bottoms.values())
    assert (sums[0] - sums[1]).abs().max() <= 2 * most * 2.0 ** -(INPUT_BITS + 1) + 1e-5


@pytest.mark.parametrize("count", [3, 5])
def test_more_parties_and_a_label_party_with_columns(data, count):
    names = [*"abcdefg"[: count - 1], "lender"]
    rows = load_bundled("digits", names, 0, "lender", flatten=True, limit=300)
    changes = {"parties": names, "label": {"party": "lender", "top": "mlp:hidden=32"}}
    bottoms = {name: one for name, one in fresh(rows).items()}
    shares = shares_of({name: one for name, one in bottoms.items() if name != "lender"})
    plain = session(rows, "none", bottoms=bottoms, **changes).run()
    shared = session(
        rows, bottoms={"lender": fresh(rows)["lender"]}, weights=shares, **changes
    ).run()
    ours, theirs = (one.label.history[-1]["train_loss"] for one in (shared, plain))
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_no_party_has_weights_and_every_share_is_as_good_as_random(data):
    weights = session(data).run().weights()
    for name in PARTIES:
        for part in ("own", "other"):
            share = weights[name][part].double() * 2.0**-WEIGHT_BITS
            assert share.abs().max() > 2**20, "the weights themselves are below 2"
        assert joined(weights, name).abs().max() < 4


def test_both_halves_of_the_first_weights_come_from_their_holders_secrets(data):
    """None of them from torch's generators, whatever the bottom that a session was given."""
    one = session(data, bottoms=fresh(data))
    one.begin()
    columns = data["left"].inputs[0].numel() + 1
    for name, weights in one.weights().items():
        if name in PARTIES:
            secret = Secret.of_simulation(one.terms.seed, name)
            for part, purpose in (("own", name), ("other", "of another")):
                exact = first_weights(columns, WIDTH, secret, purpose)
                assert torch.equal(weights[part], exact)


def test_neighbours_form_a_ring():
    order = ("a", "b", "c")
    assert [partner_of(name, order) for name in order] == ["b", "c", "a"]
    assert all(owner_of(partner_of(name, order), order) == name for name in order)


def test_evaluation_and_prediction_run_forward_on_the_kept_shares(data):
    trained = session(data).run()
    weights = trained.weights()
    bottoms = fresh(data)
    for name, bottom in bottoms.items():
        layer = joined(weights, name)
        with torch.no_grad():
            bottom[-1].weight.copy_(layer[:-1].t())
            bottom[-1].bias.copy_(layer[-1])
    asked = session(data, mode="predict", weights=weights).run()
    plain = session(
        data, "none", mode="predict", bottoms=bottoms, weights={"label": weights["label"]}
    )
    torch.testing.assert_close(asked.outputs(), plain.run().outputs(), rtol=0, atol=1e-3)
    again = session(data, mode="evaluate", weights=weights).run()
    told = again.label.history[-1]["test_loss"]
    assert told == pytest.approx(trained.label.history[-1]["test_loss"], abs=1e-6)


def test_going_back_to_a_checkpoint_takes_new_keys_and_changes_nothing(data, tmp_path):
    weights = shares_of(fresh(data))
    whole = session(data, weights=weights).run()

    def until(step, trace):
        def kill(party, direction, frame):
            if frame.step == step and frame.kind is Kind.GRAD:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session(data, weights=weights, checkpoints=tmp_path, observers=[trace, kill]).run()

    first, second = Trace(Kind), Trace(Kind)
    until(8, first)
    until(9, second)
    before, after = (
        {(frame.direction, frame.kind, frame.step): bytes(frame.payload) for frame in trace
         if frame.party == "left" and frame.kind is not Kind.PROTOCOL and frame.payload}
        for trace in (first, second)
    )  # fmt: skip
    again = before.keys() & after.keys()
    assert len(again) > 4
    assert all(before[key] != after[key] for key in again)
    resumed = session(data, weights=weights, checkpoints=tmp_path).run()
    assert resumed.label.weights_digest() == whole.label.weights_digest()
    for name in PARTIES:
        assert torch.equal(joined(resumed.weights(), name), joined(whole.weights(), name))


def test_the_best_epochs_weights_are_kept_at_every_party(data):
    weights = shares_of(fresh(data))
    train = {"epochs": 8, "learning_rate": 0.6, "keep": "best"}
    kept = session(data, train=train, weights=weights).run()
    best = kept.label.stopping.best_epoch
    assert best > 0
    until = session(data, train=train | {"epochs": best, "keep": "last"}, weights=weights).run()
    assert kept.label.history[-1]["test_loss"] == until.label.history[-1]["test_loss"]


def test_defenses_of_labels_and_gradients_go_along(data):
    for defense in ("gradient_noise:norm=1,sigma=0.1", "label_dp:epsilon=3"):
        losses = session(data, defense=defense).run().label.history
        assert losses[-1]["train_loss"] < 2.5


NEAR = "bottom = 'mlp:hidden=none'"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"merge": "concat"}, "merge = 'sum'"),
        ({"parties": ("left",)}, "2 feature parties"),
        ({"codec": "topk:k=2"}, "codec = 'none'"),
        ({"codec": "quantise:values=8"}, "codec = 'none'"),
        ({"defense": "potential:alpha=1"}, "gradients"),
        ({"defense": "layer_norm"}, "at the label party"),
        ({"defense": "clipped_noise:norm=1,sigma=1"}, "at the label party"),
        ({"defense": "split_guard"}, "at the label party"),
        ({"defense": "mixup"}, "at the label party"),
        ({"train": {"optimizer": "adam"}}, "sgd"),
        ({"train": {"momentum": 0.9}}, "train.momentum = 0"),
        ({"train": {"weight_decay": 0.1}}, "train.weight_decay = 0"),
        ({"train": {"in_flight": 2}}, "train.in_flight = 1"),
        ({"secure": "beaver:dealer=right"}, "the label party"),
        ({"secure": "beaver:dealer=Notary"}, "the name of a third party"),
    ],
)
def test_what_would_expose_weights_or_cuts_is_refused_when_a_side_is_built(data, changes, word):
    secure = changes.pop("secure", "beaver") if "secure" in changes else "beaver"
    with pytest.raises(ExposedCutError) as caught:
        session(data, secure, **changes)
    assert word in str(caught.value)


def test_the_label_party_may_be_named_as_the_dealer(data):
    assert session(data, "beaver:dealer=label", train={"epochs": 1}).run().label.history


def test_one_feature_party_is_told_what_would_do():
    with pytest.raises(ExposedCutError) as caught:
        session(load_bundled("digits", ["left"], 0, "label", limit=300), parties=["left"])
    assert "nobody to share" in caught.value.what
    assert "third party" in caught.value.fix


@pytest.mark.parametrize("bottom", ["mlp:hidden=8", "mlp:hidden=none,last=relu", "cnn"])
def test_a_bottom_that_is_not_linear_is_refused(data, bottom):
    parties = {name: {"width": WIDTH, "bottom": bottom} for name in PARTIES}
    content = experiment().model_dump() | {"parties": parties}
    with pytest.raises(ExposedCutError, match="party 'left'") as caught:
        LocalSession(Experiment.model_validate(content), data, outputs=10)
    assert caught.value.want.startswith(NEAR)


def test_a_trace_an_adversary_and_a_look_at_a_cut_are_refused(data, tmp_path):
    with pytest.raises(ExposedCutError, match="trace"):
        session(data, trace={"phases": ["train"]}, checkpoints=tmp_path)
    with pytest.raises(ExposedCutError, match="tamper"):
        session(data, adversaries={"left": Adversary()})
    with pytest.raises(ExposedCutError, match="nobody a cut"):
        session(data).clients[0].cut(torch.arange(3))


def first_exchange(session):
    return next(iter(rules.schedule(session.terms, session.label.data.split)))


def test_without_keys_nothing_is_sent(data):
    one = session(data)
    with pytest.raises(ProtocolError, match="no keys"):
        one.clients[0].begin(first_exchange(one))


def test_an_exchange_is_opened_once_in_an_attempt(data):
    one = session(data)
    one.begin()
    exchange = first_exchange(one)
    one.clients[0].begin(exchange)
    with pytest.raises(ReusedPadError):
        one.clients[0].begin(exchange)


def flip(place):
    def change(payload):
        payload[place] ^= 1
        return bytes(payload)

    return change


@pytest.fixture
def meddle(data, monkeypatch):
    """Runs a session whose relay changes some frames to 'right'; the error that ends it."""

    def ended(change, kind, error, steps=(2,)):
        one = session(data)
        send = type(one.label.ends["right"].link).send

        def changed(link, frame):
            mine = link is one.label.ends["right"].link
            if mine and frame.kind is kind and frame.step in steps:
                frame = Frame(kind, frame.step, change(bytearray(frame.payload)))
            send(link, frame)

        monkeypatch.setattr(type(one.label.ends["right"].link), "send", changed)
        with pytest.raises(error) as caught:
            one.run()
        return caught.value

    return ended


def test_what_a_relay_changes_in_the_parties_words_is_noticed(meddle):
    error = meddle(flip(0), Kind.OPENING, AuthenticationError)
    assert error.code == "V404"
    assert error.where == "inputs 2"
    assert "'left'" in error.what


def test_a_relay_cannot_send_an_earlier_message_again(meddle):
    kept = []

    def repeat(payload):
        kept.append(bytes(payload))
        return kept[0]

    assert meddle(repeat, Kind.OPENING, AuthenticationError, steps=(1, 2)).where == "inputs 2"


@pytest.mark.parametrize("kind", [Kind.OPENING, Kind.GRAD])
@pytest.mark.parametrize("change", [lambda payload: payload[:-8], lambda payload: payload + b"\0"])
def test_a_relayed_message_or_gradient_of_another_length_is_refused(meddle, kind, change):
    error = meddle(lambda payload: bytes(change(payload)), kind, TruncatedFrameError)
    assert "step 2" in error.where


def test_a_deal_of_another_length_or_of_no_columns_is_refused(meddle):
    meddle(lambda payload: bytes(payload[:-1]), Kind.PROTOCOL, TruncatedFrameError, steps=(1,))


def test_a_deal_of_no_columns_is_refused(meddle):
    change = lambda payload: bytes(payload[:-4]) + bytes(4)  # noqa: E731
    meddle(change, Kind.PROTOCOL, ProtocolError, steps=(1,))


@pytest.mark.parametrize("told", [b"", bytes(4), b"\xff" * 4])
def test_a_party_that_lies_about_its_columns_is_named(data, told):
    one = session(data)
    half = one.clients[1].end
    half.introduce = lambda: half.link.send(Frame(Kind.PROTOCOL, 1, told))
    with pytest.raises(ProtocolError, match="'right'"):
        one.run()


def test_a_party_that_opens_another_shape_is_named(data):
    one = session(data)
    half = one.clients[1].end
    send_cut = half.send_cut
    half.send_cut = lambda inputs, step: send_cut(inputs[:-1], step)
    with pytest.raises(TruncatedFrameError) as caught:
        one.run()
    assert caught.value.where == "step 0 of party 'right'"


def test_columns_that_do_not_fit_are_named_before_anything_is_sent(data):
    trace = Trace(Kind)
    one = session(data, observers=[trace])
    one.clients[0].inputs = one.clients[0].inputs * 1e6
    with pytest.raises(RingRangeError, match="'left'"):
        one.run()
    assert {frame.kind for frame in trace} == {Kind.PROTOCOL}


def test_outputs_that_grow_towards_the_end_of_the_ring_stop_the_session(data):
    with pytest.raises(RingRangeError) as caught:
        session(data, train={"learning_rate": 900.0}).run()
    assert caught.value.where.startswith(("first layer, step", "gradient for"))


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
def test_outputs_near_the_end_of_the_ring_are_refused_in_every_mode(data, mode):
    """Of 2^11 they may use half: a bias of 900 passes, and one of 1100 has not wrapped yet."""
    weights = session(data, train={"epochs": 1}).run().weights()
    weights["left"]["own"][-1] += 900 << WEIGHT_BITS
    if mode != "train":
        session(data, mode=mode, weights=weights).run()
    weights["left"]["own"][-1] += 200 << WEIGHT_BITS
    with pytest.raises(RingRangeError) as caught:
        session(data, mode=mode, weights=weights).run()
    assert caught.value.where.startswith("first layer, step")
    assert caught.value.got == "11 bits before the point"


def test_shares_of_another_layer_are_refused(data):
    weights = session(data, train={"epochs": 1}).run().weights()
    wrong = weights["left"] | {"other": weights["left"]["other"][:-1]}
    with pytest.raises(RunFolderError, match="another party's"):
        session(data, mode="evaluate", weights=weights | {"left": wrong}).run()
    with pytest.raises(RunFolderError, match="no shares"):
        session(data, mode="evaluate", weights=weights | {"left": {}})
