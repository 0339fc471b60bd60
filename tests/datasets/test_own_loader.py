"""A table that a function of its owner gives: the rows of a file, and errors that quote none."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from vfl.config import Experiment
from vfl.config.party_file import PartyFile
from vfl.core.errors import ConfigError, DataError, SpecError, UnknownNameError
from vfl.core.storage import read_json
from vfl.datasets.files import column_names, first_rows, read_table
from vfl.datasets.table import TableFormat
from vfl.training.run import train


def frame(columns):
    draw = np.random.default_rng(3)
    table = pd.DataFrame({"id": range(80)})
    table[columns] = draw.normal(size=(80, len(columns))).round(3)
    return table


def bank():
    return frame(["income", "age"]).assign(town=["here", "there"] * 40)


def shop():
    return pa.Table.from_pandas(frame(["basket"]), preserve_index=False)


def label():
    return pd.DataFrame({"id": range(80), "paid": [0, 1] * 40})


def broken():
    raise ValueError("the cell of Mrs Miller")


def nothing():
    return [1, 2]


TABLES = {"bank": bank, "shop": shop, "label": label}


def parties(folder, *, own):
    """A party file each, whose table is a function or the file of the same rows."""
    for name, load in TABLES.items():
        (folder / name).mkdir(parents=True)
        source = f"{__name__}:{name}"
        if not own:
            source = "table.csv"
            table = load()
            table = table.to_pandas() if isinstance(table, pa.Table) else table
            table.to_csv(folder / name / source, index=False)
        label_line = '\nlabel = "paid"' if name == "label" else ""
        (folder / name / "party.toml").write_text(
            f'party = "{name}"\n[data]\nsource = "{source}"\nid = "id"{label_line}\n'
        )
    files = {name: {"source": str(folder / name / "party.toml")} for name in TABLES}
    small = {"width": 4, "bottom": "mlp:hidden=8"}
    return Experiment.model_validate(
        {
            "data": {"source": files["label"]["source"]},
            "parties": {name: small | files[name] for name in ("bank", "shop")},
            "label": {"column": "paid", "top": "linear"},
            "train": {"epochs": 2, "batch_size": 16},
        }
    )


def test_it_trains_as_the_file_of_the_same_rows_does(tmp_path):
    digests = []
    for own in (True, False):
        experiment = parties(tmp_path / str(own), own=own)
        train(experiment, tmp_path / f"runs-{own}", "run")
        summary = read_json(tmp_path / f"runs-{own}" / "run" / "summary.json")
        digests.append(summary["weights_sha256"])
    assert digests[0] == digests[1]


def test_a_table_is_read_by_columns_and_by_its_first_rows():
    path, form = f"{__name__}:shop", TableFormat()
    assert column_names(path) == ["id", "basket"]
    assert list(read_table(path, columns=["basket"])) == ["basket"]
    assert len(first_rows(path, form, ["id", "basket"])) == 80


@pytest.mark.parametrize(
    ("name", "kind"),
    [("broken", DataError), ("nothing", DataError), ("bnak", UnknownNameError)],
)
def test_a_function_that_gives_no_table_is_named_without_its_words(name, kind):
    with pytest.raises(kind) as caught:
        read_table(f"{__name__}:{name}")
    assert "Miller" not in f"{caught.value}{caught.value.got}"
    assert name in f"{caught.value.where}"
    assert caught.value.__cause__ is None


def test_a_module_that_is_not_there_says_how_to_bring_it():
    with pytest.raises(SpecError, match="no module 'no_such_rows'") as caught:
        read_table("no_such_rows:bank")
    assert "PYTHONPATH" in caught.value.fix


def test_it_is_asked_no_query(tmp_path):
    file = tmp_path / "party.toml"
    file.write_text(
        f'party = "bank"\n[data]\nsource = "{__name__}:bank"\nid = "id"\nquery = "SELECT 1"\n'
    )
    with pytest.raises(ConfigError, match="query is for a database"):
        PartyFile.read(file)
