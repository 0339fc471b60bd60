"""A run folder as typed records. Only `run.json` must be there; a run may have been cut short."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from vfl.errors import RunFolderError
from vfl.ledger import Traffic
from vfl.report.records import Epoch, Run, Summary
from vfl.storage import check_format
from vfl.text import as_written

_MEASURES = ("test_accuracy", "test_rmse", "test_r2", "steps_per_second")
_COSTS = ("formula_ratio", "wire_ratio", "seconds")
_WORDS = ("weights_sha256", "codec", "defense", "secure", "trust")
_REVEALED = ("observer", "what", "of", "phase", "times", "values")


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        RunFolderError: there is no run, it is of another format, or a file of it is damaged.
    """
    head = _read_head(folder)
    config_text = _text(folder / "config.toml")
    config = _config(folder / "config.toml", config_text)
    traffic = _traffic(folder / "traffic.csv")
    plan = {name: config.get(name) for name in ("codec", "defense", "secure")}
    summary = _summary({**plan, **_object(folder / "summary.json")})
    return Run(
        name=str(head.get("name", folder.name)),
        created=str(head.get("created", "")),
        version=str(head.get("vfl", "")),
        mode=str(head.get("mode", "")),
        command=str(head.get("command", "")),
        config_text=config_text,
        label_party=_label_party(config),
        parties=_parties(config, traffic, summary),
        epochs=_epochs(folder / "metrics.jsonl"),
        traffic=traffic,
        environment={k: str(v) for k, v in _object(folder / "environment.json").items()},
        summary=summary,
    )


def _read_head(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    if not path.is_file():
        raise RunFolderError(
            "there is no run in this folder",
            where=str(folder),
            want="a folder with run.json, as training writes it",
            fix="give the path that vfl train printed",
        )
    head = _object(path)
    check_format(head, path)
    return head


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise RunFolderError("a file of this run is not text", where=str(path)) from None


def _object(path: Path) -> dict[str, Any]:
    return _json_object(_text(path) or "{}", str(path))


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        what = "a file of this run is not JSON"
        raise RunFolderError(what, where=where, got=error.msg) from None
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
    known = {each.name: _number(record.get(each.name)) for each in fields(Epoch)}
    known["epoch"] = position if known["epoch"] is None else known["epoch"]
    return Epoch(**known)  # type: ignore[arg-type]


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
    except (TypeError, ValueError):
        where = f"{path}:{reader.line_num}"
        raise RunFolderError("the ledger of this run has a damaged line", where=where) from None


def _summary(record: dict[str, Any]) -> Summary:
    numbers = {name: _number(record.get(name)) for name in (*_MEASURES, *_COSTS)}
    words = {name: str(record[name]) for name in _WORDS if record.get(name)}
    up, down = _by_party(record.get("bytes_up")), _by_party(record.get("bytes_down"))
    told = _revealed(record.get("revealed"))
    return Summary(**numbers, **words, bytes_up=up, bytes_down=down, revealed=told)  # type: ignore[arg-type]


def _revealed(found: Any) -> tuple[tuple[str, ...], ...]:
    """Who learned what, line by line, in words."""
    lines = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return tuple(tuple(_cell(line.get(name, "")) for name in _REVEALED) for line in lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _by_party(found: Any) -> dict[str, float]:
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(party): value for party, raw in pairs if (value := _number(raw)) is not None}


def _number(found: Any) -> float | None:
    """A finite number, or None: a loss that became NaN leaves a gap in its curve."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return found


def _label_party(config: dict[str, Any]) -> str | None:
    label = config.get("label")
    name = label.get("party") if isinstance(label, dict) else None
    return name if isinstance(name, str) else None


def _parties(
    config: dict[str, Any], traffic: tuple[Traffic, ...], summary: Summary
) -> tuple[str, ...]:
    listed = config.get("parties")
    from_config = list(listed) if isinstance(listed, dict) else []
    # A party that only deals has traffic and no place among those with columns.
    from_traffic = [*(row.party for row in traffic), *summary.bytes_up]
    return tuple(dict.fromkeys(from_config or from_traffic))
