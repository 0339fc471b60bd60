"""The label party in one session: it connects, computes, and restarts after the loss of a party."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from vfl.config import Experiment, PartyFile, read_experiment
from vfl.config.run_folder import RunFolder, locked_for
from vfl.core.errors import (
    CheckpointError,
    ConfigError,
    LostPeerError,
    MisalignedError,
    MissingPartyError,
    PeerFailedError,
    StorageError,
    VFLError,
    redacted_traceback,
)
from vfl.core.frame import Frame, Kind, Link, Observer
from vfl.core.registry import command_of
from vfl.core.storage import joint_digest, locked, write_json
from vfl.core.traffic import Ledger
from vfl.datasets import Split
from vfl.server.alignment import run_alignment
from vfl.server.federation import ErasedRowsError, Federation, OpenRanks
from vfl.server.rank import start_ranks
from vfl.server.whole_network import WholeNetworkLabel
from vfl.session import Exchange, PartyFolder, PartyReport, Terms, rules, secure_mode, unexpected
from vfl.session.consent import (
    check_explained,
    frame_limits,
    limits_of_links,
    most_of_an_epoch,
    refuse_trace,
)
from vfl.session.exchange import Own
from vfl.session.label.asking import ServingParty
from vfl.session.label.front import FRONTS, Play, ServingFront, serve_in_turn
from vfl.session.label.party import AnyLabelParty, LabelParty, Records, top_step
from vfl.session.label.summary import summarise, test_figures, write_predictions
from vfl.session.label.task import Objective
from vfl.session.progress import ProgressReport, SessionProgress, WaitingFor
from vfl.session.ranks.machines import further_ranks
from vfl.session.ranks.processes import FurtherRanks, device_of
from vfl.session.relay import Carried, Switchboard
from vfl.session.rules import refuse_ranks
from vfl.session.serving import require_servable
from vfl.session.store.checkpoint import newest_common
from vfl.session.store.erasure import withdraw
from vfl.session.store.party_folder import (
    earlier_folder,
    own_alignment,
    own_checkpoints,
    own_data,
    own_folder,
    own_ledger,
    own_state,
    own_terms,
    require_same_top,
    unread_columns,
)
from vfl.session.store.session_ledger import Meter
from vfl.session.terms import AlignTerms
from vfl.session.threads import use_threads
from vfl.session.trace import Recorder, own_recorders, recording
from vfl.transport import ObservedPoll, local_pair, receive_any

_COLLECT_S = 10.0
_LOSSES = (LostPeerError, MissingPartyError)
#: Seconds that are added to the time limit for a party's frame, because the label party's other
#: ranks wait for the rank that receives the frame.
_RANKS_S = 15.0
# messages limit the attempt number; each attempt has a new session identifier
_MOST_ATTEMPTS = 1000


def run_session(
    grid: Grid,
    experiment: Experiment,
    party: PartyFile,
    terms: Terms,
    *,
    resume: bool = False,
    simulation: bool = False,
    front: ServingFront | None = None,
    settings: Sequence[str] = (),
    today: Collection[str] | None = None,
) -> None:
    """Run one session at the label party, and write the run's folder.

    Args:
        grid: Flower's connection to the nodes.
        experiment: the experiment of the run.
        party: the label party's own file.
        terms: terms of the session.
        resume: whether this session continues the run from its last checkpoint.
        simulation: whether Flower simulates the nodes; see `Federation`.
        front: HTTP service that receives clients' requests; None opens one if the session is a
            service.
        settings: settings that override the project's experiment; the run's folder records them.
        today: current feature parties of the project; None stands for the feature parties of the
            terms.

    Raises:
        VFLError: the error that ended the session; all connected parties have received it, and the
            run's folder records it.
    """
    if terms.mode == "serve" and front is None:
        _serve(grid, experiment, party, terms, simulation, today)
        return
    path = party.run_path(terms.run)
    with locked(locked_for(path, terms.mode)):
        if resume:
            folder = RunFolder.reopen(path)
        elif terms.mode in ("train", "align"):
            project = str(party.path.parent.resolve())
            command = command_of(terms.mode, project, settings=settings)
            folder = RunFolder.create(path, experiment, "federated", command)
        else:
            folder = RunFolder.open(path)
        try:
            if isinstance(terms, AlignTerms):
                say = _into_log_of(folder)
                with own_ledger(party).noted(terms) as standing:
                    run_alignment(grid, experiment, party, terms, folder, standing, say, simulation)
                return
            gone = _gone(terms, today)
            session = LabelSession(grid, experiment, party, terms, folder, simulation, front, gone)
            if terms.mode == "train" and not resume:
                for line in unread_columns(party, session.data):
                    session.say(line)
            label, reports = session.play()
            if terms.mode == "train":
                session.ledger.end(terms.run, label.weights_digest())
            _conclude(folder, own_folder(party, terms), terms, label, reports)
        except Exception as error:
            problem = error if isinstance(error, VFLError) else unexpected(error, party.party)
            if problem is not error:
                _say(redacted_traceback(error))
            _say(str(problem))
            if front is None:
                with suppress(StorageError):  # a full disk cannot store the error about itself
                    folder.fail(problem, terms.mode)
            # Flower logs this error; the error's causes are dropped, because they may quote a table
            # value
            raise problem from None


def _gone(terms: Terms, today: Collection[str] | None) -> list[str]:
    """Return the parties of a run that have left the project since its training.

    Raises:
        MissingPartyError: the session cannot run without the parties that have left.
    """
    gone = [] if today is None else [one for one in terms.feature_parties if one not in today]
    whole = secure_mode.make(terms.secure).whole_network
    without = terms.mode in ("predict", "serve") and terms.missing_rows == "token" and not whole
    if gone and not without:
        raise MissingPartyError(
            f"party '{gone[0]}' has left this project",
            where=f"run '{terms.run}', in which it took part",
            want="for a prediction or a service without this party: a network that was trained "
            'with data.missing_rows = "token"',
            fix="train again with the present parties: vfl train PROJECT",
        )
    return gone


def parties_of_today(party: PartyFile, told: Collection[str] | None) -> Collection[str] | None:
    """Return the project's feature parties of today; they may have changed since a service began.

    Args:
        party: the label party's own file, which is in the folder of the project's experiment.
        told: feature parties with which the session was submitted; None stands for the parties of
            the run.
    """
    file = party.path.parent / "app" / "experiment.toml"
    return read_experiment(file).feature_parties if told is not None and file.exists() else told


def _serve(
    grid: Grid,
    experiment: Experiment,
    party: PartyFile,
    terms: Terms,
    simulation: bool,
    today: Collection[str] | None,
) -> None:
    """Serve a run, then each run to which `vfl promote` asks to switch.

    If a switch fails, keep the current run.
    """
    first = RunFolder.open(party.run_path(terms.run))

    def session_of(experiment: Experiment, terms: Terms) -> Play:
        now = parties_of_today(party, today)
        _gone(terms, now)  # check this before the service waits for these parties
        settings: dict[str, Any] = {"simulation": simulation, "today": now}
        return lambda front: run_session(grid, experiment, party, terms, front=front, **settings)

    front: ServingFront | None = None

    def opened(folder: Path) -> Play:
        assert front is not None, "the service of the first run receives this request"
        trained = RunFolder.open(folder).experiment()
        trained = trained.model_copy(update={"federation": experiment.federation})
        asked = own_terms(trained, "serve", folder.name, party)
        return session_of(trained, asked.served_with(front.tasks))

    try:
        front = FRONTS.member("http").open_lead(party, terms.run)
        play = session_of(experiment, terms.served_with(front.tasks))
        served = serve_in_turn(front, terms.run, play, opened, _into_log_of(first))
        write_json(first.path / "served.json", {"served": served})
    except VFLError as error:
        with suppress(StorageError):
            first.fail(error, "serve")
        raise
    finally:
        if front is not None:
            front.close()


@dataclass(frozen=True)
class _Attempt:
    """One attempt at a session, after its parties have connected.

    Attributes:
        number: number of restarts before this attempt.
        start: number of the exchange with which this attempt begins.
        federation: connection to Flower and to the parties.
        links: links to the connected parties, by party.
        meter: spending of this party in the session, for its session ledger; all attempts share it.
        ledger: traffic of this attempt, for the session's results.
    """

    number: int
    start: int
    federation: Federation
    links: Mapping[str, ObservedPoll]
    meter: Meter
    ledger: Ledger


class LabelSession:
    """The label party's part in one session, including restarts after the loss of a party."""

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        party: PartyFile,
        terms: Terms,
        folder: RunFolder,
        simulation: bool = False,
        front: ServingFront | None = None,
        gone: Sequence[str] = (),
    ) -> None:
        self.gone = gone
        self.grid = grid
        self.experiment = experiment
        self.party = party
        self.terms = terms
        self.folder = folder
        self.simulation = simulation
        self.front = front
        self._waiting_for = WaitingFor(terms.mode, self._tell)
        self.ledger = own_ledger(party)
        with self.ledger.refusing(terms):
            check_explained(terms, party.consent)
        self._load()
        self.checkpoints = own_checkpoints(party, terms)
        if terms.mode == "train" and (run := terms.train.warm_start) is not None:
            require_same_top(RunFolder.open(party.run_path(run)).experiment(), experiment)
        self.ranks = party.ranks if terms.mode == "train" else 1
        if self.ranks > 1:
            refuse_trace(party, self.ranks)
            refuse_ranks(terms, self.data.split, self.ranks)
            if simulation:
                raise ConfigError(
                    "in a simulation, each party has only one rank", where="node.ranks"
                )
        if front is not None:
            self.say(front.welcome)

    def _load(self) -> None:
        """Load the label party's rows, and pass them to the HTTP service if there is one."""
        party, terms, front = self.party, self.terms, self.front
        self.alignment = own_alignment(party, terms)
        self.data = own_data(party, terms, self.experiment.label.task)
        if front is not None:
            require_servable(terms, front.partial)
            own = own_folder(party, terms)
            asked = [name for name in rules.peers(terms) if name not in terms.serving]
            front.show(terms.run, asked, self.data, own.classes(), own.drift())

    @property
    def _partial(self) -> bool:
        """Return whether the session may answer rows without absent parties."""
        return self.front is not None and (self.front.partial or bool(self.data.held))

    def _tell(self, report: ProgressReport) -> None:
        self.folder.progress(report.record())

    def _waits(self, parties: Sequence[str]) -> None:
        """Report to the user and to the HTTP service for which parties the session waits."""
        self._waiting_for(parties)
        if self.front is not None:
            self.front.waits_for(parties)

    def _watched(self, schedule: Iterable[Exchange], split: Split) -> Iterator[Exchange]:
        """Yield a schedule's exchanges, and write the progress to the run's folder."""
        return SessionProgress(self.terms, split, self._tell).through(schedule)

    def say(self, line: str) -> None:
        """Write a line about the session to standard output and to the run's folder."""
        _into_log_of(self.folder)(line)

    def play(self) -> tuple[AnyLabelParty, list[PartyReport]]:
        """Run the session to its end.

        After the loss of a party, a training continues from its last checkpoint.

        Raises:
            DisagreementError: the run's name belongs to another session at this party.
            VFLError: the error that ended the session.
        """
        with self.ledger.session(self.terms) as (entry, meter, sent):
            terms, split = self.terms, self.data.split
            streams = [
                frame_limits(terms, name, split)
                for name in terms.feature_parties
                if not secure_mode.shares_weights(terms)
            ]
            if terms.takers:
                links = [limits_of_links(terms, name, split) for name in rules.peers(terms)]
                streams = [one for own in links for one in own]
            meter.most = most_of_an_epoch(terms, split, streams)
            own = own_state(self.party, terms, entry, self.data, self.checkpoints, sent)
            label, reports = self._play(own, meter)
            assert meter.standing is not None, "a session has one"
            meter.standing.conclude({report.party: report.count for report in reports})
            return label, reports

    def _play(self, own: Own, meter: Meter) -> tuple[AnyLabelParty, list[PartyReport]]:
        settings = self.experiment.federation
        restarts = 0
        # A run that is resumed may have lost a party before; Flower takes a minute to notice that
        # party's dead node.
        resumed = self.checkpoints is not None and self.checkpoints.committed() > 0
        most: int | None = None
        said = ""
        for attempt in count():
            again = resumed or attempt > 0
            attempt = min(attempt, _MOST_ATTEMPTS)
            # then the other parties need not wait for a lost party
            again = again and not self._partial
            patience = settings.restart_timeout_s if again else settings.join_timeout_s
            start = self._start(most)
            try:
                return self._attempt(patience, attempt, start, own, meter)
            except ErasedRowsError as erased:
                if start:
                    raise
                withdraw(self.party, self.terms, erased.places)
                self._load()
                self.say(erased.what)
            except MisalignedError as changed:
                if self.front is None or not self.front.lost(changed):
                    raise
                said = self._load_new_rows(changed, said)
            except _LOSSES as loss:
                if self.front is not None and self.front.lost(loss):
                    said = self._goes_on(loss, said)
                    continue
                if not isinstance(loss, LostPeerError):
                    raise
                if self.checkpoints is None or restarts == settings.max_restarts:
                    raise
                restarts += 1
                step = self.checkpoints.committed()
                where = f"restart {restarts} of {settings.max_restarts}, from exchange {step}"
                self.say(f"{loss.what}; {where}")
            except PeerFailedError as failure:
                if self.front is not None and self.front.lost(failure):
                    said = self._goes_on(failure, said)
                    continue
                if failure.peer_code != CheckpointError.code or start == 0:
                    raise
                most = start - 1
                self.say(f"{failure.what}; the session returns to an older checkpoint")
        raise AssertionError("the loop over attempts never ends")

    def _load_new_rows(self, changed: MisalignedError, said: str) -> str:
        """Load the rows again, after a party returned with rows of a newer alignment."""
        what = f"{changed.what}; the service continues with the rows of the present tables"
        try:
            self._load()
        except MisalignedError as own:  # the label party's own table is newer than its alignment
            if self.front is not None:
                self.front.waits_for_alignment()
            what = (
                f"{own.what}; the service continues after vfl align has aligned the rows of all "
                "parties"
            )
        if what != said:
            self.say(what)
        return what

    def _goes_on(self, error: VFLError, said: str) -> str:
        """Print why a service waits, unless the same reason was printed last; return the reason."""
        if error.what != said:
            who = "a party is" if self._partial else "all parties are"
            self.say(f"{error.what}; the service continues when {who} connected again")
        return error.what

    def _start(self, most: int | None) -> int:
        """Return the exchange before which this party saved its newest undamaged checkpoint.

        Args:
            most: newest checkpoint that may be undamaged at the other parties; None stands for the
                committed checkpoint.
        """
        if self.checkpoints is None:
            return 0
        committed = self.checkpoints.committed()
        start = newest_common([self.checkpoints], committed if most is None else most)
        if start < committed:
            self.say(
                f"checkpoint {committed} cannot be used; the training continues from exchange "
                f"{start}"
            )
        return start

    def _attempt(
        self, patience_s: float, number: int, start: int, own: Own, meter: Meter
    ) -> tuple[AnyLabelParty, list[PartyReport]]:
        terms, party, ledger = self.terms, self.party, Ledger()
        settings, device = self.experiment.federation, device_of(own.device, 0)
        patience = settings.step_timeout_s + settings.rejoin_window_s + _RANKS_S
        patience = max(patience, settings.join_timeout_s)
        recorders = own_recorders(party, terms, self.data, self.checkpoints)
        with (
            Federation(
                self.grid,
                terms,
                settings,
                self.data,
                patience_s,
                self.say,
                number,
                simulation=self.simulation,
                waiting=self._waits,
                partial=self._partial,
                standing=meter.standing,
                alignment=self.alignment,
                gone=self.gone,
            ) as federation,
            further_ranks(party, self.ranks, patience, device) as ranks,
        ):
            open_ranks: OpenRanks | None = None
            if self.ranks > 1:
                whose = (ranks, party, self.experiment, terms, federation.session, start)
                open_ranks = partial(start_ranks, *whose)
            links = federation.join([self._counted(ledger), meter, *recorders], start, open_ranks)
            attempt = _Attempt(number, start, federation, links, meter, ledger)
            if secure_mode.make(terms.secure).whole_network:
                return self._play_whole_network(attempt, own)
            return self._play_top(attempt, own, ranks, recorders)

    def _counted(self, ledger: Ledger) -> Observer:
        """Return an observer that adds frames to a ledger.

        Relayed frames count only in two cases: with a middle party those on the streams of feature
        parties, and for a whole network all of them.
        """
        carried = self.terms.feature_parties if self.terms.middle is not None else ()
        if secure_mode.make(self.terms.secure).whole_network:
            carried = rules.peers(self.terms)

        def count(party: str, way: str, frame: Frame) -> None:
            if not frame.peer or party in carried:
                ledger(party, way, frame)

        return count

    def _model(self, ledger: Ledger) -> tuple[Objective, dict[str, Any]]:
        """Return the session's objective, and the label party's records and initial weights."""
        trains, folder = self.terms.mode == "train", own_folder(self.party, self.terms)
        classes = self.data.classes if trains else folder.classes()
        objective = Objective.of(self.experiment.label, 1 if classes is None else len(classes))
        records = Records(ledger, self.folder.epoch) if trains else Records(ledger)
        begins = earlier_folder(self.party, self.terms) if trains else folder
        weights = {} if begins is None else {"weights": begins.weights()}
        return objective, {"records": records, **weights}

    def _play_whole_network(
        self, attempt: _Attempt, own: Own
    ) -> tuple[AnyLabelParty, list[PartyReport]]:
        """Run a session of a network in which no party sends a cut; see `WholeNetwork`."""
        federation, links, meter = attempt.federation, attempt.links, attempt.meter
        objective, more = self._model(attempt.ledger)
        named, ends = (federation.session, attempt.number), self._with_absent(links)
        receive = partial(receive_any, links)
        label = WholeNetworkLabel(
            self.data, self.terms, named, ends, receive, own, objective,
            agreed=federation.agree, **more,
        )  # fmt: skip
        if self.front is not None:
            label.begin()
            return self._end(label, federation, self._serve(self.front, label, attempt, ends))
        label.play(
            attempt.start,
            lambda schedule: self._watched(meter.through(schedule), label.split),
        )
        federation.collect(_COLLECT_S)
        return label, label.reports

    def _play_top(
        self, attempt: _Attempt, own: Own, ranks: FurtherRanks, recorders: Sequence[Recorder]
    ) -> tuple[AnyLabelParty, list[PartyReport]]:
        """Run a session in which the label party has the whole top model."""
        terms, data, party = self.terms, self.data, self.party
        federation, meter, start = attempt.federation, attempt.meter, attempt.start
        objective, more = self._model(attempt.ledger)
        ends: Mapping[str, Link]
        if self.ranks > 1:
            links = attempt.links.items()
            ends = {name: ranks.watch(link, f"party '{name}'") for name, link in links}
            own = replace(own, device=device_of(own.device, 0), ranks=ranks.join_group(data))
        else:
            ends = self._ends_of(attempt.links)
            if terms.mode == "train":
                use_threads(party.threads, top_step(terms, objective))
        label = LabelParty(data, terms.at_label(), ends, own, objective, **more)
        if columns := label.aggregator.begin():
            mode = secure_mode.make(terms.secure)
            layers = mode.layers(columns, terms.merged_width, terms.label_party)
            meter.most = most_of_an_epoch(terms, data.split, federation.agree(layers))
        label.aggregator.without = self.gone
        label.resume(start)
        if self.front is not None:
            return self._end(label, federation, self._serve(self.front, label, attempt, ends))
        followed = label.stopping.follow(rules.schedule(terms, data.split, start))
        followed = own.ranks.metered(followed, meter.bytes)
        schedule = self._watched(meter.through(followed), label.split)
        weights = {party.party: label.weights}
        with recording(recorders, schedule, start, weights, _say) as exchanges:
            label.run(exchanges)
        ranks.agree(label.weights_digest())
        ended = {n: one.link for n, one in label.ends.items() if n not in self.gone}
        return self._end(label, federation, ends if terms.takers else ended)

    def _ends_of(self, links: Mapping[str, ObservedPoll]) -> Mapping[str, Link]:
        """Return a link to every party; with a switchboard if other parties exchange messages."""
        terms = self.terms
        if not terms.takers:
            return self._with_absent(links)

        def pairs(sender: str, receiver: str) -> bool:
            return (sender in terms.takers) is not (receiver in terms.takers)

        window = rules.window_frames(terms)
        board = Switchboard(links, partial(receive_any, links), pairs, window)
        if self.front is None:
            return board.links
        behind, names = terms.middle is not None, terms.at_label().feature_parties
        return board.links | {name: Carried(board, name, links, behind) for name in names}

    def _with_absent(self, links: Mapping[str, ObservedPoll]) -> dict[str, Link]:
        """Return a link to every party; the link to an absent party discards all sent frames."""
        return {n: links.get(n) or local_pair()[0] for n in rules.peers(self.terms)}

    def _serve(
        self,
        front: ServingFront,
        label: LabelParty | WholeNetworkLabel,
        attempt: _Attempt,
        ends: Mapping[str, Link],
    ) -> Mapping[str, Link]:
        """Let the HTTP service answer requests until it ends.

        Return links to the connected parties.
        """
        terms = self.terms
        absent = [name for name in rules.peers(terms) if name not in attempt.links]
        for name in absent:
            self.say(f"party {name} is absent; the service begins without this party")
        serving = ServingParty(
            label,
            away=attempt.federation if self._partial else None,
            absent=absent,
            behind=terms.feature_parties if terms.middle is not None else (),
            asker=(0, 1 + len(terms.serving)),
        )
        self._tell(ProgressReport("serve"))
        try:
            front.play(serving)
        finally:
            attempt.meter.rows += label.progress.asked_rows
        serving.close()
        for name in terms.serving:
            ends[name].send(Frame(Kind.DONE))
        if terms.takers:
            return ends
        return {n: end.link for n, end in label.ends.items() if n not in serving.absent}

    def _end(
        self,
        label: LabelParty | WholeNetworkLabel,
        federation: Federation,
        links: Mapping[str, Link],
    ) -> tuple[AnyLabelParty, list[PartyReport]]:
        """Receive the reports of all connected parties; announce the end of the session."""
        reports = [PartyReport.of(link.receive(), name) for name, link in links.items()]
        for link in [*links.values(), *label.aggregator.helpers]:
            link.send(Frame(Kind.DONE))
        federation.close()
        federation.collect(_COLLECT_S)
        return label, reports


def _conclude(
    folder: RunFolder,
    own: PartyFolder,
    terms: Terms,
    label: AnyLabelParty,
    reports: list[PartyReport],
) -> None:
    digests = [(report.party, report.weights_sha256) for report in reports]
    # a third party that helps to train has no part of the model
    if secure_mode.make(terms.secure).helps_to_train:
        digests = [one for one in digests if one[0] != rules.dealer(terms)]
    weights = joint_digest([*digests, (label.data.name, label.weights_digest())])
    everybody = {name for name, _ in digests} >= {*terms.feature_parties, *terms.tasks}
    if terms.mode != "train" and everybody:
        folder.check_weights(weights)
    if terms.mode == "serve":
        return
    summary = summarise(label, weights, str(folder.path), terms)
    if terms.mode == "predict":
        own.save_predicted(label.data)
        own.save_explained(label.data, terms, label.column_values())
        path, classes = folder.path / "predictions.csv", own.classes()
        answered = label.outputs, classes, label.remarked, label.uncalibrated
        write_predictions(path, label.data, *answered)
        return
    if terms.mode == "evaluate":
        own.save_explained(label.data, terms, label.column_values())
        if terms.beside:
            names = [terms.run, *terms.beside]
            summary |= {"common_rows": len(label.data.split.test), "beside": sorted(names)}
        folder.evaluated(summary)
        return
    answers = torch.cat(label.tested) if label.tested else None
    own.save(
        label.data,
        terms,
        label.weights(),
        test_figures(summary),
        answers,
        label.privacy(),
        label.figures(),
    )
    folder.finish(summary, label.ledger, label.progress.kept_scores())


def _into_log_of(folder: RunFolder) -> Callable[[str], None]:
    """Return a function that prints a line, and appends it to the run's log if possible."""

    def say(line: str) -> None:
        _say(line)
        with suppress(StorageError):
            folder.note(line)

    return say


def _say(line: str) -> None:
    print(line, flush=True)
