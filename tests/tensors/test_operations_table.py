"""The table of every operation on shares is that of today: its rounds and its bytes."""

import csv
import re

import pytest

from benchmarks.tensor_operations import FILE, ON_PAGE, OPERATIONS, PAGE, markdown, measured
from vfl.mpc.many.members import LocalMembers
from vfl.tensors import functions

with FILE.open(encoding="utf-8", newline="") as file:
    ROWS = {row["operation"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def members():
    with LocalMembers(2) as made:
        yield made


def test_the_table_has_every_operation():
    assert list(ROWS) == list(OPERATIONS)
    assert set(ON_PAGE) < set(ROWS)
    assert markdown(list(ROWS.values())) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["x * y", "x < y", "exp", "sqrt", "x / y", "max_pool2d"])
def test_rounds_and_bytes_are_those_of_the_table(members, name):
    row = measured(members, name, {})
    names = "rounds", "crypten_rounds", "holder_bytes", "crypten_bytes", "dealer_bytes"
    rounds, peer_rounds, sent, peer_sent, dealt = (int(ROWS[name][column]) for column in names)
    assert row.rounds == rounds <= peer_rounds
    assert round(row.holder_bytes) == sent <= peer_sent
    assert round(row.dealer_bytes) == dealt


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "gelu"])
def test_a_functions_docstring_states_the_rounds_of_the_table(name):
    stated = re.search(r"takes (\d+) rounds of messages", getattr(functions, name).__doc__)
    assert stated is not None
    assert stated[1] == ROWS[name]["rounds"]
