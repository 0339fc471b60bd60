"""`model = "trees"`: how a file says it, what it refuses, and what its columns become."""

import numpy as np
import pandas as pd
import pytest

from vfl.config import Experiment
from vfl.config.experiment import read_experiment
from vfl.core.errors import ConfigError, ExposedCutError, SpecError
from vfl.datasets import read_encoder
from vfl.datasets.encode import CellEncoder, Unfamiliar
from vfl.session import secure_mode
from vfl.training.specs import checked, read_checked
from vfl.trees.mode import Trees

CONTENT = {"parties": {"bank": {}, "shop": {}}, "label": {"party": "lender"}}


def test_a_model_is_how_the_parties_compute_together():
    trees = Experiment.model_validate(CONTENT | {"model": "trees:max_depth=2"})
    assert isinstance(secure_mode.make(trees.secure), Trees)
    assert Experiment.model_validate(CONTENT | {"model": "network"}).secure == "none"
    again = Experiment.model_validate(trees.model_dump(mode="json", exclude_none=True))
    assert again == trees


@pytest.mark.parametrize(
    ("more", "kind", "told"),
    [
        ({"model": "trees", "secure": "sum"}, ConfigError, "model"),
        ({"model": "tree"}, SpecError, "trees"),
        ({"model": "trees:max_dept=2"}, SpecError, "max_depth"),
        ({"model": "trees:max_depth=0"}, SpecError, "bound"),
        ({"model": "trees:epsilon=0"}, SpecError, "epsilon"),
        ({"model": "trees", "codec": "topk:k=2"}, ExposedCutError, "codec"),
        ({"model": "trees", "defense": "dcor"}, ExposedCutError, "defense"),
        ({"model": "trees", "defense": "label_dp_two_stage"}, ExposedCutError, "label_dp:epsilon"),
        ({"model": "trees", "train": {"learning_rate": 0.1}}, ExposedCutError, "learning_rate"),
        ({"model": "trees", "train": {"optimizer": "sgd"}}, ExposedCutError, "optimizer"),
        ({"model": "trees", "train": {"batch_size": 9}}, ExposedCutError, "batch_size"),
        ({"model": "trees", "train": {"precision": "bfloat16"}}, ExposedCutError, "precision"),
        ({"model": "trees", "merge": "mean"}, ExposedCutError, "merge"),
        ({"model": "trees", "parties": {"bank": {"width": 3}}}, ExposedCutError, "bank.width"),
        ({"model": "trees", "dp": {"epsilon": 1}}, ConfigError, "dp"),
    ],
)
def test_what_trees_have_no_part_in_is_refused(tmp_path, more, kind, told):
    with pytest.raises(kind, match=told):
        checked(CONTENT | more, "a test")


def test_a_file_says_where_its_model_is_wrong(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text("model = 3\n[parties.bank]\nwidth = 4\n")
    with pytest.raises(ConfigError, match="'model' is a text"):
        read_experiment(path)
    path.write_text("seed = 1\nmodel = 'trees:depth=3'\n[parties.bank]\n")
    with pytest.raises(SpecError, match="model 'trees' has no option 'depth'") as caught:
        read_checked(path)
    assert caught.value.where == "e.toml:2: model"
    with pytest.raises(SpecError, match="model 'trees' has no option 'depth'"):
        checked(CONTENT | {"model": "trees:depth=3"}, "a test")


def test_cells_become_inputs_as_they_stand():
    frame = pd.DataFrame(
        {
            "income": [1.5, None, 2.5, 4.0],
            "city": ["ulm", "bonn", None, "jena"],
            "since": pd.to_datetime(["1970-01-02", None, "1970-01-03", "1970-01-05"]),
            "member": [True, False, True, True],
            "huge": [1e100, -1e100, 2.0, 3.0],
        }
    )
    encoder = CellEncoder.fit(frame[:3])
    counts = Unfamiliar()
    found = encoder.transform(frame, counts)
    nan = np.nan
    most = np.inf
    want = [[1.5, 1, 1, 1, most], [nan, 0, nan, 0, -most], [2.5, nan, 2, 1, 2], [4, nan, 4, 1, 3]]
    np.testing.assert_array_equal(found, np.array(want, np.float32))
    assert counts.counts == {"city": {"unseen_categories": 1}}
    assert encoder.categories == (0, 2, 0, 0, 0)
    assert read_encoder(encoder.to_json()) == encoder
