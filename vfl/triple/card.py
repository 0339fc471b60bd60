"""The card of a private training, and those of what was asked afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vfl.config import Experiment
from vfl.core.errors import RunFolderError
from vfl.core.storage import append_line, check_format, read_json, stamp, write_json
from vfl.mpc.channel import PHASES
from vfl.mpc.rules import NAMES
from vfl.triple.plan import Plan
from vfl.triple.program import Outcome

#: Of the training; and a line for each time the network was asked.
CARD, ASKED = "mpc.json", "asked.jsonl"


def card_of(outcomes: Sequence[Outcome], processes: bool) -> dict[str, Any]:
    """What happened at some parties, in one record; figures are those of the last epoch."""
    plan = Plan.model_validate(outcomes[0].plan)
    traffic = [row for outcome in outcomes for row in outcome.traffic]
    totals = {
        f"bytes_{phase}": sum(row["wire_bytes"] for row in traffic if row["phase"] == phase)
        for phase in PHASES
    }
    history = max((outcome.history for outcome in outcomes), key=len)
    figures: Mapping[str, float] = history[-1] if history else {}
    answers = [outcome.predictions for outcome in outcomes if outcome.predictions]
    return {
        "task": plan.task,
        "mode": plan.mode,
        "parties": dict(zip(NAMES, plan.parties, strict=True)),
        "labels": plan.parties[plan.label_role],
        "trust": "semi-honest; no two of the three collude; see docs/mpc.md",
        "processes": processes,
        "plan": plan.model_dump(mode="json"),
        **{f"test_{name}": value for name, value in figures.items()},
        **({"predictions": answers[0], "rows": plan.test_rows} if answers else {}),
        "history": history,
        **totals,
        "seconds": max(outcome.seconds for outcome in outcomes),
        "traffic": traffic,
        "leakage": [leak for outcome in outcomes for leak in outcome.leaks],
    }


def write_card(folder: Path, experiment: Experiment, card: Mapping[str, Any]) -> None:
    """Keep the card of a training, with what `experiment_of` reads."""
    told = experiment.model_dump(mode="json", exclude_none=True)
    write_json(folder / CARD, {**stamp(), **card, "experiment": told})


def add_card(folder: Path, card: Mapping[str, Any]) -> None:
    """Keep the card of one more inference or prediction."""
    append_line(folder / ASKED, {**stamp(), **card})


def experiment_of(folder: Path) -> Experiment:
    """What was trained in a folder.

    Raises:
        RunFolderError: no private network is there, or the card is damaged.
    """
    if not (folder / CARD).is_file():
        raise RunFolderError("no private network is here", where=str(folder), want=CARD)
    record = read_json(folder / CARD)
    check_format(record, folder / CARD)
    try:
        return Experiment.model_validate(record.get("experiment"))
    except ValidationError:
        raise RunFolderError(
            "this is no card of a private network", where=str(folder / CARD)
        ) from None
