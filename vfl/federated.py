"""A session over Flower as seen from the label party's command line: submit it and follow it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vfl import deployment
from vfl.config import read_party_file
from vfl.errors import LostPeerError, PeerError, RunFolderError, VFLError
from vfl.project import LabelFolder
from vfl.run_folder import RunFolder
from vfl.storage import read_json, read_lines

_TICK_S = 0.2
_ASK_FLOWER_EVERY_S = 5.0
_END_S = 20.0
_OUTCOMES = {
    "train": "summary.json",
    "evaluate": "evaluation.json",
    "predict": "predictions.csv",
}


def label_folder_of(run: Path) -> LabelFolder:
    """The label folder whose store holds a run.

    Raises:
        RunFolderError: the run lies in no project.
    """
    for parent in run.resolve().parents:
        if (parent / "app" / "experiment.toml").exists():
            return LabelFolder(parent)
    return LabelFolder.find(run)


def run_session(
    folder: LabelFolder,
    mode: str,
    run: str,
    *,
    overrides: Sequence[str] = (),
    on_epoch: Callable[[Mapping[str, Any]], None] = lambda record: None,
    extra: Mapping[str, str | bool] | None = None,
    federation: str = "",
) -> Path:
    """Submit one session and wait for its end.

    Args:
        folder: the label party's.
        mode: train, evaluate or predict.
        run: name of the run.
        overrides: changes to the experiment, as ``key=value``.
        on_epoch: told each epoch's record as it comes.
        extra: more of Flower's run configuration (a simulation's party files).
        federation: Flower's federation configuration, for a simulation.

    Returns:
        The run's folder.

    Raises:
        VFLError: what ended the session, in the words of the party that failed.
    """
    path = read_party_file(folder.party_file).run_path(run)
    outcome = path / _OUTCOMES[mode]
    failure = path / "failure.json"
    if mode == "train" and outcome.exists():
        raise RunFolderError("this run has ended; there is nothing to resume", where=str(path))
    for stale in (outcome, failure):
        stale.unlink(missing_ok=True)
    run_id = deployment.submit(folder, mode, run, overrides, extra, federation)
    told, asked = 0, time.monotonic()
    while not (outcome.exists() or failure.exists()):
        if mode == "train":
            told = _tell(path / "metrics.jsonl", told, on_epoch)
        if time.monotonic() - asked > _ASK_FLOWER_EVERY_S:
            _check_alive(folder, run_id, [outcome, failure])
            asked = time.monotonic()
        time.sleep(_TICK_S)
    if mode == "train":
        _tell(path / "metrics.jsonl", told, on_epoch)
    _wait_for_flower(folder, run_id)
    if failure.exists():
        raise _failure(read_json(failure))
    return path


def summary_of(path: Path, mode: str) -> dict[str, Any]:
    """The figures a finished session left."""
    summary: dict[str, Any] = read_json(RunFolder.open(path).path / _OUTCOMES[mode])
    return summary


def _tell(metrics: Path, told: int, on_epoch: Callable[[Mapping[str, Any]], None]) -> int:
    records = list(read_lines(metrics)) if metrics.exists() else []
    for record in records[told:]:
        on_epoch(record)
    return len(records)


def _wait_for_flower(folder: LabelFolder, run_id: str) -> None:
    """Let the run's own process end before anybody stops the SuperLink under it."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        if deployment.run_state(folder, run_id).startswith("finished"):
            return


def _check_alive(folder: LabelFolder, run_id: str, outcomes: Sequence[Path]) -> None:
    state = deployment.run_state(folder, run_id)
    if not state.startswith("finished") or any(path.exists() for path in outcomes):
        return
    lines = deployment.run_log(folder, run_id).strip().splitlines()
    raise LostPeerError(
        "the run ended without a result",
        got=f"Flower says {state}",
        where=" | ".join(line.strip() for line in lines[-3:]),
        fix="flwr log shows everything the label party's process printed",
    )


def _failure(record: Mapping[str, Any]) -> VFLError:
    """The error another process left, told again under its own code and exit status."""
    told = {key: record.get(key) for key in ("where", "got", "want", "fix")}
    error = PeerError(str(record.get("what")), **told)
    # The class is the other process's; what a shell sees must not depend on who told it.
    error.code, error.exit_code = str(record["code"]), int(record["exit"])  # type: ignore[misc]
    return error
