"""A real Flower deployment on the loopback: what it computes, what it refuses, what it tells."""

import contextlib
import hashlib
import json
import re
import socket
import sqlite3
import warnings

import pandas as pd
import pytest

from vfl.config.run_folder import RunFolder
from vfl.core.errors import AuthenticationError, LostPeerError, PeerError, VFLError
from vfl.core.storage import read_json, read_lines
from vfl.federation import deployment
from vfl.session import SessionMessage
from vfl.training import federated
from vfl.training.demo import run_in_process
from vfl.transport import Hello, TcpLink, Timeouts

with warnings.catch_warnings():  # importing typer, as flwr does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.cli.build import build_fab_from_disk


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


@pytest.mark.net
def test_random_top_k_draws_the_same_from_the_parties_secrets(deployed):
    folder, label = deployed
    codec = "codec=randtopk:k=8,alpha=0.2,values=8"
    _, summary, _ = train(label, "randtopk", codec)
    alone = read_json(run_in_process(folder, label, lambda record: None, [codec]) / "summary.json")
    assert summary["weights_sha256"] == alone["weights_sha256"]
    assert summary["wire_ratio"] < 0.2


@pytest.mark.net
def test_a_secure_sum_computes_what_one_process_computes(deployed):
    """Every session agrees on keys of its own; sums, weights and bytes are the same."""
    folder, label = deployed
    settings = ["merge=sum", "secure=sum"]
    path, summary, _ = train(label, "secure", *settings)
    alone = read_json(run_in_process(folder, label, lambda record: None, settings) / "summary.json")
    assert summary["weights_sha256"] == alone["weights_sha256"]
    assert summary["bytes_up"] == alone["bytes_up"]
    federated.run_session(label, "evaluate", "secure")
    again = RunFolder.open(path).evaluation()
    assert again["test_loss"] == summary["test_loss"]
    federated.run_session(label, "predict", "secure")
    assert len(pd.read_csv(path / "predictions.csv")) > 1000


PRIVATE = {
    "poisson": ["dp.noise=1", "dp.epsilon=8"],
    "pipelined": ["dp.epsilon=8", "train.in_flight=2",
                  "codec=randtopk:k=8,alpha=0.2,values=8,scale=row"],
    "quantile": ["dp.epsilon=8", "dp.clip_by=layer", "dp.quantile=0.5"],
    "sum": ["dp.epsilon=8", "merge=sum", "secure=sum"],
}  # fmt: skip


@pytest.mark.net
@pytest.mark.parametrize("kind", PRIVATE)
def test_private_training_computes_and_states_what_one_process_does(deployed, kind):
    """Each party noises its half by a secret of its own; batches of about two rows, and empty."""
    folder, label = deployed
    name = f"private-{kind}"  # rows are drawn by a key of the run's name
    settings = [f"name={name}", *PRIVATE[kind], "train.batch_size=2", "train.epochs=1"]
    path, summary, epochs = train(label, name, *settings)
    alone = run_in_process(folder, label, lambda record: None, settings)
    same = read_json(alone / "summary.json")
    (stated,) = summary["privacy"]
    assert stated == same["privacy"][0]
    assert stated["unit"] == "record"
    assert 0 < stated["epsilon"] <= 8
    assert summary["weights_sha256"] == same["weights_sha256"]
    assert [one["epsilon"] for one in epochs] == [
        record["epsilon"] for record in read_lines(alone / "metrics.jsonl")
    ]
    federated.run_session(label, "evaluate", name)
    assert RunFolder.open(path).evaluation()["test_loss"] == summary["test_loss"]


@pytest.mark.net
def test_shared_first_layers_compute_what_one_process_computes(deployed):
    """Shares are drawn anew in every session; what the label party gets of them is the same."""
    folder, label = deployed
    settings = ["merge=sum", "secure=beaver", "train.optimizer=sgd", "train.momentum=0",
                "train.weight_decay=0", "train.learning_rate=0.3"]  # fmt: skip
    settings += [f"parties.{name}.bottom=mlp:hidden=none" for name in ("left", "right")]
    path, summary, epochs = train(label, "beaver", *settings)
    alone = run_in_process(folder, label, lambda record: None, settings)
    same = read_json(alone / "summary.json")
    losses = [record["train_loss"] for record in read_lines(alone / "metrics.jsonl")]
    assert [record["train_loss"] for record in epochs] == losses
    for fact in ("test_loss", "test_accuracy", "bytes_up", "bytes_down"):
        assert summary[fact] == same[fact]
    federated.run_session(label, "evaluate", "beaver")
    assert RunFolder.open(path).evaluation()["test_loss"] == summary["test_loss"]
    federated.run_session(label, "predict", "beaver")
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
def test_an_evaluation_uses_the_kept_weights(deployed, trained):
    _, label = deployed
    path, summary, _ = trained
    federated.run_session(label, "evaluate", "none")
    again = RunFolder.open(path).evaluation()
    assert again["test_accuracy"] == summary["test_accuracy"]
    assert again["weights_sha256"] == summary["weights_sha256"]


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
        TcpLink.connect(message.host, message.port, hello, authority, fast).close()

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
    assert (
        json.loads(
            (
                folder / "left" / "store" / "runs" / "none" / "parties" / "left" / "party.json"
            ).read_text()
        )["party"]
        == "left"
    )
