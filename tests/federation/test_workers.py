"""A standing worker forks a child a request: its programs here are of the test, not of Flower."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from vfl.core.errors import LostPeerError
from vfl.federation import workers
from vfl.transport.local_socket import connected_to

PROGRAMS = """
import os, sys, time
from pathlib import Path
from vfl.federation import workers

def threaded():
    import threading
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def session():
    print("session", os.getpid(), *sys.argv[1:], flush=True)
    where = sys.argv[1]
    open(where + ".tmp", "w").write(str(os.getppid()))
    os.rename(where + ".tmp", where)

def vfl():
    what = sys.argv[1]
    if what == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    if what == "die":
        os.kill(os.getpid(), 9)
    if what == "tell":
        import numpy
        told = [os.getcwd(), os.environ["TOLD"], sys.stdin.readline().strip(), oct(os.umask(0))]
        print(*told, workers._forked, numpy.random.rand(), flush=True)
        print("aside", file=sys.stderr)
    if what == "parties":
        shared = workers.WorkerClient(Path(os.environ[workers.SHARED_VARIABLE]), "session")
        shared.popen(["session", sys.argv[3]])
        print("worker", os.getppid(), shared.run(["vfl", "end", "5"]), flush=True)
    sys.exit(int(sys.argv[2]))

def preload():
    import json, numpy

if os.environ.get("THREADED"):
    threaded()
workers._warm_up = lambda: None
workers.serve({"session": session, "vfl": vfl}, [preload], int(sys.argv[1]))
"""


def written_to(folder):
    """A label party's folder whose path is longer than a socket's may be."""
    project = folder / ("a long name " * 10)
    (project / "app").mkdir(parents=True)
    (project / "app" / "experiment.toml").touch()
    return project


@pytest.fixture
def folder(tmp_path):
    return written_to(tmp_path)


@pytest.fixture(autouse=True)
def child_processes(monkeypatch):
    """vfl starts its workers with one thread; with a second thread no worker stands.

    A command in another folder must import the same vfl as its worker, which refuses any other; a
    relative path in PYTHONPATH would lead it to another one.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(workers.__file__).parents[2]))


@pytest.fixture
def standing(folder, monkeypatch):
    monkeypatch.setattr(workers, "_RESTART_S", 0.0)
    api = folder / "flower" / "local"
    kept = workers.StandingWorker(api, "session", [sys.executable, "-c", PROGRAMS])
    with closing(kept):
        yield kept


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder of a worker that stands for many requests, after each of which it goes on."""
    folder = written_to(tmp_path_factory.mktemp("shared"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        api = folder / "flower" / "local"
        kept = workers.StandingWorker(api, "session", [sys.executable, "-c", PROGRAMS])
    with closing(kept):
        yield folder


def eventually(is_so, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


HANDING = """
import sys
from pathlib import Path
from vfl.federation import workers
print("handed", flush=True)
code = workers.hand_over(Path(sys.argv[1]), sys.argv[2:])
print("code", code)
"""


def handing(folder, *arguments, **options):
    """A command that lets the worker run it, in a process of its own."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", HANDING, str(folder), *arguments]
    return subprocess.Popen(command, text=True, **pipes, **options)


def test_a_program_is_a_fork_of_the_worker(standing, tmp_path, capfd):
    for name in ("one", "two"):
        standing.popen(["session", str(tmp_path / name)])
    parents = {
        int(eventually((tmp_path / name).exists) and (tmp_path / name).read_text())
        for name in ("one", "two")
    }
    assert parents == {standing.pid}
    assert len([line for line in capfd.readouterr().out.splitlines() if "session" in line]) == 2


def test_a_command_runs_in_the_worker_as_in_its_own_process(standing, folder, tmp_path):
    environment = {**os.environ, "TOLD": "by the caller"}
    said = []
    standing.popen(["session", str(tmp_path / "ready")])  # it takes a while to stand
    eventually((tmp_path / "ready").exists, 240)
    for _ in range(2):
        for _ in range(3):  # on a busy machine, the worker may answer later than `hand_over` waits
            process = handing(folder, "tell", "7", cwd=tmp_path, env=environment, umask=0o027)
            out, err = process.communicate("typed\n", timeout=240)
            if "code None" not in out:
                break
        assert err.strip() == "aside", out
        said.append(out.splitlines()[1])
        assert out.splitlines()[2:] == ["code 7"]
        assert said[-1].startswith(f"{tmp_path} by the caller typed 0o27 True 0.")
    assert said[0] != said[1]  # no two children draw the same


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, None)])
def test_signals_reach_the_command(standing, folder, number, code):
    # A shell that runs tests in the background has them ignore the interrupt.
    ends = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(143));"
        "signal.signal(2, signal.default_int_handler);"
    )
    command = [sys.executable, "-c", ends + HANDING, str(folder), "wait", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert [process.stdout.readline() for _ in range(2)] == ["handed\n", "waiting\n"]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if code is None:  # the child of these programs has no handler, and dies of it
        assert process.returncode == 1
        assert "process that ran this command has died" in err
    else:
        assert out == f"code {code}\n"


def test_a_command_ends_with_whoever_asked_for_it(standing, folder):
    process = handing(folder, "wait", "0")
    assert [process.stdout.readline() for _ in range(2)] == ["handed\n", "waiting\n"]
    assert len(children(standing.pid)) == 1
    process.kill()
    process.communicate()
    eventually(lambda: not children(standing.pid))


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_a_command_whose_process_dies_is_a_lost_peer(standing, folder):
    with pytest.raises(LostPeerError, match="process that ran this command has died"):
        workers.hand_over(folder, ["die"])


@pytest.mark.parametrize("below", ["", "store/runs/one", "app"])
def test_the_worker_is_found_from_a_project_and_from_a_run(shared, below, capfd):
    (shared / below).mkdir(parents=True, exist_ok=True)
    assert workers.hand_over(shared / below, ["end", "3"]) == 3


def test_without_a_worker_a_command_runs_itself(folder, tmp_path):
    assert workers.hand_over(tmp_path, []) is None
    assert workers.hand_over(folder, []) is None
    (folder / "flower" / "local").mkdir(parents=True)
    assert workers.hand_over(folder, []) is None


@pytest.mark.parametrize("changed", ["version", "forked", "user"])
def test_a_worker_of_another_vfl_or_user_is_not_asked(shared, monkeypatch, changed):
    if changed == "version":
        monkeypatch.setattr(workers, "VERSION", "0.0.0")
    elif changed == "forked":
        monkeypatch.setattr(workers, "_forked", True)
    else:
        monkeypatch.setattr(workers.os, "getuid", lambda: 12345)
    assert workers.hand_over(shared, ["end", "3"]) is None


def test_only_the_owner_reaches_the_socket(shared):
    api = shared / "flower" / "local"
    assert api.stat().st_mode & 0o777 == 0o700
    assert (api / "worker").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x01", b"\x05\0\0\0{", b"\xff\xff\xff\xff{}", b"\x02\0\0\0{}", b"\x02\0\0\0\xff\xff"],
)
def test_a_damaged_request_ends_one_child_and_no_more(shared, sent):
    with connected_to(shared / "flower" / "local", "worker", 30.0) as connection:
        connection.sendall(sent)
        connection.shutdown(1)
        with contextlib.suppress(ConnectionResetError):  # what was sent is not read to its end
            assert connection.recv(9) == b""
    assert workers.hand_over(shared, ["end", "4"]) == 4


def test_a_worker_that_is_killed_is_started_again(standing, folder, capfd):
    assert workers.hand_over(folder, ["end", "1"]) == 1
    old = standing.pid
    os.kill(old, signal.SIGKILL)
    eventually(lambda: standing.supervise() or standing.pid != old)
    assert "the standing worker ended (exit -9); starting it again" in capfd.readouterr().out
    assert workers.hand_over(folder, ["end", "2"]) == 2


def test_a_worker_with_two_threads_does_not_stand(folder, monkeypatch, tmp_path, capfd):
    """A fork could find a lock that nobody releases."""
    monkeypatch.setattr(workers, "_RESTART_S", 0.0)
    monkeypatch.setenv("THREADED", "1")
    command = [sys.executable, "-c", PROGRAMS]
    with closing(workers.StandingWorker(folder / "flower" / "local", "touch", command)) as standing:
        eventually(lambda: standing.supervise() or standing.pid is None)
        assert "no worker can run here: it would have 2 threads" in capfd.readouterr().out
        assert workers.hand_over(folder, ["end", "3"]) is None
        standing.popen(["touch", str(tmp_path / "made")])
        eventually((tmp_path / "made").exists)


def test_a_worker_ends_with_the_process_that_keeps_it(standing):
    pid = standing.pid
    os.close(standing._lifeline)
    standing._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == 0


SHARING = """
import os, sys
from vfl.federation import workers
command = [sys.executable, "-c", sys.argv[1]]
code = workers.run_among_parties(command, os.environ, sys.argv[2:])
print("code", code, workers.SHARED_VARIABLE in os.environ)
"""


def sharing(*arguments, **options):
    """A command that starts parties, run in a worker that their sessions share."""
    command = [sys.executable, "-c", SHARING, PROGRAMS, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, **options
    )


def test_parties_of_one_command_share_its_worker(tmp_path):
    done = sharing("parties", "2", str(tmp_path / "one"))
    words = [line.split() for line in done.stdout.splitlines() if not line.startswith("session")]
    (_, worker, ended), (_, code, left) = words  # and not a word of the worker's own
    assert (ended, code, left) == ("5", "2", "False")
    assert eventually((tmp_path / "one").exists)
    assert (tmp_path / "one").read_text() == worker
    assert not os.path.exists(f"/proc/{worker}")


def test_where_none_can_be_shared_the_command_runs_itself():
    done = sharing("end", "3", env={**os.environ, "THREADED": "1"})
    assert done.stdout == "code None False\n"


def test_a_process_frees_at_its_end_what_triton_would_report_as_leaks(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", sys)
    gc.freeze()
    workers._thaw()
    frozen = gc.get_freeze_count()
    gc.freeze()  # as the other tests had it
    assert frozen == 0
