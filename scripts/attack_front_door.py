#!/usr/bin/env python
"""Attack a real deployment of vfl on this machine, as strangers, parties and other users would.

Each attack once succeeded; all are to be refused. The deployment is the demo's, started by its own
commands on the loopback. A stranger's requests come from another address of it, 127.0.0.3; another
user of the machine is user 65534. Nothing else is contacted, and every process is ended by its own
process id.

    python scripts/attack_front_door.py [--json] [--only NAME ...]
    python scripts/attack_front_door.py --target HOST:PORT     a SuperLink that runs already

Exit codes: 0 everything was refused, 1 something succeeded, 2 the attacks could not be set up.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import random
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

# ruff: noqa: E402 -- the tests' tools are found only from here on
warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tools"))

import httpx
import numpy as np
import pandas as pd
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.build import build_fab_from_disk
from flwr.proto import control_pb2, fab_pb2, runtime_pb2
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from stand_in_flower import Envelope, Flower

from vfl import demo, run
from vfl.config import Experiment, read_experiment, read_party_file
from vfl.errors import OversizedFrameError, VFLError
from vfl.frame import Frame, Kind, pack_header
from vfl.ledger import Ledger
from vfl.mpc.identity import Identity
from vfl.session import Checkpoints, Introduction, PartyFolder, SessionMessage, Terms, check_consent

STRANGER = "127.0.0.3"
NOBODY = 65534
MIB = 1024 * 1024
BODY_BYTES = 600 * MIB
#: What a process may grow by a refused body: buffers of a connection, and noise.
GROWTH_BYTES = 100 * MIB


@dataclass
class Result:
    """How one attack ended."""

    name: str
    succeeded: bool | None  #: None where it could not be tried
    how: str


# --- the deployment -----------------------------------------------------------------------------


class Target:
    """A SuperLink somewhere, without a key or a CA for it.

    Args:
        address: host:port.
        source: the address requests come from; empty is any.
    """

    def __init__(self, address: str, source: str = "") -> None:
        self.address, self._source = address, source

    def post(self, path: str, content: Any = b"", headers: dict[str, str] | None = None) -> Any:
        """A stranger's request."""
        options = {"local_address": self._source} if self._source else {}
        transport = httpx.HTTPTransport(verify=_untrusting(), **options)
        everything = {"content-type": "application/protobuf"} | (headers or {})
        with httpx.Client(transport=transport, timeout=60) as client:
            return client.post(f"https://{self.address}{path}", content=content, headers=everything)


class Deployment(Target):
    """The demo's project in a folder that others can enter, with every command running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        settings = ["train.epochs=2", "train.checkpoint_every=5", "federation.bind_host=0.0.0.0"]
        settings += ["federation.join_timeout_s=90.0"]
        self.label = demo.write_demo(self.folder, settings)
        super().__init__(self.label.experiment().federation.superlink, STRANGER)
        self._commands: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start everything, and train once."""
        self.superlink = self.command("superlink", "listens on", "superlink", self.folder)
        for side in ("left", "right"):
            file = self.folder / side / "party.toml"
            self.command(f"node-{side}", "is connected", "supernode", file)
        self.command("train", "report ", "train", self.folder)

    def command(self, name: str, marker: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a command and wait for what it says when it is ready."""
        log = self.folder.parent / f"{name}.said"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "vfl", *map(str, arguments)],
                cwd=self.folder.parent,  # and so not the vfl of the folder this was started in
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _with_path(self.folder.parent)},
            )
        self._commands.append(process)
        deadline = time.monotonic() + 180
        while marker not in log.read_text(errors="replace"):
            if time.monotonic() > deadline or process.poll() not in (None, 0):
                raise SystemExit(f"{name} did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.1)
        return process

    def stop(self) -> None:
        """End all of it."""
        for process in reversed(self._commands):
            if process.poll() is None:
                process.terminate()
        for process in self._commands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()


def _with_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _untrusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _read(message: Any, answer: httpx.Response) -> Any:
    if answer.status_code != 200:
        return None
    return message.FromString(answer.content)


# --- a stranger on the network ------------------------------------------------------------------

APP = """\
from pathlib import Path
from flwr.serverapp import ServerApp
from flwr.clientapp import ClientApp

app = ServerApp()
client = ClientApp()

@app.main()
def main(grid, context):
    Path({trail!r}).write_text("ran")
"""
SETTINGS = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "stranger"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "stranger"

[tool.flwr.app.components]
serverapp = "stranger_app:app"
clientapp = "stranger_app:client"

[tool.flwr.app.config]
"""


def start_a_run(made: Deployment) -> tuple[bool, str]:
    """A ServerApp of the stranger's own, as the label party's user."""
    trail, app = made.folder.parent / "trail", made.folder.parent / "stranger"
    app.mkdir()
    (app / "stranger_app.py").write_text(APP.format(trail=str(trail)))
    (app / "pyproject.toml").write_text(SETTINGS)
    content = build_fab_from_disk(app)
    fab = fab_pb2.Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    request = control_pb2.StartRunRequest(fab=fab)
    answer = made.post("/v1/control/start-run", request.SerializeToString())
    deadline = time.monotonic() + 30
    while answer.status_code == 200 and not trail.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    ran = "ran" if trail.exists() else "did not run"
    return trail.exists(), f"{answer.status_code}, own code {ran}"


def read_runs_and_logs(made: Target) -> tuple[bool, str]:
    """All runs, and the log of one."""
    answer = made.post("/v1/control/list-runs", control_pb2.ListRunsRequest().SerializeToString())
    found = _read(control_pb2.ListRunsResponse, answer)
    return found is not None, f"{answer.status_code}, {len(found.run_dict) if found else 0} runs"


def acquire_a_task(made: Target) -> tuple[bool, str]:
    """Work of the label party's own processes."""
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")._metadata.as_metadata()
    request = runtime_pb2.AcquireTaskRequest(supported_task_types=["serverapp"])
    answer = made.post("/v1/runtime/acquire-task", request.SerializeToString(), dict(version))
    return answer.status_code == 200, str(answer.status_code)


def take_a_partys_place(made: Target) -> tuple[bool, str]:
    """Unregister a party, and register a key of one's own under its name."""
    request = control_pb2.ListNodesRequest().SerializeToString()
    nodes = _read(control_pb2.ListNodesResponse, made.post("/v1/control/list-nodes", request))
    node = nodes.nodes_info[0].node_id if nodes else 1
    gone = made.post(
        "/v1/control/unregister-node",
        control_pb2.UnregisterNodeRequest(node_id=node).SerializeToString(),
    )
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    own = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    new = made.post(
        "/v1/control/register-node",
        control_pb2.RegisterNodeRequest(public_key=own, name="left").SerializeToString(),
    )
    return 200 in (gone.status_code, new.status_code), f"{gone.status_code}, {new.status_code}"


def send_a_large_body(made: Deployment) -> tuple[bool, str]:
    """600 MiB in chunks, and the memory of the SuperLink after it."""
    process = _child_named("flower-superlink", made.superlink.pid)
    before = _resident_bytes(process)

    def pieces() -> Iterator[bytes]:
        for _ in range(BODY_BYTES // MIB):
            yield bytes(MIB)

    try:
        status = str(made.post("/v1/fleet/pull-messages", pieces()).status_code)
    except httpx.HTTPError as closed:
        status = type(closed).__name__
    grown = _resident_bytes(process) - before
    return grown > GROWTH_BYTES, f"{status}, {grown // MIB} MiB more memory"


def go_around_the_door(made: Target) -> tuple[bool, str]:
    """Paths and headers that a filter by address or by text could let through."""
    paths = [
        "/v1/control/list-runs",
        "//v1/control/list-runs",
        "/v1/fleet/../control/list-runs",
        "/v1/control/list%2Druns",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/control/list-runs/",
        "/docs",
        "/openapi.json",
    ]
    headers = {name: "127.0.0.1" for name in ("x-forwarded-for", "x-real-ip")}
    headers["forwarded"] = "for=127.0.0.1"
    body = control_pb2.ListRunsRequest().SerializeToString()
    through = [path for path in paths if made.post(path, body, headers).status_code == 200]
    return bool(through), f"{len(through)} of {len(paths)} ways"


# --- another user of the machine ----------------------------------------------------------------


def call_a_supernodes_api(made: Deployment) -> tuple[bool, str]:
    """Work of a feature party's processes, without a secret."""
    port = read_party_file(made.folder / "left" / "party.toml").node.api_port
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")._metadata.as_metadata()
    request = runtime_pb2.AcquireTaskRequest(supported_task_types=["clientapp"]).SerializeToString()
    headers = {"content-type": "application/protobuf"} | dict(version)
    told = []
    for scheme in ("http", "https"):
        try:
            with httpx.Client(verify=_untrusting(), timeout=10) as client:
                url = f"{scheme}://127.0.0.1:{port}/v1/runtime/acquire-task"
                told.append(client.post(url, content=request, headers=headers).status_code)
        except httpx.HTTPError:
            told.append(0)
    return 200 in told, f"http {told[0]}, https {told[1]}"


READABLE = """\
tr "\\0" "\\n" | while read path; do
  head -c1 "$path" >/dev/null 2>&1 && echo "$path"
done
"""


def read_files(made: Deployment) -> tuple[bool | None, str]:
    """Everything the project's owners keep, as user 65534."""
    if os.getuid() != 0:
        return None, "only root can act as another user"
    files = [path for path in made.folder.rglob("*") if path.is_file()]
    done = subprocess.run(
        ["/bin/sh", "-c", READABLE],
        input="\0".join(map(str, files)) + "\0",
        capture_output=True, text=True, user=NOBODY, group=NOBODY, check=False,
    )  # fmt: skip
    private = done.stdout.splitlines()
    kinds = sorted({Path(path).name for path in private})
    return bool(private), f"{len(private)} of {len(files)} files" + (
        f": {', '.join(kinds[:6])} ..." if kinds else ""
    )


# --- sessions -----------------------------------------------------------------------------------

PARTIES = ("bank", "shop", "club")
PARTY = 'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n{more}\n'
CONTENT = {
    "merge": "sum",
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in PARTIES},
    "label": {"party": "lender", "top": "linear"},
    "train": {"epochs": 1, "batch_rows": 20},
    "federation": {"rejoin_window_s": 0.2, "step_timeout_s": 5.0, "max_restarts": 0,
                   "join_timeout_s": 5.0},
}  # fmt: skip
TWO = {name: CONTENT["parties"][name] for name in PARTIES[:2]}


class Noting(Ledger):
    """What the label party's links see."""

    seen: ClassVar[list[tuple[str, str, Kind, int, bytes]]] = []

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        super().__call__(party, direction, frame)
        self.seen.append((party, direction, frame.kind, frame.step, bytes(frame.payload)))


class Sessions:
    """Three parties, and a lender that uses a name as often as it likes."""

    def __init__(self, folder: Path) -> None:
        from vfl.server import federation, session

        session._COLLECT_S = 0.0
        federation.Message = Envelope
        session.Ledger = Noting
        self._run_session = session.run_session
        self.folder, self.flower = folder, Flower(PARTIES)
        draw = np.random.default_rng(0)
        ids = [f"r{row:03}" for row in range(120)]
        identities = {name: Identity.fresh() for name in PARTIES}
        for name in (*PARTIES, "lender"):
            own = folder / name
            own.mkdir(parents=True)
            columns = {"a": draw.normal(size=120), "b": draw.normal(size=120)}
            if name == "lender":
                columns = {"paid": np.arange(120) % 2}
            pd.DataFrame({"id": ids, **columns}).to_csv(own / "data.csv", index=False)
            more = 'label = "paid"' if name == "lender" else ""
            (own / "party.toml").write_text(PARTY.format(name=name, more=more))
            self.flower.files[name] = read_party_file(own / "party.toml")
            if name in identities:
                identities[name].keep_at(own / "identity.key")
                for other in PARTIES:
                    identities[other].public.keep_at(own / "peers" / f"{other}.pub")

    def play(self, **changes: Any) -> list[Any]:
        """A session of the name 'run'; the lender has forgotten any earlier one."""
        shutil.rmtree(self.folder / "lender" / "store", ignore_errors=True)
        Noting.seen = []
        experiment = Experiment.model_validate(CONTENT | changes)
        terms = Terms.of(experiment, "train", "run")
        try:
            self._run_session(self.flower, experiment, self.flower.files["lender"], terms)
        except VFLError:
            pass
        finally:
            for thread in self.flower.threads:
                thread.join(timeout=20)
        return Noting.seen

    def weights(self) -> str:
        """Digest of a party's weights of that name."""
        part = self.folder / "bank" / "store" / "runs" / "run" / "parties" / "bank"
        return hashlib.sha256((part / "weights.safetensors").read_bytes()).hexdigest()


def _cuts(seen: list[Any]) -> dict[int, np.ndarray]:
    return {step: np.frombuffer(payload, "<f4").reshape(-1, 4)
            for party, way, kind, step, payload in seen
            if (party, way, kind) == ("bank", "up", Kind.CUT)}  # fmt: skip


def compare_two_scales(folder: Path) -> tuple[bool, str]:
    """One name with sigma 1 and 2: twice the first cut less the second has no noise left."""
    sessions = Sessions(folder)
    first = _cuts(sessions.play(defense="clipped_noise:norm=1.0,sigma=1"))
    other = _cuts(sessions.play(defense="clipped_noise:norm=1.0,sigma=2"))
    if 0 not in other:
        return False, "the second session was refused before a cut"
    found = 2 * first[0] - other[0]
    largest = float(np.linalg.norm(found, axis=1).max())
    return largest <= 1 + 1e-3, f"largest norm of the difference {largest:.4f}, clipped at 1"


def compare_two_sums(folder: Path) -> tuple[bool, str]:
    """One name with a secure sum over three parties, then two: the difference is the third's."""
    sessions = Sessions(folder)
    first = sessions.play(secure="sum")
    assert any(kind is Kind.CUT for _, _, kind, _, _ in first), "the first session ran"
    other = sessions.play(secure="sum", parties=TWO)
    ran = any(kind is Kind.CUT for _, _, kind, _, _ in other)
    return ran, "both sums were told" if ran else "the second session was refused before a cut"


def overwrite_weights(folder: Path) -> tuple[bool, str]:
    """A finished run's weights, by a second session of its name."""
    sessions = Sessions(folder)
    sessions.play()
    before = sessions.weights()
    sessions.play(train=CONTENT["train"] | {"learning_rate": 0.1})
    after = sessions.weights()
    return before != after, "other weights" if before != after else "the same weights"


def announce_a_large_frame(folder: Path) -> tuple[bool, str]:
    """400 MiB after the welcome."""
    from vfl.clients.attach import attached

    sessions = Sessions(folder)
    refusals: list[BaseException] = []

    def misbehave(asked: SessionMessage, name: str) -> None:
        from vfl.session.own_data import own_data

        party = sessions.flower.files[name]
        introduction = Introduction.of(own_data(party, asked.terms), asked.terms, asked.session)
        limits = ()
        if len(inspect.signature(attached).parameters) > 2:
            from vfl.session.limits import frame_limits

            split = own_data(party, asked.terms).split
            limits = (frame_limits(asked.terms, name, split),)
        with contextlib.suppress(VFLError, OSError), attached(asked, introduction, *limits) as link:
            frame = Frame(Kind.CUT, 0, memoryview(bytes(400 * MIB)))
            header = pack_header(frame, payload_checked=False)
            link._stream._socket.setblocking(True)
            link._stream._socket.sendall(header + bytes(8 * MIB))
            time.sleep(1)

    sessions.flower._play = misbehave
    experiment = Experiment.model_validate(CONTENT)
    terms = Terms.of(experiment, "train", "run")
    try:
        sessions._run_session(sessions.flower, experiment, sessions.flower.files["lender"], terms)
    except VFLError as error:
        refusals.append(error)
    for thread in sessions.flower.threads:
        thread.join(timeout=20)
    refused = any(isinstance(one, OversizedFrameError) for one in refusals)
    return not refused, "; ".join(type(one).__name__ for one in refusals) or "accepted"


def ask_for_a_large_bottom(folder: Path) -> tuple[bool, str]:
    """1.5 GB under the consent of a file that says nothing."""
    del folder
    from vfl.config import Consent
    from vfl.datasets import Split

    parties = {"bank": {"width": 4, "bottom": "mlp:hidden=20000-20000"}}
    terms = Terms.of(Experiment.model_validate({"parties": parties}), "train", "run")
    rows = np.arange(100)
    split = Split(rows[:80], rows[80:90], rows[90:])
    options = {}
    if "row_shape" in inspect.signature(check_consent).parameters:
        options["row_shape"] = (8,)
    try:
        check_consent(terms, "bank", Consent(), split, **options)
    except VFLError as refusal:
        return False, f"{type(refusal).__name__}: {refusal.got}"
    return True, "consented"


def send_fields_out_of_range(folder: Path) -> tuple[bool, str]:
    """Values of a session message that no session means."""
    del folder
    from vfl.transport import session_certificate

    terms = Terms.of(Experiment.model_validate({"parties": {"bank": {}}}), "train", "run")
    message = {
        "session": "0" * 32, "token": "t" * 43, "node": "1", "host": "192.0.2.1", "port": 8001,
        "ca_pem": session_certificate(["192.0.2.1"]).ca_pem.decode(), "idle_timeout_s": 60.0,
        "rejoin_window_s": 8.0, "start": 0, "attempt": 0, "terms": terms.model_dump(mode="json"),
    }  # fmt: skip
    SessionMessage.parse(json.dumps(message))
    wrong = {
        "idle 1e308": message | {"idle_timeout_s": 1e308},
        "seed 10^400": message | {"terms": message["terms"] | {"seed": 10**400}},
        "validation -5": message | {"terms": message["terms"] | {"validation": -5}},
        "no CA": message | {"ca_pem": ""},
    }
    accepted = []
    for name, content in wrong.items():
        with contextlib.suppress(VFLError):
            SessionMessage.parse(json.dumps(content))
            accepted.append(name)
    return bool(accepted), ", ".join(accepted) or "none accepted"


def introduce_as_another(folder: Path) -> tuple[bool, str]:
    """A SuperNode registered as node-x says it is the bank."""
    from vfl.server.federation import Federation
    from vfl.session.own_data import own_data

    sessions = Sessions(folder)
    parties = {"bank": CONTENT["parties"]["bank"], "node-x": CONTENT["parties"]["shop"]}
    experiment = Experiment.model_validate(CONTENT | {"parties": parties})
    terms = Terms.of(experiment, "train", "run")
    own = own_data(sessions.flower.files["lender"], terms, "classification")
    federation = Federation(None, terms, experiment.federation, own, 1.0)
    bank = own_data(sessions.flower.files["bank"], terms)
    about = Introduction.of(bank, terms, federation.session).model_dump()
    try:
        federation._admit("node-x", about)
    except VFLError as refusal:
        return False, type(refusal).__name__
    return True, "admitted as bank"


# --- files --------------------------------------------------------------------------------------


def _interrupted(folder: Path) -> Path:
    """A run of one process with checkpoints, as a kill leaves it, beside one that ended."""
    content = {
        "data": {"source": "breast_cancer", "rows": 300},
        "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in ("bank", "shop")},
        "label": {"party": "lender"},
        "train": {"epochs": 3, "batch_rows": 20, "checkpoint_every": 5},
    }
    run.train(Experiment.model_validate(content), folder, "ended")
    with contextlib.suppress(KeyboardInterrupt):

        def stop(record: Any) -> None:
            if record["epoch"] == 2:
                raise KeyboardInterrupt

        run.train(Experiment.model_validate(content), folder, "cut", on_epoch=stop)
    return folder / "cut"


def _checkpoints(folder: Path, party: str) -> Checkpoints:
    experiment = read_experiment(folder / "config.toml")
    terms = Terms.of(experiment, "train", experiment.name)
    own = folder / "parties" / party / "checkpoints"
    if "party" in inspect.signature(Checkpoints).parameters:
        return Checkpoints(own, party, terms.run, terms.digest(), 5)
    return Checkpoints(own, terms.digest(), 5)


def flip_bits(folder: Path) -> tuple[bool, str]:
    """One bit in weights and checkpoints."""
    cut, draw = _interrupted(folder), random.Random(0)
    kept, weights = _checkpoints(cut, "bank"), PartyFolder(folder / "ended" / "parties" / "bank")
    checkpoints, step = cut / "parties" / "bank" / "checkpoints", kept.steps()[-1]
    targets: list[tuple[Path, Callable[[], Any]]] = [
        (next(checkpoints.glob(f"{step:010d}.*")), lambda: kept.load(step)),
        (weights.path / "weights.safetensors", weights.weights),
    ]
    silent = tried = 0
    for path, load in targets:
        whole = path.read_bytes()
        for _ in range(40):
            content = bytearray(whole)
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            tried += 1
            with contextlib.suppress(Exception):
                load()
                silent += 1
        path.write_bytes(whole)
    return silent > 0, f"{silent} of {tried} loaded silently"


def exchange_checkpoints(folder: Path) -> tuple[bool, str]:
    """Those of two parties, and a resume."""
    cut = _interrupted(folder)
    for mine in (cut / "parties" / "bank" / "checkpoints").glob("0*"):
        theirs = cut / "parties" / "shop" / "checkpoints" / mine.name
        first, other = mine.read_bytes(), theirs.read_bytes()
        mine.write_bytes(other)
        theirs.write_bytes(first)
    kept = _checkpoints(cut, "bank")
    try:
        kept.load(kept.steps()[-1])
    except VFLError as refusal:
        return False, type(refusal).__name__
    return True, "the other party's state was loaded"


def leave_a_formula(folder: Path) -> tuple[bool, str]:
    """An id that a spreadsheet computes."""
    from vfl.server.predictions import write_predictions

    folder.mkdir()
    ids = np.array(["=1+1", "r2"], dtype=object)
    data = SimpleNamespace(ids=ids, split=SimpleNamespace(test=np.arange(2)))
    write_predictions(folder / "predictions.csv", data, [torch.zeros(2, 2)], ["=cmd()", "no"])
    lines = (folder / "predictions.csv").read_text().splitlines()
    cells = [cell for line in lines for cell in line.split(",")]
    found = [cell for cell in cells if cell.strip('"').startswith("=")]
    return bool(found), f"{len(found)} cells begin with ="


LEAKY = """\
from torch import nn

class Leaky(nn.Module):
    def __init__(self, shape, width):
        super().__init__()
        self.layer = nn.Linear(int(shape[0]), width)

    def forward(self, inputs):
        raise ValueError(f"cannot compute {inputs.tolist()[:3]}")
"""


def read_rows_in_a_log(made: Deployment) -> tuple[bool, str]:
    """A bottom fails with its inputs in the error."""
    (made.folder.parent / "leaky.py").write_text(LEAKY)
    file = made.folder / "right" / "party.toml"
    own = file.read_text()
    text = own.replace('party = "right"', 'party = "right"\nbottom = "leaky:Leaky"')
    file.write_text(text)
    training = subprocess.run(
        [sys.executable, "-m", "vfl", "train", str(made.folder)],
        capture_output=True, text=True, check=False, timeout=120, cwd=made.folder.parent,
        env={**os.environ, "PYTHONPATH": _with_path(made.folder.parent)},
    )  # fmt: skip
    file.write_text(own)
    logs = [training.stdout, training.stderr]
    logs += [path.read_text(errors="replace") for path in made.folder.rglob("*.log")]
    found = sum("cannot compute [[" in log for log in logs)
    return found > 0, f"rows in {found} of {len(logs)} outputs and logs"


def _child_named(program: str, parent: int) -> int:
    """The process of a program that a command started."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().decode()
            if int(status[1]) == parent and program in command:
                return int(entry.name)
    return parent


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if "VmRSS" in line).split()[1]) * 1024


LIVE: list[Callable[[Deployment], tuple[bool | None, str]]] = [
    read_runs_and_logs,
    acquire_a_task,
    go_around_the_door,
    call_a_supernodes_api,
    read_files,
    send_a_large_body,
    start_a_run,
    read_rows_in_a_log,
    take_a_partys_place,
]
ALONE: list[Callable[[Path], tuple[bool | None, str]]] = [
    compare_two_scales,
    compare_two_sums,
    overwrite_weights,
    announce_a_large_frame,
    ask_for_a_large_bottom,
    send_fields_out_of_range,
    introduce_as_another,
    flip_bits,
    exchange_checkpoints,
    leave_a_formula,
]


#: What needs nothing but the address of a SuperLink.
FROM_AFAR = [read_runs_and_logs, acquire_a_task, go_around_the_door, take_a_partys_place]


def tried(one: Callable[[Any], tuple[bool | None, str]], target: Any) -> Result:
    """One attack."""
    try:
        return Result(one.__name__, *one(target))
    except Exception as problem:
        why = f"could not be tried: {type(problem).__name__}: {problem}"
        return Result(one.__name__, None, why[:200])


def attack(names: set[str]) -> list[Result]:
    """Try every attack that is asked for."""
    results = []
    with tempfile.TemporaryDirectory(prefix="vfl-attack-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # from here on, only the project's own modes protect it
        for alone in ALONE:
            if alone.__name__ in names:
                results.append(tried(alone, folder / alone.__name__))
        if names & {live.__name__ for live in LIVE}:
            made = Deployment(folder)
            try:
                made.start()
                for live in LIVE:
                    if live.__name__ in names:
                        results.append(tried(live, made))
            finally:
                made.stop()
    return results


def main() -> int:
    """The command line."""
    known = [one.__name__ for one in (*ALONE, *LIVE)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", nargs="*", choices=known, default=known, metavar="NAME")
    parser.add_argument("--target", metavar="HOST:PORT", help="attack this SuperLink, from afar")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        if arguments.target:
            results = [tried(one, Target(arguments.target)) for one in FROM_AFAR]
        else:
            results = attack(set(arguments.only))
    if arguments.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        words = {True: "SUCCEEDED", False: "refused", None: "not tried"}
        for one in results:
            print(f"{one.name:<26} {words[one.succeeded]:<10} {one.how}")
    if any(one.succeeded for one in results):
        return 1
    failed = [one for one in results if one.succeeded is None and "only root" not in one.how]
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
