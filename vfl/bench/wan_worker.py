"""A process of ``vfl bench wan``: plays one party of one training, over a stream with TLS.

Started as ``python -m vfl.bench.wan_worker``; it reads its job from standard input.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from vfl.bench.messages import Door, Mark, Marks, WanJob
from vfl.bench.process import tell
from vfl.bench.wan_model import modelled
from vfl.bench.wan_setup import Setup
from vfl.clients import build_feature_party
from vfl.core.errors import VFLError
from vfl.core.frame import Frame, Kind
from vfl.server import LabelParty, Objective, build_label_party
from vfl.session.exchange import Own
from vfl.transport import Credential, Hello, TcpHub, TcpLink, session_certificate

_JOIN_TIMEOUT_S = 60.0


def host(setup: Setup) -> Marks:
    """Play the label party; its door is told first.

    Raises:
        MissingPartyError: a feature party did not join.
    """
    job, terms = setup.job, setup.terms
    certificate = session_certificate([job.host])
    credentials = {party: Credential(party, token) for party, token in job.tokens.items()}
    hub = TcpHub(
        *(job.host, 0, job.session, credentials),
        certificate=certificate,
        window=terms.window_frames,
    )
    try:
        tell(Door(host=job.host, port=hub.port, ca_pem=certificate.ca_pem.decode()))
        hub.wait_all(terms.feature_parties, _JOIN_TIMEOUT_S)
        label, marks = _label_party(setup, hub)
        label.run(setup.schedule())
        for half in label.halves.values():
            half.link.receive()  # its DONE: everything has arrived
    finally:
        hub.close()
    return Marks(marks=tuple(marks))


def join(setup: Setup) -> Marks:
    """Play one feature party."""
    job, terms = setup.job, setup.terms
    assert job.door is not None, "a party that joins needs a door"
    hello = Hello(job.session, job.party, job.tokens[job.party])
    ca_pem = job.door.ca_pem.encode()
    address = (job.door.host, job.door.port)
    link = TcpLink.connect(*address, hello, ca_pem, window=terms.window_frames)
    try:
        party = build_feature_party(setup.data, terms, link, Own(setup.secret))
        party.run(setup.schedule())
        link.send(Frame(Kind.DONE))
    finally:
        link.close()
    return Marks()


def _label_party(setup: Setup, hub: TcpHub) -> tuple[LabelParty, list[Mark]]:
    """The label party, and what it will have reached after each test."""
    marks: list[Mark] = []

    def mark(record: dict[str, Any]) -> None:
        trained_s, accuracy = label.progress.train_seconds, record["test_accuracy"]
        marks.append(Mark(exchanges=record["steps"], seconds=trained_s, accuracy=accuracy))

    label = build_label_party(
        setup.data,
        setup.terms,
        {party: hub.link(party) for party in setup.terms.feature_parties},
        Own(setup.secret),
        Objective(setup.job.experiment.label.top, "classification", setup.outputs),
        on_epoch=mark,
    )
    return label, marks


def main() -> None:
    """Do the one job there is."""
    torch.set_num_threads(1)
    try:
        setup = Setup(WanJob.model_validate_json(sys.stdin.readline()))
        if setup.job.wan:
            tell(modelled(setup))
        else:
            tell(host(setup) if setup.job.party == setup.terms.label_party else join(setup))
    except VFLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
