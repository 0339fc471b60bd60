"""Real tables of three organisations on a real federation: described, aligned, trained, predicted.

No file is edited but for the ports, which tests may not share. Then parties are killed meanwhile.
"""

import numpy as np
import pandas as pd
import pytest
from initialised import initialise
from organisations import write_organisations
from real_deployment import Deployment

from vfl.config import read_party_file
from vfl.core.storage import read_json
from vfl.datasets.alignment.positions import last_version

pytestmark = pytest.mark.net

LENDER, OTHERS = "lender", ("bank", "shop")
#: Rows, share of them that each party has, and what a model without these columns would reach.
TABLES = {
    "bank-marketing": (4000, 0.9, {"test_auc": 0.75}),
    "credit-default": (4000, 0.8, {"test_auc": 0.65}),
    "adult": (4000, 0.9, {"test_auc": 0.82}),
    "pima-diabetes": (None, 0.9, {"test_auc": 0.65}),
    "boston-housing": (None, 0.9, {"test_r2": 0.2}),
}
#: In a category of each party; nobody else may have it.
MARK = "zq-{party}-{number}"


def written(folder, name, rows, overlap):
    """Three marked tables, and the arguments that make a project of them."""
    _, label = write_organisations(folder, name, rows, overlap=overlap)
    draw = np.random.default_rng(1)
    how = {"sep": ";", "decimal": ",", "encoding": "latin-1"}
    for party, file, options in (
        (LENDER, "lender.csv", how),
        ("bank", "bank.csv", {}),
        ("shop", "shop.parquet", None),
    ):
        text = {"Kundennummer": str, "customer_id": str}
        path = folder / file
        read = (
            pd.read_parquet(path) if options is None else pd.read_csv(path, dtype=text, **options)
        )
        tags = [MARK.format(party=party, number=number) for number in range(3)]
        read.insert(1, f"tag_{party}", draw.choice(tags, len(read)))
        read.to_parquet(path) if options is None else read.to_csv(path, index=False, **options)
    tables = [f"{LENDER}={folder / 'lender.csv'}", f"bank={folder / 'bank.csv'}"]
    tables.append(f"shop={folder / 'shop.parquet'}")

    given = [part for table in tables for part in ("--from", table)]
    words = [*given, "--label-party", LENDER, "--label", label]
    return lambda project, settings: initialise(project, OTHERS, *words)


@pytest.fixture
def organisations(tmp_path, data_root):
    """Starts a federation over a real table."""
    started = []

    def start(name, rows, overlap, folder="project"):
        write = written(tmp_path, name, rows, overlap)
        started.append(Deployment(tmp_path / folder, sides=OTHERS, write=write))
        return started[-1].start()

    yield start
    for one in started:
        one.close()


def version_at(federation, party):
    folder = "label" if party == LENDER else party
    file = read_party_file(federation.folder / folder / "party.toml")
    return last_version(file.alignment_path("alignment"))


def common_ids(folder):
    """The numbers that all three have, as the lender writes them."""
    lender = pd.read_csv(folder / "lender.csv", sep=";", dtype=str, encoding="latin-1")[
        "Kundennummer"
    ]
    others = set(pd.read_csv(folder / "bank.csv")["customer_id"].astype(int))
    others &= set(pd.read_parquet(folder / "shop.parquet")["id"])
    return {one for one in lender if int(one) in others}


def found_in(folder, texts):
    """Files below a folder that hold one of these texts."""
    needles = [text.encode() for text in texts]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(needle in path.read_bytes() for needle in needles)]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_aligned_trained_on_and_predicted(organisations, tmp_path, name, measured):
    rows, overlap, wanted = TABLES[name]
    federation = organisations(name, rows, overlap)
    measured()
    federation.done("align", federation.folder)
    training = federation.trained("train.epochs=15")
    federation.done("predict", federation.folder)
    measured(f"{name}: aligned, trained, predicted")
    run = federation.run(training)
    summary = read_json(run / "summary.json")
    for measure, least in wanted.items():
        assert summary[measure] > least
    ids = pd.read_csv(run / "predictions.csv", dtype=str)["id"]
    assert set(ids) == common_ids(tmp_path)

    own = {LENDER: federation.folder / "label", **{one: federation.folder / one for one in OTHERS}}
    for party in own:
        marks = [MARK.format(party=party, number=number) for number in range(3)]
        assert found_in(own[party], marks)  # in its encoder: the search finds what is there
        for other in own.keys() - {party}:
            assert found_in(own[other], marks) == []
    for other in OTHERS:
        assert found_in(own[other], ids[:200]) == []
    said = [path for path in federation.folder.glob("*.said")]
    marks = [MARK.format(party=party, number=number) for party in own for number in range(3)]
    assert [path for path in said for one in (*marks, *ids) if one in path.read_text()] == []


def test_a_party_that_is_killed_while_aligning_or_predicting_leaves_a_clear_state(
    organisations, tmp_path
):
    federation = organisations("bank-marketing", 4000, 0.9)
    aligned = federation.ask("align", federation.folder)
    aligned.wait_for("party bank is here")
    federation.kill("flwr-clientapp", "bank")
    assert aligned.wait() != 0
    assert aligned.last_words().startswith("error[V4"), aligned.said()
    assert [version_at(federation, LENDER), version_at(federation, "bank")] == [0, 0]

    federation.done("align", federation.folder)
    assert {version_at(federation, party) for party in (LENDER, "bank")} == {1}
    training = federation.trained("train.epochs=2")
    federation.done("predict", federation.folder)
    answers = (federation.run(training) / "predictions.csv").read_bytes()

    cut = federation.ask("predict", federation.folder)
    federation.nodes["shop"].wait_for("takes part", after=len(federation.nodes["shop"].said()))
    federation.kill("flwr-clientapp", "shop")
    # It is told who went away, or the session has begun again without the user.
    if cut.wait() != 0:
        assert cut.last_words().startswith("error[V4"), cut.said()
    federation.done("predict", federation.folder)
    assert (federation.run(training) / "predictions.csv").read_bytes() == answers
