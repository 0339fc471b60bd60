"""``vfl report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run or a comparison.")
    ],
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Build report.html of a run: one static file.

    RUN is the folder that `vfl train` or `vfl compare` printed.
    """
    from vfl.report import build_report

    page = build_report(run)
    print(page)
    if show:
        typer.launch(str(page))
