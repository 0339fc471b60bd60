"""A real Flower deployment on the loopback: what it computes, what it refuses, what it tells."""

import contextlib
import csv
import hashlib
import json
import os
import re
import socket
import sqlite3
import ssl
import subprocess
import warnings
from base64 import b64encode
from pathlib import Path

import httpx
import pandas as pd
import pytest
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
)

from vfl.config.run_folder import RunFolder
from vfl.core.errors import AuthenticationError, LostPeerError, PeerError, VFLError
from vfl.core.storage import read_json, read_lines
from vfl.federation import deployment, programs
from vfl.federation.guard import SECRET_HEADER
from vfl.session import SessionMessage
from vfl.training import federated
from vfl.training.demo import run_in_process
from vfl.transport import Hello, TcpLink, Timeouts, route_of

with warnings.catch_warnings():  # importing typer, as flwr does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from fastapi.routing import iter_route_contexts
    from flwr.cli.build import build_fab_from_disk
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
    from flwr.superlink.main import create_app as superlink_app
    from flwr.supernode.main import create_app as supernode_app

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "security_routes.csv"
REFUSED = {403, 413}
NOBODY = 65534


def train(label, name, *overrides):
    epochs = []
    path = federated.run_session(label, "train", name, overrides=overrides, on_epoch=epochs.append)
    return path, RunFolder.open(path).summary(), epochs


@pytest.fixture(scope="module")
def trained(services):
    """One training all tests of the module look at."""
    return train(services[1], "none")


def test_the_federation_computes_what_one_process_computes(deployed, trained):
    folder, label = deployed
    _, summary, epochs = trained
    alone = run_in_process(folder, label, lambda record: None)
    same = read_json(alone / "summary.json")
    assert summary["weights_sha256"] == same["weights_sha256"]
    assert summary["test_accuracy"] == same["test_accuracy"]
    losses = [record["train_loss"] for record in read_lines(alone / "metrics.jsonl")]
    assert [record["train_loss"] for record in epochs] == losses
    assert len(losses) == 3
    assert summary["bytes_up"] == same["bytes_up"]
    assert summary["bytes_down"] == same["bytes_down"]


#: Settings of a training, and whether its weights are those of one process bit for bit.
KINDS = {
    "randtopk": (["codec=randtopk:k=8,alpha=0.2,values=8"], True),
    "sum": (["merge=sum", "secure=sum"], True),
    "beaver": (["merge=sum", "secure=beaver", "train.optimizer=sgd", "train.momentum=0",
                "train.weight_decay=0", "train.learning_rate=0.3",
                "parties.left.bottom=mlp:hidden=none", "parties.right.bottom=mlp:hidden=none"],
               False),  # truncation depends on shares, which are drawn anew
    "poisson": (["dp.noise=1", "dp.epsilon=8"], True),
    "pipelined": (["dp.epsilon=8", "train.in_flight=2",
                   "codec=randtopk:k=8,alpha=0.2,values=8,scale=row"], True),
    "quantile": (["dp.epsilon=8", "dp.clip_by=layer", "dp.quantile=0.5"], True),
    "private sum": (["dp.epsilon=8", "merge=sum", "secure=sum"], True),
}  # fmt: skip


@pytest.mark.net
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_computes_and_states_what_one_process_does(deployed, kind):
    """Keys, masks and shares are new in every session; private batches have about two rows."""
    folder, label = deployed
    settings, equal = KINDS[kind]
    name = f"kind-{kind.replace(' ', '-')}"  # private rows are drawn by a key of the run's name
    settings = [f"name={name}", *settings]
    if "dp.epsilon=8" in settings:
        settings += ["train.batch_size=2", "train.epochs=1"]
    path, summary, epochs = train(label, name, *settings)
    alone = run_in_process(folder, label, lambda record: None, settings)
    same, records = read_json(alone / "summary.json"), list(read_lines(alone / "metrics.jsonl"))
    for fact in ("test_loss", "bytes_up", "bytes_down", *(["weights_sha256"] if equal else [])):
        assert summary[fact] == same[fact]
    for figure in ("train_loss", "epsilon"):
        assert [one.get(figure) for one in epochs] == [one.get(figure) for one in records]
    assert summary.get("privacy") == same.get("privacy")
    federated.run_session(label, "evaluate", name)
    assert RunFolder.open(path).evaluation()["test_loss"] == summary["test_loss"]
    federated.run_session(label, "predict", name)
    assert len(pd.read_csv(path / "predictions.csv")) > 1000


def test_each_party_keeps_its_own_weights_and_nobody_elses(deployed, trained):
    folder, _ = deployed
    for owner in ("left", "right", "label"):
        kept = [path.parent.name for path in (folder / owner).rglob("weights.safetensors")]
        assert set(kept) == {owner}


@pytest.mark.net
def test_predictions_come_from_the_kept_weights(deployed, trained):
    folder, label = deployed
    path, _, _ = trained
    federated.run_session(label, "predict", "none")
    table = pd.read_csv(path / "predictions.csv", dtype={"id": str})
    truth = pd.read_parquet(folder / "label" / "digits.parquet").set_index("id")["digit"]
    assert len(table) == len(truth)
    assert (table.set_index("id")["prediction"] == truth.sort_index()).mean() > 0.9


@pytest.mark.net
def test_a_party_refuses_what_it_did_not_consent_to(deployed):
    _, label = deployed
    with pytest.raises(PeerError) as caught:
        train(label, "too-wide", "parties.left.width=300")
    told = str(caught.value)
    assert "V403" in told
    assert "width 300" in told
    assert "width <= 256" in told
    assert caught.value.exit_code == 3


@pytest.mark.net
def test_tables_with_other_rows_do_not_train(deployed):
    folder, label = deployed
    file = folder / "right" / "digits.parquet"
    whole = pd.read_parquet(file)
    changed = whole.assign(id=whole["id"].where(whole["id"] != "image-0000", "image-secret"))
    changed.to_parquet(file, index=False)
    try:
        with pytest.raises(PeerError) as caught:
            train(label, "misaligned")
    finally:
        whole.to_parquet(file, index=False)
    assert "V206" in str(caught.value)
    assert "1797 rows" in str(caught.value)
    assert "image-" not in str(caught.value)


@pytest.mark.net
def test_a_missing_party_is_named_within_the_join_timeout(deployed):
    _, label = deployed
    with pytest.raises(PeerError, match="nobody") as caught:
        train(label, "absent", "federation.join_timeout_s=3.0", "parties.nobody.width=8")
    assert "V401" in str(caught.value)


def test_flower_got_one_message_a_node_and_no_data(deployed, trained):
    """The SuperLink's database has seen no array and no cut, and none of its rows holds a token."""
    _, label = deployed
    database = sqlite3.connect(f"file:{label.state / 'superlink.db'}?mode=ro", uri=True)
    tables = [
        name for (name,) in database.execute("select name from sqlite_master where type='table'")
    ]
    content = b"".join(
        str(row).encode() for name in tables for row in database.execute(f'select * from "{name}"')
    )
    database.close()
    assert b"image-0000" not in content
    assert b"weights.safetensors" not in content
    assert b'"ca_pem"' not in content  # Flower drops the row of a message once it was fetched
    assert re.search(rb'token[\\\\"]+: *[\\\\"]+[A-Za-z0-9_-]{32}', content) is None
    tokens = {message.token.encode() for message in read_from_the_disk(label)}
    assert not any(token in content for token in tokens)


def read_from_the_disk(label):
    """Session messages in the SuperLink's files: the journal keeps deleted rows for a while."""
    found = {}
    for path in label.state.glob("superlink.db*"):
        text = path.read_bytes().decode("latin-1")
        for start in re.finditer(r'\{"session"', text):
            with contextlib.suppress(ValueError, VFLError):
                content, _ = json.JSONDecoder().raw_decode(text[start.start() :][:65536])
                message = SessionMessage.parse(json.dumps(content))
                found[message.token] = message
    return list(found.values())


@pytest.mark.net
def test_a_token_from_the_superlinks_files_opens_nothing(deployed):
    """Whoever reads them has tokens: bound to others while the session runs, dead after it."""
    _, label = deployed
    old = {message.token for message in read_from_the_disk(label)}
    tried = []

    def attach(message):
        hello = Hello(message.session, message.node, message.token)
        fast = Timeouts(handshake_s=5, step_s=5, idle_s=5, rejoin_window_s=0.3, retry_s=0.05)
        authority = message.ca_pem.encode()
        route = route_of(message.session)
        TcpLink.connect(message.host, message.port, hello, authority, fast, route=route).close()

    def attack(record):
        if record["epoch"] == 1:  # both parties are there
            tried.extend(one for one in read_from_the_disk(label) if one.token not in old)
            for message in tried:
                with pytest.raises(AuthenticationError):
                    attach(message)

    federated.run_session(label, "train", "read", overrides=["train.epochs=15"], on_epoch=attack)
    assert {message.node for message in tried}  # at least one was there to be tried
    for message in tried:
        with pytest.raises(LostPeerError):
            attach(message)


def test_a_supernode_with_an_unknown_key_is_turned_away(deployed, tmp_path):
    from vfl.config import PartyFile
    from vfl.transport import write_trial_certificates

    folder, label = deployed
    write_trial_certificates(tmp_path / "foreign", ["127.0.0.1"], ["left"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = {
        "superlink": label.experiment().federation.superlink,
        "ca": str(folder / "left" / "ca.pem"),
        "key": str(tmp_path / "foreign" / "left.key"),
        "api_port": port,
    }
    intruder = PartyFile.model_validate(
        {
            "party": "left",
            "data": {"source": "x.csv", "id": "id"},
            "store": str(tmp_path),
            "node": node,
        }
    )
    with pytest.raises(LostPeerError, match="did not start") as caught:
        deployment.start_supernode(intruder, tmp_path / "party.toml").stop()
    assert "does not know this party's key" in caught.value.got


@pytest.fixture
def foreign_code(deployed, tmp_path):
    """A bundle that leaves a file wherever it runs; the file, and the bundle's SHA-256."""
    _, label = deployed
    shim = label.app / "vfl_app.py"
    honest, trail = shim.read_text(), tmp_path / "who"
    spy = f"open({str(trail)!r}, 'a').write(__import__('os').environ['VFL_PARTY_FILE'])"
    shim.write_text(f"{honest}\n{spy}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        digest = hashlib.sha256(build_fab_from_disk(label.app)).hexdigest()
    yield trail, digest
    shim.write_text(honest)


@pytest.mark.net
def test_code_that_the_label_party_did_not_accept_never_runs_there(deployed, foreign_code):
    _, label = deployed
    trail, digest = foreign_code
    with pytest.raises(PeerError) as caught:
        train(label, "foreign-code")
    assert caught.value.exit_code == 3
    assert not trail.exists()
    assert f"SHA-256 {digest}" in str(caught.value)


@pytest.mark.net
def test_code_that_only_the_label_party_accepts_runs_at_no_other(deployed, foreign_code):
    folder, label = deployed
    trail, digest = foreign_code
    own = label.party_file.read_text()
    label.party_file.write_text(f'{own}\n[consent]\nbundles = ["{digest}"]\n')
    try:
        with pytest.raises(PeerError) as caught:
            train(label, "foreign-code")
    finally:
        label.party_file.write_text(own)
    assert caught.value.exit_code == 3
    assert set(trail.read_text().split(".toml")) == {f"{label.path}/party", ""}
    log = (folder / "left" / "store" / "flower" / "supernode.log").read_text()
    assert "error[V403]: this party does not run the app bundle" in log


def test_what_is_printed_holds_no_secret(deployed, trained):
    folder, _ = deployed
    logs = [*folder.rglob("*.log")]
    assert len(logs) >= 3  # and run.log, where a run of another test failed
    text = "".join(log.read_text(errors="replace") for log in logs)
    for side in ("left", "right", "label"):
        assert (folder / side / "store" / "secret-for-trials").read_bytes().hex() not in text
    assert "image-0" not in text


# --- every route of the running SuperLink and SuperNode


class Running:
    """A SuperLink with two registered parties, and the SuperNode of one of them.

    The other's key is the attacker's, who may end that party's own node.
    """

    def __init__(self, folder, label, superlink):
        self.folder, self.label, self.superlink = folder, label, superlink
        self.ids = {
            name: int(entry["node"])
            for name, entry in read_json(label.state / "nodes.json").items()
        }
        key = load_ssh_private_key((folder / "left" / "node.key").read_bytes(), None)
        self.key, self.public = key, public_key_to_bytes(key.public_key())
        self.apis = {
            "network": (f"https://{label.experiment().federation.superlink}", label.certificates),
            "SuperLink": self._local(label.state),
            "SuperNode": self._local(folder / "right" / "store" / "flower"),
        }
        # Each request has a connection of its own, as those of different callers do.
        alone = httpx.Limits(max_keepalive_connections=0)
        self.clients = {
            name: httpx.Client(
                verify=ssl.create_default_context(cafile=certificates / "ca.pem"),
                timeout=120,
                limits=alone,
                base_url=url,
            )
            for name, (url, certificates) in self.apis.items()
        }

    @staticmethod
    def _local(state):
        api = programs.local_api(state)
        return f"https://{api.address}", api.folder

    def secret(self, service):
        state = self.label.state if service == "SuperLink" else self.apis[service][1].parent
        return {SECRET_HEADER: programs.local_api(state).secret}

    def signed(self):
        """Headers of a SuperNode's request, by the key of party left."""
        time = now().isoformat()
        signature = sign_message(self.key, time.encode())
        return {
            "flwr-public-key": b64encode(self.public).decode(),
            "flwr-timestamp": time,
            "flwr-signature": b64encode(signature).decode(),
        }

    def post(self, api, path, headers, content=b"", method="POST"):
        everything = {"content-type": "application/protobuf"} | headers
        return self.clients[api].request(method, path, headers=everything, content=content)


@pytest.fixture(scope="module")
def running(services):
    made = Running(*services)
    yield made
    for client in made.clients.values():
        client.close()


def routes_of(application):
    """Method and path of everything an application answers."""
    found = set()
    for context in iter_route_contexts(application.routes):
        for method in context.methods or {"GET"}:
            found.add((method, context.path))
    return sorted(found)


def rows_of_the_table():
    """(service, path) to what the document says of the three who ask."""
    with DOCUMENT.open(encoding="utf-8", newline="") as file:
        return {
            (row["service"], row["prefix"] + name): list(row.values())[3:]
            for row in csv.DictReader(file)
            for name in row["routes"].split(", ")
        }


ROWS = rows_of_the_table()
OFFERED = [("SuperLink", *route) for route in routes_of(superlink_app())]
OFFERED += [("SuperNode", *route) for route in routes_of(supernode_app())]


def test_the_table_has_a_row_for_every_route_and_no_other():
    assert len(OFFERED) > 80
    assert {(service, path) for service, _, path in OFFERED} == set(ROWS)
    assert {answer for answers in ROWS.values() for answer in answers} == {
        "refused",
        "answered",
        "answered for its own node, refused for another's",
    }


def request_of(path, node_id, public_key):
    """A request that is right in form, from a node."""
    kind = PROTOBUF_REQUEST_TYPES.get(("POST", path))
    if kind is None:
        return b"{}"
    fields = kind.DESCRIPTOR.fields_by_name
    request = kind()
    if "node" in fields:
        request.node.CopyFrom(Node(node_id=node_id))
    elif "node_id" in fields:
        request.node_id = node_id
    if "public_key" in fields:
        request.public_key = public_key
    return request.SerializeToString()


@pytest.mark.parametrize(("service", "method", "path"), OFFERED)
def test_a_stranger_is_refused_everywhere(running, service, method, path):
    assert ROWS[service, path][0] == "refused"
    apis = [service, *(["network"] if service == "SuperLink" else [])]
    for api in apis:
        content = request_of(path, 1, b"")
        for headers in (
            {},
            {
                "x-forwarded-for": "127.0.0.1",
                "forwarded": "for=127.0.0.1",
                "host": "127.0.0.1",
                "authorization": "Bearer guess",
                SECRET_HEADER: "guess",
            },
        ):
            answer = running.post(api, path, headers, content, method)
            assert answer.status_code in REFUSED
            assert answer.content == b""


@pytest.mark.parametrize(("service", "method", "path"), OFFERED)
def test_a_party_speaks_for_its_own_node_only(running, service, method, path):
    said = ROWS[service, path][1]
    api = "network" if service == "SuperLink" else service
    own = request_of(path, running.ids["left"], running.public)
    other = request_of(path, running.ids["right"], b"another key")
    foreign = running.post(api, path, running.signed(), other, method)
    mine = running.post(api, path, running.signed(), own, method)
    if said == "refused":
        assert {mine.status_code, foreign.status_code} <= REFUSED
    else:
        assert foreign.status_code == 401  # by Flower, which compares node and key
        assert mine.status_code != 401
        assert not (mine.status_code in REFUSED and mine.content == b"")  # Flower's have words


@pytest.mark.parametrize(("service", "method", "path"), OFFERED)
def test_the_owners_programs_get_what_they_use(running, service, method, path):
    answer = running.post(service, path, running.secret(service), b"\xff", method)
    refused = ROWS[service, path][2] == "refused"
    # Bytes that are no message: Flower's own error shows that they reached it, and do nothing.
    assert (answer.status_code in REFUSED) is refused
    if refused:
        return
    assert answer.status_code in (400, 401, 415, 422, 500)


def test_a_reply_in_another_partys_name_is_refused(running):
    metadata = Metadata(src_node_id=running.ids["right"], dst_node_id=1, run_id=1)
    request = PushMessagesRequest(
        node=Node(node_id=running.ids["left"]), messages_list=[Message(metadata=metadata)]
    )
    path = "/v1/fleet/push-messages"
    forged = running.post("network", path, running.signed(), request.SerializeToString())
    assert (forged.status_code, forged.content) == (403, b"")


def memory_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def test_a_large_body_is_not_kept(running):
    """64 MiB from a stranger and from a party; the process stays as small as it was."""
    pid = running.superlink._process.pid
    before = memory_of(pid)

    def pieces():
        for _ in range(64):
            yield bytes(1024 * 1024)

    for path in ("/v1/fleet/pull-messages", "/v1/control/start-run", "/nowhere"):
        public_alone = dict(list(running.signed().items())[:1])
        for headers in ({}, public_alone, running.signed()):
            try:
                answer = running.post("network", path, headers, pieces())
            except (httpx.WriteError, httpx.ReadError):
                continue  # the guard had closed before all of it was sent
            assert answer.status_code in REFUSED
    assert memory_of(pid) - before < 32 * 1024 * 1024


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_reads_nothing_that_opens_a_port(running):
    folders = [running.label.state, running.folder / "right" / "store" / "flower"]
    for state in folders:
        files = [path for path in state.rglob("*") if path.is_file()]
        assert {"secret", "superexec", "server.key"} <= {path.name for path in files}
        for path in files:
            done = subprocess.run(["cat", path], user=NOBODY, group=NOBODY, capture_output=True)
            assert (done.returncode, done.stdout) == (1, b""), path


def test_every_port_refuses_tls_1_2(running):
    for url, certificates in running.apis.values():
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            httpx.Client(verify=context) as client,
            pytest.raises(httpx.ConnectError, match="rotocol"),
        ):
            client.post(url)


def test_no_key_is_registered_without_a_name(running):
    headers = running.secret("SuperLink")
    for request in (RegisterNodeRequest(), RegisterNodeRequest(public_key=running.public)):
        body = request.SerializeToString()
        answer = running.post("SuperLink", "/v1/control/register-node", headers, body)
        assert answer.status_code == 403


def test_another_start_has_other_secrets(running, tmp_path):
    first = programs.LocalApi.begin(tmp_path / "local")
    before = first.secret, first.superexec_secret.read_bytes(), first.ca.read_bytes()
    again = programs.LocalApi.begin(tmp_path / "local")
    after = again.secret, again.superexec_secret.read_bytes(), again.ca.read_bytes()
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists children")
def test_what_runs_the_work_is_in_a_session_of_its_own(running):
    """Beside a caller's busy processes, Ray's workers would wait for minutes otherwise."""
    pid = running.superlink._process.pid
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    assert children
    assert [os.getsid(int(child)) for child in children] == [int(child) for child in children]
