"""Starts Flower's services, the SuperLink and the SuperNodes; registers keys; submits runs.

In the services and in the programs that they start, Flower's telemetry, update check and dependency
installation are disabled.
"""

from __future__ import annotations

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
    PeerError,
    PeerFailedError,
    UserError,
)
from vfl.core.processes import Service
from vfl.core.storage import locked, read_json, sweep, worker_of, write_json
from vfl.core.text import printable
from vfl.federation import programs, upstream
from vfl.federation.project import LabelFolder, node_parties
from vfl.transport import check_not_expired, check_server, fingerprint, public_key_bytes
from vfl.transport.stream import listen

_DATABASE, _LOG = "superlink.db", "superlink.log"
#: Name of a file that contains, for each party, Flower's node id and the digest of the registered
#: key.
_NODES = "nodes.json"
#: Text that a SuperNode prints if the SuperLink does not know the SuperNode's key; the SuperNode
#: then tries again.
_UNKNOWN_KEY = "403 Forbidden"
#: Text that a SuperNode prints if its key was withdrawn; further attempts to connect fail, too.
_TAKEN_BACK = "410 Gone"
#: Seconds between two checks whether the SuperLink runs.
_LOOK_S = 0.2
_START_SUPERLINK = "check that the SuperLink is running; if not, start it with: vfl up PROJECT"


def start_superlink(folder: LabelFolder, *, simulation: bool = False) -> Service:
    """Start the SuperLink of a label party; return when SuperNodes can connect to it.

    Raises:
        UserError: the SuperLink's certificate has expired, or its host is not this machine.
        RunFolderError: another process is starting the SuperLink at the same time.
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
    if simulation:  # in a simulation, the ports are open on this machine only
        command += ["--insecure", "--simulation"]
    else:
        for own in (parse_address(network).host, at.host):
            _require_own_host(folder, own)
        check_not_expired(folder.certificates / "server.pem")
        command += ["--ssl-ca-certfile", str(folder.certificates / "ca.pem")]
        command += ["--ssl-certfile", str(folder.certificates / "server.pem")]
        command += ["--ssl-keyfile", str(folder.certificates / "server.key")]
        command += ["--enable-supernode-auth"]
    if not (folder.state / _DATABASE).exists():
        for file in (_NODES, programs.RETIRED):  # a new SuperLink has no registered keys
            (folder.state / file).unlink(missing_ok=True)
    environment = programs.superlink_environment(folder.state, folder.party_file, network, streams)
    # `wait_for_superlink` checks this lock to see that the SuperLink is starting
    with locked(folder.state):
        service = Service("the SuperLink", command, environment, folder.state / _LOG)
        service.wait_for(programs.READY)
    return service


def _require_own_host(folder: LabelFolder, host: str) -> None:
    """Refuse a host at which this machine cannot listen; the error names the setting."""
    try:
        listen(host, 0).close()
    except UserError as refused:
        refused.where = f"{folder.app / 'experiment.toml'}: {host}"
        refused.fix = 'in [federation] of this file, set bind_host = "0.0.0.0" (all addresses)'
        raise


def kept_worker_of(whose: LabelFolder | PartyFile) -> AbstractContextManager[Callable[[], None]]:
    """Run a party's standing worker until the `with` block ends; see `programs.kept_worker`."""
    if isinstance(whose, PartyFile):
        home = whose.store_path / "flower"
        environment = programs.supernode_environment(home, whose.path)
        return programs.kept_worker(environment, home / "supernode.log")
    environment = programs.superlink_environment(whose.state, whose.party_file, "network", "")
    return programs.kept_worker(environment, whose.state / _LOG)


def register_nodes(folder: LabelFolder) -> list[str]:
    """Register every party's public key under the party's name.

    Return the newly registered parties. If a party's key in keys/ was removed, or replaced by a key
    that the label party has accepted, its earlier key is withdrawn from the SuperLink. The function
    does not register a key whose fingerprint the label party has not compared yet; see
    `waiting_keys`.

    Raises:
        UserError: a file in keys/ has a name that no party has, contains no key, or contains
            another party's key; the error names all such files, and no key is registered.
        LostPeerError: the SuperLink does not run.
        PeerFailedError: the SuperLink refuses a request.
    """
    messages, new = upstream.CONTROL_MESSAGES.load(), []
    nodes_file, nodes = folder.state / _NODES, _nodes(folder)
    keys, waiting = _party_keys(folder), waiting_keys(folder)
    digests = {name: programs.digest_of(key.read_bytes()) for name, key in keys.items()}
    # withdraw keys first, so that an error in a registration does not prevent the withdrawal
    for name in sorted(nodes):
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
                "public": programs.digest_of(public),
            }
            write_json(nodes_file, nodes)
            new.append(name)
    return new


def _nodes(folder: LabelFolder) -> dict[str, dict[str, str]]:
    """Return, for each party with a registered key, Flower's node id and digests of the key."""
    file = folder.state / _NODES
    return read_json(file) if file.exists() else {}


def _retire(folder: LabelFolder, node: Mapping[str, str]) -> None:
    """Record that a key was withdrawn, because Flower never registers the same key again."""
    if "public" in node:
        keys = programs.retired_keys(folder.state) | {node["public"]}
        write_json(folder.state / programs.RETIRED, {"keys": sorted(keys)})


def was_registered(folder: LabelFolder, content: bytes) -> bool:
    """Return whether a SuperNode's key was registered earlier and then withdrawn."""
    public = public_key_bytes(content) or b""
    return programs.digest_of(public) in programs.retired_keys(folder.state)


def waiting_keys(folder: LabelFolder) -> list[str]:
    """Return parties with a key in keys/ whose fingerprint the label party has not compared."""
    nodes, accepted, waiting = _nodes(folder), folder.accepted_keys(), []
    for key in sorted(folder.keys.glob("*.pub")):
        content = key.read_bytes()
        registered = nodes.get(key.stem, {}).get("key") == programs.digest_of(content)
        if not registered and accepted.get(key.stem) != fingerprint(content):
            waiting.append(key.stem)
    return waiting


def _party_keys(folder: LabelFolder) -> dict[str, Path]:
    """Return the key files in keys/ by party.

    The name of a file is the party's name plus a suffix.
    """
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
        MissingDataError: the file of the CA certificate or of the party's key does not exist.
    """
    ca, key = party.beside(party.node.ca), party.beside(party.node.key)
    for needed in (ca, key):
        if not needed.exists():
            raise MissingDataError(
                f"party '{party.party}' lacks a file that its SuperNode needs",
                where=str(needed),
                fix=f"vfl join {file.parent} makes the keys; the label party sends the file ca.pem",
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
    """Start a feature party's SuperNode; return when the SuperNode is connected to the SuperLink.

    Raises:
        AuthenticationError: the SuperLink's certificate is not valid, or the SuperLink has
            withdrawn this party's key.
        ClockError: the clocks of the SuperLink and of this machine differ too much.
        LostPeerError: the SuperLink cannot be reached, or does not know this party's key.
        MissingDataError: see `supernode_command`.
    """
    command = supernode_command(party, file)
    tidy_store(party.store_path)
    sweep(party.beside("."), {file.name, *map(_name, (party.node.key, party.identity.key))})
    home = party.store_path / "flower"
    ca_pem = party.beside(party.node.ca).read_text()
    check_server("the SuperLink", party.node.superlink, ca_pem, clock=True)
    service = Service(
        f"the SuperNode of {party.party}",
        command,
        programs.supernode_environment(home, file),
        home / "supernode.log",
    )
    try:
        service.wait_for("SuperNode ID", refusals=(_UNKNOWN_KEY, _TAKEN_BACK))
    except LostPeerError as problem:
        if _TAKEN_BACK in service.said():
            raise AuthenticationError(
                f"the label party has withdrawn the key of '{party.party}'",
                where=f"the SuperLink at {party.node.superlink}",
                got="a key that was registered earlier",
                want="the key of a party of the project, which the label party accepted last",
                fix="ask the label party: it has removed this party, or accepted another key of "
                f"this party; vfl renew {file} makes a new key for the label party to accept",
            ) from None
        if _UNKNOWN_KEY in service.said():
            problem.got = "the SuperLink does not know this party's key"
            problem.fix = (
                f"the label party has to accept the key: vfl party accept {party.party}.pub PROJECT"
            )
        if "Failed to activate SuperNode" in service.said():
            problem.got = "the SuperLink still treats this SuperNode as online"
            problem.fix = (
                "stop the other SuperNode that uses this key; if it was killed, the SuperLink "
                "frees the key after 60 s"
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
    except (PeerError, FileNotFoundError):  # another program may listen at its port now
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
    """Submit a run to the SuperLink; return the run's id in Flower."""
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
        # otherwise no party could connect to the run's session
        check_not_expired(folder.certificates / "server.pem")
    config: dict[str, bool | float | int | str] = {"mode": mode, "run": run, **(extra or {})}
    config["overrides"] = json.dumps(list(overrides))
    for name, value in messages.user_config_to_proto(config).items():
        request.override_config[name].CopyFrom(value)
    fab = upstream.FAB.load().Fab(programs.digest_of(bundle), bundle, {})
    request.fab.CopyFrom(messages.fab_to_proto(fab))
    return int(_ask(folder, "StartRun", request).run_id)


def wait_for_superlink(folder: LabelFolder, patience_s: float, say: Callable[[str], None]) -> None:
    """Wait until the SuperLink runs, if another command is starting it or may start it soon.

    Args:
        folder: folder of the label party.
        patience_s: time limit in seconds while no command is starting the SuperLink; a command that
            starts it has its own time limit.
        say: function that is called with one line: the reason and the length of the wait.

    Raises:
        LostPeerError: no SuperLink runs, and no command starts one in time.
    """
    said, deadline = "", time.monotonic() + patience_s
    while True:
        # Read the lock before the check, because the starting command releases it when the
        # SuperLink is ready.
        starts = worker_of(folder.state) is not None
        try:
            _check_superlink(folder)
            if said:
                say("the SuperLink is up")
            return
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
    """Return, for each party, whether its SuperNode is online.

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
    """Return the log output of a run's ServerApp, which is the label party's program."""
    messages = upstream.CONTROL_MESSAGES.load()
    request = messages.StreamLogsRequest(run_id=run_id, after_timestamp=0.0)
    return str(_ask(folder, "StreamLogs", request).log_output)


def _ask(folder: LabelFolder, what: str, request: Any) -> Any:
    """Send a request to the Control API of a label party's SuperLink; return the first answer.

    Raises:
        LostPeerError: the SuperLink of this label party does not run.
        PeerFailedError: the SuperLink refuses the request; the error contains the SuperLink's
            reason.
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
    """Check that the label party's SuperLink runs, before a request with a secret is sent.

    Raises:
        LostPeerError: the SuperLink of this label party does not run.
        AuthenticationError, ProtocolError: another program listens at the SuperLink's local port.
    """
    api = programs.local_api(folder.state)
    try:
        check_server("the SuperLink", api.address, api.ca.read_text())
    except LostPeerError as problem:
        problem.fix = _START_SUPERLINK
        raise
