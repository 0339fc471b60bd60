import pytest

from vfl.config import Experiment, PartyFile, Places
from vfl.core.errors import LostPeerError, MissingColumnError

TEXT = """\
codec = "none"
[parties.bank]
width = 4
columns = [
    "a*",
]
[ "data" ]
"source" = "loans.csv"
"""


@pytest.fixture
def places(tmp_path):
    path = tmp_path / "loans.toml"
    path.write_text(TEXT)
    return Places.of(path, ["parties.bank.width=0"])


@pytest.mark.parametrize(
    ("setting", "before"),
    [
        ("codec", "loans.toml:1: "),
        ("parties.bank.columns", "loans.toml:4: "),
        ("parties.bank.columns.0", "loans.toml:4: "),
        ("parties.bank.bottom", "loans.toml:2: "),
        ("data.source", "loans.toml:8: "),
        ("parties.bank.width", "loans.toml: "),
        ("seed", "loans.toml: "),
    ],
)
def test_a_setting_stands_somewhere(places, setting, before):
    assert places.before(setting.split(".")) == before
    assert Places().before(setting.split(".")) == ""


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("parties.bank.columns", "loans.toml:4: parties.bank.columns"),
        ("codec, option 'k'", "loans.toml:1: codec, option 'k'"),
        ("data.csv", "data.csv"),
        ("handshake", "handshake"),
        (None, None),
    ],
)
def test_only_settings_get_a_line(places, where, told):
    with pytest.raises(MissingColumnError) as caught, places.told(Experiment):
        raise MissingColumnError("what", where=where)
    assert caught.value.where == told


def test_mistakes_of_others_are_left_alone(places):
    with pytest.raises(LostPeerError) as caught, places.told(Experiment):
        raise LostPeerError("gone", where="codec")
    assert caught.value.where == "codec"


def test_a_party_that_was_never_a_file_has_no_places():
    party = PartyFile.model_validate({"party": "bank", "data": {"source": "a.csv", "id": "id"}})
    assert party.places == Places()
