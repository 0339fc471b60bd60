"""``vfl sessions``: what a party has taken part in, and what was spent under each name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import Json, emit
from vfl.ledger import size

if TYPE_CHECKING:
    from vfl.session.ledger import Entry


def sessions(
    party_file: Annotated[Path, typer.Argument(metavar="party.toml", help="The party's own file.")],
    json: Json = False,
) -> None:
    """List the sessions a party has taken part in, the latest last.

    A name stands for one training and its evaluations and predictions, with the same parties,
    codec, defense and secure mode. Rows are counted as often as their cuts were sent. The epsilon
    is what the defense states for the inputs of one row sent once, times how often any one row was
    sent at most; "-" where the defense states none.
    """
    from vfl.config import read_party_file
    from vfl.session.own_data import own_ledger

    entries = own_ledger(read_party_file(party_file)).entries()
    if json:
        emit([_facts(entry) for entry in entries])
        return
    for entry in entries:
        print(f"{entry.run}  {entry.state}, with {', '.join(entry.parties)}")
        print(f"  {entry.defense} defense, {entry.codec} codec, {entry.secure} secure mode")
        for mode, spent in entry.spent.items():
            sent = f"{size(spent.bytes_up)} up, {size(spent.bytes_down)} down"
            print(f"  {mode:<9} {spent.sessions} begun, {spent.rows} rows, {sent}")
        print(f"  epsilon   {_epsilon(entry)}")
        print(f"  from {entry.first} to {entry.last}")
    if not entries:
        print("no session yet")


def _epsilon(entry: Entry) -> str:
    if entry.spent_epsilon is None:
        return "-"
    text = f"at most {entry.spent_epsilon:.4g}: {entry.passes} times {entry.epsilon:.4g}"
    return f"{text}, delta {entry.passes * entry.delta:.2g}" if entry.delta else text


def _facts(entry: Entry) -> dict[str, Any]:
    """An entry for machines; the nonce is a secret."""
    facts = entry.model_dump(mode="json", exclude={"nonce", "settings"})
    return facts | {"passes": entry.passes, "spent_epsilon": entry.spent_epsilon}
