"""Rows that are erased, and a new month, at a running federation that serves a run."""

import json
import subprocess
import sys
import time

import pandas as pd
import pytest
from initialised import initialise
from ports import free_ports
from real_deployment import Deployment

from vfl.core.errors import DataError, VFLError
from vfl.serving.client import Client

pytestmark = pytest.mark.net

ROWS, GONE, MONTH = 400, 7, 100


def month(start, rows):
    """The lender's and the bank's rows of so many customers."""
    ids = range(start, start + rows)
    frame = pd.DataFrame({"id": ids})
    frame["income"] = (frame["id"] * 37 % 101) / 101
    frame["debt"] = (frame["id"] * 53 % 97) / 97
    frame["paid"] = (frame["income"] > frame["debt"]).map({True: "yes", False: "no"})
    return frame[["id", "income", "paid"]], frame[["id", "debt"]].sample(frac=1, random_state=0)


def write(folder, *parts):
    """Write the tables of several months."""
    for name, frames in zip(("lender", "bank"), zip(*parts, strict=True), strict=True):
        pd.concat(frames).to_csv(folder / f"{name}.csv", index=False)


@pytest.fixture
def federation(tmp_path):
    write(tmp_path, month(1000, ROWS))

    def project(folder, settings):
        tables = ["--from", f"lender={tmp_path / 'lender.csv'}", "--from"]
        tables += [f"bank={tmp_path / 'bank.csv'}", "--label-party", "lender", "--label", "paid"]
        return initialise(folder, ["bank"], *tables, "--serve")

    started = Deployment(tmp_path / "project", sides=["bank"], write=project)
    yield started.start()
    started.close()


def vfl(*words):
    command = [sys.executable, "-m", "vfl", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def answered(client, ids, within_s=120.0):
    """The answers for ids, once the service can give them."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return [row["prediction"] for row in client.predict(ids)]
        except VFLError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def until_refused(client, ids, within_s=120.0):
    """Wait until the service knows ids no more: the session of before holds its rows in memory."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            client.predict(ids)
        except DataError:
            return
        except VFLError:  # the bank is away
            pass
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_rows_are_erased_and_a_month_is_added_while_a_run_is_served(federation, tmp_path, request):
    project = federation.folder
    federation.done("align", project)
    run = federation.run(federation.trained("train.epochs=3"))
    (port,) = free_ports(1)
    service = federation.ask("serve", run, "--port", port)
    service.wait_for("http://")
    client = Client(f"http://127.0.0.1:{port}", run / "serve.token")
    request.addfinalizer(client.close)
    stays = [str(1000 + GONE + number) for number in range(50)]
    before = answered(client, stays)

    # The bank erases seven customers, in its table too.
    gone = [str(1000 + number) for number in range(GONE)]
    (tmp_path / "gone.txt").write_text("\n".join(gone))
    told = vfl("forget", project / "bank/party.toml", "--ids", tmp_path / "gone.txt", "--table")
    assert told["found"] == GONE
    assert told["alignments"] == {"alignment, source": GONE}
    assert told["runs"][run.name]["train"] > 0
    assert "1003" not in (tmp_path / "bank.csv").read_text()
    federation.done("predict", run)  # without a new alignment, beside the service
    predicted = pd.read_csv(run / "predictions.csv", dtype=str)["id"]
    assert set(predicted) == {str(1000 + number) for number in range(GONE, ROWS)}
    federation.nodes["bank"].stop()
    federation.start_supernode("bank")
    until_refused(client, gone[:1])
    assert answered(client, stays) == before
    again = federation.run(federation.trained("train.epochs=3"))
    federation.done("predict", again)
    assert len(pd.read_csv(again / "predictions.csv")) == ROWS - GONE
    assert vfl("status", run)["erased"]["train"] > 0

    # A new month comes, and the service of the old run goes on with everybody's new rows.
    write(tmp_path, month(1000 + GONE, ROWS - GONE), month(5000, MONTH))
    federation.done("align", project)
    federation.nodes["bank"].stop()
    federation.start_supernode("bank")
    new = [str(5000 + number) for number in range(20)]
    assert answered(client, [*stays, *new])[: len(stays)] == before
    federation.done("predict", again)
    service.stop()
