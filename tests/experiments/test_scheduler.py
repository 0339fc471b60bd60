"""Cells are trained once, gone on with, and do not stop each other."""

import os

import pytest

from vfl.config import with_overrides
from vfl.core.errors import RunFolderError
from vfl.core.storage import locked, read_json
from vfl.experiments import is_done, staleness, training
from vfl.experiments.cells import Cell
from vfl.experiments.scheduler import RemainingTime, run_cells
from vfl.training.run import train as train_once


class Killed(BaseException):
    """Stands for a process that ends between two frames."""


def kill_after(frames):
    left = iter(range(frames))

    def observer(party, direction, frame):
        if next(left, None) is None:
            raise Killed

    return observer


def digests(folder):
    cells = folder.cells()
    return [
        read_json(folder.cells_path / cell.name / "summary.json")["weights_sha256"]
        for cell in cells
    ]


def test_what_is_done_is_not_trained_again(trained, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    assert run_cells(trained, trained.cells()) == []


def test_what_was_begun_goes_on_to_the_same_weights(trained, written, tiny, tmp_path, monkeypatch):
    folder, cells = written(tmp_path / "grid", tiny())

    def killed(*arguments, **options):
        return train_once(*arguments, **options, observers=[kill_after(25)])

    monkeypatch.setattr(training, "train", killed)
    with pytest.raises(Killed):
        run_cells(folder, cells)
    begun = folder.cells_path / cells[0].name
    assert not is_done(begun)
    assert list(begun.rglob("checkpoints/*.checkpoint"))

    resumed = []

    def noted(*arguments, resume, **options):
        resumed.append(resume)
        return train_once(*arguments, resume=resume, **options)

    monkeypatch.setattr(training, "train", noted)
    assert run_cells(folder, cells) == []
    assert resumed == [True, False, False, False]
    assert digests(folder) == digests(trained)


def test_a_cell_that_fails_stops_no_other(written, tiny, tmp_path):
    variants = {"wild": ["train.optimizer=sgd", "train.learning_rate=1e6"], "plain": []}
    folder, cells = written(tmp_path / "grid", tiny(variants=variants, seeds=[0]))
    told = []
    failed = run_cells(folder, cells, on_end=told.append)
    assert [ended.cell.about["variant"] for ended in failed] == ["wild", "wild"]
    assert {ended.failure["code"] for ended in failed} == {"V005"}
    assert [(ended.done, ended.total) for ended in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[-1].left_s == 0
    assert [is_done(folder.cells_path / cell.name) for cell in cells] == [False, False, True, True]
    again = run_cells(folder, cells)
    assert [ended.cell.name for ended in again] == [ended.cell.name for ended in failed]


def test_without_test_rows_nothing_is_trained(written, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    plain = with_overrides(tiny(seeds=[0]), ["data.test=0"])
    failed = run_cells(*written(tmp_path / "grid", plain))
    assert [ended.failure["where"] for ended in failed] == ["data.test"] * 2


def test_a_bug_is_a_failure_without_its_text(written, tiny, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise KeyError("the cell of a table")

    monkeypatch.setattr(training, "train", broken)
    folder, cells = written(tmp_path / "grid", tiny(seeds=[0]))
    failed = run_cells(folder, cells)
    where = f"{__file__}:{broken.__code__.co_firstlineno + 1} in broken"
    assert [ended.failure for ended in failed] == 2 * [
        {"what": "a plug-in stopped: KeyError", "where": where, "exit": 1}
    ]


def test_only_one_process_trains_a_folder(trained):
    with (
        locked(trained.path),
        pytest.raises(RunFolderError, match="another process trains") as refusal,
    ):
        run_cells(trained, trained.cells())
    assert refusal.value.got == f"process {os.getpid()}"


def test_other_rows_or_other_code_are_trained_anew(written, tiny, tmp_path, monkeypatch):
    folder, cells = written(tmp_path / "grid", tiny(seeds=[0]))
    path = folder.cells_path / cells[0].name
    assert run_cells(folder, cells) == []
    first = (path / "summary.json").stat().st_mtime_ns

    def trained_anew():
        assert run_cells(folder, cells) == []
        return (path / "summary.json").stat().st_mtime_ns != first

    assert not trained_anew()
    with monkeypatch.context() as changed:
        changed.setattr(staleness, "plug_ins_of", lambda *made_of: "another")
        assert trained_anew()
    first = (path / "summary.json").stat().st_mtime_ns
    with monkeypatch.context() as changed:
        changed.setattr(staleness, "data_digest", lambda data: "another")
        assert trained_anew()
    first = (path / "summary.json").stat().st_mtime_ns
    (folder.path / "made_of" / f"{cells[0].name}.json").unlink()  # a folder of an older version
    assert trained_anew()


def cell(defense, seed, tiny):
    title = f"{defense} {seed}"
    return Cell(tiny(), title, {"defense": defense, "seed": str(seed)}, victim=title)


def test_what_was_tried_under_another_seed_counts_for_itself(tiny):
    earlier = cell("baselines", 2, tiny)
    ended = {("baselines", 0): 100.0, ("none", 0): 4.0, ("none", 1): 6.0}
    ahead = [cell("none", 2, tiny), cell("baselines", 1, tiny)]
    remaining = RemainingTime([earlier, *(cell(*one, tiny) for one in ended), *ahead], jobs=1)
    remaining.add(earlier)
    for one, seconds in ended.items():
        remaining.add(cell(*one, tiny), seconds)
    assert remaining.left_s() == 105.0


def test_the_time_of_a_kind_of_training_counts_for_its_other_seeds(tiny):
    times = {"split": 100.0, "gradient boosting": 2.0}
    cells = {
        (what, seed): Cell(tiny(), f"{what} {seed}", {"what": what, "repeat": seed}, victim=what)
        for seed in ("0", "1")
        for what in times
    }
    remaining = RemainingTime(cells.values(), jobs=1)
    for what, seconds in times.items():
        remaining.add(cells[what, "0"], seconds)
    remaining.add(cells["split", "1"], 100.0)
    assert remaining.left_s() == times["gradient boosting"]
