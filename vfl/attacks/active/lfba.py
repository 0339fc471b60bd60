"""LFBA: a backdoor by a party that has no labels; it compares the directions of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vfl.attacks.active.base import MOST_WARMUP, InputBackdoor
from vfl.attacks.active.rows import KnownRows, RowTable, positions_of
from vfl.attacks.base import key_of
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.registry import require_range
from vfl.core.seeds import generator


class LabelFree(InputBackdoor):
    """Puts a trigger on rows whose gradients have nearly the direction of one row's gradient.

    This row, the anchor, represents the target class; the party need not know which class this is.
    After `warmup` epochs, the party selects the `share` of its rows whose latest gradients have the
    highest cosine with the anchor's gradient. Most of these rows are of the anchor's class. From
    then on, the party replaces the columns of each selected row by the columns of another row, with
    the trigger in them. So only the trigger is associated with the class.

    Source: Shen, Huang, Wan, Ye 2025, "Label-free backdoor attacks in vertical federated learning"
    (AAAI): rows with similar gradients are poisoned, and exchange features with other rows. In this
    class, the trigger fills fixed columns. To score the attack, the anchor is a row that is known
    to be of class `target`.

    Args:
        target: class of the anchor, as which triggered rows shall be predicted.
        share: share of the party's rows that get the trigger.
        warmup: number of epochs, from the first one, in which the attack only observes gradients.
        columns: number of columns, up to the last one, that the trigger fills (for pictures, side
            length of a square corner in pixels).
        value: value of the trigger, in the units of the bottom's inputs.

    Raises:
        BadOptionError: an option is out of range.
    """

    holds = frozenset({Grant.LEAKED, Grant.INPUTS})

    def __init__(
        self,
        target: int = 0,
        share: float = 0.05,
        warmup: int = 2,
        columns: int = 3,
        value: float = 3.0,
    ) -> None:
        super().__init__(target, share, columns, value)
        require_range("warmup", warmup, 1, MOST_WARMUP)
        self.warmup = warmup
        self._gradients = RowTable()
        self._chosen: set[int] = set()
        self._since = self._newest = 0

    def begin(self, view: View, draw: torch.Generator) -> None:
        self._known = KnownRows(view, self.target)
        self._rows = view.targets.rows
        self._outside = view.targets.inputs
        self._key = key_of(draw)

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        rows = self._known.look(inputs, context)
        self._newest = max(self._newest, context.step)
        poisoned = [at for at, row in enumerate(rows) if row in self._chosen]
        if not poisoned or context.step < self._since:
            return inputs
        draw = generator(self._key, "lfba", context.step)
        others = torch.randint(len(self._outside), (len(poisoned),), generator=draw)
        fed = inputs.clone()
        fed[poisoned] = self.triggered(self._outside[others])
        return fed

    def received(self, party: str, values: Tensor, context: StepContext) -> None:
        if not self._chosen and context.training and len(values):
            self._gradients.record(positions_of(context, len(values)), values)
            anchor = self._known.mean(self.target, self._gradients)
            if anchor is not None and self._gradients.seen(self.warmup, self._rows):
                self._chosen, self._since = self._like(anchor), self._newest + 1

    def _like(self, anchor: Tensor) -> set[int]:
        """Return the rows whose gradients are most similar to the anchor's gradient."""
        likeness = normalize(self._gradients.values, dim=1) @ normalize(anchor, dim=0)
        count = max(1, round(self.share * len(likeness)))
        rows = self._gradients.rows
        return {rows[at] for at in likeness.topk(count).indices.tolist()}

    def training_state(self) -> dict[str, Any]:
        steps = torch.tensor([self._since, self._newest])
        chosen = {"chosen": torch.tensor(sorted(self._chosen), dtype=torch.int64), "steps": steps}
        return {"gradients": self._gradients.state()} | self._known.state() | chosen

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        self._gradients.load(saved["gradients"])
        self._known.load(saved)
        self._chosen = set(saved["chosen"].tolist())
        self._since, self._newest = saved["steps"].tolist()
