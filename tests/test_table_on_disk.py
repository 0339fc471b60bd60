"""A training on a table that lies on disk, from the file to the weights."""

import numpy as np
import pandas as pd
import pytest

from vfl.config import Experiment, PartyFile, read_experiment
from vfl.core.errors import ConfigError
from vfl.core.storage import read_lines
from vfl.datasets.mapped_tensor import MappedTensor
from vfl.session import Terms
from vfl.session.store.party_folder import own_data
from vfl.training.local import LocalSession
from vfl.training.run import load_data, train

ROWS = 10_000
TRAIN = {"epochs": 2, "batch_size": 100, "shuffle": "blocks", "block_rows": 512, "window_blocks": 4}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Categories and booleans are encoded alike to the bit, wherever rows lie."""
    draw = np.random.default_rng(0)
    town = draw.choice(["Ulm", "Bonn", "Kiel"], ROWS)
    owner = draw.random(ROWS) < 0.4
    paid = (town == "Ulm") ^ owner ^ (draw.random(ROWS) < 0.1)
    frame = pd.DataFrame({"id": draw.permutation(ROWS), "town": town, "owner": owner})
    path = tmp_path_factory.mktemp("table") / "table.parquet"
    frame.assign(paid=np.where(paid, "yes", "no")).to_parquet(path, row_group_size=3000)
    return path


def experiment_of(folder, table, memory="64MiB", **changes):
    settings = {"seed": 3} | changes
    lines = [
        *(f"{name} = {value}" for name, value in settings.items()),
        f'[data]\nsource = "{table}"\nid = "id"',
        f'memory = "{memory}"' if memory else "",
        '[parties.bank]\nwidth = 8\ncolumns = ["town"]\n[parties.shop]\nwidth = 8',
        'columns = ["owner"]\n[label]\nparty = "lender"\ncolumn = "paid"\n[train]',
        *(f"{name} = {value!r}" for name, value in TRAIN.items()),
    ]
    path = folder / "experiment.toml"
    path.write_text("\n".join(lines))
    return read_experiment(path)


def test_it_trains_to_the_weights_of_the_table_in_memory(tmp_path, table):
    disk, kept = (
        train(experiment_of(tmp_path, table, memory), tmp_path / "runs", name)
        for name, memory in (("disk", "64MiB"), ("kept", None))
    )
    assert disk["weights_sha256"] == kept["weights_sha256"]
    assert disk["test_loss"] == kept["test_loss"]
    assert disk["test_accuracy"] > 0.85


def test_an_interrupted_training_ends_where_the_whole_one_ends(tmp_path, table):
    experiment = experiment_of(tmp_path, table)
    whole = train(experiment, tmp_path, "whole")

    def stop(record):
        if record["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(experiment, tmp_path, "cut", on_epoch=stop)
    resumed = train(experiment, tmp_path, "cut", resume=True)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    losses = [
        [one["train_loss"] for one in read_lines(tmp_path / run / "metrics.jsonl")]
        for run in ("cut", "whole")
    ]
    assert losses[0] == losses[1]


def test_one_party_may_have_its_table_on_disk_and_another_in_memory(tmp_path, table):
    """Each reads its own file; rows, split and batches are the same, and so are the weights."""
    parties = {"bank": {"width": 8}, "shop": {"width": 8}}
    experiment = Experiment.model_validate(
        {"parties": parties, "label": {"party": "lender"}, "train": TRAIN}
    )
    terms = Terms.of(experiment, "train", "trial")

    def digest(memory):
        data = {}
        for name, columns in (("bank", ["town"]), ("shop", ["owner"]), ("lender", [])):
            own = {"source": str(table), "id": "id", "columns": columns, "id_type": "number"}
            own |= {"label": "paid"} if name == "lender" else {}
            own |= {"memory": "64MiB"} if name in memory else {}
            content = {"party": name, "data": own, "store": str(tmp_path / name)}
            data[name] = own_data(PartyFile.model_validate(content), terms, "classification")
            assert isinstance(data[name].inputs, MappedTensor) == (name in memory[:1])
        assert len({one.row_digest("s") for one in data.values()}) == 1
        return LocalSession(experiment, data, outputs=2).run().weights_digest()

    assert digest(["bank", "lender"]) == digest([]) == digest(["shop"])


@pytest.mark.parametrize("memory", ["63MiB", "1", "1 TB", "GiB", "-1GiB"])
def test_a_size_that_is_none_is_refused(tmp_path, table, memory):
    with pytest.raises(ConfigError, match=r"data\.memory"):
        experiment_of(tmp_path, table, memory)


def test_what_cannot_be_on_disk_is_refused(tmp_path, table):
    content = {"parties": {"bank": {}}, "data": {"memory": "1GiB"}}
    with pytest.raises(ConfigError, match="one table"):
        load_data(Experiment.model_validate(content))
    with pytest.raises(ConfigError, match=r"train\.shuffle"):
        experiment_of(tmp_path, table, dp="{ noise = 1.0 }")
