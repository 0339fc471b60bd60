"""One training step as benchmarks measure it: its network, its variant and its timing.

`work` runs in each process of a variant; `benchmarks.step` and `benchmarks.secure` compare the
variants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn, optim

from benchmarks.emulation import LinkModel, Wan
from benchmarks.session import SessionJob, play_feature, play_label
from benchmarks.worker import Parent
from vfl import models
from vfl.clients import FeatureParty
from vfl.config import Experiment
from vfl.config.experiment import LabelSettings, PartySettings, TrainSettings
from vfl.config.toml import Settings
from vfl.core.seeds import Secret, derive, generator, scoped
from vfl.core.traffic import Ledger
from vfl.datasets import PartyData, Split
from vfl.datasets.party import digest_of
from vfl.mpc.secure.keys import Agreement
from vfl.session import Exchange, Terms, rules, secure_mode
from vfl.session.exchange import Own
from vfl.session.label import LabelParty, Objective, Records
from vfl.session.label.task import Classification, Meter
from vfl.session.ranks.group import ALONE, Ranks
from vfl.session.ranks.processes import store_at
from vfl.session.secure_mode import shares_weights
from vfl.training.cutting import split
from vfl.training.local import Connect, LocalSession
from vfl.training.split import SplitModule
from vfl.transport import HubLink, Observed, TcpLink, local_pair

#: Variants of a training: a monolith, a `SplitModule`, a network cut by `vfl.split`, all parties in
#: one process, streams without TLS, streams with TLS, and computed network links.
Path = Literal["monolith", "module", "split", "inprocess", "tcp", "tls", "model"]
PATHS: tuple[Path, ...] = ("monolith", "module", "split", "inprocess", "tcp", "tls")
#: Variants that need no stream, for computed network links.
MODEL_PATHS: tuple[Path, ...] = ("monolith", "inprocess", "model")
FEATURE_PARTIES = ("left", "right")
LABEL_PARTY = "label"
#: Number of batches in the fixed data; after all batches have been used, their order is drawn anew.
EPOCH_STEPS = 20
_MEETING_S = 120.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One network and its training, the same for every variant.

    Attributes:
        model: "cnn" or "mlp", as in the result rows of a benchmark.
        batch_size: number of rows in a step.
        width: width of each feature party's cut.
        shape: shape of one row at a feature party.
        bottom, top: specs of the bottom and top models.
        outputs: number of classes.
        steps: number of timed steps in a turn; about one second of work.
        aims: target: largest CPU time that each variant should take, relative to the monolith.
        merge: "concat" or "sum".
        parties: names of the feature parties.
    """

    model: str
    batch_size: int
    width: int
    shape: tuple[int, ...]
    bottom: str
    top: str
    outputs: int
    steps: int
    aims: Mapping[str, float] = field(default_factory=dict)
    merge: Literal["concat", "sum"] = "concat"
    parties: tuple[str, ...] = FEATURE_PARTIES

    @property
    def rows(self) -> int:
        """Number of rows of the fixed data."""
        return EPOCH_STEPS * self.batch_size

    @property
    def merged_width(self) -> int:
        """Width of the input of the top model."""
        return self.width * (len(self.parties) if self.merge == "concat" else 1)

    def experiment(self, seed: int, total_steps: int) -> Experiment:
        """Return an experiment with at least this number of training steps; SGD with momentum."""
        party = PartySettings(width=self.width, bottom=self.bottom)
        return Experiment(
            name="bench",
            seed=seed,
            merge=self.merge,
            parties=dict.fromkeys(self.parties, party),
            label=LabelSettings(party=LABEL_PARTY, top=self.top),
            train=TrainSettings(
                epochs=-(-total_steps // EPOCH_STEPS),
                batch_size=self.batch_size,
                optimizer="sgd",
                learning_rate=0.05,
                momentum=0.9,
            ),
        )


def _mlp(batch_size: int, width: int, steps: int, **aims: float) -> Workload:
    """Return a workload with bottoms of widths 10-128-128-width and a top of 2*width-64-2."""
    return Workload(
        model="mlp",
        batch_size=batch_size,
        width=width,
        shape=(10,),
        bottom="mlp:hidden=128-128",
        top="mlp:hidden=64",
        outputs=2,
        steps=steps,
        aims=aims,
    )


WORKLOADS: dict[str, Workload] = {
    "mlp_small": _mlp(batch_size=64, width=128, steps=500, module=1.3, split=1.3, tls=2.2),
    "mlp": _mlp(batch_size=256, width=1280, steps=60, inprocess=1.15),
    "cnn": Workload(
        model="cnn",
        batch_size=64,
        width=128,
        shape=(1, 28, 14),
        bottom="cnn",
        top="mlp:hidden=64",
        outputs=10,
        steps=60,
        aims={"module": 1.1, "split": 1.1, "inprocess": 1.05, "tls": 1.35},
    ),
}

#: A single linear layer on 500 of 1000 columns at each party, where a secure sum costs most.
SUMMED = Workload(
    model="linear",
    batch_size=128,
    width=500,
    shape=(500,),
    bottom="mlp:hidden=none",
    top="mlp:hidden=64",
    outputs=2,
    steps=100,
    merge="sum",
)
#: Halves of colour pictures as in CIFAR-10, which are enough work for a GPU.
PICTURES = Workload(
    model="resnet20",
    batch_size=256,
    width=128,
    shape=(3, 32, 16),
    bottom="resnet20",
    top="mlp:hidden=64",
    outputs=10,
    steps=20,
)
#: Sums of cuts of width 64 with little computation, so that the cost of the label party's streams
#: is visible.
MANY = {
    f"many_{count}": Workload(
        model="mlp",
        batch_size=64,
        width=64,
        shape=(4,),
        bottom="mlp:hidden=none",
        top="mlp:hidden=64",
        outputs=2,
        steps=40,
        merge="sum",
        parties=tuple(f"party{number}" for number in range(count)),
    )
    for count in (2, 4, 8, 16, 32, 64)
}
#: The same networks with eight feature parties, whose cuts are concatenated.
EIGHT = {
    f"{name}_8": replace(workload, parties=tuple(f"party{number}" for number in range(8)), aims={})
    for name, workload in WORKLOADS.items()
}
#: One feature party, and batches large enough to be divided among its ranks.
SHARED = {
    f"shared_{name}": replace(WORKLOADS[name], batch_size=512, parties=("left",), aims={})
    for name in ("mlp", "cnn")
}
#: The workload of a single rank, if a party has eight ranks.
EIGHTHS = {f"{name}_8th": replace(shared, batch_size=64) for name, shared in SHARED.items()}
KNOWN: dict[str, Workload] = (
    WORKLOADS | {"summed": SUMMED, "pictures": PICTURES} | MANY | EIGHT | SHARED | EIGHTHS
)


class StepJob(SessionJob):
    """Job: one measurement, or the part of one process in a measurement.

    Attributes:
        path: measured path.
        workload: its name.
        seed: seed of rows, weights and batch order.
        warmup_steps: number of steps before the measurement begins.
        steps: timed steps.
        secure: the secure mode.
        codec: codec of the cut.
        wan: network link of every party, for computed links.
        rank, ranks: rank of the process, and number of ranks of its party.
        meeting: folder in which the ranks of a party find each other.
        threads: number of torch threads of each process.
    """

    path: Path
    workload: str
    seed: int
    warmup_steps: int
    steps: int
    secure: str = "none"
    codec: str = "none"
    wan: str = ""
    rank: int = 0
    ranks: int = 1
    meeting: str = ""
    threads: int = 1


class Measurement(Settings):
    """Measurement of one process over the timed steps.

    Attributes:
        cpu_ms: user and system time of all threads of the process, per step.
        wall_ms: median duration of a step.
        final_loss: mean training loss over the steps of the last epoch; None for a party without
            labels.
    """

    cpu_ms: float
    wall_ms: float
    final_loss: float | None = None


class Clock:
    """Yields the exchanges of a session and measures the time between them.

    Args:
        warmup_steps: number of steps that are not measured.
        steps: number of measured steps.
        now: function that returns the time in seconds.
    """

    def __init__(
        self, warmup_steps: int, steps: int, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._warmup_steps = warmup_steps
        self._steps = steps
        self._ticks: list[float] = []
        self._cpu_s = 0.0

    def over(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """Yield the exchanges of a schedule; a step ends when the next exchange is requested."""
        started = 0.0
        total = self._warmup_steps + self._steps
        for index, exchange in enumerate(islice(schedule, total)):
            if index == self._warmup_steps:
                started = time.process_time()
            self._ticks.append(self._now())
            yield exchange
        self._ticks.append(self._now())
        self._cpu_s = time.process_time() - started

    def measurement(self, final_loss: float | None = None) -> Measurement:
        """Return the measurement, once all exchanges have been yielded."""
        timed = self._ticks[self._warmup_steps :]
        return Measurement(
            cpu_ms=1000 * self._cpu_s / self._steps,
            wall_ms=1000 * median(after - before for before, after in pairwise(timed)),
            final_loss=final_loss,
        )


class Setup:
    """Rows, terms, initial weights and clock of one job."""

    def __init__(self, job: StepJob, now: Callable[[], float] = time.perf_counter) -> None:
        torch.set_num_threads(job.threads)
        self.job = job
        self.workload = KNOWN[job.workload]
        whole = self.workload.experiment(job.seed, job.warmup_steps + job.steps)
        whole = whole.model_copy(update={"codec": job.codec})
        self.experiment = _secured(whole, job.secure)
        self.terms = Terms.of(self.experiment, "train", self.experiment.name)
        self.data = synthetic(self.workload, job.seed)
        self._clock = Clock(job.warmup_steps, job.steps, now)

    def schedule(self) -> Iterator[Exchange]:
        """Return the exchanges, which the clock measures."""
        return self._clock.over(rules.schedule(self.terms, self.data[LABEL_PARTY].split))

    def measurement(self, final_loss: float | None = None) -> Measurement:
        """Return the clock's measurement."""
        return self._clock.measurement(final_loss)

    def bottoms(self) -> dict[str, nn.Module]:
        """Return a new bottom model for every feature party."""
        seed = self.job.seed
        return {name: fresh_bottom(self.workload, seed, name) for name in self.workload.parties}

    def top(self) -> nn.Module:
        """Return a new top model for the label party."""
        return fresh_top(self.workload, self.job.seed)

    def agreement(self, party: str) -> Agreement:
        """Return a feature party's keys for a key agreement; a benchmark has no data to protect."""
        mode = secure_mode.make(self.terms.secure)
        everybody = {name: self.secret(name) for name in self.workload.parties}
        keys = mode.simulated_keys(everybody, self.terms, self.job.session, 0)[party]
        assert isinstance(keys, Agreement), "a mode that sums cuts"
        return keys

    def own(self, party: str) -> Own:
        """Return a party's private settings, including its ranks."""
        job = self.job
        return Own(self.secret(party), ranks=meeting(party, job.rank, job.ranks, job.meeting))

    def secret(self, party: str) -> Secret:
        """Return a party's derived secret; a benchmark has no data to protect."""
        return Secret.of_simulation(self.job.seed, party)


def meeting(party: str, rank: int, size: int, folder: str) -> Ranks:
    """Return one rank of a party, once all ranks have opened the same folder."""
    if size == 1:
        return ALONE
    store = store_at(f"{folder}/{party}", size, _MEETING_S)
    return Ranks.join_group(party, rank, size, store, _MEETING_S)


def _secured(experiment: Experiment, secure: str) -> Experiment:
    """Return the experiment in a secure mode; shared weights have no momentum."""
    secured = experiment.model_copy(update={"secure": secure})
    if not shares_weights(secured):
        return secured
    train = experiment.train.model_copy(update={"momentum": 0.0})
    return secured.model_copy(update={"train": train})


def synthetic(workload: Workload, seed: int) -> dict[str, PartyData]:
    """Make the rows of every party: normal inputs, and labels from a random linear map."""
    rows = np.arange(workload.rows)
    split = Split(train=rows, validation=rows[:0], test=rows[:0])
    digest = digest_of(rows)
    inputs = {
        name: _normal(seed, name, workload.rows, *workload.shape) for name in workload.parties
    }
    scores = torch.zeros(workload.rows, workload.outputs)
    for name, own in inputs.items():
        flat = own.flatten(start_dim=1)
        scores += flat @ _normal(seed, f"teacher-{name}", flat.shape[1], workload.outputs)
    parties = {
        name: PartyData(name, own, None, None, split, digest) for name, own in inputs.items()
    }
    classes = tuple(range(workload.outputs))
    label = PartyData(LABEL_PARTY, None, scores.argmax(dim=1), classes, split, digest)
    return parties | {LABEL_PARTY: label}


def fresh_bottom(workload: Workload, seed: int, party: str) -> nn.Module:
    """Return the initial bottom model of one feature party."""
    with scoped(derive(seed, "bench", "weights", party)):
        return models.make_bottom(workload.bottom).build(workload.shape, workload.width)


def fresh_top(workload: Workload, seed: int) -> nn.Module:
    """Return the initial top model of the label party."""
    with scoped(derive(seed, "bench", "weights", LABEL_PARTY)):
        return models.make_top(workload.top).build(workload.merged_width, workload.outputs)


class Monolith(nn.Module):
    """The whole network as one module: the parties' models without a cut between processes."""

    def __init__(self, bottoms: Mapping[str, nn.Module], top: nn.Module) -> None:
        super().__init__()
        self.bottoms = nn.ModuleDict(bottoms)
        self.top = top

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits, from the inputs of each party's bottom model, axes (rows, ...)."""
        cuts = [bottom(inputs[name]) for name, bottom in self.bottoms.items()]
        logits: Tensor = self.top(torch.cat(cuts, dim=1))
        return logits


def _normal(seed: int, purpose: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "bench", "data", purpose))


def monolith(setup: Setup, device: str = "cpu") -> Measurement:
    """Train the whole network as one torch module in a plain torch loop."""
    return _in_a_loop(setup, Monolith(setup.bottoms(), setup.top()), device)


def module(setup: Setup) -> Measurement:
    """Train a `SplitModule` of the network in the plain torch loop of `monolith`."""
    bottoms = setup.bottoms()
    widths = dict.fromkeys(bottoms, setup.workload.width)
    return _in_a_loop(setup, SplitModule(bottoms, setup.top(), widths), "cpu")


def cut(setup: Setup) -> Measurement:
    """Train the whole network, cut by `vfl.split` behind its bottoms, in `monolith`'s loop."""
    network = Monolith(setup.bottoms(), setup.top())
    at = {name: f"bottoms.{name}" for name in setup.workload.parties}
    example = {name: torch.zeros(2, *setup.workload.shape) for name in at}
    return _in_a_loop(setup, split(network, at, (example,)), "cpu")


def _in_a_loop(setup: Setup, network: nn.Module, device: str) -> Measurement:
    """Train a network in a plain torch loop.

    The loop records loss and accuracy of each epoch, as a label party does.
    """
    network.to(device)
    train = setup.experiment.train
    optimizer = optim.SGD(network.parameters(), lr=train.learning_rate, momentum=train.momentum)
    criterion = nn.CrossEntropyLoss()
    inputs = {n: own.inputs for n, own in setup.data.items() if own.inputs is not None}
    labels = setup.data[LABEL_PARTY].labels
    assert labels is not None, "the label party holds the labels"
    meters: dict[int, Meter] = {}
    for exchange in setup.schedule():
        rows = torch.from_numpy(exchange.rows)
        targets = labels[rows].to(device)
        logits = network({name: own[rows].to(device) for name, own in inputs.items()})
        loss = criterion(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        meter = meters.setdefault(exchange.epoch, Meter(Classification(), "train"))
        meter.add(logits.detach(), targets, loss.item())
    return setup.measurement(meters[max(meters)].figures()["train_loss"])


def modelled(job: StepJob) -> Measurement:
    """Train in one process on the clocks of computed network links; computation takes no time."""
    parties = [LABEL_PARTY, *KNOWN[job.workload].parties]
    model = LinkModel(parties, Wan.parse(job.wan))
    setup = Setup(job, now=lambda: model.now(LABEL_PARTY))
    return in_process(setup, lambda party: model.between(LABEL_PARTY, party, local_pair()))


def in_process(
    setup: Setup, connect: Connect = lambda party: local_pair(), device: str = "cpu"
) -> Measurement:
    """Train with all parties in this process, connected by in-process links."""
    session = LocalSession(
        setup.experiment,
        setup.data,
        outputs=setup.workload.outputs,
        bottoms=setup.bottoms(),
        top=setup.top(),
        mode="train",
        connect=connect,
        device=device,
    )
    session.go_on(None, setup.schedule())
    return setup.measurement(session.label.history[-1]["train_loss"])


def host(setup: Setup, parent: Parent) -> Measurement:
    """Run the label party over a stream."""

    def build(links: dict[str, HubLink]) -> LabelParty:
        ledger = Ledger()
        observed = {
            party: Observed(link, party, "label", [ledger]) for party, link in links.items()
        }
        return LabelParty(
            setup.data[LABEL_PARTY],
            setup.terms,
            observed,
            setup.own(LABEL_PARTY),
            Objective(setup.top(), setup.experiment.label.task, setup.workload.outputs),
            records=Records(ledger),
        )

    label = play_label(parent, setup.job, setup.terms, build, setup.schedule())
    return setup.measurement(label.history[-1]["train_loss"])


def join(setup: Setup) -> Measurement:
    """Run a feature party over a stream."""
    name = setup.job.party

    def build(link: TcpLink) -> FeatureParty:
        own, bottom = setup.own(name), setup.bottoms()[name]
        party = FeatureParty(setup.data[name], setup.terms, link, own, bottom=bottom)
        if setup.terms.masks_cuts:
            mode, keys = secure_mode.make(setup.terms.secure), setup.agreement(name)
            mode.offer(party.end, keys)
            mode.accept(party.end, keys, setup.terms)
        return party

    play_feature(setup.job, setup.terms, build, setup.schedule())
    return setup.measurement()


def work(parent: Parent) -> None:
    """Measure the requested jobs."""
    for job in parent.each(StepJob):
        if job.path == "model":
            measured = modelled(job)
        elif job.path == "monolith":
            measured = monolith(Setup(job))
        elif job.path == "module":
            measured = module(Setup(job))
        elif job.path == "split":
            measured = cut(Setup(job))
        elif job.path == "inprocess":
            measured = in_process(Setup(job))
        elif job.party == LABEL_PARTY:
            measured = host(Setup(job), parent)
        else:
            measured = join(Setup(job))
        parent.put(measured)
