import pytest

from vfl.config import Experiment, Locations
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
def locations(tmp_path):
    path = tmp_path / "loans.toml"
    path.write_text(TEXT)
    return Locations.of(path, ["parties.bank.width=0"])


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
def test_a_setting_stands_somewhere(locations, setting, before):
    assert locations.before(setting.split(".")) == before
    assert Locations().before(setting.split(".")) == ""


def test_a_line_inside_a_list_is_no_table():
    text = 'clips = [\n  [1, 2],\n  "a = 3",\n]\nseed = 1\n[[tasks]]\nparty = "a"\n[[tasks]]\n'
    found = Locations.of_text("file.toml", text)
    assert found.before(["seed"]) == "file.toml:5: "
    assert found.before(["tasks"]) == "file.toml:6: "
    assert set(found.lines) == {("clips",), ("seed",), ("tasks",), ("tasks", "party")}


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
def test_only_settings_get_a_line(locations, where, told):
    with pytest.raises(MissingColumnError) as caught, locations.located(Experiment):
        raise MissingColumnError("what", where=where)
    assert caught.value.where == told


def test_mistakes_of_others_are_left_alone(locations):
    with pytest.raises(LostPeerError) as caught, locations.located(Experiment):
        raise LostPeerError("gone", where="codec")
    assert caught.value.where == "codec"
