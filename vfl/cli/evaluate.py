"""``vfl evaluate``: a trained run on its test rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import Device, Json, emit, machine, show


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Evaluate a run's weights on its test rows, each party with its own half.

    RUN is the folder that `vfl train` printed.
    """
    from vfl.run import evaluate as evaluate_in_process
    from vfl.run_folder import RunFolder

    folder = RunFolder.open(run)
    if folder.mode == "federated":
        from vfl import federated

        path = federated.run_session(federated.label_folder_of(run), "evaluate", run.resolve().name)
        summary = federated.summary_of(path, "evaluate")
    else:
        from vfl.threads import use_one_thread

        use_one_thread()
        summary = evaluate_in_process(folder, device)
    emit(machine(summary)) if json else show(summary)
