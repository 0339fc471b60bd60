import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["results/compression.md"])
def test_the_code_of_the_documentation_shows_what_it_says(page):
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
