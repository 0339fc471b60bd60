"""Private workloads computed by three processes, compared with other systems.

The workloads are those of Tables 5.2 and 5.3 (thesis, 2025) and element-wise functions. Every
system has its own processes, with one thread each, on the same network. The systems take turns, so
that each ratio compares measurements that are close in time.

A turn consists of warm-up runs for at least a tenth of a second, at least one run, and then the run
that is measured. Without warm-up, an idle connection would have a small TCP window, other data
would fill the caches, and code would be compiled. A run begins when all parties are ready and ends
when the last party is done; its result stays in shares. Keys, shares, and values that stay opened
under masks are made before the run. Dealing is part of the run, for every system that deals. Fast
mode can deal ahead. A turn of fast mode therefore has a second run, in which dealing takes place
before the measured time; this run is reported separately as online.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.emulation import LOOPBACK, Network, Wan, choose, open_network
from benchmarks.emulation.tun import DEVICE
from benchmarks.mpc_party import (
    SYSTEMS,
    Assignment,
    Endpoints,
    Go,
    Modelled,
    Port,
    Ready,
    Task,
    Turn,
    matmul_ms,
    modelled,
    products,
    rules_of,
)
from benchmarks.mpc_workloads import LEARNING_RATE, WORKLOADS, Example, Workload, workload_named
from benchmarks.worker import processes
from vfl.core.errors import BadOptionError, ConfigError, UserError, nearest
from vfl.core.registry import require_choice
from vfl.core.seeds import use_one_thread
from vfl.mpc.rules import NAMES
from vfl.mpc.three_party.network import fixed_point_rate

TURNS = 5
_WARM_S = 0.1
_TALK = Path(__file__).parent / "peers" / "talk.py"
#: The systems of each adapter, `benchmarks/peers/NAME_peer.py`, with each system's number of
#: parties.
PEERS: Mapping[str, Mapping[str, int]] = {
    "spu": {"spu-semi2k": 2, "spu-aby3": 3},
    "crypten": {"crypten": 2},
}


#: The workloads that are measured in fast and thesis mode.
THREE_PARTY = tuple(name for name, each in WORKLOADS.items() if each.function != "cnn")
#: Seconds between the order to run and the start, long enough for all parties to receive the order.
_AHEAD_S = 0.002


@dataclass(frozen=True, slots=True)
class System:
    """A system, and the command that starts each of its processes.

    Attributes:
        name: name, such as "spu-semi2k".
        parties: number of its processes.
        command: command of each process; empty for vfl's own parties.
    """

    name: str
    parties: int = 3
    command: tuple[str, ...] = ()


#: The three party processes of `vfl.mpc`, which run all of vfl's modes.
OURS = System("vfl")


@dataclass(frozen=True, slots=True)
class Run:
    """Costs of one run of a system.

    Attributes:
        milliseconds: milliseconds from the first party's start to the last party's end.
        cpu_ms: CPU time of all parties in milliseconds.
        offline_ms: longest time of a party for dealing ahead, which is not part of `milliseconds`.
        bytes_setup, bytes_offline, bytes_online: bytes that all parties sent; None if not counted.
        bytes_interface: bytes that all parties' interfaces sent from the first setup message to the
            end; None if not counted.
        max_error: largest error, compared with float64 in plaintext.
        wrong_tokens: for a step of a decoder, number of tokens that differ from plaintext.
    """

    milliseconds: float
    cpu_ms: float
    offline_ms: float
    bytes_setup: int | None
    bytes_offline: int | None
    bytes_online: int | None
    max_error: float
    wrong_tokens: int = 0
    bytes_interface: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of one turn of a system.

    Attributes:
        whole: run whose measured time includes all dealing.
        online: run with dealing before the measured time; for a system that cannot deal ahead, the
            same run as `whole`.
    """

    whole: Run
    online: Run


def peers(spec: str) -> list[System]:
    """Return the systems of another project, from its name and a Python interpreter that has it.

    >>> [each.name for each in peers("spu=/opt/spu/bin/python")]
    ['spu-semi2k', 'spu-aby3']

    Args:
        spec: name and interpreter, such as ``crypten=/opt/crypten/bin/python``.

    Raises:
        BadOptionError: the name is unknown, or the interpreter does not exist.
    """
    name, _, python = spec.partition("=")
    if name not in PEERS or not python:
        raise BadOptionError(
            "no other system has this name",
            where="option 'peer'",
            got=f"'{spec}'",
            want=f"{' or '.join(PEERS)}, '=' and the Python that has it installed",
            fix=nearest(name, PEERS),
        )
    command = (python, "-I", str(_TALK), name)
    return [System(system, count, command) for system, count in PEERS[name].items()]


class RunningSystem(ExitStack):
    """The processes of a system; the context manager ends them.

    Args:
        system: the system that the processes run.
        network: the network that connects the processes.
    """

    def __init__(self, system: System, network: Network) -> None:
        super().__init__()
        if system.name == "crypten" and network.kind == "proxy":
            raise UserError(
                "CrypTen's connections would bypass the proxies",
                where="network 'proxy'",
                fix="--network tun, or leave CrypTen out",
            )
        self.system = system
        self._network = network
        self._parties = NAMES[: system.parties]
        name = system.name if system.command else "mpc_party"
        started = processes(name, network, self._parties, system.command)
        self._workers = list(self.enter_context(started).values())
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def take(self, task: Task) -> Run:
        """Run a task once; all parties start when all of them are ready.

        Raises:
            LostPeerError: a process has ended; its standard error says why.
        """
        first = self._sent()
        self._put_all([task] * len(self._workers))
        self._await_all()
        before = self._sent()
        self._put_all([Go(at=time.monotonic() + _AHEAD_S)] * len(self._workers))
        self._await_all()
        sent = self._sent()
        self._put_all([Go(at=0.0)] * len(self._workers))
        turns = [worker.get(Turn) for worker in self._workers]
        counted = None if sent is None or before is None else sent - before
        online = _total([turn.bytes_online for turn in turns])
        errors = [turn.max_error for turn in turns if turn.max_error is not None]
        assert errors, "somebody has the result"
        return Run(
            1000 * (max(turn.ended for turn in turns) - min(turn.began for turn in turns)),
            sum(turn.cpu_ms for turn in turns),
            max(turn.offline_ms for turn in turns),
            _total([turn.bytes_setup for turn in turns]),
            _total([turn.bytes_offline for turn in turns]),
            counted if self.system.command else online,
            max(errors),
            sum(turn.wrong_tokens or 0 for turn in turns),
            None if sent is None or first is None else sent - first,
        )

    def _await_all(self) -> None:
        for worker in self._workers:
            worker.get(Ready)

    def _sent(self) -> int | None:
        """Return how many bytes the parties' interfaces have sent so far.

        The result is None if these bytes are not counted.
        """
        sent = self._network.bytes_sent()
        return sum(sent[party] for party in self._parties) if sent else None

    def _connect(self) -> None:
        """Send every process its role and the addresses of the other processes."""
        session, token = secrets.token_hex(16), secrets.token_urlsafe(32)
        assignments = [
            Assignment(
                rank=rank,
                parties=len(self._parties),
                system=self.system.name,
                host=self._network.host(party),
                device="lo" if self._network.host(party) == LOOPBACK else DEVICE,
                session=session,
                token=token,
            )
            for rank, party in enumerate(self._parties)
        ]
        self._put_all(assignments)
        ports = [worker.get(Port).port for worker in self._workers]
        self._put_all([self._endpoints(party, ports) for party in self._parties])
        self._await_all()

    def _endpoints(self, source: str, ports: Sequence[int]) -> Endpoints:
        """Return all parties' addresses as one party uses them; its own is where it listens."""
        endpoints: list[tuple[str, int]] = []
        for target, port in zip(self._parties, ports, strict=True):
            own = target == source or not port
            host, port = (
                (self._network.host(target), port)
                if own
                else self._network.reach(source, target, port)
            )
            endpoints.append((host, port))
        return Endpoints(endpoints=tuple(endpoints))

    def _put_all(self, messages: Sequence[Assignment | Endpoints | Task | Go]) -> None:
        for worker, message in zip(self._workers, messages, strict=True):
            worker.put(message)


def _total(counts: Sequence[int | None]) -> int | None:
    """Return the sum of the counts, or None if one of them is missing."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True)
class MpcRow:
    """Result of one workload on one system.

    Attributes:
        workload: a workload of `benchmarks.mpc_workloads.WORKLOADS`.
        system: "thesis", "fast", "holders", "shares", "spu-semi2k", "spu-aby3" or "crypten".
        network: "loopback", or a kind of `benchmarks.emulation`: "tun", "proxy" or "model".
        end_to_end_ms: median time over the turns, including dealing; for computed network links,
            without computation time.
        milliseconds: median time of the runs that deal ahead; for systems that cannot deal ahead,
            the same as `end_to_end_ms`.
        fastest_ms: time of the fastest of the runs for `milliseconds`.
        cpu_ms: median user and system time of all parties, including dealing; None for computed
            network links.
        bytes_online: bytes sent by all parties. For vfl, the bytes of frames with headers. For
            other systems, all bytes at their interfaces, packet headers included, or None on the
            loopback interface.
        bytes_offline: bytes dealt before each turn, or by P2 within the turn; None for other
            systems.
        bytes_setup: bytes for keys, and for values that stay opened over many turns; None for other
            systems.
        bytes_interface: bytes at the interfaces for setup and the whole run, with packet headers if
            the network has packets (`tun`); None on the loopback interface and for computed links.
        offline_ms: time of dealing ahead, which is not part of `milliseconds`.
        max_error: largest error over the turns, compared with float64 in plaintext.
        hops: number of sequential messages; None for other systems.
        limit_ms: least time that the network links allow for these bytes and messages; None without
            a network link.
        matmul_ms: time of a holder's ring products alone; None with a network link, for functions,
            and for other systems.
        limit_ratio, matmul_ratio: `milliseconds` divided by these two times; None if the time is
            None.
        rival_ratio: time of the fastest other system divided by vfl's time, both including dealing;
            None without another system.
        online_ratio: the same ratio with vfl's online time, although the times of the other systems
            include dealing.
        fresh: whether inputs were opened under masks within the turn, not before it.
    """

    workload: str
    system: str
    network: str
    end_to_end_ms: float
    milliseconds: float
    fastest_ms: float
    cpu_ms: float | None
    bytes_online: int | None
    bytes_offline: int | None
    bytes_setup: int | None
    bytes_interface: int | None
    offline_ms: float
    max_error: float
    hops: int | None
    limit_ms: float | None
    matmul_ms: float | None
    limit_ratio: float | None
    matmul_ratio: float | None
    rival_ratio: float | None
    online_ratio: float | None
    fresh: bool


#: Type: the results of each system's turns, and the model's results for vfl's systems.
_Turns = Mapping[str, Sequence[Taken]]
_Models = Mapping[str, Modelled]


def bench_mpc(
    workload: Sequence[str] = THREE_PARTY,
    mode: Sequence[str] = ("thesis", "fast"),
    *,
    wan: Wan | None = None,
    network: str = "auto",
    turns: int = TURNS,
    fresh: bool = False,
    peer: Sequence[str] = (),
) -> list[MpcRow]:
    """Measure private inference and training between three processes of vfl, SPU and CrypTen.

    Args:
        workload: names of workloads, such as lr100-b64-inference,gelu-1k.
        mode: modes to measure: thesis, fast, holders (for 1/sqrt) and shares (for networks of
            images).
        wan: network link of every party; None means the plain loopback interface.
        network: kind of the emulated network: auto, tun, proxy or model; see
            `benchmarks.emulation`.
        turns: number of turns of each workload on each system.
        fresh: whether to open inputs within the turn, as a batch that is used only once requires.
        peer: another system and the Python interpreter that has it: spu=PATH or crypten=PATH.

    Raises:
        ConfigError: other systems are requested on computed network links.
        BadOptionError, UnknownNameError: the network, mode or workload is unknown.
        LostPeerError: a process ended early.
    """
    asked, own = [workload_named(name) for name in workload], list(mode)
    others = [system for spec in peer for system in peers(spec)]
    for name in own:
        require_choice("mode", name, SYSTEMS)
    kind = choose(network) if wan else "loopback"
    if others and kind == "model":
        raise ConfigError(
            "other systems need a network that is not computed", got=f"network {kind}"
        )
    use_one_thread()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vfl-bench-")))
        running: dict[str, RunningSystem] = {}
        if kind != "model":
            net: Network = stack.enter_context(open_network(NAMES, wan, network))
            running = dict.fromkeys(own, stack.enter_context(RunningSystem(OURS, net)))
            running |= {each.name: stack.enter_context(RunningSystem(each, net)) for each in others}
        rows: list[MpcRow] = []
        for each in asked:
            harness.say(f"{each.name}, {kind}{f', {wan}' if wan else ''}")
            models: dict[str, Modelled] = {
                name: modelled(each, rules_of(each, name), wan or Wan(), fresh=fresh)
                for name in own
            }
            taken = take_turns(running, _task(each, fresh, folder, bool(others)), turns)
            rows += _rows(each, kind, models, taken, fresh)
    return rows


def take_turns(
    running: Mapping[str, RunningSystem], task: Task, turns: int
) -> dict[str, list[Taken]]:
    """Run all systems one after another, several times; the last run of each turn is measured.

    For fast mode, the last run includes dealing, and one more run deals ahead.

    Args:
        running: systems by name.
        task: task that all systems run.
        turns: number of turns of each system.
    """
    taken: dict[str, list[Taken]] = {system: [] for system in running}

    def run(system: str, *, ahead: bool = False) -> Run:
        fresh = {"system": system, "session": secrets.token_hex(16), "ahead": ahead}
        return running[system].take(task.model_copy(update=fresh))

    for _ in range(turns):
        for system, found in taken.items():
            warm_at = time.monotonic() + _WARM_S
            run(system)
            while time.monotonic() < warm_at:
                run(system)
            whole = run(system)
            found.append(Taken(whole, run(system, ahead=True) if system == "fast" else whole))
    return taken


def _task(workload: Workload, fresh: bool, folder: Path, arrays: bool) -> Task:
    """Make the task for all processes, and write arrays for systems that cannot draw the inputs."""
    path = folder / f"{workload.name}.npz"
    if arrays:
        example = Example.of(workload)
        kept = {"inputs": example.inputs, **example.weights}
        if workload.training:
            kept["targets"] = example.targets
        kept |= {f"wanted.{name}": value for name, value in example.wanted.items()}
        plain: dict[str, Any] = {name: value.numpy() for name, value in kept.items()}
        np.savez(path, **plain)
    times, shift = fixed_point_rate(LEARNING_RATE / workload.rows)
    return Task(
        system="",
        workload=workload.name,
        session="",
        rows=workload.rows,
        widths=workload.widths,
        training=workload.training,
        function=workload.function,
        rate=times / 2**shift,
        fresh=fresh,
        arrays=str(path) if arrays else "",
    )


def _rows(
    workload: Workload, kind: str, models: _Models, taken: _Turns, fresh: bool
) -> list[MpcRow]:
    """Return a row for each system; for computed network links, also a row for the model."""
    rows = []
    for system in taken or models:
        model, turns = models.get(system), taken.get(system) or [_turn_of(models[system])]
        online = [turn.online for turn in turns]
        typical = median(run.milliseconds for run in online)
        limit = 1000 * model.limit_s if model and kind != "loopback" else None
        alone = model is not None and kind == "loopback" and not workload.function
        matmul = matmul_ms(products(workload, system)) if alone else None
        rows.append(
            MpcRow(
                workload=workload.name,
                system=system,
                network=kind,
                end_to_end_ms=median(turn.whole.milliseconds for turn in turns),
                milliseconds=typical,
                fastest_ms=min(run.milliseconds for run in online),
                cpu_ms=None if kind == "model" else median(turn.whole.cpu_ms for turn in turns),
                bytes_online=online[-1].bytes_online,
                bytes_offline=online[-1].bytes_offline,
                bytes_setup=online[-1].bytes_setup,
                bytes_interface=turns[-1].whole.bytes_interface,
                offline_ms=median(run.offline_ms for run in online),
                max_error=max(max(turn.whole.max_error, turn.online.max_error) for turn in turns),
                hops=model.hops if model else None,
                limit_ms=limit,
                matmul_ms=matmul,
                limit_ratio=typical / limit if limit else None,
                matmul_ratio=typical / matmul if matmul else None,
                rival_ratio=_rival_ratio(taken, models, system, lambda turn: turn.whole),
                online_ratio=_rival_ratio(taken, models, system, lambda turn: turn.online),
                fresh=fresh,
            )
        )
    return rows


def _turn_of(model: Modelled) -> Taken:
    """Convert the model's clocks to the result of a turn."""
    run = Run(
        1000 * model.seconds,
        0.0,
        0.0,
        model.bytes_setup,
        model.bytes_offline,
        model.bytes_online,
        model.max_error,
    )
    return Taken(run, run)


def _rival_ratio(
    taken: _Turns, models: _Models, system: str, clock: Callable[[Taken], Run]
) -> float | None:
    """Return the fastest rival's time divided by this system's time, median over turns."""
    rivals = [turns for name, turns in taken.items() if name not in models]
    if system not in models or not rivals:
        return None
    best = [min(turn.whole.milliseconds for turn in of_all) for of_all in zip(*rivals, strict=True)]
    own = [clock(turn).milliseconds for turn in taken[system]]
    return float(median(rival / ours for rival, ours in zip(best, own, strict=True)))


TABLE = harness.table(
    ("workload", "<23", "workload"),
    ("system", "<11", "system"),
    ("network", "<9", "network"),
    ("whole ms", ">9.1f", "end_to_end_ms"),
    ("rival", ">7.1f", "rival_ratio"),
    ("online ms", ">10.1f", "milliseconds"),
    ("rival", ">7.1f", "online_ratio"),
    ("fastest", ">9.1f", "fastest_ms"),
    ("CPU", ">8.1f", "cpu_ms"),
    ("online", ">11", "bytes_online"),
    ("offline", ">10", "bytes_offline"),
    ("setup", ">10", "bytes_setup"),
    ("interface", ">11", "bytes_interface"),
    ("hops", ">5", "hops"),
    ("error", ">9.1e", "max_error"),
    ("limit ms", ">9.1f", "limit_ms"),
    ("ratio", ">6.2f", "limit_ratio"),
    ("matmul", ">8.2f", "matmul_ms"),
    ("ratio", ">7.1f", "matmul_ratio"),
)


main = harness.command(bench_mpc, TABLE)


if __name__ == "__main__":
    main()
