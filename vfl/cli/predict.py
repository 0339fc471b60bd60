"""``vfl predict``: answers for rows, as a table at the label party."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import Device, Json, emit


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Predict with a run's weights: predictions.csv in the run folder of the label party.

    In process: the test rows of the experiment. On a federation: the rows of the file that every
    party names in its own `data.predict`. RUN is the folder that `vfl train` printed.
    """
    from vfl.run import predict as predict_in_process
    from vfl.run_folder import RunFolder

    folder = RunFolder.open(run)
    if folder.mode == "federated":
        from vfl import federated

        path = federated.run_session(federated.label_folder_of(run), "predict", run.resolve().name)
        table = path / "predictions.csv"
    else:
        from vfl.threads import use_one_thread

        use_one_thread()
        table = predict_in_process(folder, device)
    with table.open() as lines:
        rows = sum(1 for _ in lines) - 1
    if json:
        emit({"predictions": str(table), "rows": rows, "run": str(run)})
    else:
        print(f"{rows} rows in {table}")
