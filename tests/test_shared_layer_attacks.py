"""Shared first layers under attack: by a holder of shares, by the relay, by a dealer.

Every attacker here also plays against the same training without the protection, or with the help
of the party it must not collude with, where it wins.
"""

import math

import numpy as np
import pytest
import torch
from holder import Diary, labels_from, uniform, weights_of
from shared_layers import DEALER, LABEL, SECURE, experiment, fresh

from vfl.attacks import make
from vfl.attacks.cases import Victim
from vfl.attacks.scoring import attempt
from vfl.core.frame import Kind
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.mpc.secure import beaver
from vfl.mpc.secure.beaver import size_of
from vfl.mpc.secure.keys import TAG_BYTES
from vfl.mpc.secure.shared_layer import encode_inputs
from vfl.mpc.stream import PadStream
from vfl.session import rules
from vfl.session.trace import Trace
from vfl.training.local import LocalSession
from vfl.transport.pairs import SealedPairs

PARTIES = ("left", "right")
#: By mode: who has columns; the first of them attacks.
OWNERS = {"beaver": PARTIES, SECURE: ("bank",)}
WIDTH, EPOCHS = 8, 10
LEAKS, SEEDS = 2, range(3)
#: What tells accuracies apart here.
MARGIN = 0.02


def of(secure, parties, **train):
    return experiment(secure, parties, WIDTH, {"epochs": EPOCHS} | train)


@pytest.fixture(scope="module")
def tables():
    """Rows of digits by who has columns."""
    return {
        parties: load_bundled("digits", parties, LABEL, Dealing(0)) for parties in OWNERS.values()
    }


class Trained:
    """The same training plain, and shared with a diary; and the gradients the plain holder got.

    The dealer's draws are the same in every run of the tests, so that the figures nearly are.
    """

    def __init__(self, secure, data):
        self.data, self.parties = data, OWNERS[secure]
        self.holder, trace = self.parties[0], Trace([Kind.GRAD])
        plain = LocalSession(of("none", self.parties), data, outputs=10, observers=[trace]).run()
        self.plain = plain.weights()[self.holder]
        shared = LocalSession(of(secure, self.parties), data, outputs=10)
        self.diary = Diary(shared, self.holder)
        keys = iter(range(256))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(beaver.secrets, "token_bytes", lambda size: bytes([next(keys)]) * size)
            shared.run()
        assert shared.label.history[-1]["test_accuracy"] > 0.8
        self.heard = {
            frame.step: torch.from_numpy(np.frombuffer(frame.payload, np.float32).copy())
            for frame in trace
            if frame.party == self.holder
        }

    def untrained(self, count):
        """Bottoms as they begin, as many as candidates: the best of some luck is luck, too."""
        layers = [fresh(self.data, WIDTH, first)[self.holder][-1] for first in range(count)]
        return [torch.cat([one.weight.detach().t(), one.bias.detach()[None]]) for one in layers]

    def score(self, weights, spec):
        """Mean accuracy of an attack on the test rows' labels, over several leaks."""
        victim = Victim(of("none", self.parties), self.data, self.holder, weights)
        cases = ((victim.case(LEAKS, generator(seed, "leak")), seed) for seed in SEEDS)
        found = [attempt(case, make(spec), generator(seed, "draw")).value for case, seed in cases]
        return sum(found) / len(found)

    def rows_and_labels(self, gradients):
        """Directions of the last epoch's gradients by training row, and the true labels."""
        terms = LocalSession(of("none", self.parties), self.data, outputs=10).terms
        schedule = rules.schedule(terms, self.data[LABEL].split)
        last = [one for one in schedule if one.trains and one.epoch == EPOCHS]
        rows = torch.cat([torch.from_numpy(one.rows) for one in last])
        values = torch.cat([gradients[one.step].reshape(-1, WIDTH).double() for one in last])
        directions = torch.nn.functional.normalize(values, dim=1).float()
        return directions, self.data[LABEL].labels[rows]


@pytest.fixture(scope="module", params=OWNERS, ids=["label party deals", "third party deals"])
def trained(request, tables):
    return Trained(request.param, tables[OWNERS[request.param]])


#: What of a transcript is likeliest to stand for a bottom; the slow attacks try all of it.
LIKELIEST = ("last share", "mean opened", "sum of products")


@pytest.mark.parametrize(
    ("spec", "gain"),
    [
        ("logistic", MARGIN),
        pytest.param("model_completion:steps=50", -1, marks=pytest.mark.slow),
        pytest.param("fine_tuning:steps=100", MARGIN, marks=pytest.mark.slow),
    ],
)
def test_a_holders_whole_transcript_is_worth_no_more_than_nothing(trained, spec, gain):
    """Labels from the holder's own shares, openings and gradients, against those from scratch."""
    candidates = trained.diary.bottoms()
    if spec == "logistic":
        candidates = {name: candidates[name] for name in LIKELIEST}
    untrained = trained.untrained(len(candidates))
    scratch = trained.score(weights_of(untrained[0]), "scratch")
    worth = {name: trained.score(weights_of(one), spec) for name, one in candidates.items()}
    without = max(trained.score(weights_of(one), spec) for one in untrained)
    stolen, best = trained.score(trained.plain, spec), max(worth.values())
    print(f"{spec}: {stolen:.3f} plain, {best:.3f}, {without:.3f} untrained, {scratch:.3f}")
    assert best <= max(scratch, without) + MARGIN, (spec, worth, without)
    assert stolen - max(scratch, without) > gain, "a plain bottom is worth something"


def test_gradients_tell_a_holder_nothing_of_labels(trained):
    plain = labels_from(*trained.rows_and_labels(trained.heard), LEAKS, SEEDS)
    shared = labels_from(*trained.rows_and_labels(trained.diary.gradients), LEAKS, SEEDS)
    print(f"gradients: {plain:.3f} plain, {shared:.3f} shared")
    assert plain > 0.7, "two leaks of each class and plain gradients are enough"
    assert shared < 0.15


def test_what_a_holder_gets_is_uniform_and_never_repeats(trained):
    trained.diary.never_repeats()


# --- The label party deals, and relays ------------------------------------------------------------


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


@pytest.fixture
def relayed(tables):
    """Plays a short training; what its relay found, and the truth. Both have as many columns."""

    def play():
        data, trace, truth = tables[PARTIES], Trace(Kind), {}
        settings = of("beaver", PARTIES, epochs=1)
        session = LocalSession(settings, data, outputs=10, observers=[trace])
        for client in session.clients:
            opening = client.end._open

            def noting(inputs, step, trains, half=client.end, opening=opening):
                truth[half.party, step] = encode_inputs(inputs, half.party).numpy()
                truth["shares", step, half.party] = half._other.share.numpy().copy()
                opening(inputs, step, trains)

            client.end._open = noting
        session.run()
        return Relay(trace), truth

    return play


def no_sealing(monkeypatch):
    """What travels is then as long, and readable."""
    plain = {
        "sealed": lambda seals, other, message, about: bytes(message) + bytes(TAG_BYTES),
        "opened": lambda seals, sender, sealed, about: bytes(sealed)[:-TAG_BYTES],
    }
    for name, same in plain.items():
        monkeypatch.setattr(SealedPairs, name, same)


def test_without_sealing_the_relay_that_deals_has_every_input_and_share(relayed, monkeypatch):
    no_sealing(monkeypatch)
    relay, truth = relayed()
    for party, other in (PARTIES, PARTIES[::-1]):
        for step in (0, 7):
            exact = truth[party, step]
            rows, columns = exact.shape
            assert np.array_equal(relay.inputs(party, step, columns, rows), exact)
            share = relay.weights(party, other, step, columns, rows)
            assert np.array_equal(share, truth["shares", step, other])


def test_the_relay_that_deals_cannot_decode_what_the_parties_sealed(relayed):
    relay, truth = relayed()
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


def unmasked(trace, columns, rows):
    """What the left party sent, less everything the dealer knows of it, and both its V.

    CUT = X_l (W_l - V_l) + X_r V_r + T_l - T_r for two parties; int64, axes (rows, width).
    """
    keys = Relay(trace).keys
    (sent,) = [one.payload for one in trace if one.kind is Kind.QUERY and one.party == "left"]
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
    tables, monkeypatch, masked
):
    """It asks for the same rows again and again; every time V is another, and it knows V.

    W cancels out between two queries, so each adds `WIDTH` equations about a row's columns. The
    masks that cancel out between the parties are what makes them useless.
    """
    if not masked:
        monkeypatch.setattr(beaver, "add_masks", lambda masks, words, purpose, step: None)
    data = tables[PARTIES]
    rows, columns = 2, math.prod(data["left"].inputs.shape[1:]) + 1
    weights = LocalSession(of("beaver", PARTIES, epochs=1), data, outputs=10).run().weights()
    asked = []
    for _ in range(2 * columns // WIDTH + 4):
        trace, settings = Trace(Kind), of("beaver", PARTIES)
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
    where = torch.from_numpy(data[LABEL].split.test[:rows])
    exact = [encode_inputs(data[name].inputs[where], name).numpy() for name in PARTIES]
    assert found is not None
    assert np.array_equal(found, np.concatenate(exact, 1)) is not masked
    if masked:
        assert np.mean(found == np.concatenate(exact, 1)) < 0.01


# --- A third party deals --------------------------------------------------------------------------


class Transcript:
    """Everything that crossed the label party's hub, and what was true meanwhile."""

    def __init__(self, data):
        trace, self.truth, self.keys = Trace(Kind), {}, {}
        names = [name for name in data if data[name].inputs is not None]
        run = LocalSession(of(SECURE, names, epochs=1), data, outputs=10, observers=[trace])
        for client in run.clients:
            self._note(client.end)
        run.run()
        self.frames = {
            (one.party, one.direction, one.kind, one.step): bytes(one.payload) for one in trace
        }
        sent = self.frames[DEALER, "up", Kind.PROTOCOL, 1]
        self.dealt = [sent[start : start + 32] for start in range(0, len(sent), 32)]

    def _note(self, half):
        opening, begin = half._open, half.begin

        def noting(inputs, step, trains):
            self.truth[half.party, step] = encode_inputs(inputs, half.party).numpy()
            opening(inputs, step, trains)

        def noting_keys(order, keys):
            self.keys[half.party] = keys[DEALER]
            begin(order, keys)

        half._open, half.begin = noting, noting_keys

    def opened(self, party, step):
        """E, which the label party has; int64, axes (rows, columns)."""
        payload = self.frames[party, "up", Kind.OPENING, step]
        return np.frombuffer(payload, "<i8").reshape(self.truth[party, step].shape)

    def unmasked(self, party, step, key):
        """E, and U as this key would have it: X, if it is the owner's key with the dealer."""
        opened = self.opened(party, step)
        mask = PadStream(key).elements64(opened.size, "inputs", step).view("<i8")
        return opened + mask.reshape(opened.shape)

    def outputs(self, party, step, key=None):
        """What a party sends as its outputs; without T if its key with the dealer is given."""
        payload = self.frames[party, "up", Kind.CUT, step]
        words = np.frombuffer(payload, "<i8").copy()
        if key is not None:
            words -= PadStream(key).elements64(len(words), "outputs", step).view("<i8")
        return words.reshape(-1, WIDTH)


@pytest.fixture(scope="module")
def bank(tables):
    return tables[OWNERS[SECURE]]


@pytest.fixture(scope="module")
def crossed(bank):
    return Transcript(bank)


STEPS = range(20)


def test_the_label_party_with_the_dealer_has_the_columns(crossed):
    """The collusion the page names, and proof that the attacker's arithmetic is right."""
    for step in STEPS:
        found = crossed.unmasked("bank", step, crossed.keys["bank"])
        assert np.array_equal(found, crossed.truth["bank", step])


def test_the_label_partys_whole_transcript_does_not_decode_the_columns(crossed):
    """It has every frame of everybody, its own keys with the dealer, its share and V and R."""
    for key in crossed.dealt:
        guesses = [crossed.unmasked("bank", step, key) for step in STEPS]
        exact = [crossed.truth["bank", step] for step in STEPS]
        found, true = (np.concatenate([one.ravel() for one in many]) for many in (guesses, exact))
        assert np.mean(found == true) < 0.001
        assert abs(np.corrcoef(found.astype(float), true.astype(float))[0, 1]) < 0.05
    for party, way, kinds in (
        ("bank", "up", (Kind.OPENING, Kind.CUT)),
        (DEALER, "up", (Kind.OPENING, Kind.GRAD)),
    ):
        for kind in kinds:
            frames = [crossed.frames[party, way, kind, step] for step in STEPS]
            assert uniform(np.frombuffer(b"".join(frames), np.uint8)), (party, kind)
            assert len(set(frames)) == len(frames)


def test_no_secret_of_owner_and_dealer_crosses_the_hub(crossed):
    everything = b"".join(crossed.frames.values())
    assert crossed.dealt[0] in everything, "what is looked for could be found"
    assert crossed.keys["bank"] not in everything


class Always:
    """Draws the same masks in every exchange, as no pad may be used."""

    def elements64(self, count, *purpose):
        return PadStream(bytes(32)).elements64(count, *purpose[:-1])


@pytest.mark.parametrize("repeats", [False, True])
def test_differences_of_what_is_opened_tell_nothing(bank, monkeypatch, repeats):
    """With a mask that came twice, two openings' difference is that of two batches of columns."""
    if repeats:
        monkeypatch.setattr(beaver, "PadStream", lambda key: Always())
    crossed = Transcript(bank)
    told = crossed.opened("bank", 0) - crossed.opened("bank", 1)
    exact = crossed.truth["bank", 0] - crossed.truth["bank", 1]
    assert np.array_equal(told, exact) is repeats
    if not repeats:
        assert np.mean(told == exact) < 0.001


def received_by_dealer(crossed):
    """Every frame that the dealer got, but for the fresh keys in the offers."""
    return {key: payload for key, payload in crossed.frames.items()
            if key[:2] == (DEALER, "down") and key[2:] != (Kind.PROTOCOL, 0)}  # fmt: skip


def test_what_the_dealer_receives_does_not_depend_on_columns_or_labels(crossed):
    """Other columns and other labels of as many rows: the same frames, bit for bit."""
    other = load_bundled("digits", ["bank"], LABEL, Dealing(0))
    draw = generator(0, "other")
    other["bank"].inputs.copy_(torch.rand(other["bank"].inputs.shape, generator=draw))
    other[LABEL].labels.copy_(other[LABEL].labels.flip(0))
    again = Transcript(other)
    assert not np.array_equal(again.truth["bank", 0], crossed.truth["bank", 0])
    told = received_by_dealer(crossed)
    assert told == received_by_dealer(again)
    assert {len(payload) for payload in told.values()} == {4}, "columns once, and rows"


def own_outputs(crossed, party, place):
    """X W of one party, from all the label party has, if masks did not hide it; int64."""
    columns = crossed.truth[party, 0].shape[1]
    rows = len(crossed.truth[party, 0])
    v = PadStream(crossed.dealt[place]).elements64(columns * WIDTH, "weights", 0).view("<i8")
    dealt = np.frombuffer(crossed.frames[DEALER, "up", Kind.OPENING, 0], "<i8")
    size = rows * WIDTH
    part = dealt[place * size : (place + 1) * size].reshape(rows, WIDTH)
    own = crossed.opened(party, 0) @ v.reshape(columns, WIDTH) + part
    return own + crossed.outputs(party, 0)


@pytest.mark.parametrize("masked", [False, True])
def test_of_several_parties_the_label_party_learns_the_sum_alone(monkeypatch, masked):
    """It is everybody's partner, so it would have each one's outputs but for their masks."""
    if not masked:
        monkeypatch.setattr(beaver, "add_masks", lambda masks, words, purpose, step: None)
    parties = ("bank", "shop")
    crossed = Transcript(load_bundled("digits", parties, LABEL, Dealing(0, limit=300)))
    found = [own_outputs(crossed, party, place) for place, party in enumerate(parties)]
    total = (found[0] + found[1]).astype(float) * 2.0**-52
    assert np.abs(total).max() < 64, "the sum, in which masks cancel out"
    assert all((np.abs(one.astype(float)) * 2.0**-52).max() < 64 for one in found) is not masked
    if masked:
        assert uniform(found[0])


def test_the_same_rows_asked_again_and_again_tell_their_outputs_alone(bank):
    """Every time all words but the outputs' are others, and uniform."""
    weights = LocalSession(of(SECURE, ["bank"], epochs=1), bank, outputs=10).run().weights()
    words, answers, settings = [], [], of(SECURE, ["bank"])
    for _ in range(6):
        trace = Trace(Kind)
        one = LocalSession(
            settings,
            bank,
            mode="predict",
            outputs=10,
            weights=weights,
            observers=[trace],
        ).run()
        kinds = (Kind.QUERY, Kind.QUERY_OPENING)
        words.append([bytes(frame.payload) for frame in trace
                      if frame.kind in kinds and len(frame.payload) > 4])  # fmt: skip
        answers.append(one.outputs())
    assert all(torch.equal(one, answers[0]) for one in answers)
    for frames in zip(*words, strict=True):
        assert len(set(frames)) == len(frames)
        assert uniform(np.frombuffer(b"".join(frames), np.uint8))
        first, second = (np.frombuffer(one, "<u8") for one in frames[:2])
        assert uniform(first - second)
