"""Status of a run, a project or a party, from its folder and the SuperLink."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.config.run_folder import PROGRESS, RunFolder, failure_of
from vfl.core.errors import (
    DisagreementError,
    LostPeerError,
    RunFolderError,
    VFLError,
    read_record,
)
from vfl.core.storage import read_json, read_lines, worker_of
from vfl.core.text import printable_lines
from vfl.datasets.alignment.positions import last_versions
from vfl.federation import deployment
from vfl.federation.project import LabelFolder, node_parties
from vfl.session.progress import ProgressReport
from vfl.session.secure_mode import third_party
from vfl.session.store.party_folder import PartyFolder
from vfl.session.terms import AlignTerms
from vfl.training.federated import OUTCOMES, label_folder_of, read_progress
from vfl.training.promotion import promoted_runs, service_of, services_of

#: Exit codes of `vfl status`, in addition to the exit codes of errors that end a run.
AT_WORK, INTERRUPTED, NOT_READY = 4, 5, 3
_STATES = {
    "train": "training",
    "evaluate": "evaluating",
    "predict": "predicting",
    "align": "aligning",
    "serve": "serving",
}
#: Largest number of a project's runs that `vfl status` shows.
_RUNS = 5
#: Error codes of trainings that failed because of their settings; a resumed run has the same
#: settings and would fail again.
_REFUSED = (DisagreementError.code, RunFolderError.code)


@dataclass(frozen=True)
class RunStatus:
    """Status of a run.

    Attributes:
        run: its folder.
        state: one of: waiting, starting, training, evaluating, predicting, aligning, serving,
            ended, failed, interrupted.
        created: time at which the run was started.
        progress: progress of the run's session; None if no session is running, or the session has
            not reported yet.
        silent_s: seconds since the session last reported its progress.
        epochs: number of finished epochs.
        figures: metrics of the last epoch, or the final metrics if the run has ended.
        bytes: bytes in both directions by party; while the run continues, only their sum under the
            key "all".
        erased: number of rows of each split (training, validation, test) that were erased after the
            run used them.
        failure: error record of the last session that failed, in the format of `VFLError.record`.
        address: address of the prediction service that answers with this run.
        promoted: whether the run is promoted, so that services answer with it.
        then: commands with which the user can continue.
        exit_code: exit code that `vfl status` returns.
    """

    run: str
    state: str
    created: str
    progress: ProgressReport | None = None
    silent_s: float | None = None
    epochs: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    erased: Mapping[str, int] = field(default_factory=dict)
    failure: Mapping[str, str] | None = None
    address: str | None = None
    promoted: bool = False
    then: tuple[str, ...] = ()
    exit_code: int = 0

    def record(self) -> dict[str, Any]:
        """Return the status as a record for `--json`."""
        progress = None if self.progress is None else self.progress.record()
        return asdict(self) | {"progress": progress, "then": list(self.then)}


@dataclass(frozen=True)
class ProjectStatus:
    """Status of a project.

    Attributes:
        project: folder of the label party.
        superlink: address of the SuperLink; None if no SuperLink is running.
        parties: whether each party's SuperNode is connected, by party; empty without a SuperLink.
        runs: the project's last runs, the promoted run, and all runs that a service answers with,
            newest first.
        then: commands with which the user can continue.
        exit_code: exit code that `vfl status` returns.
    """

    project: str
    superlink: str | None
    parties: Mapping[str, bool]
    runs: tuple[RunStatus, ...]
    then: tuple[str, ...]
    exit_code: int

    def record(self) -> dict[str, Any]:
        """Return the status as a record for `--json`."""
        return asdict(self) | {"runs": [run.record() for run in self.runs]}


@dataclass(frozen=True)
class PartyStatus:
    """Status of a party with a SuperNode, as the party's own machine shows it.

    Attributes:
        party: its name.
        keys: whether the party's key files exist; any party may have made them.
        table: whether the table in the party file exists.
        up: whether the party's SuperNode is running.
        then: the next command that the user should run.
        exit_code: exit code that `vfl status` returns.
    """

    party: str
    keys: bool
    table: bool
    up: bool
    then: tuple[str, ...]
    exit_code: int

    def record(self) -> dict[str, Any]:
        """Return the status as a record for the option `--json`."""
        return asdict(self)


def run_status(path: Path) -> RunStatus:
    """Return the status of a run, finished or not.

    Raises:
        RunFolderError: the folder contains no run, or its record is damaged.
    """
    folder = RunFolder.open(path)
    about, worker = folder.about(), worker_of(path)
    known: dict[str, Any] = {"run": str(path), "created": str(about["created"])}
    known |= _figures(folder) | {"erased": _erased(path)}
    known["promoted"] = promoted_runs(path.resolve().parent)[-1:] == [path.resolve().name]
    errors = (_failure(failure_of(path, mode)) for mode in ("train", "serve"))
    failure, service = next(filter(None, errors), None), service_of(path)
    trained = (path / OUTCOMES["train"]).exists()
    if service is not None:
        waits = _progress(path)[0]
        if waits is not None and waits.mode != "serve":  # a prediction with the served run wrote it
            waits = None
        there = waits is None or not waits.waits_for
        state = "serving" if there else "waiting"
        code = 0 if there else AT_WORK
        return RunStatus(
            **known,
            state=state,
            address=service.address,
            progress=waits,
            then=_ways(path, waits),
            exit_code=code,
        )
    if worker is not None:
        progress, silent_s, by = _progress(path)
        if by != worker:  # the progress file comes from an earlier session
            return RunStatus(**known, state="starting", exit_code=AT_WORK)
        state = "waiting" if progress and progress.waits_for else ""
        state = state or _STATES.get(progress.mode if progress else "", "starting")
        return RunStatus(
            **known,
            state=state,
            progress=progress,
            silent_s=silent_s,
            then=_ways(path, progress),
            exit_code=AT_WORK,
        )
    if failure is not None:
        record, code = failure
        refused = not known["epochs"] and record["code"] in _REFUSED
        again = () if trained else _again(folder, resumes=not refused)
        return RunStatus(**known, state="failed", failure=record, then=again, exit_code=code)
    if trained:
        use = tuple(f"vfl {command} {_quoted(path)}" for command in ("predict", "serve", "report"))
        return RunStatus(**known, state="ended", then=use)
    if (path / OUTCOMES["align"]).exists():
        return RunStatus(**known, state="ended")
    return RunStatus(**known, state="interrupted", then=_again(folder), exit_code=INTERRUPTED)


def project_status(folder: LabelFolder) -> ProjectStatus:
    """Return the status of a project.

    Raises:
        VFLError: files of the project cannot be read, or the SuperLink refuses to list its nodes.
    """
    try:
        parties = deployment.connected(folder)
        superlink: str | None = folder.experiment().federation.superlink
    except LostPeerError:
        parties, superlink = {}, None
    stored = folder.runs_path
    found = sorted(stored.glob("*/run.json"), key=lambda head: head.stat().st_mtime_ns)
    standing = {*promoted_runs(stored)[-1:], *(one.run for one in services_of(stored))}
    shown = [head for head in found if head in found[-_RUNS:] or head.parent.name in standing]
    runs = tuple(run_status(head.parent) for head in reversed(shown))
    ready = superlink is not None and all(parties.values())
    then = _before_sessions(folder, superlink, parties) or _sessions(folder, runs)
    return ProjectStatus(
        str(folder.path), superlink, parties, runs, then, 0 if ready else NOT_READY
    )


def party_status(folder: Path) -> PartyStatus:
    """Return the status of a party with a SuperNode.

    Raises:
        ConfigError: the party file cannot be read, or has mistakes.
    """
    party, file = read_party_file(folder / "party.toml"), folder / "party.toml"
    keys = all(party.beside(name).exists() for name in (party.node.key, party.identity.key))
    table, up = has_table(party), deployment.supernode_runs(party)
    if not (keys and table):
        wanted = "" if table else " --table TABLE"
        then = f"vfl join {_quoted(folder)}{wanted}"
    elif not up:
        then = f"vfl up {_quoted(folder)}"
    else:
        then = f"vfl sessions {_quoted(file)}"
    return PartyStatus(party.party, keys, table, up, (then,), 0 if up else NOT_READY)


def has_table(party: PartyFile) -> bool:
    """Return whether the table in a party file exists; databases are not checked."""
    if party.data is None:
        return True
    source = party.source_path
    return not isinstance(source, Path) or source.exists()


def _before_sessions(
    folder: LabelFolder, superlink: str | None, parties: Mapping[str, bool]
) -> tuple[str, ...]:
    """Return the commands needed before a session: set a table, exchange keys, connect parties."""
    project = _quoted(folder.path)
    if not has_table(folder.party()):
        return (f"vfl join {project} --table TABLE",)
    experiment = folder.experiment()
    apart = {third_party(experiment), experiment.middle and experiment.middle.party}
    keyless = [
        name for name in node_parties(experiment) if not (folder.keys / f"{name}.pub").exists()
    ]
    if keyless:
        return tuple(
            f"vfl join {name}{'' if name in apart else ' --table TABLE'}   # there; then here: "
            f"vfl party accept {name}.pub {project}"
            for name in keyless
        )
    if waiting := deployment.waiting_keys(folder):
        return tuple(
            f"vfl party accept {_quoted(folder.keys / f'{name}.pub')} {project} --fingerprint TEXT"
            f"   # as {name} reads it out"
            for name in waiting
        )
    if superlink is None:
        return (f"vfl up {project}",)
    return tuple(_up(folder, name) for name, here in parties.items() if not here)


def _sessions(folder: LabelFolder, runs: Sequence[RunStatus]) -> tuple[str, ...]:
    """Return the next commands if all parties are connected: align, train, or use the last run."""
    project = _quoted(folder.path)
    newest = runs[0] if runs else None
    if newest is not None and newest.exit_code == AT_WORK:
        return newest.then
    if needs_alignment(folder.experiment(), folder.party()):
        return (f"vfl align {project}",)
    trained = next((run for run in runs if not _only_aligned(run)), None)
    if trained is None:
        return (f"vfl train {project}",)
    return trained.then


def needs_alignment(experiment: Experiment, party: PartyFile) -> bool:
    """Return whether a project's alignment lacks some of the project's current parties."""
    name = experiment.data.alignment
    if name is None:
        return False
    everybody = {*AlignTerms.asked(experiment, "status").everybody}
    found = last_versions(party.alignment_path(name), party.party)
    return all({*one.agreed.parties} != everybody for one in found)


def _only_aligned(run: RunStatus) -> bool:
    folder = Path(run.run)
    return (folder / OUTCOMES["align"]).exists() and not (folder / OUTCOMES["train"]).exists()


def _erased(run: Path) -> dict[str, int]:
    """Return, by split, the most rows that any party on this host has erased after use."""
    found: Counter[str] = Counter()
    for part in (run / "parties").glob("*/forgotten.json"):
        found |= Counter(PartyFolder(part.parent).forgotten())
    return dict(found)


def _figures(folder: RunFolder) -> dict[str, Any]:
    """Return a run's number of finished epochs, its last metrics, and its bytes."""
    try:
        epochs = list(read_lines(folder.path / "metrics.jsonl"))
    except VFLError:  # an alignment has no metrics
        epochs = []
    last: Mapping[str, Any] = epochs[-1] if epochs else {}
    sent: dict[str, int] = {}
    if last:
        sent = {"all": int(last["bytes_up"]) + int(last["bytes_down"])}
    if (folder.path / OUTCOMES["train"]).exists():
        last = folder.summary()
        sent = {party: up + last["bytes_down"][party] for party, up in last["bytes_up"].items()}
    elif (folder.path / OUTCOMES["align"]).exists():
        last = read_json(folder.path / OUTCOMES["align"])
        sent, last = dict(last["bytes"]), {"common_rows": last["common"]}
    phases = ("train_", "validation_", "test_", "common_")
    figures = {
        name: value
        for name, value in last.items()
        if name.startswith(phases) and isinstance(value, int | float)
    }
    return {"epochs": len(epochs), "figures": figures, "bytes": sent}


def _progress(path: Path) -> tuple[ProgressReport | None, float | None, int | None]:
    """Return a run's `progress.json`, its age in seconds, and the process id of its writer."""
    report = read_progress(path / PROGRESS)
    if report is None:
        return None, None, None
    record = read_json(path / PROGRESS)
    try:
        said = datetime.fromisoformat(record["at"])
        old = (datetime.now(UTC) - said).total_seconds()
        return report, max(0.0, old), int(record["process"])
    except (KeyError, TypeError, ValueError):
        return report, None, None


def _failure(path: Path) -> tuple[dict[str, str], int] | None:
    """Return the error that ended the last session, and its exit code."""
    if not path.exists():
        return None
    record = read_json(path)
    code = record.get("exit")
    return read_record(record, str(path), printable_lines), code if code in (1, 2, 3) else 1


def _again(folder: RunFolder, *, resumes: bool = True) -> tuple[str, ...]:
    """Return the command that resumes a run, or the command that starts a new run."""
    words = shlex.split(str(folder.about()["command"]))
    what = words[1] if len(words) > 1 else "train"
    path = words[2] if len(words) > 2 else "EXPERIMENT.toml"
    if folder.mode == "federated":
        path = str(label_folder_of(folder.path).path)
    resume = f" --resume {_quoted(folder.path)}" if what == "train" and resumes else ""
    return (f"vfl {what} {shlex.quote(path)}{resume}",)


def _ways(run: Path, progress: ProgressReport | None) -> tuple[str, ...]:
    """Return the commands that start the parties for which a session waits."""
    if progress is None or not progress.waits_for:
        return ()
    folder = label_folder_of(run)
    try:
        parties = deployment.connected(folder)
    except LostPeerError:
        return (f"vfl up {_quoted(folder.path)}",)
    return tuple(
        f"vfl doctor {name}/party.toml   # at {name}, which is connected but takes no part yet"
        if parties.get(name)
        else _up(folder, name)
        for name in progress.waits_for
    )


def _up(folder: LabelFolder, name: str) -> str:
    """Return the command that starts a party's SuperNode, on this or on the party's machine."""
    beside = folder.path.resolve().parent / name
    with suppress(VFLError, OSError):  # a party on another machine, or of another user
        party = read_party_file(beside / "party.toml")
        if party.beside(party.node.key).exists():  # else the party received the folder
            return f"vfl up {_quoted(beside)}"
    return f"vfl up {name}   # at {name}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
