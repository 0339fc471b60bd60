"""BadVFL: a backdoor on rows with inferred labels; its trigger fills influential inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vfl.attacks.active.base import MOST_WARMUP, InputBackdoor
from vfl.attacks.active.rows import KnownRows, RowTable, positions_of
from vfl.attacks.base import fit, key_of, through
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.registry import require_range
from vfl.core.seeds import generator, scoped

_HEAD_STEPS, _NETWORK_STEPS, _RATE = 300, 300, 0.01


class InferredReplacement(InputBackdoor):
    """Infers labels of its rows; then, in place of rows of the target class, inputs triggered rows.

    After `warmup` epochs, the adversary trains a linear classifier on the cuts of the few rows
    whose labels it knows. This classifier then assigns a label to each row. A second network with
    the bottom's architecture learns these labels from the inputs. The trigger fills the inputs for
    which this network's loss has the largest mean gradients. From then on, the adversary replaces a
    `share` of the target class's rows in each batch by rows of other classes with the trigger. For
    these rows, the label party then computes the gradients of the target class.

    Source: Naseri, Han, De Cristofaro 2024, "BadVFL: backdoor attacks in vertical federated
    learning" (IEEE S&P), sections on label inference and on the saliency map. The paper also has a
    loss that moves the embeddings of triggered rows towards the target class. This class leaves out
    the paper's loss, because the label party's gradient has the same effect. Rows of all classes
    other than the target get the same trigger.

    Args:
        target: the class as which the adversary wants triggered rows to be predicted.
        share: share of the target class's rows in a batch that the adversary replaces.
        warmup: number of epochs without tampering.
        columns: number of adjacent columns that the trigger fills; for pictures, side length of a
            square in pixels.
        value: value of the trigger, in the units of the bottom's inputs.

    Raises:
        BadOptionError: an option is out of range.
    """

    holds = frozenset({Grant.LEAKED, Grant.INPUTS, Grant.BOTTOM_RECIPE})
    learns: ClassVar[bool] = True

    def __init__(
        self,
        target: int = 0,
        share: float = 0.3,
        warmup: int = 5,
        columns: int = 3,
        value: float = 3.0,
    ) -> None:
        super().__init__(target, share, columns, value)
        require_range("warmup", warmup, 1, MOST_WARMUP)
        self.warmup = warmup
        self._cuts = RowTable()
        self._labels: dict[int, int] = {}
        self._place: tuple[int, ...] = ()
        self._since = self._newest = 0

    def begin(self, view: View, draw: torch.Generator) -> None:
        self._known = KnownRows(view, self.target)
        self._rows, self._classes = view.targets.rows, view.classes
        self._leaked = view.leaked.inputs
        self._new_bottom = view.new_bottom
        self._key = key_of(draw)
        self._inputs: dict[int, Tensor] = {}

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        rows = self._known.look(inputs, context)
        self._newest = max(self._newest, context.step)
        if not self._labels:
            self._inputs |= dict(zip(rows, inputs.clone(), strict=True))
        if not self._labels or context.step < self._since:
            return inputs
        draw = generator(self._key, "badvfl", context.step)
        labels = torch.tensor([self._labels.get(row, -1) for row in rows])
        wanted = (labels == self.target) & (torch.rand(len(rows), generator=draw) < self.share)
        others = torch.nonzero((labels != self.target) & (labels >= 0))[:, 0]
        if not len(others) or not wanted.any():
            return inputs
        sources = others[torch.randint(len(others), (int(wanted.sum()),), generator=draw)]
        fed = inputs.clone()
        fed[wanted] = self.triggered(inputs[sources])
        return fed

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        if context.training and not self._labels and len(cut):
            self._cuts.record(positions_of(context, len(cut)), cut)
            if self._cuts.seen(self.warmup, self._rows):
                with scoped(self._key):
                    self._infer()
        return cut

    def _infer(self) -> None:
        """Infer a label for every row, and choose the columns that the trigger fills."""
        known = [row for row in self._known.labels if self._cuts.of(row) is not None]
        truth = torch.tensor([self._known.labels[row] for row in known])
        values = self._cuts.values
        mean, spread = values.mean(0), values.std(0).clamp(min=1e-6)
        at = {row: number for number, row in enumerate(self._cuts.rows)}
        scaled = (values - mean) / spread
        head = nn.Linear(values.shape[1], self._classes)
        draw = generator(self._key, "badvfl", "head")
        fit(head, scaled[[at[row] for row in known]], truth, _HEAD_STEPS, _RATE, draw)
        found = through(head, scaled).argmax(1).tolist()
        self._labels = dict(zip(self._cuts.rows, found, strict=True)) | self._known.labels
        self._place, self._since = self._salient(draw), self._newest + 1
        self._inputs.clear()

    def _salient(self, draw: torch.Generator) -> tuple[int, ...]:
        """Return the position of the window of columns with the largest mean influence."""
        rows = [row for row in self._labels if row in self._inputs]
        inputs = torch.stack([self._inputs[row] for row in rows])
        labels = torch.tensor([self._labels[row] for row in rows])
        bottom = self._new_bottom()
        width = through(bottom, inputs[:2]).shape[1]
        network = nn.Sequential(bottom, nn.Linear(width, self._classes))
        fit(network, inputs, labels, _NETWORK_STEPS, _RATE, draw, batch=256)
        leaf = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy(network(leaf), labels, reduction="sum"), leaf)
        saliency = slope.abs().mean(0)
        if saliency.dim() == 3:
            saliency = saliency.mean(0)
        window = saliency
        for axis in range(saliency.dim()):
            size = min(self.columns, window.shape[axis])
            window = window.unfold(axis, size, 1).mean(-1)
        best, place = int(window.argmax()), []
        for length in reversed(window.shape):
            place.append(best % length)
            best //= length
        return tuple(reversed(place))

    def triggered(self, inputs: Tensor) -> Tensor:
        marked = inputs.clone()
        place = self._place or (0,) * max(1, inputs.dim() - 2)
        window = marked  # views of parts of `marked`, so that fill_ changes `marked` itself
        for axis, start in enumerate(place, start=inputs.dim() - len(place)):
            length = min(self.columns, inputs.shape[axis] - start)
            window = window.narrow(axis, start, length)
        window.fill_(self.value)
        return marked

    def training_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"cuts": self._cuts.state()} | self._known.state()
        state["steps"] = torch.tensor([self._since, self._newest])
        if not self._labels:
            rows = list(self._inputs)
            held = torch.stack(list(self._inputs.values())) if rows else torch.zeros(0)
            return state | {"fed_rows": torch.tensor(rows, dtype=torch.int64), "fed": held}
        return state | {
            "labels": torch.tensor(list(self._labels.items())),
            "place": torch.tensor(self._place),
        }

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        self._cuts.load(saved["cuts"])
        self._known.load(saved)
        self._since, self._newest = saved["steps"].tolist()
        self._labels, self._place, self._inputs = {}, (), {}
        if "labels" in saved:
            self._labels = dict(map(tuple, saved["labels"].tolist()))
            self._place = tuple(saved["place"].tolist())
        else:
            self._inputs = dict(zip(saved["fed_rows"].tolist(), saved["fed"], strict=True))
