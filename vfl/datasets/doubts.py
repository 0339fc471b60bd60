"""What a reader should look at before a training, though nothing stops it.

Each doubt is one line: what was found, by column, and what to do. It holds names and counts, no
cell. Doubts are found in what training reads anyway, so no table is read twice. A party has those
of its own columns; what a column tells of the label is for the label party, who has both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from vfl.datasets.encode import TableEncoder, TextColumn
from vfl.datasets.party import PartyData
from vfl.datasets.table import misread, spaced

FEW_ROWS = 20  #: test rows below which a figure of them says nothing
NEARLY = 0.98  #: balanced accuracy, or R2, from which one column alone is nearly the label
_MOST_ROWS, _FEWEST_ROWS, _LEAVES = 4000, 40, 20


def doubts(data: Mapping[str, PartyData]) -> list[str]:
    """What to look at in aligned rows, party by party.

    Args:
        data: of the parties in this process; columns are set beside labels where one has those.
    """
    lines = [line for own in data.values() for line in _misread(own)]
    label = next((own for own in data.values() if own.labels is not None), None)
    if label is None:
        return lines
    if (tested := len(label.split.test)) < FEW_ROWS:
        lines.append(
            f"{spaced(tested)} test and {spaced(len(label.split.train))} training rows: figures of "
            f"so few rows are chance; bring more rows, or raise data.test"
        )
    return lines + [line for own in data.values() for line in _alone(own, label)]


def idle_columns(
    names: Iterable[str], data: Mapping[str, PartyData], known: Sequence[str | None]
) -> list[str]:
    """The columns of a table that no party reads; `known` are the id, the label and their like."""
    read = {name for own in data.values() if own.encoder for name in own.encoder.names}
    idle = [name for name in names if name not in read and name not in known]
    if not idle:
        return []
    more = f", and {len(idle) - 5} more" if len(idle) > 5 else ""
    shown = ", ".join(f"'{name}'" for name in idle[:5])
    return [f"no party is given {shown}{more}: add them to some 'columns', or leave them unread"]


def _misread(own: PartyData) -> Iterator[str]:
    if isinstance(own.encoder, TableEncoder):
        for column in own.encoder.columns:
            if isinstance(column, TextColumn) and (why := misread(column.name, column.categories)):
                yield f"column '{column.name}' of {own.name} is read as categories, but {why}"


def _alone(own: PartyData, label: PartyData) -> Iterator[str]:
    """The columns that alone nearly are the label: a small tree, fitted on half of a sample."""
    if not isinstance(own.encoder, TableEncoder) or own.inputs is None or label.labels is None:
        return
    rows = label.split.train[:_MOST_ROWS]
    if own.name in label.held:
        rows = rows[label.held[own.name][rows]]
    if len(rows) < _FEWEST_ROWS:
        return
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    inputs, truth = own.inputs[rows].numpy(), label.labels[rows].numpy()
    half, start, classes = len(rows) // 2, 0, label.classes
    for column in own.encoder.columns:
        cells = inputs[:, start : start + column.width]
        start += column.width
        if classes is None:
            tree = DecisionTreeRegressor(max_leaf_nodes=200, random_state=0)
            score = float(tree.fit(cells[:half], truth[:half]).score(cells[half:], truth[half:]))
        else:
            leaves = max(_LEAVES, 2 * len(classes))
            tree = DecisionTreeClassifier(
                max_leaf_nodes=leaves, class_weight="balanced", random_state=0
            )
            guess = tree.fit(cells[:half], truth[:half]).predict(cells[half:])
            right = guess == truth[half:]
            each = [right[truth[half:] == code] for code in range(len(classes))]
            score = float(np.mean([hits.mean() if len(hits) else 0.0 for hits in each]))
        if score >= NEARLY:
            yield (
                f"column '{column.name}' of {own.name} alone is nearly the label: is it known "
                "before the label is? If not, leave it out of 'columns'"
            )
