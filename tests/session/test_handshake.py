import re

import numpy as np
import pytest

from vfl.errors import DisagreementError, MisalignedError, ProtocolError
from vfl.session import Introduction, check_introduction
from vfl.version import VERSION

SESSION = "5" * 32
IDS = [f"customer-{number:05}" for number in range(200)]


@pytest.fixture
def said(terms, data):
    return Introduction.of(data["bank"], terms, SESSION)


def test_parties_that_agree(said, terms, data):
    received = Introduction.parse(said.model_dump())
    check_introduction(received, terms, data["lender"], SESSION)
    assert (received.party, received.rows, received.version) == ("bank", 200, VERSION)


@pytest.mark.parametrize(
    ("changes", "kind", "message", "got", "want"),
    [
        (
            {"party": "bakery"},
            DisagreementError,
            "party 'bakery' is not part of this experiment",
            "bakery",
            "bank, shop",
        ),
        (
            {"party": "lender"},
            DisagreementError,
            "party 'lender' is not part",
            "lender",
            "bank, shop",
        ),
        (
            {"version": "9.9"},
            DisagreementError,
            "party 'bank' runs another version of vfl",
            "9.9",
            VERSION,
        ),
        (
            {"rows": 199},
            MisalignedError,
            "the tables of 'bank' and 'lender' have different rows",
            "'bank': 199 rows, 'lender': 200 rows",
            "the same ids at every party",
        ),
    ],
)
def test_parties_that_differ(said, terms, data, changes, kind, message, got, want):
    other = said.model_copy(update=changes)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        check_introduction(other, terms, data["lender"], SESSION)
    assert (caught.value.got, caught.value.want) == (got, want)


def test_other_terms(terms, data):
    other = terms.model_copy(update={"seed": 6})
    said = Introduction.of(data["bank"], other, SESSION)
    with pytest.raises(DisagreementError, match="another experiment") as caught:
        check_introduction(said, terms, data["lender"], SESSION)
    assert caught.value.got == f"terms {other.digest()[:8]}..."
    assert caught.value.want == f"terms {terms.digest()[:8]}..."


@pytest.mark.parametrize("change", ["order", "one id", "type"])
def test_other_ids_or_another_order(terms, data, with_ids, change):
    theirs = {
        "order": IDS[1:] + IDS[:1],
        "one id": [*IDS[:-1], "somebody-else"],
        "type": list(range(200)),
    }[change]
    said = Introduction.of(with_ids(data["bank"], theirs), terms, SESSION)
    own = with_ids(data["lender"], list(map(str, range(200))) if change == "type" else IDS)
    with pytest.raises(MisalignedError, match="hold different ids") as caught:
        check_introduction(said, terms, own, SESSION)
    message = str(caught.value)
    assert "200 rows at both" in message
    assert not re.search(r"customer|somebody|[0-9a-f]{16}", message)


def test_the_same_ids_agree(terms, data, with_ids):
    said = Introduction.of(with_ids(data["bank"], IDS), terms, SESSION)
    check_introduction(said, terms, with_ids(data["lender"], np.array(IDS)), SESSION)


def test_what_was_said_in_another_session_means_nothing(said, terms, data):
    assert said.row_order != Introduction.of(data["bank"], terms, "6" * 32).row_order
    with pytest.raises(MisalignedError):
        check_introduction(said, terms, data["lender"], "6" * 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": -1},
        {"rows": "many"},
        {"terms": "0" * 63},
        {"row_order": "0" * 63 + "G"},
        {"row_order": "0" * 64 + "\n"},
        {"party": "x" * 33},
        {"version": "1" * 33},
        {"more": 1},
        {"party": None},
    ],
)
def test_introductions_of_another_form(said, changes):
    with pytest.raises(ProtocolError, match="introduced itself in an unknown form"):
        Introduction.parse(said.model_dump() | changes)


def test_an_introduction_needs_every_field(said):
    for name in Introduction.model_fields:
        content = said.model_dump()
        del content[name]
        with pytest.raises(ProtocolError):
            Introduction.parse(content)
