import json
import socket

import pytest


@pytest.fixture
def project(bank_project):
    """A project whose ports nobody uses, and its tables."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for file in ("label/app/experiment.toml", "bank/party.toml"):
        path = bank_project / file
        text = path.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        path.write_text(text.replace("stream_port = 8001", "stream_port = 0"))
    for name in ("bank", "label"):
        (bank_project / name / "data.csv").write_text("id,a\n1,2\n")
    return bank_project


def test_the_machine_alone(vfl):
    done = vfl("doctor")
    assert (done.code, done.err) == (0, "")
    *lines, last = done.out.splitlines()
    assert last == "no problem found"
    assert {"vfl", "python", "torch", "flwr", "cores", "disk"} <= {
        line.split()[1] for line in lines
    }


def test_a_project_and_a_party(vfl, refused, project):
    label = vfl("doctor", project)
    assert label.code == 0, label.out
    bank = refused("doctor", project / "bank" / "party.toml")
    assert bank.out.splitlines()[-1].startswith("1 of ")
    failed = [line for line in bank.out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["superlink"]
    assert "check that the server runs" in bank.out


def test_for_machines(vfl, project):
    done = vfl("doctor", project / "bank" / "party.toml", "--json")
    told = json.loads(done.out)
    assert (done.code, told["ok"]) == (2, False)
    assert {"name", "state", "found", "fix"} == set(told["checks"][0])
    assert json.loads(vfl("doctor", project, "--json").out)["ok"] is True


def test_what_is_no_project(vfl, refused, tmp_path):
    done = refused("doctor", tmp_path)
    assert "error[V007]" in done.err
    assert "error[V003]" in vfl("doctor", "absent.toml").err
