import re

import pytest

from vfl.config import Experiment
from vfl.core.errors import DisagreementError, MisalignedError, ProtocolError
from vfl.core.frame import HANDSHAKE_LIMIT_BYTES
from vfl.core.version import VERSION
from vfl.session import Introduction, PartyTerms, Terms, check_introduction
from vfl.transport import Hello

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
    ("changes", "kind", "got", "want"),
    [
        ({"party": "bakery"}, DisagreementError, "bakery", "bank, shop"),
        ({"party": "lender"}, DisagreementError, "lender", "bank, shop"),
        (
            {"version": "9.9"},
            DisagreementError,
            "vfl 9.9 at the other party",
            f"vfl {VERSION}, as at this party",
        ),
        (
            {"rows": 199},
            MisalignedError,
            "'bank': 199 rows, 'lender': 200 rows",
            "the same ids at every party",
        ),
    ],
)
def test_parties_that_differ(said, terms, data, changes, kind, got, want):
    other = said.model_copy(update=changes)
    with pytest.raises(kind) as caught:
        check_introduction(other, terms, data["lender"], SESSION)
    assert (caught.value.got, caught.value.want) == (got, want)


def test_other_terms(terms, data):
    other = terms.model_copy(update={"seed": 6})
    said = Introduction.of(data["bank"], other, SESSION)
    with pytest.raises(DisagreementError, match="another experiment") as caught:
        check_introduction(said, terms, data["lender"], SESSION)
    assert (caught.value.got, caught.value.want) == ("seed 6", "seed 5")
    assert f"{terms.digest()[:8]}... here, {other.digest()[:8]}... there" in caught.value.fix


def test_settings_that_differ_are_named_and_counted(terms, data):
    train = terms.train.model_copy(update={"epochs": 3, "batch_size": 9})
    changes = {"seed": 6, "codec": "none", "merge": "sum", "train": train}
    said = Introduction.of(data["bank"], terms.model_copy(update=changes), SESSION)
    with pytest.raises(DisagreementError) as caught:
        check_introduction(said, terms, data["lender"], SESSION)
    assert caught.value.got == "seed 6, codec none, merge sum, train.epochs 3, and 1 more"
    assert caught.value.want == "seed 5, codec topk:k=3, merge concat, train.epochs 2, and 1 more"


def test_an_introduction_of_another_form_and_version_names_the_version(said):
    content = said.model_dump() | {"version": "9.9", "more": 1}
    with pytest.raises(DisagreementError, match="another version") as caught:
        Introduction.parse(content)
    assert caught.value.got == "vfl 9.9 at the other party"


def test_an_introduction_fits_its_greeting(data):
    parties = {f"party-{n:02}-{'x' * 20}": PartyTerms(width=9, bottom="b" * 512) for n in range(64)}
    content = {"parties": parties, "codec": "c" * 512, "defense": "d" * 512, "run": "r" * 128}
    experiment = Experiment.model_validate({"parties": {"bank": {}}})
    large = Terms.of(experiment, "train", "r").model_copy(update=content)
    said = Introduction.of(data["bank"], large, SESSION)
    assert Introduction.parse(said.model_dump()) == said
    hello = Hello("5" * 32, "9" * 20, "t" * 43, said.model_dump())
    assert len(hello.frame().payload) <= HANDSHAKE_LIMIT_BYTES


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


def test_what_was_said_in_another_session_means_nothing(said, terms, data):
    assert said.row_order != Introduction.of(data["bank"], terms, "6" * 32).row_order
    with pytest.raises(MisalignedError):
        check_introduction(said, terms, data["lender"], "6" * 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": -1},
        {"terms": "0" * 63},
        {"row_order": "0" * 64 + "\n"},
        {"party": "x" * 33},
        {"more": 1},
        {"settings": {"codec": "x" * 81}},
        {"settings": {"codec": "\x1b[2J"}},
        {"settings": {f"s{n}": "" for n in range(65)}},
    ],
)
def test_introductions_of_another_form(said, changes):
    with pytest.raises(ProtocolError, match="introduced itself in an unknown form"):
        Introduction.parse(said.model_dump() | changes)
