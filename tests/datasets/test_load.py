from __future__ import annotations

import hashlib
import hmac
import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler

from vfl.core.errors import (
    BadOptionError,
    DataError,
    LabelLeakError,
    MissingColumnError,
    MissingDataError,
    SharedColumnError,
    TooFewRowsError,
    UnknownNameError,
)
from vfl.datasets import (
    Dealing,
    Label,
    OwnTable,
    load_bundled,
    load_for_prediction,
    load_own,
    load_parties,
    load_table,
    read_encoder,
)
from vfl.datasets.load import partition_columns


def customers(rows: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "customer": rng.permutation(rows),
            "income": rng.normal(40, 9, rows),
            "loan_a": rng.normal(size=rows),
            "loan_b": rng.normal(size=rows),
            "basket": rng.choice(["food", "toys"], rows),
            "paid": rng.choice(["no", "yes"], rows),
        }
    )


TWO = {"bank": ["income", "loan_*"], "shop": ["basket"]}


def load_two(frame, **changes):
    options = {
        "id_column": "customer",
        "label": "paid",
        "party_columns": TWO,
        "label_party": "shop",
        "task": "classification",
        "seed": 0,
    }
    asked = options | changes
    table = OwnTable(frame, asked["id_column"])
    label = Label(asked["label_party"], asked["label"], asked["task"])
    return load_table(table, asked["party_columns"], [label], Dealing(asked["seed"]))


def test_digits_halves_at_two_parties_and_labels_at_a_third():
    data = load_bundled("digits", ["bank", "shop"], "lender", Dealing(3))
    assert list(data) == ["bank", "shop", "lender"]
    whole = torch.cat([data["bank"].inputs, data["shop"].inputs], dim=-1)
    np.testing.assert_array_equal(whole[:, 0].numpy(), load_digits().images / 16)
    assert whole.dtype == torch.float32
    assert data["lender"].inputs is None
    assert data["bank"].labels is None
    assert data["lender"].labels.tolist() == load_digits().target.tolist()
    assert data["lender"].classes == tuple(range(10))
    assert len({party.row_digest("s") for party in data.values()}) == 1


def test_mnist_keeps_its_own_test_rows(data_root):
    data = load_bundled("mnist", ["left", "right"], "top", Dealing(0, limit=700), root=data_root)
    assert data["left"].inputs.shape == (700, 1, 28, 14)
    assert data["left"].split.test.tolist() == list(range(600, 700))
    assert len(data["left"].split.validation) == 60
    assert abs(float(data["left"].inputs.mean())) < 0.2
    assert data["top"].labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_unknown_sets_and_limits():
    with pytest.raises(UnknownNameError, match="digit") as caught:
        load_bundled("digit", ["a"], "a", Dealing(0))
    assert "did you mean 'digits'?" in str(caught.value)
    with pytest.raises(BadOptionError, match="limit"):
        load_bundled("digits", ["a"], "a", Dealing(0, limit=0))
    with pytest.raises(TooFewRowsError):
        load_bundled("digits", ["a"], "a", Dealing(0, limit=2))


def test_one_table_dealt_to_two_parties():
    frame = customers()
    data = load_two(frame)
    ordered = frame.assign(key=frame["customer"].astype(str)).sort_values("key")
    assert data["bank"].ids.tolist() == ordered["key"].tolist()
    train = data["bank"].split.train
    numbers = ordered[["income", "loan_a", "loan_b"]].to_numpy()
    want = StandardScaler().fit(numbers[train]).transform(numbers)
    np.testing.assert_allclose(data["bank"].inputs.numpy(), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        data["shop"].inputs.numpy(), pd.get_dummies(ordered["basket"]).to_numpy(dtype=np.float32)
    )
    assert data["shop"].labels.tolist() == (ordered["paid"] == "yes").astype(int).tolist()
    assert data["bank"].labels is None
    assert data["bank"].encoder.names == ("income", "loan_a", "loan_b")


def test_test_rows_do_not_reach_the_encoder():
    frame = customers()
    before = load_two(frame)["bank"]
    changed = frame.copy()
    outside = before.ids[before.split.test]
    changed.loc[changed["customer"].astype(str).isin(outside), "income"] = 1e6
    after = load_two(changed)["bank"]
    assert after.encoder == before.encoder
    assert torch.equal(after.inputs[after.split.train], before.inputs[before.split.train])
    assert not torch.equal(after.inputs, before.inputs)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"label": "payed"}, MissingColumnError),
        ({"id_column": "costumer"}, MissingColumnError),
        ({"party_columns": {"bank": ["incom"], "shop": ["basket"]}}, MissingColumnError),
        ({"party_columns": {"bank": ["*"], "shop": ["basket"]}}, SharedColumnError),
        ({"party_columns": {"bank": ["paid"], "shop": ["basket"]}}, LabelLeakError),
        ({"party_columns": {"bank": ["customer"], "shop": ["basket"]}}, DataError),
        ({"party_columns": {"bank": [], "shop": ["basket"]}}, DataError),
        ({"party_columns": {"shop": []}}, DataError),
        ({"task": "regression"}, DataError),
    ],
)
def test_mistakes_of_an_experiment(changes, error):
    with pytest.raises(error) as caught:
        load_two(customers(), **changes)
    assert type(caught.value) is error


def own(sources, id_column="customer"):
    return {party: OwnTable(source, id_column) for party, source in sources.items()}


def test_one_table_a_party_joined_by_ids(tmp_path):
    frame = customers()
    frame["customer"] = [f"{n:04d}" for n in frame["customer"]]
    frame[["customer", "income", "loan_a", "loan_b"]].iloc[::-1].to_csv(
        tmp_path / "bank.csv", index=False
    )
    frame[["customer", "basket", "paid"]].iloc[5:].to_parquet(tmp_path / "shop.parquet")
    sources = {"bank": tmp_path / "bank.csv", "shop": tmp_path / "shop.parquet"}
    apart = load_parties(own(sources), TWO, [Label("shop", "paid")], Dealing(0))
    joint = load_two(frame.iloc[5:])
    for party in ("bank", "shop"):
        torch.testing.assert_close(apart[party].inputs, joint[party].inputs)
        assert apart[party].row_digest("s") == joint[party].row_digest("s")
    assert torch.equal(apart["shop"].labels, joint["shop"].labels)


def test_tables_a_party_lacks_or_leaves_unused():
    frame = customers()
    with pytest.raises(MissingDataError, match="party 'shop' has no table"):
        load_parties(own({"bank": frame}), TWO, [Label("bank", "paid")], Dealing(0))
    tables = own(dict.fromkeys(["bank", "shop", "post"], frame))
    with pytest.raises(DataError, match="party 'post' has no columns"):
        load_parties(tables, TWO, [Label("shop", "paid")], Dealing(0))


def test_a_digest_belongs_to_one_session_and_follows_its_formula():
    data = load_two(customers())["bank"]
    raw = hashlib.sha256(json.dumps(sorted(map(str, range(60)))).encode()).digest()
    assert data.row_digest("s1") == hmac.new(b"s1", raw, "sha256").hexdigest()
    assert data.row_digest("s1") != data.row_digest("s2")


def test_a_party_shows_counts_only():
    data = load_two(customers())
    assert repr(data["shop"]) == (
        "PartyData(name='shop', rows=60, inputs=(60, 2), labels=True, classes=2, "
        "split=Split(train=42, validation=6, test=12))"
    )
    assert data["shop"].rows == 60


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
    named, columns = own(tables, "id"), {"bank": ["*"]}
    joint = load_parties(named, columns, [Label("shop", "paid")], Dealing(4))
    bank = load_own("bank", OwnTable(tables["bank"], "id", ["*"]), None, Dealing(4))
    shop = load_own("shop", OwnTable(tables["shop"], "id", ()), Label("shop", "paid"), Dealing(4))
    assert torch.equal(bank.inputs, joint["bank"].inputs)
    assert torch.equal(shop.labels, joint["shop"].labels)
    assert shop.inputs is None
    assert shop.classes == ("no", "yes")
    assert bank.classes is None
    assert bank.labels is None
    for part in ("train", "validation", "test"):
        assert getattr(bank.split, part).tolist() == getattr(shop.split, part).tolist()
    assert bank.row_digest("s") == shop.row_digest("s") == joint["bank"].row_digest("s")


def test_pixel_columns_become_pictures_of_the_party(tmp_path):
    data = load_bundled("digits", ["left", "right"], "top", Dealing(0), flatten=True)
    pixels = pd.DataFrame(data["left"].inputs.numpy()).add_prefix("pixel_")
    path = tmp_path / "left.csv"
    pixels.assign(id=range(1797)).to_csv(path, index=False)
    own = load_own("left", OwnTable(path, "", ["pixel_*"], shape=[1, 8, 4]), None, Dealing(0))
    pictures = load_bundled("digits", ["left", "right"], "top", Dealing(0))["left"].inputs
    training = pictures[own.split.train]
    want = (pictures - training.mean()) / training.std(correction=0)
    assert own.inputs.dtype == torch.float32
    torch.testing.assert_close(own.inputs, want, rtol=1e-4, atol=1e-5)


def test_prediction_uses_the_encoder_of_the_training(tables, tmp_path):
    bank = load_own("bank", OwnTable(tables["bank"], "id", ["age", "city"]), None, Dealing(0))
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


def test_what_a_party_may_not_ask(tables):
    with pytest.raises(DataError, match="neither columns nor a label"):
        load_own("bank", OwnTable(tables["bank"], "id", ()), None, Dealing(0))
    with pytest.raises(LabelLeakError):
        load_own(
            "shop", OwnTable(tables["shop"], "id", ["paid"]), Label("shop", "paid"), Dealing(0)
        )
    with pytest.raises(MissingColumnError, match="the label of 'shop'"):
        load_own("shop", OwnTable(tables["shop"], "id", ()), Label("shop", "payed"), Dealing(0))


@given(parties=st.integers(1, 64), extra=st.integers(0, 40))
def test_columns_are_covered_in_order_and_evenly(parties, extra):
    columns = [f"c{n}" for n in range(parties + extra)]
    names = [f"p{n}" for n in range(parties)]
    owned = partition_columns(columns, names)
    assert list(owned) == names
    assert [name for own in owned.values() for name in own] == columns
    sizes = [len(own) for own in owned.values()]
    assert max(sizes) - min(sizes) <= 1
