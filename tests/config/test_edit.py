"""Settings that change in a file, and what its owner wrote around them, which does not."""

import tomllib

import pytest

from vfl.config.edit import with_settings, without_keys

FILE = """\
# mine
name = "a"  # b

[data]
source = "old.csv"  # from "the # house"
# by hand
columns = [
    "a#b",  # the first
    "c",
]

# of the bank
[data.dates]  # both
opened = "%Y"  # a year
closed = "%d"

[consent]
max_width = 3
"""


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        (("data",), {"source": "new.csv", "id": "customer"}),
        (("data",), {"columns": ["x", "#y"]}),
        (("data",), {"dates": {"opened": "%d", "at": "%H"}}),
        (("data",), {"dates": {"opened": "%Y", "closed": "%d"}}),
        (("data",), {"columns": {"a": 1}}),
        (("data",), {"dates": "all", "numbers": {"sum": "."}}),
        (("serve",), {"port": 80}),
        (("consent",), {"max_width": 4, "members": []}),
    ],
)
def test_settings_are_as_asked_and_comments_stay(table, settings):
    wanted = tomllib.loads(FILE)
    inner = wanted
    for part in table:
        inner = inner.setdefault(part, {})
    inner.update(settings)
    found = with_settings(FILE, table, settings)
    assert tomllib.loads(found) == wanted
    kept = ["# mine", "# b", "# by hand", '# from "the # house"']
    if settings.keys() <= {"source", "id", "columns", "port", "max_width", "members"}:
        kept += ["# of the bank", "# both", "# a year"]
    assert [comment for comment in kept if comment not in found] == []
    assert with_settings(found, table, settings) == found


def test_a_comment_beside_an_item_of_a_list_stays():
    assert "# the first\ncolumns = [" in with_settings(FILE, ("data",), {"columns": ["c"]})


def test_a_table_goes_with_what_stands_above_it():
    assert "of the bank" not in without_keys(FILE, [("data", "dates")])
