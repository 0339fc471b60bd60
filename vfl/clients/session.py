"""A party other than the label party in one session: checks, connection, computation, storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.clients.alignment import take_part_in_alignment
from vfl.clients.feature_party import FeatureParty, bottom_step
from vfl.clients.middle_party import MiddleParty
from vfl.clients.serving import Answering, ServedMiddle, ServedParty
from vfl.clients.whole_network import WholeNetworkParty
from vfl.config import PartyFile, read_party_file
from vfl.config.run_folder import locked_for, next_evaluation
from vfl.core.errors import DisagreementError, ProtocolError
from vfl.core.frame import Kind, Link
from vfl.core.storage import locked, private_folder, weights_digest, write_json
from vfl.core.traffic import Ledger
from vfl.datasets import PartyData, Split
from vfl.session import (
    Introduction,
    PartyReport,
    SessionMessage,
    Terms,
    check_consent,
    check_dealers_consent,
    rules,
    secure_mode,
)
from vfl.session.consent import (
    check_layers,
    check_middles_consent,
    check_ranks,
    check_rows,
    check_spent,
    check_tasks_consent,
    frame_limits,
    limits_of_links,
    most_of_an_epoch,
)
from vfl.session.exchange import Own, expect
from vfl.session.handshake import Withdrawn, attached
from vfl.session.label import LabelParty, Objective, Records, summarise
from vfl.session.label.asking import ServingParty
from vfl.session.label.front import FRONTS
from vfl.session.label.summary import test_figures, write_predictions
from vfl.session.ranks.machines import further_ranks
from vfl.session.ranks.processes import FurtherRanks, Order, device_of, own_of_rank
from vfl.session.relay import Askers, PairSeals, PolledPair, SealedLinks
from vfl.session.secure_mode import FeatureRound, HelperRound, Layers
from vfl.session.serving import Requests, own_rate, require_servable
from vfl.session.store.erasure import withdraw
from vfl.session.store.party_folder import (
    earlier_folder,
    own_alignment,
    own_checkpoints,
    own_data,
    own_folder,
    own_ledger,
    own_state,
    trained_digests,
    unread_columns,
)
from vfl.session.store.session_ledger import Entry, Meter, Spent
from vfl.session.store.witness import Announcement
from vfl.session.terms import AlignTerms
from vfl.session.threads import use_threads
from vfl.session.trace import Recorder, own_recorders, recording
from vfl.transport import LinkLimits, Observed, ObservedPoll, TcpLink
from vfl.transport.link import FanOut

#: Most seconds that a new attempt waits for an earlier attempt of the same session, whose stream
#: has ended but which still writes its records.
_HANDOVER_S = 10.0


def take_part(
    message: SessionMessage, party: PartyFile, say: Callable[[str], None] = lambda line: None
) -> PartyReport:
    """Run one party, which is not the leading label party, through a session.

    Args:
        message: session message that Flower delivered.
        party: the party's own file.
        say: callback that writes a line to the party's own log.

    Raises:
        ConsentError: the session exceeds what the party's file allows, and nothing was sent; or a
            sent amount has reached a limit in the party's file.
        DisagreementError: the party's file sets a different role, or the run's name belongs to a
            different session at this party, and nothing was sent; or a resumed training would send
            a message whose contents differ from the earlier message, and the new message was not
            sent.
        VFLError: any other error that ended the session; the label party has received it.
    """
    ledger = own_ledger(party)
    if isinstance(message.terms, AlignTerms):
        with ledger.noted(message.terms) as standing:
            return take_part_in_alignment(message, message.terms, party, standing, say)
    with ledger.refusing(message.terms):
        session = _PartySession(message, party, say)
    return session.play()


def play_rank(order: Order) -> None:
    """Run one further rank (process) of a feature party through a training.

    The rank has a separate stream to the rank with the same number at the label party. This rank
    stores nothing and checks no terms, because rank 0 does both.

    Raises:
        VFLError: the error that ended the session; the label party's rank with the same number has
            received it.
    """
    party = read_party_file(order.party_file)
    message = SessionMessage.model_validate(order["message"])
    terms = message.terms
    assert isinstance(terms, Terms), "in an alignment, a party has only one rank"
    data, started, meter = own_data(party, terms), time.perf_counter(), Meter()
    introduction = Introduction.of(data, terms, message.session)
    limits = frame_limits(terms, party.party, data.split)
    with attached(message, introduction, limits) as stream:
        link = Observed(stream, party.party, "feature", [meter])
        own = own_of_rank(order, party, data)
        feature = FeatureParty(data, terms, link, own, bottom=party.bottom)
        feature.resume(message.start, ())
        followed = feature.stopping.follow(rules.schedule(terms, data.split, message.start))
        feature.run(own.ranks.metered(followed, meter.bytes))
        digest = feature.weights_digest()
        order.reply({"weights": digest})
        seconds = time.perf_counter() - started
        report = PartyReport(party=party.party, weights_sha256=digest, seconds=seconds)
        link.send(report.frame())
        expect(link, Kind.DONE, 0, "the label party")


class _PartySession:
    """One party in one session: the agreed terms, and the party's private state."""

    def __init__(
        self, message: SessionMessage, party: PartyFile, say: Callable[[str], None]
    ) -> None:
        self.started = time.perf_counter()
        self.message, self.party, self.say = message, party, say
        self.terms, self.name = message.terms, party.party
        self.mode, self.trains = secure_mode.make(self.terms.secure), self.terms.mode == "train"
        self.checkpoints = own_checkpoints(party, self.terms)
        self.ledger, self.folder = own_ledger(party), own_folder(party, self.terms)
        self.data, self.recorders = None, list[Recorder]()
        self.split: Split | None = None
        self.withdrawn: Withdrawn | None = None
        if self.name == rules.dealer(self.terms):
            _check_role(party, "dealer", "deal")
            check_dealers_consent(self.terms, self.name, party.consent)
            return
        if self._in_the_middle:
            _check_role(party, "middle", "be in the middle")
            check_rows(self.name, message.rows, party.consent)  # check before memory is allocated
            self.split = self.terms.split_of(message.rows)
            check_middles_consent(self.terms, self.name, party.consent, self.split)
            return
        if self.name in self.terms.tasks:
            _check_role(party, "data", "learn a task")
            self._withdraw()
            self.data = data = own_data(party, self.terms, self.terms.tasks[self.name].task)
            self.split = data.split
            outputs = self._outputs(data)
            check_tasks_consent(self.terms, self.name, party.consent, data.split, outputs)
            own_recorders(party, self.terms, data, None)  # records nothing
            return
        _check_asked(party, self.terms)
        if self.terms.mode == "serve":
            require_servable(self.terms)
        self._withdraw()
        self.data = data = own_data(party, self.terms)
        check_ranks(party, self.terms, data.split, 1 + len(message.ranks))
        inputs = None if self.mode.whole_network else data.inputs
        check_consent(
            self.terms,
            self.name,
            party.consent,
            data.split,
            row_shape=None if inputs is None else tuple(inputs.shape[1:]),
            own_bottom=party.bottom is not None,
            unaligned=0 if data.unaligned is None else len(data.unaligned),
        )
        self.recorders = own_recorders(party, self.terms, data, self.checkpoints)
        self.split = data.split
        if self.trains and not message.start:
            for line in unread_columns(party, data):
                say(line)

    def _withdraw(self) -> None:
        """Drop rows that other parties erased from the alignment.

        Collect the rows that this party erased.
        """
        told, session = self.message.withdrawn, self.message.session
        alignment = own_alignment(self.party, self.terms)
        if told is not None and (places := told.beyond(alignment, session)):
            withdraw(self.party, self.terms, places)
        known = () if told is None else told.places
        self.withdrawn = Withdrawn.of(alignment, session, known)

    @property
    def _in_the_middle(self) -> bool:
        return self.terms.middle is not None and self.name == self.terms.middle.party

    def play(self) -> PartyReport:
        """Connect to the label party, and run this party's role in the session."""
        helps = self.split is None and not self.mode.whole_network
        with (
            nullcontext()  # a party that only helps stores nothing
            if helps
            else locked(locked_for(self.folder.path, self.terms.mode), _HANDOVER_S),
            self.ledger.session(self.terms, self.message.start) as (entry, meter, sent),
            attached(self.message, self._introduction(meter), self._limits()) as stream,
        ):
            self._admit_label_party(stream)
            link = Observed(stream, self.name, "feature", [meter, *self.recorders])
            if helps:
                return self._help(stream, link, meter)
            own = own_state(self.party, self.terms, entry, self.data, self.checkpoints, sent)
            if self.mode.whole_network:
                return self._share(stream, link, own, meter, entry)
            if self._in_the_middle:
                return self._mediate(link, own, meter)
            if self.name in self.terms.serving:
                return self._answer(stream, own, meter)
            if self.name in self.terms.tasks:
                return self._learn(link, own, meter)
            return self._play(stream, link, own, meter)

    def _introduction(self, meter: Meter) -> Introduction:
        assert meter.standing is not None, "a session has one"
        self._standing, label_party = meter.standing, self.terms.label_party
        self._standing.require(self.message.known, label_party)
        announced = self._standing.announce(label_party)
        session = self.message.session
        return Introduction.of(self.data, self.terms, session, announced, withdrawn=self.withdrawn)

    def _admit_label_party(self, stream: TcpLink) -> None:
        """Refuse to continue if the label party's store was restored from an older copy."""
        name = self.terms.label_party
        self._standing.admit(name, Announcement.parse(stream.terms.get("standing"), name))

    def _sealed(self, link: Link, others: Sequence[str]) -> SealedLinks:
        """Return links to other parties; the label party relays frames, encrypted end to end."""
        terms = self.terms
        seals = PairSeals(self.party, terms, self.message.session, others, self._standing)
        links = SealedLinks(link, seals, rules.peers(terms), rules.window_frames(terms))
        links.agree(seals)
        return links

    def _mediate(self, link: Link, own: Own, meter: Meter) -> PartyReport:
        """Run the middle party, which receives every cut and sends the middle model's output."""
        terms, start, split = self.terms, self.message.start, self.split
        assert split is not None, "the session message contains the number of rows"
        links = self._sealed(link, terms.feature_parties)
        weights = self._weights()
        middle = MiddleParty(terms, links.others, links.direct, own, weights=weights)
        if terms.mode == "serve":
            ServedMiddle(middle, self._requests(split.test, meter)).run(self.say)
            return self._conclude(middle.weights_digest(), links.direct)
        meter.most = most_of_an_epoch(terms, split, limits_of_links(terms, self.name, split))
        middle.resume(start)
        middle.run(meter.through(middle.stopping.follow(rules.schedule(terms, split, start))))
        if self.trains:
            self.ledger.end(terms.run, middle.weights_digest())
            rowless = PartyData(self.name, None, None, None, split, b"")
            self.folder.save(rowless, terms, middle.weights())
        return self._conclude(middle.weights_digest(), links.direct)

    def _weights(self) -> dict[str, Tensor] | None:
        """Return initial weights: those of this run or of an earlier run; None for new weights."""
        folder = earlier_folder(self.party, self.terms) if self.trains else self.folder
        return None if folder is None else folder.weights()

    def _outputs(self, data: PartyData) -> int:
        """Return the number of outputs of the top model of an additional label party."""
        labelled = self.terms.mode in ("train", "evaluate")
        classes = data.classes if labelled else self.folder.classes()
        return 1 if classes is None else len(classes)

    def _label_party(self, ends: Mapping[str, Link], own: Own, ledger: Ledger) -> LabelParty:
        """Build an additional label party, which learns its own task (label) from the cuts."""
        assert self.data is not None, "an additional label party has labels, or at least rows"
        return LabelParty(
            self.data,
            self.terms.at_label(self.name),
            ends,
            own,
            Objective.of(
                self.terms.tasks[self.name].settings_of(self.name), self._outputs(self.data)
            ),
            weights=self._weights(),
            records=Records(ledger),
        )

    def _learn(self, link: Link, own: Own, meter: Meter) -> PartyReport:
        """Run an additional label party, which trains a top model for its own task on the cuts.

        This party stores metrics and predictions in its own part of the run, and discloses them to
        no other party.
        """
        terms, data, folder, name = self.terms, self.data, self.folder, self.name
        assert data is not None, "it has labels"
        links, ledger = self._sealed(link, terms.feature_parties), Ledger()
        counted = {
            party: Observed(pair, party, "label", [ledger]) for party, pair in links.others.items()
        }
        label = self._label_party(counted, own, ledger)
        meter.most = most_of_an_epoch(terms, data.split, limits_of_links(terms, name, data.split))
        label.resume(self.message.start)
        label.run(meter.through(rules.schedule(terms, data.split, self.message.start)))
        digest = label.weights_digest()
        figures = summarise(label, digest, str(folder.path))
        if self.trains:
            self.ledger.end(terms.run, digest)
            answers = torch.cat(label.tested) if label.tested else None
            folder.save(data, terms, label.weights(), test_figures(figures), answers)
            write_json(folder.path / "summary.json", figures | {"history": label.history})
        elif terms.mode == "evaluate":
            path = next_evaluation(folder.path)
            private_folder(path.parent)
            write_json(path, figures)
        else:
            path = folder.path / "predictions.csv"
            answered = label.outputs, folder.classes(), (), label.uncalibrated
            write_predictions(path, data, *answered)
        return self._conclude(digest, links.direct)

    def _answer(self, stream: TcpLink, own: Own, meter: Meter) -> PartyReport:
        """Run an additional label party in a service, which answers requests at its own address."""
        terms, data, folder, name = self.terms, self.data, self.folder, self.name
        assert data is not None, "it has rows"
        observed = ObservedPoll(stream, name, "feature", [meter])
        links = self._sealed(observed, terms.feature_parties)
        lead = PolledPair(links, None, observed)
        ends = {
            party: ObservedPoll(PolledPair(links, party, observed), party, "label", [])
            for party in terms.feature_parties
        }
        label = self._label_party(ends, own, Ledger())
        over = False

        def ended() -> bool:
            nonlocal over
            if not over and (said := lead.poll()) is not None:
                if said.kind is not Kind.DONE:
                    raise ProtocolError("an unexpected message", got=said.kind.name, want="DONE")
                over = True
            return over

        front = FRONTS.member("http").open_task(self.party, folder.path, ended)
        self.say(front.welcome)
        try:
            front.show(terms.run, terms.feature_parties, data, folder.classes(), folder.drift())
            asker = (1 + terms.serving.index(name), 1 + len(terms.serving))
            asking = ServingParty(label, asker=asker)
            try:
                front.play(asking)
            finally:
                meter.rows += label.progress.asked_rows
            asking.close()
        finally:
            front.close()
        return self._conclude(label.weights_digest(), links.direct)

    def _play(self, stream: TcpLink, link: Observed, own: Own, meter: Meter) -> PartyReport:
        """Run a feature party; start its further ranks if the session uses several ranks."""
        size = 1 + len(self.message.ranks)
        if size == 1:
            return self._play_rank_0(stream, link, own, meter, None)
        device = device_of(own.device, 0)
        assert self.data is not None, "a party without data has only one rank"
        patience_s = self.message.idle_timeout_s
        with further_ranks(self.party, size, patience_s, device) as ranks:
            watched = ranks.watch(stream, "the label party")
            for rank in ranks.further:
                message = self.message.of_rank(rank).model_dump(mode="json")
                order = {"side": "feature", "party_file": str(self.party.path), "message": message}
                ranks.start(rank, order)
            own = replace(own, device=device, ranks=ranks.join_group(self.data))
            link = Observed(watched, self.name, "feature", [meter])  # further ranks record no trace
            return self._play_rank_0(stream, link, own, meter, ranks)

    def _play_rank_0(
        self,
        stream: TcpLink,
        link: Observed,
        own: Own,
        meter: Meter,
        ranks: FurtherRanks | None,
    ) -> PartyReport:
        terms, data, start = self.terms, self.data, self.message.start
        assert data is not None, "a party without data is a dealer, which does not come here"
        direct: Link = link
        cuts: Link = link
        if terms.takers:
            sealed = self._sealed(link, terms.takers)
            direct, takers = sealed.direct, list(sealed.others.values())
            cuts = takers[0] if terms.middle is not None else FanOut([direct, *takers])
            if terms.serving:
                cuts = Askers(sealed, terms.takers)
        if self.trains and ranks is None:
            use_threads(self.party.threads, bottom_step(data, terms, self.party.bottom))
        feature = FeatureParty(
            data,
            terms,
            cuts,
            own,
            bottom=self.party.bottom,
            weights=self._weights(),
        )
        if self.mode.needs_keys:
            self._agree_on_keys(feature.end)
        if terms.mode == "serve":
            self._serve(feature, self._requests(data.asked, meter))
            return self._conclude(feature.weights_digest(), direct)
        limits = self._limits()
        if (layers := feature.end.layers) is not None:  # the sizes of frames are known only now
            check_consent(terms, self.name, self.party.consent, data.split, layers)
            limits = self._limits({self.name: layers})
            stream.agree(limits)
        streams = [limits]
        if terms.takers:
            streams = limits_of_links(terms, self.name, data.split)
        meter.most = most_of_an_epoch(terms, data.split, streams)
        feature.resume(start, rules.in_flight_at(terms, data.split, start))
        followed = feature.stopping.follow(rules.schedule(terms, data.split, start))
        schedule = meter.through(own.ranks.metered(followed, meter.bytes))
        weights = {self.name: feature.weights}
        with recording(self.recorders, schedule, start, weights, self.say) as exchanges:
            feature.run(exchanges)
        if ranks is not None:
            ranks.agree(feature.weights_digest())
        if self.trains:
            self.ledger.end(terms.run, feature.weights_digest())
            self.folder.save(data, terms, feature.weights())
        if terms.mode == "predict":
            self.folder.save_predicted(data)
        return self._conclude(feature.weights_digest(), direct)

    def _requests(self, rows: np.ndarray, meter: Meter) -> Requests:
        """Return the object that checks and counts requests for these rows."""
        return Requests(rows, self.party.consent, meter, own_rate(self.party))

    def _serve(self, party: Answering, requests: Requests) -> None:
        """Let a party answer requests until the service ends; store the drift of queried rows."""
        drift, askers = self.folder.drift(), 1 + len(self.terms.serving)
        try:
            ServedParty(party, requests, drift, askers).run(self.say)
        finally:
            self.folder.save_served(drift)

    def _conclude(self, weights_sha256: str, link: Link) -> PartyReport:
        """Send this party's report; wait until the label party has all parties' reports."""
        report = self._report(weights_sha256)
        link.send(report.frame())
        expect(link, Kind.DONE, 0, "the label party")
        return report

    def _share(
        self, stream: TcpLink, link: Observed, own: Own, meter: Meter, entry: Entry
    ) -> PartyReport:
        """Run a party of a whole network: a party with columns, or the dealer."""
        data, folder, consent = self.data, self.folder, self.party.consent
        split = None if data is None else data.split
        # A resumed training sends the setup's messages and some messages of steps again.
        before = entry.spent["train"] if self.trains else Spent()

        def agreed(layers: Mapping[str, Layers]) -> None:
            check_layers(self.terms, self.name, consent, split, layers[self.name])
            stream.agree(self._limits(layers))

        def check() -> None:
            spent = before.plus(meter.spent(coming=False))
            check_spent(self.name, spent.bytes_up + spent.bytes_down, consent.max_bytes)

        if self.trains and data is not None:
            meter.trained = partial(trained_digests, self.party, data)
        whole = WholeNetworkParty(
            self.name,
            data,
            self.terms,
            self._keys(),
            link,
            own,
            bottom=self.party.bottom,
            weights=None if self.trains or data is None else folder.weights(),
            agreed=agreed,
            spend=meter.show,
        )

        if self.terms.mode == "serve":
            assert split is not None, "a party without rows answers no requests"
            whole.get_ready()
            self._serve(whole, self._requests(split.test, meter))
            return self._conclude(whole.weights_digest(), link)

        def keep() -> None:
            seen = [asdict(one) for one in whole.revealed()]
            path = folder.path / f"disclosed-{self.terms.mode}.json"
            write_json(path, {"disclosed": seen, "sent": whole.network.traffic()})
            if self.trains:
                self.ledger.end(self.terms.run, whole.weights_digest())
            if self.trains and data is not None:
                folder.save(
                    data,
                    self.terms,
                    whole.weights(),
                    privacy=whole.privacy(),
                    model=whole.figures(),
                )
            if self.terms.mode == "predict" and data is not None:
                folder.save_predicted(data)
            if data is not None:
                folder.save_explained(data, self.terms, whole.column_values())

        return whole.play(self.message.start, meter.through, keep, check, self._count)

    def _help(self, stream: TcpLink, link: Observed, meter: Meter) -> PartyReport:
        """Run a third party without data, for example a dealer; the party stores nothing."""
        helper = self.mode.helper_round(self.terms, link)
        self._agree_on_keys(helper)
        stream.agree(self._limits(helper.layers))
        while helper.serve():
            check_spent(self.name, sum(meter.bytes.values()), self.party.consent.max_bytes)
        no_weights = weights_digest({})
        if self.trains:
            self.ledger.end(self.terms.run, no_weights)
        return self._report(no_weights)

    def _keys(self) -> Any:
        message = self.message
        named = (message.session, message.attempt)
        return self.mode.own_keys(self.party, self.terms, *named, self._standing)

    def _agree_on_keys(self, end: FeatureRound | HelperRound) -> None:
        keys = self._keys()
        self.mode.offer(end, keys)
        self.mode.accept(end, keys, self.terms)

    def _limits(self, layers: Mapping[str, Layers] | None = None) -> LinkLimits:
        return frame_limits(self.terms, self.name, self.split, layers)

    def _report(self, weights_sha256: str) -> PartyReport:
        seconds = time.perf_counter() - self.started
        return PartyReport(
            party=self.name, weights_sha256=weights_sha256, seconds=seconds, count=self._count()
        )

    def _count(self) -> int:
        """Return the counter of this party's store; a decrease shows a restored copy."""
        return self._standing.announce().count


def _check_asked(party: PartyFile, terms: Terms) -> None:
    """Refuse a session that requests cuts of this party, if the party is no feature party of it."""
    if party.party not in terms.feature_parties:
        raise DisagreementError(
            f"party '{party.party}' is not a party of this experiment",
            want=", ".join(rules.peers(terms)),
        )
    if party.role != "data":
        raise DisagreementError(
            f"party '{party.party}' has no data, but the session requests a cut of it",
            got=f"role = '{party.role}'",
            want="[data] in the party's own file, or another party in the experiment's [parties]",
        )


def _check_role(party: PartyFile, role: str, does: str) -> None:
    """Refuse a session that gives the party a role other than the role in the party's own file."""
    if party.role != role:
        raise DisagreementError(
            f"the session asks party '{party.party}' to {does}, but the party has another role",
            got=f"role = '{party.role}'",
            want="[data] in its own file, and no role"
            if role == "data"
            else f"role = '{role}' in its own file, and no [data]",
        )
