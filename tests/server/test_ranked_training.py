"""Parties of two ranks each over TLS on the loopback: the weights and figures of one rank."""

import threading

import numpy as np
import pytest
import torch
from torch import distributed

from vfl.clients import FeatureParty
from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.core.traffic import Ledger
from vfl.datasets import load_bundled
from vfl.session import Introduction, Terms, rules
from vfl.session.exchange import Own
from vfl.session.label import LabelParty, Objective, Records
from vfl.session.ranks.group import Ranks
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


def experiment(codec="none", label=None, bottom="mlp:hidden=16", **train):
    return Experiment.model_validate(
        {
            "codec": codec,
            "data": {"validation": 0.1},
            "parties": {name: {"width": 8, "bottom": bottom} for name in PARTIES},
            "label": label or {},
            "train": {"epochs": 2, "batch_size": 49, "optimizer": "sgd", "learning_rate": 0.1}
            | train,
        }
    )


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, 0, "label", 0.1, limit=500)


def in_ranks(data, settings, size):
    """The label parties and feature parties of a training, by rank; each a thread."""
    terms = Terms.of(settings, "train", "run")
    certificate = session_certificate(["127.0.0.1"])
    labels, features, errors = [None] * size, {}, []
    stores = {name: distributed.HashStore() for name in (*PARTIES, "label")}
    credentials = {
        (name, rank): Credential(f"node-{name}", f"{name}-{rank}-" + "t" * 40)
        for name in PARTIES
        for rank in range(size)
    }
    hubs = [
        TcpHub(
            "127.0.0.1",
            0,
            Admission(SESSION, {name: credentials[name, rank] for name in PARTIES}),
            certificate,
            window=rules.window_frames(terms),
        )
        for rank in range(size)
    ]

    def own(party, rank):
        # Draws of their own at every rank: what all must share is spread from rank 0.
        ranks = Ranks.join_group(party, rank, size, stores[party], 60.0)
        return Own(Secret.of_simulation(rank, party), ranks=ranks)

    def feature(name, rank):
        about = Introduction.of(data[name], terms, SESSION).model_dump()
        known = credentials[name, rank]
        hello = Hello(SESSION, known.node, known.token, about)
        link = TcpLink.connect(
            "127.0.0.1",
            hubs[rank].port,
            hello,
            certificate.ca_pem,
            window=rules.window_frames(terms),
        )
        try:
            party = features[name, rank] = FeatureParty(data[name], terms, link, own(name, rank))
            party.resume(0, ())
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


def in_one_process(data, settings):
    return LocalSession(
        settings,
        data,
        outputs=data["label"].outputs,
        secrets={name: Secret.of_simulation(0, name) for name in (*PARTIES, "label")},
    ).run()


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
    settings = experiment(**changes)
    one = in_one_process(data, settings)
    labels, features = in_ranks(data, settings, size)
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
    settings = experiment()
    one = in_one_process(data, settings)
    labels, _ = in_ranks(data, settings, 2)
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
