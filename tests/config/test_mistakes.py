"""Every mistake of a file is told at once, with its line and the nearest thing that exists."""

import tomllib

import pytest

from vfl.config import (
    Experiment,
    Locations,
    read_experiment,
    read_party_file,
    with_overrides,
)
from vfl.config.edit import Edit
from vfl.core.errors import ConfigError, SpecError
from vfl.training.specs import read_checked, spec_mistakes

FOUR_MISTAKES = """\
name = "trial"

[data]
source = "digits"

[label]
party = "lender"
tp = "linear"

[parties.bank]
width = 16
bottom = "mlp:hidden=64"

[parties.shop]
width = 0
colums = ["a*"]

[train]
epoch = 3
"""


@pytest.fixture
def read(tmp_path):
    """Reads a text as an experiment file; gives the lines of the error."""

    def lines_of(text, overrides=(), reader=read_experiment):
        path = tmp_path / "bad.toml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            reader(path, overrides) if overrides else reader(path)
        return str(caught.value).split("\n")

    return lines_of


def test_four_mistakes_of_one_file(read):
    first, *mistakes, page = read(FOUR_MISTAKES)
    assert first == "error[V003]: 4 problems in bad.toml"
    assert sorted(mistakes) == [
        "  bad.toml:15: parties.shop.width = 0: input should be greater than or equal to 1",
        "  bad.toml:16: no setting is called 'parties.shop.colums'; did you mean 'columns'?",
        "  bad.toml:19: no setting is called 'train.epoch'; did you mean 'epochs'?",
        "  bad.toml:8: no setting is called 'label.tp'; did you mean 'top'?",
    ]
    assert page == "  more  vfl explain V003"


def test_what_is_missing(read):
    assert read("seed = 1")[:2] == [
        "error[V003]: 1 problem in bad.toml",
        "  bad.toml: 'parties' is missing",
    ]
    party = 'party = "bank"\n[data]\nsource = "rows.csv"\n'
    assert "  bad.toml:2: 'data.id' is missing" in read(party, reader=read_party_file)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (
            '[ "parties" . bank ]\n"width" = 0 # none',
            "2: parties.bank.width = 0: input should be greater than or equal to 1",
        ),
        ('[parties.bank]\n[train]\nkeep = "worst"', "3: train.keep = worst: input"),
        ("[parties.bank]\n[train]\nlearning_rate = inf", "3: train.learning_rate = inf: input"),
        ('[parties.bank]\ncolumns = ["a", 3]', "2: parties.bank.columns.1 = 3: input"),
        ("[parties.bank]\nwidth = [1]", "2: parties.bank.width = a list: input"),
        ("seed = -1\n[parties.bank]", "1: seed = -1: input"),
        ('name = "../up"\n[parties.bank]', "1: name = ../up: string"),
        ("[parties.Bank]", "1: the name of parties.Bank: string"),
        ("[parties.bank]\n[grid]\nattacks = []", "3: grid.attacks = []: want 1 or more"),
        ("[parties]", "1: parties = a table: dictionary should have at least 1 item"),
    ],
)
def test_a_mistake_stands_where_it_was_made(read, text, mistake):
    lines = read(text)
    assert len(lines) == 3
    assert lines[1].startswith(f"  bad.toml:{mistake}")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (
            "[parties.label]",
            "no feature party: every party in 'parties' is the label party",
        ),
        (
            "[parties.a]\n[data]\nsource = 'rows.csv'\nside = 8",
            "data.side is for data sets by name, but this is a table",
        ),
        (
            "[parties.a]\n[data]\nvalidation = 0.5\ntest = 0.5",
            "data.validation + data.test leave no training rows",
        ),
    ],
)
def test_settings_that_do_not_go_together(read, text, mistake):
    assert read(text)[1] == f"  bad.toml: {mistake}"


@pytest.mark.parametrize(
    ("text", "overrides", "where", "fix"),
    [
        ("model = 'netwrk'", (), "bad.toml:1: model", "did you mean 'network'?"),
        ("model = 'sum:bits=8'", (), "bad.toml:1: model", "secure = 'sum:bits=8'"),
        ("seed = 3", ["model=netwrk"], "bad.toml: model", "did you mean 'network'?"),
        ("secure = 'sun'", (), "bad.toml:1: secure", "did you mean 'sum'?"),
    ],
)
def test_a_model_that_is_none_is_called_by_its_own_setting(tmp_path, text, overrides, where, fix):
    path = tmp_path / "bad.toml"
    path.write_text(f"{text}\n[parties.bank]\n[parties.shop]\n")
    with pytest.raises(SpecError) as caught:
        read_checked(path, overrides)
    assert (caught.value.where, caught.value.fix) == (where, fix)


def test_folds_and_measures_that_are_not_there_are_told_together(read):
    text = "[parties.a]\n[data]\nfolds = 5\nfold = 6\n[label]\ntask = 'regression'\nhits = 20"
    assert sorted(read(text)[1:-1]) == [
        "  bad.toml:2: data: fold = 6, and data.folds is 5",
        "  bad.toml:5: label: hits is for classification; a regression has no classes",
    ]
    assert "fold = 2, and data.folds is not set" in read("[parties.a]\n[data]\nfold = 2")[1]
    wrong = read("[parties.a]\n[data]\nfolds = 1\nside = 0\nvocabulary = 2\n[label]\nhits = -1")
    assert len(wrong[1:-1]) == 4


def test_what_a_table_on_disk_cannot_give_is_told_together(read):
    text = "[parties.a]\n[data]\nsource = 'rows.csv'\nmemory = '1 GiB'\nfolds = 3\nrows = 9"
    labels, rows = (line.removeprefix("  bad.toml:2: data: ") for line in read(text)[1:-1])
    assert labels.startswith("memory keeps the table on disk, but folds and strata need all")
    assert rows.startswith("memory keeps the table on disk, which always uses all its rows")
    stratified = text.replace("folds = 3\nrows = 9", "split = 'stratified'")
    assert "folds and strata" in read(stratified)[1]


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        (
            "[data]\nsource = 'mnist'\nfolds = 3\n[label]\nparty = 'lender'\n[parties.bank]\n",
            ["data.folds: folds take turns as test rows"],
        ),
        (
            "codec = 'tpk'\nsecure = 'pea'\n[data]\nid = 'id'\nrows = 9\nsource = 'north.csv'\n"
            "[label]\nparty = 'north'\ncolumn = 'y'\n[parties.north]\ncolumns = ['a']\n"
            "[parties.east]\nsource = 'east.csv'\n",
            [
                "codec: no codec is called 'tpk'",
                "parties.north.columns: parties with separate rows have all columns",
                "data.rows: parties with separate rows always use all of them",
            ],
        ),
    ],
    ids=["test rows of a set", "rows of parties"],
)
def test_a_training_in_one_process_is_refused_before_rows_are_read(tmp_path, text, mistakes):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_checked(path)
    told = str(caught.value)
    assert not [one for one in mistakes if one.partition(": ")[2] not in told]
    assert not [one for one in mistakes if one.partition(": ")[0] not in told]


PEA = """\
secure = "pea:dealer=notary,start=average"
merge = "concat"
[data]
source = "rows.csv"
id = "id"
validation = 0
[label]
party = "north"
column = "y"
top = "linear"
[train]
optimizer = "sgd"
momentum = 0
[parties.north]
bottom = "identity"
[parties.east]
bottom = "identity"
"""


@pytest.mark.parametrize(
    ("dp", "what"),
    [
        ("", "the model is revealed, and without noise"),
        ("[dp]\nnoise = 1.0\n", "training a model at each holder needs whole rows"),
        ("[dp]\nepsilon = 1.0\nclip_by = 'layer'\n", "clipped to one public norm"),
        ("[dp]\nepsilon = 1.0\n", None),
    ],
    ids=["missing", "noise", "layer", "epsilon"],
)
def test_pea_is_checked_together_with_its_noise(dp, what):
    content = tomllib.loads(PEA + dp)
    found = [error.what for _, error in spec_mistakes(content)]
    assert bool(found) == bool(what)
    assert not what or what in found[0]


def test_a_file_that_is_no_toml(read):
    first, where, _ = read("[parties.bank]\n[train\n")
    assert first.startswith("error[V003]: this is not TOML: ")
    assert "line 2" in first
    assert where.endswith("bad.toml")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "picture.toml").write_bytes(b"\xff\xd8\xff\xe0")
    for name, reason in [
        ("absent.toml", "this file does not exist"),
        ("picture.toml", "this file cannot be read: it is no text in UTF-8"),
        (".", "this file cannot be read: Is a directory"),
    ]:
        with pytest.raises(ConfigError) as caught:
            read_experiment(tmp_path / name)
        assert caught.value.what == reason


def test_a_file_with_a_byte_order_mark_is_read_located_and_edited(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[parties.bank]\r\n[train]\r\nepochs = 7\r\n")
    assert read_experiment(path).train.epochs == 7
    assert Locations.of(path).before(["train", "epochs"]) == "windows.toml:3: "
    assert "epochs = 7" in Edit(str, dict).of(path, Experiment).text


def test_a_former_name_is_accepted_and_its_new_one_said(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text("[parties.bank]\n[train]\nbatch_rows = 7")
    with pytest.warns(FutureWarning, match="'batch_rows' is called 'batch_size' now"):
        former = read_experiment(path)
    with pytest.warns(FutureWarning, match="'batch_rows' is called 'batch_size' now"):
        assert with_overrides(former, ["train.batch_rows=9"]).train.batch_size == 9
    assert former.train.batch_size == 7


def test_a_former_name_beside_its_new_one_is_a_mistake(read):
    (_, line, *_) = read("[parties.bank]\n[train]\nbatch_rows = 7\nbatch_size = 7")
    assert line == (
        "  bad.toml:3: no setting is called 'train.batch_rows'; did you mean 'batch_size'?"
    )


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("bamk.toml", "did you mean 'bank.toml'?"),
        ("nothing.txt", "the folder contains: bank.toml"),
        ("folder/bank.toml", "an existing folder; "),
    ],
)
def test_a_file_that_is_missing_is_looked_for(tmp_path, name, fix):
    (tmp_path / "bank.toml").touch()
    with pytest.raises(ConfigError, match="this file does not exist") as problem:
        read_experiment(tmp_path / name)
    assert problem.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("content", "setting", "what"),
    [
        ({"align": {"protocol": "ecdhh"}}, ("align", "protocol"), "is called 'ecdhh'"),
        ({"align": {"protocol": "ecdh:key=1"}}, ("align", "protocol"), "has no option 'key'"),
        ({"data": {"id_rules": "plain+cas"}}, ("data", "id_rules"), "no id rule is called 'cas'"),
        ({"align": {"protocol": "ecdh"}, "data": {"id_rules": "plain+case"}}, None, ""),
    ],
)
def test_specs_of_an_alignment_are_checked_before_it_runs(content, setting, what):
    found = list(spec_mistakes(content))
    assert [one for one, _ in found] == ([] if setting is None else [setting])
    assert all(what in error.what for _, error in found)
