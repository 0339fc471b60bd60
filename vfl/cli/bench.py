"""``vfl bench``: how fast, measured here and now."""

from __future__ import annotations

from typing import Annotated

import typer

from vfl.cli.output import Json, emit, say

app = typer.Typer(help="Measure vfl on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure vfl on this machine."""


@app.command("step")
def step(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few steps: does it run, not how fast.")
    ] = False,
    json: Json = False,
) -> None:
    """One training step: monolith, in process, over TCP, over TLS; ratios of one run."""
    from dataclasses import asdict

    from vfl.bench.step import QUICK_STEPS, REPEATS, bench_step, format_table

    rows = bench_step(
        steps=QUICK_STEPS if quick else None, repeats=1 if quick else REPEATS, say=say
    )
    if json:
        emit([asdict(row) for row in rows])
    else:
        print(format_table(rows))
