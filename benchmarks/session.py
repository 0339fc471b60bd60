"""A session over streams with one process for each party: its start, and each party's program."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pydantic import Field

from benchmarks.emulation import LOOPBACK, Network
from benchmarks.worker import BenchmarkWorker, Endpoint, Parent
from vfl.clients import FeatureParty
from vfl.config.toml import Settings
from vfl.core.frame import Frame, Kind
from vfl.session import Exchange, Terms, rules
from vfl.session.label import LabelParty
from vfl.transport import (
    Admission,
    Credential,
    Hello,
    HubLink,
    TcpHub,
    TcpLink,
    session_certificate,
)

_JOIN_TIMEOUT_S = 60.0


class SessionJob(Settings):
    """One party's part in a session, as a job for its process.

    Attributes:
        party: name of the party that the process runs.
        session: name of the session.
        tokens: tokens with which parties are admitted; a feature party gets only its own token.
        tls: whether the stream has TLS.
        host: address on which the label party listens.
        endpoint: address at which a feature party reaches the label party.
    """

    party: str = ""
    session: str = ""
    tokens: dict[str, str] = Field(default_factory=dict, repr=False)
    tls: bool = True
    host: str = LOOPBACK
    endpoint: Endpoint | None = None


_Job = TypeVar("_Job", bound=SessionJob)


def start(
    workers: Mapping[str, BenchmarkWorker], network: Network, label: str, job: SessionJob
) -> None:
    """Send every party its part; the label party listens before other parties get its address."""
    tokens = {party: secrets.token_urlsafe(32) for party in workers if party != label}
    session = {"session": secrets.token_hex(16), "party": label, "tokens": tokens}
    workers[label].put(job.model_copy(update=session | {"host": network.host(label)}))
    listens = workers[label].get(Endpoint)
    for party, token in tokens.items():
        own = {"party": party, "tokens": {party: token}}
        endpoint = {"endpoint": listens.seen(network, party, label)}
        workers[party].put(job.model_copy(update=session | own | endpoint))


def play_label(
    parent: Parent,
    job: SessionJob,
    terms: Terms,
    build: Callable[[dict[str, HubLink]], LabelParty],
    schedule: Iterable[Exchange],
) -> LabelParty:
    """Run the label party.

    Raises:
        MissingPartyError: a feature party did not attach.
    """
    certificate = session_certificate([job.host]) if job.tls else None
    credentials = {party: Credential(party, token) for party, token in job.tokens.items()}
    hub = TcpHub(
        job.host,
        0,
        Admission(job.session, credentials),
        certificate,
        plaintext=not job.tls,
        window=rules.window_frames(terms),
    )
    try:
        ca_pem = certificate.ca_pem.decode() if certificate else ""
        parent.put(Endpoint(host=job.host, port=hub.port, ca_pem=ca_pem))
        hub.wait_all(list(job.tokens), _JOIN_TIMEOUT_S)
        label = build({party: hub.link(party) for party in job.tokens})
        label.aggregator.begin()
        label.run(schedule)
        for end in label.ends.values():
            # Waits for the party's DONE frame, which shows that the last gradient has arrived.
            end.link.receive()
    finally:
        hub.close()
    return label


def play_feature(
    job: SessionJob,
    terms: Terms,
    build: Callable[[TcpLink], FeatureParty],
    schedule: Iterable[Exchange],
) -> None:
    """Run a feature party."""
    assert job.endpoint is not None, "a party that joins knows where"
    hello = Hello(job.session, job.party, job.tokens[job.party])
    ca_pem = job.endpoint.ca_pem.encode() or None
    link = TcpLink.connect(
        job.endpoint.host,
        job.endpoint.port,
        hello,
        ca_pem,
        plaintext=ca_pem is None,
        window=rules.window_frames(terms),
    )
    try:
        build(link).run(schedule)
        link.send(Frame(Kind.DONE))
    finally:
        link.close()
