"""A party's way through one session: check, attach, work, keep the weights, say goodbye."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from vfl.clients.feature_party import build_feature_party
from vfl.clients.whole_network import build_whole_party
from vfl.config import PartyFile
from vfl.core.errors import ConsentError, DisagreementError, ProtocolError, VFLError
from vfl.core.frame import Kind
from vfl.core.storage import locked, weights_digest, write_json
from vfl.session import (
    Introduction,
    PartyReport,
    SessionMessage,
    Terms,
    check_consent,
    check_dealers_consent,
    for_others,
    secure,
    unexpected,
)
from vfl.session.consent import frame_limits, most_of_an_epoch
from vfl.session.exchange import Own
from vfl.session.party_folder import (
    own_checkpoints,
    own_data,
    own_folder,
    own_ledger,
    own_secret,
)
from vfl.session.secure import HelperRound
from vfl.session.trace import own_recorders, recording
from vfl.transport import Hello, LinkLimits, Observed, TcpLink, Timeouts
from vfl.transport.link import TransportLink


def take_part(
    message: SessionMessage, party: PartyFile, say: Callable[[str], None] = lambda line: None
) -> PartyReport:
    """Play one party through a whole session: a feature party, or a third party that deals.

    Args:
        message: what Flower brought.
        party: the party's own file.
        say: told how large a trace may get, before it starts.

    Raises:
        ConsentError: the session asks for more than the file allows; nothing was sent.
        DisagreementError: its name stands for another session here, and nothing was sent; or it
            is a training that has sent something else before, and nothing else was sent.
        VFLError: anything else that ended the session; the label party was told.
    """
    started = time.perf_counter()
    terms = message.terms
    if secure.make(terms.secure).whole_network:
        return _share(message, party)
    if party.party == terms.dealer:
        return _help(message, party)
    _check_asked(party, terms)
    data = own_data(party, terms)
    check_consent(
        terms,
        party.party,
        party.consent,
        data.split,
        row_shape=None if data.inputs is None else tuple(data.inputs.shape[1:]),
        own_bottom=party.bottom is not None,
    )
    checkpoints = own_checkpoints(party, terms)
    recorders = own_recorders(party, terms, data, checkpoints)
    introduction = Introduction.of(data, terms, message.session)
    ledger = own_ledger(party)
    folder = own_folder(party, terms)
    limits, mode = frame_limits(terms, party.party, data.split), secure.make(terms.secure)
    with (
        locked(folder.path),
        ledger.session(terms, message.start) as (entry, meter, sent),
        attached(message, introduction, limits) as stream,
    ):
        link = Observed(stream, data.name, "feature", [meter, *recorders])
        feature = build_feature_party(
            data,
            terms,
            link,
            Own(own_secret(party, entry), device=party.device, checkpoints=checkpoints, sent=sent),
            bottom=party.bottom,
            weights=None if terms.mode == "train" else folder.weights(),
        )
        if mode.needs_keys:
            keys = mode.own_keys(party, terms, message.session, message.attempt)
            mode.offer(feature.end, keys)
            mode.accept(feature.end, keys, terms)
        if (layers := feature.end.layers) is not None:  # their bytes are known by now
            check_consent(terms, party.party, party.consent, data.split, layers)
            limits = frame_limits(terms, party.party, data.split, {party.party: layers})
            stream.agree(limits)
        meter.most = most_of_an_epoch(terms, data.split, [limits])
        feature.resume(message.start, terms.in_flight_at(data.split, message.start))
        schedule = meter.through(feature.stopping.follow(terms.schedule(data.split, message.start)))
        weights = {party.party: feature.weights}
        with recording(recorders, schedule, message.start, weights, say) as exchanges:
            feature.run(exchanges)
        if terms.mode == "train":
            ledger.end(terms.run, feature.weights_digest())
            folder.save(data, terms, feature.weights())
        seconds = time.perf_counter() - started
        report = PartyReport(
            party=party.party, weights_sha256=feature.weights_digest(), seconds=seconds
        )
        _say_goodbye(link, report)
        return report


def _say_goodbye(link: TransportLink, report: PartyReport) -> None:
    link.send(report.frame())
    answer = link.receive()
    if answer.kind is not Kind.DONE:
        raise ProtocolError("a message out of turn", got=answer.kind.name, want="DONE")


def _check_asked(party: PartyFile, terms: Terms) -> None:
    """Refuse a session that asks for the cut of a party that is none of its feature parties."""
    if party.party not in terms.feature_parties:
        raise DisagreementError(
            f"party '{party.party}' is not part of this experiment",
            want=", ".join(terms.peers),
        )
    if party.role == "dealer":
        raise DisagreementError(
            f"party '{party.party}' only deals, and the session asks it for a cut",
            got="role = 'dealer'",
            want="[data] in its own file, or another party in the experiment's [parties]",
        )


def _check_deals(party: PartyFile) -> None:
    """Refuse a session that asks a party with data to deal."""
    if party.role != "dealer":
        raise DisagreementError(
            f"party '{party.party}' has data, and the session asks it to deal",
            got=f"role = '{party.role}'",
            want="role = 'dealer' in its own file, and no [data]",
        )


def _share(message: SessionMessage, party: PartyFile) -> PartyReport:
    """Play a party of a network that nobody holds, with columns or as the dealer.

    Raises:
        ConsentError: the session asks for more than the file allows; nothing was sent, or it has
            sent as much as it may.
        DisagreementError: the party's file is that of another role.
    """
    terms, name = message.terms, party.party
    data = None
    if name == terms.dealer:
        _check_deals(party)
        check_dealers_consent(terms, name, party.consent)
        introduction = Introduction.of_dealer(name, terms)
    else:
        _check_asked(party, terms)
        data = own_data(party, terms)
        check_consent(terms, name, party.consent, data.split)
        own_recorders(party, terms, data, None)  # refuses a trace
        introduction = Introduction.of(data, terms, message.session)
    split = None if data is None else data.split
    trains, mode = terms.mode == "train", secure.make(terms.secure)
    ledger, folder = own_ledger(party), own_folder(party, terms)
    with (
        locked(folder.path),
        ledger.session(terms, message.start) as (entry, meter, _),
        attached(message, introduction, frame_limits(terms, name, split)) as stream,
    ):
        checkpoints = own_checkpoints(party, terms)
        whole = build_whole_party(
            name,
            data,
            terms,
            mode.own_keys(party, terms, message.session, message.attempt),
            Observed(stream, name, "feature", [meter]),
            Own(own_secret(party, entry), device=party.device, checkpoints=checkpoints),
            bottom=party.bottom,
            weights=None if trains or data is None else folder.weights(),
            consent=party.consent,
            agreed=lambda layers: stream.agree(frame_limits(terms, name, split, layers)),
        )

        def keep() -> None:
            seen = [asdict(one) for one in whole.revealed()]
            sent = whole.network.traffic()
            path = folder.path / f"disclosed-{terms.mode}.json"
            write_json(path, {"disclosed": seen, "sent": sent})
            if trains:
                ledger.end(terms.run, whole.weights_digest())
            if trains and data is not None:
                folder.save(data, terms, whole.weights())

        return whole.play(message.start, meter.through, keep)


def _help(message: SessionMessage, party: PartyFile) -> PartyReport:
    """Play a third party without data, which deals for example; it keeps nothing.

    Raises:
        DisagreementError: the party's file is that of a party with data.
        ConsentError: the session asks for more than the file allows; nothing was sent, or it has
            sent as much as it may.
    """
    started = time.perf_counter()
    terms = message.terms
    _check_deals(party)
    check_dealers_consent(terms, party.party, party.consent)
    ledger, introduction = own_ledger(party), Introduction.of_dealer(party.party, terms)
    limits, mode = frame_limits(terms, party.party, None), secure.make(terms.secure)
    with (
        ledger.session(terms, message.start) as (_, meter, _),
        attached(message, introduction, limits) as stream,
    ):
        helper = mode.helper_round(terms, Observed(stream, party.party, "feature", [meter]))
        keys = mode.own_keys(party, terms, message.session, message.attempt)
        mode.offer(helper, keys)
        mode.accept(helper, keys, terms)
        stream.agree(frame_limits(terms, party.party, None, helper.layers))
        serve(helper, party.consent.max_bytes)
        no_weights = weights_digest({})
        if terms.mode == "train":
            ledger.end(terms.run, no_weights)
        return PartyReport(
            party=party.party,
            weights_sha256=no_weights,
            seconds=time.perf_counter() - started,
        )


def serve(helper: HelperRound, most_bytes: int) -> None:
    """Serve until the label party says that the session is over.

    Args:
        helper: a third party's end.
        most_bytes: how many it may send.

    Raises:
        ConsentError: it has sent more.
    """
    while helper.serve():
        if helper.sent_bytes > most_bytes:
            raise ConsentError(
                f"party '{helper.party}' does not consent to deal any further",
                got=f"{helper.sent_bytes} bytes",
                want=f"bytes <= {most_bytes}",
                fix="a shorter session, or a larger max_bytes in the [consent] of its own file",
            )


@contextmanager
def attached(
    message: SessionMessage, introduction: Introduction, limits: LinkLimits
) -> Iterator[TcpLink]:
    """The party's end of the stream, introduced; what goes wrong meanwhile is told to the others.

    Args:
        message: what Flower brought.
        introduction: what the party says of itself.
        limits: what frames may carry.

    Raises:
        LostPeerError: nobody is there.
        PeerFailedError: the label party does not let this party in, and says why.
    """
    hello = Hello(message.session, message.node, message.token, introduction.model_dump())
    link = TcpLink.connect(
        message.host,
        message.port,
        hello,
        message.ca_pem.encode(),
        Timeouts(idle_s=message.idle_timeout_s, rejoin_window_s=message.rejoin_window_s),
        message.terms.window_frames,
        limits=limits,
    )
    try:
        yield link
    except VFLError as error:
        link.fail(for_others(error, introduction.party))
        raise
    except Exception as bug:
        link.fail(unexpected(bug, introduction.party))
        raise
    finally:
        link.close()
