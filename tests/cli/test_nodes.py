"""`vfl up` as a command; tests/federation runs the real processes."""

import os
import signal
from pathlib import Path

import pytest

from vfl.cli import federation
from vfl.core import processes as supervise
from vfl.federation import deployment


class Standing:
    """A service whose log grows at each look, until it is interrupted or ends."""

    name = "the SuperNode of bank"
    says = ()
    ends = False

    def __init__(self, folder):
        self.stopped = 0
        self.log = folder / "service.log"
        self.log.write_text("vfl: something of another day\n")
        self.looks = iter([*self.says, None])

    @property
    def alive(self):
        text = next(self.looks)
        if text is None and not self.ends:
            raise KeyboardInterrupt
        with self.log.open("a") as log:
            log.write(text or "")
        return text is not None

    def wait(self):
        return 7

    def stop(self):
        self.stopped += 1


@pytest.fixture
def service(bank_project, monkeypatch, tmp_path):
    standing = Standing(tmp_path)
    monkeypatch.setattr(federation, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(deployment, "start_superlink", lambda label: standing)
    monkeypatch.setattr(deployment, "start_supernode", lambda party, file: standing)
    monkeypatch.setattr(deployment, "register_nodes", lambda label: ["bank"])
    return standing


@pytest.mark.usefixtures("without_worker")
def test_the_superlink_tells_its_address_and_ends_with_the_command(vfl, service):
    done = vfl("up", "project")
    assert (done.code, done.out) == (130, "")
    assert "127.0.0.1:8000; new keys: bank" in done.err
    assert "service.log; end it with Ctrl-C" in done.err
    assert service.stopped == 1


@pytest.mark.usefixtures("without_worker")
def test_the_supernode_repeats_what_vfl_says_and_nothing_else(vfl, service):
    service.looks = iter(
        [
            "INFO: noise\nvfl: party bank takes",
            " part in one\n\x1b[92mINFO\x1b[0m more noise\n",
            "error[V403]: party 'bank' does not consent\n  got   width 32\n  want  width <= 16\n",
            "  File app.py\n",
            None,
        ]
    )
    done = vfl("up", "project/bank/party.toml")
    assert (done.code, done.out) == (130, "")
    assert done.err.splitlines()[3:] == [
        "vfl: party bank takes part in one",
        "error[V403]: party 'bank' does not consent",
        "  got   width 32",
        "  want  width <= 16",
    ]
    assert done.err.splitlines()[1] == "party bank is connected to 127.0.0.1:8000"
    assert service.stopped == 1


@pytest.mark.usefixtures("without_worker")
def test_a_service_is_ended_with_a_command_that_is_told_to_end(vfl, service, monkeypatch):
    def look():
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    monkeypatch.setattr(Standing, "alive", property(lambda self: look()))
    assert vfl("up", "project").code == 143
    assert service.stopped == 1


@pytest.mark.usefixtures("without_worker")
def test_a_superlink_that_ends_on_its_own_is_told(vfl, service):
    service.ends = True
    done = vfl("up", Path("project"))
    assert done.code == 3
    assert "the SuperNode of bank ended" in done.err
    assert "exit 7" in done.err
    assert "vfl train PROJECT --resume RUN" in done.err
    assert "service.log" in done.err


@pytest.mark.usefixtures("without_worker")
def test_a_supernode_that_ends_on_its_own_is_started_again(vfl, service, monkeypatch):
    starts = []

    def start(party, file):
        starts.append(party.party)
        service.looks, service.ends = iter([None]), len(starts) == 1
        return service

    monkeypatch.setattr(deployment, "start_supernode", start)
    monkeypatch.setattr(supervise, "sleep", lambda seconds: None)
    done = vfl("up", Path("project/bank/party.toml"))
    assert done.code == 130
    assert starts == ["bank", "bank"]
    assert "the SuperNode of bank ended (exit 7); starting it again in 1 s" in done.err
    assert service.stopped == 2


@pytest.mark.usefixtures("without_worker")
@pytest.mark.parametrize(
    ("path", "party"),
    [
        ("project", "label"),
        ("project/label", "label"),
        ("project/label/party.toml", "label"),
        ("project/bank", "bank"),
        ("project/bank/party.toml", "bank"),
    ],
)
def test_up_finds_out_whose_party_it_is(vfl, service, path, party):
    said = {"label": "the SuperLink listens on", "bank": "party bank is connected"}
    assert said[party] in vfl("up", path).err


@pytest.mark.usefixtures("without_worker")
@pytest.mark.parametrize(
    ("former", "path"), [("superlink", "project"), ("supernode", "project/bank/party.toml")]
)
def test_the_former_commands_say_todays_name(vfl, service, former, path):
    done = vfl(former, path)
    assert done.code == 130
    assert f"warning: the command 'vfl {former} " in done.err
    assert "is called 'vfl up " in done.err
    assert "end it with Ctrl-C" in done.err


@pytest.mark.parametrize("path", ["project/bank", "project/bank/party.toml"])
def test_up_runs_a_further_rank_of_a_folder_or_file(vfl, bank_project, monkeypatch, path):
    asked = []

    def run_rank(file, rank):
        asked.append((file, rank))
        raise SystemExit(0)

    monkeypatch.setattr(federation, "_run_rank", run_rank)
    vfl("up", path, "--rank", "1")
    assert asked == [(Path("project/bank/party.toml"), 1)]


def test_only_a_project_accepts_a_key_with_up(vfl, bank_project):
    done = vfl("up", "project/bank", "--accept", "shop.pub=0123")
    assert done.code == 2
    assert "another party runs vfl party accept" in " ".join(done.err.replace("│", "").split())
