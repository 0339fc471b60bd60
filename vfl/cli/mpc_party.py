"""``vfl mpc invite`` and ``vfl mpc party``: each of the three on a machine of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.mpc_options import (
    Bits,
    DeltaBits,
    Experiment,
    Flips,
    Hidden,
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
    tell,
    widths_of,
)
from vfl.cli.output import Json, Set


def invite(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files go.")],
    role: Annotated[str, typer.Option("--as", help="P0 or P2; P1 calls both, and needs none.")],
    address: Annotated[str, typer.Option(help="HOST:PORT at which the callers reach it.")],
) -> None:
    """Make the door of a party that others call, and an invitation for each caller.

    P2 is called by P0 and P1, and P0 by P1. Give each invitation to its caller alone, by a way
    that P2 cannot read where it is P0's; the door stays here. They are good for 90 days.
    """
    from vfl.core.registry import require_choice
    from vfl.triple.door import Door

    require_choice("as", role, ("P0", "P2"))
    host, port = _address(address, "--address")
    for path in Door.fresh(int(role[1]), host, port).keep_in(folder):
        print(path)


def party(
    path: Experiment,
    name: Annotated[str, typer.Option("--as", help="P0, P1, P2, or a party's name.")],
    door: Annotated[
        Path | None, typer.Option(help="Of vfl mpc invite, at P0 and P2: the folder.")
    ] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to listen on, if it is not the door's address.")
    ] = "",
    invitation: Annotated[
        list[Path] | None, typer.Option(help="A file of another party's vfl mpc invite; repeat it.")
    ] = None,
    ask: Annotated[
        Path | None, typer.Option(help="What this party kept of a training, to ask its network.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="With --ask: this party's table of new rows, to predict.")
    ] = None,
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
    json: Json = False,
) -> None:
    """Be one of the three parties, on a machine of its own; the others start theirs.

    All three give the same experiment and options, which they compare before anything else. Each
    reads its own table alone: in its copy of the experiment, another party's `source` need not
    be there. A new training is kept in `--out`; with `--ask` nothing is, but for the answers of
    `--rows` at the party with the labels.
    """
    from vfl.config import read_experiment
    from vfl.core.seeds import use_one_thread
    from vfl.triple.alone import Ways, ask_alone, role_of, train_alone
    from vfl.triple.plan import Terms

    if rows and not ask:
        raise typer.BadParameter("rows are predicted with --ask RUN", param_hint="--rows")
    use_one_thread()
    experiment = read_experiment(path, settings or [])
    role = role_of(experiment, name)
    at = _address(listen, "--listen") if listen else None
    ways = Ways.read(role, door, at, invitation or [], timeout_s, join_s)
    if ask:
        card, folder = ask_alone(experiment, ask, ways, rows), ask
    else:
        rules = rules_of(mode, bits, magnitude_bits, delta_bits, least_permuted, flips)
        terms = Terms.of(
            experiment,
            rules,
            widths_of(hidden),
            learning_rate,
            test_every_epoch=test_every_epoch,
        )
        folder = out or new_folder(experiment.name)
        card = train_alone(experiment, terms, folder, ways, tell)
    show(card, folder, json)


def _address(text: str, hint: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter("HOST:PORT, such as 10.0.0.2:7000", param_hint=hint)
    return host.strip("[]"), int(port)
