"""Starts and ends Flower's processes: the SuperLink, the SuperNodes, and the programs of runs.

Flower's telemetry, update check and dependency installation are off in all of these processes.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vfl.config import PartyFile
from vfl.config.party_file import tidy_store
from vfl.core.address import Address, parse_address
from vfl.core.errors import (
    AuthenticationError,
    LostPeerError,
    MissingDataError,
    MissingPackageError,
    PeerFailedError,
    UserError,
)
from vfl.core.processes import Service
from vfl.core.storage import locked, read_json, sweep, worker_of, write_json
from vfl.core.text import printable
from vfl.federation import programs, upstream
from vfl.federation.project import LabelFolder, node_parties
from vfl.transport import check_not_expired, check_server, fingerprint, public_key_bytes

_DATABASE, _LOG = "superlink.db", "superlink.log"
#: File with Flower's node id and the digest of the registered key for each party's name.
_NODES = "nodes.json"
#: Text in a SuperNode's output if the SuperLink does not know the SuperNode's key; the SuperNode
#: then tries again.
_UNKNOWN_KEY = "403 Forbidden"
#: Text in a SuperNode's output if the SuperNode's key was withdrawn; another attempt to connect
#: would fail too.
_TAKEN_BACK = "410 Gone"
#: Interval between two checks whether the SuperLink runs, in seconds.
_LOOK_S = 0.2
_START_SUPERLINK = "check that the SuperLink is running; if not, start it with: vfl up PROJECT"


def start_superlink(folder: LabelFolder, *, simulation: bool = False) -> Service:
    """Start the SuperLink of a label party; return when SuperNodes can connect to it.

    Raises:
        UserError: the SuperLink's certificate has expired.
        RunFolderError: another process is starting the SuperLink.
        LostPeerError: the SuperLink did not start.
        MissingPackageError: Ray, the engine of Flower's simulation, is not installed.
    """
    if simulation and find_spec("ray") is None:
        raise MissingPackageError(
            "a Flower simulation needs Ray, its engine",
            want="ray",
            fix="pip install 'vfl[simulation]'",
        )
    folder.tidy()
    settings = folder.experiment().federation
    host, port = parse_address(settings.superlink)
    network = "" if simulation else str(Address(settings.bind_host or host, port))
    at = Address(settings.bind_host or settings.stream_host, settings.stream_port)
    streams = "" if simulation else str(at)
    command = [
        "flower-superlink",
        *("--database", str(folder.state / _DATABASE)),
        "--disable-runtime-dependency-installation",
    ]
    if simulation:  # in a simulation, other machines cannot reach the ports
        command += ["--insecure", "--simulation"]
    else:
        check_not_expired(folder.certificates / "server.pem")
        command += ["--ssl-ca-certfile", str(folder.certificates / "ca.pem")]
        command += ["--ssl-certfile", str(folder.certificates / "server.pem")]
        command += ["--ssl-keyfile", str(folder.certificates / "server.key")]
        command += ["--enable-supernode-auth"]
    if not (folder.state / _DATABASE).exists():
        for file in (_NODES, programs.RETIRED):  # a new SuperLink has registered no keys yet
            (folder.state / file).unlink(missing_ok=True)
    environment = programs.superlink_environment(folder.state, folder.party_file, network, streams)
    with locked(folder.state):  # `wait_for_superlink` sees this lock while the SuperLink starts
        service = Service("the SuperLink", command, environment, folder.state / _LOG)
        try:
            service.wait_for(programs.READY)
        except BaseException:  # also Ctrl+C: otherwise the process would go on
            service.stop()
            raise
    return service


def kept_worker_of(whose: LabelFolder | PartyFile) -> AbstractContextManager[Callable[[], None]]:
    """Keep a party's standing worker running until the block ends; see `programs.kept_worker`."""
    if isinstance(whose, PartyFile):
        home = whose.store_path / "flower"
        environment = programs.supernode_environment(home, whose.path)
        return programs.kept_worker(environment, home / "supernode.log")
    environment = programs.superlink_environment(whose.state, whose.party_file, "network", "")
    return programs.kept_worker(environment, whose.state / _LOG)


def register_nodes(folder: LabelFolder) -> list[str]:
    """Register every party's public key under its name; return the names that are new.

    If a party has a new key or no key any more, its earlier key is withdrawn. A key whose
    fingerprint the label party has not compared yet is not registered; see `waiting_keys`.

    Raises:
        UserError: a file in keys/ has a name that is no party's, contains no key, or repeats
            another party's key; the error names all such files, and no key is registered.
    """
    messages, new = upstream.CONTROL_MESSAGES.load(), []
    nodes_file = folder.state / _NODES
    nodes = read_json(nodes_file) if nodes_file.exists() else {}
    keys, waiting = _party_keys(folder), waiting_keys(folder)
    digests = {name: hashlib.sha256(key.read_bytes()).hexdigest() for name, key in keys.items()}
    for name in sorted(nodes):  # first the withdrawals, so that no failure prevents them
        if nodes[name]["key"] != digests.get(name) and name not in waiting:
            old = nodes.pop(name)
            request = messages.UnregisterNodeRequest(node_id=int(old["node"]))
            _ask(folder, "UnregisterNode", request)
            write_json(nodes_file, nodes)
            _retire(folder, old)
    for name, key in keys.items():
        if name in waiting:
            continue
        public = public_key_bytes(key.read_bytes()) or b""
        try:
            request = messages.RegisterNodeRequest(public_key=public, name=name)
            answer = _ask(folder, "RegisterNode", request)
        except PeerFailedError as problem:
            if "already in use" not in str(problem.got):
                raise
        else:
            nodes[name] = {
                "node": str(answer.node_id),
                "key": digests[name],
                "public": hashlib.sha256(public).hexdigest(),
            }
            write_json(nodes_file, nodes)
            new.append(name)
    return new


def _retire(folder: LabelFolder, node: Mapping[str, str]) -> None:
    """Record that a SuperNode's key was withdrawn, because Flower cannot register a key twice."""
    file = folder.state / programs.RETIRED
    known = read_json(file)["keys"] if file.exists() else []
    if "public" in node:
        write_json(file, {"keys": sorted({*known, node["public"]})})


def was_registered(folder: LabelFolder, content: bytes) -> bool:
    """Return whether a SuperNode's key was registered for a party earlier and then withdrawn."""
    file, public = folder.state / programs.RETIRED, public_key_bytes(content) or b""
    known = read_json(file)["keys"] if file.exists() else []
    return hashlib.sha256(public).hexdigest() in known


def waiting_keys(folder: LabelFolder) -> list[str]:
    """Return the parties whose key is in keys/ and has a fingerprint that was not compared yet."""
    nodes_file, accepted = folder.state / _NODES, folder.accepted_keys()
    nodes = read_json(nodes_file) if nodes_file.exists() else {}
    waiting = []
    for key in sorted(folder.keys.glob("*.pub")):
        content = key.read_bytes()
        registered = nodes.get(key.stem, {}).get("key") == hashlib.sha256(content).hexdigest()
        if not registered and accepted.get(key.stem) != fingerprint(content):
            waiting.append(key.stem)
    return waiting


def _party_keys(folder: LabelFolder) -> dict[str, Path]:
    """Return the key files in keys/ by party; a file's name is the party's name and a suffix."""
    known = set(node_parties(folder.experiment()))
    keys = {key.stem: key for key in sorted(folder.keys.glob("*.pub"))}
    wrong, owners = [], dict[bytes, str]()
    for name, key in keys.items():
        if name not in known:
            wrong.append(f"{printable(key.name)}: no party with a node has this name")
        public = public_key_bytes(key.read_bytes())
        if public is None:
            wrong.append(f"{printable(key.name)}: this is no public key of a SuperNode")
        elif owners.setdefault(public, name) != name:
            wrong.append(f"{printable(key.name)}: this is the key of {printable(owners[public])}")
    if wrong:
        raise UserError(
            "\n  ".join(
                ["the SuperLink registers one key for each party, under the party's name", *wrong]
            ),
            where=str(folder.keys),
            want=", ".join(f"{name}.pub" for name in sorted(known)),
            fix="remove or rename these files; vfl renew party.toml makes a separate key for "
            "a party",
        )
    return keys


def supernode_command(party: PartyFile, file: Path) -> list[str]:
    """Return the command line that starts one party's SuperNode.

    Raises:
        MissingDataError: the party's certificate file or key file does not exist.
    """
    ca, key = party.beside(party.node.ca), party.beside(party.node.key)
    for needed in (ca, key):
        if not needed.exists():
            raise MissingDataError(
                f"party '{party.party}' lacks a file of its SuperNode",
                where=str(needed),
                fix=f"vfl join {file.parent} makes the keys; the label party sends ca.pem",
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
    """Start a feature party's SuperNode; return when it is connected to the SuperLink.

    Raises:
        AuthenticationError: the SuperLink's certificate is not accepted, or the SuperLink has
            withdrawn this party's key.
        ClockError: the clocks of the SuperLink and of this machine differ too much.
        LostPeerError: the SuperLink cannot be reached, or does not know this party's key.
    """
    tidy_store(party.store_path)
    sweep(party.beside("."), {file.name, *map(_name, (party.node.key, party.identity.key))})
    home = party.store_path / "flower"
    ca_pem = party.beside(party.node.ca).read_text()
    check_server("the SuperLink", party.node.superlink, ca_pem, clock=True)
    service = Service(
        f"the SuperNode of {party.party}",
        supernode_command(party, file),
        programs.supernode_environment(home, file),
        home / "supernode.log",
    )
    try:
        service.wait_for("SuperNode ID", refusals=(_UNKNOWN_KEY, _TAKEN_BACK))
    except BaseException as problem:  # also Ctrl+C: otherwise the process would go on
        service.stop()
        if not isinstance(problem, LostPeerError):
            raise
        if _TAKEN_BACK in service.said():
            raise AuthenticationError(
                f"the label party has withdrawn the key of '{party.party}'",
                where=f"the SuperLink at {party.node.superlink}",
                got="a key that was registered once",
                want="a party of the project, with the last key that the label party accepted",
                fix="ask the label party: it has removed this party, or accepted another key "
                f"of it; vfl renew {file} makes a new key that it can accept",
            ) from None
        if _UNKNOWN_KEY in service.said():
            problem.got = "the SuperLink does not know this party's key"
            problem.fix = (
                f"the label party has to accept it: vfl party accept {party.party}.pub PROJECT"
            )
        if "Failed to activate SuperNode" in service.said():
            problem.got = "the SuperLink still treats it as online"
            problem.fix = (
                "stop the SuperNode that uses this key; after a kill, the key is free in 60 s"
            )
        raise
    return service


def _name(path: str) -> str:
    return Path(path).name


def supernode_runs(party: PartyFile) -> bool:
    """Return whether this party's SuperNode is running on this machine."""
    api = programs.local_api(party.store_path / "flower")
    try:
        check_server("the SuperNode", api.address, api.ca.read_text())
    except (LostPeerError, AuthenticationError, FileNotFoundError):
        return False
    return True


def submit(
    folder: LabelFolder,
    mode: str,
    run: str,
    overrides: Sequence[str] = (),
    extra: Mapping[str, str | bool] | None = None,
    federation: str = "",
) -> int:
    """Submit a run to the SuperLink; return the id that Flower gives to the run."""
    with upstream.no_deprecations():
        bundle = upstream.BUNDLE.load().build_fab_from_disk(folder.app)
    request = upstream.CONTROL_MESSAGES.load().StartRunRequest()
    messages = upstream.MESSAGES.load()
    if federation:
        options = upstream.ARGUMENTS.load().parse_config_args([federation])
        simulated = {name.replace("-", "_"): value for name, value in options.items()}
        sizes = upstream.SIZES.load().simulation_config_from_json(simulated)
        request.override_federation_config.CopyFrom(sizes)
    else:
        check_not_expired(folder.certificates / "server.pem")  # otherwise no party could connect
    config: dict[str, bool | float | int | str] = {"mode": mode, "run": run, **(extra or {})}
    config["overrides"] = json.dumps(list(overrides))
    for name, value in messages.user_config_to_proto(config).items():
        request.override_config[name].CopyFrom(value)
    fab = upstream.FAB.load().Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
    request.fab.CopyFrom(messages.fab_to_proto(fab))
    return int(_ask(folder, "StartRun", request).run_id)


def wait_for_superlink(folder: LabelFolder, patience_s: float, say: Callable[[str], None]) -> None:
    """Wait for a SuperLink that starts late; a command that starts it has its own time limit.

    Args:
        folder: folder of the label party.
        patience_s: time limit while no command is starting the SuperLink.
        say: function that receives one line, which says what the caller waits for, and how long.

    Raises:
        LostPeerError: no SuperLink runs, and no SuperLink starts in time.
    """
    said, deadline = "", time.monotonic() + patience_s
    while True:
        # Read before the check: a command that starts the SuperLink ends when it is ready.
        starts = worker_of(folder.state) is not None
        try:
            return _check_superlink(folder)
        except LostPeerError:
            if not starts and time.monotonic() > deadline:
                raise
        waits = f"the SuperLink is starting, see {folder.state / _LOG}"
        if not starts:
            waits = f"waiting up to {patience_s:g} s for the SuperLink, which vfl up "
            waits += f"{shlex.quote(str(folder.path))} starts"
        if waits != said:
            say(waits)
        said = waits
        time.sleep(_LOOK_S)


def connected(folder: LabelFolder) -> dict[str, bool]:
    """Return for each party whether its SuperNode is online.

    Raises:
        LostPeerError: no SuperLink runs.
    """
    request = upstream.CONTROL_MESSAGES.load().ListNodesRequest()
    nodes = _ask(folder, "ListNodes", request).nodes_info
    online = {str(node.name) for node in nodes if node.status == "online"}
    return {name: name in online for name in node_parties(folder.experiment())}


def run_state(folder: LabelFolder, run_id: int) -> str:
    """Return Flower's status of a run, such as ``running`` or ``finished:failed``."""
    request = upstream.CONTROL_MESSAGES.load().ListRunsRequest(run_id=run_id)
    status = _ask(folder, "ListRuns", request).run_dict[run_id].status
    return f"{status.status}:{status.sub_status}" if status.sub_status else str(status.status)


def run_log(folder: LabelFolder, run_id: int) -> str:
    """Return the log output of a run's ServerApp, the label party's program."""
    messages = upstream.CONTROL_MESSAGES.load()
    request = messages.StreamLogsRequest(run_id=run_id, after_timestamp=0.0)
    return str(_ask(folder, "StreamLogs", request).log_output)


def _ask(folder: LabelFolder, what: str, request: Any) -> Any:
    """Send a request to the Control API of the folder's SuperLink; return the first answer.

    Raises:
        LostPeerError: the SuperLink of this folder does not run.
        PeerFailedError: the SuperLink refuses the request; the error contains the SuperLink's text.
    """
    import httpx

    _check_superlink(folder)
    errors = upstream.ERRORS.load()
    with closing(programs.control_client(folder.state)) as client:
        try:
            answer = getattr(client, what)(request)
            return next(answer) if isinstance(answer, Iterator) else answer
        except httpx.HTTPError as problem:
            reply = getattr(problem, "response", None)
            told = None if reply is None else errors.FlowerError.from_json(reply.text)
            raise PeerFailedError(
                f"the SuperLink refuses {what}",
                got=printable(told.message if told else str(problem)),
                fix=_START_SUPERLINK,
            ) from None


def _check_superlink(folder: LabelFolder) -> None:
    """Check that the SuperLink of this folder runs, before any secret is sent to it.

    Raises:
        LostPeerError: the SuperLink does not run.
    """
    api = programs.local_api(folder.state)
    try:
        check_server("the SuperLink", api.address, api.ca.read_text())
    except LostPeerError as problem:
        problem.fix = _START_SUPERLINK
        raise
