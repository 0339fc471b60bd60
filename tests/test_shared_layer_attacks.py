"""Shared first layers under attack: by a holder with its whole transcript, and by the relay.

Every attacker here also plays against the same training without the protection, where it wins.
"""

import math

import numpy as np
import pytest
import torch
from holder import Diary, labels_from, uniform, weights_of

from vfl import models
from vfl.attacks import make
from vfl.attacks.cases import Victim
from vfl.attacks.scoring import attempt
from vfl.config import Experiment
from vfl.core.frame import Kind
from vfl.core.seeds import generator, scoped
from vfl.datasets import load_bundled
from vfl.mpc.secure import beaver
from vfl.mpc.secure.beaver import ShareHolder, size_of
from vfl.mpc.secure.keys import TAG_BYTES
from vfl.mpc.secure.shared_layer import encode_inputs
from vfl.mpc.stream import PadStream
from vfl.session import Exchange, rules
from vfl.session.trace import Trace
from vfl.training.local import LocalSession
from vfl.transport.pairs import SealedPairs

PARTIES = ("left", "right")
HOLDER = "left"
WIDTH, EPOCHS = 8, 10
ATTACKS = [
    ("logistic", "model_completion:steps=50"),
    pytest.param(("fine_tuning:steps=100",), marks=pytest.mark.slow),
]
LEAKS, SEEDS = 2, range(3)
#: What tells accuracies apart here.
MARGIN = 0.02


def experiment(secure, **train):
    train = {"epochs": EPOCHS, "batch_size": 32, "optimizer": "sgd", "momentum": 0,
             "learning_rate": 0.3} | train  # fmt: skip
    parties = {name: {"width": WIDTH, "bottom": "mlp:hidden=none"} for name in PARTIES}
    return Experiment.model_validate(
        {"merge": "sum", "secure": secure, "parties": parties, "train": train}
    )


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, 0, "label")


@pytest.fixture(scope="module")
def trained(data):
    """The same training plain, and shared with a diary; and the gradients the plain holder got.

    The dealer's keys are the same in every run of the tests, so that the figures are.
    """
    trace = Trace([Kind.GRAD])
    plain = LocalSession(experiment("none"), data, outputs=10, observers=[trace]).run()
    shared = LocalSession(experiment("beaver"), data, outputs=10)
    diary = Diary(shared, HOLDER)
    keys = (bytes([number]) * 32 for number in range(len(PARTIES)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beaver.secrets, "token_bytes", lambda size: next(keys))
        shared.run()
    assert shared.label.history[-1]["test_accuracy"] > 0.9
    heard = {
        frame.step: torch.from_numpy(np.frombuffer(frame.payload, np.float32).copy())
        for frame in trace
        if frame.party == HOLDER
    }
    return plain, diary, heard


def fresh(data, count):
    """Untrained bottoms, as many as there are candidates: the best of some luck is luck, too."""
    shape, made = tuple(data[HOLDER].inputs.shape[1:]), []
    for number in range(count):
        with scoped(number):
            layer = models.make_bottom("mlp:hidden=none").build(shape, WIDTH)[-1]
        made.append(torch.cat([layer.weight.detach().t(), layer.bias.detach()[None]]))
    return made


def score(data, weights, spec):
    """Mean accuracy of an attack on the test rows' labels, over several leaks."""
    victim = Victim(experiment("none"), data, HOLDER, weights)
    cases = ((victim.case(LEAKS, generator(seed, "leak")), seed) for seed in SEEDS)
    found = [attempt(case, make(spec), generator(seed, "draw")).value for case, seed in cases]
    return sum(found) / len(found)


@pytest.mark.parametrize("attacks", ATTACKS)
def test_a_holders_whole_transcript_is_worth_no_more_than_nothing(data, trained, attacks):
    """Labels from the holder's own shares, openings and gradients, against those from scratch."""
    plain, diary, _ = trained
    candidates = diary.bottoms()
    untrained = fresh(data, len(candidates))
    scratch = score(data, weights_of(untrained[0]), "scratch")
    gains = {}
    for spec in attacks:
        worth = {name: score(data, weights_of(one), spec) for name, one in candidates.items()}
        without = max(score(data, weights_of(one), spec) for one in untrained)
        stolen = score(data, plain.weights()[HOLDER], spec)
        gains[spec] = stolen - max(scratch, without)
        best = max(worth.values())
        print(f"{spec}: {stolen:.3f} plain, {best:.3f}, {without:.3f} untrained, {scratch:.3f}")
        assert max(worth.values()) <= max(scratch, without) + MARGIN, (spec, worth, without)
    assert max(gains.values()) > MARGIN, ("a plain bottom is worth something", gains, scratch)


def rows_and_labels(data, gradients, width):
    """The last epoch's gradients by training row, their direction alone, and the true labels."""
    settings = experiment("none")
    session = LocalSession(settings, data, outputs=10)
    schedule = rules.schedule(session.terms, data["label"].split)
    last = [one for one in schedule if one.trains and one.epoch == EPOCHS]
    rows = torch.cat([torch.from_numpy(one.rows) for one in last])
    values = torch.cat([gradients[one.step].reshape(-1, width).double() for one in last])
    return torch.nn.functional.normalize(values, dim=1).float(), data["label"].labels[rows]


def test_gradients_tell_a_holder_nothing_of_labels(data, trained):
    _, diary, heard = trained
    plain = labels_from(*rows_and_labels(data, heard, WIDTH), LEAKS, SEEDS)
    shared = labels_from(*rows_and_labels(data, diary.gradients, WIDTH), LEAKS, SEEDS)
    print(f"gradients: {plain:.3f} plain, {shared:.3f} shared")
    assert plain > 0.75, "two leaks of each class and plain gradients are enough"
    assert shared < 0.15


def test_what_a_holder_gets_is_uniform_and_never_repeats(trained):
    _, diary, _ = trained
    diary.never_repeats()


class Relay:
    """The label party with all it carried and dealt: it tries to take the masks off again."""

    def __init__(self, trace):
        self.keys, self.openings = {}, {}
        for frame in trace:
            payload = bytes(frame.payload)
            if frame.direction == "down" and (frame.kind, frame.step) == (Kind.PROTOCOL, 1):
                self.keys[frame.party] = payload[:32]
            if frame.direction == "up" and frame.kind is Kind.OPENING:
                self.openings[frame.party, frame.step] = payload

    def inputs(self, party, step, columns, rows):
        """X, if E is what the first bytes of an opening are; int64, axes (rows, columns)."""
        masked = self.openings[party, step][: size_of((rows, columns))]
        mask = PadStream(self.keys[party]).elements64(rows * columns, "inputs", step)
        return (np.frombuffer(masked, "<i8") + mask.view("<i8")).reshape(rows, columns)

    def weights(self, owner, partner, step, columns, rows):
        """The partner's share of the owner's layer, likewise."""
        start = size_of((rows, columns)) + TAG_BYTES
        masked = self.openings[partner, step][start : start + size_of((columns, WIDTH))]
        mask = PadStream(self.keys[partner]).elements64(columns * WIDTH, "weights", step)
        return (np.frombuffer(masked, "<i8") + mask.view("<i8")).reshape(columns, WIDTH)


def relayed(data):
    """A short training, and what its relay found; both parties here have as many columns."""
    trace, truth = Trace(Kind), {}
    session = LocalSession(experiment("beaver", epochs=1), data, outputs=10, observers=[trace])
    for client in session.clients:
        opening = client.end._open

        def noting(inputs, step, trains, half=client.end, opening=opening):
            truth[half.party, step] = encode_inputs(inputs, half.party).numpy()
            truth["shares", step, half.party] = half._other.share.numpy().copy()
            opening(inputs, step, trains)

        client.end._open = noting
    session.run()
    return Relay(trace), truth


def no_sealing(monkeypatch):
    """What travels is then as long, and readable."""
    plain = {
        "sealed": lambda seals, other, message, about: bytes(message) + bytes(TAG_BYTES),
        "opened": lambda seals, sender, sealed, about: bytes(sealed)[:-TAG_BYTES],
    }
    for name, same in plain.items():
        monkeypatch.setattr(SealedPairs, name, same)


def test_without_sealing_the_relay_that_deals_has_every_input_and_share(data, monkeypatch):
    no_sealing(monkeypatch)
    relay, truth = relayed(data)
    for party, other in (PARTIES, PARTIES[::-1]):
        for step in (0, 7):
            exact = truth[party, step]
            rows, columns = exact.shape
            assert np.array_equal(relay.inputs(party, step, columns, rows), exact)
            share = relay.weights(party, other, step, columns, rows)
            assert np.array_equal(share, truth["shares", step, other])


def test_the_relay_that_deals_cannot_decode_what_the_parties_sealed(data):
    relay, truth = relayed(data)
    for party, other in (PARTIES, PARTIES[::-1]):
        found, exact = [], []
        for step in range(20):
            true = truth[party, step]
            rows, columns = true.shape
            guess = relay.inputs(party, step, columns, rows)
            assert np.mean(guess == true) < 0.001
            share = relay.weights(party, other, step, columns, rows)
            assert np.mean(share == truth["shares", step, other]) < 0.01
            found.append(guess.ravel())
            exact.append(true.ravel())
        found, exact = np.concatenate(found), np.concatenate(exact)
        assert abs(np.corrcoef(found.astype(float), exact.astype(float))[0, 1]) < 0.05
        assert uniform(found)


def test_a_dealer_with_a_partners_help_has_the_owners_columns(data):
    """The collusion the page names: the partner hands over what it opened of the owner's."""
    seen = {}
    answer = ShareHolder.answer

    def noting(half, step):
        answer(half, step)
        seen[half.party, step] = half._other._kept["inputs"][1].numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShareHolder, "answer", noting)
        relay, truth = relayed(data)
    exact = truth["left", 3]
    mask = PadStream(relay.keys["left"]).elements64(exact.size, "inputs", 3).view("<i8")
    assert np.array_equal(seen["right", 3] + mask.reshape(exact.shape), exact)


def test_outputs_tell_the_label_party_how_alike_rows_are(data):
    """What the page owns up to: it knows G, and outputs before and after, so inner products.

    One step moves the outputs of row x by - sum over the batch of (x . x_s) rate G_s, over all
    parties' columns together; with a batch smaller than the width that has one solution.
    """
    rate, batch, asked = 0.3, np.arange(6), np.arange(100, 140)
    session = LocalSession(experiment("beaver", learning_rate=rate), data, outputs=10)
    outputs, gradients = {}, {}
    cuts = session.label.aggregator.cuts

    def noting(exchange):
        found = cuts(exchange)
        outputs[exchange.step] = sum(found.values()).detach().double()
        return found

    codec = session.label.ends[HOLDER].codec
    encode = codec.encode_grad

    def noting_gradient(grad, saved, context):
        gradients[context.step] = grad.double()
        return encode(grad, saved, context)

    session.label.aggregator.cuts, codec.encode_grad = noting, noting_gradient
    phases = (("validation", asked), ("train", batch), ("validation", asked))
    session.go_on(
        None, [Exchange(step, phase, 1, rows, True) for step, (phase, rows) in enumerate(phases)]
    )
    found = -(outputs[2] - outputs[0]) @ torch.linalg.pinv(rate * gradients[1])
    columns = torch.cat([data[name].inputs.flatten(1) for name in PARTIES], 1).double()
    exact = columns[asked] @ columns[batch].t() + len(PARTIES)  # a column of ones at each
    assert torch.corrcoef(torch.stack([found.flatten(), exact.flatten()]))[0, 1] > 0.999


def unmasked(trace, columns, rows):
    """What the left party sent, less everything the dealer knows of it, and both its V.

    CUT = X_l (W_l - V_l) + X_r V_r + T_l - T_r for two parties; int64, axes (rows, width).
    """
    keys = Relay(trace).keys
    (sent,) = [one.payload for one in trace if one.kind is Kind.QUERY and one.party == HOLDER]
    words = np.frombuffer(sent, "<i8").reshape(-1, WIDTH)[:rows].copy()
    v = {}
    for party, other, sign in ((*PARTIES, -1), (*PARTIES[::-1], 1)):
        dealt = PadStream(keys[party]).elements64(len(sent) // 8, "outputs", 0).view("<i8")
        words += sign * dealt.reshape(-1, WIDTH)[:rows]
        masks = PadStream(keys[other]).elements64(columns * WIDTH, "weights", 0).view("<i8")
        v[party] = masks.reshape(columns, WIDTH)
    return words, v


def solved(left, right):
    """x of x left = right modulo 2^64, by elimination on odd pivots; None if there are too few."""
    rows = [[*map(int, row), *map(int, known)]
            for row, known in zip(left.T, right.T, strict=True)]  # fmt: skip
    unknowns, modulus = len(left), 2**64
    for column in range(unknowns):
        pivot = next((one for one in range(column, len(rows)) if rows[one][column] % 2), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        inverse = pow(rows[column][column], -1, modulus)
        rows[column] = [value * inverse % modulus for value in rows[column]]
        for other, row in enumerate(rows):
            if other != column and row[column]:
                rows[other] = [
                    (a - row[column] * b) % modulus for a, b in zip(row, rows[column], strict=True)
                ]
    found = [[(value + 2**63) % modulus - 2**63 for value in row[unknowns:]]
             for row in rows[:unknowns]]  # fmt: skip
    return np.array(found).T


@pytest.mark.parametrize("masked", [False, True])
def test_the_masks_of_the_sum_keep_the_dealer_from_solving_for_the_columns(
    data, monkeypatch, masked
):
    """It asks for the same rows again and again; every time V is another, and it knows V.

    W cancels out between two queries, so each adds `WIDTH` equations about a row's columns. The
    masks that cancel out between the parties are what makes them useless.
    """
    if not masked:
        monkeypatch.setattr(beaver, "add_masks", lambda masks, words, purpose, step: None)
    rows, columns = 2, math.prod(data["left"].inputs.shape[1:]) + 1
    weights = LocalSession(experiment("beaver", epochs=1), data, outputs=10).run().weights()
    asked = []
    for _ in range(2 * columns // WIDTH + 4):
        trace, settings = Trace(Kind), experiment("beaver")
        LocalSession(
            settings, data, mode="predict", outputs=10, weights=weights, observers=[trace]
        ).run()
        asked.append(unmasked(trace, columns, rows))
    (first, v), more = asked[0], asked[1:]
    system = np.concatenate(
        [
            np.concatenate([v["left"] - other["left"], other["right"] - v["right"]])
            for _, other in more
        ],
        1,
    )
    found = solved(system, np.concatenate([words - first for words, _ in more], 1))
    where = torch.from_numpy(data["label"].split.test[:rows])
    exact = [encode_inputs(data[name].inputs[where], name).numpy() for name in PARTIES]
    assert found is not None
    assert np.array_equal(found, np.concatenate(exact, 1)) is not masked
    if masked:
        assert np.mean(found == np.concatenate(exact, 1)) < 0.01
