"""``vfl bench``: how fast, measured here and now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from vfl.cli.output import Json, emit, say

Line = Annotated[
    str,
    typer.Option(help="Every party's line: bandwidth and round trip, such as 80mbps,40ms."),
]
Lines = Annotated[
    str,
    typer.Option(
        help="How lines are made: tun (delays packets; root), proxy (delays bytes), "
        "model (computes), or auto: tun where that works, else proxy."
    ),
]

app = typer.Typer(help="Measure vfl on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure vfl on this machine."""


@app.command("step")
def step(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few steps: does it run, not how fast.")
    ] = False,
    wan: Line = "",
    network: Lines = "auto",
    json: Json = False,
) -> None:
    """One training step: monolith, in process, over TCP, over TLS; ratios of one run."""
    from dataclasses import asdict

    from vfl.bench.network import Wan
    from vfl.bench.step import QUICK_STEPS, REPEATS, bench_step, format_table

    _require_line(wan, network)
    rows = bench_step(
        steps=QUICK_STEPS if quick else None,
        repeats=1 if quick else REPEATS,
        wan=Wan.parse(wan) if wan else None,
        network=network,
        say=say,
    )
    if json:
        emit([asdict(row) for row in rows])
    else:
        print(format_table(rows))


@app.command("secure")
def secure(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few steps: does it run, not how fast.")
    ] = False,
    wan: Line = "",
    network: Lines = "auto",
    json: Json = False,
) -> None:
    """A training step under a secure mode beside the plain one: 128 rows, width 500."""
    from dataclasses import asdict

    from vfl.bench.network import Wan
    from vfl.bench.secure import QUICK_STEPS, bench_secure, format_secure

    _require_line(wan, network)
    rows = bench_secure(
        steps=QUICK_STEPS if quick else None,
        repeats=1 if quick else None,
        wan=Wan.parse(wan) if wan else None,
        network=network,
        say=say,
    )
    if json:
        emit([asdict(row) for row in rows])
    else:
        print(format_secure(rows))


@app.command("codecs")
def codecs(
    width: Annotated[
        int | None, typer.Option(help="Of the cut; the published widths if not given.")
    ] = None,
    k: Annotated[
        str | None, typer.Option(help="Values kept of a row, such as 3,6; needs --width.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each; 96 if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the batches.")] = 0,
    json: Json = False,
) -> None:
    """Encoding and decoding of every codec, in times of torch.topk; bytes of real frames."""
    from vfl.bench.codecs import PAIRS, ROUNDS, bench_codecs, format_codecs

    if k is not None and width is None:
        raise typer.BadParameter("k belongs to a width", param_hint="--k")
    pairs: Sequence[tuple[int, int]] = PAIRS
    if width is not None:
        known = [each for wide, each in PAIRS if wide == width] or [max(1, width // 32)]
        pairs = [(width, each) for each in (_numbers(k, "--k") if k else known)]
    rows = bench_codecs(pairs, rounds=ROUNDS if rounds is None else rounds, seed=seed, say=say)
    if json:
        emit([row.model_dump() for row in rows])
    else:
        print(format_codecs(rows))


@app.command("wan")
def wan(
    wan: Line = "80mbps,40ms",
    network: Lines = "auto",
    in_flight: Annotated[str, typer.Option(help="Values of train.in_flight to compare.")] = "1,5",
    until: Annotated[float, typer.Option(help="Test accuracy that is waited for.")] = 0.97,
    source: Annotated[str, typer.Option(help="Pictures to cut in half.")] = "mnist",
    codec: Annotated[str, typer.Option(help="Codec of the cuts.")] = "none",
    batch_rows: Annotated[int, typer.Option(help="Rows of one exchange.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Of Adam, at every party.")] = 1e-3,
    epochs: Annotated[int, typer.Option(help="Passes over the training rows.")] = 3,
    seed: Annotated[int, typer.Option(help="Of rows and first weights.")] = 0,
    json: Json = False,
) -> None:
    """Train over a slow link: seconds and exchanges to an accuracy, by cuts in flight."""
    from dataclasses import asdict

    from vfl.bench.network import Wan
    from vfl.bench.wan import bench_wan, format_wan, wan_experiment

    line, depths = Wan.parse(wan), _numbers(in_flight, "--in-flight")
    experiment = wan_experiment(source, codec, batch_rows, learning_rate, epochs, seed)
    rows = bench_wan(experiment, depths, line, until, network=network, say=say)
    if json:
        emit([asdict(row) for row in rows])
    else:
        print(format_wan(rows))


@app.command("network")
def network(
    wan: Line = "80mbps,40ms",
    network: Annotated[
        str, typer.Option(help="What to try: tun, proxy, model or several; all there are here.")
    ] = "",
    turns: Annotated[int, typer.Option(help="Of each pattern, after the first.")] = 5,
    json: Json = False,
) -> None:
    """What the lines of the other benchmarks really do, beside what they should."""
    from dataclasses import asdict

    from vfl.bench.lines import bench_lines, format_lines
    from vfl.bench.network import Wan, available

    line, kinds = Wan.parse(wan), network.split(",") if network else available(say)
    rows = bench_lines(line, kinds, turns=turns, say=say)
    if json:
        emit([asdict(row) for row in rows])
    else:
        print(format_lines(rows))


def _require_line(wan: str, network: str) -> None:
    if network != "auto" and not wan:
        raise typer.BadParameter("it needs a line: --wan 80mbps,40ms", param_hint="--network")


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise typer.BadParameter("numbers, such as 1,5", param_hint=option) from None


@app.command("memory")
def memory(
    rows: Annotated[int, typer.Option("--rows", help="Rows of the table.")] = 1_000_000,
    columns: Annotated[int, typer.Option("--columns", help="Number columns.")] = 20,
    form: Annotated[str, typer.Option("--format", help="csv or parquet.")] = "csv",
    json: Json = False,
) -> None:
    """The peak memory of a party that loads its table, beside the limit."""
    from dataclasses import asdict

    from vfl.bench.memory import bench_memory, format_rows

    found = bench_memory(rows, columns, form, say=say)
    if json:
        emit([asdict(row) for row in found])
    else:
        print(format_rows(found))
    if not all(row.kept for row in found):
        raise typer.Exit(1)


@app.command("mpc")
def mpc(
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Such as lr100-b64-inference or gelu-1k; may be repeated. Default: all."),
    ] = None,
    mode: Annotated[str, typer.Option(help="Modes to compare.")] = "thesis,fast",
    wan: Line = "",
    network: Lines = "auto",
    turns: Annotated[int, typer.Option(help="Of each workload and system.")] = 5,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Open inputs within the turn, not before.")
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Another system and the Python that has it: spu=PATH or crypten=PATH; may be "
            "repeated."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Private inference and training between three processes; beside SPU and CrypTen."""
    from dataclasses import asdict

    from vfl.bench.mpc import bench_mpc
    from vfl.bench.mpc_contender import peers
    from vfl.bench.mpc_table import format_mpc
    from vfl.bench.network import Wan
    from vfl.mpc.workloads import WORKLOADS

    _require_line(wan, network)
    rows = bench_mpc(
        [name for each in workload or WORKLOADS for name in each.split(",")],
        mode.split(","),
        wan=Wan.parse(wan) if wan else None,
        network=network,
        turns=turns,
        fresh=fresh,
        peers=[one for spec in peer or () for one in peers(spec)],
        say=say,
    )
    if json:
        emit([asdict(row) for row in rows])
    else:
        print(format_mpc(rows))
