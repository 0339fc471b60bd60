"""A third party deals, under attack: by the owner, by the dealer and by the label party.

Every attacker here also plays against the same training without the protection, or with the help
of the party it must not collude with, where it wins.
"""

import numpy as np
import pytest
import torch
from holder import Diary, labels_from, uniform, weights_of
from shared_layers import DEALER, LABEL, SECURE, experiment

from vfl import models
from vfl.attacks import make
from vfl.attacks.cases import Victim
from vfl.attacks.scoring import attempt
from vfl.core.frame import Kind
from vfl.core.seeds import generator, scoped
from vfl.datasets import load_bundled
from vfl.mpc.secure import beaver
from vfl.mpc.secure.beaver import ShareHolder
from vfl.mpc.secure.keys import OFFER_BYTES
from vfl.mpc.secure.shared_layer import encode_inputs
from vfl.mpc.stream import PadStream
from vfl.session import rules
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

HOLDER = "bank"
WIDTH, EPOCHS = 8, 10
ATTACKS = [
    ("logistic", "model_completion:steps=50"),
    pytest.param(("fine_tuning:steps=100",), marks=pytest.mark.slow),
]
LEAKS, SEEDS = 2, range(3)


def of(secure=SECURE, parties=(HOLDER,), **train):
    return experiment(secure, parties, WIDTH, {"epochs": EPOCHS} | train)


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", [HOLDER], 0, LABEL)


@pytest.fixture(scope="module")
def trained(data):
    """The same training plain, and dealt with the owner's diary; the gradients the plain one got.

    The dealer's draws are the same in every run of the tests, so that the figures nearly are.
    """
    trace = Trace([Kind.GRAD])
    plain = LocalSession(of("none"), data, outputs=10, observers=[trace]).run()
    shared = LocalSession(of(), data, outputs=10)
    diary = Diary(shared, HOLDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beaver.secrets, "token_bytes", lambda size: bytes(range(size)))
        shared.run()
    assert shared.label.history[-1]["test_accuracy"] > 0.8
    heard = {
        frame.step: torch.from_numpy(np.frombuffer(frame.payload, np.float32).copy())
        for frame in trace
    }
    return plain, diary, heard


def score(data, weights, spec):
    """Mean accuracy of an attack on the test rows' labels, over several leaks."""
    victim = Victim(of("none"), data, HOLDER, weights)
    cases = ((victim.case(LEAKS, generator(seed, "leak")), seed) for seed in SEEDS)
    found = [attempt(case, make(spec), generator(seed, "draw")).value for case, seed in cases]
    return sum(found) / len(found)


def untrained(data, count):
    """Bottoms as they begin, as many as there are candidates."""
    shape, made = tuple(data[HOLDER].inputs.shape[1:]), []
    for number in range(count):
        with scoped(number):
            layer = models.make_bottom("mlp:hidden=none").build(shape, WIDTH)[-1]
        made.append(torch.cat([layer.weight.detach().t(), layer.bias.detach()[None]]))
    return made


@pytest.mark.parametrize("attacks", ATTACKS)
def test_the_owners_whole_transcript_is_worth_no_more_than_nothing(data, trained, attacks):
    """Labels from the owner's shares, openings, gradients and updates, against from scratch."""
    plain, diary, _ = trained
    candidates = diary.bottoms()
    begun = untrained(data, len(candidates))
    scratch = score(data, weights_of(begun[0]), "scratch")
    gains = {}
    for spec in attacks:
        worth = {name: score(data, weights_of(one), spec) for name, one in candidates.items()}
        without = max(score(data, weights_of(one), spec) for one in begun)
        stolen = score(data, plain.weights()[HOLDER], spec)
        gains[spec] = stolen - max(scratch, without)
        best = max(worth.values())
        print(f"{spec}: {stolen:.3f} plain, {best:.3f}, {without:.3f} untrained, {scratch:.3f}")
        assert best <= max(scratch, without) + 0.02, (spec, worth, without)
    assert max(gains.values()) > 0.05, ("a plain bottom is worth something", gains, scratch)


def rows_and_labels(data, gradients):
    """The last epoch's gradients by training row, their direction alone, and the true labels."""
    terms = LocalSession(of("none"), data, outputs=10).terms
    last = [
        one
        for one in rules.schedule(terms, data[LABEL].split)
        if one.trains and one.epoch == EPOCHS
    ]
    rows = torch.cat([torch.from_numpy(one.rows) for one in last])
    values = torch.cat([gradients[one.step].reshape(-1, WIDTH).double() for one in last])
    return torch.nn.functional.normalize(values, dim=1).float(), data[LABEL].labels[rows]


def test_gradients_tell_the_owner_nothing_of_labels(data, trained):
    _, diary, heard = trained
    plain = labels_from(*rows_and_labels(data, heard), LEAKS, SEEDS)
    shared = labels_from(*rows_and_labels(data, diary.gradients), LEAKS, SEEDS)
    print(f"gradients: {plain:.3f} plain, {shared:.3f} shared")
    assert plain > 0.7, "two leaks of each class and plain gradients are enough"
    assert shared < 0.15


def test_what_the_owner_gets_is_uniform_and_never_repeats(trained):
    _, diary, _ = trained
    diary.never_repeats()


class Transcript:
    """Everything that crossed the label party's hub, and what was true meanwhile."""

    def __init__(self, data, **changes):
        trace, self.truth, self.keys = Trace(Kind), {}, {}
        names = [name for name in data if data[name].inputs is not None]
        run = LocalSession(of(parties=names, epochs=1), data, outputs=10, observers=[trace])
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
def crossed(data):
    return Transcript(data)


STEPS = range(20)


def test_the_label_party_with_the_dealer_has_the_columns(crossed):
    """The collusion the page names, and proof that the attacker's arithmetic is right."""
    for step in STEPS:
        found = crossed.unmasked(HOLDER, step, crossed.keys[HOLDER])
        assert np.array_equal(found, crossed.truth[HOLDER, step])


def test_the_label_partys_whole_transcript_does_not_decode_the_columns(crossed):
    """It has every frame of everybody, its own keys with the dealer, its share and V and R."""
    for key in crossed.dealt:
        guesses = [crossed.unmasked(HOLDER, step, key) for step in STEPS]
        exact = [crossed.truth[HOLDER, step] for step in STEPS]
        found, true = (np.concatenate([one.ravel() for one in many]) for many in (guesses, exact))
        assert np.mean(found == true) < 0.001
        assert abs(np.corrcoef(found.astype(float), true.astype(float))[0, 1]) < 0.05
    for party, way, kinds in (
        (HOLDER, "up", (Kind.OPENING, Kind.CUT)),
        (DEALER, "up", (Kind.OPENING, Kind.GRAD)),
    ):
        for kind in kinds:
            frames = [crossed.frames[party, way, kind, step] for step in STEPS]
            assert uniform(np.frombuffer(b"".join(frames), np.uint8)), (party, kind)
            assert len(set(frames)) == len(frames)


def test_no_secret_of_owner_and_dealer_crosses_the_hub(crossed):
    everything = b"".join(crossed.frames.values())
    assert crossed.dealt[0] in everything, "what is looked for could be found"
    assert crossed.keys[HOLDER] not in everything


def fixed_mask(monkeypatch):
    """Everybody draws the same masks in every exchange, as no pad may be used."""
    monkeypatch.setattr(beaver, "PadStream", lambda key: Always())


class Always:
    def elements64(self, count, *purpose):
        return PadStream(bytes(32)).elements64(count, *purpose[:-1])


@pytest.mark.parametrize("repeats", [False, True])
def test_differences_of_what_is_opened_tell_nothing(data, monkeypatch, repeats):
    """With a mask that came twice, two openings' difference is that of two batches of columns."""
    if repeats:
        fixed_mask(monkeypatch)
    crossed = Transcript(data)
    told = crossed.opened(HOLDER, 0) - crossed.opened(HOLDER, 1)
    exact = crossed.truth[HOLDER, 0] - crossed.truth[HOLDER, 1]
    assert np.array_equal(told, exact) is repeats
    if not repeats:
        assert np.mean(told == exact) < 0.001


def received_by_dealer(crossed):
    """Every frame that the dealer got, but for the fresh keys in the offers."""
    return {key: payload for key, payload in crossed.frames.items()
            if key[:2] == (DEALER, "down") and key[2:] != (Kind.PROTOCOL, 0)}  # fmt: skip


def test_what_the_dealer_receives_does_not_depend_on_columns_or_labels(data, crossed):
    """Other columns and other labels of as many rows: the same frames, bit for bit."""
    other = load_bundled("digits", [HOLDER], 0, LABEL)
    draw = generator(0, "other")
    other[HOLDER].inputs.copy_(torch.rand(other[HOLDER].inputs.shape, generator=draw))
    other[LABEL].labels.copy_(other[LABEL].labels.flip(0))
    again = Transcript(other)
    assert not np.array_equal(again.truth[HOLDER, 0], crossed.truth[HOLDER, 0])
    told = received_by_dealer(crossed)
    assert told == received_by_dealer(again)
    assert {len(payload) for payload in told.values()} == {4}, "columns once, and rows"


def test_the_dealers_seeds_and_all_it_receives_do_not_decode_the_columns(crossed):
    """It adds its masks to whatever bytes it got, as it would to E if it had it."""
    got = [payload for key, payload in crossed.frames.items() if key[:2] == (DEALER, "down")]
    words = np.frombuffer(b"".join(got).ljust(8 * 4096, b"\0")[: 8 * 4096], "<i8")
    for step in STEPS:
        exact = crossed.truth[HOLDER, step].ravel()
        mask = PadStream(crossed.keys[HOLDER]).elements64(exact.size, "inputs", step).view("<i8")
        assert np.mean(np.resize(words, exact.size) + mask == exact) < 0.001
    offers = crossed.frames[DEALER, "down", Kind.PROTOCOL, 0]
    assert len(offers) == 2 * OFFER_BYTES


def test_a_dealer_with_the_owners_help_has_the_layer_and_the_gradients(data):
    """The other collusion the page names: D + V is the other share, and G - R + R the gradient."""
    run = LocalSession(of(epochs=1), data, outputs=10)
    share, seen = run.label.ends[HOLDER].codec, {}
    answer, encode = ShareHolder.answer, share.encode_grad

    def noting(half, step):
        seen.setdefault("share", share.held.share.clone())
        answer(half, step)

    def noting_gradient(grad, saved, context):
        seen.setdefault("gradient", grad.double() * 0.3)
        return encode(grad, saved, context)

    trace, token = Trace(Kind), bytes(range(32))
    run.label.ends[HOLDER].link = Watched(run.label.ends[HOLDER].link, trace)
    share.encode_grad = noting_gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShareHolder, "answer", noting)
        patch.setattr(beaver.secrets, "token_bytes", lambda size: token)
        run.run()
    frames = {(one.kind, one.step): one.payload for one in trace}
    stream = PadStream(token)
    for kind, purpose, name in (
        (Kind.OPENING, "weights", "share"),
        (Kind.GRAD, "gradient", "gradient"),
    ):
        words = np.frombuffer(frames[kind, 0], "<i8")
        found = words + stream.elements64(len(words), purpose, 0).view("<i8")
        exact = seen[name].numpy().ravel()
        if name == "gradient":
            found = found * 2.0**-26
            assert np.abs(found - exact).max() <= 2.0**-27
        else:
            assert np.array_equal(found, exact)


class Watched:
    """A link whose sent frames are kept."""

    def __init__(self, link, trace):
        self._link, self._trace = link, trace

    def send(self, frame):
        self._trace(HOLDER, "down", frame)
        self._link.send(frame)

    def receive(self):
        return self._link.receive()


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
    crossed = Transcript(load_bundled("digits", parties, 0, LABEL, limit=300))
    found = [own_outputs(crossed, party, place) for place, party in enumerate(parties)]
    total = (found[0] + found[1]).astype(float) * 2.0**-52
    assert np.abs(total).max() < 64, "the sum, in which masks cancel out"
    assert all((np.abs(one.astype(float)) * 2.0**-52).max() < 64 for one in found) is not masked
    if masked:
        assert uniform(found[0])


def test_the_same_rows_asked_again_and_again_tell_their_outputs_alone(data):
    """Every time all words but the outputs' are others, and uniform."""
    weights = LocalSession(of(epochs=1), data, outputs=10).run().weights()
    words, answers = [], []
    for _ in range(12):
        trace = Trace(Kind)
        one = LocalSession(
            of(), data, mode="predict", outputs=10, weights=weights, observers=[trace]
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
