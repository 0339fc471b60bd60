"""`vfl party`: what each command changes in the files of a project, and what it leaves."""

import json
import tomllib
from pathlib import Path

import pytest
from organisations import write_organisations

from vfl.config import read_experiment, read_party_file
from vfl.session.store.identity import Pin
from vfl.session.store.party_folder import own_ledger
from vfl.transport import fingerprint

EXPERIMENT = Path("loans/label/app/experiment.toml")


@pytest.fixture
def loans(well, tmp_path):
    """A project of one machine: the lender and the bank; comments stand in its experiment."""
    _, label = write_organisations(tmp_path, "breast-cancer")
    well("init", "loans", "--from", "lender=lender.csv", "--from", "bank=bank.csv",
         "--label-party", "lender", "--label", label)  # fmt: skip
    text = EXPERIMENT.read_text()
    text = text.replace("[parties.bank]", "# since 2020\n[parties.bank]  # the bank")
    EXPERIMENT.write_text(text.replace("[label]", "# ours\n[label]") + "# the end\n")
    return tmp_path / "loans"


@pytest.fixture
def apart(well, tmp_path):
    """A project of several hosts."""
    _, label = write_organisations(tmp_path, "breast-cancer")
    well("init", "loans", "--from", "lender=lender.csv", "--label", label, "--party", "bank",
         "--label-party", "lender", "--host", "lender.example")  # fmt: skip
    return tmp_path / "loans"


def accepted(run, public, folder, read_out=None):
    shown = fingerprint(Path(public).read_bytes()) if read_out is None else read_out
    return run("party", "accept", str(public), folder, "--fingerprint", shown)


def test_a_party_enters_and_leaves_and_every_comment_stays(well, refused, loans):
    before = EXPERIMENT.read_text()
    told = json.loads(
        well("party", "add", "shop", "loans", "--table", "shop.parquet", "--serve", "--json").out
    )
    text = EXPERIMENT.read_text()
    added = '[parties.shop]\nwidth = 32\nbottom = "mlp:hidden=64"\n'
    assert text.replace(f"\n{added}", "") == before
    assert text.index(added) < text.index("# ours\n[label]")
    assert read_experiment(loans / "trial.toml").parties["shop"].source.endswith("shop/party.toml")
    shop = read_party_file(loans / "shop" / "party.toml")
    assert shop.consent.members == ("lender", "bank")
    assert shop.consent.modes == ("train", "evaluate", "predict", "align", "serve")
    assert shop.node.api_port == 9095
    assert "no mistake found" in well("check", "loans/trial.toml").out
    accept = dict(told["then"])["bank"]
    assert read_party_file(loans / "bank/party.toml").consent.members == ("lender",)
    well(*accept.split(" --")[0].split()[1:], "--fingerprint", accept.split('"')[1])
    assert read_party_file(loans / "bank/party.toml").consent.members == ("shop", "lender")
    assert Pin.kept_at(loans / "bank/peers/shop.pub")
    assert Pin.kept_at(loans / "shop/peers/bank.pub")
    assert "needs a name that is not in use" in refused("party", "add", "shop", "loans").err

    well("party", "remove", "shop", "loans")
    assert EXPERIMENT.read_text() == before
    assert not (loans / "label/keys/shop.pub").exists()
    well("party", "remove", "shop", "loans/bank")
    assert read_party_file(loans / "bank/party.toml").consent.members == ("lender",)
    assert not (loans / "bank/peers/shop.pub").exists()
    assert "only feature party" in refused("party", "remove", "bank", "loans").err
    log = well("log", "loans/label/party.toml").out
    assert [name in log for name in ("added: shop", "removed: shop")] == [True, True]


def test_a_party_enters_with_a_table_in_an_encoding_of_its_own(well, refused, loans):
    table = "id;town\n" + "".join(
        f"{row};\u041c\u043e\u0441\u043a\u0432\u0430\n" for row in range(9)
    )
    Path("shop.csv").write_bytes(table.encode("cp1251"))
    well("party", "add", "shop", "loans", "--table", "shop.csv", "--encoding", "Windows-1251")
    assert read_party_file(loans / "shop/party.toml").table.encoding == "cp1251"
    refused("party", "add", "mill", "loans", "--table", "shop.csv", "--encoding", "cp9")


def test_a_party_of_another_host_makes_its_own_keys(well, refused, apart, tmp_path):
    told = json.loads(well("party", "add", "shop", "loans", "--json").out)["then"]
    assert [who for who, _ in told] == ["lender", "shop", "lender", "bank", "shop", "shop",
                                        "lender", "lender"]  # fmt: skip
    assert not list((apart / "shop").glob("*.key"))
    assert "vfl join shop --table TABLE" in (apart / "shop/README.md").read_text()
    (apart / "shop").rename(tmp_path / "shop")
    told = well("join", "shop", "--table", "shop.parquet").out
    assert "consent.members = lender, bank" in told
    public = tmp_path / "shop/shop.pub"
    wrong = accepted(refused, public, "loans", fingerprint(b"ssh-ed25519 AAAA other")).err
    assert "do not have the fingerprint that was read aloud" in wrong
    assert fingerprint(public.read_bytes()) not in wrong
    for typed, count in ((fingerprint(public.read_bytes())[:-5], 28), ("FINGERPRINT", 11)):
        assert f"got   {count} characters" in accepted(refused, public, "loans", typed).err
    assert "by telephone" in refused("party", "accept", str(public), "loans").err
    assert not (apart / "label/keys/shop.pub").exists()
    accepted(well, public, "loans")
    assert (apart / "label/keys/shop.pub").read_bytes() == public.read_bytes()
    public.rename(tmp_path / "mill.pub")
    assert "vfl party add mill" in accepted(refused, "mill.pub", "loans").err
    stays = refused("party", "add", "mill", "loans", "--table", "shop.parquet").err
    assert "stays on that party's own host" in stays


def test_a_party_is_renamed_with_its_ledger(well, refused, loans):
    own = read_party_file(loans / "bank/party.toml")
    own_ledger(own).witness.announce()
    counted = own_ledger(own).witness.read()
    own_ledger(read_party_file(loans / "label/party.toml")).witness.admit("bank", 7)
    before = EXPERIMENT.read_text()
    well("party", "rename", "bank", "house", "loans")
    assert EXPERIMENT.read_text() == before.replace("[parties.bank]", "[parties.house]")
    assert not (loans / "label/keys/bank.pub").exists()
    label = own_ledger(read_party_file(loans / "label/party.toml"))
    assert label.witness.read().peers == {"house": 7}
    well("party", "rename", "bank", "house", "loans/bank")
    file = loans / "bank/party.toml"
    assert tomllib.loads(file.read_text())["party"] == "house"
    assert own_ledger(read_party_file(file)).witness.read() == counted
    assert "renamed: bank is now called house" in well("log", str(file)).out
    assert read_experiment(loans / "trial.toml").feature_parties == ["house"]
    for mistake in (("lender", "other"), ("house", "lender"), ("house", "Big")):
        refused("party", "rename", *mistake, "loans")


def test_a_file_that_cannot_be_edited_stays_as_it_is(refused, loans):
    text = EXPERIMENT.read_text()
    a, b = text.index("# since 2020"), text.index("# ours")
    inline = "parties = { bank = { width = 8 }, lender = {} }\n"
    EXPERIMENT.write_text(inline + text[:a] + text[b:])
    before = EXPERIMENT.read_text()
    done = refused("party", "remove", "bank", "loans").err
    assert "only feature party" in done
    done = refused("party", "add", "shop", "loans").err
    assert "does not edit" in done
    assert EXPERIMENT.read_text() == before
    assert not (loans / "shop").exists()


@pytest.mark.parametrize(
    "members",
    ['members = ["lender"]', "members = [\n    'lender',  # leads\n]", "members = []"],
)
def test_lists_are_edited_as_they_are_written(well, loans, members, tmp_path):
    file = loans / "bank/party.toml"
    text = file.read_text().replace('members = [\n    "lender",\n]', members)
    assert members in text
    file.write_text(text)
    well("party", "add", "shop", "loans", "--table", "shop.parquet")
    accepted(well, "loans/shop/shop.pub", "loans/bank")
    assert read_party_file(file).consent.members[0] == "shop"
    assert file.read_text().count("# leads") == text.count("# leads")
    well("party", "rename", "shop", "store", "loans/bank")
    assert read_party_file(file).consent.members[0] == "store"
    well("party", "remove", "store", "loans/bank")
    assert tomllib.loads(file.read_text()) == tomllib.loads(text)
