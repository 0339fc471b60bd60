"""Flower's processes: a SuperLink, SuperNodes, and runs, started and ended by us.

Every one of them runs with Flower's telemetry, update check and dependency installation off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w

from vfl.config import PartyFile
from vfl.errors import LostPeerError, MissingDataError, MissingPackageError, PeerFailedError
from vfl.project import LabelFolder
from vfl.service import Service, last_words
from vfl.storage import write_text
from vfl.transport import check_not_expired, check_server

CONNECTION = "vfl"
_START_SUPERLINK = "is the SuperLink running? start it with: vfl superlink PROJECT"
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Ray, the engine of a Flower simulation: no usage reports, nothing beyond the loopback.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # One thread a process: two parties and a label party share a small machine, and weights are
    # equal bit for bit only where sums are added in the same order.
    "OMP_NUM_THREADS": "1",
}


def flower_environment(home: Path, **extra: str) -> dict[str, str]:
    """The environment of every Flower process.

    Args:
        home: where Flower keeps its own files.
        extra: more variables.
    """
    # Flower starts its helpers by bare name, so our interpreter's scripts come first.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path, **extra}


def start_superlink(folder: LabelFolder, *, simulation: bool = False) -> Service:
    """The SuperLink of a label party, ready for SuperNodes.

    Raises:
        UserError: its certificate has expired.
        LostPeerError: it did not start.
        MissingPackageError: a simulation without its engine.
    """
    if simulation and find_spec("ray") is None:
        raise MissingPackageError(
            "a Flower simulation needs Ray, its engine",
            want="ray",
            fix="pip install 'vfl[simulation]'",
        )
    settings = folder.experiment().federation
    host, _, port = settings.superlink.rpartition(":")
    command = [
        "flower-superlink",
        *("--host", settings.bind_host or host, "--port", port),
        *("--database", str(folder.state / "superlink.db")),
        "--disable-runtime-dependency-installation",
    ]
    if simulation:
        command += ["--insecure", "--simulation"]
    else:
        check_not_expired(folder.certificates / "server.pem")
        command += ["--ssl-ca-certfile", str(folder.certificates / "ca.pem")]
        command += ["--ssl-certfile", str(folder.certificates / "server.pem")]
        command += ["--ssl-keyfile", str(folder.certificates / "server.key")]
        command += ["--enable-supernode-auth"]
    _write_connection(folder, insecure=simulation)
    environment = flower_environment(folder.state, VFL_PARTY_FILE=str(folder.party_file))
    service = Service("the SuperLink", command, environment, folder.state / "superlink.log")
    try:
        service.wait_for("Uvicorn running")
    except LostPeerError:
        service.stop()
        raise
    return service


def register_nodes(folder: LabelFolder) -> list[str]:
    """Register every party's public key under its name; the names that were new."""
    new = []
    for key in sorted(folder.keys.glob("*.pub")):
        named = ("--name", key.stem, "--format", "json")
        try:
            _flower(folder, "supernode", "register", str(key), CONNECTION, *named)
        except PeerFailedError as problem:
            if "already in use" not in str(problem.got):
                raise
        else:
            new.append(key.stem)
    return new


def supernode_command(party: PartyFile, file: Path) -> list[str]:
    """The SuperNode's command line for one party.

    Raises:
        MissingDataError: its certificate or key file is not there.
    """
    ca, key = party.beside(party.node.ca), party.beside(party.node.key)
    for needed in (ca, key):
        if not needed.exists():
            raise MissingDataError(
                f"party '{party.party}' lacks a file of its SuperNode",
                where=str(needed),
                fix="copy it from the project folder that vfl init wrote",
            )
    return [
        "flower-supernode",
        *("--superlink", party.node.superlink),
        *("--root-certificates", str(ca)),
        *("--auth-supernode-private-key", str(key)),
        *("--host", "127.0.0.1", "--port", str(party.node.api_port)),
        *("--node-config", f"party-file={json.dumps(str(file.resolve()))}"),
    ]


def start_supernode(party: PartyFile, file: Path) -> Service:
    """A feature party's SuperNode, connected.

    Raises:
        AuthenticationError: the SuperLink's certificate is not accepted.
        LostPeerError: the SuperLink cannot be reached, or refuses this party's key.
    """
    home = party.store_path / "flower"
    command = supernode_command(party, file)
    address, ca = party.node.superlink, party.beside(party.node.ca)
    check_server("the SuperLink", address, ca)
    name = f"the SuperNode of {party.party}"
    service = Service(name, command, flower_environment(home), home / "supernode.log")
    try:
        service.wait_for("SuperNode ID")
    except LostPeerError as problem:
        service.stop()
        if "Failed to activate SuperNode" in service.said():
            # Flower says the same of a key nobody registered and of a node it takes for alive.
            problem.got = "the SuperLink does not know its key, or takes it for online still"
            problem.fix = "the label party registers the key; one that was killed is free in 60 s"
        raise
    return service


def submit(
    folder: LabelFolder,
    mode: str,
    run: str,
    overrides: Sequence[str] = (),
    extra: Mapping[str, str | bool] | None = None,
    federation: str = "",
) -> str:
    """Hand a run to the SuperLink; Flower's id of it."""
    config = {"mode": mode, "run": run, "overrides": json.dumps(list(overrides)), **(extra or {})}
    file = folder.state / "run.toml"
    write_text(file, tomli_w.dumps(config))
    options = ["--federation-config", federation] if federation else []
    answer = _flower(
        folder,
        *("run", str(folder.app), CONNECTION, "--run-config", str(file), "--format", "json"),
        *options,
    )
    return str(_json(answer)["run-id"])


def run_state(folder: LabelFolder, run_id: str) -> str:
    """What Flower says of a run, such as ``running`` or ``finished:failed``."""
    answer = _flower(folder, "list", CONNECTION, "--run-id", run_id, "--format", "json")
    (entry,) = _json(answer)["runs"]
    return str(entry["status"])


def run_log(folder: LabelFolder, run_id: str) -> str:
    """What the ServerApp printed."""
    return _flower(folder, "log", run_id, CONNECTION, "--show")


def _flower(folder: LabelFolder, *arguments: str) -> str:
    done = subprocess.run(
        ["flwr", *arguments],
        env=flower_environment(folder.state),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    answer = _json(done.stdout) if "json" in arguments else {}
    if done.returncode != 0 or answer.get("success") is False:  # flwr may fail with exit code 0
        _check_superlink(folder)
        said = answer.get("error-message") or done.stderr or done.stdout
        raise PeerFailedError(
            f"flwr {arguments[0]} failed",
            got=last_words(said) or f"exit {done.returncode}",
            fix=_START_SUPERLINK,
        )
    return done.stdout


def _check_superlink(folder: LabelFolder) -> None:
    """Whether it is the SuperLink that flwr failed at: not there, or not trusted."""
    connection = folder.state / "config.toml"
    if not connection.exists() or "root-certificates" not in connection.read_text():
        return
    address = folder.experiment().federation.superlink
    try:
        check_server("the SuperLink", address, folder.certificates / "ca.pem")
    except LostPeerError as problem:
        problem.fix = _START_SUPERLINK
        raise


def _json(text: str) -> Any:
    start = text.find("{")
    return json.loads(text[start:]) if start >= 0 else {}


def _write_connection(folder: LabelFolder, *, insecure: bool) -> None:
    address = {"address": folder.experiment().federation.superlink}
    secured: dict[str, Any] = {"root-certificates": str(folder.certificates / "ca.pem")}
    table = address | ({"insecure": True} if insecure else secured)
    content = {"superlink": {"default": CONNECTION, CONNECTION: table}}
    write_text(folder.state / "config.toml", tomli_w.dumps(content))
