"""Spellings of an id that `POST /predict` takes: those that the run's alignment reads alike."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vfl.datasets import PartyData, Split
from vfl.datasets.alignment.ids import normalise
from vfl.serving.front import Asked, Rows

NOTHING = np.empty(0, dtype=np.int64)


def rows_of(ids, id_rules):
    split = Split(NOTHING, NOTHING, np.arange(len(ids)))
    found = np.array(ids, dtype=object)
    return Rows(PartyData("lender", None, None, None, split, b"", found, id_rules=id_rules))


SPELLINGS = [
    "0015775678",
    " 15775678",
    "15775678.0",
    "+15775678",
    15775678,
    15775678.0,
    1.5775678e7,
]


@pytest.mark.parametrize("asked", SPELLINGS)
def test_an_id_is_found_however_a_party_writes_it(asked):
    asked = Asked.model_validate_json(json.dumps({"ids": [asked]})).ids[0]
    rows = rows_of(["7", "0015775678"], "decimal+zeros")
    assert rows.positions(["7", asked]) == [0, 1]


@pytest.mark.parametrize("asked", ["15775678", 15775678, "0015775678.0", "0015775678x", "", "é"])
def test_rules_that_were_not_agreed_on_join_nothing(asked):
    assert rows_of(["0015775678"], "plain").positions([asked]) is None


@pytest.mark.parametrize("asked", ["true", "null", "NaN", "1e999", "[1]"])
def test_what_is_no_id_is_refused(asked):
    with pytest.raises(ValidationError):
        Asked.model_validate_json(f'{{"ids": [{asked}]}}')


def test_two_ids_that_are_alike_mean_their_own_rows_alone():
    rows = rows_of(["07", "7", "8"], "zeros")
    assert rows.positions(["07", "7", "008"]) == [0, 1, 2]
    assert rows.positions(["007"]) is None


IDS = st.text("0123 aB.", min_size=1, max_size=6).map(str.strip).filter(bool)


@given(
    st.lists(IDS, min_size=1, max_size=8, unique=True),
    IDS,
    st.sampled_from(["plain", "space+case", "decimal+zeros", "case+decimal+zeros"]),
)
def test_an_id_is_found_where_the_alignment_finds_it_alike(ids, asked, rules):
    *keys, key = normalise(np.array([*ids, asked], dtype=object), rules)
    meant = (
        [ids.index(asked)] if asked in ids else [at for at, own in enumerate(keys) if own == key]
    )
    assert rows_of(ids, rules).positions([asked]) == (meant if len(meant) == 1 else None)
