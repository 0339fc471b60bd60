import pytest
from pydantic import ValidationError

from vfl.config import (
    Experiment,
    PartyFile,
    check_one_process,
    read_experiment,
    to_toml,
    with_overrides,
)
from vfl.config.validate import of_project, refuse
from vfl.core.errors import ConfigError

FULL = """\
name = "loans"
seed = 7
codec = "randtopk:k=4,alpha=0.1"
defense = "layer_norm"
merge = "sum"

[data]
source = "loans.parquet"
id = "customer"
validation = 0.2
rows = 500

[parties.bank]
width = 16
columns = ["income*", "age"]

[parties.shop]
width = 16
source = "shop.csv"
shape = [1, 4, 4]

[label]
party = "bank"
column = "defaulted"

[train]
optimizer = "sgd"
learning_rate = 0.5
"""


@pytest.fixture
def full(tmp_path):
    path = tmp_path / "full.toml"
    path.write_text(FULL)
    return path


def test_what_a_file_says_and_what_it_leaves_out(full):
    read = read_experiment(full)
    assert (read.name, read.seed, read.merge) == ("loans", 7, "sum")
    assert read.parties["bank"].columns == ("income*", "age")
    assert read.parties["shop"].shape == (1, 4, 4)
    assert (read.train.optimizer, read.train.learning_rate, read.train.epochs) == ("sgd", 0.5, 10)
    assert (read.data.rows, read.data.test, read.label.task) == (500, 0.2, "classification")
    assert list(read.parties) == ["bank", "shop"]


def test_a_written_experiment_reads_the_same(full, tmp_path):
    read = read_experiment(full)
    copy = tmp_path / "copy.toml"
    copy.write_text(to_toml(read))
    again = read_experiment(copy)
    assert again == read
    assert list(again.parties) == list(read.parties)
    assert "epochs = 10" in copy.read_text()


def test_overrides_are_toml_or_plain_text(full):
    overrides = [
        "train.epochs=3",
        "codec=topk:k=2",
        'name="x"',
        "parties.bank.columns=['a', 'b']",
        "parties.bank.width = 8",
        "parties.shop.width=8",
        "label.party=lender",
    ]
    read = read_experiment(full, overrides)
    assert (read.train.epochs, read.codec, read.name) == (3, "topk:k=2", "x")
    assert read.parties["bank"].columns == ("a", "b")
    assert read.parties["shop"].width == 8
    assert read.feature_parties == ["bank", "shop"]


@pytest.mark.parametrize("override", ["epochs", "=3", " =3"])
def test_an_override_of_another_form(full, override):
    with pytest.raises(ConfigError, match=r"an override is key\.path=value") as caught:
        read_experiment(full, [override])
    assert caught.value.got == override


def test_an_override_through_a_value(full):
    with pytest.raises(ConfigError, match="not a table"):
        read_experiment(full, ["seed.more=3"])


def test_overrides_are_checked_as_a_whole(full):
    with pytest.raises(ConfigError, match="leave no training rows"):
        with_overrides(read_experiment(full), ["data.validation=0.5", "data.test=0.5"])


def test_the_label_party_sends_no_cut(full):
    assert read_experiment(full).feature_parties == ["shop"]


def test_class_weights_are_for_classes(full):
    assert read_experiment(full, ["label.class_weight=balanced"]).label.class_weight == "balanced"
    with pytest.raises(ConfigError, match="a regression has no classes"):
        read_experiment(full, ["label.class_weight=balanced", "label.task=regression"])
    with pytest.raises(ConfigError, match=r"label\.class_weight = balance: "):
        read_experiment(full, ["label.class_weight=balance"])


def test_sixty_four_parties_are_the_most():
    parties = {f"p{number}": {} for number in range(65)}
    with pytest.raises(ValidationError, match="at most 64"):
        Experiment.model_validate({"parties": parties})
    del parties["p0"]
    assert len(Experiment.model_validate({"parties": parties}).feature_parties) == 64


def test_bins_of_a_project_are_each_partys_own():
    experiment = Experiment.model_validate({"parties": {"bank": {}}, "data": {"bins": 8}})
    with pytest.raises(ConfigError, match="each party's own file"):
        refuse(of_project(experiment))
    with pytest.raises(ConfigError, match="is for tables"):
        check_one_process(experiment)


@pytest.mark.parametrize(
    ("bins", "shape", "told"), [(8, [1, 2, 2], "images"), (2000, None, "1024")]
)
def test_bins_that_a_party_cannot_have(bins, shape, told):
    data = {"source": "x.csv", "id": "id", "bins": bins} | ({"shape": shape} if shape else {})
    with pytest.raises(ValueError, match=told):
        PartyFile.model_validate({"party": "bank", "data": data})
