"""A training step over a stream, compared with two libraries of PyTorch: gloo and RPC.

    python -m benchmarks.step_peers
    python -m benchmarks.step_peers --parties 8 --models mlp,cnn --wan 40ms

Every system trains the same network with the same initial weights on the same batches, with a
process of one thread for each party; the benchmark checks that their losses agree. `gloo` is a
training loop with `torch.distributed`'s send and receive. `rpc` is a loop with
`torch.distributed.rpc`, whose label party sends a gradient to every feature party and receives the
next cut in one call. Both loops are as short as possible: they have no encryption, admission,
checks, counts or records. RPC unpickles any Python object from any process that can reach its port.
vfl, which has all of these, is measured with and without TLS.

Systems take turns. CPU time is the sum over all processes. Result rows show the median over the
turns, and the median of the ratios to vfl over TLS in the same turn.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch._C._distributed_c10d import FileStore
from torch.distributed import rpc
from torch.futures import Future

from benchmarks import harness
from benchmarks.emulation import LOOPBACK, Network, Wan, open_network
from benchmarks.emulation.tun import DEVICE
from benchmarks.step import (
    LINE_STEPS,
    QUICK_STEPS,
    REPEATS,
    WARMUP_STEPS,
    Parties,
    PartyProcesses,
    compared,
)
from benchmarks.training_step import (
    KNOWN,
    LABEL_PARTY,
    WORKLOADS,
    Measurement,
    Setup,
    StepJob,
)
from benchmarks.worker import Parent
from vfl.core.errors import ConfigError, PeerFailedError
from vfl.session.label.task import Classification, Meter

Peer = Literal["gloo", "rpc"]
System = Literal["tls", "tcp", "gloo", "rpc"]
SYSTEMS: tuple[System, ...] = get_args(System)
#: Largest relative difference between the losses of systems that train the same network; rounding
#: causes this difference.
_SAME = 1e-4
_PATIENCE = timedelta(seconds=60)


class PeerJob(StepJob):
    """One process's part in a measurement of another system.

    Attributes:
        system: name of the other system.
        rank: rank of this party; the label party has rank 0.
        device: network device through which this party reaches the others.
        store: file by which all processes find each other.
    """

    system: Peer = "gloo"
    rank: int = 0
    device: str = "lo"
    store: str = ""


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Cost of a step in one system.

    Attributes:
        workload: name of the workload.
        parties: number of feature parties.
        system: name of the system; "tls" and "tcp" are vfl's.
        cpu_ms: user and system time of all processes, per step, in milliseconds.
        wall_ms: duration of a step at the label party, in milliseconds.
        cpu_ratio, wall_ratio: time of vfl over TLS, divided by this system's time in the same turn.
        final_loss: mean training loss over the last epoch's steps.
    """

    workload: str
    parties: int
    system: System
    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    final_loss: float


def bench_peers(
    models: Sequence[str] = tuple(WORKLOADS),
    *,
    parties: int = 2,
    steps: int | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
    wan: Wan | None = None,
    quick: bool = False,
) -> list[PeerRow]:
    """Measure a step over a stream with vfl, torch.distributed's gloo, and PyTorch RPC.

    Args:
        models: names of workloads.
        parties: number of feature parties, 2 or 8.
        steps: number of timed steps in a turn; None means about as many as take a second.
        repeats: number of turns.
        seed: seed of rows, weights and batch order.
        wan: network link between the parties, by delayed packets (network `tun`); None leaves the
            loopback interface unchanged.
        quick: whether to only check that the benchmark runs.

    Raises:
        ConfigError: there is no such workload, or no such number of parties.
        PeerFailedError: the losses of a system differ from those of the other systems, so it
            trained a different network.
        UserError: delayed packets are not available on this machine.
    """
    names = [name if parties == 2 else f"{name}_{parties}" for name in models]
    unknown = [name for name in names if name not in KNOWN]
    if unknown or not names:
        raise ConfigError(
            "no such workload",
            got=", ".join(unknown),
            want=f"2 or 8 parties, and of {', '.join(WORKLOADS)}",
        )
    if quick:
        steps, repeats = QUICK_STEPS, 1
    rows: list[PeerRow] = []
    everybody = (LABEL_PARTY, *KNOWN[names[0]].parties)
    with ExitStack() as stack:
        network = stack.enter_context(open_network(everybody, wan, "tun" if wan else "loopback"))
        own, others = stack.enter_context(Parties(network)), stack.enter_context(Peers(network))
        for name in names:
            timed = steps or (min(KNOWN[name].steps, LINE_STEPS) if wan else KNOWN[name].steps)
            harness.say(
                f"{name}: {repeats} x {timed} steps with {', '.join(SYSTEMS)}, {network.kind}"
            )
            turns: list[dict[System, Measurement]] = []
            for _ in range(repeats):
                turns.append({})
                for system in SYSTEMS:
                    measure: Any = (own if system in ("tls", "tcp") else others).measure
                    turns[-1][system] = measure(system, name, seed, WARMUP_STEPS, timed)
                _check_same(name, turns[-1])
            rows += [_row(name, system, turns) for system in SYSTEMS]
    return rows


def _check_same(workload: str, turn: dict[System, Measurement]) -> None:
    losses = {system: one.final_loss or 0.0 for system, one in turn.items()}
    if any(abs(loss - losses["tls"]) > _SAME * losses["tls"] for loss in losses.values()):
        raise PeerFailedError(
            f"the systems trained different networks on {workload}",
            got=", ".join(f"{system} {loss:.6f}" for system, loss in losses.items()),
            want="one training loss",
        )


def _row(name: str, system: System, turns: Sequence[dict[System, Measurement]]) -> PeerRow:
    loss = turns[0][system].final_loss
    assert loss is not None, "the label party knows its loss"
    own, tls = ([turn[one] for turn in turns] for one in (system, "tls"))
    return PeerRow(
        workload=name,
        parties=len(KNOWN[name].parties),
        system=system,
        **harness.middle(own, "cpu_ms", "wall_ms"),
        cpu_ratio=compared(tls, own)["cpu_ratio"],
        wall_ratio=compared(tls, own)["wall_ratio"],
        final_loss=loss,
    )


class Peers(PartyProcesses):
    """The processes of another system's parties.

    Args:
        network: network that connects the parties.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network, "step_peers")
        self._turns = 0
        self._meetings = Path(self.enter_context(TemporaryDirectory(prefix="vfl-")))

    def measure(
        self, system: Peer, workload: str, seed: int, warmup_steps: int, steps: int
    ) -> Measurement:
        """Train once; return the CPU time of all processes, and the wall time of the label party.

        Raises:
            LostPeerError: a process ended early; its standard error says why.
        """
        self._turns += 1
        for rank, (party, worker) in enumerate(self._workers.items()):
            worker.put(
                PeerJob(
                    path="tcp",
                    workload=workload,
                    seed=seed,
                    warmup_steps=warmup_steps,
                    steps=steps,
                    system=system,
                    party=party,
                    rank=rank,
                    device="lo" if self._network.host(party) == LOOPBACK else DEVICE,
                    store=str(self._meetings / str(self._turns)),
                )
            )
        return self._measured()


def work(parent: Parent) -> None:
    """Train with the requested systems."""
    # PyTorch's RPC calls deprecated functions of torch
    warnings.filterwarnings("ignore", module="torch.distributed")
    for job in parent.each(PeerJob):
        setup = Setup(job)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = job.device
        parent.put((_with_gloo if job.system == "gloo" else _with_rpc)(job, setup))


class _Bottom:
    """A feature party's model, which runs one forward pass and one backward pass in turn.

    Args:
        setup: the party's rows, initial weights and schedule.
    """

    def __init__(self, setup: Setup) -> None:
        inputs = setup.data[setup.job.party].inputs
        assert inputs is not None, "a feature party holds inputs"
        self._inputs = inputs
        self._model = setup.bottoms()[setup.job.party]
        self._optimizer = _sgd(setup, self._model)
        self._schedule = setup.schedule()
        self._cut = torch.empty(0)

    def forward(self) -> Tensor | None:
        """Return the next cut, axes (rows, width); None after the last step."""
        exchange = next(self._schedule, None)
        if exchange is None:
            return None
        self._cut = self._model(self._inputs[torch.from_numpy(exchange.rows)])
        return self._cut.detach()

    def backward(self, gradient: Tensor) -> None:
        """Make a training step with the gradient of the last cut, axes (rows, width)."""
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self._cut, gradient)
        self._optimizer.step()


class _Links(Protocol):
    """Connections of the label party to all feature parties, in the parties' order."""

    def receive(self) -> Sequence[Tensor]:
        """Receive the next cut of every party."""

    def send(self, gradients: Sequence[Tensor]) -> None:
        """Send every party its gradient, without waiting for the arrival of the gradients."""

    def finish(self) -> None:
        """Wait until all messages have arrived."""


def _lead(setup: Setup, links: _Links) -> Measurement:
    """Run the label party."""
    top = setup.top()
    optimizer, criterion = _sgd(setup, top), nn.CrossEntropyLoss()
    labels = setup.data[LABEL_PARTY].labels
    assert labels is not None, "the label party holds the labels"
    meters: dict[int, Meter] = {}
    for exchange in setup.schedule():
        targets = labels[torch.from_numpy(exchange.rows)]
        cuts = [cut.requires_grad_() for cut in links.receive()]
        logits = top(torch.cat(cuts, dim=1))
        loss = criterion(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        links.send([cut.grad for cut in cuts if cut.grad is not None])
        optimizer.step()
        meter = meters.setdefault(exchange.epoch, Meter(Classification(), "train"))
        meter.add(logits.detach(), targets, loss.item())
    links.finish()
    return setup.measurement(meters[max(meters)].figures()["train_loss"])


def _sgd(setup: Setup, model: nn.Module) -> optim.SGD:
    train = setup.experiment.train
    return optim.SGD(model.parameters(), lr=train.learning_rate, momentum=train.momentum)


def _with_gloo(job: PeerJob, setup: Setup) -> Measurement:
    parties = len(setup.workload.parties)
    store = FileStore(job.store, 1 + parties)
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=1 + parties, timeout=_PATIENCE
    )
    try:
        if job.rank == 0:
            return _lead(setup, _GlooLinks(setup))
        bottom = _Bottom(setup)
        gradient = torch.empty(setup.workload.batch_size, setup.workload.width)
        while (cut := bottom.forward()) is not None:
            dist.send(cut, 0)
            dist.recv(gradient, 0)
            bottom.backward(gradient)
        return setup.measurement()
    finally:
        dist.destroy_process_group()


class _GlooLinks:
    def __init__(self, setup: Setup) -> None:
        self._ranks = range(1, 1 + len(setup.workload.parties))
        self._shape = setup.workload.batch_size, setup.workload.width
        self._sending: list[tuple[Any, Tensor]] = []

    def receive(self) -> Sequence[Tensor]:
        cuts = [torch.empty(self._shape) for _ in self._ranks]
        coming: list[Any] = [
            dist.irecv(cut, rank) for cut, rank in zip(cuts, self._ranks, strict=True)
        ]
        for work in coming:
            work.wait()
        return cuts

    def send(self, gradients: Sequence[Tensor]) -> None:
        self.finish()
        pairs = zip(gradients, self._ranks, strict=True)
        self._sending = [
            (dist.isend(one, rank), one) for one, rank in pairs
        ]  # the tensors must exist until they are sent

    def finish(self) -> None:
        for work, _ in self._sending:
            work.wait()


#: The feature party of this process, whose methods the label party calls.
_called: _Bottom | None = None


def _exchange(gradient: Tensor | None) -> Tensor | None:
    """Train a feature party with the gradient of the last cut, and return its next cut."""
    assert _called is not None, "a party that is called has its network"
    if gradient is not None:
        _called.backward(gradient)
    return _called.forward()


def _with_rpc(job: PeerJob, setup: Setup) -> Measurement:
    global _called
    parties = setup.workload.parties
    _called = _Bottom(setup) if job.rank else None
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4,
        rpc_timeout=_PATIENCE.total_seconds(),
        init_method=f"file://{job.store}",
        _transports=["uv"],  # use sockets, as processes on different machines do
        _channels=["basic"],
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        job.party, rank=job.rank, world_size=1 + len(parties), rpc_backend_options=options
    )
    if job.rank:
        rpc.shutdown()  # this call waits until the label party has shut down
        return setup.measurement()
    measured = _lead(setup, _RpcLinks(parties))
    rpc.shutdown()
    return measured


class _RpcLinks:
    def __init__(self, parties: Sequence[str]) -> None:
        self._parties = parties
        self._coming: list[Future[Tensor]] = []
        self.send([None] * len(parties))

    def receive(self) -> Sequence[Tensor]:
        return [one.wait() for one in self._coming]

    def send(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = zip(self._parties, gradients, strict=True)
        self._coming = [rpc.rpc_async(party, _exchange, (one,)) for party, one in pairs]

    def finish(self) -> None:
        self.receive()


TABLE = harness.table(
    ("network", "<14", "workload"),
    ("parties", ">8", "parties"),
    ("  system", "<10", lambda row: f"  {row.system}"),
    ("CPU ms", ">10.2f", "cpu_ms"),
    ("wall ms", ">10.2f", "wall_ms"),
    ("vfl tls: CPU", ">14", lambda row: harness.times(row.cpu_ratio)),
    ("wall", ">8", lambda row: harness.times(row.wall_ratio)),
    ("loss", ">10.5f", "final_loss"),
)


main = harness.command(bench_peers, TABLE)


if __name__ == "__main__":
    main()
