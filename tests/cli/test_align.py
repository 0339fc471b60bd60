import json

import pytest
from cut_tables import cut, real_table

EXPERIMENT = """\
[data]
id = "key"
source = "label.csv"
[parties.bank]
source = "bank.csv"
[parties.shop]
source = "shop.csv"
[label]
column = "y"
[train]
epochs = 1
"""


@pytest.fixture
def experiment(tmp_path, data_root):
    frame, label = real_table(data_root, "bank")
    common = cut(frame, label, tmp_path, overlap=0.9, rows=600)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return len(common)


def test_preview_align_and_train(vfl, well, refused, experiment):
    done = refused("align", "experiment.toml")
    assert "no ids are common" in done.err
    done = vfl("align", "experiment.toml", "--preview", "-s", "align.protocol=server_aided")
    last = done.out.splitlines()[-2].split()
    assert last[:2] == ["plain+space+case+decimal+zeros", str(experiment)]
    rules = ("-s", "data.id_rules=decimal+zeros")
    done = vfl("align", "experiment.toml", *rules)
    assert f"common rows      {experiment}" in done.out
    command = next(line for line in done.out.splitlines() if line.startswith("then")).split()
    assert command[1:3] == ["vfl", "train"]
    well(*command[2:], *rules)
    done = vfl("align", "experiment.toml", *rules, "--json")
    facts = json.loads(done.out)
    assert (facts["common"], facts["reused"]) == (experiment, True)


def test_a_protocol_that_is_none_is_refused(refused, experiment):
    done = refused("align", "experiment.toml", "-s", "align.protocol=ecd")
    assert "did you mean 'ecdh'?" in done.err


def test_what_joining_buys_without_knowing_who_is_common(vfl, refused, tmp_path, data_root):
    frame, label = real_table(data_root, "bank")
    cut(frame, label, tmp_path, overlap=0.9)
    two = EXPERIMENT.replace('[parties.bank]\nsource = "bank.csv"\n', "")
    (tmp_path / "experiment.toml").write_text(two)
    asked = ("align", "experiment.toml", "-s", "data.id_rules=decimal+zeros", "--hidden", "5000")
    done = vfl(*asked)
    starts = [line.split()[0] for line in done.out.splitlines()]
    assert starts == ["common", "explained", "label", "shop", "both", "sent"]
    found = json.loads(vfl(*asked, "--json").out)
    assert 3000 < found["common"] < 4521
    assert found["explained"]["shop"] > 0.1 > abs(found["explained"]["label"])
    assert not (tmp_path / "alignment").exists()
    refused(*asked[:-1], "50")
