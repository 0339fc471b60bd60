"""Advice: one source for the table of the page and for the command, held against the evidence."""

import csv
import tomllib
from pathlib import Path

import pytest

from vfl import defenses
from vfl.config import Experiment
from vfl.experiments.advise import (
    ASSETS,
    advice_table,
    advices,
    exposures,
    findings_of,
    model_evidence,
    weak_defenses,
)

DOCS = Path(__file__).parents[2] / "docs"
PLAIN = {"parties": {"bank": {"width": 4}, "shop": {"width": 4}}, "label": {"party": "lender"}}
#: Defenses that protect nothing by themselves, as the table of the page says.
NO_PROTECTION = {"none", "pretrained"}


def experiment(**changes):
    return Experiment.model_validate(PLAIN | changes)


def statuses(found):
    return {one.exposure.asset: one.status for one in found}


def test_the_page_shows_the_table():
    page = (DOCS / "defenses.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- advice -->\n")[2].partition("<!-- end -->")[0]
    assert shown.strip("\n") == advice_table().markdown().strip("\n"), (
        "write vfl.experiments.advise.advice_table() there"
    )
    assert page.index("<!-- advice -->") < page.index("## Losses and models")


def test_there_are_ten_lines_whose_pages_and_members_exist():
    assert len(advices()) == 10
    names = set(defenses.DEFENSES.names())
    spoken = {wanted.partition(":")[0] for one in advices() for wanted in one.defense}
    fallen = {name for one in weak_defenses() for name in one.defenses}
    assert spoken | fallen | NO_PROTECTION == names, "each defense is advised, or advised against"
    assert not spoken & fallen
    for one in (*advices(), *weak_defenses(), *model_evidence()):
        assert (DOCS / one.source).exists()


@pytest.mark.parametrize("advice", advices(), ids=lambda one: one.name)
def test_what_a_line_says_to_set_puts_it_in_place(advice):
    setting = "" if advice.padded else advice.set.replace("[dp] ", "dp.")
    changes = tomllib.loads(setting)
    if "secure" in changes:
        changes["merge"] = "sum"
    if advice.name in ("beaver", "permuted"):
        pytest.importorskip("torch")
    assert advice.in_place(made(changes))
    assert not advice.in_place(experiment(codec="topk:k=2,pad=no")) or not advice.padded
    if not advice.padded:
        assert not advice.in_place(experiment())


def made(changes):
    """An experiment with these settings, which need not fit its models."""
    plain = experiment(**{name: one for name, one in changes.items() if name == "dp"})
    return plain.model_copy(update={k: v for k, v in changes.items() if k != "dp"})


def test_who_sees_what():
    seen = {(one.asset, one.attacker): one for one in exposures(experiment())}
    assert {asset for asset, _ in seen} == set(ASSETS)
    assert seen["labels", "bank"].owner == "lender"
    assert "gradient" in seen["labels", "bank"].sees
    assert seen["columns", "lender"].role == "label party"
    hidden = {(one.asset, one.attacker): one for one in exposures(made({"secure": "beaver"}))}
    assert "no gradient" in hidden["labels", "bank"].sees
    assert ("inputs", "lender") not in hidden
    middle = experiment(middle={"party": "compute", "width": 4})
    roles = {(one.asset, one.role) for one in exposures(middle)}
    assert {("columns", "middle"), ("labels", "middle")} <= roles
    assert ("columns", "label party") not in roles


@pytest.mark.parametrize(
    ("changes", "asset", "status"),
    [
        ({}, "labels", "open"),
        ({"defense": "label_free"}, "labels", "proven"),
        ({"defense": "label_free"}, "columns", "open"),
        ({"defense": "marvell"}, "labels", "weak"),
        ({"defense": "potential:alpha=4"}, "labels", "weak"),
        ({"defense": "few_rounds:steps=40"}, "labels", "open"),
        ({"defense": "few_rounds:steps=40,epsilon=1"}, "labels", "partial"),
        ({"defense": "label_dp:epsilon=1"}, "labels", "partial"),
        ({"defense": "label_dp:epsilon=2"}, "labels", "open"),
        ({"defense": "label_dp:flip=0.1"}, "labels", "open"),
        ({"defense": "nopeek"}, "columns", "weak"),
        ({"defense": "nopeek+clipped_noise:sigma=0.5"}, "columns", "partial"),
        ({"secure": "sum", "merge": "sum"}, "columns", "partial"),
        ({"secure": "beaver"}, "labels", "proven"),
        ({"dp": {"epsilon": 8}}, "records", "proven"),
        ({"defense": "split_guard"}, "inputs", "partial"),
        ({}, "lengths", "proven"),
        ({"secure": "trees"}, "labels", "partial"),
        ({"secure": "trees"}, "columns", "open"),
        ({"secure": "trees:max_bin=16,epsilon=2"}, "columns", "partial"),
        ({"codec": "quantise:values=4,packer=range,pad=no"}, "lengths", "open"),
    ],
)
def test_what_the_evidence_supports(changes, asset, status):
    assert statuses(findings_of(made(changes), [asset])) == {asset: status}


def of_width_4(*names):
    return {name: {"width": 4} for name in names}


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({}, False),
        ({"parties": of_width_4("bank", "shop", "post")}, True),
        ({"parties": of_width_4("bank", "shop", "lender")}, True),
        ({"parties": of_width_4("bank", "shop", "post"), "merge": "sum"}, False),
    ],
)
def test_vflip_is_offered_where_three_cuts_stand_side_by_side(changes, offered):
    found = findings_of(experiment(**changes), ["answers"])
    assert all(("vflip" in {line.name for line in one.take}) is offered for one in found)


def test_promises_come_with_their_unit():
    (found, _) = findings_of(experiment(defense="label_dp:epsilon=1"), ["labels"])
    assert any("epsilon 1" in text and "one label" in text for text in found.statements)
    assert "label_free" in {one.name for one in found.take}


def frontier():
    with (DOCS / "results" / "frontier_places.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_prices_are_those_of_the_frontier():
    lines = {one.name: one for one in advices()}
    plain = {r["task"]: 100 * float(r["gain"]) for r in frontier() if r["defense"] == "none"}
    price = lines["label_free"].costs
    assert sorted(round(plain[task], 1) for task in ("bank", "credit")) == [0.1, 0.6]
    assert price.startswith("0.1 to 0.6 points")
    assert f"{plain['cifar']:.1f} points on pictures" in price
    assert f"{plain['reviews']:.1f} on reviews" in price
    (few,) = [
        row
        for row in frontier()
        if row["task"] == "bank" and f'"{row["defense"]}"' in lines["label_dp"].set
    ]
    assert lines["label_dp"].costs.startswith(f"{-100 * float(few['gain']):.1f} ± ")
    assert few["verdict"] == "leaks"
    read = f"{float(few['reaches']):.2f}".lstrip("0")
    assert read in lines["label_dp"].measured


def test_defenses_that_are_advised_against_leak_on_the_frontier():
    """The worst attack on the strongest and on the weakest of them spans the range of the text."""
    (fallen,) = [one for one in weak_defenses() if "mixup" in one.defenses]
    rows = [
        row
        for row in frontier()
        if row["task"] == "bank" and row["defense"].partition(":")[0] in fallen.defenses
    ]
    assert {"mixup", "tpsl", "marvell", "gradient_noise"} <= {
        row["defense"].partition(":")[0] for row in rows
    }
    reached = [float(row["reaches"]) for row in rows]
    assert f"of {min(reached):.2f} to {max(reached):.2f}".replace(" 0.", " .") in fallen.why
