"""Leakage of boosted trees for each protection: labels inferred from splits, columns from bins.

    python -m benchmarks.trees_attacks --task credit       # goes on where it was left
    python -m benchmarks.trees_attacks --redraw            # page of the stored rows

A task is a grid file of `examples/trees`, which names its victims: default trees, trees with fewer
bins, trees with randomised bins, and trees whose first rounds use only the label party's columns.
Parties, rows and leaked labels are those of the task with the same name in `benchmarks.frontier`.
The networks of that task are shown beside the trees. In the tasks `NAME_nodes`, feature parties
know which rows are in which node. Result rows of all tasks are in one CSV file, and the page is
made from this file and the frontier's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks import frontier, harness
from benchmarks.studies import (
    EXAMPLES,
    StudyPage,
    over,
    played,
    points_text,
    read_rows,
    row_count,
    stored,
    study_of,
    write_rows,
)
from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice
from vfl.experiments.cells import GridFolder
from vfl.experiments.leaderboard import by_attack, by_baseline, label_measure, utility_of
from vfl.experiments.results import LoadedGrid, Record
from vfl.experiments.statistics import Estimate, by_victim
from vfl.experiments.tables import Table

FOLDER = EXAMPLES / "trees"
TASKS = ("bank", "credit")
#: For each task, the name of its variant in which feature parties learn which rows are in which
#: node.
TOLD = {one: f"{one}_nodes" for one in TASKS}
#: Name of the trees that have the options of the experiment file itself.
PLAIN = "none"
LABELS, COLUMNS, MEMBERS = "auc", "mse", "membership_auc"
#: Attacks on columns, by the values from which the attacker infers columns.
OF_BINS, OF_ANSWERS, OF_OWN = ("bins", "bins:rows=false"), "inversion:steps=300", "own_columns"


@dataclass(frozen=True)
class AttackRow:
    """Result of one attack on one victim.

    Attributes:
        task, model, seed: task, model and seed of the training; `PLAIN` is the experiment's own
            model.
        utility: AUC on the test rows of the training.
        attack: its spec.
        measure: one of `LABELS`, `COLUMNS` or `MEMBERS`.
        reaches: result of the attack in this measure: the mean over draws of leaked rows.
        guess: result of the best constant guess.
        without: best result of the same attacker without the model, on the same leaked rows; for
            columns, the result of a prediction from the label party's own columns.
    """

    task: str
    model: str
    seed: int
    utility: float
    attack: str
    measure: str
    reaches: float
    guess: float
    without: float


def rows_of(task: str, folder: GridFolder) -> Iterator[AttackRow]:
    """Yield the results of every attack on every victim of a grid, averaged over draws."""
    grid = LoadedGrid(folder)
    by_measure: dict[str, list[Record]] = {LABELS: [], COLUMNS: [], MEMBERS: []}
    for one in grid.attacks:
        by_measure.get(label_measure(one) or one.measure, []).append(one)
    blind = [_by_victim(values) for values in by_baseline(by_measure[LABELS]).values()]
    best = {seed: max(one[seed] for one in blind if seed in one) for seed in blind[0]}
    for model in dict.fromkeys(one.training for one in grid.attacks):
        utility = utility_of(grid.records, "auc", model)
        for measure, records in by_measure.items():
            own = [one for one in records if one.training == model]
            guesses = {int(one.repeat): one.guess or 0.0 for one in own}
            attacks = {name: _by_victim(values) for name, values in by_attack(own).items()}
            without = {LABELS: best, COLUMNS: attacks.get(OF_OWN, {}), MEMBERS: guesses}[measure]
            for attack, values in attacks.items():
                for seed, reached in values.items():
                    yield AttackRow(
                        task, model, seed, utility[str(seed)], attack, measure, reached,
                        guesses[seed], without[seed],
                    )  # fmt: skip


def _by_victim(values: Mapping[tuple[str, int], float]) -> dict[int, float]:
    return {int(seed): value for seed, value in by_victim(dict(values)).items()}


# --- results for each model -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worst:
    """The attack on labels with the highest mean result.

    Attributes:
        utility: AUC of the victims on the test rows.
        attack: its spec.
        reaches: its AUC.
        leak: AUC of the attack minus the best AUC of the same attacker without the model.
    """

    utility: Estimate
    attack: str
    reaches: Estimate
    leak: Estimate


@dataclass(frozen=True, slots=True)
class Place:
    """Results for one model of a task, over seeds.

    Attributes:
        model: the options of the model that differ from the plain model's options.
        loss: utility of the plain trees minus the utility of this model.
        worst: the attack on labels with the highest mean result.
        bins, answers: fraction of the variance of columns that attacks infer from bins, and the
            fraction that attacks infer from predictions.
        members: AUC of the membership inference.
    """

    model: str
    loss: Estimate
    worst: Worst
    bins: Estimate
    answers: Estimate
    members: Estimate


@dataclass(frozen=True, slots=True)
class Task:
    """Results of one task.

    Attributes:
        task: its name.
        seeds: number of victims of each model.
        without: best result on labels without a model.
        own: fraction of the variance of columns that the label party's own columns predict.
        places: results for each model, in the order of the grid.
        told: the strongest attack if feature parties know which rows are in which node; None if
            this attack was not run.
        networks: the frontier's undefended network, and the frontier's most accurate network with a
            label-free bottom.
    """

    task: str
    seeds: int
    without: Estimate
    own: Estimate
    places: Sequence[Place]
    told: Worst | None
    networks: Sequence[frontier.Place]


def task_of(
    rows: Sequence[AttackRow], told: Sequence[AttackRow], networks: frontier.Frontier
) -> Task:
    """Return the results of a task, including those for known nodes and for networks."""
    models = list(dict.fromkeys(one.model for one in rows))
    plain = _by_seed([one for one in rows if one.model == PLAIN], "utility")
    places = [_place_of([one for one in rows if one.model == model], plain) for model in models]
    labels = [one for one in rows if (one.model, one.measure) == (PLAIN, LABELS)]
    undefended = next(one for one in networks.places if one.family == frontier.UNDEFENDED)
    own = [one for one in rows if one.model == PLAIN and one.attack == OF_OWN]
    return Task(
        rows[0].task, len(plain), over(_by_seed(labels, "without").values()),
        _explained(own), places, _worst_of(told) if told else None, [undefended, networks.best],
    )  # fmt: skip


def _worst_of(rows: Sequence[AttackRow]) -> Worst:
    found: dict[str, list[AttackRow]] = {}
    for one in rows:
        if one.measure == LABELS:
            found.setdefault(one.attack, []).append(one)
    worst = max(found, key=lambda name: sum(one.reaches for one in found[name]))
    own = found[worst]
    return Worst(
        over(one.utility for one in own),
        worst,
        over(one.reaches for one in own),
        over(one.reaches - one.without for one in own),
    )


def _place_of(rows: Sequence[AttackRow], plain: Mapping[int, float]) -> Place:
    utility = _by_seed(rows, "utility")
    columns = {
        attack: _explained([one for one in rows if one.attack == attack])
        for attack in (*OF_BINS, OF_ANSWERS)
    }
    return Place(
        _options(rows[0].model),
        over(utility[seed] - plain[seed] for seed in utility),
        _worst_of(rows),
        max((columns[name] for name in OF_BINS), key=lambda one: one.mean),
        columns[OF_ANSWERS],
        over(one.reaches for one in rows if one.measure == MEMBERS),
    )


def _by_seed(rows: Sequence[AttackRow], figure: str) -> dict[int, float]:
    return {one.seed: float(getattr(one, figure)) for one in rows}


def _explained(rows: Sequence[AttackRow]) -> Estimate:
    return over(1 - one.reaches / one.guess for one in rows)


def _options(model: str) -> str:
    """Return the options of a model that differ from those of the plain model."""
    kept = [one for one in model.partition(":")[2].split(",") if one not in _COMMON]
    return ", ".join(kept) or "as they are"


_COMMON = ("max_depth=4", "learning_rate=0.1")


# --- page -----------------------------------------------------------------------------------------


def summary_of(found: Sequence[Task]) -> str:
    """Return a line for each task: leakage of default trees and of the frontier's networks."""
    head = [
        "task", "model", "test AUC", "worst attack on labels", "reaches", "less no model",
    ]  # fmt: skip
    lines = []
    for each in found:
        undefended, free = each.networks
        shown: dict[str, Worst | frontier.Place] = {"trees": each.places[0].worst}
        if each.told is not None:
            shown["trees, nodes known"] = each.told
        shown |= {"network": undefended, f"label-free network: `{free.defense}`": free}
        lines += [
            [
                each.task, called, points_text(one.utility), f"`{one.attack}`",
                points_text(one.reaches), points_text(one.leak, "+"),
            ]
            for called, one in shown.items()
        ]  # fmt: skip
    return (
        "A feature party that knows ten labels of each class infers labels from trees a few points "
        "better than without a model. From an undefended network on the same rows "
        "([frontier](frontier.md)) it infers all labels. A label party infers the feature party's "
        "columns from the bins of trees; randomised bins prevent that, but cost AUC. Figures are "
        "AUC in percent, with 95 % intervals over victims.\n\n" + Table(head, lines, 2).markdown()
    )


def table_of(found: Task) -> Table:
    """Return a table with a row for each model."""
    head = [
        "trees", "test AUC", "less as they are", "worst attack on labels", "reaches",
        "less no model", "columns from bins", "from answers", "members",
    ]  # fmt: skip
    lines = [
        [
            one.model, points_text(one.worst.utility), points_text(one.loss, "+"),
            f"`{one.worst.attack}`", points_text(one.worst.reaches),
            points_text(one.worst.leak, "+"), points_text(one.bins), points_text(one.answers),
            points_text(one.members),
        ]
        for one in found.places
    ]  # fmt: skip
    return Table(head, lines)


def task_section(found: Task, page: Path) -> Iterator[str]:
    """Yield the table of one task."""
    yield f"\n## {found.task}\n"
    yield (
        f"{row_count(FOLDER / f'{found.task}.toml')} rows, {found.seeds} victims of each model, "
        f"`examples/trees/{found.task}.toml`. Without a model, attacks on labels have an AUC of "
        f"{points_text(found.without)}, and the label party's own columns explain "
        f"{points_text(found.own)} % of the feature party's columns.\n"
    )
    yield table_of(found).markdown()


METHOD = """
## What was measured

- Models have 100 trees of depth 4, a learning rate of .1, `protect=order` and 255 bins by default.
- *Labels*: the feature party infers labels of test rows from its columns, splits and answers, with
  ten leaked labels of each class. *Less no model* subtracts the best of the same attacks on its
  columns, or from scratch. `decay=1` was added after seed 0 of credit was known.
- *Nodes known*: `protect=shared,nodes=known` discloses which rows are in each node, as SecureBoost
  does.
- *Columns from bins*: with 200 whole rows, the label party infers columns of training rows, in
  percent of their variance. *From answers*: of test rows. Randomised bins do not protect answers.
- *Members*: AUC of inferring training rows by their loss. Epsilon is that of one table cell.
- Bank, and both tasks with known nodes, were measured with earlier
  [bins](trees.md#accuracy-of-real-tables). On credit, new bins change test AUC by at most .0024.
- The worst attack on networks also uses gradients, so leaks of networks and trees are not
  directly comparable.
- Colluding feature parties, `adaptive` and the heavy pack were not tried.
"""


def _note(found: Sequence[Task]) -> str:
    return "; `python -m benchmarks.trees_attacks --task NAME`."


PAGE = StudyPage(
    "Attacks on trees\n\n## What trees give away",
    _note,
    lambda found: [summary_of(found)],
    task_section,
    METHOD,
)


def bench_trees_attacks(
    task: str | None = None,
    seeds: int = 3,
    jobs: int = 1,
    out: Path = Path("runs/trees_attacks"),
    page: Path = Path("docs/results/trees_attacks.md"),
    redraw: bool = False,
) -> list[Task]:
    """Train and attack the victims of a task that have no results yet; write rows and the page.

    Args:
        task: name of a file of examples/trees.
        seeds: number of victims of each model.
        jobs: number of simultaneous trainings with their attacks (cells of the grid), each in its
            own process.
        out: folder for the grids.
        page: file of the page; two CSV files beside it contain the page's rows and the frontier's
            rows.
        redraw: only write the page, without training.
    """
    file = page.with_suffix(".csv")
    rows = read_rows(file, AttackRow)
    if not redraw:
        if task is None:
            raise BadOptionError("no task is given to train", want="--task NAME, or --redraw")
        require_choice("task", task, (*TASKS, *TOLD.values()))
        study = study_of(FOLDER / f"{task}.toml", seeds=list(range(seeds)))
        new = list(rows_of(task, played(study, out / task, jobs)))
        order = [one for each in TASKS for one in (each, TOLD[each])]
        rows = sorted(
            [one for one in rows if one.task != task] + new, key=lambda one: order.index(one.task)
        )
        write_rows(file, AttackRow, rows)
    networks: pd.DataFrame = stored(page.with_name("frontier.csv"), frontier.COLUMNS)
    found = [
        task_of(
            own,
            [row for row in rows if row.task == TOLD[one]],
            frontier.frontier_of(networks[networks.task == one]),
        )
        for one in TASKS
        if (own := [row for row in rows if row.task == one])
    ]
    PAGE.write(page, found, measured=not redraw)
    return found


main = harness.command(bench_trees_attacks, summary_of)


if __name__ == "__main__":
    main()
