"""The page of a party's session log: events, reasons to trust the log, and data sheets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vfl.config import PartyFile
from vfl.core.errors import RunFolderError
from vfl.core.storage import write_text
from vfl.core.traffic import size
from vfl.core.version import VERSION
from vfl.experiments.glance import Card, Glance
from vfl.experiments.pages.build import ENVIRONMENT
from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.tables import Table, date_text, list_text
from vfl.session.store.party_folder import part_of
from vfl.session.store.session_log import Line, Verified

#: Placeholder in a data sheet for an entry that only the data controller can fill in.
_TO_STATE = "for the controller to state"


def sentences(found: Verified) -> list[str]:
    """Return sentences about the integrity of a party's session log.

    Args:
        found: the verified session log.
    """
    if not found.head.number:
        return ["no session yet"]
    said = [*found.problems]
    if found.unsigned:
        said.append(f"{found.unsigned} lines have no signature: the party had no identity key")
    if found.strange:
        said.append(f"{found.strange} lines are signed by keys that were not given (--key)")
    if found.holds:
        said.append(f"all {found.signed} lines are chained by hashes, and signed by a given key")
    if found.anchored:
        rest = found.head.number - found.anchored
        said.append(
            f"other parties confirm lines 1 to {found.anchored}, but not the {rest} after them"
        )
    else:
        said.append("no other party's log confirms this log: its owner could have rewritten it")
    if found.open:
        said.append(
            f"{found.open} sessions began and have not ended: they are running, or were killed"
        )
    return said


def protection_sheet(party: PartyFile, lines: Sequence[Line]) -> dict[str, str]:
    """Return a record of processing activities (GDPR, article 30) from a party's log.

    Args:
        party: the party file of the party.
        lines: lines of the party's session log.
    """
    begun = [line for line in lines if line.event == "begun"]
    ended = [line for line in lines if line.event == "ended"]
    others = {name for line in begun for name in line.parties} - {party.party}
    consents = [line for line in lines if line.event == "consent"]
    epsilon = sum(line.epsilon or 0.0 for line in ended)
    stated = any(line.epsilon is not None for line in ended)
    sessions = Counter(line.mode for line in begun)
    forgotten = sum(line.rows for line in lines if line.event == "forgotten")
    sent = size(sum(line.bytes_up for line in ended))
    today = "no session yet" if not lines else f"{lines[0].at} to {lines[-1].at}"
    return {
        "controller": f"{party.party}; name and contact {_TO_STATE}",
        "period": today,
        "purposes": _listed(line.purpose or "none named" for line in begun),
        "legal basis": _TO_STATE,
        "asked by": _listed(line.asked_by for line in begun),
        "other parties of these sessions": _listed(others),
        "sessions": ", ".join(f"{count} {mode}" for mode, count in sorted(sessions.items())) or "0",
        "refused": str(sum(line.event == "refused" for line in lines)),
        "rows sent, counted at each sending": str(sum(line.rows for line in ended)),
        "sent": f"{sent} of cuts or similar messages; columns and ids stay here",
        "epsilon spent, of one row's inputs": f"{epsilon:.4g}" if stated else "none is stated",
        "rows erased": str(forgotten),
        "consent": f"party.toml, in {len(consents)} versions"
        + (f"; the last has sha256 {consents[-1].consent}" if consents else ""),
        "retention": _TO_STATE,
    }


def model_cards(party: PartyFile, lines: Sequence[Line]) -> dict[str, dict[str, str]]:
    """Return model cards: the party's summary of each run, by name of the run.

    Args:
        party: the party file of the party.
        lines: lines of the party's session log.
    """
    found = {}
    for run in dict.fromkeys(line.run for line in lines if line.mode == "train"):
        ends = [line for line in lines if (line.run, line.mode) == (run, "train")]
        part = part_of(party.run_path(run), party)
        try:
            card, erased = part.card(), part.forgotten()
        except RunFolderError:
            found[run] = {"state": f"{ends[-1].event}, {ends[-1].outcome or 'no end'}; no model"}
            continue
        had = ", ".join(f"{count} {name}" for name, count in erased.items() if count)
        found[run] = _card(card) | {"rows erased since": had or "none"}
        found[run] |= {"purpose": ends[-1].purpose or "none named"}
    return found


def _card(card: Mapping[str, Any]) -> dict[str, str]:
    model, data, privacy = card["model"], card["data"], card["privacy"]
    rows, figures = data["rows"], card["test_figures"]
    if isinstance(figures, Mapping):
        figures = ", ".join(f"{name} {_number(value)}" for name, value in figures.items())
    states = privacy["states"]
    if not isinstance(states, str):
        states = "; ".join(str(one["text"]) for one in states)
    return {
        "role": str(card["role"]),
        "holds": str(model["half"]),
        "model": f"{model['bottom'] or 'see the terms'}, {model['numbers']} numbers",
        "weights, sha256": str(model["weights_sha256"]),
        "rows": ", ".join(f"{count} {part}" for part, count in rows.items()),
        "test figures": str(figures),
        "cuts": str(privacy["cuts"]),
        "defense and codec": f"{privacy['defense']}, {privacy['codec']}",
        "promises": str(states),
        "attacks": str(privacy["attacks"]),
    }


def write_log_page(target: Path, party: PartyFile | None, found: Verified) -> None:
    """Write the page of a session log, with data sheets if the party file is given.

    Args:
        target: the file.
        party: the party file; None if only a copy of the log is available.
        found: the verified session log.
    """
    said = sentences(found)
    sections = [
        Section(
            title="What happened",
            tables=[_table(found.lines)],
            below="A line is written under the lock of the party's ledger when a session begins, "
            "and when it ends or is refused. Rows count as often as they were sent.",
        )
    ]
    if party is not None:
        sheet = protection_sheet(party, found.lines)
        sections.insert(0, Section(title="Data protection", pairs=list(sheet.items())))
        sections[1:1] = [
            Section(title=f"Model of {run}", pairs=list(card.items()))
            for run, card in model_cards(party, found.lines).items()
        ]
    verdict = "holds" if found.holds else "does not hold"
    cards = [
        Card("Lines", str(found.head.number)),
        Card("Chain and signatures", verdict, f"{found.signed} signed lines"),
        Card("Confirmed by others", f"to line {found.anchored}" if found.anchored else "no"),
        Card("Refused", str(sum(line.event == "refused" for line in found.lines))),
    ]
    content = Content(
        Glance(cards, f"{said[0][:1].upper()}{said[0][1:]}.", [f"{one}." for one in said[1:]]),
        f"{found.head.number} lines",
        f"The log of party {found.party}, up to line {found.head.number} of SHA-256 "
        f"{found.head.sha256}.",
        [],
        sections,
    )
    last = date_text(found.lines[-1].at) if found.lines else "empty"
    page = {
        "kind": "log",
        "name": f"Sessions of {found.party}",
        "meta": f"{content.count} · {last} · vfl {VERSION}",
        "content": content,
        "loads_pictures": False,
        "command": None,
        "config_text": "",
    }
    write_text(target, ENVIRONMENT.get_template("page.html").render(page=page))


def happened(line: Line) -> str:
    """Return the event in a line of the session log, as text."""
    if line.event == "consent":
        changed = ", ".join(sorted(line.settings)) or "nothing"
        return f"the party's own file sets {changed} of [consent]"
    if line.event == "begun":
        return f"asked by {line.asked_by}" + (f" for: {line.purpose}" if line.purpose else "")
    if line.event == "ended":
        spent = "" if line.epsilon is None else f", epsilon {line.epsilon:.4g}"
        moved = f"{size(line.bytes_up)} up, {size(line.bytes_down)} down"
        return f"{line.outcome}; {line.rows} rows, {moved}{spent}"
    who = " as ".join(line.parties)
    return line.outcome or {
        "added": f"{who} entered the experiment",
        "removed": f"{who} left; there is no consent to sessions with it any more",
        "renamed": " is now called ".join(line.parties),
        "accepted": f"you consented to sessions with {who}, whose fingerprint was compared",
        "restored": "the store was restored from a copy",
        "forgotten": f"{line.rows} rows were erased here",
        "withdrawn": f"{line.rows} rows left the alignment: another party erased them",
    }.get(line.event, "")


def _table(lines: Sequence[Line]) -> Table:
    rows = [
        [str(line.number), line.at.replace("+00:00", ""), line.event, line.run, line.mode,
         happened(line)]
        for line in lines
    ]  # fmt: skip
    return Table(["line", "at, UTC", "event", "run", "mode", "what"], rows, words=6)


def _listed(names: Iterable[str]) -> str:
    return list_text(tuple(sorted(set(names))), shown=8) or "nobody"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
