from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from vfl.datasets import load_bundled, load_for_prediction, load_own, load_tables, read_encoder
from vfl.errors import DataError, LabelLeakError, MissingColumnError


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(0)
    ids = [f"c{n:03d}" for n in range(50)]
    return {
        "bank": pd.DataFrame(
            {"id": rng.permutation(ids), "age": rng.normal(size=50), "city": ["Ulm", "Bonn"] * 25}
        ),
        "shop": pd.DataFrame({"id": rng.permutation(ids), "paid": ["no", "yes"] * 25}),
    }


def test_each_party_alone_loads_what_the_joint_form_gives_it(tables):
    joint = load_tables(tables, "id", "paid", {"bank": ["*"]}, "shop", "classification", seed=4)
    bank = load_own("bank", tables["bank"], "id", ["*"], None, "classification", seed=4)
    shop = load_own("shop", tables["shop"], "id", None, "paid", "classification", seed=4)
    assert torch.equal(bank.inputs, joint["bank"].inputs)
    assert torch.equal(shop.labels, joint["shop"].labels)
    assert shop.inputs is None
    assert shop.classes == ("no", "yes")
    assert bank.classes is None
    assert bank.labels is None
    for part in ("train", "validation", "test"):
        assert getattr(bank.split, part).tolist() == getattr(shop.split, part).tolist()
    assert bank.row_digest("s") == shop.row_digest("s") == joint["bank"].row_digest("s")


def test_tables_of_other_rows_have_another_digest(tables):
    whole = load_own("bank", tables["bank"], "id", ["age"], None, "classification", seed=0)
    fewer = load_own("bank", tables["bank"].iloc[1:], "id", ["age"], None, "classification", seed=0)
    other = tables["bank"].replace({"id": {"c007": "c777"}})
    changed = load_own("bank", other, "id", ["age"], None, "classification", seed=0)
    assert len({party.row_digest("s") for party in (whole, fewer, changed)}) == 3


def test_pixel_columns_become_pictures_of_the_party(tmp_path):
    data = load_bundled("digits", ["left", "right"], seed=0, label_party="top", flatten=True)
    pixels = pd.DataFrame(data["left"].inputs.numpy()).add_prefix("pixel_")
    path = tmp_path / "left.csv"
    pixels.assign(id=range(1797)).to_csv(path, index=False)
    own = load_own("left", path, None, ["pixel_*"], None, "classification", seed=0, shape=[1, 8, 4])
    pictures = load_bundled("digits", ["left", "right"], seed=0, label_party="top")["left"].inputs
    training = pictures[own.split.train]
    want = (pictures - training.mean()) / training.std(correction=0)
    assert own.inputs.dtype == torch.float32
    torch.testing.assert_close(own.inputs, want, rtol=1e-4, atol=1e-5)


def test_prediction_uses_the_encoder_of_the_training(tables, tmp_path):
    bank = load_own("bank", tables["bank"], "id", ["age", "city"], None, "classification", seed=0)
    stored = read_encoder(bank.encoder.to_json())
    few = tables["bank"].iloc[[8, 3]].assign(city=["Ulm", "Jena"])
    new = load_for_prediction("bank", few, "id", stored)
    place = {row: position for position, row in enumerate(bank.ids)}
    for position, row in enumerate(new.ids):
        assert new.inputs[position, 0] == bank.inputs[place[row], 0]
    cities = dict(zip(few["id"], few["city"], strict=True))
    assert [cities[row] for row in new.ids] == [
        "Ulm" if inputs[1:].any() else "Jena" for inputs in new.inputs
    ]
    assert new.split.test.tolist() == [0, 1]
    assert len(new.split.train) == 0
    assert new.labels is None


def test_prediction_of_a_party_without_inputs_and_of_one_that_lacks_a_column(tables):
    assert load_for_prediction("shop", tables["shop"], "id", None).inputs is None
    bank = load_own("bank", tables["bank"], "id", ["age"], None, "classification", seed=0)
    with pytest.raises(MissingColumnError, match="age"):
        load_for_prediction("bank", tables["shop"], "id", bank.encoder)


def test_both_kinds_of_encoder_are_read_again(tables):
    frame = pd.DataFrame(np.random.default_rng(0).random((30, 4)), columns=list("wxyz"))
    flat = load_own("a", frame, None, ["*"], None, "classification", seed=0).encoder
    pictures = load_own("a", frame, None, ["*"], None, "classification", 0, shape=(1, 2, 2)).encoder
    for encoder in (flat, pictures):
        again = read_encoder(encoder.to_json())
        assert again == encoder
        np.testing.assert_array_equal(again.transform(frame), encoder.transform(frame))
    for text in ("", "[]", '{"encoder": "trees"}', json.dumps({"encoder": []})):
        with pytest.raises(DataError, match="not a stored encoder"):
            read_encoder(text)


def test_what_a_party_may_not_ask(tables):
    with pytest.raises(DataError, match="neither columns nor a label"):
        load_own("bank", tables["bank"], "id", None, None, "classification", seed=0)
    with pytest.raises(LabelLeakError):
        load_own("shop", tables["shop"], "id", ["paid"], "paid", "classification", seed=0)
    with pytest.raises(MissingColumnError, match="the label of 'shop'"):
        load_own("shop", tables["shop"], "id", None, "payed", "classification", seed=0)
