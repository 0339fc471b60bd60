"""Trainings whose first layers are shared, in one process: what they compute and refuse.

The label party deals, and holds no share; or a third party deals, and the label party holds shares.
"""

import pytest
import torch
from shared_layers import (
    DEALER,
    LABEL,
    SECURE,
    exact,
    experiment,
    fresh,
    joined,
    joined_words,
    other_share,
    session,
    start_from,
)

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
from vfl.datasets import Dealing, load_bundled
from vfl.mpc.secure.beaver import DealerEnd
from vfl.mpc.secure.shared_layer import WEIGHT_BITS, first_weights
from vfl.session import Adversary, rules
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

PARTIES = {"beaver": ("bank", "shop"), SECURE: ("bank",)}
both = pytest.mark.parametrize("secure", PARTIES, ids=["label party deals", "third party deals"])


def rows_of(*parties):
    return load_bundled("digits", parties, LABEL, Dealing(0, limit=300), flatten=LABEL in parties)


@pytest.fixture(scope="module")
def tables():
    """Rows by secure mode."""
    return {secure: rows_of(*parties) for secure, parties in PARTIES.items()}


@pytest.mark.parametrize(
    ("secure", "parties", "rate", "batch"),
    [
        ("beaver", ("bank", "shop"), 0.1, 64),
        ("beaver", ("bank", "shop", LABEL), 0.3, 32),
        (SECURE, ("bank",), 0.1, 64),
        (SECURE, ("bank", "shop", "clinic"), 0.3, 32),
        (SECURE, ("bank", LABEL), 0.3, 32),
    ],
)
def test_a_training_computes_what_the_plain_one_does(secure, parties, rate, batch):
    """Weights within the bound the page states.

    A step's error is that of inputs rounded to 2^-14 and gradients to 2^-27, and what follows from
    both; it adds up over the steps. (A ReLU of the top that gets a number which is zero but for
    that error would part a whole row's gradient, so there is none.)
    """
    data = load_bundled("digits", parties, LABEL, Dealing(0, limit=900), flatten=LABEL in parties)
    more = {
        "train": {"epochs": 4, "learning_rate": rate, "batch_size": batch},
        "label": {"party": LABEL, "top": "mlp:hidden=32,activation=tanh"},
    }
    bottoms = fresh(data)
    own = {LABEL: fresh(data)[LABEL]} if LABEL in parties else {}
    shared = start_from(session(data, secure, bottoms=own, **more), bottoms).run()
    plain = session(data, "none", bottoms=bottoms, **more).run()
    ours, theirs = (one.label.history[-1] for one in (shared, plain))
    weights = shared.weights()
    apart = max(
        float((joined(weights, one.name) - exact(one)).abs().max()) for one in plain.clients
    )
    accuracies = ours["test_accuracy"], theirs["test_accuracy"]
    print(f"{secure}, {parties}: accuracies {accuracies}, weights {apart:.1e} apart")
    assert apart < 1e-5
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
    assert accuracies[0] == accuracies[1] > 0.2


def test_it_trains_the_very_same_weights_whoever_deals(tables):
    """All arithmetic is exact in the ring, so who holds which share makes no difference at all."""
    bottoms = fresh(tables["beaver"])
    one, other = (start_from(session(tables["beaver"], who), bottoms).run() for who in PARTIES)
    assert one.label.history[-1]["train_loss"] == other.label.history[-1]["train_loss"]
    left, right = one.weights(), other.weights()
    for name in bottoms:
        assert torch.equal(joined_words(left, name), joined_words(right, name))
    assert all(torch.equal(right[LABEL][key], value) for key, value in left[LABEL].items())


@both
def test_no_party_has_weights_and_every_share_is_as_good_as_random(tables, secure):
    weights = session(tables[secure], secure).run().weights()
    assert set(weights) == {*PARTIES[secure], LABEL}, "a dealer keeps nothing"
    for name in PARTIES[secure]:
        holder, key = other_share(weights, name)
        for share in (weights[name]["own"], weights[holder][key]):
            numbers = share.double() * 2.0**-WEIGHT_BITS
            assert numbers.abs().max() > 2**20, "the weights themselves are below 2"
        assert joined(weights, name).abs().max() < 4


@both
def test_both_halves_of_the_first_weights_come_from_their_holders_secrets(tables, secure):
    """None of them from torch's generators, whatever the bottom that a session was given."""
    one = session(tables[secure], secure, bottoms=fresh(tables[secure]))
    one.begin()
    weights, columns = one.weights(), tables[secure]["bank"].inputs[0].numel() + 1
    holder, key = other_share(weights, "bank")
    other = "bank" if secure == SECURE else "of another"
    for party, share, purpose in (("bank", "own", "bank"), (holder, key, other)):
        secret = Secret.of_simulation(one.terms.seed, party)
        assert torch.equal(weights[party][share], first_weights(columns, 12, secret, purpose))


@both
def test_evaluation_and_prediction_run_forward_on_the_kept_shares(tables, secure):
    data = tables[secure]
    trained = session(data, secure).run()
    weights, bottoms = trained.weights(), fresh(data)
    for name, bottom in bottoms.items():
        layer = joined(weights, name)
        with torch.no_grad():
            bottom[-1].weight.copy_(layer[:-1].t())
            bottom[-1].bias.copy_(layer[-1])
    asked = session(data, secure, mode="predict", weights=weights).run()
    top = {key: value for key, value in weights[LABEL].items() if "/" not in key}
    plain = session(data, "none", mode="predict", bottoms=bottoms, weights={LABEL: top}).run()
    torch.testing.assert_close(asked.outputs(), plain.outputs(), rtol=0, atol=1e-3)
    again = session(data, secure, mode="evaluate", weights=weights).run()
    told = again.label.history[-1]["test_loss"]
    assert told == pytest.approx(trained.label.history[-1]["test_loss"], abs=1e-6)


@both
def test_going_back_to_a_checkpoint_takes_new_keys_and_changes_nothing(tables, tmp_path, secure):
    data, bottoms = tables[secure], fresh(tables[secure])
    whole = start_from(session(data, secure), bottoms).run()

    def until(step):
        trace = Trace(Kind)

        def kill(party, direction, frame):
            if (party, frame.step, frame.kind) == ("bank", step, Kind.GRAD):
                raise KeyboardInterrupt

        one = session(data, secure, checkpoints=tmp_path, observers=[trace, kill])
        with pytest.raises(KeyboardInterrupt):
            start_from(one, bottoms).run()
        return {(frame.party, frame.direction, frame.kind, frame.step): bytes(frame.payload)
                for frame in trace
                if frame.kind is not Kind.PROTOCOL and len(frame.payload) > 4}  # fmt: skip

    before, after = until(8), until(9)
    again = before.keys() & after.keys()
    assert {party for party, *_ in again} >= {"bank", DEALER if secure == SECURE else "shop"}
    assert all(before[key] != after[key] for key in again)
    resumed = session(data, secure, checkpoints=tmp_path).run()
    left, right = resumed.weights(), whole.weights()
    for name in PARTIES[secure]:
        assert torch.equal(joined_words(left, name), joined_words(right, name))
    for key, value in right[LABEL].items():
        assert torch.equal(left[LABEL][key], value) is not key.endswith("share"), key


@both
def test_the_best_epochs_weights_are_kept_at_every_party(tables, secure):
    bottoms, train = fresh(tables[secure]), {"epochs": 8, "learning_rate": 0.6, "keep": "best"}
    kept = start_from(session(tables[secure], secure, train=train), bottoms).run()
    best = kept.label.stopping.best_epoch
    assert best > 0
    until = session(tables[secure], secure, train=train | {"epochs": best, "keep": "last"})
    start_from(until, bottoms).run()
    assert kept.label.history[-1]["test_loss"] == until.label.history[-1]["test_loss"]


@pytest.mark.parametrize("defense", ["gradient_noise:norm=1,sigma=0.1", "label_dp:epsilon=3"])
def test_defenses_of_labels_and_gradients_go_along(tables, defense):
    losses = session(tables[SECURE], defense=defense).run().label.history
    assert losses[-1]["train_loss"] < 2.5


@pytest.mark.parametrize(
    ("secure", "changes", "word"),
    [
        ("beaver", {"merge": "concat"}, "merge = 'sum'"),
        ("beaver", {"codec": "topk:k=2"}, "codec = 'none'"),
        ("beaver", {"defense": "potential:alpha=1"}, "gradients"),
        ("beaver", {"defense": "layer_norm"}, "at the label party"),
        ("beaver", {"defense": "clipped_noise:norm=1,sigma=1"}, "at the label party"),
        ("beaver", {"defense": "split_guard"}, "at the label party"),
        ("beaver", {"defense": "mixup"}, "at the label party"),
        ("beaver", {"train": {"optimizer": "adam"}}, "sgd"),
        ("beaver", {"train": {"momentum": 0.9}}, "train.momentum = 0"),
        ("beaver", {"train": {"weight_decay": 0.1}}, "train.weight_decay = 0"),
        ("beaver", {"train": {"in_flight": 2}}, "train.in_flight = 1"),
        ("beaver:dealer=shop", {}, "the label party"),
        ("beaver:dealer=Notary", {}, "the name of a third party"),
        (SECURE, {"merge": "concat"}, "merge = 'sum'"),
        (SECURE, {"codec": "quantise:values=8"}, "codec = 'none'"),
        (SECURE, {"train": {"in_flight": 2}}, "train.in_flight = 1"),
        ("beaver:dealer=label.party", {}, "the name of a third party"),
    ],
)
def test_what_would_expose_weights_or_cuts_is_refused(tables, secure, changes, word):
    with pytest.raises(ExposedCutError) as caught:
        session(tables["beaver"], secure, **changes)
    assert word in str(caught.value)


def test_the_label_party_may_be_named_as_the_dealer(tables):
    assert session(tables["beaver"], f"beaver:dealer={LABEL}", train={"epochs": 1}).run()


def test_one_feature_party_is_told_what_would_do(tables):
    with pytest.raises(ExposedCutError) as caught:
        session(tables[SECURE], "beaver")
    assert "no partner to share" in caught.value.what
    assert "third party" in caught.value.fix


@pytest.mark.parametrize("bottom", ["mlp:hidden=8", "mlp:hidden=none,last=relu", "cnn"])
def test_a_bottom_that_is_not_linear_is_refused(tables, bottom):
    parties = {name: {"width": 12, "bottom": bottom} for name in ("bank", "shop")}
    asked = experiment("beaver", parties).model_dump() | {"parties": parties}
    with pytest.raises(ExposedCutError, match="party 'bank'") as caught:
        LocalSession(type(experiment()).model_validate(asked), tables["beaver"], outputs=10)
    assert caught.value.want.startswith("bottom = 'mlp:hidden=none'")


def test_a_trace_an_adversary_and_a_look_at_a_cut_are_refused(tables, tmp_path):
    data = tables[SECURE]
    with pytest.raises(ExposedCutError, match="trace"):
        session(data, trace={"phases": ["train"]}, checkpoints=tmp_path)
    with pytest.raises(ExposedCutError, match="tamper"):
        session(data, adversaries={"bank": Adversary()})
    with pytest.raises(ExposedCutError, match="no party has a bottom or a cut"):
        session(data).clients[0].cut(torch.arange(3))


def first_exchange(session):
    return next(iter(rules.schedule(session.terms, session.label.data.split)))


def ask(session, step, rows=3):
    """The label party asks the dealer for a training exchange of so many rows."""
    asked = Frame(Kind.OPENING, step, rows.to_bytes(4, "little"))
    session.label.aggregator.helpers[0].send(asked)


@both
def test_without_keys_nothing_is_sent_and_nothing_dealt(tables, secure):
    one = session(tables[secure], secure)
    with pytest.raises(ProtocolError, match="no keys"):
        one.clients[0].begin(first_exchange(one))
    if secure == SECURE:
        one.label.ends["bank"].link.send(Frame(Kind.OPENING, 0, (3).to_bytes(4, "little")))
        ask(one, 0)
        with pytest.raises(ProtocolError, match="unexpected message"):
            one.helper.serve()


@both
def test_an_exchange_is_opened_and_dealt_once_in_an_attempt(tables, secure):
    one = session(tables[secure], secure)
    one.begin()
    exchange = first_exchange(one)
    one.clients[0].begin(exchange)
    with pytest.raises(ReusedPadError):
        one.clients[0].begin(exchange)
    if secure == SECURE:
        ask(one, 7)
        assert one.helper.serve()
        for step in (7, 6):
            ask(one, step)
            with pytest.raises(ReusedPadError):
                one.helper.serve()


@pytest.mark.parametrize("rows", [0, LIMIT_BYTES // (8 * 65) + 1, 2**32 - 1])
def test_a_dealer_draws_no_masks_for_rows_that_fit_no_frame(tables, rows):
    one = session(tables[SECURE])
    one.begin()
    ask(one, 0, rows)
    with pytest.raises(ProtocolError, match="does not fit into a frame"):
        one.helper.serve()


def test_a_dealer_is_told_columns_once_an_attempt_and_only_such_as_can_be(tables):
    one = session(tables[SECURE])

    def columns_come(payload):
        one.label.aggregator.helpers[0].send(Frame(Kind.PROTOCOL, 1, payload))
        one.helper.begin({"bank": bytes(32)})

    one.begin()
    with pytest.raises(ProtocolError, match="twice"):
        columns_come((65).to_bytes(4, "little"))
    for columns in (0, 2**15 + 1, 2**32 - 1):
        one.helper.introduce()
        with pytest.raises(ProtocolError, match="cannot be shared"):
            columns_come(columns.to_bytes(4, "little"))
    with pytest.raises(TruncatedFrameError):
        columns_come(bytes(3))


@pytest.fixture
def meddle(tables, monkeypatch):
    """Runs a session in which some frames arrive changed; the error that ends it.

    Frames of `party` are changed on their way up, those to it if `down`.
    """

    def ended(secure, party, change, kind, error, steps=(2,), down=False):
        one = session(tables[secure], secure)
        link = one.label.aggregator.helpers[0] if party == DEALER else one.label.ends[party].link
        name = "send" if down else "receive"
        plain = getattr(type(link), name)

        def changed(self, *frames):
            def other(frame):
                if self is link and frame.kind is kind and frame.step in steps:
                    return Frame(kind, frame.step, bytes(change(bytearray(frame.payload))))
                return frame

            return plain(self, *map(other, frames)) if down else other(plain(self))

        monkeypatch.setattr(type(link), name, changed)
        with pytest.raises(error) as caught:
            one.run()
        return caught.value

    return ended


def flipped(payload):
    payload[0] ^= 1
    return payload


def test_what_a_relay_changes_in_the_parties_words_is_noticed(meddle):
    error = meddle("beaver", "shop", flipped, Kind.OPENING, AuthenticationError, down=True)
    assert (error.code, error.where) == ("V404", "inputs 2")
    assert "'bank'" in error.what


def test_a_relay_cannot_send_an_earlier_message_again(meddle):
    kept = []

    def repeat(payload):
        kept.append(bytes(payload))
        return kept[0]

    error = meddle("beaver", "shop", repeat, Kind.OPENING, AuthenticationError, (1, 2), down=True)
    assert error.where == "inputs 2"


def test_a_relay_that_puts_its_own_keys_in_the_dealers_place_is_noticed(meddle):
    """Otherwise the label party could agree on the masks of the inputs itself."""
    error = meddle(SECURE, DEALER, flipped, Kind.PROTOCOL, AuthenticationError, (0,))
    assert error.code == "V404"
    assert f"'{DEALER}'" in error.what


@pytest.mark.parametrize("change", [lambda payload: payload[:-8], lambda payload: payload + b"\0"])
@pytest.mark.parametrize(
    ("secure", "party", "kind"),
    [
        ("beaver", "shop", Kind.OPENING),
        ("beaver", "shop", Kind.GRAD),
        (SECURE, DEALER, Kind.OPENING),
        (SECURE, DEALER, Kind.GRAD),
        (SECURE, "bank", Kind.OPENING),
        (SECURE, "bank", Kind.CUT),
    ],
)
def test_a_message_of_another_length_is_refused_with_its_sender(
    meddle, secure, party, kind, change
):
    down = secure == "beaver"
    error = meddle(secure, party, change, kind, TruncatedFrameError, down=down)
    assert "step 2" in error.where
    assert down or error.where == f"step 2 of party '{party}'"


def test_a_deal_of_another_length_or_of_no_columns_is_refused(meddle):
    shorter = lambda payload: payload[:-1]  # noqa: E731
    meddle("beaver", "shop", shorter, Kind.PROTOCOL, TruncatedFrameError, (1,), down=True)
    error = meddle(SECURE, DEALER, shorter, Kind.PROTOCOL, TruncatedFrameError, (1,))
    assert DEALER in error.where
    none = lambda payload: payload[:-4] + bytes(4)  # noqa: E731
    meddle("beaver", "shop", none, Kind.PROTOCOL, ProtocolError, (1,), down=True)


@both
@pytest.mark.parametrize("told", [b"", bytes(4), b"\xff" * 4])
def test_a_party_that_lies_about_its_columns_is_named(tables, secure, told):
    one = session(tables[secure], secure)
    half = one.clients[-1].end
    half.introduce = lambda: half.link.send(Frame(Kind.PROTOCOL, 1, told))
    with pytest.raises(ProtocolError, match=f"'{one.clients[-1].name}'"):
        one.run()


def test_a_party_that_opens_another_shape_is_named(tables):
    one = session(tables["beaver"], "beaver")
    half = one.clients[1].end
    send_cut = half.send_cut
    half.send_cut = lambda inputs, step, rows: send_cut(inputs[:-1], step)
    with pytest.raises(TruncatedFrameError) as caught:
        one.run()
    assert caught.value.where == "step 0 of party 'shop'"


@both
def test_columns_that_do_not_fit_are_named_before_anything_is_sent(tables, secure):
    trace = Trace(Kind)
    one = session(tables[secure], secure, observers=[trace])
    one.clients[0].inputs = one.clients[0].inputs * 1e6
    with pytest.raises(RingRangeError, match="'bank'"):
        one.run()
    assert {frame.kind for frame in trace} == {Kind.PROTOCOL}


@both
@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
def test_outputs_near_the_end_of_the_ring_are_refused_in_every_mode(tables, secure, mode):
    """Of 2^11 they may use half: a bias of 900 passes, and one of 1100 has not wrapped yet."""
    weights = session(tables[secure], secure, train={"epochs": 1}).run().weights()
    weights["bank"]["own"][-1] += 900 << WEIGHT_BITS
    if mode != "train":
        session(tables[secure], secure, mode=mode, weights=weights).run()
    weights["bank"]["own"][-1] += 200 << WEIGHT_BITS
    with pytest.raises(RingRangeError) as caught:
        session(tables[secure], secure, mode=mode, weights=weights).run()
    assert caught.value.where.startswith("first layer, step")
    assert caught.value.got == "11 bits before the point"


@both
def test_shares_of_another_layer_or_none_are_refused(tables, secure):
    weights = session(tables[secure], secure, train={"epochs": 1}).run().weights()
    holder, key = other_share(weights, "bank")

    def evaluate(own):
        session(tables[secure], secure, mode="evaluate", weights=weights | own).run()

    with pytest.raises(RunFolderError, match=r"another layer|party 'bank'"):
        evaluate({holder: weights[holder] | {key: weights[holder][key][:-1]}})
    if holder == LABEL:
        with pytest.raises(RunFolderError, match="no share"):
            evaluate({holder: {k: value for k, value in weights[holder].items() if k != key}})
    with pytest.raises(RunFolderError, match="no shares"):
        evaluate({"bank": {}})


def test_secrets_are_in_no_repr(tables):
    one = session(tables[SECURE])
    one.begin()
    assert isinstance(one.helper, DealerEnd)
    shown = repr(one.helper._dealers) + repr(one.clients[0].end._attempt)
    assert "b'" not in shown
