"""A training that is interrupted and resumed ends where the undisturbed one ends, bit for bit."""

import io
from dataclasses import replace

import pytest
import torch
from killing import Killed, Killer

from vfl.config import Experiment
from vfl.core.errors import CheckpointError, RunFolderError
from vfl.core.storage import Seal, read_lines, write_sealed
from vfl.datasets import Dealing, load_bundled
from vfl.session import Checkpoints
from vfl.training.local import LocalSession
from vfl.training.run import train

RUN = Experiment.model_validate({"parties": {"left": {}}}).name


def experiment(**changes):
    content = {
        "codec": "randtopk:k=3,alpha=0.2,values=8",
        "parties": {
            name: {"width": 8, "bottom": "mlp:hidden=16,dropout=0.3,batch_norm=true"}
            for name in ("left", "right")
        },
        "train": {"epochs": 4, "batch_size": 50, "checkpoint_every": 5},
    }
    return Experiment.model_validate(content | changes)


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=400))


def session(data, folder=None, observers=(), settings=None, say=None):
    return LocalSession(
        settings or experiment(),
        data,
        outputs=10,
        checkpoints=folder,
        observers=observers,
        say=lambda line: None if say is None else say.append(line),
    )


def without_times(history):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


@pytest.fixture(scope="module")
def undisturbed(data):
    return session(data).run()


@pytest.mark.parametrize("kills", [[3], [7, 12, 13, 21, 22]])
def test_resuming_changes_nothing(data, undisturbed, tmp_path, kills):
    for step in kills:
        with pytest.raises(Killed):
            session(data, tmp_path, [Killer(step)]).run()
    resumed = session(data, tmp_path).run()
    assert resumed.weights_digest() == undisturbed.weights_digest()
    assert without_times(resumed.label.history) == without_times(undisturbed.label.history)
    ours, theirs = resumed.ledger, undisturbed.ledger
    assert ours.bytes_by_party("up") == theirs.bytes_by_party("up")
    assert ours.bytes_by_party("down") == theirs.bytes_by_party("down")
    assert resumed.label.progress.train_steps == undisturbed.label.progress.train_steps


@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_calibration_is_fitted_to_the_same_rows(data, tmp_path, keep):
    """The best epoch may have ended before the interruption."""
    train = {"epochs": 4, "batch_size": 50, "checkpoint_every": 5, "keep": keep}
    settings = experiment(label={"calibration": "isotonic"}, train=train | {"learning_rate": 0.05})
    whole = session(data, settings=settings).run()
    for step in (13, 22):
        with pytest.raises(Killed):
            session(data, tmp_path, [Killer(step)], settings).run()
    resumed = session(data, tmp_path, settings=settings).run()
    assert resumed.weights_digest() == whole.weights_digest()
    assert without_times(resumed.label.history) == without_times(whole.label.history)
    knots = whole.weights()["label"]["task.calibration.curves.3.knots"]
    assert len(knots) > 2


def test_a_weighted_regression_goes_on_too(data, tmp_path):
    """What the label party learned of its labels' scale, and its meters, come back with it."""
    label = replace(
        data["label"],
        labels=data["label"].labels.float() * 1000,
        classes=None,
        row_weights=torch.arange(400) % 5 + 1.0,
    )
    numbers = data | {"label": label}
    settings = experiment(label={"task": "regression"})
    whole = LocalSession(settings, numbers, outputs=1).run()
    for step in (13, 22):
        with pytest.raises(Killed):
            LocalSession(
                settings, numbers, outputs=1, checkpoints=tmp_path, observers=[Killer(step)]
            ).run()
    resumed = LocalSession(settings, numbers, outputs=1, checkpoints=tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()
    assert without_times(resumed.label.history) == without_times(whole.label.history)


def test_an_evaluation_in_parts_goes_on_with_what_it_kept(tmp_path):
    """1204 validation rows come in two exchanges; the checkpoint falls between them."""
    rows = load_bundled("digits", ["left", "right"], "label", Dealing(0, validation=0.67, test=0.1))
    train_steps = -(-len(rows["label"].split.train) // 50)
    between = train_steps + 1
    settings = experiment(train={"epochs": 2, "batch_size": 50, "checkpoint_every": between})
    whole = session(rows, settings=settings).run()
    with pytest.raises(Killed):
        session(rows, tmp_path, [Killer(between + 1)], settings).run()
    own = tmp_path / "label" / "checkpoints"
    kept = Checkpoints(own, "label", whole.terms.run, whole.terms.digest())
    assert kept.committed() == between
    assert len(kept.load(between)["progress"]["meters"]["validation"]["evidence"]) == 1
    resumed = session(rows, tmp_path, settings=settings).run()
    assert without_times(resumed.label.history) == without_times(whole.label.history)


def test_it_goes_on_from_the_last_committed_step_and_not_from_the_start(data, tmp_path):
    with pytest.raises(Killed):
        session(data, tmp_path, [Killer(13)]).run()
    seen = []
    session(data, tmp_path, [lambda party, direction, frame: seen.append(frame.step)]).run()
    assert min(seen) == 10


def test_a_checkpoint_only_some_parties_have_is_not_committed(data, tmp_path):
    """The kill falls between the parties' saving before exchange 5 and the arrival of its cuts."""
    with pytest.raises(Killed):
        session(data, tmp_path, [Killer(4)]).run()
    assert Checkpoints(tmp_path / "label" / "checkpoints", "label", RUN, "").committed() == 0


def test_a_run_goes_on_in_its_folder(tmp_path):
    settings = Experiment.model_validate(
        {
            "parties": {"left": {"width": 8}, "right": {"width": 8}},
            "data": {"rows": 300},
            "train": {"epochs": 6, "batch_size": 30, "checkpoint_every": 10},
        }
    )
    whole = train(settings, tmp_path, "whole")
    with pytest.raises(Killed):
        train(settings, tmp_path, "cut", observers=[Killer(33)])
    told = []
    resumed = train(settings, tmp_path, "cut", resume=True, on_epoch=told.append)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["bytes_up"] == whole["bytes_up"]
    records = [list(read_lines(tmp_path / run / "metrics.jsonl")) for run in ("cut", "whole")]
    assert without_times(records[0]) == without_times(records[1])
    assert [record["epoch"] for record in told] == [4, 5, 6]
    assert not (tmp_path / "cut" / "failure.json").exists()
    with pytest.raises(RunFolderError, match="has ended"):
        train(settings, tmp_path, "cut", resume=True)


def test_other_settings_do_not_resume_it(data, tmp_path):
    with pytest.raises(Killed):
        session(data, tmp_path, [Killer(13)]).run()
    other = experiment(codec="none")
    with pytest.raises(RunFolderError, match="a session with other terms"):
        session(data, tmp_path, settings=other).run()


def test_only_the_last_checkpoints_are_kept(tmp_path):
    kept = Checkpoints(tmp_path, "bank", "loans", "t" * 64)
    for step in range(10, 60, 10):
        kept.save(step, {"weights": torch.arange(step)})
    assert kept.steps() == [30, 40, 50]
    assert torch.equal(kept.load(40)["weights"], torch.arange(40))
    with pytest.raises(RunFolderError, match="checkpoint 10 of party 'bank' cannot be used"):
        kept.load(10)


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path):
    kept = Checkpoints(tmp_path, "bank", "loans", "t" * 64)
    for step in (10, 20):
        kept.save(step, {"weights": torch.ones(100)})
    path = tmp_path / "0000000020.checkpoint"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be used") as caught:
        kept.load(20)
    assert caught.value.got == "a file is not as it was written; undamaged checkpoints: 10"
    assert kept.intact() == [10]
    path.write_bytes((tmp_path / "0000000010.checkpoint").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        kept.load(20)
    assert "another kind, party or run" in caught.value.got
    content = io.BytesIO()
    torch.save({"vfl": "0.0.1", "terms": "t" * 64, "state": {}}, content)
    write_sealed(path, [content.getvalue()], Seal("checkpoint", "bank", "loans", 20))
    with pytest.raises(RunFolderError, match="another version of vfl") as caught:
        kept.load(20)
    assert caught.value.got == "vfl 0.0.1"


def checkpoints_of(folder):
    return {party: sorted((folder / party / "checkpoints").glob("*.checkpoint"))
            for party in ("left", "right", "label")}  # fmt: skip


def test_checkpoints_of_two_parties_are_not_exchanged(data, tmp_path):
    with pytest.raises(Killed):
        session(data, tmp_path, [Killer(13)]).run()
    found = checkpoints_of(tmp_path)
    for left, right in zip(found["left"], found["right"], strict=True):
        mine, theirs = left.read_bytes(), right.read_bytes()
        left.write_bytes(theirs)
        right.write_bytes(mine)
    kept = session(data, tmp_path).clients[0].checkpoints
    with pytest.raises(CheckpointError, match="cannot be used") as caught:
        kept.load(kept.steps()[-1])
    assert "another kind, party or run" in caught.value.got


@pytest.mark.parametrize("party", ["left", "label"])
def test_a_damaged_checkpoint_is_told_and_an_older_one_used(data, undisturbed, tmp_path, party):
    with pytest.raises(Killed):
        session(data, tmp_path, [Killer(13)]).run()
    newest = checkpoints_of(tmp_path)[party][-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    told, seen = [], []
    resumed = session(data, tmp_path, [lambda who, way, frame: seen.append(frame.step)], say=told)
    resumed.run()
    assert told == ["checkpoint 10 is damaged; the training goes on from 5"]
    assert min(seen) == 5
    assert resumed.weights_digest() == undisturbed.weights_digest()
