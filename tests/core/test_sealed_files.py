"""Stored files are what was written, whose they say, and for their owner alone."""

import json
import multiprocessing
import os
import random
import stat

import pytest
import torch

from vfl.config import Experiment
from vfl.config.party_file import PartyFile, tidy_store
from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError, VFLError
from vfl.core.storage import (
    Seal,
    append_line,
    load_weights,
    locked,
    private_folder,
    read_sealed,
    read_sealed_json,
    save_weights,
    sweep,
    write_bytes,
    write_json,
    write_pieces,
    write_sealed,
    write_sealed_json,
    write_text,
)
from vfl.session import Checkpoints, PartyFolder
from vfl.session.serving import own_rate
from vfl.session.store.session_ledger import SessionLedger
from vfl.session.terms import Terms
from vfl.session.trace import read
from vfl.training import run

SEAL = Seal("thing", "bank", "loans", 7)
STATE = {"weight": torch.arange(24.0).reshape(4, 6), "steps": torch.tensor(3)}

#: How each form is written and read.
FORMS = {
    "container": (
        lambda path: write_sealed(path, [b"payload " * 40], SEAL),
        lambda path, seal: read_sealed(path, seal),
    ),
    "JSON": (
        lambda path: write_sealed_json(path, {"classes": ["no", "yes"], "count": 3}, SEAL),
        lambda path, seal: read_sealed_json(path, seal),
    ),
    "safetensors": (
        lambda path: save_weights(path, STATE, SEAL),
        lambda path, seal: load_weights(path, seal),
    ),
}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def test_what_was_written_comes_back(form, path):
    write, read_it = form
    write(path)
    first = read_it(path, SEAL)
    again = read_it(path, Seal("thing", "bank", None, 7))
    assert str(first) == str(again)


def test_a_flip_of_any_bit_is_found(form, path):
    write, read_it = form
    write(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 32, 128):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            with pytest.raises(RunFolderError):
                read_it(path, SEAL)


def test_a_cut_at_any_length_is_found(form, path):
    write, read_it = form
    write(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(RunFolderError):
            read_it(path, SEAL)
    path.write_bytes(whole + b"\n")
    with pytest.raises(RunFolderError):
        read_it(path, SEAL)


@pytest.mark.parametrize(
    "other",
    [
        Seal("another thing", "bank", "loans", 7),
        Seal("thing", "shop", "loans", 7),
        Seal("thing", "bank", "cars", 7),
        Seal("thing", "bank", "loans", 8),
    ],
    ids=["kind", "party", "run", "step"],
)
def test_an_intact_file_of_something_else_is_refused(form, path, other):
    write, read_it = form
    write(path)
    with pytest.raises(RunFolderError, match="another kind, party or run") as caught:
        read_it(path, other)
    assert caught.value.got == "thing of party 'bank' in run 'loans', step 7"
    assert caught.value.want == str(other)


def test_a_file_that_cannot_be_read_is_a_typed_error(form, path):
    _, read_it = form
    path.mkdir()
    with pytest.raises(RunFolderError, match="cannot be read"):
        read_it(path, SEAL)


# --- a whole run --------------------------------------------------------------------------------

EXPERIMENT = {
    "data": {"source": "breast_cancer", "rows": 120},
    "parties": {name: {"width": 4, "bottom": "mlp:hidden=8"} for name in ("bank", "shop")},
    "label": {"party": "lender"},
    "train": {"epochs": 2, "batch_size": 20, "checkpoint_every": 3},
    "trace": {"phases": ["train"], "snapshots": 1},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run.train(Experiment.model_validate(EXPERIMENT), root, "one")
    return root / "one"


def checkpoints_of(folder, party="bank"):
    experiment = RunFolder.open(folder).experiment()
    terms = Terms.of(experiment, "train", experiment.name)
    own = folder / "parties" / party / "checkpoints"
    return Checkpoints(own, party, terms.run, terms.digest())


def stored_files(folder):
    own = folder / "parties" / "bank"
    files = [path for path in sorted(own.rglob("*")) if path.is_file() and path.name != ".lock"]
    kinds = {path.suffix for path in files}
    assert kinds == {".checkpoint", ".json", ".jsonl", ".npy", ".npz", ".safetensors", ".sealed"}
    return files


def test_weights_of_another_run_of_the_experiment_do_not_answer(trained, tmp_path):
    """All parties' parts exchanged: each is intact and fits, and the run's record knows better."""
    run.train(Experiment.model_validate(EXPERIMENT | {"seed": 1}), tmp_path, "two")
    two = tmp_path / "two"
    for part in (trained / "parties").iterdir():
        for file in ("weights.safetensors", "party.json"):
            (two / "parties" / part.name / file).write_bytes((part / file).read_bytes())
    for answer in (run.evaluate, run.predict):
        with pytest.raises(RunFolderError, match="weights"):
            answer(RunFolder.open(two))
    assert not (two / "evaluations/0001.json").exists()
    assert not (two / "predictions.csv").exists()


# --- one process, killed writes, modes ----------------------------------------------------------


def _hold(folder, ready, done):
    with locked(folder):
        ready.set()
        done.wait(60)


def test_a_second_process_is_refused_at_once_and_a_killed_one_lets_go(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(60)
    with (
        pytest.raises(RunFolderError, match="another process is using") as caught,
        locked(tmp_path),
    ):
        pass
    assert caught.value.got == f"process {process.pid}"
    with pytest.raises(RunFolderError, match="another process is using"):
        run.train(
            Experiment.model_validate(EXPERIMENT), tmp_path.parent, tmp_path.name, resume=True
        )
    with pytest.raises(RunFolderError), locked(tmp_path, patience_s=0.1):
        pass
    process.kill()
    with locked(tmp_path, patience_s=60):  # waits until it has ended
        pass
    process.join(60)


def test_what_a_killed_write_left_is_removed_at_the_next_start(tmp_path):
    write_text(tmp_path / "parties" / "bank" / "kept.json", "{}")
    left = tmp_path / "parties" / "bank" / ".weights.safetensors.ab12cd_e"
    left.write_bytes(b"half")
    others = [tmp_path / ".hidden", tmp_path / ".config.d"]
    for path in others:
        path.write_bytes(b"x")
    with locked(tmp_path):
        assert not left.exists()
    assert all(path.exists() for path in others)
    assert (tmp_path / "parties" / "bank" / "kept.json").exists()


def left_aside(*folders):
    """What a killed write of a file `one.json` leaves in each folder."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".one.json.ab12cd_e").write_bytes(b"half")
    return [folder / ".one.json.ab12cd_e" for folder in folders]


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_sweep_leaves_what_is_being_written_and_what_is_no_writes(tmp_path):
    def pieces():
        (aside,) = tmp_path.glob(".kept.*")
        yield b"first"
        sweep(tmp_path)
        assert aside.exists()
        yield b", second"

    others = [tmp_path / ".hidden", tmp_path / ".config.d", tmp_path / "x.json.ab12cd_e"]
    for path in others:
        path.write_bytes(b"x")
    (tmp_path / ".dir.json.ab12cd_e").mkdir()
    write_pieces(tmp_path / "kept", pieces())
    assert (tmp_path / "kept").read_bytes() == b"first, second"
    assert all(path.exists() for path in [*others, tmp_path / ".dir.json.ab12cd_e"])
    (left,) = left_aside(tmp_path)
    sweep(tmp_path, {"two.json"})
    assert left.exists()
    sweep(tmp_path, {"one.json"})
    assert not left.exists()
    sweep(tmp_path / "absent")


def test_the_ledger_of_sessions_sweeps_and_closes_what_is_open(tmp_path):
    store = tmp_path / "store"
    (left,) = left_aside(store / "sessions")
    for folder in (store, store / "sessions"):
        folder.chmod(0o755)
    (store / "secret").write_bytes(bytes(32))
    terms = Terms.of(Experiment.model_validate(EXPERIMENT), "train", "two")
    SessionLedger(store / "sessions", "bank").begin(terms)
    assert not left.exists()
    assert (mode_of(store), mode_of(store / "sessions")) == (0o700, 0o700)


def test_a_store_that_holds_other_things_stays_as_the_user_made_it(tmp_path):
    store = tmp_path / "shared"
    left = left_aside(store / "sessions", store / "flower" / "local", store / "theirs", store)
    (store / "sessions").chmod(0o755)
    store.chmod(0o755)
    tidy_store(store)
    assert mode_of(store) == 0o755
    assert mode_of(store / "theirs") != 0o700
    assert mode_of(store / "sessions") == 0o700
    assert [path.exists() for path in left] == [False, False, True, True]


def test_a_store_is_closed_although_a_service_counted_rows_in_it(tmp_path):
    store = tmp_path / "store"
    store.mkdir(mode=0o755)
    data = {"source": "bank.csv", "id": "id"}
    party = PartyFile.model_validate({"party": "bank", "data": data, "store": str(store)})
    rate = own_rate(party)
    assert rate.take(1)
    rate.close()
    store.chmod(0o755)
    tidy_store(store)
    assert mode_of(store) == 0o700


WRITERS = {
    "bytes": lambda path: write_bytes(path, b"x"),
    "pieces": lambda path: write_pieces(path, [b"x", b"y"]),
    "text": lambda path: write_text(path, "x"),
    "JSON": lambda path: write_json(path, {}),
    "line": lambda path: (private_folder(path.parent), append_line(path, {})),
    "sealed": lambda path: write_sealed(path, [b"x"], SEAL),
    "sealed JSON": lambda path: write_sealed_json(path, {}, SEAL),
    "weights": lambda path: save_weights(path, STATE, SEAL),
    "secret": lambda path: SessionLedger(path.parent, "bank").begin(
        Terms.of(Experiment.model_validate(EXPERIMENT), "train", path.stem)
    ),
}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777], ids=oct)
@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_the_umask_files_are_for_their_owner(tmp_path, writer, umask):
    path = tmp_path / "deep" / "er" / "file.json"
    before = os.umask(umask)
    try:
        WRITERS[writer](path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_run_leaves_nothing_others_can_read(tmp_path):
    before = os.umask(0)
    try:
        run.train(Experiment.model_validate(EXPERIMENT), tmp_path / "runs", "one")
        run.predict(RunFolder.open(tmp_path / "runs" / "one"))
    finally:
        os.umask(before)
    for path in (tmp_path / "runs").rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# --- anything at all ----------------------------------------------------------------------------


def _mutated(content, draw):
    for _ in range(draw.choice((1, 1, 2, 5))):
        how, place = draw.randrange(6), draw.randrange(len(content) or 1)
        if how == 0 and content:
            content[min(place, len(content) - 1)] ^= 1 << draw.randrange(8)
        elif how == 1:
            del content[place : place + draw.randrange(1, 64)]
        elif how == 2:
            content[place:place] = draw.randbytes(draw.randrange(1, 64))
        elif how == 3:
            content[place : place + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, b"9" * 8))
        elif how == 4:
            content[place:place] = b"[" * draw.choice((10, 5000))
        else:
            content[:] = draw.randbytes(draw.randrange(0, 200))
    return bytes(content)


def own_files(party):
    return [
        party.weights(),
        party.encoder(),
        party.classes(),
        party.card(),
        party.drift(),
        party.rows(),
    ]


def readers_of(run_folder):
    """Everything a run left, its record and figures included, and what reads each of it."""
    own = run_folder / "parties" / "bank"
    party, kept = PartyFolder(own), checkpoints_of(run_folder)

    def record(path):
        opened = RunFolder.open(run_folder)
        return opened.experiment(), opened.about(), opened.summary()

    def trace(path):
        found = read(own / "trace")
        return list(found.decoded()), list(found.snapshots())

    readers = {run_folder / name: record for name in ("run.json", "summary.json", "config.toml")}
    for path in stored_files(run_folder):
        if path.parent.name == "trace":
            readers[path] = trace
        elif path.suffix == ".checkpoint":
            readers[path] = lambda path: [kept.load(step) for step in kept.steps()]
        elif path.parent == own:
            readers[path] = lambda path: own_files(party)
    return readers


def fuzz_a_run(run_folder, cases):
    """Damage what a run left in many ways; names of files that were then loaded silently."""
    draw, silent = random.Random(2), []
    readers = [(path, path.read_bytes(), it) for path, it in readers_of(run_folder).items()]
    for case in range(cases):
        path, whole, read_it = readers[case % len(readers)]
        content = _mutated(bytearray(whole), draw)
        path.write_bytes(content)
        try:
            read_it(path)
        except VFLError:
            continue
        finally:
            path.write_bytes(whole)
        # The last line of an index may be torn by a kill, so without its end it is left out.
        silent += [path.name] * (content != whole and path.name != "index.jsonl")
    return silent


def test_damaged_files_of_a_run_are_typed_errors(trained):
    assert fuzz_a_run(trained, 300) == []


def test_no_error_of_a_stored_file_holds_its_content(path):
    write_sealed_json(path, {"classes": ["a private class"]}, SEAL)
    content = path.read_text()
    for damaged in (content[:-3], content.replace("bank", "shop"), json.dumps(["private"])):
        path.write_text(damaged)
        with pytest.raises(VFLError) as caught:
            read_sealed_json(path, SEAL)
        assert "private" not in str(caught.value)
