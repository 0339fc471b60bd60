"""``vfl bench mpc``: private workloads between three processes, beside other systems.

The workloads are those of Tables 5.2 and 5.3 (thesis, 2025) and element-wise functions. Every
system has processes of its own, one thread each, over the same network; they take turns, so that
each ratio compares neighbours in time. A turn is a tenth of a second of runs, at least one, and the
run that counts: a connection that has rested has a small window, a process that has rested finds
others' data in the processor's caches, and code is compiled at first. A run begins when all parties
are ready and ends when the last one is done, with its result still in shares. Of ours, keys, shares
and openings that last come before it, and in fast mode what P2 deals ahead; a row tells the bytes.
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

from vfl.bench.mpc_contender import OURS, Contender, Running, Taken
from vfl.bench.mpc_messages import Task
from vfl.bench.mpc_model import Modelled, matmul_ms, modelled, products, rules_of
from vfl.bench.network import Network, Wan, choose, open_network
from vfl.core.errors import ConfigError
from vfl.core.registry import require_choice
from vfl.core.seeds import use_one_thread
from vfl.mpc.network import fixed_point_rate
from vfl.mpc.rules import MODES, NAMES, Mode
from vfl.mpc.workloads import LEARNING_RATE, WORKLOADS, Example, Workload, workload_named

TURNS = 5
_WARM_S = 0.1


@dataclass(frozen=True, slots=True)
class MpcRow:
    """One workload of one system.

    Attributes:
        workload: of `vfl.mpc.workloads.WORKLOADS`.
        system: "thesis", "fast", "spu-semi2k", "spu-aby3" or "crypten".
        network: "loopback", "tun", "proxy" or "model".
        milliseconds: median over the turns; without compute where lines are computed.
        fastest_ms: the fastest turn.
        cpu_ms: median user and system time of all parties; None where lines are computed.
        bytes_online: sent by all parties. Of ours, with headers of frames; of other systems all
            that their interfaces count, headers of packets included, or None on the loopback.
        bytes_offline: dealt ahead of each turn, or by P2 within it; None for other systems.
        bytes_setup: keys, and openings that last for many turns; None for other systems.
        offline_ms: what dealing ahead takes, each turn, before the clock starts.
        max_error: largest of the turns, against float64 in clear.
        hops: messages one after the other; None for other systems.
        limit_ms: what the lines alone take of these bytes and hops; None without a line.
        matmul_ms: a holder's ring products alone; None over a line, for functions, and for other
            systems.
        limit_ratio, matmul_ratio: milliseconds to those; None where nothing is to be compared.
        rival_ratio: how many times as long the fastest other system took; None without one.
        fresh: inputs were opened within the turn.
    """

    workload: str
    system: str
    network: str
    milliseconds: float
    fastest_ms: float
    cpu_ms: float | None
    bytes_online: int | None
    bytes_offline: int | None
    bytes_setup: int | None
    offline_ms: float
    max_error: float
    hops: int | None
    limit_ms: float | None
    matmul_ms: float | None
    limit_ratio: float | None
    matmul_ratio: float | None
    rival_ratio: float | None
    fresh: bool


#: Turns by system, and what the model says of ours.
_Turns = Mapping[str, Sequence[Taken]]
_Models = Mapping[str, Modelled]


def bench_mpc(
    workloads: Sequence[str] = tuple(WORKLOADS),
    modes: Sequence[str] = MODES,
    *,
    wan: Wan | None = None,
    network: str = "auto",
    turns: int = TURNS,
    fresh: bool = False,
    peers: Sequence[Contender] = (),
    say: Callable[[str], None] = lambda line: None,
) -> list[MpcRow]:
    """Measure workloads in every system.

    Args:
        workloads: names.
        modes: of `vfl.mpc`.
        wan: every party's line; None is the loopback as it is.
        network: how lines are made; see `vfl.bench.network`.
        turns: of each workload and system.
        fresh: open inputs within the turn, as when every batch is seen once.
        peers: other systems, in the same run.
        say: told a line about each workload.

    Raises:
        ConfigError: nothing to measure, or peers on computed lines.
        BadOptionError, UnknownNameError: no such network, mode or workload.
        PeerFailedError: a process ended early.
    """
    asked, own = [workload_named(name) for name in workloads], [_mode(mode) for mode in modes]
    kind = choose(network) if wan else "loopback"
    if turns < 1 or not asked or not own or (peers and kind == "model"):
        raise ConfigError(
            "nothing to measure",
            got=f"{len(asked)} workloads, {turns} turns, {len(peers)} peers, network {kind}",
            want="a workload, a mode and a turn; peers need lines that are not computed",
        )
    use_one_thread()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vfl-bench-")))
        running: dict[str, Running] = {}
        if kind != "model":
            net: Network = stack.enter_context(open_network(NAMES, wan, network))
            running = dict.fromkeys(own, stack.enter_context(Running(OURS, net)))
            running |= {each.name: stack.enter_context(Running(each, net)) for each in peers}
        rows: list[MpcRow] = []
        for workload in asked:
            say(f"{workload.name}, {kind}{f', {wan}' if wan else ''}")
            models: dict[str, Modelled] = {
                mode: modelled(workload, rules_of(workload, mode), wan or Wan(), fresh=fresh)
                for mode in own
            }
            taken = _take_turns(running, _task(workload, fresh, folder, bool(peers)), turns)
            rows += _rows(workload, kind, models, taken, fresh)
    return rows


def _mode(name: str) -> Mode:
    require_choice("mode", name, MODES)
    return "thesis" if name == "thesis" else "fast"


def _take_turns(running: Mapping[str, Running], task: Task, turns: int) -> dict[str, list[Taken]]:
    """All systems one after the other, again and again; the last run of each turn counts."""
    taken: dict[str, list[Taken]] = {system: [] for system in running}

    def run(system: str) -> Taken:
        fresh = {"system": system, "session": secrets.token_hex(16)}
        return running[system].take(task.model_copy(update=fresh))

    for _ in range(turns):
        for system, found in taken.items():
            warm_at = time.monotonic() + _WARM_S
            run(system)
            while time.monotonic() < warm_at:
                run(system)
            found.append(run(system))
    return taken


def _task(workload: Workload, fresh: bool, folder: Path, arrays: bool) -> Task:
    """What all processes are told; arrays are written for those who cannot draw them."""
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
    """A row a system; where lines are computed, the model's own."""
    rows = []
    for system in taken or models:
        model, turns = models.get(system), taken.get(system) or [_turn_of(models[system])]
        typical = median(turn.milliseconds for turn in turns)
        limit = 1000 * model.limit_s if model and kind != "loopback" else None
        alone = model is not None and kind == "loopback" and not workload.function
        matmul = matmul_ms(products(workload, _mode(system))) if alone else None
        rows.append(
            MpcRow(
                workload=workload.name,
                system=system,
                network=kind,
                milliseconds=typical,
                fastest_ms=min(turn.milliseconds for turn in turns),
                cpu_ms=None if kind == "model" else median(turn.cpu_ms for turn in turns),
                bytes_online=turns[-1].bytes_online,
                bytes_offline=turns[-1].bytes_offline,
                bytes_setup=turns[-1].bytes_setup,
                offline_ms=median(turn.offline_ms for turn in turns),
                max_error=max(turn.max_error for turn in turns),
                hops=model.hops if model else None,
                limit_ms=limit,
                matmul_ms=matmul,
                limit_ratio=typical / limit if limit else None,
                matmul_ratio=typical / matmul if matmul else None,
                rival_ratio=_rival_ratio(taken, models, system),
                fresh=fresh,
            )
        )
    return rows


def _turn_of(model: Modelled) -> Taken:
    """The model's clock as a turn."""
    return Taken(
        1000 * model.seconds,
        0.0,
        0.0,
        model.bytes_setup,
        model.bytes_offline,
        model.bytes_online,
        model.max_error,
    )


def _rival_ratio(taken: _Turns, models: _Models, system: str) -> float | None:
    """The fastest rival of each turn over the system itself, median over the turns."""
    rivals = [turns for name, turns in taken.items() if name not in models]
    if system not in models or not rivals:
        return None
    best = [
        min(turn.milliseconds for turn in turn_of_all) for turn_of_all in zip(*rivals, strict=True)
    ]
    own = [turn.milliseconds for turn in taken[system]]
    return float(median(rival / ours for rival, ours in zip(best, own, strict=True)))
