"""Whole trainings over loopback streams: the weights of one process, with cuts and in ranks."""

import threading

import numpy as np
import pytest
import torch
from torch import distributed

from vfl.clients import FeatureParty
from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.core.storage import joint_digest
from vfl.core.traffic import Ledger
from vfl.datasets import Dealing, load_bundled
from vfl.mpc.secure.base import binding_of
from vfl.mpc.secure.keys import Agreement
from vfl.session import Introduction, Terms, rules, secure_mode
from vfl.session.exchange import Own
from vfl.session.label import LabelParty, Objective, Records
from vfl.session.ranks.group import Ranks
from vfl.session.store.identity import Identity
from vfl.training.local import LocalSession
from vfl.transport import (
    Admission,
    Credential,
    Hello,
    Observed,
    TcpHub,
    TcpLink,
    session_certificate,
)

SESSION = "0" * 32
PARTIES = ("left", "right")
LAST = 12  # 2 epochs of 5 batches, a validation query each, and the test rows
SGD = {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.1}


def experiment(codec="none", defense="none", secure="none", label=None, bottom="mlp:hidden=16",
               **train):  # fmt: skip
    return Experiment.model_validate(
        {
            "codec": codec,
            "defense": defense,
            "secure": secure,
            "merge": "concat" if secure == "none" else "sum",
            "parties": {name: {"width": 8, "bottom": bottom} for name in PARTIES},
            "label": label or {},
            "train": {"epochs": 2, "batch_size": 50, **train},
        }
    )


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "label", Dealing(0, limit=300))


class Cutting:
    """A feature party's link whose stream is cut at chosen moments."""

    def __init__(self, link, moments):
        self._link, self._moments = link, moments

    def send(self, frame):
        if ("before", frame.step) in self._moments:
            self._link._stream.end()
        self._link.send(frame)
        if ("after", frame.step) in self._moments:
            self._link._stream.end()

    def receive(self):
        return self._link.receive()


def agree_on_keys(party, identities, terms):
    pins = {name: identity.public for name, identity in identities.items()}
    binding, mode = binding_of(terms, SESSION, 0), secure_mode.make(terms.secure)
    keys = Agreement(party.name, identities[party.name], pins, binding)
    mode.offer(party.end, keys)
    mode.accept(party.end, keys, terms)


def streamed(data, settings, size=1, moments=(), tls=True):
    """Label parties by rank, and feature parties by name and rank; each was a thread.

    The stream of the party on the right is cut at these moments.
    """
    terms = Terms.of(settings, "train", "run")
    window = rules.window_frames(terms)
    certificate = session_certificate(["127.0.0.1"]) if tls else None
    stores = {name: distributed.HashStore() for name in (*PARTIES, "label")}
    identities = {name: Identity.fresh() for name in PARTIES}
    labels, features, errors = [None] * size, {}, []
    credentials = [
        {name: Credential(f"node-{name}", f"{name}-{rank}-" + "t" * 40) for name in PARTIES}
        for rank in range(size)
    ]
    hubs = [
        TcpHub("127.0.0.1", 0, Admission(SESSION, known), certificate, window=window)
        for known in credentials
    ]

    def own(party, rank):
        # Draws of their own at every rank: what all must share is spread from rank 0.
        group = (party, rank, size, stores[party], 60.0)
        ranks = Ranks() if size == 1 else Ranks.join_group(*group)
        return Own(Secret.of_simulation(rank, party), ranks=ranks)

    def feature(name, rank):
        about = Introduction.of(data[name], terms, SESSION).model_dump()
        known = credentials[rank][name]
        hello = Hello(SESSION, known.node, known.token, about)
        ca = certificate and certificate.ca_pem
        link = TcpLink.connect("127.0.0.1", hubs[rank].port, hello, ca, window=window)
        cutting = Cutting(link, moments if name == "right" else ())
        try:
            party = FeatureParty(data[name], terms, cutting, own(name, rank))
            features[name, rank] = party
            party.resume(0, ())
            if terms.masks_cuts:
                agree_on_keys(party, identities, terms)
            party.run(party.stopping.follow(rules.schedule(terms, data[name].split)))
        finally:
            link.close()

    def label(rank):
        hubs[rank].wait_all(PARTIES, 60.0)
        ledger = Ledger()
        links = {n: Observed(hubs[rank].link(n), n, "label", [ledger]) for n in PARTIES}
        objective = Objective.of(settings.label, data["label"].outputs)
        one = labels[rank] = LabelParty(
            data["label"], terms, links, own("label", rank), objective, records=Records(ledger)
        )
        one.resume(0)
        one.aggregator.begin()
        one.run(one.stopping.follow(rules.schedule(terms, data["label"].split)))

    def guarded(play, *arguments):
        try:
            play(*arguments)
        except Exception as error:
            errors.append(error)
            for hub in hubs:
                hub.close()

    plays = [(feature, name, rank) for name in PARTIES for rank in range(size)]
    plays += [(label, rank) for rank in range(size)]
    threads = [threading.Thread(target=guarded, args=play) for play in plays]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        for hub in hubs:
            hub.close()
    if errors:
        raise errors[0]
    return labels, features


def alone(data, settings):
    return LocalSession(settings, data, outputs=10).run()


def same_as_alone(data, settings, *, equal=True, **how):
    """A training over streams ends with the losses, bytes and, where it can, weights of one."""
    labels, features = streamed(data, settings, **how)
    one = alone(data, settings)
    digests = [(name, features[name, 0].weights_digest()) for name in PARTIES]
    digest = joint_digest([*digests, ("label", labels[0].weights_digest())])
    assert not equal or digest == one.weights_digest()
    losses = [[each["train_loss"] for each in of.history] for of in (labels[0], one.label)]
    assert losses[0] == losses[1]
    for way in ("up", "down"):
        assert labels[0].ledger.bytes_by_party(way) == one.ledger.bytes_by_party(way)


RANDOM = "randtopk:k=3,alpha=0.2,values=8"
OFTEN = [(place, step) for step in range(1, 70, 5) for place in ("before", "after")]


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({}, {"tls": False}),
        ({"defense": "potential:alpha=2+dcor", "epochs": 1}, {"tls": False}),
        ({"defense": "label_free:kind=autoencoder", "epochs": 1}, {"tls": False}),
        ({"codec": RANDOM}, {"moments": [("after", 3), ("after", 4)]}),
        ({"codec": RANDOM}, {"moments": [("before", 5), ("after", LAST)]}),
        ({"codec": RANDOM, "batch_size": 10, "in_flight": 17}, {"moments": OFTEN}),
        # Keys and masks differ from run to run, and sums do not; what is resent is the same.
        ({"secure": "sum:bits=8,fraction=2", "in_flight": 2}, {"moments": OFTEN}),
        ({"secure": "beaver", "bottom": "mlp:hidden=none"} | SGD,
         {"moments": OFTEN, "equal": False}),
    ],
    ids=["plain", "loss", "model", "twice in a row", "the last one", "in flight", "sum", "beaver"],
)  # fmt: skip
def test_a_stream_gives_the_weights_of_one_process(data, settings, how):
    settings = experiment(**settings)
    if settings.codec == RANDOM and settings.train.in_flight == 1:
        schedule = rules.schedule(Terms.of(settings, "train", "run"), data["label"].split)
        assert list(schedule)[-1].step == LAST
    same_as_alone(data, settings, **how)


def same(found, wanted, most=1e-5):
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=most)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (3, {"momentum": 0.9}),
        (2, {"optimizer": "adam", "learning_rate": 0.001}),
        (2, {"patience": 1, "keep": "best"}),
        (2, {"codec": "topk:k=3"}),
        (2, {"label": {"class_weight": "balanced"}}),
        (2, {"bottom": "mlp:hidden=16,batch_norm=true"}),
    ],
    ids=[
        "sgd",
        "three ranks",
        "adam",
        "early stopping",
        "topk",
        "weights of classes",
        "batch norm",
    ],
)
def test_several_ranks_train_as_one_does(data, size, changes):
    settings = experiment(**({"batch_size": 49} | SGD | changes))
    one = alone(data, settings)
    labels, features = streamed(data, settings, size)
    for rank in range(size):
        same(labels[rank].weights(), one.label.weights())
        for party in one.clients:
            same(features[party.name, rank].weights(), party.weights())
    for name in (*PARTIES, "label"):
        digests = {
            (labels[rank] if name == "label" else features[name, rank]).weights_digest()
            for rank in range(size)
        }
        assert len(digests) == 1


def test_figures_are_of_whole_batches_and_of_all_streams(data):
    settings = experiment(batch_size=49, **SGD)
    one = alone(data, settings)
    labels, _ = streamed(data, settings, 2)
    for mine, wanted in zip(labels[0].history, one.label.history, strict=True):
        for name, value in wanted.items():
            if name == "seconds":
                continue
            if name in ("bytes_up", "bytes_down"):  # every share has a header of its own
                assert 0 < mine[name] - value < 0.05 * value
            else:
                assert mine[name] == pytest.approx(value, abs=1e-5), name
    assert torch.allclose(torch.cat(labels[0].tested), torch.cat(one.label.tested), atol=1e-4)
    assert labels[0].progress.train_rows == one.label.progress.train_rows


def test_every_row_is_at_one_rank(data):
    terms = Terms.of(experiment(), "train", "run")
    for whole in rules.schedule(terms, data["label"].split):
        shares = [Ranks("a", rank, 3).share(whole).rows for rank in range(3)]
        assert np.array_equal(np.concatenate(shares), whole.rows)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
