"""A process of ``vfl bench wan``: plays one party of one training, over a stream with TLS.

Started as ``python -m vfl.bench.wan_worker``; it reads its job from standard input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from vfl.bench.messages import Door, Mark, Marks, WanJob
from vfl.bench.worker import tell
from vfl.clients import build_feature_party
from vfl.datasets import PartyData, load_bundled
from vfl.errors import VFLError
from vfl.frame import Frame, Kind
from vfl.seeds import Secret
from vfl.server import LabelParty, build_label_party
from vfl.session import Exchange, Terms
from vfl.session.schedule import queries, steps_per_epoch, training
from vfl.transport import Credential, Hello, TcpHub, TcpLink, session_certificate

_JOIN_TIMEOUT_S = 60.0


def short_epochs(terms: Terms, data: PartyData, tests: int) -> Iterator[Exchange]:
    """The exchanges of a training, in `tests` parts an epoch with all test rows after each.

    The parts are told apart as epochs are, so what is in flight drains before each test.
    """
    split, train = data.split, terms.train
    none = split.train[:0]
    steps = steps_per_epoch(len(split.train), train.batch_rows)
    part_steps = -(-steps // tests)
    part, step, done = 1, 0, 0
    for exchange in training(terms.seed, train.epochs, train.batch_rows, split.train, none, none):
        done += 1
        last = exchange.last or done == part_steps
        yield Exchange(step, "train", part, exchange.rows, last)
        step += 1
        if last:
            asked = queries(split.test)
            for index, rows in enumerate(asked):
                yield Exchange(step, "test", part, rows, index == len(asked) - 1)
                step += 1
            part, done = part + 1, 0


class _Setup:
    """What every party of the training starts from."""

    def __init__(self, job: WanJob) -> None:
        experiment = job.experiment
        self.job = job
        self.terms = Terms.of(experiment, "train", experiment.name)
        parties = load_bundled(
            experiment.data.source,
            self.terms.feature_parties,
            experiment.seed,
            self.terms.label_party,
            experiment.data.validation,
            flatten=True,
            limit=job.rows,
        )
        self.data = parties[job.party]
        # Nothing here needs protection, and every depth is to start from the same weights.
        self.secret = Secret.of_simulation(experiment.seed, job.party)

    def schedule(self) -> Iterator[Exchange]:
        return short_epochs(self.terms, self.data, self.job.tests)


def host(setup: _Setup) -> Marks:
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


def join(setup: _Setup) -> Marks:
    """Play one feature party."""
    job, terms = setup.job, setup.terms
    assert job.door is not None, "a party that joins needs a door"
    hello = Hello(job.session, job.party, job.tokens[job.party])
    ca_pem = job.door.ca_pem.encode()
    address = (job.door.host, job.door.port)
    link = TcpLink.connect(*address, hello, ca_pem, window=terms.window_frames)
    try:
        party = build_feature_party(setup.data, terms, link, setup.secret)
        party.run(setup.schedule())
        link.send(Frame(Kind.DONE))
    finally:
        link.close()
    return Marks()


def _label_party(setup: _Setup, hub: TcpHub) -> tuple[LabelParty, list[Mark]]:
    """The label party, and what it will have reached after each test."""
    marks: list[Mark] = []

    def mark(record: dict[str, Any]) -> None:
        trained_s, accuracy = label.progress.train_seconds, record["test_accuracy"]
        marks.append(Mark(exchanges=record["steps"], seconds=trained_s, accuracy=accuracy))

    assert setup.data.classes is not None, "accuracy is about classes"
    label = build_label_party(
        setup.data,
        setup.terms,
        {party: hub.link(party) for party in setup.terms.feature_parties},
        setup.secret,
        top=setup.job.experiment.label.top,
        task="classification",
        outputs=len(setup.data.classes),
        on_epoch=mark,
    )
    return label, marks


def main() -> None:
    """Do the one job there is."""
    torch.set_num_threads(1)
    try:
        setup = _Setup(WanJob.model_validate_json(sys.stdin.readline()))
        tell(host(setup) if setup.job.party == setup.terms.label_party else join(setup))
    except VFLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
