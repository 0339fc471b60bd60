"""An attribute as a case: one column of the victim's, which the task never asked for."""

from __future__ import annotations

from torch import Tensor

from vfl.attacks.case import Case
from vfl.attacks.evidence import Evidence, Holdings
from vfl.attacks.threat import Grant, ThreatModel
from vfl.attacks.view import Seen, View
from vfl.errors import ConfigError

#: What a label party has that learned the attribute of a few rows.
ATTRIBUTE = frozenset({Grant.CUTS, Grant.LEAKED_ATTRIBUTES})
#: What it was sent besides, as far as its rows' case has any.
REPEATED = frozenset({Grant.EPOCHS, Grant.QUERIES})


def require_column(columns: int, column: int | None) -> None:
    """Refuse an attribute that is none of the victim's columns.

    Raises:
        ConfigError: with what they are counted to.
    """
    if column is not None and column >= columns:
        raise ConfigError(
            "the victim has no such column",
            where="grid.attribute",
            got=str(column),
            want=f"0 to {columns - 1}",
        )


def attribute_case(received: Case, known: Tensor, column: int | None = None) -> Case:
    """Whether a column of each target lies above its mean, for who was sent the cuts.

    Args:
        received: the rows and cuts, of `received_case` or `recalled_case`; see
            `vfl.attacks.recorded_case`.
        known: the victim's training rows, axes (rows, ...), which say what the mean is.
        column: counted from 0 in a row as it lies in memory; None takes the first of those that
            split the training rows most evenly.

    Raises:
        ConfigError: the victim has no such column.
    """
    flat, view = known.flatten(1), received.view
    assert received.inputs is not None
    require_column(flat.shape[1], column)
    mean = flat.mean(0)
    if column is None:
        column = int(((flat > mean).double().mean(0) - 0.5).abs().argmin())

    def values(rows: Tensor) -> Tensor:
        return (rows.flatten(1)[:, column] > mean[column]).long()

    repeated = view.threat.grants & REPEATED

    def seen(rows: Seen, labels: Tensor | None = None) -> Evidence:
        return Evidence(cuts=rows.cuts, labels=labels, sent=lambda: rows.sent)

    holdings = Holdings(seen(view.targets), seen(view.leaked, values(view.leaked.inputs)))
    threat = ThreatModel("label party", view.threat.phase, ATTRIBUTE | repeated)
    return Case(View(threat, 2, holdings), values(received.inputs))
