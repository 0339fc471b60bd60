import doctest
from pathlib import Path


def test_the_code_of_the_documentation_shows_what_it_says():
    page = Path(__file__).parents[2] / "docs" / "compression.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
