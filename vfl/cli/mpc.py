"""``vfl mpc``: train and ask a network that no party holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import Json, Set, emit, figure, say
from vfl.ledger import size

if TYPE_CHECKING:
    from vfl.mpc import Rules

app = typer.Typer(
    help="Train and ask a network on shares: two parties hold them, a third helps.",
    no_args_is_help=True,
)

Experiment = Annotated[
    Path, typer.Argument(metavar="EXPERIMENT.toml", help="Two parties with columns.")
]
InProcess = Annotated[
    bool, typer.Option("--in-process", help="Three threads instead of three processes with TLS.")
]
Patience = Annotated[float, typer.Option(help="Seconds a party waits for another.")]
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
    int, typer.Option(help="Values stay below 2 to this; more reveals more indices.")
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
Out = Annotated[Path | None, typer.Option(help="A new folder; one under runs/ if not given.")]


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
    from vfl.threads import use_one_thread
    from vfl.triple import train_private

    use_one_thread()
    rules = _rules(mode, bits, magnitude_bits, delta_bits, least_permuted, flips)
    experiment = read_experiment(path, settings or [])
    folder = out or _folder(experiment.name)
    card = train_private(
        experiment,
        folder,
        rules=rules,
        hidden=_widths(hidden),
        learning_rate=learning_rate,
        processes=not in_process,
        timeout_s=timeout_s,
        join_s=join_s,
        tell=_tell,
    )
    _show(card, folder, json)


@app.command("infer")
def infer(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of vfl mpc train.")],
    timeout_s: Patience = 60.0,
    join_s: Join = 120.0,
    in_process: InProcess = False,
    json: Json = False,
) -> None:
    """Answer the test rows with a network on shares; the label party receives the answers."""
    from vfl.threads import use_one_thread
    from vfl.triple import infer_private

    use_one_thread()
    card = infer_private(folder, processes=not in_process, timeout_s=timeout_s, join_s=join_s)
    _show(card, folder, json)


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
    from vfl.threads import use_one_thread
    from vfl.triple import predict_private

    use_one_thread()
    named = [each.rpartition("=") for each in rows]
    given = {name: Path(file) for name, _, file in named}
    card = predict_private(
        folder,
        given.get("", given) if len(given) == 1 else given,
        processes=not in_process,
        timeout_s=timeout_s,
        join_s=join_s,
    )
    _show(card, folder, json)


@app.command("invite")
def invite(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files go.")],
    role: Annotated[str, typer.Option("--as", help="P0 or P2; P1 calls both, and needs none.")],
    address: Annotated[str, typer.Option(help="HOST:PORT at which the callers reach it.")],
) -> None:
    """Make the door of a party that others call, and an invitation for each caller.

    P2 is called by P0 and P1, and P0 by P1. Give each invitation to its caller alone, by a way
    that P2 cannot read where it is P0's; the door stays here. They are good for 90 days.
    """
    from vfl.options import require_choice
    from vfl.triple.door import Door

    require_choice("as", role, ("P0", "P2"))
    host, port = _address(address, "--address")
    for path in Door.fresh(int(role[1]), host, port).keep_in(folder):
        print(path)


@app.command("party")
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
    from vfl.threads import use_one_thread
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
        rules = _rules(mode, bits, magnitude_bits, delta_bits, least_permuted, flips)
        terms = Terms.of(experiment, rules, _widths(hidden), learning_rate)
        folder = out or _folder(experiment.name)
        card = train_alone(experiment, terms, folder, ways, _tell)
    _show(card, folder, json)


def _folder(name: str) -> Path:
    from vfl.run_folder import new_run_name

    return Path("runs") / new_run_name(f"{name}-mpc")


def _rules(
    mode: str,
    bits: int,
    magnitude_bits: int,
    delta_bits: int,
    least_permuted: int,
    flips: bool | None,
) -> Rules:
    from vfl.mpc import Rules
    from vfl.mpc.rules import MODES
    from vfl.options import require_choice

    require_choice("mode", mode, MODES)
    return Rules(
        "thesis" if mode == "thesis" else "fast",
        bits,
        magnitude_bits,
        delta_bits,
        least_permuted,
        flips,
    )


def _address(text: str, hint: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter("HOST:PORT, such as 10.0.0.2:7000", param_hint=hint)
    return host.strip("[]"), int(port)


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise typer.BadParameter("widths, such as 128,32", param_hint="--hidden")
    return widths


def _tell(found: Mapping[str, float]) -> None:
    say("  ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in found.items()))


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
    if "predictions" in card:
        print(f"{'predictions':<16} {card['rows']} rows in {card['predictions']}")
    for phase in ("setup", "offline", "online"):
        print(f"{phase:<16} {size(card[f'bytes_{phase}'])}")
    print(f"{'seconds':<16} {card['seconds']:.2f}")
    for leak in card["leakage"]:
        seen = f"{leak['elements']} of {leak['of']}, {leak['times']} times"
        print(f"{leak['observer'] + ' saw':<16} {leak['what']}, {leak['where']}: {seen}")
    print(f"{'run':<16} {folder}")
