"""What a feature party tells of its own troubles."""

import pytest

from vfl.errors import ConfigError, ConsentError, MissingDataError, RunFolderError
from vfl.session import for_others

PRIVATE = "/srv/bank/salaries.csv"


@pytest.mark.parametrize("kind", [MissingDataError, ConfigError, RunFolderError])
def test_its_own_files_stay_its_own(kind):
    told = for_others(kind("there is no such table", where=PRIVATE, got=PRIVATE), "bank")
    assert type(told) is kind
    assert PRIVATE not in str(told)
    assert "party 'bank'" in str(told)
    assert told.exit_code == kind.exit_code


def test_a_refusal_is_told_with_its_difference():
    refusal = ConsentError("no", got="width 300", want="width <= 256")
    assert for_others(refusal, "bank") is refusal
