"""The table of docs/results/tensors.md has every operation, with the rounds and bytes of today."""

import re

import pytest

from benchmarks.tensor_operations import OPERATIONS, PAGE, measured
from vfl.mpc.many.members import LocalMembers

ROW = re.compile(r"\| `(.+?)` \| (\d+)(?: \((\d+)\))? \| (\d+)(?: \((\d+)\))? \| (\d+) \|")
FOUND = map(ROW.match, PAGE.read_text().splitlines())
ROWS = {match[1]: match.groups()[1:] for match in FOUND if match}


@pytest.fixture(scope="module")
def members():
    with LocalMembers(2) as made:
        yield made


def test_the_table_has_every_operation():
    assert list(ROWS) == list(OPERATIONS)


@pytest.mark.parametrize("name", ["x * y", "x < y", "exp", "sqrt", "x / y", "max_pool2d"])
def test_rounds_and_bytes_are_those_of_the_table(members, name):
    row = measured(members, name, {})
    rounds, peer_rounds, sent, peer_sent, dealt = map(int, ROWS[name])
    assert row.rounds == rounds <= peer_rounds
    assert round(row.holder_bytes) == sent <= peer_sent
    assert round(row.dealer_bytes) == dealt
