"""A disk that is full, really: a file system of a few pages under the runs of one party."""

import subprocess

import pytest
from real_deployment import finish

pytestmark = pytest.mark.net

#: Room for two checkpoints of that party, not for three.
TOO_SMALL = {"right": "size=280k", "label": "size=200k"}
FULL = "No space left on device"


def mount(folder, *options):
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder], capture_output=True
    ).returncode


@pytest.fixture
def small_disk(request, commands):
    """A small file system below one party's store; `grow` gives it room."""
    folder = commands.folder / request.param / "store" / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    if mount(folder, TOO_SMALL[request.param]) != 0:
        pytest.skip("only root may mount a file system")
    yield lambda: mount(folder, "remount", "size=16m")
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("small_disk", ["right"], indirect=True)
def test_a_feature_partys_disk_is_full(small_disk, commands, undisturbed, measured):
    training = commands.train()
    assert training.wait() == 3
    words = training.last_words()
    assert "error[V406]: party 'right' stopped with V008" in words
    assert FULL in words
    assert str(commands.folder / "right") not in words
    right, left = (commands.nodes[name] for name in ("right", "left"))
    right.wait_for("error[V008]: a file cannot be written")
    assert str(commands.folder / "right" / "store" / "runs") in right.last_words()
    assert FULL in right.last_words()
    left.wait_for("error[V406]: the label party stopped with V406")
    assert FULL in left.last_words()
    assert str(commands.folder) not in left.last_words()
    small_disk()
    resume(commands, training, undisturbed, measured)


@pytest.mark.parametrize("small_disk", ["label"], indirect=True)
def test_the_label_partys_disk_is_full(small_disk, commands, undisturbed, measured):
    training = commands.train()
    assert training.wait() in (2, 3)  # whether the disk still took failure.json
    assert "error[V008]: a file cannot be written" in training.last_words()
    assert FULL in training.last_words()
    for node in commands.nodes.values():
        node.wait_for("V008: party 'label' cannot write its own files")
        assert FULL in node.last_words()
        assert str(commands.folder) not in node.last_words()
    small_disk()
    resume(commands, training, undisturbed, measured)


def resume(commands, training, undisturbed, measured):
    measured()
    resumed = commands.train(resume=training)
    resumed.wait_for("epoch ")
    measured("there was room again and the run was resumed; the next epoch ended after")
    assert finish(commands, resumed) == undisturbed
