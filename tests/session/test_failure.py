"""What a feature party tells of its own troubles."""

import pytest

from vfl.core.errors import (
    ConfigError,
    ConsentError,
    MisalignedError,
    MissingDataError,
    RunFolderError,
    StorageError,
)
from vfl.session import for_others, unexpected

PRIVATE = "/srv/bank/salaries.csv"


@pytest.mark.parametrize("kind", [MissingDataError, ConfigError, RunFolderError])
def test_its_own_files_stay_its_own(kind):
    told = for_others(kind("there is no such table", where=PRIVATE, got=PRIVATE), "bank")
    assert type(told) is kind
    assert PRIVATE not in str(told)
    assert "party 'bank'" in str(told)
    assert told.exit_code == kind.exit_code


def test_a_full_disk_is_told_without_its_place():
    told = for_others(
        StorageError("a file cannot be written", where=PRIVATE, got="No space left on device"),
        "bank",
    )
    assert type(told) is StorageError
    assert told.got == "No space left on device"
    assert PRIVATE not in str(told)


def test_what_nobody_foresaw_is_told_without_its_text():
    told = unexpected(RuntimeError("salary 4711"), "bank")
    assert "party 'bank' failed unexpectedly" in str(told)
    assert told.got == "RuntimeError"
    assert "4711" not in str(told)
    assert unexpected(SystemExit(3), "bank").what == "party 'bank' received a signal to stop"


def test_rows_that_differ_are_told_to_all():
    error = MisalignedError("the rows differ", got="1797 rows", want="1796 rows")
    assert for_others(error, "label") is error


def test_a_refusal_is_told_with_its_difference():
    refusal = ConsentError("no", got="width 300", want="width <= 256")
    assert for_others(refusal, "bank") is refusal
