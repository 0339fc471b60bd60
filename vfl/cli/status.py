"""``vfl status``: the status of a run, a grid, a project or a party."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.federation import hand_over
from vfl.cli.output import Json, argument, duration, emit, figure, print_line, progress_text
from vfl.core.errors import record_lines
from vfl.core.traffic import size

if TYPE_CHECKING:
    from vfl.experiments.folders import GridStatus
    from vfl.training.status import PartyStatus, ProjectStatus, RunStatus

_SILENT_S = 10.0


def status(
    path: Annotated[
        Path,
        argument(
            "The folder of a run or a grid, a project, or a party's own folder.",
            "RUN|GRID|PROJECT|PARTY",
        ),
    ] = Path(),
    json: Json = False,
) -> None:
    """Show the status of a run, a grid, a project or a party, and the user's next command.

    Exit codes for a run, or for the folder of a grid, comparison or value: 0 ended well, or
    serving; 4 running, or waiting for a party; 5 interrupted, and no process is running; 1, 2 or 3
    failed, with the code of the failed command. For a project: 0 the SuperLink and every party are
    online; 3 one is not. For a party, the exit code is 0 if its SuperNode is running; 3 if it is
    not.
    """
    hand_over(path)
    if (path / "grid.json").exists():
        from vfl.experiments.folders import grid_status

        grid = grid_status(path)
        emit(grid.record()) if json else print("\n".join(_grid_lines(grid)))
        raise typer.Exit(grid.exit_code)
    from vfl.federation.project import LabelFolder
    from vfl.training.status import party_status, project_status, run_status

    found: RunStatus | ProjectStatus | PartyStatus
    own = path if path.is_dir() else path.parent
    if (own / "party.toml").exists() and not (own / "app").exists():
        found = party = party_status(own)
        lines = _party_lines(party)
    elif (path / "run.json").exists() or not path.is_dir():
        found = run = run_status(path)
        lines = _run_lines(run)
    else:
        found = project = project_status(LabelFolder.find(path))
        lines = _project_lines(project)
    emit(found.record()) if json else print("\n".join(lines))
    raise typer.Exit(found.exit_code)


def _lines(facts: Iterable[tuple[str, object]]) -> list[str]:
    return [f"{name:<20} {value}" for name, value in facts]


def _run_lines(run: RunStatus) -> list[str]:
    facts = {"run": run.run, "state": run.state, "since": run.created}
    if run.promoted:
        facts["promoted"] = "yes"
    if run.address:
        facts["address"] = run.address
    if run.progress is not None and run.state not in ("ended", "failed"):
        facts["progress"] = progress_text(run.progress)
        if run.silent_s is not None and run.silent_s > _SILENT_S:
            facts["last sign"] = f"{duration(run.silent_s)} ago"
    if run.epochs:
        facts["epochs"] = str(run.epochs)
    facts |= {name.replace("_", " "): figure(value) for name, value in run.figures.items()}
    facts |= {party: f"{size(count)} up and down" for party, count in run.bytes.items()}
    if any(run.erased.values()):
        had = ", ".join(f"{count} {part}" for part, count in run.erased.items() if count)
        facts["erased since"] = f"{had} rows; train again to be without them"
    lines = _lines(facts.items())
    if run.failure is not None:
        lines += _lines([("failed with", f"{run.failure['code']}: {run.failure['what']}")])
        lines += record_lines(run.failure)
    return lines + _lines(("then", command) for command in run.then)


def _grid_lines(grid: GridStatus) -> list[str]:
    facts = {grid.kind: grid.grid, "state": grid.state, "since": grid.created}
    facts["cells"] = f"{grid.done} of {grid.cells} done"
    lines = _lines(facts.items())
    lines += _lines(("failed", f"{title}: {what}") for title, what in grid.failed.items())
    return lines + _lines(("then", command) for command in grid.then)


def runs(
    folder: Annotated[Path, argument("Folder of runs and grids.", "FOLDER")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs and grids in a folder, newest first, and write the folder's index.html.

    Each line has the status and results of one run or grid; the page has links to the pages of the
    runs. The list marks the promoted run, and the run that `vfl rollback` would promote again.
    """
    from dataclasses import asdict

    from vfl.experiments.pages import build_index
    from vfl.training.promotion import promoted_runs

    listed, page = build_index(folder)
    *_, before, now = [None, None, *promoted_runs(folder)]
    if json:
        found = [asdict(one) for one in listed]
        emit({"runs": found, "promoted": now, "before": before, "page": str(page)})
        return
    marks = {before: ", promoted before (vfl rollback)", now: ", promoted"}
    for one in listed:
        print(f"{one.name}\n    {one.kind}, {one.state}, {one.created}{marks.get(one.name, '')}")
        if one.sentence:
            print(fill(one.sentence, 96, initial_indent="    ", subsequent_indent="    "))
    print_line("page", page)


def _project_lines(project: ProjectStatus) -> list[str]:
    up = "not running" if project.superlink is None else f"up, at {project.superlink}"
    lines = _lines([("project", project.project), ("SuperLink", up)])
    lines += _lines(
        (party, "connected" if here else "not connected") for party, here in project.parties.items()
    )
    for run in project.runs:
        share = f", {progress_text(run.progress)}" if run.exit_code == 4 and run.progress else ""
        code = f" with {run.failure['code']}" if run.failure is not None else ""
        told = f", at {run.address}" if run.address else ""
        told += ", promoted" if run.promoted else ""
        lines += _lines([("run", f"{Path(run.run).name}: {run.state}{code}{share}{told}")])
    return lines + _lines(("then", command) for command in project.then)


def _party_lines(party: PartyStatus) -> list[str]:
    facts = {
        "party": party.party,
        "table": "there" if party.table else "none yet",
        "keys": "there" if party.keys else "none yet",
        "SuperNode": "up" if party.up else "not running",
    }
    lines = _lines(facts.items())
    return lines + _lines(("then", command) for command in party.then)
