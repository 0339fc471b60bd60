"""Rows that no session has: their owner's bottom learns from them, and nothing else does."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from vfl.config import Experiment, PartyFile, with_overrides
from vfl.datasets.alignment.positions import Alignment
from vfl.session import Terms
from vfl.session.store.party_folder import own_data
from vfl.training import alignment
from vfl.training.local import LocalSession
from vfl.training.run import load_data

COLUMNS = {"bank": ["age", "income"], "shop": ["basket", "visits"]}


@pytest.fixture
def folder(tmp_path):
    """400 rows at each feature party, of which the label party knows 100."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(400, 4)), columns=[*COLUMNS["bank"], *COLUMNS["shop"]])
    frame["key"] = draw.permutation(9000)[:400]
    frame["y"] = (frame["age"] + frame["basket"] > 0).astype(int)
    for party, columns in COLUMNS.items():
        own = frame[["key", *columns]].sample(frac=1, random_state=1)
        own.to_csv(tmp_path / f"{party}.csv", index=False)
    frame[["key", "y"]][:100].to_csv(tmp_path / "label.csv", index=False)
    return tmp_path


def experiment(folder, *settings):
    content = {
        "defense": "pretrained:epochs=3",
        "data": {"source": str(folder / "label.csv"), "id": "key", "id_type": "number"},
        "parties": {name: {"width": 4, "source": str(folder / f"{name}.csv")} for name in COLUMNS},
        "label": {"column": "y"},
        "train": {"epochs": 1, "batch_size": 32},
    }
    return with_overrides(Experiment.model_validate(content), settings)


def as_encoded(data, folder, party):
    """The other rows of a party's file, standardised by hand with its training rows."""
    own = data[party]
    cells = pd.read_csv(folder / f"{party}.csv").set_index("key")
    known = cells.loc[own.ids[own.split.train]]
    others = cells.drop(own.ids)
    return (others - known.mean()) / known.std(ddof=0)


def test_they_are_the_rows_that_others_lack(folder):
    data = load_data(experiment(folder))
    assert data["label"].unaligned is None
    for party in COLUMNS:
        want = as_encoded(data, folder, party).sort_index().to_numpy()
        assert len(want) == 300
        np.testing.assert_allclose(data[party].unaligned.numpy(), want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("defense", ["none", "label_free", "pretrained:unaligned=no"])
def test_what_does_not_look_at_them_does_not_load_them(folder, defense):
    data = load_data(experiment(folder, f"defense={defense}"))
    assert all(own.unaligned is None for own in data.values())


def first_weights(settings, data):
    session = LocalSession(settings, data, outputs=2)
    for client in session.clients:
        client.start()
    return session.weights()


@pytest.mark.parametrize(
    "spec",
    ["pretrained:epochs=2", "label_free:kind=scarf,epochs=2,unaligned=yes",
     "label_free:features=0,unaligned=yes"],
)  # fmt: skip
def test_a_bottom_learns_from_them(folder, spec):
    settings = experiment(folder, f"defense={spec}")
    data = load_data(settings)
    other = data | {"bank": replace(data["bank"], unaligned=data["bank"].unaligned.flip(1) * 2)}
    one, two, again = (first_weights(settings, rows) for rows in (data, other, data))

    def differ(left, right, party):
        return [
            name for name in left[party] if not torch.equal(left[party][name], right[party][name])
        ]

    assert differ(one, two, "bank")
    assert not differ(one, two, "shop")  # which has no part in another's rows
    assert not differ(one, two, "label")
    assert not any(differ(one, again, party) for party in data)


def test_queries_and_checkpoints_have_none_of_them(folder):
    settings = experiment(folder)
    data = load_data(settings)
    session = LocalSession(settings, data, outputs=2).run()
    rows = sum(map(len, (data["bank"].split.train, data["bank"].split.validation,
                         data["bank"].split.test)))  # fmt: skip
    assert rows == 100
    assert session.ledger.bytes_by_party("up")["bank"] < (rows + 1) * 4 * 4 + 16 * 20


def test_a_party_with_rows_missing_and_rows_of_its_own(folder):
    known = pd.read_csv(folder / "bank.csv")
    known.drop(
        known.index[known["key"].isin(pd.read_csv(folder / "label.csv")["key"][:30])]
    ).to_csv(folder / "bank.csv", index=False)
    settings = experiment(folder, "data.missing_rows=token")
    data = load_data(settings)
    assert int(data["label"].held["bank"].sum()) == 70
    assert [len(data[name].unaligned) for name in COLUMNS] == [300, 300]
    last = LocalSession(settings, data, outputs=2).run().label.history[-1]
    assert np.isfinite(last["test_missing_loss"])


def test_after_a_private_alignment_each_party_has_its_own(folder):
    """The rows of one process, and what a federated party makes of its own file."""
    plain = load_data(experiment(folder))
    settings = experiment(folder, f"data.alignment={folder / 'alignment'}")
    alignment.align(settings, "server_aided", folder / "alignment")
    data = load_data(settings)
    for party in COLUMNS:
        keys = pd.read_csv(folder / f"{party}.csv")["key"]
        positions = Alignment.newest(folder / "alignment" / party, party).positions
        assert len(data[party].unaligned) == len(plain[party].unaligned) == 300
        want = as_encoded(data | {party: replace(data[party], ids=keys[positions].to_numpy())},
                          folder, party)  # fmt: skip
        np.testing.assert_allclose(
            data[party].unaligned.numpy(), want.to_numpy(), rtol=1e-3, atol=1e-5
        )
        store = folder / f"{party}-store"
        content = {"party": party, "data": {"source": str(folder / f"{party}.csv"), "id": "key"}}
        own = PartyFile.model_validate(content | {"store": str(store)})
        terms = Terms.of(settings, "train", "run").model_copy(update={"alignment": "mine"})
        Alignment.newest(folder / "alignment" / party, party).keep(own.alignment_path("mine"))
        found = own_data(own, terms)
        assert torch.equal(found.unaligned, data[party].unaligned)
        plainly = terms.model_copy(update={"defense": "none"})
        assert own_data(own, plainly).unaligned is None
