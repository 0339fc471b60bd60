"""A further rank (process) of the label party: it processes its share of every batch of a session.

The rank listens at its own port for the ranks of the same number of all feature parties, with the
session's TLS certificate. A rank on another machine makes its own certificate, so that no private
key has to be sent. The rank stores nothing and reports no metrics, because rank 0 does both. The
rank does not import Flower, which only rank 0 needs.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from vfl.config import Experiment, FederationSettings, LabelSettings, PartyFile, read_party_file
from vfl.core.errors import DisagreementError
from vfl.core.frame import Frame, Kind
from vfl.core.traffic import Ledger
from vfl.datasets import PartyData
from vfl.session import Introduction, PartyReport, Terms, check_introduction, rules
from vfl.session.consent import frame_limits
from vfl.session.handshake import RankStream, errors_reported
from vfl.session.label.party import LabelParty, Records
from vfl.session.label.task import Objective
from vfl.session.ranks.processes import FurtherRanks, Order, own_of_rank
from vfl.session.store.party_folder import own_data
from vfl.session.store.session_ledger import Meter
from vfl.transport import (
    Admission,
    Credential,
    Observed,
    TcpHub,
    Timeouts,
    routed_listener,
    session_certificate,
)
from vfl.transport.certificates import ServerCertificate
from vfl.transport.router import Listener

_PEMS = ("ca_pem", "cert_pem", "key_pem")


def start_ranks(
    ranks: FurtherRanks,
    party: PartyFile,
    experiment: Experiment,
    terms: Terms,
    session: str,
    start: int,
    certificate: ServerCertificate,
    nodes: Mapping[str, int],
) -> dict[str, tuple[RankStream, ...]]:
    """Start the further ranks.

    Wait until all of them listen, and return their streams by feature party.

    Args:
        ranks: the further ranks to start.
        party: the label party's own file.
        experiment: the experiment to train.
        terms: agreed terms of the session.
        session: identifier of the session on the TCP streams.
        start: first exchange.
        certificate: TLS certificate of rank 0's stream; ranks on this machine use the same
            certificate.
        nodes: Flower's node ids, by feature party.

    Raises:
        LostRankError: a rank was not ready in time.
    """
    settings = experiment.federation
    tokens = {(name, rank): secrets.token_urlsafe(32) for name in nodes for rank in ranks.further}
    for rank in ranks.further:
        credentials = {
            name: {"node": str(node), "token": tokens[name, rank]} for name, node in nodes.items()
        }
        order = {
            "side": "label",
            "party_file": str(party.path),
            "label": experiment.label.model_dump(mode="json"),
            "settings": settings.model_dump(mode="json"),
            "terms": terms.model_dump(mode="json"),
            "session": session,
            "start": start,
            "certificate": {name: getattr(certificate, name).decode() for name in _PEMS}
            if ranks.one_machine
            else {},
            "credentials": credentials,
            "port": settings.stream_port and settings.stream_port + rank,
        }
        ranks.start(rank, order)
    listen = {rank: dict(ranks.receive(rank)) for rank in ranks.further}
    return {
        name: tuple(
            RankStream.model_validate({**listen[rank], "token": tokens[name, rank]})
            for rank in ranks.further
        )
        for name in nodes
    }


def play_rank(order: Order) -> None:
    """Run one further rank (process) of the label party through a training.

    Raises:
        VFLError: the error that ended the session; the feature parties' ranks of the same number
            have received it.
    """
    party, terms = read_party_file(order.party_file), Terms.model_validate(order["terms"])
    settings = FederationSettings.model_validate(order["settings"])
    label = LabelSettings.model_validate(order["label"])
    data = own_data(party, terms, label.task)
    if pems := order["certificate"]:
        host, at = settings.bind_host or settings.stream_host, {}
        certificate = ServerCertificate(*(pems[name].encode() for name in _PEMS))
    else:
        host = party.node.rank_host or settings.stream_host
        certificate = session_certificate([host])
        at = {"host": host, "ca_pem": certificate.ca_pem.decode()}
    listener = None
    if pems:  # if this machine has a router, feature parties reach the rank through the router
        listener = routed_listener(order["session"], host, settings.stream_port, order.rank)
    hub = _hub(order, terms, settings, data, host, certificate, listener)
    with errors_reported(hub, data.name):
        order.reply({"port": hub.port, **at})
        _train(order, party, terms, settings, label, data, hub)


def _hub(
    order: Order,
    terms: Terms,
    settings: FederationSettings,
    data: PartyData,
    host: str,
    certificate: ServerCertificate,
    listener: Listener | None,
) -> TcpHub:
    def admit(name: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
        introduction = Introduction.parse(dict(about))
        if introduction.party != name:
            raise DisagreementError(
                f"a rank announced that it belongs to party '{introduction.party}'",
                got=f"the token of party '{name}'",
                want="a rank of each party, under the party's own name",
            )
        check_introduction(introduction, terms, data, order["session"])
        return {}

    credentials = {name: Credential(**one) for name, one in order["credentials"].items()}
    return TcpHub(
        host,
        order["port"],
        Admission(
            order["session"],
            credentials,
            admit,
            settings.join_timeout_s,
            lambda name: frame_limits(terms, name, data.split),
        ),
        certificate,
        Timeouts(step_s=settings.step_timeout_s, rejoin_window_s=settings.rejoin_window_s),
        rules.window_frames(terms),
        listener=listener,
    )


def _train(
    order: Order,
    party: PartyFile,
    terms: Terms,
    settings: FederationSettings,
    label: LabelSettings,
    data: PartyData,
    hub: TcpHub,
) -> None:
    hub.wait_all(rules.peers(terms), settings.join_timeout_s)
    ledger, meter, start = Ledger(), Meter(), int(order["start"])
    links = {
        name: Observed(hub.link(name), name, "label", [ledger, meter])
        for name in rules.peers(terms)
    }
    own = own_of_rank(order, party, data)
    objective, records = Objective.of(label, data.outputs), Records(ledger)
    one = LabelParty(data, terms, links, own, objective, records=records)
    one.resume(start)
    schedule = one.stopping.follow(rules.schedule(terms, data.split, start))
    one.run(own.ranks.metered(schedule, meter.bytes))
    order.reply({"weights": one.weights_digest()})
    for name, link in links.items():
        PartyReport.of(link.receive(), name)
        link.send(Frame(Kind.DONE))
