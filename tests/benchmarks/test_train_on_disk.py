import pytest

from benchmarks import train_on_disk
from benchmarks.train_on_disk import TrainingJob, measure


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(train_on_disk, "TEST_ROWS", 2000)


def test_a_table_on_disk_is_trained_on_and_judged(small, tmp_path):
    path = tmp_path / "table.parquet"
    best = train_on_disk.write_table(path, 12_000)
    row = measure(TrainingJob(table=str(path), rows=12_000, memory="64MiB", batch_size=64))
    assert row.train_rows == 10_000
    assert 0.6 < row.auc < best < 0.95
