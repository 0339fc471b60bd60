"""What there is to hold: rows and what is known of them, messages, and makers of models.

Who may reach what of it is decided by a `View`. Truth about the target rows is never here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from vfl.attacks.view import View

Maker = Callable[[], nn.Module]
TopMaker = Callable[[int], nn.Module]
#: In which order two parties' cuts lie side by side before a top, or that they are summed.
Merge = Literal["victim-own", "own-victim", "sum"]


@dataclass(frozen=True, eq=False, repr=False)
class Sent:
    """Cuts of one message.

    Attributes:
        step: its number.
        epoch: the one it belongs to; of queries that are repeated, which time it is.
        rows: which rows of its group, int64, axes (rows,).
        cuts: as they were decoded, axes (rows, width).
    """

    step: int
    epoch: int
    rows: Tensor
    cuts: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Heard:
    """One training exchange as it was recorded.

    Attributes:
        step, epoch: as of `Sent`.
        rows: counted through the targets; leaked rows follow after them.
        cuts: gives what went up, decoded, axes (rows, width).
        gradients: what came down, decoded, alike.
    """

    step: int
    epoch: int
    rows: Tensor
    cuts: Callable[[], Tensor]
    gradients: Tensor

    @classmethod
    def of(cls, up: Sent, gradients: Tensor) -> Heard:
        """A message and what came back for it."""
        return cls(up.step, up.epoch, up.rows, lambda: up.cuts, gradients)


@dataclass(frozen=True, eq=False, repr=False)
class Evidence:
    """What is known about one group of rows; axes (rows, ...) all alike, None where unknown.

    Attributes:
        inputs: float32, the columns.
        cuts: float32, axes (rows, width), as they travelled.
        labels: int64, axes (rows,).
        outputs: float32, axes (rows, outputs), what the network answered.
        before: gives what the last layer of `Holdings.bottom` is given for these rows, axes (rows,
            features), where that is kept; it follows from inputs and bottom.
        sent: gives every message that held cuts of these rows, over epochs or queries.
    """

    inputs: Tensor | None = None
    cuts: Tensor | None = None
    labels: Tensor | None = None
    outputs: Tensor | None = None
    before: Callable[[], Tensor] | None = None
    sent: Callable[[], Sequence[Sent]] | None = None

    @property
    def rows(self) -> int:
        """How many rows the group has."""
        known = (self.inputs, self.cuts, self.labels, self.outputs)
        return next((len(values) for values in known if values is not None), 0)


@dataclass(frozen=True, eq=False, repr=False)
class Holdings:
    """Everything that might be granted; what is None is not there at all.

    Attributes:
        targets: the rows that are attacked, without what is to be found out.
        leaked: rows of which the attacker learned the labels (or an attribute, or the victim's
            columns).
        unlabelled: further rows.
        heard: the training, exchange by exchange; the targets are then training rows.
        prior: share of each class, axes (classes,).
        bottom: makes a copy of the attacker's trained bottom.
        new_bottom: makes an untrained bottom of the architecture in use.
        new_top: makes an untrained top of the architecture in use, for cuts of a given width.
        top: makes a copy of the attacker's trained top (label party).
        merge: how the victim's cuts and the attacker's own meet before `top`; None where it has no
            columns of its own.
        others_bottom: makes a copy of the victim's trained bottom.
        snapshots: each makes a copy of the attacker's bottom as it was after an epoch, in order.
        partners: what those who collude with the attacker hold of the same groups of rows.
        shape: axes of one of the victim's rows, without the rows axis.
    """

    targets: Evidence = field(default_factory=Evidence)
    leaked: Evidence | None = None
    unlabelled: Evidence | None = None
    heard: Sequence[Heard] | None = None
    prior: Tensor | None = None
    bottom: Maker | None = None
    new_bottom: Maker | None = None
    new_top: TopMaker | None = None
    top: Maker | None = None
    merge: Merge | None = None
    others_bottom: Maker | None = None
    snapshots: Sequence[Maker] | None = None
    partners: Sequence[View] | None = None
    shape: tuple[int, ...] | None = None
