"""The paths over a stream: the label party in one process, each feature party in its own."""

from __future__ import annotations

from collections.abc import Callable

from vfl.bench.messages import Door, Measurement
from vfl.bench.setup import Setup
from vfl.bench.workloads import LABEL_PARTY
from vfl.clients import build_feature_party
from vfl.core.frame import Frame, Kind
from vfl.core.ledger import Ledger
from vfl.server import LabelParty, Objective, build_label_party
from vfl.session import secure
from vfl.session.exchange import Own
from vfl.transport import (
    Credential,
    Hello,
    HubLink,
    Observed,
    TcpHub,
    TcpLink,
    session_certificate,
)

_JOIN_TIMEOUT_S = 60.0


def host(setup: Setup, announce: Callable[[Door], None]) -> Measurement:
    """Play the label party of a session over a stream.

    Args:
        setup: the job's.
        announce: told where the stream listens, before anybody is waited for.

    Raises:
        MissingPartyError: a feature party did not join.
    """
    job = setup.job
    certificate = session_certificate([job.host]) if job.tls else None
    credentials = {party: Credential(party, token) for party, token in job.tokens.items()}
    where = (job.host, 0, job.session, credentials)
    hub = TcpHub(*where, certificate=certificate, plaintext=not job.tls)
    try:
        ca_pem = certificate.ca_pem.decode() if certificate else ""
        announce(Door(host=job.host, port=hub.port, ca_pem=ca_pem))
        hub.wait_all(list(credentials), _JOIN_TIMEOUT_S)
        label = _label_party(setup, {party: hub.link(party) for party in credentials})
        label.aggregator.begin()
        label.run(setup.schedule())
        for half in label.halves.values():
            half.link.receive()  # its DONE: the last gradient has arrived
    finally:
        hub.close()
    return setup.measurement(label.history[-1]["train_loss"])


def join(setup: Setup) -> Measurement:
    """Play one feature party of that session."""
    job = setup.job
    assert job.door is not None, "a party that joins needs a door"
    ((name, token),) = job.tokens.items()
    hello = Hello(job.session, name, token)
    door, ca_pem = job.door, job.door.ca_pem.encode() or None
    link = TcpLink.connect(door.host, door.port, hello, ca_pem, plaintext=ca_pem is None)
    try:
        party = build_feature_party(
            setup.data[name],
            setup.terms,
            link,
            Own(setup.secret(name)),
            bottom=setup.bottoms()[name],
        )
        if setup.terms.masks_cuts:
            mode, keys = secure.make(setup.terms.secure), setup.agreement(name)
            mode.offer(party.half, keys)
            mode.accept(party.half, keys, setup.terms)
        party.run(setup.schedule())
        link.send(Frame(Kind.DONE))
    finally:
        link.close()
    return setup.measurement()


def _label_party(setup: Setup, links: dict[str, HubLink]) -> LabelParty:
    ledger = Ledger()
    observed = {party: Observed(link, party, "label", [ledger]) for party, link in links.items()}
    return build_label_party(
        setup.data[LABEL_PARTY],
        setup.terms,
        observed,
        Own(setup.secret(LABEL_PARTY)),
        Objective(setup.top(), setup.experiment.label.task, setup.workload.outputs),
        ledger=ledger,
    )
