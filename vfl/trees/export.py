"""Export of a forest as JSON for XGBoost, if the thresholds of all splits are on this host."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from vfl.core.errors import RunFolderError, SpecError
from vfl.core.seeds import derive
from vfl.core.storage import write_json
from vfl.datasets.encode import CellEncoder, TextColumn
from vfl.session import PartyFolder, Terms
from vfl.session.secure_mode import make
from vfl.trees.bins import Binning
from vfl.trees.boosting import Forest
from vfl.trees.cells import spans_of, within
from vfl.trees.grow import Split, Tree
from vfl.trees.histograms import goes_left
from vfl.trees.objectives import Binary, Classes, Objective, Poisson

#: Largest accepted difference from XGBoost's margins, relative to the largest margin; XGBoost adds
#: float32 numbers.
TOLERANCE = 1e-5
_ROWS = 256
#: Largest threshold in the file; cells of the random rows with which the export is tested are at
#: most half of it, because XGBoost accepts no infinite cells.
_LARGEST = float(np.finfo(np.float32).max)
_ROOT = 2**31 - 1
#: Characters that XGBoost does not accept in a column name.
_UNFIT = re.compile(r"[\[\]<]")


@dataclass(frozen=True)
class Columns:
    """Columns whose thresholds (bin edges) are on this host.

    Attributes:
        names: one name per column.
        binning: edges of the columns' bins.
        texts: for each column, its categories as texts, in the order of their numbers; empty for a
            column of numbers.
    """

    names: tuple[str, ...]
    binning: Binning
    texts: tuple[tuple[str, ...], ...]


def export_forest(run: Path, own: PartyFolder, target: Path) -> dict[str, Any]:
    """Write the forest of a run as `forest.json`, a model file of XGBoost 3.1 or later.

    The file has the columns of all parties whose files are in the run's folder. The folder of a run
    in one process has the thresholds of all columns; in a federation, the label party's folder has
    only the thresholds of its own columns.

    Args:
        run: folder of the run.
        own: the label party's folder in the run's folder.
        target: folder to write to.

    Returns:
        Facts about the written file, and the largest difference between XGBoost's margins and the
        forest's margins for random cells, relative to the largest margin. The difference is None if
        XGBoost is not installed.

    Raises:
        SpecError: the exporting party is not the label party.
        RunFolderError: the thresholds of some splits are on other hosts, or files of the run are
            damaged.
    """
    terms, weights = own.terms(), own.weights()
    if own.path.name != terms.label_party:
        raise SpecError(
            "a feature party has no tree",
            where="--party",
            got=own.path.name,
            want=f"{terms.label_party}, the label party",
        )
    shares = within("share.", weights)
    forest = Forest.of_state(shares)
    forest, columns = _with_columns(forest, shares["column_counts"].tolist(), terms, own)
    classes = own.classes()
    mode: Any = make(terms.secure)
    objective = mode.objective_of(0 if classes is None else len(classes))
    content = model_of(forest, columns, objective)
    path = target / "forest.json"
    write_json(path, content)
    difference = _difference(path, forest, columns.binning) if find_spec("xgboost") else None
    if difference is not None and difference > TOLERANCE:
        path.unlink()
        raise SpecError(
            "XGBoost does not compute what the forest computes",
            got=f"a difference of {difference:.1e}",
            want=f"at most {TOLERANCE:.0e}",
        )
    output = "expected numbers" if classes is None else f"probabilities of {classes}"
    return {
        "half": str(path),
        "inputs": ", ".join(columns.names),
        "output": output,
        "difference": difference,
    }


def model_of(forest: Forest, columns: Columns, objective: Objective) -> dict[str, Any]:
    """Return the content of the XGBoost model file that describes a forest.

    Args:
        forest: forest whose splits are numbered by `columns`.
        columns: all columns on which the forest may split.
        objective: loss on which the forest was trained.
    """
    outputs, count = len(forest.start), len(columns.names)
    name, base, parameters = _objective(objective, forest.start)
    trees = forest.trees
    return {
        "learner": {
            "attributes": {},
            "feature_names": list(columns.names),
            "feature_types": ["c" if one else "float" for one in columns.binning.categories],
            "gradient_booster": {
                "model": {
                    "cats": _categories(columns.texts),
                    "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
                    "iteration_indptr": [outputs * one for one in range(len(forest.rounds) + 1)],
                    "tree_info": [number % outputs for number in range(len(trees))],
                    "trees": [
                        _tree(tree, number, columns.binning) for number, tree in enumerate(trees)
                    ],
                },
                "name": "gbtree",
            },
            "learner_model_param": {
                "base_score": f"[{','.join(repr(float(one)) for one in base)}]",
                "boost_from_average": "1",
                "num_class": str(outputs if outputs > 1 else 0),
                "num_feature": str(count),
                "num_target": "1",
            },
            "objective": {"name": name, **parameters},
        },
        "version": [3, 1, 0],
    }


def _with_columns(
    forest: Forest, counts: Sequence[int], terms: Terms, own: PartyFolder
) -> tuple[Forest, Columns]:
    """Return the forest, with its splits renumbered to those columns that are on this host.

    Raises:
        RunFolderError: the thresholds of some splits are on other hosts.
    """
    label, feature = terms.label_party, terms.feature_parties
    names = [*([label] if label in terms.parties else []), *feature]
    taken = np.bincount([one.column for one in forest.splits], minlength=sum(counts))
    place = np.full(sum(counts), -1)
    found, away = dict[str, Columns](), dict[str, int]()
    for name, part in spans_of(dict(zip(names, counts, strict=True))).items():
        folder = PartyFolder(own.path.parent / name)
        if folder.path.exists():
            here = sum(len(one.names) for one in found.values())
            place[part] = here + np.arange(part.stop - part.start)
            found[name] = columns_of(folder, name == label)
        elif taken[part].any():
            away[name] = int(taken[part].sum())
    if away:
        told = ", ".join(f"{count} on columns of '{name}'" for name, count in away.items())
        raise RunFolderError(
            "this host does not have the thresholds of splits on other parties' columns",
            where=str(own.path.parent),
            got=f"splits without a threshold: {told}",
            want="only splits on columns of parties whose files are on this host",
            fix="vfl predict or vfl serve, which query the owners",
        )

    def moved(split: Split | None) -> Split | None:
        return split and Split(int(place[split.column]), split.left, split.missing_left)

    rounds = [
        [
            Tree([*map(moved, one.splits)], one.children, one.values, one.gains, one.weights)
            for one in trees
        ]
        for trees in forest.rounds
    ]
    return Forest(forest.start, rounds), _joined(found)


def columns_of(folder: PartyFolder, of_label: bool) -> Columns:
    """Return a party's columns, from the party's part of the run.

    Raises:
        RunFolderError: the files are damaged.
    """
    weights, encoder, shape = folder.weights(), folder.encoder(), folder.shape()
    state = within("share.own.", weights) if of_label else weights
    if isinstance(encoder, CellEncoder):
        texts = tuple(
            tuple(one.categories) if isinstance(one, TextColumn) else () for one in encoder.columns
        )
        return Columns(encoder.names, Binning.of_state(state, encoder.categories), texts)
    count = int(np.prod(shape or ()))
    names = tuple(f"{folder.path.name}_{number}" for number in range(count))
    return Columns(names, Binning.of_state(state, (0,) * count), ((),) * count)


def _joined(parts: Mapping[str, Columns]) -> Columns:
    """Join the columns of all parties; if names are equal, all get their party as a prefix."""
    pairs = [(party, _UNFIT.sub("_", name)) for party, own in parts.items() for name in own.names]
    names = [name for _, name in pairs]
    if len(set(names)) < len(names):
        names = [f"{party}.{name}" for party, name in pairs]
    edges = [one for own in parts.values() for one in own.binning.edges]
    categories = [one for own in parts.values() for one in own.binning.categories]
    texts = tuple(one for own in parts.values() for one in own.texts)
    return Columns(tuple(names), Binning(tuple(edges), tuple(categories)), texts)


def _objective(
    objective: Objective, start: np.ndarray
) -> tuple[str, np.ndarray, dict[str, dict[str, str]]]:
    """Return XGBoost's name of the objective, its base score and the objective's parameters."""
    if isinstance(objective, Binary):
        return "binary:logistic", expit(start), {"reg_loss_param": {"scale_pos_weight": "1"}}
    if isinstance(objective, Classes):
        count = {"num_class": str(objective.outputs)}
        return "multi:softprob", start, {"softmax_multiclass_param": count}
    if isinstance(objective, Poisson):
        step = {"max_delta_step": str(objective.max_delta_step)}
        return "count:poisson", np.exp(start), {"poisson_regression_param": step}
    return "reg:squarederror", start, {"reg_loss_param": {"scale_pos_weight": "1"}}


def _categories(texts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the texts of all categories, by which XGBoost numbers DataFrame categories."""
    coded, segments, order = list[dict[str, Any]](), [0], list[int]()
    for own in texts:
        raw = [text.encode() for text in own]
        offsets = np.cumsum([0, *map(len, raw)]).tolist() if raw else []
        coded.append({"offsets": offsets, "values": list(b"".join(raw))})
        segments.append(segments[-1] + len(raw))
        order += sorted(range(len(raw)), key=raw.__getitem__)
    if not order:
        return {"enc": [], "feature_segments": [], "sorted_idx": []}
    return {"enc": coded, "feature_segments": segments, "sorted_idx": order}


def _tree(tree: Tree, number: int, binning: Binning) -> dict[str, Any]:
    """Return one tree as arrays in XGBoost's format, with one element per node."""
    nodes = len(tree.splits)
    conditions, kinds, parents = list(tree.values), [0] * nodes, [_ROOT] * nodes
    right, of_nodes, sizes = list[int](), list[int](), list[int]()
    for node, split in enumerate(tree.splits):
        if split is None:
            continue
        for child in tree.children[node]:
            parents[child] = node
        if isinstance(split.left, range):
            conditions[node] = _threshold(binning.edges[split.column], split.left.stop)
            continue
        # XGBoost lists the categories that go right.
        own = sorted(set(range(binning.categories[split.column])) - set(split.left))
        conditions[node], kinds[node] = 0.0, 1
        of_nodes.append(node)
        sizes.append(len(own))
        right += own
    return {
        "base_weights": tree.values,
        "categories": right,
        "categories_nodes": of_nodes,
        "categories_segments": np.cumsum([0, *sizes])[:-1].tolist(),
        "categories_sizes": sizes,
        "default_left": [int(one is not None and one.missing_left) for one in tree.splits],
        "id": number,
        "left_children": [left for left, _ in tree.children],
        "loss_changes": tree.gains,
        "parents": parents,
        "right_children": [right for _, right in tree.children],
        "split_conditions": conditions,
        "split_indices": [0 if one is None else one.column for one in tree.splits],
        "split_type": kinds,
        "sum_hessian": tree.weights,
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(len(binning.categories)),
            "num_nodes": str(nodes),
            "size_leaf_vector": "1",
        },
    }


def _threshold(edges: np.ndarray, bins: int) -> float:
    """Return the threshold below which cells go left, given how many bins go left."""
    if bins > len(edges):
        return _LARGEST
    return min(float(edges[bins - 1]), _LARGEST) if bins else -_LARGEST


def _difference(path: Path, forest: Forest, binning: Binning) -> float:
    """Return the largest relative difference from XGBoost's margins for random cells."""
    import xgboost

    draw, layout = np.random.default_rng(derive(0, "export")), binning.layout
    cells = np.empty((_ROWS, len(layout.bins)), np.float32)
    for column, (edges, count) in enumerate(zip(binning.edges, layout.bins, strict=True)):
        below = edges[:1] - 1 if len(edges) else np.zeros(1, np.float32)
        values = np.arange(count) if layout.categorical[column] else np.append(below, edges)
        cells[:, column] = np.clip(
            values[draw.integers(0, count, _ROWS)], -_LARGEST / 2, _LARGEST / 2
        )
    cells[draw.random(cells.shape) < 0.1] = np.nan
    booster = xgboost.Booster(model_file=str(path))
    rows = xgboost.DMatrix(
        cells, feature_names=booster.feature_names, feature_types=booster.feature_types
    )
    theirs = booster.predict(rows, output_margin=True).reshape(_ROWS, -1)
    ours = forest.margins(goes_left(forest.splits, binning.bins(cells), layout))
    return float(np.abs(theirs - ours).max() / max(1.0, np.abs(ours).max()))
