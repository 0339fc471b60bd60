"""Gain and cost of several cuts in flight, or of local steps, over a slow network link.

The label party and the feature parties run in separate processes with slow emulated links between
them (`benchmarks.emulation`). With computed links, one process runs all parties and computes the
times. The trainings with different numbers of cuts in flight start from the same weights and use
the same batches. The label party's clock measures only the training; the tests in between do not
count. Before each test, the label party waits for all gradients in flight, as it does at the end of
every epoch anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

from benchmarks import harness
from benchmarks.emulation import LinkModel, Wan, choose, open_network
from benchmarks.session import SessionJob, play_feature, play_label, start
from benchmarks.worker import BenchmarkWorker, Parent, processes
from vfl.clients import FeatureParty
from vfl.config import DataSettings, Experiment, with_overrides
from vfl.config.experiment import LabelSettings, PartySettings, TrainSettings
from vfl.config.toml import Settings
from vfl.core.errors import ConfigError
from vfl.core.seeds import Secret
from vfl.core.traffic import Ledger
from vfl.datasets import Dealing, PartyData, load_bundled
from vfl.experiments.plan import check_specs
from vfl.session import Exchange, Terms
from vfl.session.exchange import Own
from vfl.session.label import LabelParty, Objective, Records
from vfl.session.schedule import queries, steps_per_epoch, training
from vfl.training.local import LocalSession
from vfl.transport import HubLink, TcpLink, local_pair
from vfl.transport.link import Observed

TESTS_AN_EPOCH = 4


class WanJob(SessionJob):
    """One party's part in a training over a slow link, as a job for its process.

    Attributes:
        experiment: experiment to train; its pictures are cut into strips, one strip for each
            feature party.
        tests: number of evaluations of the test rows in each epoch.
        rows: number of rows of the data set to use.
        wan: network link of every party, if links are computed; one process then runs all parties.
    """

    experiment: Experiment
    tests: int
    rows: int | None = None
    wan: str = ""


class Mark(Settings):
    """Progress of a training at one test.

    Attributes:
        exchanges: batches trained.
        seconds: seconds of training so far at the label party, without the tests.
        bytes: bytes of training so far, of all parties in both directions.
        accuracy: fraction of the test rows that the model classifies correctly.
    """

    exchanges: int
    seconds: float
    accuracy: float
    bytes: int = 0


class Marks(Settings):
    """Result of a training over a slow link; a feature party has no marks."""

    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class WanRow:
    """Result of a training over the slow link.

    Attributes:
        in_flight: largest number of cuts that are sent before their gradients have arrived.
        local_steps: number of optimiser steps of every party per exchange.
        exchanges_per_second: training exchanges per second, over the whole training.
        exchanges, seconds, bytes: training exchanges, seconds and bytes until a test first reached
            the accuracy; None if no test did.
        final_accuracy: accuracy in the last test.
        best_accuracy: highest accuracy of all tests.
        speedup: time until a test reached the accuracy in the first row, divided by this time in
            this row.
        accuracies: accuracy in every test, in order.
    """

    in_flight: int
    local_steps: int
    exchanges_per_second: float
    exchanges: int | None
    seconds: float | None
    bytes: int | None
    final_accuracy: float
    best_accuracy: float
    speedup: float | None
    accuracies: tuple[float, ...]


def wan_experiment(
    source: str,
    codec: str = "none",
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    epochs: int = 3,
    seed: int = 0,
) -> Experiment:
    """Return an experiment on two halves of pictures: bottoms n-64-32, top 64-64-classes, Adam."""
    party = PartySettings(width=32, bottom="mlp:hidden=64")
    return Experiment(
        name="wan",
        seed=seed,
        codec=codec,
        data=DataSettings(source=source, validation=0.0),
        parties={"left": party, "right": party},
        label=LabelSettings(top="mlp:hidden=64"),
        train=TrainSettings(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate),
    )


def bench_wan(
    in_flight: Sequence[int] = (1, 5),
    wan: Wan = Wan(80, 40),  # noqa: B008 (it does not change)
    until: float = 0.97,
    *,
    local_steps: Sequence[int] = (1,),
    local_angle: float = 0.0,
    source: str = "mnist",
    codec: str = "none",
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    epochs: int = 3,
    seed: int = 0,
    network: str = "auto",
    tests: int = TESTS_AN_EPOCH,
    rows: int | None = None,
) -> list[WanRow]:
    """Train over a slow link; measure seconds, exchanges and bytes until an accuracy is reached.

    Args:
        in_flight: values of train.in_flight; the first value is the reference for the others.
        wan: network link of every party.
        until: accuracy on the test rows until which the time is measured, from 0 to 1.
        local_steps: values of train.local_steps; each value is combined with every compatible value
            of train.in_flight.
        local_angle: value of train.local_angle for local steps above 1.
        source: data set of pictures; each picture is cut in half.
        codec: codec of the cuts.
        batch_size: number of rows in an exchange.
        learning_rate: learning rate of Adam at every party.
        epochs: number of passes over the training rows.
        seed: seed of rows and initial weights.
        network: kind of the emulated network: auto, tun, proxy or model; see
            `benchmarks.emulation`.
        tests: number of evaluations of the test rows in each epoch.
        rows: number of rows of the data set to use.

    Raises:
        ConfigError: there is nothing to compare, or a value of train.in_flight is not valid.
        SpecError: the codec cannot be used, or no network has this name.
        UserError: the network is not available on this machine.
        LostPeerError: a process ended early; its standard error says why.
    """
    if wan in (None, Wan()):
        raise ConfigError("nothing to measure", want="a line with a bandwidth or a delay")
    experiment = wan_experiment(source, codec, batch_size, learning_rate, epochs, seed)
    check_specs(experiment)
    asked = []
    for depth, steps in product(in_flight, local_steps):
        angle = [f"train.local_angle={local_angle}"] if steps > 1 else []
        if min(depth, steps) == 1:
            how = [f"train.in_flight={depth}", f"train.local_steps={steps}", *angle]
            asked.append(with_overrides(experiment, how))
    kind = choose(network)
    found: list[WanRow] = []
    for each in asked:
        train = each.train
        harness.say(f"{train.in_flight} in flight, {train.local_steps} local, {wan}, {kind}")
        job = WanJob(party=each.label.party, experiment=each, tests=tests, rows=rows)
        marks = _compute(job, wan) if kind == "model" else _train(job, wan, kind)
        found.append(_row(train, marks, until, found[0].seconds if found else None))
    return found


TABLE = harness.table(
    ("in flight", ">9", "in_flight"),
    ("local", ">7", "local_steps"),
    ("exchanges/s", ">13.1f", "exchanges_per_second"),
    ("exchanges", ">11", lambda row: row.exchanges or "never"),
    ("MB", ">9.2f", lambda row: None if row.bytes is None else row.bytes / 1e6),
    ("seconds", ">9.1f", "seconds"),
    ("sooner", ">8.1f", "speedup"),
    ("best", ">9.4f", "best_accuracy"),
    ("final", ">9.4f", "final_accuracy"),
)


def _compute(job: WanJob, wan: Wan) -> Sequence[Mark]:
    """Run one training in a process that runs all parties."""
    with BenchmarkWorker("wan") as worker:
        worker.put(job.model_copy(update={"wan": str(wan)}))
        return worker.get(Marks).marks


def _train(job: WanJob, wan: Wan, kind: str) -> Sequence[Mark]:
    """Run one training with a process for each party and slow links between them."""
    parties = (job.party, *job.experiment.feature_parties)
    with open_network(parties, wan, kind) as network, processes("wan", network) as workers:
        start(workers, network, job.party, job)
        of_label, *_ = [worker.get(Marks) for worker in workers.values()]
        return of_label.marks


def _row(
    train: TrainSettings, marks: Sequence[Mark], until: float, first_seconds: float | None
) -> WanRow:
    reached = next((mark for mark in marks if mark.accuracy >= until), None)
    seconds = reached.seconds if reached else None
    return WanRow(
        in_flight=train.in_flight,
        local_steps=train.local_steps,
        exchanges_per_second=marks[-1].exchanges / marks[-1].seconds,
        exchanges=reached.exchanges if reached else None,
        seconds=seconds,
        bytes=reached.bytes if reached else None,
        final_accuracy=marks[-1].accuracy,
        best_accuracy=max(mark.accuracy for mark in marks),
        speedup=first_seconds / seconds if first_seconds and seconds else None,
        accuracies=tuple(mark.accuracy for mark in marks),
    )


def short_epochs(terms: Terms, data: PartyData, tests: int) -> Iterator[Exchange]:
    """Yield a training's exchanges in `tests` parts per epoch, each followed by all test rows.

    A part counts as an epoch, so all gradients in flight arrive before each test.
    """
    split, train = data.split, terms.train
    none = split.train[:0]
    steps = steps_per_epoch(len(split.train), train.batch_size)
    part_steps = -(-steps // tests)
    part, step, done = 1, 0, 0
    for exchange in training(terms.seed, train.epochs, train.batch_size, split.train, none, none):
        done += 1
        last = exchange.last or done == part_steps
        yield Exchange(step, "train", part, exchange.rows, last, trained=exchange.trained)
        step += 1
        if last:
            asked = queries(split.test)
            for index, rows in enumerate(asked):
                yield Exchange(step, "test", part, rows, index == len(asked) - 1)
                step += 1
            part, done = part + 1, 0


class Setup:
    """Rows, terms and secret of one job."""

    def __init__(self, job: WanJob) -> None:
        experiment = job.experiment
        self.job = job
        self.terms = Terms.of(experiment, "train", experiment.name)
        parties = load_bundled(
            experiment.data.source,
            self.terms.feature_parties,
            self.terms.label_party,
            Dealing(experiment.seed, validation=experiment.data.validation, limit=job.rows),
            flatten=True,
        )
        self.parties, self.data = parties, parties[job.party]
        # The secret protects no data in this benchmark, and the trainings with all numbers of cuts
        # in flight must start with the same weights.
        self.secret = Secret.of_simulation(experiment.seed, job.party)

    @property
    def outputs(self) -> int:
        """Number of classes of the data set."""
        classes = self.parties[self.terms.label_party].classes
        assert classes is not None, "accuracy is about classes"
        return len(classes)

    def schedule(self) -> Iterator[Exchange]:
        """Return the exchanges of the whole training."""
        return short_epochs(self.terms, self.data, self.job.tests)


def modelled(setup: Setup) -> Marks:
    """Run all parties in this process; seconds are from the label party's computed clock."""
    terms, label = setup.terms, setup.terms.label_party
    model = LinkModel([label, *terms.feature_parties], Wan.parse(setup.job.wan))
    marks: list[Mark] = []
    seconds = 0.0

    def schedule() -> Iterator[Exchange]:
        nonlocal seconds
        for _, part in groupby(setup.schedule(), key=lambda exchange: exchange.epoch):
            began = model.now(label)
            for exchange in part:
                yield exchange
                if exchange.trains and exchange.last:
                    seconds += model.now(label) - began

    def mark(record: dict[str, Any]) -> None:
        accuracy, sent = record["test_accuracy"], _trained_bytes(session.ledger)
        made = Mark(exchanges=record["steps"], seconds=seconds, accuracy=accuracy, bytes=sent)
        marks.append(made)

    session = LocalSession(
        setup.job.experiment,
        setup.parties,
        outputs=setup.outputs,
        connect=lambda party: model.between(label, party, local_pair()),
        on_epoch=mark,
    )
    session.go_on(None, schedule())
    return Marks(marks=tuple(marks))


def _trained_bytes(ledger: Ledger) -> int:
    """Return the bytes of training exchanges so far, headers included."""
    return sum(row.wire_bytes for row in ledger.rows() if row.phase == "train")


def host(setup: Setup, parent: Parent) -> Marks:
    """Run the label party over a stream; return its progress after each test."""
    marks: list[Mark] = []
    label: LabelParty
    ledger = Ledger()

    def mark(record: dict[str, Any]) -> None:
        trained_s, accuracy = label.progress.train_seconds, record["test_accuracy"]
        sent = _trained_bytes(ledger)
        made = Mark(exchanges=record["steps"], seconds=trained_s, accuracy=accuracy, bytes=sent)
        marks.append(made)

    def build(links: dict[str, HubLink]) -> LabelParty:
        nonlocal label
        top = setup.job.experiment.label.top
        label = LabelParty(
            setup.data,
            setup.terms,
            {party: Observed(link, party, "label", [ledger]) for party, link in links.items()},
            Own(setup.secret),
            Objective(top, "classification", setup.outputs),
            records=Records(ledger, mark),
        )
        return label

    play_label(parent, setup.job, setup.terms, build, setup.schedule())
    return Marks(marks=tuple(marks))


def join(setup: Setup) -> Marks:
    """Run a feature party over a stream."""

    def build(link: TcpLink) -> FeatureParty:
        return FeatureParty(setup.data, setup.terms, link, Own(setup.secret))

    play_feature(setup.job, setup.terms, build, setup.schedule())
    return Marks()


def work(parent: Parent) -> None:
    """Run one party of a training, or all parties if the links are computed."""
    setup = Setup(parent.get(WanJob))
    if setup.job.wan:
        parent.put(modelled(setup))
    elif setup.job.party == setup.terms.label_party:
        parent.put(host(setup, parent))
    else:
        parent.put(join(setup))


main = harness.command(bench_wan, TABLE)


if __name__ == "__main__":
    main()
