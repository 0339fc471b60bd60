"""The label party's way through one session: join, work, restart after a loss, conclude."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import count

from flwr.serverapp import Grid

from vfl.config import Experiment, PartyFile
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    CheckpointError,
    LostPeerError,
    PeerFailedError,
    StorageError,
    VFLError,
    redacted_traceback,
)
from vfl.core.frame import Frame, Kind, Link
from vfl.core.ledger import Ledger
from vfl.core.seeds import Secret
from vfl.core.storage import joint_digest, locked
from vfl.server.federation import Federation
from vfl.server.label_party import LabelParty, Objective, build_label_party
from vfl.server.summary import summarise, write_predictions
from vfl.server.whole_network import WholeNetworkLabel, build_whole_label
from vfl.session import PartyFolder, PartyReport, Terms, secure, unexpected
from vfl.session.checkpoint import newest_common
from vfl.session.consent import frame_limits, most_of_an_epoch
from vfl.session.exchange import Own
from vfl.session.journal import Journal
from vfl.session.ledger import Entry, Meter
from vfl.session.party_folder import (
    own_checkpoints,
    own_data,
    own_folder,
    own_ledger,
    own_secret,
)
from vfl.session.trace import own_recorders, recording
from vfl.transport import ObservedPoll, receive_any

_COLLECT_S = 10.0
AnyLabel = LabelParty | WholeNetworkLabel


def run_session(
    grid: Grid,
    experiment: Experiment,
    party: PartyFile,
    terms: Terms,
    *,
    resume: bool = False,
    simulation: bool = False,
) -> None:
    """One session at the label party, its run folder included.

    Args:
        grid: Flower's way to the nodes.
        experiment: what is trained.
        party: the label party's own file.
        terms: what the session is about.
        resume: whether the run's folder is there already.
        simulation: whether Flower simulates the nodes; see `Federation`.

    Raises:
        VFLError: told to every party that is still there, and left in the run folder.
    """
    path = party.run_path(terms.run)
    with locked(path):
        if resume:
            folder = RunFolder.reopen(path)
        elif terms.mode == "train":
            folder = RunFolder.create(path, experiment, "federated", "vfl train PROJECT")
        else:
            folder = RunFolder.open(path)
        try:
            session = LabelSession(grid, experiment, party, terms, folder, simulation)
            label, reports = session.play()
            if terms.mode == "train":
                session.ledger.end(terms.run, label.weights_digest())
            _conclude(folder, own_folder(party, terms), label, reports)
        except Exception as error:
            problem = error if isinstance(error, VFLError) else unexpected(error, party.party)
            if problem is not error:
                _say(redacted_traceback(error))
            _say(str(problem))
            with suppress(StorageError):  # a full disk takes no word about itself; the log has it
                folder.fail(problem)
            raise problem from None  # Flower logs what comes out; what led to it may quote a cell


class LabelSession:
    """The label party's way through one session, restarts after lost parties included."""

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        party: PartyFile,
        terms: Terms,
        folder: RunFolder,
        simulation: bool = False,
    ) -> None:
        self.grid = grid
        self.experiment = experiment
        self.party = party
        self.terms = terms
        self.folder = folder
        self.simulation = simulation
        self.data = own_data(party, terms, experiment.label.task)
        self.checkpoints = own_checkpoints(party, terms)
        self.ledger = own_ledger(party)

    def say(self, line: str) -> None:
        """One line about the session, in the log and in the run's folder."""
        _say(line)
        self.folder.note(line)

    def play(self) -> tuple[AnyLabel, list[PartyReport]]:
        """Play it to its end; a training goes on from its last checkpoint when a party is lost.

        Raises:
            DisagreementError: the name stands for another session here.
            VFLError: what ended the session.
        """
        with self.ledger.session(self.terms) as (entry, meter, sent):
            streams = [
                frame_limits(self.terms, name, self.data.split)
                for name in self.terms.feature_parties
                if not secure.shares_weights(self.terms)
            ]
            meter.most = most_of_an_epoch(self.terms, self.data.split, streams)
            return self._play(entry, meter, sent)

    def _play(
        self, entry: Entry, meter: Meter, sent: Journal | None
    ) -> tuple[AnyLabel, list[PartyReport]]:
        settings = self.experiment.federation
        restarts = 0
        # A run that is resumed may have lost somebody as well; Flower frees its node in a minute.
        resumed = self.checkpoints is not None and self.checkpoints.committed() > 0
        most: int | None = None
        for attempt in count():
            again = resumed or attempt > 0
            patience = settings.restart_timeout_s if again else settings.join_timeout_s
            start = self._start(most)
            try:
                return self._attempt(patience, attempt, start, entry, meter, sent)
            except LostPeerError as loss:
                if self.checkpoints is None or restarts == settings.max_restarts:
                    raise
                restarts += 1
                step = self.checkpoints.committed()
                where = f"restart {restarts} of {settings.max_restarts}, from exchange {step}"
                self.say(f"{loss.what}; {where}")
            except PeerFailedError as failure:
                if failure.peer_code != CheckpointError.code or start == 0:
                    raise
                most = start - 1
                self.say(f"{failure.what}; going back to an older checkpoint")
        raise AssertionError("the attempts have no end")

    def _start(self, most: int | None) -> int:
        """The exchange to go on with: of the newest checkpoint that is intact here.

        Args:
            most: the newest that may be intact at the other parties, too; None for what was
                committed.
        """
        if self.checkpoints is None:
            return 0
        committed = self.checkpoints.committed()
        start = newest_common([self.checkpoints], committed if most is None else most)
        if start < committed:
            self.say(f"checkpoint {committed} cannot be used; going on from exchange {start}")
        return start

    def _attempt(
        self,
        patience_s: float,
        attempt: int,
        start: int,
        entry: Entry,
        meter: Meter,
        sent: Journal | None,
    ) -> tuple[AnyLabel, list[PartyReport]]:
        settings = self.experiment.federation
        ledger = Ledger()
        recorders = own_recorders(self.party, self.terms, self.data, self.checkpoints)
        with Federation(
            self.grid,
            self.terms,
            settings,
            self.data,
            patience_s,
            self.say,
            attempt,
            simulation=self.simulation,
        ) as federation:
            links = federation.join([ledger, meter, *recorders], start)
            if secure.make(self.terms.secure).whole_network:
                whole = self._build_whole(federation, links, ledger, own_secret(self.party, entry))
                whole.play(start, meter.through)
                federation.collect(_COLLECT_S)
                return whole, whole.reports
            label = self._build(links, ledger, own_secret(self.party, entry), sent)
            federation.agree(label.aggregator.begin())
            label.resume(start)
            schedule = label.stopping.follow(self.terms.schedule(self.data.split, start))
            schedule = meter.through(schedule)
            weights = {self.party.party: label.weights}
            with recording(recorders, schedule, start, weights, _say) as exchanges:
                label.run(exchanges)
            reports = _farewell(label)
        federation.collect(_COLLECT_S)
        return label, reports

    def _build_whole(
        self,
        federation: Federation,
        links: Mapping[str, ObservedPoll],
        ledger: Ledger,
        secret: Secret,
    ) -> WholeNetworkLabel:
        trains = self.terms.mode == "train"
        own = own_folder(self.party, self.terms)
        classes = self.data.classes if trains else own.classes()
        return build_whole_label(
            self.data,
            self.terms,
            (federation.session, federation.attempt),
            links,
            lambda: receive_any(links),
            Own(secret, device=self.party.device, checkpoints=self.checkpoints),
            Objective.of(self.experiment.label, 1 if classes is None else len(classes)),
            weights=None if trains else own.weights(),
            ledger=ledger,
            on_epoch=self.folder.epoch if trains else lambda record: None,
            agreed=federation.agree_on,
        )

    def _build(
        self,
        links: Mapping[str, Link],
        ledger: Ledger,
        secret: Secret,
        sent: Journal | None,
    ) -> LabelParty:
        trains = self.terms.mode == "train"
        own = own_folder(self.party, self.terms)
        classes = self.data.classes if trains else own.classes()
        return build_label_party(
            self.data,
            self.terms,
            links,
            Own(secret, device=self.party.device, checkpoints=self.checkpoints, sent=sent),
            Objective.of(self.experiment.label, 1 if classes is None else len(classes)),
            weights=None if trains else own.weights(),
            ledger=ledger,
            on_epoch=self.folder.epoch if trains else lambda record: None,
        )


def _farewell(label: LabelParty) -> list[PartyReport]:
    """Every party's last word, and ours to them."""
    reports = [PartyReport.of(end.link.receive(), name) for name, end in label.ends.items()]
    for link in [*(end.link for end in label.ends.values()), *label.aggregator.helpers]:
        link.send(Frame(Kind.DONE))
    return reports


def _conclude(
    folder: RunFolder, own: PartyFolder, label: AnyLabel, reports: list[PartyReport]
) -> None:
    terms = label.terms
    digests = [(report.party, report.weights_sha256) for report in reports]
    weights = joint_digest([*digests, (label.data.name, label.weights_digest())])
    if terms.mode != "train":
        folder.check_weights(weights)
    summary = summarise(label, weights, str(folder.path))
    if terms.mode == "predict":
        write_predictions(folder.path / "predictions.csv", label.data, label.outputs, own.classes())
        return
    if terms.mode == "evaluate":
        folder.evaluated(summary)
        return
    own.save(label.data, terms, label.weights())
    folder.finish(summary, label.ledger)


def _say(line: str) -> None:
    print(line, flush=True)
