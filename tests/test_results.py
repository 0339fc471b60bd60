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
from scipy.stats import false_discovery_control, ttest_1samp
from scipy.stats import t as student

from vfl.core.text import as_written

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
    pages = {path: "\n" + path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
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


def columns(name: str, *asked: str) -> list[tuple[str, str]]:
    """A file and a column each: "" is the model's accuracy, "best" the best attack at every k.

    ATTACK±K is the mean of an attack with its width, ATTACK@K the mean alone.
    """
    return [(name, column) for column in asked]


MNIST, THESIS = "labels_mnist.csv", ("kmeans±0", *(f"fine_tuning±{k}" for k in (1, 5, 10, 40)))
AT_10 = ("fine_tuning@10", "logistic@10", "logistic:scaler=whiten@10", "kmeans@0")
LABELS = {
    "## Attacks of the thesis": columns(MNIST, "", *THESIS),
    "# Defenses, measured": columns(MNIST, "", *AT_10),
    "## A cut that leaks no more than a label-free one": [
        *columns("hidden_labels_mnist.csv", "", "best"),
        *columns("hidden_labels_fashion.csv", "", "best"),
    ],
}


@pytest.mark.parametrize("heading", LABELS)
def test_attacks_on_labels(heading):
    """Each cell from the stored rows; a bold attack does not beat training from scratch."""
    table = table_of(heading, "training")
    assert len(table) >= 3
    for training, *cells in table:
        for cell, (name, column) in zip(cells, LABELS[heading], strict=True):
            own = [row for row in rows_of(name) if row["defense"] == training.strip("`")]
            attack, sign, k = column.replace("@", "±").partition("±")
            if sign:
                (row,) = [row for row in own if (row["attack"], row["k"]) == (attack, k)]
                values = [row["mean"], row["half_width"]][: 2 if "±" in column else 1]
                if k != "0" and "±" in column:
                    scratch = float(row["baseline_scratch"])
                    assert ("**" in cell) is (float(row["mean"]) <= scratch)
            elif column == "best":
                values = [
                    max((row["mean"] for row in own if row["k"] in ("0", k)), key=float)
                    for k in ("1", "5", "10")
                ]
            else:
                values = [own[0]["test_accuracy"]]
            assert_shows(cell, [100 * float(value) for value in values])


# --- copied tables --------------------------------------------------------------------------------

#: Tables of which every row is in a stored table: heading, first column and file.
COPIES = [
    ("# Codecs on digits", "codec", "compare_digits.csv"),
    ("# The speed of codecs", "|", "batch_codecs.csv"),
    ("## Lengths of frames", "|", "frame_lengths.csv"),
    ("## Speed", "d, k", "codec_speed.csv"),
    ("## Twenty classes at matched bytes", "codec", "fm20_table.csv"),
    ("## Gradients of a rare class", "defense", "gradient_defenses.csv"),
    ("## Defenses that train", "defense or codec", "inversion_defenses_table.csv"),
    ("# Private networks: speed, leakage and the decoder", "workload", "mpc_line.csv"),
    ("## What P2 can infer", "attack", "mpc_p2_attacks.csv"),
    ("# Private federated averaging, measured", "training", "horizontal_figures.csv"),
    ("## Beside what PyTorch has", "network", "step_peers.csv"),
    ("## Tables larger than memory", "rows x numbers, setting", "memory_tables.csv"),
    ("# Missing rows, unlabelled rows and memory", "table, share", "missing_rows.csv"),
    ("# Boosted trees beside XGBoost", "protection, or XGBoost", "trees_speed.csv"),
    (
        "# Gains of joint training and costs of protection on real tables", "table, bottoms,",
        "value_tables.csv",
    ),
    ("## What protection costs", "trained", "value_protection.csv"),
    ("# The speed of private set intersection", "system", "psi.csv"),
    ("# Training on a graphics card", "network (rows of a batch,", "gpu_steps.csv"),
    ("# Shared first layers: attacks, rounding and cost", "a step", "secure_layer_steps.csv"),
    ("# The speed of serving", "clients", "serving.csv"),
    ("# Scorecards: accuracy and time", "table", "scorecard.csv"),
    ("## With secure sums", "table", "scorecard_shared.csv"),
]  # fmt: skip


@pytest.mark.parametrize(("heading", "first", "name"), COPIES, ids=[name for *_, name in COPIES])
def test_rows_of_a_table_are_rows_of_its_file(heading, first, name):
    """A row shows some cells of a stored row in their order, of the row with its name if any."""
    stored = [list(map(as_written, row.values())) for row in rows_of(name)]
    table = table_of(heading, first)
    assert table
    for row, *cells in [[cell.replace("`", "") for cell in each] for each in table]:
        chosen = [each for each in stored if each[0] == row] or stored
        assert any(all(cell in left for cell in cells) for left in map(iter, chosen)), (row, cells)


#: Files with texts, or with figures as a benchmark prints them, besides those of `COPIES`.
TEXTS = (
    "coded_bytes", "defense_prototypes", "goals", "leaderboard_tasks", "mpc_vectors",
    "outside_table",
)  # fmt: skip
#: Several figures in one cell: with an interval, or one after another.
SEVERAL = re.compile(rf".*\d ?± ?[.\d].*|{NUMBER.pattern}([,;/ ]+{NUMBER.pattern})+ ?%?")


def test_a_cell_has_one_figure():
    """So that a program can read the files; thousands may have commas."""
    printed = {f"{name}.csv" for name in TEXTS} | {name for *_, name in COPIES}
    faults = [
        (path.name, name, cell)
        for path in RESULTS.glob("*.csv")
        if path.name not in printed
        for row in rows_of(path.name)
        for name, cell in row.items()
        if SEVERAL.fullmatch(as_written(cell)) and not re.fullmatch(r"\d{1,3}(,\d{3})+", cell)
    ]
    assert not faults


#: Files of figures that were printed by a command, at a commit, on a day.
PRINTED = (
    "alignment_reused.csv", "gpu_products.csv", "gpu_steps.csv", "psi.csv", "roles_labels.csv",
    "roles_middle.csv", "scorecard.csv", "scorecard_shared.csv", "secure_layer_attacks.csv",
    "secure_layer_steps.csv", "serving.csv",
)  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_printed_figures_have_their_command_commit_and_day(name):
    for row in rows_of(name):
        assert re.search(r"python -m benchmarks\.\w+|pytest -s tests/\w+\.py", row["command"])
        assert re.fullmatch(r"[0-9a-f]{7,8}", row["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])


@pytest.mark.parametrize(
    ("heading", "first", "name"),
    [
        (
            "# Leakage of a party in the middle and of several label parties", "defense",
            "roles_middle.csv",
        ),
        ("## Several label parties", "session", "roles_labels.csv"),
    ],
)  # fmt: skip
def test_figures_of_roles(heading, first, name):
    """Each cell is the stored figure, rounded."""
    table, stored = table_of(heading, first), rows_of(name)
    assert len(table) == len(stored)
    for (named, *cells), row in zip(table, stored, strict=True):
        own, *values = row.values()
        assert named.strip("`") == own
        for cell, value in zip(cells, values, strict=False):
            assert_shows(cell, [float(value)])


def test_the_cost_of_reused_keys():
    first, second = rows_of("alignment_reused.csv")
    page = (RESULTS / "alignment.md").read_text(encoding="utf-8")
    said = "takes the parties {label_cpu_s} and {bank_cpu_s} s of CPU time and {sent}."
    assert said.format(**second) in page
    assert "took {label_cpu_s} and {bank_cpu_s} s and {sent} (".format(**first) in page


def test_label_propagation_over_pictures_beats_an_attack_on_a_wide_cut():
    rows, reached = rows_of("labels_mlp_128.csv"), []
    for attack in ("mlp:teacher=propagation,scaler=whiten", "label_propagation:at=inputs"):
        of = [row for row in rows if row["attack"] == attack]
        seeds = [[100 * float(r["accuracy"]) for r in of if r["seed"] == seed] for seed in "012"]
        reached.append("{:.1f} ± {:.1f} %".format(*interval([mean(one) for one in seeds])))
    page = (RESULTS / "labels.md").read_text(encoding="utf-8")
    assert "infers {}, but label propagation over the pictures alone {} (".format(*reached) in page


def test_figures_of_shared_layers_and_of_the_card_in_sentences():
    shared, card = (
        (RESULTS / f"{page}.md").read_text(encoding="utf-8") for page in ("secure_layer", "gpu")
    )
    attacks = {(row["dealer"], row["attack"]): row for row in rows_of("secure_layer_attacks.csv")}
    for (_, attack), row in attacks.items():
        if attack == "logistic":
            assert (
                f"{row['plain']} behind the bottom of ordinary training, {row['messages']} with "
            ) in shared
            assert (
                f" messages, {row['untrained']} behind untrained bottoms and {row['scratch']} from "
            ) in shared
    of = attacks["label party", "logistic regression on training rows' gradients"]
    assert f"{of['plain']} in ordinary training and {of['messages']} with" in shared
    assert f"(guess {of['guess']}," in shared
    products = [row for row in rows_of("gpu_products.csv") if row["what"].startswith("product")]
    for place, where in (("card", "on the card"), ("processor", "")):
        *some, last = (f"{float(row[f'{place}_ms']):,g}" for row in products)
        assert f"take {', '.join(some)} and {last} ms {where}".strip() in card
    cuts = [row for row in rows_of("gpu_products.csv") if row["what"].startswith("cut")]
    told = card.rpartition("Coding and decoding")[2].partition("numbers takes")[2]
    assert_shows(
        re.sub(r"4-bit", "", told),
        [float(row[f"{place}_ms"]) for row in cuts for place in ("card", "processor")],
    )


def test_whose_noise():
    """At epsilon 1, and without noise in the last row."""
    stored = {
        (row["task"], row["noise of"], row["epsilon"]): f"{row['accuracy']} ± {row['deviation']}"
        for row in rows_of("pea_noise.csv")
    }
    heading = "# The gains by features, initial weights and joint noise (PEA)"
    table = table_of(heading, "noise added by, at epsilon 1")
    assert len(table) == 5
    for who, *cells in table:
        of = ("one curator", "none") if who == "nothing" else (who, "1")
        assert cells == [stored[task, *of] for task in ("MNIST", "CIFAR-10", "reviews")]


# --- fine-tuning and attacks on trainings ---------------------------------------------------------


def test_split_fine_tuning():
    """Means and standard deviations over seeds, and the bytes of a token."""
    stored = [row for row in rows_of("smollm2.csv") if row["task"] == "polarity"]
    table = table_of("## Fine-tuning", "codec, both ways")
    assert len(table) > 3
    for codec, accuracy, *sent in table:
        of = [r for r in stored if (r["codec"], r["test_texts"]) == (codec.strip("`"), "400")]
        values = [100 * float(row["accuracy"]) for row in of]
        shown_values = [mean(values), stdev(values)] if len(values) > 1 else values
        assert_shows(accuracy, shown_values)
        for cell, key in zip(sent, ("cut", "output", "gradient"), strict=True):
            assert_shows(cell, [float(of[0][f"{key}_bytes"])])


@pytest.mark.parametrize(
    ("heading", "first", "attacks"),
    [
        (
            "## Labels from gradients", "top, codec",
            ("surrogate", "gradient_similarity", "gradient_similarity:rounds=0"),
        ),
        (
            "## Columns from cuts", "codec",
            ("test rows", "inversion", "white_box_inversion:steps=150"),
        ),
    ],
)  # fmt: skip
def test_attacks_on_trainings(heading, first, attacks):
    """The figures of single seeds have the stored mean."""
    tops = {"linear": "MNIST linear top", "mlp:hidden=64": "MNIST hidden top"}
    table = table_of(heading, first)
    assert len(table) == 3
    for training, *cells in table:
        *top, codec = training.split(", ", 1)
        for cell, attack in zip(cells, attacks, strict=True):
            (row,) = [
                row
                for row in rows_of("training_attacks.csv")
                if (row["task"], row["training"], row["attack"])
                == (tops[top[0]] if top else "MNIST pictures", codec, attack)
            ]
            values = list(map(float, shown(cell)))
            assert len(values) == int(row["victims"])
            assert mean(values) == pytest.approx(float(row["mean"]), abs=0.00051)


def test_the_leaderboard():
    """The page has the undefended model, and the defenses that leak least, as they are stored."""
    stored = {(r["task"], r["defense"], r["k"]): r for r in rows_of("leaderboard.csv")}
    names = "task", "defense", "holds"
    access = {tuple(row[name] for name in names): row for row in rows_of("leaderboard_access.csv")}
    summary = {
        row[0]: row for row in table_of("# Leaderboard: which defense holds against what", "task")
    }
    page = (RESULTS / "leaderboard.md").read_text(encoding="utf-8")
    for row in stored.values():
        assert re.fullmatch("[0-9a-f]{8}", row["commit"])
        text = page.split(f"## {row['task']}\n")[1].split("\n## ")[0]
        assert row["commit"] in text.split("; attacks:")[0]
    for task in {task for task, _, _ in stored}:
        worst = {
            defense: max(
                (leaks(r), float(r["above"]))
                for (t, d, _), r in stored.items()
                if (t, d) == (task, defense)
            )
            for defense in {d for t, d, _ in stored if t == task}
        }
        shown_to = [name for name in worst if worst[name][0] and name != "none"]
        assert summary[task][3] == f"{len(shown_to)} of {len(worst) - 1}"
        table = table_of(f"## {task}", "defense")
        chosen = [row[0].strip("`") for row in table]
        assert chosen == sorted(chosen, key=worst.__getitem__)
        left = set(worst) - set(chosen)
        assert "none" in chosen
        assert min(map(worst.__getitem__, left)) >= max(
            worst[name] for name in chosen if name != "none"
        )
        plain = float(stored[task, "none", "5"]["utility"])
        for defense, utility, less, cuts, above, attack, k, verdict in table:
            name = defense.strip("`")
            row = stored[task, name, k]
            assert (attack, verdict) == (row["attack"], row["verdict"])
            assert (leaks(row), float(row["above"])) == worst[name]
            assert_shows(
                cuts.partition("±")[0], [100 * float(access[task, name, "cuts alone"]["above"])]
            )
            difference = [] if name == "none" else [100 * (float(row["utility"]) - plain)]
            pairs = [(utility, [100 * float(row["utility"])]), (less, difference)]
            for cell, values in [*pairs, (above, [100 * float(row["above"])])]:
                assert_shows(cell.partition("±")[0], values)


def leaks(row: Row) -> bool:
    """Whether a stored row is shown to leak."""
    return row["verdict"] == "leaks"


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
    page = (RESULTS / "attacking.md").read_text(encoding="utf-8")
    assert "On eight of ten defended victims, `adaptive` infers more labels" in page
    assert all(float(row["spent_s"]) <= float(row["budget_s"]) for row in stored)


def test_trees_on_real_tables():
    """Means of five seeds, and how far ours are from XGBoost's of the same seed."""
    stored = rows_of("trees_tables.csv")
    table = table_of("## Accuracy of real tables", "table")
    assert [row[0] for row in table] == list(dict.fromkeys(row["table"] for row in stored))
    for name, measure, *cells in table:
        of = [row for row in stored if row["table"] == name]
        assert len(of) == 5
        assert {row["measure"] for row in of} == {measure}
        ours, theirs, on_our_bins, reordered = (
            [float(row[who]) for row in of]
            for who in ("ours", "xgboost", "xgboost_on_our_bins", "xgboost_reordered")
        )
        for cell, values in zip(cells, (ours, theirs, on_our_bins), strict=False):
            assert_shows(cell, [mean(values)])
        apart = [one - other for one, other in zip(ours, theirs, strict=True)]
        assert_shows(cells[3], [mean(apart), stdev(apart)])
        moved = [one - other for one, other in zip(reordered, theirs, strict=True)]
        assert_shows(cells[4], [mean(moved), stdev(moved)])
        within = abs(mean(ours) / mean(theirs) - 1) < 0.002
        assert within is (name != "abalone"), "what the page says is reached"
    many = rows_of("trees_abalone.csv")
    apart = [float(row["ours"]) - float(row["xgboost"]) for row in many]
    assert len(many) == 20
    assert abs(mean(apart)) < 0.002 * mean(float(row["xgboost"]) for row in many)
    assert f"{mean(apart):.4f} ± {stdev(apart):.4f}".replace("0.", ".") in (
        RESULTS / "trees.md"
    ).read_text(encoding="utf-8")


FREE = "label-free bottom"


def test_attacks_from_outside():
    """The best of them on each training, and the others, on the victims of `adaptive`."""
    stored = rows_of("outside.csv")
    trainings = dict.fromkeys((row["task"], row["defense"]) for row in stored)
    table = [list(map(as_written, row.values())) for row in rows_of("outside_table.csv")]
    assert [(row[0], row[1]) for row in table] == list(trainings)
    shown = [
        [cell.replace("`", "") for cell in r] for r in table_of("## Attacks from outside", "task")
    ]
    assert shown
    assert all(row in table for row in shown)
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


PLACE = ("utility", "gain", "reaches", "leak")


def over(values):
    return mean(values.values())


def less(values, reference):
    """Differences over the seeds of both."""
    return [value - reference[seed] for seed, value in values.items() if seed in reference]


def test_the_frontier():
    """Places and verdicts from rows by seed; the page's lines are some of them."""
    stored, places = rows_of("frontier.csv"), rows_of("frontier_places.csv")
    page = (RESULTS / "frontier.md").read_text(encoding="utf-8")
    summary, found = table_of("## What is shown", "task"), []
    for task in dict.fromkeys(row["task"] for row in stored):
        of = [row for row in stored if row["task"] == task]
        without = {row["defense"] for row in of if row["family"] in (FREE, "no model")}
        shared = set.intersection(
            *({row["seed"] for row in of if row["defense"] == one} for one in without)
        )
        of = [row for row in of if row["seed"] in shared]
        utility: dict[str, dict[str, float]] = {}
        reached: dict[tuple[str, str], dict[str, float]] = {}
        for row in of:
            key, seed = (row["defense"], row["attack"]), row["seed"]
            reached.setdefault(key, {})[seed] = 100 * float(row["reaches"])
            if row["utility"]:
                utility.setdefault(row["defense"], {}).setdefault(seed, 100 * float(row["utility"]))
        family = {row["defense"]: row["family"] for row in of}
        blind = max((v for (d, _), v in reached.items() if d in without), key=over)
        free = max((d for d in utility if family[d] == FREE), key=lambda d: over(utility[d]))
        table = {row["defense"]: row for row in places if row["task"] == task}
        assert set(table) == set(utility)
        learned = [one for one in utility if family[one] != FREE]
        better = [
            ttest_1samp(less(utility[one], utility[free]), 0, alternative="greater").pvalue
            for one in learned
        ]
        is_ahead = dict(zip(learned, false_discovery_control(better) <= 0.05, strict=True))
        ahead = []
        for defense, row in table.items():
            worst = max(
                (a for d, a in reached if d == defense), key=lambda a: over(reached[defense, a])
            )
            assert row["attack"] == worst
            own, read = utility[defense], reached[defense, worst]
            leak = less(read, blind)
            exact = ([*own.values()], less(own, utility[free]), [*read.values()], leak)
            for name, values in zip(PLACE, exact, strict=True):
                cells = [100 * float(row[name]), 100 * float(row[f"{name}_half_width"])]
                assert cells == pytest.approx(interval(values), abs=0.011)
            if is_ahead.get(defense) and family[defense] != "undefended":
                ahead.append(row["verdict"])
            assert row["verdict"] != "beats it" or (is_ahead[defense] and interval(leak)[0] <= 1)
        (line,) = [row for row in summary if row[0] == task]
        learned = [one for one in table if family[one] not in (FREE, "undefended")]
        assert line[1] == f"`{free}`"
        assert line[5:7] == [f"{len(ahead)} of {len(learned)}", str(ahead.count("leaks"))]
        chosen = table_of(f"## {task}", "defense")
        kinds = [family[name.strip("`")] for name, *_ in chosen]
        assert len(set(kinds)) == len(kinds) == 4
        assert {"undefended", FREE} < set(kinds)
        shown = [table[name.strip("`")]["utility"] for name, *_ in chosen]
        assert shown == sorted(shown, reverse=True)
        for name, good, gained, leaked, verdict in chosen:
            row = table[name.strip("`")]
            assert verdict == row["verdict"]
            for cell, key in ((good, "utility"), (gained, "gain"), (leaked, "leak")):
                assert_shows(cell, [100 * float(row[key]), 100 * float(row[f"{key}_half_width"])])
        found += [one for one, row in table.items() if row["verdict"] == "beats it"]
    assert ("tries is shown to beat it." in page) == (not found)
    assert all(f"`{defense}`" in page.split("\n##")[0] for defense in found)


def test_a_whitened_cut_beside_a_label_free_one():
    """The margin of `alpha=2` below the best attack on the label-free bottom, seed by seed."""
    read: dict[tuple[str, str, int], list[float]] = {}
    for row in rows_of("labels_hidden_whitened_mnist.csv"):
        kind = row["training"].split(":")[0], row["attack"], int(row["k"])
        read.setdefault(kind, []).append(100 * float(row["accuracy"]))
    page = (RESULTS / "labels.md").read_text(encoding="utf-8")
    (line,) = [one for one in page.splitlines() if "](labels_hidden_whitened_mnist.csv)" in one]
    best, own, margins = [], [], []
    for k in (1, 5, 10):
        free, ours = (
            max((v for (kind, _, at), v in read.items() if (kind, at) == (of, k)), key=mean)
            for of in ("label_free", "anchored")
        )
        best.append(f"{mean(free):.1f}")
        own.append(f"{mean(ours):.1f}")
        gap, width = interval([a - b for a, b in zip(free, ours, strict=True)])
        margins.append(f"{gap:.1f} ± {width:.1f}")
    for three in (best, own, margins):
        assert "{}, {} and {}".format(*three) in line


def test_the_margins_of_the_seventh_goal_of_labels():
    """On MNIST, `alpha=2` below label-free bottoms: the untrained ones, and the trained victims."""
    rows = [row for row in rows_of("hidden_labels_mnist.csv") if row["k"] in ("0", "1", "5", "10")]
    defense, free = "anchored:rate=0.02+potential:alpha=2,norm=no", "label_free:kind=pca,features=0"

    def best(of: str, k: int, column: str) -> float:
        own = [row for row in rows if row["defense"] == of and row["k"] in ("0", str(k))]
        return max(100 * float(row[column]) for row in own)

    own = [best(defense, k, "mean") for k in (1, 5, 10)]
    untrained = [best(defense, k, "baseline_pca") for k in (1, 5, 10)]
    trained = [best(free, k, "mean") for k in (1, 5, 10)]
    (goal,) = [row["measured"] for row in rows_of("goals.csv") if row["asked"].startswith("G7:")]
    found = re.search(r"sees gradients: (.*?) below .*?, and (.*?) below", goal)
    assert found is not None
    assert_shows(re.sub(r" ± \S+\d", "", found[1]), less_than(own, untrained))
    assert_shows(found[2], less_than(own, trained))
    assert f"22 attacks it was {found[2].replace(', 6.5', ' and 6.5')} points" in (
        RESULTS / "labels.md"
    ).read_text(encoding="utf-8")


def less_than(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Differences of references and values."""
    return [other - one for one, other in zip(values, references, strict=True)]


def test_other_tops_on_label_free_bottoms():
    """The best top of each task, and those shown to be ahead, from rows by seed."""
    value = {
        (row["task"], row["defense"], row["top"], row["seed"]): 100 * float(row["utility"])
        for row in rows_of("frontier_tops.csv")
    }
    summary = {row[0]: row[1].strip("`") for row in table_of("## What is shown", "task")[:6]}
    reached: dict[tuple[str, ...], list[float]] = {}
    gains: dict[tuple[str, ...], list[float]] = {}
    for (task, defense, top, seed), utility in value.items():
        reference = value.get((task, summary[task], "network", seed))
        if top != "network" and reference is not None:
            gains.setdefault((task, defense, top), []).append(utility - reference)
            reached.setdefault((task, defense, top), []).append(utility)
    for task, bottom, top, victims, good, gain in table_of(
        "## Other tops on label-free bottoms", "task"
    ):
        key = max((key for key in gains if key[0] == task), key=lambda key: mean(gains[key]))
        assert key == (task, bottom.strip("`"), top)
        assert int(victims) == len(gains[key])
        assert_shows(good, interval(reached[key]))
        assert_shows(gain, interval(gains[key]))
    chances = [student.sf((mean(v) - 1) / (stdev(v) / len(v) ** 0.5), len(v) - 1) for v in
               gains.values()]  # fmt: skip
    ahead = zip(gains, false_discovery_control(chances) <= 0.05, strict=True)
    said = ", ".join(f"{top} on `{defense}` ({task})" for (task, defense, top), ok in ahead if ok)
    text = (RESULTS / "frontier.md").read_text(encoding="utf-8")
    assert f" {len(gains)} tries of " in text
    assert f"ahead by more than 1 point: {said}." in text


# --- private training -----------------------------------------------------------------------------


def test_attacks_on_trees():
    """Utility, the worst attack on labels and columns read from bins, from rows by seed."""
    stored = rows_of("trees_attacks.csv")
    summary = table_of("## What trees give away", "task")
    for task in dict.fromkeys(row["task"] for row in stored if "_" not in row["task"]):
        of = [row for row in stored if row["task"] == task]
        models = list(dict.fromkeys(row["model"] for row in of))
        table = table_of(f"## {task}", "trees")
        assert len(table) == len(models)
        for model, (_, good, less, attack, reaches, leak, bins, *_) in zip(
            models, table, strict=True
        ):
            own = [row for row in of if row["model"] == model]
            utility, plain = utility_by_seed(own), utility_by_seed(of)
            assert_shows(good, interval(list(utility.values())))
            assert_shows(less, interval([utility[seed] - plain[seed] for seed in utility]))
            labels = [row for row in own if row["measure"] == "auc"]
            worst = max(
                (row["attack"] for row in labels),
                key=lambda name: sum(
                    float(row["reaches"]) for row in labels if row["attack"] == name
                ),
            )
            assert attack == f"`{worst}`"
            found = [row for row in labels if row["attack"] == worst]
            assert_shows(reaches, interval([100 * float(row["reaches"]) for row in found]))
            above = [100 * (float(row["reaches"]) - float(row["without"])) for row in found]
            assert_shows(leak, interval(above))
            read = [
                [100 * (1 - float(row["reaches"]) / float(row["guess"])) for row in own
                 if row["attack"] == name]
                for name in ("bins", "bins:rows=false")
            ]  # fmt: skip
            assert_shows(bins, interval(max(read, key=mean)))
        (line,) = [row for row in summary if row[:2] == [task, "trees"]]
        assert line[2:] == [table[0][1], *table[0][3:6]]


def utility_by_seed(rows: Iterable[Row]) -> dict[str, float]:
    """The utility of each seed's first row, in percent."""
    found: dict[str, float] = {}
    for row in rows:
        found.setdefault(row["seed"], 100 * float(row["utility"]))
    return found


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


@pytest.mark.parametrize("task", ["bank_marketing", "credit_default", "fashion_mnist"])
def test_columns_of_another_party(task):
    """The better of cuts alone and of cuts with own columns, and how far seeds lie apart."""
    stored = [row for row in rows_of("columns.csv") if row["task"] == task]
    columns = list(dict.fromkeys(row["column"] for row in stored))
    whole = [list(row.values()) for row in rows_of(f"columns_table_{task}.csv")]
    assert len(whole) == 1 + len({row["protection"] for row in stored})
    table = table_of(f"## Columns of {task.replace('_', ' ')}", "protection")
    assert all(line in whole for line in table)
    for name, utility, *cells, apart, left in whole:
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
    """The moves between stored readings and readings again, which the text names."""
    best = lambda row: max(float(row["cut"]), float(row["both"]))  # noqa: E731
    of = lambda row: (row["protection"], row["column"])  # noqa: E731
    again = {of(row): row for row in rows_of("columns_reread.csv")}
    stored = [row for row in rows_of("columns.csv") if of(row) in again]
    first = {of(row): row for row in stored if row["seed"] == "0"}
    assert len(again) == 32
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
    text = (RESULTS / "columns.md").read_text()
    told = re.search(r"categories change by (-.*?)\. Only .*? differ \((.*?)\)", text, re.DOTALL)
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


@pytest.mark.parametrize(
    ("heading", "name", "measure", "intervals"),
    [
        ("## Twenty classes at matched bytes", "fm20.csv", "test_accuracy", True),
        ("## Film reviews, fold by fold", "review_polarity.csv", "test_accuracy", True),
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


def test_what_a_page_would_print_wrongly_is_seen():
    assert_shows("**66.7 ± 1.3**", [66.74, 1.26])
    with pytest.raises(AssertionError):
        assert_shows("66.7 ± 1.3", [66.9, 1.26])
    with pytest.raises(AssertionError):
        assert_shows("66.7", [66.7, 1.0])
