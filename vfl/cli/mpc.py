"""``vfl mpc``: train and ask a network that no party holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli import mpc_party
from vfl.cli.mpc_options import (
    Bits,
    DeltaBits,
    Experiment,
    Flips,
    Hidden,
    InProcess,
    Join,
    LeastPermuted,
    MagnitudeBits,
    Mode,
    Out,
    Patience,
    Rate,
    TestEveryEpoch,
    new_folder,
    rules_of,
    show,
    tables_of,
    tell,
    widths_of,
)
from vfl.cli.output import Json, Set

app = typer.Typer(
    help="Train and ask a network on shares: two parties hold them, a third helps.",
    no_args_is_help=True,
)


@app.callback()
def mpc() -> None:
    """Train and ask a network on shares: two parties hold them, a third helps."""


@app.command("train")
def train(
    path: Experiment,
    settings: Set = None,
    mode: Mode = "fast",
    hidden: Hidden = "",
    learning_rate: Rate = 0.5,
    bits: Bits = 0,
    magnitude_bits: MagnitudeBits = 8,
    delta_bits: DeltaBits = 16,
    least_permuted: LeastPermuted = 32,
    flips: Flips = None,
    test_every_epoch: TestEveryEpoch = False,
    out: Out = None,
    timeout_s: Patience = 60.0,
    join_s: Join = 120.0,
    in_process: InProcess = False,
    json: Json = False,
) -> None:
    """Train on shares: nobody sees the others' columns, labels or any weight.

    The two parties with columns are P0 and P1. A label party of its own is P2, which deals
    randomness and sees permuted sums; docs/mpc.md says what that tells it. Of the experiment's
    settings, data, parties' columns, label, epochs, rows of a batch and seed are used.
    """
    from vfl.config import read_experiment
    from vfl.core.seeds import use_one_thread
    from vfl.triple import train_private

    use_one_thread()
    rules = rules_of(mode, bits, magnitude_bits, delta_bits, least_permuted, flips)
    experiment = read_experiment(path, settings or [])
    folder = out or new_folder(experiment.name)
    card = train_private(
        experiment,
        folder,
        rules=rules,
        hidden=widths_of(hidden),
        learning_rate=learning_rate,
        processes=not in_process,
        timeout_s=timeout_s,
        join_s=join_s,
        test_every_epoch=test_every_epoch,
        tell=tell,
    )
    show(card, folder, json)


@app.command("infer")
def infer(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of vfl mpc train.")],
    timeout_s: Patience = 60.0,
    join_s: Join = 120.0,
    in_process: InProcess = False,
    json: Json = False,
) -> None:
    """Answer the test rows with a network on shares; the label party receives the answers."""
    from vfl.core.seeds import use_one_thread
    from vfl.triple import infer_private

    use_one_thread()
    card = infer_private(folder, processes=not in_process, timeout_s=timeout_s, join_s=join_s)
    show(card, folder, json)


@app.command("predict")
def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of vfl mpc train.")],
    rows: Annotated[
        list[str],
        typer.Option(
            metavar="PARTY=FILE", help="A party's table of new rows; repeat it. FILE: all parties'."
        ),
    ],
    timeout_s: Patience = 60.0,
    join_s: Join = 120.0,
    in_process: InProcess = False,
    json: Json = False,
) -> None:
    """Answer new rows, which have no labels: predictions.csv at the party with the labels.

    That party's table needs the ids alone, if it has no columns.
    """
    from vfl.core.seeds import use_one_thread
    from vfl.triple import predict_private

    use_one_thread()
    card = predict_private(
        folder,
        tables_of(rows),
        processes=not in_process,
        timeout_s=timeout_s,
        join_s=join_s,
    )
    show(card, folder, json)


app.command("invite")(mpc_party.invite)
app.command("party")(mpc_party.party)
