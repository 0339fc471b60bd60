from pathlib import Path

import pytest

from vfl.config import Consent, read_party_file

PARTY = """\
party = "bank"
store = "kept/here"

[data]
source = "rows.csv"
id = "customer"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A party's folder, read from elsewhere."""
    home = tmp_path / "bank"
    home.mkdir()
    (home / "party.toml").write_text(PARTY)
    monkeypatch.chdir(tmp_path)
    return home


def test_paths_start_at_the_file(folder):
    party = read_party_file(Path("bank/party.toml"))
    assert party.source_path == folder / "rows.csv"
    assert party.store_path == folder / "kept" / "here"
    assert party.beside(party.node.key) == folder / "node.key"


def test_absolute_paths_stay(folder):
    text = PARTY.replace("rows.csv", "/data/rows.csv")
    (folder / "party.toml").write_text(text)
    assert read_party_file(folder / "party.toml").source_path == Path("/data/rows.csv")


def test_rows_to_predict(folder):
    path = folder / "party.toml"
    assert read_party_file(path).predict_path == folder / "rows.csv"
    path.write_text(PARTY + 'predict = "new.csv"\n')
    assert read_party_file(path).predict_path == folder / "new.csv"


def test_a_party_that_says_nothing_about_consent(folder):
    consent = read_party_file(folder / "party.toml").consent
    assert consent == Consent()
    assert consent.codecs == consent.defenses == ("*",)
    assert consent.modes == ("train", "evaluate", "predict", "align")
    assert (consent.min_common, consent.min_ids, consent.max_alignments) == (100, 100, 10)
    assert (consent.max_id_ratio, consent.ranges) == (20, {})
    assert (consent.max_width, consent.max_epochs) == (256, 100)
    assert consent.max_bytes == 10**10
    assert consent.versions == ()


def test_consent_of_its_own(folder):
    table = '[consent]\ncodecs = ["randtopk:*"]\nmax_width = 8\nmodes = ["predict"]\n'
    (folder / "party.toml").write_text(PARTY + table)
    consent = read_party_file(folder / "party.toml").consent
    assert (consent.codecs, consent.max_width) == (("randtopk:*",), 8)
    assert consent.modes == ("predict",)
