"""A session on Flower from the label party's command: submits the session and follows it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from vfl.config.run_folder import PROGRESS, failure_of, locked_for, next_evaluation
from vfl.core.errors import (
    LostPeerError,
    MissingDataError,
    PeerError,
    RunFolderError,
    VFLError,
    read_record,
)
from vfl.core.processes import looks
from vfl.core.products import modes
from vfl.core.storage import locked, read_json, write_text
from vfl.core.text import printable, printable_lines
from vfl.federation import deployment
from vfl.federation.project import LabelFolder, node_parties
from vfl.session.progress import ProgressReport, Tell

_TICK_S = 0.1
_ASK_FLOWER_EVERY_S = 5.0
_END_S = 20.0
#: Pattern of the line in a Python traceback that contains the error's class and text.
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*\.)?\w*(Error|Exception): ")
#: For each mode except evaluate, the name of the file that exists once a session of this mode has
#: ended well; products add modes. Each evaluation has a new file; see `next_evaluation`.
OUTCOMES = {
    "train": "summary.json",
    "predict": "predictions.csv",
    "serve": "served.json",
    "align": "alignment.json",
}


def label_folder_of(run: Path) -> LabelFolder:
    """Return the label party's folder whose store contains a run.

    Raises:
        RunFolderError: the run is not in a project folder.
    """
    for parent in run.resolve().parents:
        if (parent / "app" / "experiment.toml").exists():
            return LabelFolder(parent)
    return LabelFolder.find(run)


@contextmanager
def simulation(folder: LabelFolder) -> Iterator[None]:
    """Run a SuperLink with Flower's simulation engine, which runs all parties of a project.

    Args:
        folder: folder of the label party of the project. The folders of the other parties must be
            next to it.

    Raises:
        MissingDataError: the folder of a party does not exist.
        LostPeerError: the SuperLink did not start.
        MissingPackageError: Ray, Flower's engine, is not installed.
    """
    _folder_of_all(folder)
    superlink = deployment.start_superlink(folder, simulation=True)
    try:
        yield
    finally:
        superlink.stop()


def _folder_of_all(folder: LabelFolder) -> Path:
    """Return the folder that contains the folders of all parties."""
    beside = folder.path.resolve().parent
    files = [beside / name / "party.toml" for name in node_parties(folder.experiment())]
    if missing := [file for file in files if not file.exists()]:
        raise MissingDataError(
            "a simulation runs every party, but the file of one party is not on this machine",
            where=str(missing[0]),
            want="the folders of all parties next to the label party's folder",
            fix="train over the network: vfl up at each party, then vfl train without --engine",
        )
    return beside


def _a_node_each(count: int) -> str:
    """Return Flower's configuration for a simulation in which all parties' nodes run at once.

    Ray lets a node wait while other nodes occupy all CPUs, so the configuration declares as many
    CPUs as nodes.
    """
    return f"num-supernodes={count} init-args-num-cpus={count} client-resources-num-cpus=1"


def run_session(
    folder: LabelFolder,
    mode: str,
    run: str,
    *,
    overrides: Sequence[str] = (),
    on_epoch: Callable[[Mapping[str, Any]], None] = lambda record: None,
    on_note: Callable[[str], None] = lambda line: None,
    on_progress: Tell = lambda report: None,
    resume: bool = False,
    simulated: bool = False,
) -> Path:
    """Submit one session, and wait until it ends.

    Args:
        folder: folder of the label party.
        mode: train, evaluate, predict, serve, align, or a mode that a product adds.
        run: name of the run.
        overrides: texts ``key=value``. In modes train and align, they override settings of the
            experiment. In evaluate and predict, they are names with a prefix, see
            `vfl.session.terms.BESIDE`. In a product's mode, they are settings of the product.
        on_epoch: callback that receives the record of each epoch.
        on_note: callback that receives one line of text when parties join or leave the session,
            with vfl's reaction, and while this function waits for the SuperLink.
        on_progress: callback that receives the session's progress, about once a second.
        resume: whether this session continues the run from its last checkpoint.
        simulated: whether `simulation` started the SuperLink.

    Returns:
        The path of the run's folder.

    Raises:
        VFLError: the session failed; the error is the one that the failing party reported.
    """
    path = folder.party().run_path(run)
    outcomes = OUTCOMES | {name: one.outcome for name, one in modes().items()}
    outcome = next_evaluation(path) if mode == "evaluate" else path / outcomes[mode]
    failure = failure_of(path, mode)
    if mode == "train" and outcome.exists():
        raise RunFolderError("this run has ended; there is nothing to resume", where=str(path))
    if path.exists():
        # another session is using the run, so this function changes nothing
        with locked(locked_for(path, mode)):
            for stale in (outcome, failure):
                stale.unlink(missing_ok=True)
    followed: list[_FollowedFile | _FollowedProgress] = [
        _FollowedFile(path / "notes.txt", on_note),
        _FollowedProgress(path / PROGRESS, on_progress),
        _FollowedFile(path / "metrics.jsonl", lambda line: on_epoch(_record(line, path))),
    ]
    config: dict[str, str | bool] = {"resume": resume}
    federation = ""
    if simulated:
        config |= {"label-file": str(folder.party_file), "party-files": str(_folder_of_all(folder))}
        federation = _a_node_each(len(node_parties(folder.experiment())))
    else:
        # other modes are sent names, or a product's own settings
        changed = overrides if mode in ("train", "align") else ()
        patience_s = folder.experiment(changed).federation.join_timeout_s
        deployment.wait_for_superlink(folder, patience_s, on_note)
    run_id = deployment.submit(folder, mode, run, overrides, config, federation)
    try:
        _follow(folder, run_id, followed, [outcome, failure])
    except PeerError as problem:
        if mode == "train":
            problem.fix = f"{problem.fix}; with the SuperLink running: {_resume(path)}"
        raise
    _wait_for_flower(folder, run_id)
    if failure.exists():
        error = _failure(failure)
        if mode == "train" and error.fix is None:
            error.fix = _resume(path)
        raise error
    return path


def _follow(
    folder: LabelFolder,
    run_id: int,
    followed: Sequence[_FollowedFile | _FollowedProgress],
    outcomes: Sequence[Path],
) -> None:
    """Report the progress of a session until its outcome is known.

    Raises:
        PeerError: the session's process has ended without a result or an error.
    """
    asked = time.monotonic()
    while not any(path.exists() for path in outcomes):
        for file in followed:
            file.look()
        if time.monotonic() - asked > _ASK_FLOWER_EVERY_S:
            _check_alive(folder, run_id, outcomes)
            asked = time.monotonic()
        time.sleep(_TICK_S)
    for file in followed:
        file.look()


class _FollowedFile:
    """Reader that reports lines which are appended to a file after the reader was created."""

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._reported = len(self._lines())

    def look(self) -> None:
        """Report the new lines; the file may have lost lines if the session was restarted."""
        lines = self._lines()
        for line in lines[self._reported :]:
            self._on_line(line)
        self._reported = len(lines)

    def _lines(self) -> list[str]:
        if not self._path.exists():
            return []
        return self._path.read_text(errors="replace").rpartition("\n")[0].splitlines()


class _FollowedProgress:
    """Reader of a session's progress file that ignores progress from earlier sessions."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self._path, self._tell = path, tell
        self._seen = self._written()

    def look(self) -> None:
        """Report the progress file's content if it has changed."""
        if (written := self._written()) != self._seen:
            self._seen = written
            if (report := read_progress(self._path)) is not None:
                self._tell(report)

    def _written(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0


def read_progress(path: Path) -> ProgressReport | None:
    """Return the content of `progress.json`; None if the file is missing or incomplete."""
    try:
        record = read_json(path)
        known = {one.name: record[one.name] for one in fields(ProgressReport)}
        return ProgressReport(**known | {"waits_for": tuple(map(printable, record["waits_for"]))})
    except (VFLError, KeyError, TypeError):
        return None


def _record(line: str, run: Path) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        where = str(run / "metrics.jsonl")
        raise RunFolderError("a line of this file is not a record", where=where) from None


def _wait_for_flower(folder: LabelFolder, run_id: int) -> None:
    """Wait until Flower has ended the run's process; only then vfl may stop the SuperLink."""
    for _ in looks(_END_S, _TICK_S):
        if deployment.run_state(folder, run_id).startswith("finished"):
            return


def _check_alive(folder: LabelFolder, run_id: int, outcomes: Sequence[Path]) -> None:
    state = deployment.run_state(folder, run_id)
    if not state.startswith("finished") or any(path.exists() for path in outcomes):
        return
    log, kept = deployment.run_log(folder, run_id), folder.state / "run.log"
    write_text(kept, log)
    raise LostPeerError(
        "the run ended without a result",
        got=f"Flower says {state}",
        where=_last_error(log) or None,
        fix=f"{kept} has everything the label party's process printed",
    )


def _last_error(log: str) -> str:
    """Return vfl's last message in a log, or else the log's first exception, as one line."""
    lines = log.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error[")]
    if not starts:
        raised = [line for line in lines if _EXCEPTION.match(line)]
        return printable(" | ".join(line.strip() for line in raised[:1] or lines[-3:]))
    own = takewhile(lambda line: line.startswith("  "), lines[starts[-1] + 1 :])
    return printable(" | ".join(line.strip() for line in [lines[starts[-1]], *own]))


def _resume(run: Path) -> str:
    return f"vfl train PROJECT --resume {run}"


def _failure(file: Path) -> VFLError:
    """Return an error that another process recorded, with the same error code and exit code."""
    record = read_json(file)
    texts = read_record(record, str(file), printable_lines)
    code, exit_code = texts.pop("code"), record.get("exit")
    error = PeerError(texts.pop("what"), **texts)
    # The error gets the class that it has in the other process, so that the exit code does not
    # depend on which process reports the error.
    error.code = code  # type: ignore[misc]
    error.exit_code = exit_code if exit_code in range(1, 256) else 1  # type: ignore[misc]
    return error
