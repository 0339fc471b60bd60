"""``vfl attack``: what attackers get out of one finished run."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.cells import ATTACKS_HELP, numbers
from vfl.cli.output import Json, Set, emit, say

if TYPE_CHECKING:
    from vfl.config import GridSettings
    from vfl.grid.attack_rows import Row


def attack(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that vfl train printed.")],
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", metavar="SPEC", help=ATTACKS_HELP),
    ] = None,
    leaks: Annotated[
        str, typer.Option(metavar="1,5,10", help="Leaked labels of each class.")
    ] = "1,5,10",
    draws: Annotated[int, typer.Option(min=1, help="Draws of leaked rows.")] = 3,
    party: Annotated[
        str | None, typer.Option(help="The feature party that attacks; otherwise the first.")
    ] = None,
    settings: Set = None,
    json: Json = False,
) -> None:
    """Attack the test rows of a run and set each attack beside what it needs no run for.

    --set changes a setting of a grid, such as leaks_from=validation or trained_by=owner. Scores
    are kept in the run's folder and on its page; what was tried before is not tried again.
    Attacks on gradients need a run that was trained with -s trace.phases=train, and those on
    columns one with -s 'trace.phases=["validation", "test"]'.
    """
    from vfl.grid.attack_run import attacked
    from vfl.report import build_report
    from vfl.run_folder import RunFolder
    from vfl.threads import use_one_thread

    use_one_thread()
    asked = {"attacks": attacks, "leaks": numbers(leaks), "draws": draws, "party": party}
    overrides = [f"{key}={jsons.dumps(value)}" for key, value in asked.items() if value]
    rows = attacked(RunFolder.open(run), _settings([*overrides, *(settings or [])]), say)
    page = build_report(run)
    if json:
        from dataclasses import asdict

        emit([asdict(row) for row in rows])
        return
    _show(rows)
    print(f"{'report':<16} {page}")


def _settings(overrides: list[str]) -> GridSettings:
    from vfl.config import GridSettings
    from vfl.config.toml import check, override

    return check(override({}, overrides), GridSettings, where="the options")


def _show(rows: list[Row]) -> None:
    from vfl.grid.attack_run import sentences, summary_table
    from vfl.grid.attack_table import markdown

    print(markdown(summary_table(rows)))
    for attack, sentence in sentences(rows).items():
        print(f"{attack:<28} {sentence}")
