"""``vfl status``: where a run or a project stands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.federation import hand_over
from vfl.cli.output import Json, duration, emit, figure, progress_text
from vfl.core.errors import record_lines
from vfl.core.ledger import size

if TYPE_CHECKING:
    from vfl.training.status import ProjectStatus, RunStatus

_SILENT_S = 10.0


def status(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|PROJECT", help="The folder of a run, ended or not, or a project."
        ),
    ] = Path(),
    json: Json = False,
) -> None:
    """Say where a run or a project stands, and what to type next.

    Exit codes of a run: 0 ended well, or serving; 4 at work, or waiting for a party; 5 interrupted,
    nobody is at work; 1, 2 or 3 failed, as the command that failed. Of a project: 0 the SuperLink
    and every party are there; 3 one is not.
    """
    hand_over(path)
    from vfl.federation.project import LabelFolder
    from vfl.training.status import project_status, run_status

    found: RunStatus | ProjectStatus
    if (path / "run.json").exists() or not path.is_dir():
        found = run = run_status(path)
        lines = _run_lines(run)
    else:
        found = project = project_status(LabelFolder.find(path))
        lines = _project_lines(project)
    emit(found.record()) if json else print("\n".join(lines))
    raise typer.Exit(found.exit_code)


def _run_lines(run: RunStatus) -> list[str]:
    facts = {"run": run.run, "state": run.state, "since": run.created}
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
    lines = [f"{name:<20} {value}" for name, value in facts.items()]
    if run.failure is not None:
        lines.append(f"{'failed with':<20} {run.failure['code']}: {run.failure['what']}")
        lines += record_lines(run.failure)
    return lines + [f"{'then':<20} {command}" for command in run.then]


def _project_lines(project: ProjectStatus) -> list[str]:
    up = "not running" if project.superlink is None else f"up, at {project.superlink}"
    lines = [f"{'project':<20} {project.project}", f"{'SuperLink':<20} {up}"]
    lines += [
        f"{party:<20} {'connected' if here else 'not connected'}"
        for party, here in project.parties.items()
    ]
    for run in project.runs:
        share = f", {progress_text(run.progress)}" if run.exit_code == 4 and run.progress else ""
        code = f" with {run.failure['code']}" if run.failure is not None else ""
        lines.append(f"{'run':<20} {Path(run.run).name}: {run.state}{code}{share}")
    return lines + [f"{'then':<20} {command}" for command in project.then]
