"""A run folder as typed records. Only `run.json` must be there; a run may have been cut short."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError
from vfl.core.ledger import Traffic
from vfl.core.text import as_written

#: The finite numbers of one epoch by name; bytes add up over epochs. A loss that became NaN is left
#: out, and so leaves a gap in its curve.
Epoch = Mapping[str, float]

_WORDS = ("weights_sha256", "codec", "defense", "secure", "trust")
_REVEALED = ("observer", "what", "of", "phase", "times", "values")


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder.

    Attributes:
        name, created, version, mode, command: of its `run.json`.
        config_text: its configuration as it was written.
        label_party, parties: as the configuration says, else as the traffic does.
        epochs: in order.
        traffic: lines of the ledger.
        environment: what it ran on.
        figures: numbers of the whole run by name, as far as they were measured.
        words: codec, defense, secure mode and the like, as far as they are known.
        sent: bytes of all parties and both directions; None where the run did not end.
        revealed: who learned what, line by line.
    """

    name: str
    created: str
    version: str
    mode: str
    command: str
    config_text: str
    label_party: str | None
    parties: tuple[str, ...]
    epochs: tuple[Epoch, ...]
    traffic: tuple[Traffic, ...]
    environment: Mapping[str, str]
    figures: Mapping[str, float]
    words: Mapping[str, str]
    sent: float | None
    revealed: Sequence[Sequence[str]]

    def last(self, measure: str) -> float | None:
        """The last value of a measure; None where no epoch has one."""
        return next((one[measure] for one in reversed(self.epochs) if measure in one), None)


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        RunFolderError: there is no run, it is of another format, or a file of it is damaged.
    """
    run = _opened(folder)
    head = run.about()
    config_text = run.config() if (folder / "config.toml").exists() else ""
    config = _config(folder / "config.toml", config_text)
    traffic = _traffic(folder / "traffic.csv")
    summary = {name: config.get(name) for name in ("codec", "defense", "secure")}
    summary |= run.summary() if (folder / "summary.json").exists() else {}
    up, down = (_finite(summary.get(name)) for name in ("bytes_up", "bytes_down"))
    label, revealed = config.get("label"), summary.get("revealed")
    label_party = label.get("party") if isinstance(label, dict) else None
    listed = config.get("parties")
    from_config = list(listed) if isinstance(listed, dict) else []
    # A party that only deals has traffic and no place among those with columns.
    from_traffic = [*(row.party for row in traffic), *up]
    return Run(
        name=str(head.get("name", folder.name)),
        created=str(head.get("created", "")),
        version=str(head.get("vfl", "")),
        mode=str(head.get("mode", "")),
        command=str(head.get("command", "")),
        config_text=config_text,
        label_party=label_party if isinstance(label_party, str) else None,
        parties=tuple(dict.fromkeys(from_config or from_traffic)),
        epochs=_epochs(folder / "metrics.jsonl"),
        traffic=traffic,
        environment={k: str(v) for k, v in _object(folder / "environment.json").items()},
        figures=_finite(summary),
        words={name: str(summary[name]) for name in _WORDS if summary.get(name)},
        sent=sum(up.values()) + sum(down.values()) if up or down else None,
        revealed=[
            [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line]
            for line in (
                [one.get(name, "") for name in _REVEALED]
                for one in (revealed if isinstance(revealed, list) else [])
                if isinstance(one, dict)
            )
        ],
    )


def _opened(folder: Path) -> RunFolder:
    if not (folder / "run.json").is_file():
        raise RunFolderError(
            "there is no run in this folder",
            where=str(folder),
            want="a folder with run.json, as training writes it",
            fix="give the path that vfl train printed",
        )
    return RunFolder(folder)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        raise RunFolderError("a file of this run is not text", where=str(path)) from None


def _object(path: Path) -> dict[str, Any]:
    return _json_object(_text(path) or "{}", str(path))


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        what, got = "a file of this run is not JSON", getattr(error, "msg", None)
        raise RunFolderError(what, where=where, got=got) from None
    if not isinstance(found, dict):
        raise RunFolderError("a file of this run holds no JSON object", where=where)
    return found


def _config(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise RunFolderError("a file of this run is not TOML", where=str(path)) from None


def _epochs(path: Path) -> tuple[Epoch, ...]:
    text = _text(path)
    lines = text.splitlines()
    if not text.endswith("\n"):
        lines = lines[:-1]  # the run ended while it wrote this line
    records = [
        _json_object(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line
    ]
    return tuple(_epoch(record, position) for position, record in enumerate(records, 1))


def _epoch(record: dict[str, Any], position: int) -> Epoch:
    known = {"epoch": float(position), **_finite(record)}
    if {"bytes_up", "bytes_down"} <= set(known):
        known["total_bytes"] = known["bytes_up"] + known["bytes_down"]
    return known


def _traffic(path: Path) -> tuple[Traffic, ...]:
    wanted = [each.name for each in fields(Traffic)]
    reader = csv.DictReader(_text(path).splitlines())
    if reader.fieldnames is not None and not set(wanted) <= set(reader.fieldnames):
        raise RunFolderError(
            "the ledger of this run lacks a column", where=str(path), want=", ".join(wanted)
        )
    try:
        return tuple(
            Traffic(
                party=as_written(row["party"]),
                direction=row["direction"],
                phase=row["phase"],
                frames=int(row["frames"]),
                payload_bytes=int(row["payload_bytes"]),
                wire_bytes=int(row["wire_bytes"]),
                seconds=float(row["seconds"] or 0),
            )
            for row in reader
        )
    except (TypeError, ValueError, csv.Error):
        where = f"{path}:{reader.line_num}"
        raise RunFolderError("the ledger of this run has a damaged line", where=where) from None


def _finite(found: Any) -> dict[str, float]:
    """The finite numbers of a record."""
    record = found if isinstance(found, dict) else {}
    return {
        str(name): value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
