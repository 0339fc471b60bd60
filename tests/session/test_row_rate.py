"""Rows a second that a party answers, whichever of its sessions asks."""

import multiprocessing
import os

import pytest

from vfl.core.errors import StorageError
from vfl.session.schedule import QUERY_ROWS
from vfl.session.serving import RowRate

BURST = 3 * QUERY_ROWS


def test_sessions_of_a_party_share_its_rate(tmp_path):
    now = [100.0]
    one, other = (RowRate(BURST, tmp_path / "rate", lambda: now[0]) for _ in range(2))
    assert [one.take(QUERY_ROWS), other.take(QUERY_ROWS), one.take(QUERY_ROWS)] == [True] * 3
    assert not other.take(1)
    now[0] += 0.5
    assert other.take(BURST // 2)
    assert not one.take(1)
    now[0] = 1.0  # the machine was started anew, and its clock with it
    assert not one.take(1)
    now[0] += 0.5
    assert one.take(BURST // 2)
    assert (tmp_path / "rate").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 16])
def test_a_file_of_another_form_allows_no_more_than_a_burst(tmp_path, content):
    (tmp_path / "rate").write_bytes(content)
    rate = RowRate(BURST, tmp_path / "rate", lambda: 5.0)
    assert [rate.take(BURST), rate.take(1)] == [True, False]


def test_a_store_that_is_gone_is_told(tmp_path):
    with pytest.raises(StorageError):
        RowRate(BURST, tmp_path / "gone" / "rate").take(1)


def test_a_rate_holds_one_descriptor_until_it_is_closed(tmp_path):
    rate = RowRate(BURST, tmp_path / "rate")
    before = len(os.listdir("/proc/self/fd"))
    assert all(rate.take(1) for _ in range(3))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    rate.close()
    assert len(os.listdir("/proc/self/fd")) == before


def _takes(path, asked):
    rate = RowRate(1e-3, path, lambda: 5.0)
    asked.put(sum(rate.take(1) for _ in range(QUERY_ROWS)))


def test_processes_count_every_row_once(tmp_path):
    context = multiprocessing.get_context("fork")
    asked = context.SimpleQueue()
    both = [context.Process(target=_takes, args=(tmp_path / "rate", asked)) for _ in range(2)]
    for each in both:
        each.start()
    assert asked.get() + asked.get() == QUERY_ROWS
    for each in both:
        each.join()
