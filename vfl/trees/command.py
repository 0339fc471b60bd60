"""`vfl importance`: how much a forest of boosted trees uses each party and each column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.cli.output import Json, Run, emit
from vfl.core.errors import RunFolderError, SpecError

if TYPE_CHECKING:
    from vfl.session import PartyFolder

_FIGURES = ("splits", "gain", "permutation", "shapley")


def importance(run: Run, json: Json = False) -> None:
    """Report which parties and columns boosted trees use, by gain, permutation and Shapley values.

    The numbers come from the last evaluation of the run (`vfl evaluate RUN`). A column has its name
    if RUN contains its party's files; otherwise it has its number at the party that owns it. In a
    feature party's own run folder, the command shows the number of splits on each of its columns,
    and their Shapley values if the last evaluation disclosed them (`vfl evaluate RUN --explain
    PARTY`).
    """
    table = importance_of(run)
    if json:
        emit(table)
        return
    if "rows" in table:
        print(f"on {table['rows']} test rows; gain: share of the total gain of all splits;")
        print("permutation: increase of the loss if the cells of a column or party are permuted;")
        print("shapley: mean absolute Shapley value, added up over outputs")
    heads = [name for name in _FIGURES if name in table["columns"][0]]
    print(f"{'':<32}" + "".join(f"{name:>13}" for name in heads))
    for one in [*table["parties"], *table["columns"]]:
        whose = one["party"] if "column" not in one else f"{one['party']}: {column_name(one)}"
        told = (f"{one[name]:>13}" if name == "splits" else f"{one[name]:>13.4f}" for name in heads)
        print(f"{whose:<32}" + "".join(told))


def importance_of(run: Path) -> dict[str, Any]:
    """Return the importance of parties and columns from a run's folder.

    Returns:
        The entries `parties` and `columns`, each sorted by gain, the largest first. A feature
        party's run folder gives only the entry `columns`: the party's columns on which trees split,
        and their Shapley values if the party received them.

    Raises:
        RunFolderError: the folder lacks files of a party, or the run was never evaluated.
        SpecError: the run's model is not boosted trees.
    """
    from vfl.config.run_folder import RunFolder
    from vfl.session import PartyFolder
    from vfl.session.secure_mode import make
    from vfl.trees.export import columns_of

    folders = [PartyFolder(path) for path in sorted((run / "parties").glob("*"))]
    terms = (folders[0] if folders else PartyFolder(run / "parties")).terms()
    if "xgboost" not in make(terms.secure).exports:
        raise SpecError(
            "the importance of columns is computed only for boosted trees",
            where=str(run),
            want="a run with model = 'trees'",
            fix="vfl value says what each party adds to a network",
        )
    label = terms.label_party
    here = {one.path.name: one for one in folders if one.shape() is not None}
    names = {name: columns_of(one, name == label).names for name, one in here.items()}
    if label not in [one.path.name for one in folders]:
        columns = [row for name in names for row in _own_splits(here[name], names[name])]
        return {"parties": [], "columns": columns}
    found: dict[str, Any] | None = RunFolder.open(run).evaluation().get("importance")
    if found is None:
        raise RunFolderError(
            "the last evaluation of this run measured no importance",
            where=str(run),
            fix="vfl evaluate RUN",
        )
    for one in found["columns"]:
        if one["party"] in names:
            one["name"] = names[one["party"]][one["column"] - 1]
    for what in ("parties", "columns"):
        found[what].sort(key=lambda one: -one["gain"])
    return found


def _own_splits(folder: PartyFolder, names: tuple[str, ...]) -> list[dict[str, Any]]:
    taken, told = Counter(folder.weights()["columns"].tolist()), folder.explained()
    return [
        {"party": folder.path.name, "column": 1 + at, "name": name, "splits": taken[at]}
        | ({"shapley": told[name]} if name in told else {})
        for at, name in enumerate(names)
    ]


def column_name(one: Mapping[str, Any]) -> str:
    """Return a column's name if this host has it, otherwise the column's number at its owner."""
    return str(one.get("name", f"column {one['column']}"))
