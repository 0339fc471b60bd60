"""The headline tables of the pages, worked out again from the rows that are stored beside them.

A page is found by the heading of its table, so that it can be moved; its stored rows lie in
`docs/results`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import pytest
from scipy.stats import t as student

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
NUMBER = re.compile(r"[-+]?(?:\d+\.\d+|\.\d+|\d+)")
Row = dict[str, str]


def rows_of(name: str) -> list[Row]:
    """The stored rows of a file."""
    path = RESULTS / name
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table_of(heading: str, first: str) -> list[list[str]]:
    """Cells of the table below a heading whose first column is called `first`; no head."""
    pages = {path: path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    wanted = f"\n{heading}\n", f"\n| {first} "
    (page,) = [path for path, text in pages.items() if all(one in text for one in wanted)]
    text = pages[page].split(wanted[0], 1)[1]
    head = re.search(rf"^\| {re.escape(first)} .*$", text, re.MULTILINE)
    assert head is not None, (heading, first)
    lines = text[head.start() :].splitlines()
    end = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:end]]


def shown(cell: str) -> list[str]:
    """Its numbers as they are printed, without emphasis."""
    return NUMBER.findall(cell.replace("**", ""))


def assert_shows(cell: str, values: Iterable[float]) -> None:
    """That a cell prints these numbers, each to the places it prints."""
    values, printed = list(values), shown(cell)
    assert len(printed) == len(values), (cell, values)
    for text, value in zip(printed, values, strict=True):
        places = len(text.partition(".")[2])
        # Some files keep a place more than the page prints, so that it is rounded twice.
        assert abs(float(text) - value) <= 0.551 * 10**-places, (cell, values)


# --- labels of cuts -------------------------------------------------------------------------------

THESIS = ("kmeans±", "fine_tuning±1", "fine_tuning±5", "fine_tuning±10", "fine_tuning±40")
LOGISTIC = ("logistic", "logistic:scaler=whiten")
SPREAD = ("1", "5", "10", "40")
LABELS = {
    "## Attacks of the thesis": ("labels_mnist.csv", "training", ("", *THESIS)),
    "## Stronger attacks": (
        "labels_mnist.csv",
        "training",
        (*LOGISTIC, "nearest_mean:scaler=cosine", "fine_tuning:at=before"),
    ),
    "## An inner cut": (
        "labels_mnist_inner.csv",
        "training",
        ("", "kmeans±", "fine_tuning", *LOGISTIC),
    ),
}  # fmt: skip


@pytest.mark.parametrize("heading", LABELS)
def test_attacks_on_labels(heading):
    """A column is "" for the model's accuracy, an attack at every k, or ATTACK±K with its width."""
    name, first, columns = LABELS[heading]
    stored = rows_of(name)
    found = {(row["defense"], row["attack"], row["k"]): row for row in stored}
    table = table_of(heading, first)
    assert len(table) > 5
    for training, *cells in table:
        defense = training.strip("`")
        for cell, column in zip(cells, columns, strict=True):
            attack, _, k = column.partition("±")
            if not column:
                one = next(row for row in stored if row["defense"] == defense)
                assert_shows(cell, [100 * float(one["test_accuracy"])])
            elif "±" in column:
                one = found[defense, attack, k or "0"]
                assert_shows(cell, [100 * float(one["mean"]), 100 * float(one["half_width"])])
            else:
                means = [100 * float(found[defense, attack, k]["mean"]) for k in SPREAD]
                assert_shows(cell, means)


WIDE = ("fine_tuning", *LOGISTIC, "fine_tuning:at=before")
VIT = ("fine_tuning", "logistic", "nearest_mean:scaler=cosine", "fine_tuning:at=before")


@pytest.mark.parametrize(
    ("heading", "name", "columns", "spread", "unstored"),
    [
        ("## Width of the cut", "labels_mnist_128.csv", ("", *WIDE), SPREAD, ()),
        ("## A vision transformer", "labels_vit.csv", ("", "kmeans", *VIT), SPREAD[:3],
         ("the same on pixels", "from scratch (one victim)")),
    ],
)  # fmt: skip
def test_attacks_on_labels_beside_scratch(heading, name, columns, spread, unstored):
    """Every attack at every k; in the last row, what the leaked rows are worth alone."""
    stored = rows_of(name)
    found = {(row["defense"], row["attack"], row["k"]): row for row in stored}
    for training, *cells in table_of(heading, "training"):
        defense = training.strip("`")
        if defense in unstored:
            continue
        for cell, column in zip(cells, columns, strict=True):
            if not column:
                accuracies = {r["test_accuracy"] for r in stored if r["defense"] == defense}
                assert_shows(cell, [100 * float(one) for one in accuracies])
            elif defense == "from scratch":
                rows = [found["none", column, k] for k in spread]
                assert_shows(
                    cell, [100 * float(r["baseline_scratch"]) for r in rows] if cell else []
                )
            else:
                ks = ("0",) if column == "kmeans" else spread
                means = [float(found[defense, column, k]["mean"]) for k in ks]
                assert_shows(cell, [100 * mean for mean in means])


def test_hidden_labels_of_five_draws():
    """The best of 22 attacks on both trainings, with its interval."""
    stored = rows_of("hidden_labels_fashion_5_draws.csv")
    for k, undefended, defended, *_ in table_of(
        "## A cut that tells no more than one without labels", "k"
    ):
        for cell, training in ((undefended, "none"), (defended, "anchored")):
            of = [r for r in stored if r["defense"].startswith(training) and r["k"] in (k, "0")]
            best = max(of, key=lambda row: float(row["mean"]))
            assert_shows(cell, [100 * float(best["mean"]), 100 * float(best["half_width"])])


READ_BY = {
    "text_inversion": "text_inversion:steps=400",
    "token_search:candidates=50": "token_search:candidates=50,steps=400",
    "token_search": "token_search",
    "token_network": "token_network:hidden=128,steps=300",
}


def test_words_read_by_depth():
    stored = [row for row in rows_of("inversion.csv") if row["sweep"] == "depth"]
    for named, *cells, guess in table_of("## What the cut gives away", "blocks below the cut"):
        attack, _, texts = named.rpartition(", ")
        wanted = texts, READ_BY[attack.strip("`")]
        of = [row for row in stored if (row["texts"], row["attack"]) == wanted]
        found = {row["front"]: 100 * float(row["accuracy"]) for row in of}
        assert found
        for front, cell in zip("123456", cells, strict=True):
            assert_shows(cell, [found[front]] if front in found else [])
        assert_shows(guess, {100 * float(row["guess"]) for row in of})


def cut_read(front, attack, sweep):
    """What an attack reads of 16 words behind some blocks, by codec or by the noise's deviation."""
    about = "codec" if sweep == "codec" else "defense"
    found = {}
    for row in rows_of("inversion.csv"):
        here = row["sweep"] == sweep or (row["sweep"], row["texts"]) == ("depth", "reviews")
        own = re.sub(r"[:,]prior=[\d.]+", "+prior", row["attack"])
        if here and (row["front"], own) == (front, READ_BY.get(attack, attack)):
            found[row[about].rpartition("sigma=")[2]] = row
    return found


def assert_shows_percent(cell, rows, name, column="accuracy"):
    assert_shows(cell, [100 * float(rows[name][column])] if name in rows and cell else [])


def test_words_read_under_noise():
    attacks = ("text_inversion", "token_search", "token_search+prior", "token_network")
    for sigma, *cells in table_of("## What the cut gives away", "deviation"):
        name = "none" if sigma == "0" else sigma
        plain = cut_read("2", "text_inversion", "noise")
        for cell, attack in zip(cells, attacks, strict=False):
            rows = cut_read("2", attack, "noise")
            assert (name in rows) == bool(cell)
            assert_shows_percent(cell, rows, name)
        assert_shows_percent(cells[4], plain, name, "next_word")
        assert_shows(cells[5], [float(plain[name]["perplexity"])])


def test_words_read_behind_codecs():
    of = [("2", "text_inversion"), ("2", "token_search")]
    of += [("4", "text_inversion"), ("4", "token_search:candidates=50")]
    for codec, *cells in table_of("## What the cut gives away", "codec"):
        for cell, (front, attack) in zip(cells, of, strict=False):
            rows = cut_read(front, attack, "codec")
            assert codec.strip("`") in rows
            assert_shows_percent(cell, rows, codec.strip("`"))
        plain = cut_read("2", "token_search", "codec")[codec.strip("`")]
        assert_shows(cells[4], [100 * float(plain["next_word"])])
        assert_shows(cells[5], [float(plain["perplexity"])])


def test_losses_of_labels_in_cuts():
    """A page of its own takes some of the rows of the thesis' grid."""
    found = {(r["defense"], r["attack"], r["k"]): r for r in rows_of("labels_mnist.csv")}
    attacks = [("fine_tuning", "10"), *((one, "10") for one in LOGISTIC), ("kmeans", "0")]
    for training, accuracy, *cells in table_of("## Losses of labels in cuts", "training"):
        rows = [found[training.strip("`"), *one] for one in attacks]
        assert_shows(accuracy, [100 * float(rows[0]["test_accuracy"])])
        for cell, row in zip(cells, rows, strict=True):
            assert_shows(cell, [100 * float(row["mean"])])


def test_hidden_labels():
    """The best of 22 attacks, which is chosen anew at every k."""
    for training, *cells in table_of(
        "## A cut that tells no more than one without labels", "training"
    ):
        if "`" not in training:
            continue
        for name, (accuracy, best) in zip(
            ("hidden_labels_mnist.csv", "hidden_labels_fashion.csv"),
            (cells[:2], cells[2:]),
            strict=True,
        ):
            of = [row for row in rows_of(name) if row["defense"] == training.strip("`")]
            assert_shows(accuracy, [100 * float(of[0]["test_accuracy"])])
            assert_shows(best, [_best(of, k) for k in ("1", "5", "10")])


def _best(rows: Sequence[Row], k: str) -> float:
    return max(100 * float(row["mean"]) for row in rows if row["k"] in (k, "0"))


def test_the_leaderboard():
    """Utility, what the worst attack reaches and what it is above the best without the model."""
    stored = {(r["task"], r["defense"], r["k"]): r for r in rows_of("leaderboard.csv")}
    for task in {task for task, _, _ in stored}:
        table = table_of(f"## {task}", "defense")
        assert len(table) == len({d for t, d, _ in stored if t == task})
        for defense, _, utility, _, _, attack, k, reaches, guess, without, above in table:
            row = stored[task, defense, k]
            assert attack == row["attack"]
            pairs = [(utility, "utility"), (reaches, "reaches"), (guess, "guess")]
            pairs += [(without, "no_model"), (above, "above")]
            for cell, name in pairs:
                assert_shows(cell.partition("±")[0], [100 * float(row[name])])


def test_the_adaptive_attack_at_equal_time():
    """Both by seed, on how many the adaptive one is ahead, and that it kept its budget."""
    stored = rows_of("adaptive.csv")
    table = table_of("## The adaptive attack at equal time", "training")
    assert [row[0].strip("`") for row in table] == list(dict.fromkeys(r["defense"] for r in stored))
    for defense, *cells in table:
        of = [row for row in stored if row["defense"] == defense.strip("`")]
        both = [[float(row[who]) for row in of] for who in ("heavy", "adaptive")]
        for cell, values in zip(cells[:2], both, strict=True):
            assert_shows(cell, values)
        assert_shows(cells[2], [b - a for a, b in zip(*both, strict=True)])
    ahead = sum(float(row["adaptive"]) > float(row["heavy"]) for row in stored)
    assert (ahead, len(stored)) == (8, 10)
    assert "ahead on eight of ten" in (RESULTS / "attacking.md").read_text(encoding="utf-8")
    assert all(float(row["spent_s"]) <= float(row["budget_s"]) for row in stored)


FREE = "label-free bottom"


def test_attacks_from_outside():
    """The best of them on each training, and the others, on the victims of `adaptive`."""
    stored = rows_of("outside.csv")
    trainings = dict.fromkeys((row["task"], row["defense"]) for row in stored)
    table = table_of("## Attacks from outside", "task")
    assert [(row[0], row[1].strip("`")) for row in table] == list(trainings)
    for task, defense, measure, adaptive, best, reaches, above, others in table:
        of = [r for r in stored if (r["task"], r["defense"]) == (task, defense.strip("`"))]
        assert {row["measure"] for row in of} == {measure}
        values: dict[str, dict[str, float]] = {}
        for row in of:
            found = values.setdefault(row["attack"] if row["author"] else "adaptive", {})
            found[row["seed"]] = 100 * float(row["value"])
        ours = values.pop("adaptive")
        assert len(ours) == 5
        apart = {name: [found[one] - ours[one] for one in ours] for name, found in values.items()}
        assert best.strip("`") == max(apart, key=lambda name: mean(apart[name]))
        assert_shows(adaptive, interval(list(ours.values())))
        assert_shows(reaches, interval(list(values[best.strip("`")].values())))
        own = apart.pop(best.strip("`"))
        assert_shows(above, interval(own))
        rest = [mean(one) for one in apart.values()]
        assert_shows(others, [max(rest), min(rest)])


def test_the_frontier():
    """Places, verdicts and what the summary says of the label-free bottom, from rows by seed."""
    stored = rows_of("frontier.csv")
    page = (RESULTS / "frontier.md").read_text(encoding="utf-8")
    summary, found = table_of("## What is shown", "task"), []
    for task in dict.fromkeys(row["task"] for row in stored):
        of = [row for row in stored if row["task"] == task]
        utility = {
            defense: [100 * float(value) for _, value in sorted(found.items())]
            for defense in dict.fromkeys(row["defense"] for row in of if row["utility"])
            for found in [{r["seed"]: r["utility"] for r in of if r["defense"] == defense}]
        }
        reached = {
            (row["defense"], row["attack"]): [
                100 * float(each["reaches"])
                for each in sorted(of, key=lambda each: each["seed"])
                if (each["defense"], each["attack"]) == (row["defense"], row["attack"])
            ]
            for row in of
        }
        family = {row["defense"]: row["family"] for row in of}
        blind = [v for (d, _), v in reached.items() if family[d] in (FREE, "no model")]
        without = max(blind, key=mean)
        free = max((d for d in utility if family[d] == FREE), key=lambda d: mean(utility[d]))
        table = table_of(f"## {task}", "defense")
        assert {row[0] for row in table} == set(utility)
        beating, ahead = [], []
        for defense, _, good, less, attack, _, reaches, leaks, verdict, _ in table:
            worst = max(
                (a for d, a in reached if d == defense), key=lambda a: mean(reached[defense, a])
            )
            assert attack == worst
            gain = [a - b for a, b in zip(utility[defense], utility[free], strict=True)]
            leak = [a - b for a, b in zip(reached[defense, worst], without, strict=True)]
            assert_shows(good, interval(utility[defense]))
            assert_shows(reaches, interval(reached[defense, worst]))
            for cell, values in ((less, gain), (leaks, leak)):
                assert_shows(cell, interval(values))
            (gained, by), (leaked, over) = interval(gain), interval(leak)
            if gained - by > 0 and leaked + over <= 1 and family[defense] != FREE:
                beating.append(defense)
            if gained - by > 0 and family[defense] not in (FREE, "undefended"):
                ahead.append(verdict)
            assert (verdict == "beats it") == (defense in beating)
        (line,) = [row for row in summary if row[0] == task]
        learned = [row for row in table if family[row[0]] not in (FREE, "undefended")]
        assert line[2] == f"`{free}`"
        assert line[6] == f"{len(ahead)} of {len(learned)}"
        assert line[7] == str(ahead.count("leaks"))
        found += beating
    assert ("Nothing is shown to beat it." in page) == (not found)
    assert all(f"`{defense}`" in page.split("\n##")[0] for defense in found)


# --- private training -----------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and 95 % half width of independent normal values."""
    width = stdev(values) / len(values) ** 0.5
    return mean(values), float(student.ppf(0.975, len(values) - 1)) * width


def test_the_three_budgets():
    finals = [row for row in rows_of("private_scattering.jsonl") if not row["choose"]]
    heading = "## MNIST at the three budgets, at one party and in halves at two"
    for epsilon, _, *cells, seeds in table_of(heading, "epsilon"):
        of = {
            parties: {
                row["seed"]: 100 * row["accuracy"]
                for row in finals
                if row["parties"] == parties and row["epsilon"] == float(epsilon)
            }
            for parties in (1, 2)
        }
        assert len(of[1]) == len(of[2]) == int(seeds)
        less = [of[2][seed] - of[1][seed] for seed in of[1]]
        for cell, values in zip(cells, (of[1].values(), of[2].values(), less), strict=True):
            assert_shows(cell, interval(list(values)))


PEA = {"MNIST": "mnist", "CIFAR-10": "cifar10", "reviews": "reviews"}


def test_pea():
    stored = {(r["table"], r["task"], r["what"], r["epsilon"]): r for r in rows_of("pea.csv")}

    def assert_is(cell, *key):
        row = stored[key]
        assert_shows(cell, [100 * float(row["accuracy"]), 100 * float(row["deviation"])])

    for split, begin, *cells in table_of("## Beginnings", "rows of the holders"):
        for task, cell in zip(PEA.values(), cells, strict=True):
            what = f"{begin}, rows {split}"
            assert_is(cell.partition("(")[0], "beginnings", task, what, "0.5")
    for begin, steps, *cells in table_of("## Beginnings", "begin at"):
        for task, cell in zip(PEA.values(), cells, strict=True):
            assert_is(cell, "beginnings", task, f"{steps} steps from {begin}", "1.0")
    for task, whose, *cells in table_of("## Whose noise", "task"):
        for epsilon, cell in zip(("0.5", "1.0", "2.0", "4.0", "8.0", ""), cells, strict=True):
            what = "each holder, models averaged 12 times" if whose == "each holder" else whose
            if cell:
                assert_is(cell, "noise", PEA[task], what, epsilon)
    networks = {"mnist": "LeNet", "cifar10": "VGG-16", "reviews": "words averaged"}
    for model, *cells in table_of("## Features and networks", "model"):
        for task, cell in zip(PEA.values(), cells, strict=True):
            what = f"{networks[task]} on raw" if model == "network on raw" else model
            assert_is(cell, "models", task, what, "1.0")


STUDIES = {
    "projection": ("projection", str), "directions": ("width", int),
    "hidden units": ("hidden", int),
    "lot": ("lot", int), "learning rate": ("first_rate", float),
    "clip norm of a layer": ("clip", float), "noise": ("noise", float),
}  # fmt: skip


def test_one_setting_at_a_time():
    stored, name = rows_of("private_mnist_studies.jsonl"), ""
    for study, value, epochs, accuracy in table_of("### One setting at a time", "setting")[1:]:
        name = study or name
        key, kind = STUDIES[name]
        if value.startswith("median"):
            of = [row for row in stored if row["median"]]
        else:
            asked = kind(value.split()[0].replace(",", ""))
            of = [row for row in stored if row[key] == asked and not row["median"]]
        last = max(of, key=lambda row: row["epoch"])
        moments = max((row for row in of if row["epsilon_moments"] <= 2), key=lambda r: r["epoch"])
        assert shown(epochs)[0] == str(last["epoch"])
        assert shown(epochs)[-1] == str(moments["epoch"])
        assert_shows(accuracy, [100 * last["test"], 100 * moments["test"]])


def test_cifar():
    stored = rows_of("private_cifar.jsonl")
    rows = table_of("### CIFAR-10 behind public convolutions", "noise")
    settings = {(row["noise"], row["first_rate"], row["layers"]) for row in stored}
    assert len(rows) == len(settings)
    for noise, rate, layers, epochs, epsilon, accuracy in rows:
        asked = float(noise), float(rate), int(layers)
        assert asked in settings
        of = [r for r in stored if (r["noise"], r["first_rate"], r["layers"]) == asked]
        last = max(of, key=lambda row: row["epoch"])
        assert last["choose"]
        assert last["epoch"] == int(epochs)
        assert_shows(epsilon, [last["epsilon_rdp"]])
        assert_shows(accuracy, [100 * last["test"]])


@pytest.mark.parametrize("task", ["bank_marketing", "credit_default", "fashion_mnist"])
def test_columns_of_another_party(task):
    """The better of cuts alone and of cuts with own columns, and how far seeds lie apart."""
    stored = [row for row in rows_of("columns.csv") if row["task"] == task]
    columns = list(dict.fromkeys(row["column"] for row in stored))
    table = table_of(f"## Columns of {task.replace('_', ' ')}", "protection")
    assert len(table) == 1 + len({row["protection"] for row in stored})
    for name, utility, *cells, apart, left in table:
        some = [row for row in stored if row["protection"] == name.strip("`")]
        found = []
        for column in columns:
            ways = {
                reads: [float(row[reads]) for row in some if row["column"] == column]
                for reads in ("cut", "both")
            }
            alone = {row["seed"]: float(row["own"]) for row in stored if row["column"] == column}
            found.append(max(ways["cut"], ways["both"], key=mean) if some else alone.values())
        assert_shows(utility, [mean(float(row["utility"]) for row in some)] if some else [])
        for cell, values in zip(cells, found, strict=True):
            assert_shows(cell, [mean(values)])
        assert_shows(apart, [max(max(values) - min(values) for values in found)])
        alone = [[float(r["own"]) for r in some if r["column"] == one] for one in columns]
        pairs = [
            pair for each in zip(found, alone, strict=True) for pair in zip(*each, strict=False)
        ]
        rest = [(value - own) / (1 - own) for value, own in pairs]
        assert_shows(left, [100 * mean(rest)] if some else [0])


def test_columns_read_again():
    """The better of both readings, stored and again, and the moves that the text names."""
    best = lambda row: max(float(row["cut"]), float(row["both"]))  # noqa: E731
    of = lambda row: (row["protection"], row["column"])  # noqa: E731
    again = {of(row): row for row in rows_of("columns_reread.csv")}
    stored = [row for row in rows_of("columns.csv") if of(row) in again]
    first = {of(row): row for row in stored if row["seed"] == "0"}
    table = table_of("## Read again by nine votes", "protection again")
    columns = list(dict.fromkeys(column for _, column in first))
    bank = ["balance", "housing", "contact", "poutcome"]
    columns = bank + [column for column in columns if column not in bank]
    for name, *cells in table:
        for column, cell in zip(columns, cells, strict=True):
            key = name.strip("`"), column
            assert_shows(cell, [best(first[key]), best(again[key])])
    assert len(again) == len(table) * len(columns)
    changes = {key: best(again[key]) - best(first[key]) for key in again}
    moves = []
    for measure in ("auc", "r2"):
        change = [changes[key] for key, row in again.items() if row["measure"] == measure]
        moves += [min(change), max(change)]
    beyond = {}
    for key, change in changes.items():
        ways = [[float(row[way]) for row in stored if of(row) == key] for way in ("cut", "both")]
        chosen = max(ways, key=mean)
        if change > max(chosen) - min(chosen):
            beyond[key] = change, max(chosen) - min(chosen)
    assert list(beyond) == [("clipped_noise:sigma=0.1", "PAY_AMT1")]
    text = (RESULTS / "columns.md").read_text().split("## Read again by nine votes\n", 1)[1]
    told = re.search(r"categories moved by (.*?)\.\sNo .*? did, by (.*?), for", text, re.DOTALL)
    assert told is not None
    assert_shows(told[1], moves)
    assert_shows(told[2], next(iter(beyond.values())))


def test_private_tables():
    stored, names = rows_of("private_tables.jsonl"), {"Adult": "adult"}
    names |= {"credit default": "credit_default", "bank marketing": "bank_marketing"}
    table = ""

    def of(way: str, epsilon: float | None, key: Callable[[Mapping[str, object]], float]):
        return {
            row["seed"]: key(row)
            for row in stored
            if (row["table"], row["way"], row["epsilon"]) == (table, way, epsilon)
        }

    for name, epsilon, *cells in table_of("## Three tables", "table"):
        table = names.get(name, table)
        budget = None if epsilon == "none" else float(epsilon)
        auc = lambda row: 100 * row["auc"]  # noqa: E731
        free, split = of("split", None, auc), of("split", budget, auc)
        assert_shows(cells[0], interval(list(split.values())))
        if budget is not None:
            alone = of("logistic", budget, auc)
            assert_shows(cells[1], interval([split[seed] - free[seed] for seed in free]))
            assert_shows(cells[2], interval(list(alone.values())))
            assert_shows(cells[3], interval([alone[seed] - free[seed] for seed in free]))
        for cell, key, scale in zip(
            cells[4:], ("calibration", "worst_auc", "gap"), (1, 100, 100), strict=True
        ):
            values = of("split", budget, lambda row, key=key: row[key])
            assert_shows(cell, [scale * mean(values.values())])


# --- codecs ---------------------------------------------------------------------------------------


def test_the_controller_of_l1():
    stored = rows_of("l1_controller.jsonl")
    for target, *cells in table_of("## Codecs in training", "target"):
        for task, cell in zip(("digit_pairs", "fm20", "cifar"), cells, strict=True):
            of = [r for r in stored if (r["task"], r["codec"]) == (task, f"l1:target={target}")]
            kept = [row["above_zero"] for row in of]
            assert_shows(
                cell.replace(" - ", " "), [min(kept), max(kept), mean(r["accuracy"] for r in of)]
            )


@pytest.mark.parametrize(
    ("heading", "name", "measure", "intervals"),
    [
        ("## Twenty classes at matched bytes", "fm20.csv", "test_accuracy", True),
        ("## Film reviews, fold by fold", "review_polarity.csv", "test_accuracy", True),
        ("## Clicks", "yoochoose_filtered.csv", "test_hit_rate", False),
    ],
)
def test_codecs_at_levels(heading, name, measure, intervals):
    """Cells of `K: mean ± width`, of each variant; differences are left to the page."""
    stored, checked = rows_of(name), 0
    for method, *cells in table_of(heading, "codec"):
        of = [row for row in stored if row["method"] == method.strip("`")]
        variants = sorted({row["variant"] for row in of})  # with batch norm, and without
        for cell in cells:
            if not (found := re.match(r"(\d+): (.*)", cell)):
                continue
            codec = method.strip("`").replace("=?", f"={found[1]}")
            for text, variant in zip(found[2].split(" / "), variants, strict=True):
                values = [
                    100 * float(row[measure])
                    for row in of
                    if row["codec"] == codec and row["variant"] == variant
                ]
                assert_shows(text, interval(values) if intervals else [mean(values)])
                checked += 1
    assert checked > 8


def test_words_read_behind_defenses_that_train():
    """Means over seeds; `token_search` is not for defenses that put layers around the blocks."""
    stored = rows_of("inversion_defenses.csv")
    table = table_of("## Defenses that train", "defense or codec")
    assert {cells[0].strip("`") for cells in table} == {row["victim"] for row in stored}
    attacks = ("text_inversion", "token_network", "token_search")
    for victim, seeds, *cells in table:
        of = [row for row in stored if row["victim"] == victim.strip("`")]
        assert_shows(seeds, [len({row["seed"] for row in of})])
        for cell, attack in zip(cells, attacks, strict=False):
            read = [100 * float(r["words_read"]) for r in of if r["attack"].startswith(attack)]
            assert_shows(cell, [mean(read)] if read else [])
        for cell, measure in zip(cells[3:], ("accuracy", "auc"), strict=True):
            by_seed = {row["seed"]: float(row[f"validation_{measure}"]) for row in of}
            assert_shows(cell, [mean(by_seed.values())])


def test_what_a_page_would_print_wrongly_is_seen():
    assert_shows("**66.7 ± 1.3**", [66.74, 1.26])
    with pytest.raises(AssertionError):
        assert_shows("66.7 ± 1.3", [66.9, 1.26])
    with pytest.raises(AssertionError):
        assert_shows("66.7", [66.7, 1.0])
