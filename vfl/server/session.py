"""The label party's way through one session: join, work, restart after a loss, conclude."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import Any

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
from vfl.core.frame import Frame, Kind
from vfl.core.ledger import Ledger
from vfl.core.storage import joint_digest, locked
from vfl.server.federation import Federation
from vfl.server.label_party import AnyLabelParty, LabelParty, Objective
from vfl.server.summary import summarise, test_figures, write_predictions
from vfl.server.whole_network import WholeNetworkLabel
from vfl.session import PartyFolder, PartyReport, Terms, secure, unexpected
from vfl.session.checkpoint import newest_common
from vfl.session.consent import frame_limits, most_of_an_epoch
from vfl.session.exchange import Own
from vfl.session.ledger import Meter
from vfl.session.party_folder import (
    own_checkpoints,
    own_data,
    own_folder,
    own_ledger,
    own_secret,
)
from vfl.session.trace import own_recorders, recording
from vfl.transport import receive_any

_COLLECT_S = 10.0


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

    def play(self) -> tuple[AnyLabelParty, list[PartyReport]]:
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
            secret, device = own_secret(self.party, entry), self.party.device
            own = Own(secret, device=device, checkpoints=self.checkpoints, sent=sent)
            return self._play(own, meter)

    def _play(self, own: Own, meter: Meter) -> tuple[AnyLabelParty, list[PartyReport]]:
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
                return self._attempt(patience, attempt, start, own, meter)
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
        self, patience_s: float, attempt: int, start: int, own: Own, meter: Meter
    ) -> tuple[AnyLabelParty, list[PartyReport]]:
        terms, data, party, trains = self.terms, self.data, self.party, self.terms.mode == "train"
        folder, ledger = own_folder(party, terms), Ledger()
        recorders = own_recorders(party, terms, data, self.checkpoints)
        with Federation(
            self.grid,
            terms,
            self.experiment.federation,
            data,
            patience_s,
            self.say,
            attempt,
            simulation=self.simulation,
        ) as federation:
            links = federation.join([ledger, meter, *recorders], start)
            classes = data.classes if trains else folder.classes()
            objective = Objective.of(self.experiment.label, 1 if classes is None else len(classes))
            more: dict[str, Any] = {"ledger": ledger}
            more |= {"on_epoch": self.folder.epoch} if trains else {"weights": folder.weights()}
            mode = secure.make(terms.secure)
            if mode.whole_network:
                named, agreed = (federation.session, attempt), federation.agree

                def receive() -> tuple[str, Frame]:
                    return receive_any(links)

                whole = WholeNetworkLabel(
                    data, terms, named, links, receive, own, objective, agreed=agreed, **more
                )
                whole.play(start, meter.through)
                federation.collect(_COLLECT_S)
                return whole, whole.reports
            label = LabelParty(data, terms, links, own, objective, **more)
            if columns := label.aggregator.begin():
                layers = mode.layers(columns, terms.merged_width, terms.label_party)
                meter.most = most_of_an_epoch(terms, data.split, federation.agree(layers))
            label.resume(start)
            schedule = meter.through(label.stopping.follow(terms.schedule(data.split, start)))
            weights = {party.party: label.weights}
            with recording(recorders, schedule, start, weights, _say) as exchanges:
                label.run(exchanges)
            ends = label.ends
            reports = [PartyReport.of(end.link.receive(), name) for name, end in ends.items()]
            for link in [*(end.link for end in ends.values()), *label.aggregator.helpers]:
                link.send(Frame(Kind.DONE))
        federation.collect(_COLLECT_S)
        return label, reports


def _conclude(
    folder: RunFolder, own: PartyFolder, label: AnyLabelParty, reports: list[PartyReport]
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
    own.save(label.data, terms, label.weights(), test_figures(summary))
    folder.finish(summary, label.ledger)


def _say(line: str) -> None:
    print(line, flush=True)
