"""``vfl mpc``: train and ask a network that no party holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from vfl.cli.output import Json, Set, emit, figure, say
from vfl.ledger import size

app = typer.Typer(
    help="Train and ask a network on shares: two parties hold them, a third helps.",
    no_args_is_help=True,
)

InProcess = Annotated[
    bool, typer.Option("--in-process", help="Three threads instead of three processes with TLS.")
]
Patience = Annotated[float, typer.Option(help="Seconds a party waits for another.")]


@app.callback()
def mpc() -> None:
    """Train and ask a network on shares: two parties hold them, a third helps."""


@app.command("train")
def train(
    path: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.toml", help="Two parties with columns.")
    ],
    settings: Set = None,
    mode: Annotated[str, typer.Option(help="fast, or thesis: chapter 5 as written.")] = "fast",
    hidden: Annotated[
        str, typer.Option(help="Widths of hidden layers, such as 128,32; none is a regression.")
    ] = "",
    learning_rate: Annotated[float, typer.Option(help="Of plain gradient descent.")] = 0.5,
    magnitude_bits: Annotated[
        int, typer.Option(help="Divided values stay below 2 to this; more reveals more indices.")
    ] = 8,
    out: Annotated[
        Path | None, typer.Option(help="A new folder; one under runs/ if not given.")
    ] = None,
    timeout_s: Patience = 60.0,
    in_process: InProcess = False,
    json: Json = False,
) -> None:
    """Train on shares: nobody sees the others' columns, labels or any weight.

    The two parties with columns are P0 and P1. A label party of its own is P2, which deals
    randomness and sees permuted sums; docs/mpc.md says what that tells it. Of the experiment's
    settings, data, parties' columns, label, epochs, rows of a batch and seed are used.
    """
    from vfl.config import read_experiment
    from vfl.options import require_choice
    from vfl.run_folder import new_run_name
    from vfl.threads import use_one_thread
    from vfl.triple import train_private

    use_one_thread()
    require_choice("mode", mode, ("thesis", "fast"))
    experiment = read_experiment(path, settings or [])
    folder = out or Path("runs") / new_run_name(f"{experiment.name}-mpc")
    card = train_private(
        experiment,
        folder,
        mode="thesis" if mode == "thesis" else "fast",
        hidden=_widths(hidden),
        learning_rate=learning_rate,
        processes=not in_process,
        timeout_s=timeout_s,
        magnitude_bits=magnitude_bits,
        tell=lambda found: say(_line(found)),
    )
    _show(card, folder, json)


@app.command("infer")
def infer(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of vfl mpc train.")],
    timeout_s: Patience = 60.0,
    in_process: InProcess = False,
    json: Json = False,
) -> None:
    """Answer the test rows with a network on shares; the label party receives the answers."""
    from vfl.threads import use_one_thread
    from vfl.triple import infer_private

    use_one_thread()
    card = infer_private(folder, processes=not in_process, timeout_s=timeout_s)
    _show(card, folder, json)


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise typer.BadParameter("widths, such as 128,32", param_hint="--hidden")
    return widths


def _line(found: Mapping[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in found.items())


def _show(card: Mapping[str, Any], folder: Path, json: bool) -> None:
    if json:
        emit({**card, "run": str(folder)})
        return
    for role, party in card["parties"].items():
        has = ", the labels" if party == card["labels"] else ""
        holds = "shares" if role != "P2" else "deals, sees permuted sums"
        print(f"{role:<16} {party} ({holds}{has})")
    for name, value in card.items():
        if name.startswith("test_"):
            print(f"{name.replace('_', ' '):<16} {figure(value)}")
    for phase in ("setup", "offline", "online"):
        print(f"{phase:<16} {size(card[f'bytes_{phase}'])}")
    print(f"{'seconds':<16} {card['seconds']:.2f}")
    for leak in card["leakage"]:
        seen = f"{leak['elements']} of {leak['of']}, {leak['times']} times"
        print(f"{leak['observer'] + ' saw':<16} {leak['what']}, {leak['where']}: {seen}")
    print(f"{'run':<16} {folder}")
