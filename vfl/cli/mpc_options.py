"""Options that the commands of ``vfl mpc`` share, and what all of them print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import emit, figure, say
from vfl.core.ledger import size

if TYPE_CHECKING:
    from vfl.mpc import Rules

Experiment = Annotated[
    Path, typer.Argument(metavar="EXPERIMENT.toml", help="Two parties with columns.")
]
InProcess = Annotated[
    bool, typer.Option("--in-process", help="Three threads instead of three processes with TLS.")
]
Patience = Annotated[float, typer.Option(help="Seconds a party waits for another, a week at most.")]
Join = Annotated[
    float, typer.Option(help="Seconds to wait for the others to come, their tables loaded.")
]
Mode = Annotated[str, typer.Option(help="fast, or thesis: chapter 5 as written.")]
Hidden = Annotated[
    str, typer.Option(help="Widths of hidden layers, such as 128,32; none is a regression.")
]
Rate = Annotated[float, typer.Option(help="Of plain gradient descent.")]
Bits = Annotated[
    int, typer.Option(help="Of the fraction of shared values; 0 takes the mode's, 21 or 23.")
]
MagnitudeBits = Annotated[
    int, typer.Option(help="Values stay below 2 to this, 4 or more; more reveals more indices.")
]
DeltaBits = Annotated[int, typer.Option(help="Of the fraction of gradients.")]
LeastPermuted = Annotated[
    int, typer.Option(help="Fewer values than this are hidden among dummies.")
]
Flips = Annotated[
    bool | None,
    typer.Option(
        "--flips/--no-flips",
        help="Random signs before P2 sees values of a sigmoid; without either, in fast mode.",
    ),
]
TestEveryEpoch = Annotated[
    bool,
    typer.Option(
        "--test-every-epoch",
        help="Tell the label party the test outputs of every epoch, not of the last alone: "
        "without hidden layers they give away the test rows' columns.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="A new folder; one under runs/ if not given.")]


def new_folder(name: str) -> Path:
    """A folder under runs/ that is not there yet."""
    from vfl.config.run_folder import new_run_name

    return Path("runs") / new_run_name(f"{name}-mpc")


def rules_of(
    mode: str,
    bits: int,
    magnitude_bits: int,
    delta_bits: int,
    least_permuted: int,
    flips: bool | None,
) -> Rules:
    """The protocol's rules, from the options."""
    from vfl.core.registry import require_choice
    from vfl.mpc import Rules
    from vfl.mpc.rules import MODES

    require_choice("mode", mode, MODES)
    return Rules(
        "thesis" if mode == "thesis" else "fast",
        bits,
        magnitude_bits,
        delta_bits,
        least_permuted,
        flips,
    )


def widths_of(text: str) -> tuple[int, ...]:
    """The widths of hidden layers."""
    try:
        widths = tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise typer.BadParameter("widths, such as 128,32", param_hint="--hidden")
    return widths


def tables_of(rows: Sequence[str]) -> Path | dict[str, Path]:
    """One table for all, or each party's own."""
    if len(rows) == 1 and "=" not in rows[0]:
        return Path(rows[0])
    pairs = [each.partition("=") for each in rows]
    named = {name: Path(file) for name, _, file in pairs}
    if len(named) < len(pairs) or not all(sign and file for _, sign, file in pairs):
        raise typer.BadParameter("one FILE, or PARTY=FILE once a party", param_hint="--rows")
    return named


def tell(found: Mapping[str, float]) -> None:
    """Print an epoch as it ends, with the figures that were revealed."""
    said = [
        f"epoch {value:.0f}" if name == "epoch" else f"{name.replace('_', ' ')} {figure(value)}"
        for name, value in found.items()
    ]
    say("  ".join(said))


def show(card: Mapping[str, Any], folder: Path, json: bool) -> None:
    """Print a card, for people or as JSON."""
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
    if "predictions" in card:
        print(f"{'predictions':<16} {card['rows']} rows in {card['predictions']}")
    for phase in ("setup", "offline", "online"):
        print(f"{phase:<16} {size(card[f'bytes_{phase}'])}")
    print(f"{'seconds':<16} {card['seconds']:.2f}")
    for leak in card["leakage"]:
        seen = f"{leak['elements']} of {leak['of']}, {leak['times']} times"
        print(f"{leak['observer'] + ' saw':<16} {leak['what']}, {leak['where']}: {seen}")
    print(f"{'run':<16} {folder}")
