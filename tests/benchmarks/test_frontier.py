"""The frontier on made-up rows whose answer is plain, and once on a small task from end to end."""

import csv

import numpy as np
import pandas as pd
import pytest

from benchmarks import frontier
from benchmarks.studies import added, study_of

SPREAD = (-0.01, 0.0, 0.01)
FREE, SIDED = "label_free", "label_free:kind=random"


def rows(defense, family, utility, attacks):
    """Three victims; of `attacks` what each reaches, with about the spread of the utility."""
    draw = np.random.default_rng(len(defense) + len(attacks))
    jitter = draw.permutation([-0.0004, 0.0, 0.0004]).tolist()
    return pd.DataFrame(
        [
        {
            "task": "fashion", "family": family, "defense": defense, "seed": str(seed),
            "utility": "" if utility is None else f"{utility + by + jitter[seed]}",
            "attack": attack,
            "access": "" if utility is None else "gradients",
            "reaches": f"{reached + by + jitter[seed - 1]}",
        }
        for attack, reached in attacks.items()
        for seed, by in enumerate(SPREAD)
    ])  # fmt: skip


def made_up(*more):
    return pd.concat([
        rows("none", "undefended", 0.9, {"logistic": 0.8, "gradient_similarity": 0.99}),
        rows(FREE, "label-free bottom", 0.85, {"logistic": 0.6, "gradient_similarity": 0.1}),
        rows(SIDED, "label-free bottom", 0.7, {"logistic": 0.65}),
        rows("scratch", "no model", None, {"scratch": 0.55}),
        *more,
    ], ignore_index=True)  # fmt: skip


def verdict_of(defense, *more):
    found = frontier.frontier_of(made_up(*more))
    return next(one.verdict for one in found.places if one.defense == defense)


def test_leaks_count_from_the_best_that_reads_no_label():
    found = frontier.frontier_of(made_up())
    assert found.reference == f"logistic on {SIDED}"
    places = {one.defense: one for one in found.places}
    assert [one.defense for one in found.places] == ["none", FREE, SIDED]
    assert places["none"].attack == "gradient_similarity"
    assert places["none"].leak.mean == pytest.approx(0.34)
    assert places[SIDED].leak.mean == pytest.approx(0)
    assert places[FREE].leak.mean == pytest.approx(-0.05)
    assert found.best.defense == FREE
    assert places["none"].gain.mean == pytest.approx(0.05)
    assert (places["none"].verdict, places[FREE].verdict) == ("leaks", "reference")


@pytest.mark.parametrize(
    ("utility", "reached", "verdict"),
    [
        (0.88, 0.65, "beats it"),
        (0.88, 0.655, "beats it"),
        (0.88, 0.7, "leaks"),
        (0.84, 0.7, "leaks"),
        (0.84, 0.65, "no better"),
    ],
)
def test_verdicts(utility, reached, verdict):
    assert verdict_of("other", rows("other", "few rounds", utility, {"x": reached})) == verdict


def test_an_interval_around_the_margin_decides_nothing():
    """Three differences of 0, 0 and 3 points have an interval of 1 ± 4.3 points."""
    others = rows("other", "few rounds", 0.88, {"x": 0.65})
    others.loc[2, "reaches"] = str(0.65 + 0.01 + 0.03)
    assert verdict_of("other", others) == "undecided"
    others = rows("other", "few rounds", 0.85, {"x": 0.65})
    others.loc[2, "utility"] = str(0.85 + 0.01 + 0.03)
    assert verdict_of("other", others) == "undecided"


def test_rows_that_are_there_stay_and_are_not_trained_again():
    there, key, tasks = made_up(), frontier.KEY, frontier.TASKS
    again = there.assign(reaches="0.5")
    more = rows("label_dp:epsilon=4", "label DP", 0.88, {"logistic": 0.7})
    found = added(there, pd.concat([again, more]), key, tasks)
    assert found.equals(pd.concat([there, more], ignore_index=True))
    other = there.assign(task="mnist")
    whole = added(pd.concat([other, there]), more, key, tasks)
    assert whole.equals(pd.concat([there, more, other], ignore_index=True))

    left = list(frontier.left_of("fashion", 3, ["label DP"], found))
    assert left[-4:] == [f"label_dp:epsilon={epsilon}" for epsilon in (0.5, 1, 2, 8)]
    free = frontier.families_of("fashion")[frontier.LABEL_FREE]
    assert left[:-4] == [spec for spec in free if spec not in (FREE, SIDED)]
    more = frontier.left_of("fashion", 5, (), found)
    assert more["none"] == more["label_dp:epsilon=4"] == [3, 4]


def test_a_defense_counts_by_the_victims_that_it_shares_with_the_references():
    many = {seed: str(int(seed) + 3) for seed in "012"}
    other = rows("other", "few rounds", 0.84, {"x": 0.65})
    found = frontier.frontier_of(made_up(other, other.assign(seed=other.seed.map(many))))
    assert found.victims == "3"  # no reference has more
    known = made_up()
    whole = pd.concat([known, known.assign(seed=known.seed.map(many))], ignore_index=True)
    found = frontier.frontier_of(pd.concat([whole, other], ignore_index=True))
    assert found.victims == "3 to 6"
    place = next(one for one in found.places if one.defense == "other")
    assert (place.gain.count, place.gain.mean) == (3, pytest.approx(-0.01, abs=1e-3))


def test_references_come_first_and_then_what_is_nearest_to_a_verdict():
    names = {"near": 0.03, "far": 0.09}
    undecided = []
    for name, by in names.items():
        undecided.append(rows(name, "few rounds", 0.85, {"x": 0.65}))
        undecided[-1].loc[2, "utility"] = str(0.85 + 0.01 - by)
    known = made_up(*undecided)
    order = frontier.frontier_of(known).nearest_first(["new", "none", "far", "near", FREE])
    assert order[0] == FREE
    assert {*order[1:3]} == {"near", "far"}
    assert order[3:] == ["none", "new"]


@pytest.mark.parametrize("task", ["fashion", "bank"])
def test_the_tasks_are_experiments_whose_defenses_fit(task, monkeypatch):
    monkeypatch.setenv("VFL_DATA", "data")
    defenses = list(frontier.left_of(task, 1, (), pd.DataFrame(columns=frontier.COLUMNS)))
    study = study_of(frontier.FOLDER / f"{task}.toml", defenses=defenses, seeds=[0])
    assert len(study.cells) == 1 + len(defenses)
    assert len(set(defenses)) == len(defenses)


TINY = """
name = "tiny"
data = { source = "digits", rows = 400 }
label.top = "linear"
train = { epochs = 2, learning_rate = 0.02 }
[parties.client]
width = 8
bottom = "mlp:hidden=8"
[grid]
measure = "accuracy"
attacks = ["logistic", "gradient_similarity", "gradient_teacher:epochs=2,steps=300"]
baselines = ["scratch", "raw"]
leaks = [10]
draws = 1
pictures = 0
defenses = ["none", "label_free:features=16", "few_rounds:steps=2,kind=scarf,epochs=1"]
"""


@pytest.mark.slow
def test_from_a_task_to_its_page_and_on_where_it_was(monkeypatch, tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(frontier, "FOLDER", tmp_path)
    monkeypatch.setattr(frontier, "TASKS", ("tiny",))
    page = tmp_path / "page.md"

    def run(**more):
        frontier.bench_frontier("tiny", 2, out=tmp_path / "runs", page=page, **more)
        return page.read_text()

    first = run()
    assert "| `label_free:features=16` " in first
    assert (tmp_path / "page_tiny.svg").exists()
    trained = capsys.readouterr().err.count("seed=")
    assert run() == first
    assert "seed=" not in capsys.readouterr().err
    assert trained
    assert run(redraw=True) == first
    with page.with_suffix(".csv").open() as file:
        stored = list(csv.DictReader(file))
    none = [row for row in stored if row["defense"] == "none"]
    attacks = {row["attack"] for row in none}
    assert {"logistic", "gradient_similarity", "gradient_teacher:epochs=2,steps=300"} <= attacks
    assert {row["seed"] for row in none} == {"0", "1"}
    families = {"undefended", "label-free bottom", "few rounds", "no model"}
    assert {row["family"] for row in stored} == families


def test_an_added_attack_runs_alone_where_it_lacks_rows(monkeypatch, tmp_path):
    (tmp_path / "fashion.toml").write_text(TINY)
    monkeypatch.setattr(frontier, "FOLDER", tmp_path)
    attacks = {
        "logistic": 0.8,
        "gradient_similarity": 0.9,
        "gradient_teacher:epochs=2,steps=300": 1,
    }
    whole = [
        rows(spec, family, 0.9, attacks)
        for family, specs in frontier.families_of("fashion").items()
        for spec in specs
    ]
    there = pd.concat(whole, ignore_index=True)
    assert frontier.added_attacks("fashion", 3, (), there) == ({}, [])
    lacking = (there.defense == "none") & (there.attack == "logistic") & (there.seed == "2")
    assert frontier.added_attacks("fashion", 3, (), there[~lacking]) == (
        {"none": [2]},
        ["logistic"],
    )
    assert frontier.added_attacks("fashion", 2, (), there[~lacking]) == ({}, [])


def test_a_page_names_attacks_that_were_not_run_on_all_defenses(tmp_path):
    found = frontier.frontier_of(made_up())
    text = "\n".join(frontier.task_section(found, tmp_path / "page.md"))
    assert "`batch_sums` on 3 of 3 defenses" in text
    assert "`logistic` on" not in text
    assert "`gradient_similarity` on 1 of 3 defenses" in text
    assert "defenses; they could change no verdict, but this best attack." in text


def every_attack(*but):
    """Rows of every attack of the task on each defense, besides some attacks on `other`."""
    reached = dict.fromkeys(frontier.settings_of("fashion").attacks, 0.6)
    known = made_up(rows("other", "few rounds", 0.84, {**reached, "x": 0.65}))
    known = known[known.family == "no model"], known[known.defense == "other"]
    whole = pd.concat([
        *known,
        rows("none", "undefended", 0.9, reached | {"gradient_similarity": 0.99}),
        rows(FREE, "label-free bottom", 0.85, reached),
        rows(SIDED, "label-free bottom", 0.7, reached | {"logistic": 0.65}),
    ], ignore_index=True)  # fmt: skip
    return whole[(whole.defense != "other") | ~whole.attack.isin(but)]


@pytest.mark.parametrize(
    ("but", "said"),
    [((), ""), (("kmeans",), "`kmeans` on 1 of 4 defenses; they could change 1 verdict.")],
)
def test_a_page_says_how_many_verdicts_further_attacks_could_change(but, said, tmp_path):
    found = frontier.frontier_of(every_attack(*but))
    assert found.unsettled == (["other"] if but else [])
    text = "\n".join(frontier.task_section(found, tmp_path / "page.md"))
    assert said in text
    assert ("they could change" in text) == bool(said)


@pytest.mark.parametrize(
    ("leaks", "more", "unsettled"),
    [
        ({"a": 0.001, "b": 0.5}, {"a": 2}, []),  # shown to leak, whatever another attack infers
        ({"a": 0.001, "b": 0.5}, {"b": 1}, ["b"]),
        ({"a": 0.03, "b": 0.001}, {"a": 1}, ["a"]),  # the correction for another rival undoes it
        ({"a": 0.001, "b": 0.04, "c": 0.9}, {"c": 1}, ["b", "c"]),  # one more leak helps b's claim
    ],
)
def test_verdicts_that_further_attacks_could_change(leaks, more, unsettled):
    assert frontier.unsettled_of(leaks, dict.fromkeys(leaks, 1), more) == unsettled
