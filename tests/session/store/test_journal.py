"""What a training has sent: noted before it leaves, and never followed by something else."""

import stat

import pytest

from vfl.core.errors import DisagreementError, RunFolderError, StorageError
from vfl.session.store.journal import Journal

OWNER = ("bank", "loans", "ab" * 32)
HEAD, RECORD = 40, 54


@pytest.fixture
def path(tmp_path):
    Journal.create(tmp_path / "loans.sent", OWNER)
    return tmp_path / "loans.sent"


def note(path, steps=range(5), **options):
    journal = Journal(path, OWNER, **options)
    try:
        for step in steps:
            journal.admit(step, b"cut of %d" % step)
        return len(journal)
    finally:
        journal.close()


def test_the_same_again_is_noted_once(path):
    note(path)
    assert path.stat().st_size == HEAD + 5 * RECORD
    assert note(path, range(7)) == 7
    assert path.stat().st_size == HEAD + 7 * RECORD


def test_something_else_is_refused_and_not_noted(path):
    note(path)
    before = path.read_bytes()
    journal = Journal(path, OWNER)
    with pytest.raises(DisagreementError, match="different contents than before") as caught:
        journal.admit(3, b"another cut")
    journal.close()
    error = caught.value
    assert (error.where, error.fix) == ("exchange 3", "start a run with another name")
    assert error.got.startswith("contents ")
    assert error.want.startswith("contents ")
    assert path.read_bytes() == before


def test_a_training_that_has_ended_repeats_only(path):
    note(path)
    assert note(path, closed=True) == 5
    with pytest.raises(DisagreementError) as caught:
        note(path, range(6), closed=True)
    assert caught.value.got == "an exchange that was never sent"


def test_each_peer_has_exchanges_of_its_own(path):
    journal = Journal(path, OWNER, ("shop", "club"))
    journal.admit(0, b"one", "shop")
    journal.admit(0, b"two", "club")
    with pytest.raises(DisagreementError):
        journal.admit(0, b"two", "shop")
    journal.close()


def test_a_record_that_a_kill_has_torn_is_left_out(path):
    note(path)
    whole = path.read_bytes()
    for torn in range(1, RECORD):
        path.write_bytes(whole[: HEAD + 4 * RECORD + torn])
        assert note(path, [4], least=4) == 5
        assert path.read_bytes() == whole


def test_every_bit_counts(path):
    note(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(RunFolderError):
            Journal(path, OWNER)


def test_a_journal_of_another_name_party_or_nonce_is_refused(path):
    note(path)
    for place in range(3):
        other = list(OWNER)
        other[place] = "cd" * 32
        with pytest.raises(RunFolderError):
            Journal(path, other)


def test_fewer_records_than_were_counted_are_refused(path):
    note(path)
    with pytest.raises(RunFolderError):
        Journal(path, OWNER, least=6)
    path.unlink()
    with pytest.raises(RunFolderError, match="is missing"):
        Journal(path, OWNER)


def test_what_cannot_be_noted_is_not_sent(path, monkeypatch):
    journal = Journal(path, OWNER)
    monkeypatch.setattr("vfl.session.store.journal.os.write", lambda handle, record: 7)
    with pytest.raises(StorageError):
        journal.admit(0, b"cut")
    journal.close()


def test_it_is_its_owners_alone(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert OWNER[2].encode() not in path.read_bytes()
