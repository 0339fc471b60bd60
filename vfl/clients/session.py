"""A feature party's way through one session: check, attach, work, keep the weights, say goodbye."""

from __future__ import annotations

import time
from collections.abc import Callable

from vfl.clients.attach import attached
from vfl.clients.dealer_session import deal
from vfl.clients.feature_party import FeatureParty, build_feature_party
from vfl.clients.offers import send_offer, take_offers
from vfl.config import PartyFile
from vfl.datasets import PartyData
from vfl.errors import DisagreementError, ProtocolError
from vfl.exchange import ShareHolder
from vfl.frame import Kind
from vfl.session import (
    Introduction,
    PartyReport,
    SessionMessage,
    Terms,
    check_consent,
)
from vfl.session.limits import frame_limits
from vfl.session.own_data import (
    own_checkpoints,
    own_data,
    own_folder,
    own_ledger,
    own_secret,
)
from vfl.session.own_identity import own_agreement
from vfl.storage import locked
from vfl.trace import own_recorders, recording
from vfl.transport import Observed
from vfl.transport.base import TransportLink


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
        DisagreementError: its name stands for another session here; nothing was sent.
        VFLError: anything else that ended the session; the label party was told.
    """
    started = time.perf_counter()
    terms = message.terms
    if party.party == terms.dealer:
        return deal(message, party)
    _check_asked(party, terms)
    data = own_data(party, terms)
    check_consent(
        terms, party.party, party.consent, data.split, row_shape=_asked_shape(party, data)
    )
    checkpoints = own_checkpoints(party, terms)
    recorders = own_recorders(party, terms, data, checkpoints)
    introduction = Introduction.of(data, terms, message.session)
    ledger = own_ledger(party)
    folder = own_folder(party, terms)
    limits = frame_limits(terms, party.party, data.split)
    with (
        locked(folder.path),
        ledger.session(terms) as (entry, meter),
        attached(message, introduction, limits) as stream,
    ):
        link = Observed(stream, data.name, "feature", [meter, *recorders])
        feature = build_feature_party(
            data,
            terms,
            link,
            own_secret(party, entry),
            bottom=party.bottom,
            weights=None if terms.mode == "train" else folder.weights(),
            checkpoints=checkpoints,
            device=party.device,
        )
        if terms.masks_cuts:
            agreement = own_agreement(party, terms, message.session, message.attempt)
            send_offer(feature, agreement)
            take_offers(feature, agreement, terms.dealer)
            _check_shared(feature, terms, party, data)
            if isinstance(feature.half, ShareHolder):
                layers = {party.party: feature.half.axes}
                stream.agree(frame_limits(terms, party.party, data.split, layers))
        feature.resume(message.start, terms.in_flight_at(data.split, message.start))
        schedule = meter.through(feature.course.follow(terms.schedule(data.split, message.start)))
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


def _asked_shape(party: PartyFile, data: PartyData) -> tuple[int, ...] | None:
    """Axes of a row, where the session names the bottom; None where the party's own file does."""
    if data.inputs is None or party.bottom is not None:
        return None
    return tuple(data.inputs.shape[1:])


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


def _check_shared(feature: FeatureParty, terms: Terms, party: PartyFile, data: PartyData) -> None:
    """Ask for consent once more where first layers are shared: their bytes are known by now."""
    if isinstance(feature.half, ShareHolder):
        check_consent(terms, party.party, party.consent, data.split, feature.half.axes)
