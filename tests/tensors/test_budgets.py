"""The store of a worker's budgets: a leader with a store of its own notices one that went back."""

import shutil
from contextlib import contextmanager
from threading import Thread

import pytest
import torch

from vfl import tensors
from vfl.core.errors import ConsentError, RolledBackError
from vfl.tensors.budgets import BudgetLedger


@contextmanager
def led(folder, keeps=True, restored=False):
    """A pool with one worker, a thread, that keeps its budgets or does not; the pool."""
    ledger = BudgetLedger(folder / "worker", "alice") if keeps else None
    if restored:
        ledger.restored()
    with tensors.Pool("alice", tls=False, store=folder / "leader") as pool:
        worker = tensors.Worker("alice", None, ledger)
        thread = Thread(target=tensors.serve, args=(worker, pool.tickets["alice"]))
        thread.start()
        yield pool
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def copied(tmp_path):
    """A copy of a worker's store is put back after a session that came later."""
    with led(tmp_path) as pool:
        pool.wait()
        shutil.copytree(tmp_path / "worker", tmp_path / "copy")  # while it is at work
    shutil.rmtree(tmp_path / "worker")
    shutil.copytree(tmp_path / "copy", tmp_path / "worker")
    return tmp_path


def test_a_store_that_was_put_back_is_noticed_as_often_as_it_comes(copied):
    for _ in range(3):
        with led(copied) as pool, pytest.raises(RolledBackError, match="restored") as refused:
            pool.wait()
    assert "vfl worker TICKET --store FOLDER --restored" in refused.value.fix


def test_a_worker_that_comes_without_its_store_is_noticed(copied):
    with led(copied, keeps=False) as pool, pytest.raises(RolledBackError, match="restored"):
        pool.wait()


def test_a_store_that_is_lost_is_let_in_and_grants_nothing(copied):
    with led(copied, restored=True) as pool:
        (alice,) = pool.wait()
        assert tensors.send(torch.ones(2), alice).get().sum() == 2
    worker = tensors.Worker("alice", None, BudgetLedger(copied / "worker", "alice"))
    worker.load(torch.ones(3, 1), tag="rows")
    with pytest.raises(ConsentError, match="no longer known"):
        worker.grant("rows", epsilon=1.0)
