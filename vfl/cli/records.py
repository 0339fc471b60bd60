"""``vfl log`` and ``vfl forget``: verifiable session records, and erasure of rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.output import Json, OwnFile, argument, emit, option, print_line, say

if TYPE_CHECKING:
    from vfl.config import PartyFile
    from vfl.session.store.session_log import Verified


def log(
    path: Annotated[
        Path, argument("The party's own file, or a copy of its log.jsonl.", "party.toml|LOG")
    ],
    key: Annotated[
        list[Path] | None,
        option(
            "A public identity key of the party; for party.toml, keys that it used earlier.",
            "FILE.pub",
        ),
    ] = None,
    peer: Annotated[
        list[Path] | None,
        option(
            "Another party's log.jsonl of the same sessions, whose entries are compared.", "LOG"
        ),
    ] = None,
    page: Annotated[
        Path | None,
        option("Write a page with a data-protection sheet and model cards.", "FILE.html"),
    ] = None,
    json: Json = False,
) -> None:
    """Show the log of a party's sessions, and verify it.

    Each line of the log contains a hash of the line before it, and is signed with the party's
    identity key, if the party has one. The exit code is 1 if a line was changed, moved or removed,
    if no given key has signed a line, or if another party's log differs. Only another party's log
    shows that the last lines were removed, or that the party rewrote its log: lines that no other
    log confirms are only the party's own statement.
    """
    from vfl.config import is_party_file, read_party_file
    from vfl.session.store.identity import Identity, Pin
    from vfl.session.store.party_folder import own_ledger
    from vfl.session.store.session_log import verified

    party, keys, file = None, [Pin.kept_at(one) for one in key or ()], path
    if path.suffix != ".jsonl" and is_party_file(path):
        party = read_party_file(path)
        own, file = party.beside(party.identity.key), own_ledger(party).log.path
        keys += [Identity.kept_at(own).public] if own.exists() else []
        if not file.exists():
            emit({"party": party.party, "lines": []}) if json else print("no session yet")
            return
    found = verified(file, keys, peer or ())
    from vfl.experiments.pages import log_page

    if page is not None:
        log_page.write_log_page(page, party, found)
        say(f"wrote {page}")
    if json:
        emit(_facts(party, found))
    else:
        for line in found.lines:
            about = " ".join(filter(None, (line.event, line.mode, line.run)))
            print(f"{line.number:>5}  {line.at[:16]}  {about}: {log_page.happened(line)}")
        print_line("log", f"{found.party}, line {found.head.number}, sha256 {found.head.sha256}")
        for sentence in log_page.sentences(found):
            print_line("verified" if found.holds else "look", sentence)
    if not found.holds:
        raise typer.Exit(1)


def forget(
    party_file: OwnFile,
    ids: Annotated[
        Path,
        option(
            "File with the ids to forget, one per line; tabs separate the columns of an id.",
            "FILE",
            "--ids",
        ),
    ],
    table: Annotated[
        bool,
        option("Also rewrite the party's own CSV or Parquet files without these rows.", "--table"),
    ] = False,
    json: Json = False,
) -> None:
    """Erase rows at the party that owns them, and list remaining data about these rows.

    The command removes the rows from stored row positions, digests of ids and predictions, and
    deletes the traces of runs that used the rows. The command marks the runs that used the erased
    rows. The other parties receive the erased rows' positions when the next session begins;
    predictions of all other rows continue without a new alignment. The command prints no id. `KEPT`
    in `vfl/session/store/erasure.py` lists every file with data about rows.
    """
    from dataclasses import asdict

    from vfl.config import read_party_file
    from vfl.session.store.erasure import forget as erase
    from vfl.session.store.erasure import read_list

    done = erase(read_party_file(party_file), read_list(ids), rewrite=table)
    if json:
        emit(asdict(done) | {"remains": done.remains()})
        return
    print_line("ids", f"{done.asked} in the list, {done.found} of their rows in the table")
    for name, count in done.alignments.items():
        print_line("alignment", f"{count} rows removed from {name}")
    for run, parts in done.runs.items():
        had = ", ".join(f"{count} {part}" for part, count in parts.items() if count)
        print_line("run", f"{run} had {had}")
    if done.predictions:
        print_line("predictions", f"{done.predictions} lines removed")
    for run in done.traces:
        print_line("trace", f"the trace of {run} is removed")
    for sentence in done.remains():
        print_line("remains", sentence)


def _facts(party: PartyFile | None, found: Verified) -> dict[str, Any]:
    from vfl.experiments.pages.log_page import model_cards, protection_sheet, sentences

    facts = {
        "party": found.party,
        "holds": found.holds,
        "said": sentences(found),
        "head": found.head.model_dump(),
        "anchored": found.anchored,
        "lines": [line.model_dump(mode="json", exclude_defaults=True) for line in found.lines],
    }
    if party is not None:
        facts["data_protection"] = protection_sheet(party, found.lines)
        facts["models"] = model_cards(party, found.lines)
    return facts
