import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.core.errors import BadOptionError, MisalignedError, MissingColumnError, UnknownNameError
from vfl.datasets.alignment.ids import (
    ID_RULES,
    PREVIEW,
    check_unique,
    make_rules,
    normalise,
    prefixes,
    read_ids,
)

EXAMPLES = {
    "plain": [("00050379", "00050379"), ("a B", "a B")],
    "space": [("DE 12\u00a034", "DE1234"), ("\t7", "7")],
    "case": [("ABC", "abc"), ("Straße", "strasse"), ("\uff11\uff12", "12")],
    "decimal": [("79499.0", "79499"), ("+7", "7"), ("-7.", "-7"), ("7.10", "7.10"), (".0", ".0")],
    "zeros": [
        ("00050379", "50379"),
        ("-007", "-7"),
        ("000", "0"),
        ("0x7", "0x7"),
        ("\u0660\u0667", "\u0660\u0667"),
    ],
    "date": [
        ("3.11.1985", "1985-11-03"),
        ("1985/11/3", "1985-11-03"),
        ("19851103", "1985-11-03"),
        ("1985-11-03T00:00:00", "1985-11-03"),
        ("31.02.1985", "31.02.1985"),
        ("3.11.85", "3.11.85"),
        ("3.11/1985", "3.11/1985"),
    ],
}


def texts(*ids):
    return np.array(ids, dtype=object)


def test_every_rule_has_examples():
    assert set(EXAMPLES) == set(ID_RULES.names()) == set(PREVIEW.split("+"))


@pytest.mark.parametrize(
    ("rule", "text", "wanted"),
    [(rule, *pair) for rule, pairs in EXAMPLES.items() for pair in pairs],
)
def test_what_a_rule_makes_of_an_id(rule, text, wanted):
    assert ID_RULES.make(rule).apply(text) == wanted


@pytest.mark.parametrize("rule", ID_RULES.names())
@given(text=st.text(max_size=20))
def test_a_rule_applied_twice_is_applied_once(rule, text):
    once = ID_RULES.make(rule).apply(text)
    assert ID_RULES.make(rule).apply(once) == once


def test_rules_act_from_left_to_right():
    assert normalise(texts(" 00050379.0".strip()), "zeros") == [b"00050379.0"]
    assert normalise(texts("00050379.0"), "decimal+zeros") == [b"50379"]
    assert normalise(texts("11/03/1985"), "date:order=mdy") == [b"1985-11-03"]
    assert prefixes("case+date:order=mdy") == ["case", "case+date:order=mdy"]


@pytest.mark.parametrize(
    ("spec", "error"), [("cases", UnknownNameError), ("date:order=ydm", BadOptionError)]
)
def test_a_rule_that_is_none_is_refused(spec, error):
    with pytest.raises(error):
        make_rules(spec)


def test_columns_of_a_composite_id_follow_the_rules_each():
    frame = pd.DataFrame({"name": ["Ann", "BO"], "born": ["3.11.1985", "4.1.1990"]})
    other = pd.DataFrame({"who": ["ann", "bo"], "day": ["1985-11-03", "1990-01-04"]})
    left = normalise(read_ids(frame, "name+born", "us"), "case+date")
    assert left == normalise(read_ids(other, "who + day", "them"), "case+date")
    split = pd.DataFrame({"name": ["An"], "born": ["n"]}), pd.DataFrame({"name": ["Ann"]})
    assert read_ids(split[0], "name+born", "us") != read_ids(split[1], "name", "them")
    with pytest.raises(MissingColumnError):
        read_ids(frame, "name+birthday", "us")


def test_missing_and_repeated_ids_are_counted_and_not_shown():
    with pytest.raises(MisalignedError, match="2 of 3 rows") as caught:
        read_ids(pd.DataFrame({"id": ["SECRET", None, None]}), "id", "party 'bank'")
    assert "SECRET" not in str(caught.value)
    ids = texts("07", "7", "SECRET", "SECRET")
    with pytest.raises(MisalignedError) as caught:
        check_unique(normalise(ids, "zeros"), lambda: [ids], "party 'bank'", "zeros")
    assert "2 rows repeat another row's id, 1 of them before normalisation" in str(caught.value)
    assert "SECRET" not in str(caught.value)
    check_unique(normalise(ids[:3], "plain"), lambda: [ids[:3]], "party 'bank'", "plain")
