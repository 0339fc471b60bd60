"""A whole training over loopback streams: the weights of one process, cut streams included."""

import threading

import pytest

from vfl.clients import FeatureParty
from vfl.config import Experiment
from vfl.core.seeds import Secret
from vfl.core.storage import joint_digest
from vfl.core.traffic import Ledger
from vfl.datasets import load_bundled
from vfl.mpc.secure.base import binding_of
from vfl.mpc.secure.keys import Agreement
from vfl.session import Introduction, Terms, rules, secure_mode
from vfl.session.exchange import Own
from vfl.session.label import LabelParty, Objective, Records
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


def experiment(codec, defense="none", secure="none", bottom="mlp:hidden=16", **train):
    return Experiment.model_validate(
        {
            "codec": codec,
            "defense": defense,
            "secure": secure,
            "merge": "concat" if secure == "none" else "sum",
            "parties": {name: {"width": 8, "bottom": bottom} for name in PARTIES},
            "train": {"epochs": 2, "batch_size": 50, **train},
        }
    )


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, 0, "label", limit=300)


def play(party, schedule, identities, terms):
    """A feature party's whole session."""
    if terms.masks_cuts:
        pins = {name: identity.public for name, identity in identities.items()}
        binding, mode = binding_of(terms, SESSION, 0), secure_mode.make(terms.secure)
        keys = Agreement(party.name, identities[party.name], pins, binding)
        mode.offer(party.end, keys)
        mode.accept(party.end, keys, terms)
    party.run(schedule)


class Cutting:
    """A feature party's link whose stream is cut at chosen moments."""

    def __init__(self, link, moments):
        self._link, self._moments, self._sent = link, moments, 0

    def send(self, frame):
        self._sent += 1
        if ("before", frame.step) in self._moments:
            self._cut()
        self._link.send(frame)
        if ("after", frame.step) in self._moments:
            self._cut()

    def receive(self):
        return self._link.receive()

    def _cut(self):
        self._link._stream.end()


def over_streams(data, settings, moments=(), tls=True):
    """Weights digest, losses and ledger of a training whose parties are threads with sockets."""
    terms = Terms.of(settings, "train", "run")
    ledger = Ledger()
    certificate = session_certificate(["127.0.0.1"]) if tls else None
    credentials = {name: Credential(f"node-{name}", "t" * 40 + name) for name in PARTIES}
    hub = TcpHub(
        "127.0.0.1",
        0,
        Admission(SESSION, credentials),
        certificate,
        window=rules.window_frames(terms),
    )
    ca = certificate.ca_pem if certificate else None
    parties, threads, ends = {}, [], []
    identities = {name: Identity.fresh() for name in PARTIES}
    try:
        for name in PARTIES:
            about = Introduction.of(data[name], terms, SESSION).model_dump()
            hello = Hello(SESSION, credentials[name].node, credentials[name].token, about)
            window = rules.window_frames(terms)
            link = TcpLink.connect("127.0.0.1", hub.port, hello, ca, window=window)
            ends.append(link)
            own = Cutting(link, moments if name == "right" else ())
            secret = Secret.of_simulation(0, name)
            parties[name] = FeatureParty(data[name], terms, own, Own(secret))
            parties[name].start()
            schedule = rules.schedule(terms, data[name].split)
            whole = (parties[name], schedule, identities, terms)
            threads.append(threading.Thread(target=play, args=whole))
        hub.wait_all(PARTIES, 60.0)
        links = {name: Observed(hub.link(name), name, "label", [ledger]) for name in PARTIES}
        secret = Secret.of_simulation(0, "label")
        label = LabelParty(
            data["label"], terms, links, Own(secret), Objective.of(settings.label, 10),
            records=Records(ledger),
        )  # fmt: skip
        for thread in threads:
            thread.start()
        label.aggregator.begin()
        label.run(rules.schedule(terms, data["label"].split))
        for thread in threads:
            thread.join(timeout=60)
    finally:
        hub.close()
        for link in ends:
            link.close()
    digests = [(name, party.weights_digest()) for name, party in parties.items()]
    losses = [record["train_loss"] for record in label.history]
    return joint_digest([*digests, ("label", label.weights_digest())]), losses, ledger


def alone(data, settings):
    session = LocalSession(settings, data, outputs=10).run()
    losses = [record["train_loss"] for record in session.label.history]
    return session.weights_digest(), losses, session.ledger


@pytest.mark.parametrize(
    ("codec", "tls"), [("none", False), ("randtopk:k=3,alpha=0.2,values=8", True)]
)
def test_a_stream_gives_the_weights_of_one_process(data, codec, tls):
    settings = experiment(codec)
    digest, losses, ledger = over_streams(data, settings, tls=tls)
    same, same_losses, same_ledger = alone(data, settings)
    assert digest == same
    assert losses == same_losses
    assert ledger.bytes_by_party("up") == same_ledger.bytes_by_party("up")
    assert ledger.bytes_by_party("down") == same_ledger.bytes_by_party("down")


@pytest.mark.parametrize(
    "defense", ["potential:alpha=2+dcor", "label_free:kind=autoencoder", "pretrained:epochs=1"]
)
def test_defenses_with_losses_and_models_are_the_same_over_a_stream(data, defense):
    settings = experiment("none", defense, epochs=1)
    digest, losses, _ = over_streams(data, settings, tls=False)
    assert (digest, losses) == alone(data, settings)[:2]


def test_a_secure_sum_gives_the_weights_of_one_process_over_a_stream(data):
    """Keys differ from run to run; the sums do not. Cuts of the stream resend the same words."""
    settings = experiment("none", secure="sum:bits=8,fraction=2", in_flight=2)
    moments = [(place, step) for step in range(1, 17, 5) for place in ("before", "after")]
    digest, losses, ledger = over_streams(data, settings, moments)
    same, same_losses, same_ledger = alone(data, settings)
    assert digest == same
    assert losses == same_losses
    for way in ("up", "down"):
        assert ledger.bytes_by_party(way) == same_ledger.bytes_by_party(way)


def test_shared_first_layers_train_alike_over_a_stream(data):
    """Shares differ from run to run; what the label party computes from them does not."""
    train = {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.2}
    settings = experiment("none", secure="beaver", bottom="mlp:hidden=none", **train)
    moments = [(place, step) for step in range(1, 17, 5) for place in ("before", "after")]
    _, losses, ledger = over_streams(data, settings, moments)
    _, same_losses, same_ledger = alone(data, settings)
    assert losses == same_losses
    for way in ("up", "down"):
        assert ledger.bytes_by_party(way) == same_ledger.bytes_by_party(way)


LAST = 12  # 2 epochs of 5 batches, a validation query each, and the test rows
CUTS = {
    "twice in a row": [("after", 3), ("after", 4)],
    "before the next is sent": [("before", 5)],
    "at the last exchange": [("after", LAST)],
}


@pytest.mark.parametrize("place", CUTS)
def test_a_stream_cut_changes_nothing(data, place):
    settings = experiment("randtopk:k=3,alpha=0.2,values=8")
    schedule = rules.schedule(Terms.of(settings, "train", "run"), data["label"].split)
    assert list(schedule)[-1].step == LAST
    digest, losses, _ = over_streams(data, settings, CUTS[place])
    same, same_losses, _ = alone(data, settings)
    assert digest == same
    assert losses == same_losses


@pytest.mark.parametrize("in_flight", [2, 17])
def test_cuts_of_the_stream_change_nothing_with_several_in_flight(data, in_flight):
    settings = experiment("randtopk:k=3,alpha=0.2,values=8", batch_size=10, in_flight=in_flight)
    moments = [(place, step) for step in range(1, 70, 7) for place in ("before", "after")]
    digest, losses, _ = over_streams(data, settings, moments)
    same, same_losses, _ = alone(data, settings)
    assert digest == same
    assert losses == same_losses
