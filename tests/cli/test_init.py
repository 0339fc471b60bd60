from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from vfl.config import read_experiment, read_party_file
from vfl.config.validate import of_project, refuse


def test_a_project_with_the_addresses_that_were_given(vfl):
    names = ["--party", "bank", "--party", "shop", "--label-party", "lender"]
    done = vfl("init", "project", *names, "--host", "lender.example")
    assert (done.code, done.out) == (0, "")
    assert "project/README.md" in done.err
    experiment = read_experiment(Path("project/label/app/experiment.toml"))
    assert (experiment.name, experiment.feature_parties) == ("project", ["bank", "shop"])
    assert experiment.label.party == "lender"
    assert experiment.federation.superlink == "lender.example:8000"
    assert experiment.federation.stream_host == "lender.example"
    assert experiment.federation.stream_port == 8001
    bank, shop = (
        read_party_file(Path("project") / name / "party.toml") for name in ("bank", "shop")
    )
    assert bank.node.superlink == shop.node.superlink == "lender.example:8000"
    assert bank.node.api_port != shop.node.api_port
    lender = read_party_file(Path("project/label/party.toml"))
    assert (lender.party, lender.data.label) == ("lender", "label")


def test_a_dealer_has_a_folder_and_no_data(well, tmp_path):
    well("init", "loans", "--party", "bank", "--dealer", "notary", "--label-party", "lender")
    folder = tmp_path / "loans"
    own = {str(path.relative_to(folder / "notary")) for path in (folder / "notary").rglob("*.*")}
    assert own >= {"party.toml", "node.key", "identity.key", "ca.pem", "peers/bank.pub"}
    assert (folder / "bank" / "peers" / "notary.pub").exists()
    assert (folder / "label" / "keys" / "notary.pub").exists()
    text = (folder / "notary" / "party.toml").read_text()
    assert 'role = "dealer"' in text
    assert "[data]" not in text
    shown = (folder / "label" / "app" / "experiment.toml").read_text()
    assert 'secure = "beaver:dealer=notary"' in shown
    assert "notary (a dealer, without data)" in (folder / "README.md").read_text()
    told = well("check", folder / "notary" / "party.toml")
    assert "pinned keys: bank" in told.out


def test_a_project_on_rows_of_each_party(vfl, well, tmp_path):
    asked = ("init", "loans", "--party", "shop", "--label-party", "bank", "--label", "paid")
    assert vfl(*asked, "--secure", "pea").code == 2, "who deals is not said"
    well(*asked, "--secure", "pea", "--dealer", "notary")
    rows = "id,a,b,paid\n" + "".join(f"{row},{row % 7},{row % 3},{row % 2}\n" for row in range(60))
    for folder in ("label", "shop"):
        (tmp_path / "loans" / folder / "data.csv").write_text(rows)
    told = well("check", "loans")
    assert "bank, shop learn the model at the end" in told.out
    assert "training rows of all parties" in told.out
    own = well("check", "loans/shop/party.toml")
    assert "rows                     60" in own.out
    assert "shop (own rows)" in (tmp_path / "loans" / "README.md").read_text()


ROLES = {
    "--middle": ("compute", {"middle": ("compute",)}, "the model between the bottoms and the top"),
    "--task": ("insurer", {"label_parties": ("insurer",)}, "own labels, a top model"),
}


@pytest.mark.parametrize("option", ROLES)
def test_a_third_party_takes_cuts_of_who_consents(well, tmp_path, option):
    name, consents, told = ROLES[option]
    well("init", "loans", "--party", "bank", "--party", "shop", option, name)
    folder = tmp_path / "loans"
    for party in ("bank", "shop", name):
        own = read_party_file(folder / party / "party.toml")
        allowed = {key: getattr(own.consent, key) for key in ("middle", "label_parties")}
        nobody = {"middle": (), "label_parties": ()}
        assert allowed == (nobody if party == name else nobody | consents)
        assert (folder / "label" / "keys" / f"{party}.pub").exists()
        if party != name:
            assert (folder / party / "peers" / f"{name}.pub").exists()
    assert read_party_file(folder / name / "party.toml").role == (
        "middle" if option == "--middle" else "data"
    )
    assert told in (folder / "README.md").read_text()
    experiment = read_experiment(folder / "label/app/experiment.toml")
    refuse(of_project(experiment))
    assert (experiment.middle or experiment.tasks[0]).party == name
    if option == "--middle":
        well("check", folder / name / "party.toml")


def test_tables_of_two_label_parties_become_a_project(well, refused, tmp_path):
    """Its trial aligns all four and trains both tasks in one process, with no edited file."""
    draw, rows = np.random.default_rng(0), 300
    ids = np.array([f"{10**21 + row}" for row in range(rows)])  # one number in float64
    cells = {name: draw.normal(size=(rows, 2)) for name in ("bank", "shop")}
    tables = {name: {"a": own[:, 0], "b": own[:, 1]} for name, own in cells.items()}
    tables["clinic"] = {"ill": np.where(cells["bank"][:, 0] > 0, "yes", "no")}
    tables["insurer"] = {"cost": 7000 + 100 * cells["shop"][:, 0], "town": ["A", "B"] * (rows // 2)}
    given = []
    for name, columns in tables.items():
        written = [f"{one}.0" for one in ids] if name == "insurer" else ids
        own = pd.DataFrame({"id": written, **columns}).sample(frac=0.9, random_state=len(name))
        own.to_csv(tmp_path / f"{name}.csv", index=False)
        given += ["--from", f"{name}={tmp_path / name}.csv"]
    named = ("--label-party", "clinic", "--label", "ill", "--task")
    told = refused("init", "loans", *given, *named, "insurer")
    assert "--task insurer=COLUMN" in told.err
    well("init", "loans", *given, *named, "insurer=cost")
    folder = tmp_path / "loans"
    experiment = read_experiment(folder / "label/app/experiment.toml")
    refuse(of_project(experiment))
    assert experiment.feature_parties == ["bank", "shop"]
    assert (experiment.tasks[0].task, experiment.data.alignment) == ("regression", "alignment")
    assert experiment.data.id_rules == "decimal+zeros"
    insurer = read_party_file(folder / "insurer/party.toml")
    assert (insurer.data.label, insurer.data.columns) == ("cost", None)
    well("align", folder / "trial.toml", "-s", "align.protocol=server_aided")
    trained = well("train", folder / "trial.toml", "-s", f"data.alignment={folder / 'alignment'}")
    assert "insurer" in trained.out


def test_gaps_are_consented_to_and_need_an_alignment(well, tmp_path):
    well("init", "loans", "--party", "bank", "--gaps", "--serve")
    data = read_experiment(tmp_path / "loans/label/app/experiment.toml").data
    assert (data.missing_rows, data.alignment) == ("token", "alignment")
    consent = read_party_file(tmp_path / "loans/bank/party.toml").consent
    assert consent.missing_rows == ("intersection", "token")
    assert "serve" in consent.modes
    well("init", "others", "--party", "bank")
    consent = read_party_file(tmp_path / "others/bank/party.toml").consent
    assert consent.missing_rows == ("intersection",)
