"""`vfl join`: a received folder takes its owner's table and gets keys of its own."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from organisations import write_organisations

from vfl.config import read_experiment, read_party_file
from vfl.federation.joining import make_keys
from vfl.session.store.identity import Identity, Pin
from vfl.transport import fingerprint, public_key_bytes


@pytest.fixture
def received(well, tmp_path):
    """The bank's folder as the lender sent it, beside the bank's table."""
    _, label = write_organisations(tmp_path, "breast-cancer")
    well("init", "loans", "--from", "lender=lender.csv", "--label-party", "lender",
         "--label", label, "--party", "bank", "--host", "lender.example")  # fmt: skip
    (tmp_path / "loans" / "bank").rename(tmp_path / "bank")
    return tmp_path / "bank"


def test_a_table_and_keys_go_into_the_folder_that_was_received(vfl, well, received):
    before = read_party_file(received / "party.toml")
    done = well("join", "bank", "--table", "bank.csv")
    party = read_party_file(received / "party.toml")
    assert party.model_copy(update={"data": before.data}) == before
    assert party.table.dates == {"opened": "%d.%m.%Y"}
    assert (party.table.id, party.table.id_type) == ("customer_id", "number")
    assert Path(party.table.source) == Path("bank.csv").resolve()
    assert "#| opened" in (received / "party.toml").read_text()

    assert "bank.pub is the public half of your new keys\n" in done.out
    content = (received / "bank.pub").read_bytes()
    assert f"fingerprint      {fingerprint(content)}\n" in done.out
    assert re.fullmatch(r"([0-9a-f]{4} ){7}[0-9a-f]{4}", fingerprint(content))
    assert public_key_bytes(content) is not None
    own = Identity.kept_at(received / "identity.key")
    assert Pin.kept_at(received / "bank.pub").has_signed(b"a", own.sign(b"a"))
    for key in received.glob("*.key"):
        assert key.stat().st_mode & 0o777 == 0o600

    again = json.loads(well("join", "bank", "--json").out)
    assert (again["keys"], again["fingerprint"]) == ("found", fingerprint(content))
    assert read_party_file(received / "party.toml") == party


def test_source_and_id_alone_are_enough(well, refused, received, tmp_path):
    (tmp_path / "bank.csv").rename(received / "ours.csv")
    text = (received / "party.toml").read_text()
    by_hand = text.replace('source = "data.csv"', 'source = "ours.csv"')
    by_hand = by_hand.replace('id = "id"', 'id = "customer_id"\nid_type = "text"')
    (received / "party.toml").write_text(by_hand)
    assert "or vfl join bank, which finds" in refused("check", "bank/party.toml").err
    well("join", "bank/party.toml")
    found = tomllib.loads((received / "party.toml").read_text())["data"]
    assert found["source"] == "ours.csv"
    assert found["dates"] == {"opened": "%d.%m.%Y"}
    assert found["id_type"] == "text"  # as its owner said
    assert "vfl join" not in well("check", "bank/party.toml").out


def test_comments_of_a_files_owner_stay(well, received, tmp_path):
    (tmp_path / "bank.csv").rename(received / "ours.csv")
    path = received / "party.toml"
    text = path.read_text().replace(
        'source = "data.csv"\nid = "id"\n',
        """source = "data.csv"  # of the "warehouse" # 2
# whom it is about
id = 'customer_id'
columns = [  # the old ones
    "a#b",
    # those of tax
]
separator = ";"
""",
    )
    path.write_text(text.replace("[consent]\n", "[consent]  # by the board\n"))
    well("join", "bank", "--table", "bank/ours.csv")
    found = path.read_text()
    assert 'source = "ours.csv"  # of the "warehouse" # 2\n# whom it is about\nid = ' in found
    assert '# the old ones\n# those of tax\ncolumns = [\n    "' in found
    assert "[consent]  # by the board\n" in found
    assert found.count("#| opened") == 1
    assert read_party_file(path).table.dates == {"opened": "%d.%m.%Y"}
    well("join", "bank")
    assert path.read_text() == found


def test_a_file_that_cannot_be_edited_stays(refused, received):
    path = received / "party.toml"
    text = path.read_text().replace('[data]\nsource = "data.csv"\nid = "id"\n', "")
    path.write_text(before := 'data = { source = "data.csv", id = "customer_id" }\n' + text)
    assert "does not edit" in refused("join", "bank", "--table", "bank.csv").err
    assert path.read_text() == before


def test_what_the_sender_wrote_beyond_the_usual_is_shown(well, refused, received):
    path = received / "party.toml"
    text = path.read_text()
    path.write_text(
        text.replace('device = "cpu"', 'device = "cpu"\nbottom = "theirs:Bottom"')
        .replace("max_width = 256", "max_width = 4096")
        .replace('id = "id"\n', 'id = "id"\npredict = "../other.csv"\n')
    )
    shown = json.loads(well("join", "bank", "--table", "bank.csv", "--json").out)["says"]
    assert shown == [
        "bottom = theirs:Bottom",
        "consent.members = lender",
        "consent.max_width = 4096",
        "data.predict = ../other.csv",
    ]
    path.write_text(text.replace('"node.key"', '"../../elsewhere.key"'))
    (received / "node.key").unlink()
    done = refused("join", "bank", "--table", "bank.csv")
    assert "outside its folder" in done.err
    assert not list(received.parents[1].rglob("elsewhere.key"))


@pytest.mark.parametrize("missing", [None, "node.key", "identity.key"])
@pytest.mark.parametrize("public", [False, True])
def test_keys_that_came_with_the_folder_are_said_to_be_anothers(
    vfl, well, tmp_path, missing, public
):
    write_organisations(tmp_path, "breast-cancer", rows=120)
    well("init", "loans", "--party", "bank")
    if public:  # the sender writes whatever the own command of the party would write
        make_keys(tmp_path / "loans" / "bank")
    if missing:
        (tmp_path / "loans" / "bank" / missing).unlink()
    told = well("join", "loans/bank", "--table", "bank.csv")
    assert "vfl cannot check who made them" in told.out
    own = Path("loans/bank/party.toml")
    assert f"make your own: vfl renew {own}, then vfl renew {own} --identity" in told.out
    assert re.search("^keys +there$", vfl("status", "loans/bank").out, re.MULTILINE)


def test_the_label_party_may_bring_its_table_later(well, refused, tmp_path):
    _, label = write_organisations(tmp_path, "breast-cancer")
    well("init", "loans", "--party", "bank", "--label-party", "lender", "--host", "lender.example")
    assert "--table TABLE" in refused("join", "loans").err
    told = well("join", "loans", "--table", "lender.csv", "--label", label)
    assert "rows             " in told.out
    by_hand = read_experiment(Path("loans/label/app/experiment.toml"))
    own = read_party_file(Path("loans/label/party.toml"))
    well("init", "given", "--from", "lender=lender.csv", "--label", label, "--party", "bank",
         "--label-party", "lender", "--host", "lender.example")  # fmt: skip
    at_once = read_experiment(Path("given/label/app/experiment.toml"))
    assert by_hand.model_dump() == at_once.model_dump() | {"name": "loans"}
    assert own.model_dump() == read_party_file(Path("given/label/party.toml")).model_dump()
    assert not Path("loans/label/node.key").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("nowhere",), "this is not a party's folder"),
        (("bank",), "in this party's file does not exist"),
        (("bank", "--table", "none.csv"), "there is no such table"),
        (("bank", "--table", "bank.csv", "--id", "customer"), "did you mean 'customer_id'"),
    ],
)
def test_mistakes(refused, received, given, told):
    assert told in refused("join", *given).err
    assert not (received / "node.key").exists()


def test_a_dealer_has_no_table(well, refused):
    well("init", "loans", "--party", "bank", "--dealer", "notary", "--host", "lender.example")
    told = well("join", "loans/notary").out
    assert "notary.pub" in told
    assert "has no data" in refused("join", "loans/notary", "--table", "x.csv").err


@pytest.mark.parametrize(
    ("setting", "table"), [("source", []), ("predict", ["--table", "bank.csv"])]
)
def test_a_function_that_the_sender_names_is_refused_before_it_runs(
    refused, received, tmp_path, monkeypatch, setting, table
):
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\n\ndef rows(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = received / "party.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{setting} =")]
    lines.insert(lines.index("[data]") + 1, f'{setting} = "theirs:rows"')
    path.write_text("\n".join(lines) + "\n")
    before = path.read_text()
    done = refused("join", "bank", *table)
    assert "names a function that would run" in done.err
    assert f"data.{setting}" in done.err
    assert (path.read_text(), ran.exists()) == (before, False)


@pytest.mark.parametrize("name", ["node.key", "party.toml", "store", "peers/shop.pub", "more/a"])
def test_a_link_that_leads_out_of_the_received_folder_is_refused(refused, received, name, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    mine = outside / "mine"
    mine.write_text((received / "party.toml").read_text())
    link = received / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(outside if name == "store" else mine)
    before = mine.read_text()
    done = refused("join", "bank", "--table", "bank.csv")
    assert "leads outside of it" in done.err
    assert str(link.relative_to(tmp_path)) in done.err
    assert (mine.read_text(), [one.name for one in outside.iterdir()]) == (before, ["mine"])
    assert not (received / "identity.key").exists()


def test_a_link_within_the_received_folder_is_none_of_these(well, received):
    (received / "ours").mkdir()
    (received / "peers").symlink_to("ours")
    well("join", "bank", "--table", "bank.csv")
