"""Files of a trace: readable by numpy alone, and refused when they are not as they were written."""

import hashlib
import io
import random
import shutil

import numpy as np
import pytest
from sealed import reseal_json

from vfl.core.errors import OversizedFrameError, RunFolderError
from vfl.core.frame import Frame, Kind
from vfl.session.trace import Trace
from vfl.session.trace.store import Store


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, training_in):
    """One training, which nobody changes."""
    made = training_in(tmp_path_factory.mktemp("recorded") / "run")
    made.session(train={"epochs": 1, "batch_size": 40, "checkpoint_every": 5}).run()
    return made


@pytest.fixture
def training(recorded, training_in, tmp_path):
    """A copy of it."""
    copied = training_in(tmp_path / "run")
    shutil.copytree(recorded.folder, copied.folder)
    copied.heard = recorded.heard
    return copied


@pytest.fixture
def folder(training):
    return training.path("lender")


def look_at_everything(training):
    own = training.read("lender")
    return sum(1 for _ in own.frames()), sum(1 for _ in own.snapshots())


def test_numpy_alone_reads_it(training, folder):
    with np.load(folder / "frames-000001.npz", allow_pickle=False) as file:
        columns = dict(file)
    payload = np.load(folder / "payload-000001.npy", allow_pickle=False, mmap_mode="r")
    assert all(column.dtype != object for column in columns.values())
    starts = [0, *columns["frame_end"][:-1]]
    heard = training.heard[: len(columns["frame_end"])]
    assert {one[3] for one in heard} == set(range(5))
    for index, (party, direction, kind, step, sent) in enumerate(heard):
        exchange = columns["frame_exchange"][index]
        assert columns["parties"][columns["frame_party"][index]] == party
        assert columns["frame_up"][index] == (direction == "up")
        assert columns["frame_kind"][index] == kind
        assert columns["exchange_step"][exchange] == step
        assert payload[starts[index] : columns["frame_end"][index]].tobytes() == sent


def test_a_changed_byte_is_found(training, folder):
    draw = random.Random(0)
    files = sorted(path for path in folder.iterdir() if "json" not in path.suffix)
    assert len(files) == 6  # frames of two files: before the checkpoint and after; two snapshots
    for path in files:
        whole = path.read_bytes()
        for _ in range(20):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(RunFolderError, match=r"not as it was written|is missing"):
                look_at_everything(training)
        path.write_bytes(whole)
    assert look_at_everything(training)


def test_a_shortened_or_missing_file_is_found(training, folder):
    for path in folder.iterdir():
        whole = path.read_bytes()
        if path.name != "index.jsonl":  # whose last line may be torn
            path.write_bytes(whole[:-1])
            with pytest.raises(RunFolderError):
                look_at_everything(training)
        path.unlink()
        with pytest.raises(RunFolderError):
            look_at_everything(training)
        path.write_bytes(whole)
    assert look_at_everything(training)


def replace(folder, name, content):
    """Another file in the place of one of the trace, as somebody would who knows the index."""
    (folder / name).write_bytes(content)
    store = Store(folder)
    owner = store.about().owner
    lines = []
    for entry in store.entries():
        if name in entry.files:
            digests = entry.files | {name: hashlib.sha256(content).hexdigest()}
            entry = entry.model_copy(update={"files": digests})
        lines.append(entry.line(owner))
    (folder / "index.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("name", ["frames-000001.npz", "payload-000001.npy"])
def test_objects_are_never_unpickled(training, folder, name):
    content = io.BytesIO()
    pickled = np.array([{}], dtype=object)
    np.savez(content, rows=pickled) if name.endswith("npz") else np.save(content, pickled)
    replace(folder, name, content.getvalue())
    with pytest.raises(RunFolderError, match="has no frames"):
        next(training.read("lender").frames())


@pytest.mark.parametrize("content", [b"", b"no frames", b"PK\x03\x04"])
def test_other_files_are_refused(training, folder, content):
    for name in ("frames-000001.npz", "payload-000001.npy"):
        whole = (folder / name).read_bytes()
        replace(folder, name, content)
        with pytest.raises(RunFolderError, match="has no frames"):
            next(training.read("lender").frames())
        replace(folder, name, whole)


@pytest.mark.parametrize(
    "line",
    ["{", '{"files": {"../weights.safetensors": 1}, "step": 0}', '{"files": {}}', "[]", "\xff"],
)
def test_an_index_that_is_none(training, folder, line):
    (folder / "index.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(RunFolderError, match="not as it was written"):
        look_at_everything(training)


def test_a_torn_last_line_of_the_index_leaves_its_files_out(training, folder):
    index = folder / "index.jsonl"
    frames, snapshots = look_at_everything(training)
    index.write_text(index.read_text() + '{"files": {"frames-')
    assert look_at_everything(training) == (frames, snapshots)


@pytest.mark.parametrize("change", ["seed", "codec", "party", "format"])
def test_what_it_says_of_itself_is_checked(training, folder, change):
    """Even by somebody who seals it anew."""
    path = folder / "trace.json"
    whole = path.read_text()

    def forge(record):
        if change == "seed":
            record["about"]["terms"]["seed"] += 1
        elif change == "codec":
            record["about"]["terms"]["codec"] = "none"
        elif change == "party":
            del record["about"]["party"]
        else:
            record["format"] = 9

    reseal_json(path, forge)
    expected = "another format" if change == "format" else "not as it was written"
    with pytest.raises(RunFolderError, match=expected):
        training.read("lender")
    path.write_text(whole.replace('"seed"', '"seel"'))
    with pytest.raises(RunFolderError, match="not as it was written"):
        training.read("lender")


def test_the_index_of_another_party_is_refused(training, folder):
    other = next(path for path in folder.parent.parent.parent.rglob("trace") if path != folder)
    (folder / "index.jsonl").write_text((other / "index.jsonl").read_text())
    with pytest.raises(RunFolderError, match="not as it was written"):
        look_at_everything(training)


TRAFFIC = [
    ("bank", "up", Frame(Kind.CUT, 0, bytearray(b"first"))),
    ("shop", "up", Frame(Kind.CUT, 0, b"")),
    ("bank", "down", Frame(Kind.GRAD, 0, memoryview(b"grad"))),
    ("bank", "up", Frame(Kind.QUERY, 1, bytes(range(256)))),
    ("bank", "down", Frame(Kind.ACK, 1)),
]


def traced(**settings):
    trace = Trace(**settings)
    for party, direction, frame in TRAFFIC:
        trace(party, direction, frame)
    return trace


def test_a_buffer_that_is_used_again_does_not_change_the_trace():
    buffer = bytearray(b"first")
    trace = Trace()
    trace("bank", "up", Frame(Kind.CUT, 0, buffer))
    buffer[:] = b"other"
    assert next(iter(trace)).payload == b"first"


def test_a_full_trace_refuses_more():
    assert len(traced(limit_bytes=265)) == 4
    with pytest.raises(OversizedFrameError, match="full") as caught:
        traced(limit_bytes=264)
    assert caught.value.got == "more than 264 bytes"
