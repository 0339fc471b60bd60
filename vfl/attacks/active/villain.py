"""VILLAIN: finds rows of the target class by swapping cuts, and adds a trigger to their cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vfl.attacks.active.base import MOST_WARMUP, Backdoor
from vfl.attacks.active.rows import KnownRows, RowTable, positions_of
from vfl.attacks.base import key_of
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.registry import require_range
from vfl.core.seeds import generator

_MOST = 1e6


class Villain(Backdoor):
    """Swaps cuts to find the rows of the target class, then adds a trigger to these rows' cuts.

    After `warmup` epochs, the party replaces up to `swaps` cuts in each batch by the mean cut of
    the rows that it knows to be of the target class. The party replaces those cuts that are most
    similar to this mean cut. The party compares the norm of the returned gradient with two norms:
    of the gradient that the row received before, and the median norm of the other gradients in the
    batch. If the row's gradient norm is at most `ratio` times one of these two norms, the party
    infers that the row is of the target class. After `inferring` epochs with swaps, the party adds
    the trigger to the cuts of the inferred rows. The trigger changes a `share` of the cut's units:
    those that vary most over these rows. Along these units, the trigger's pattern is two units up
    and two units down, repeated; each changes by `strength` times the mean standard deviation of
    these units. For each training row, the party leaves out random units of the trigger and scales
    the other ones, so that incomplete triggers also work later.

    Source: Bai et al. 2023, "VILLAIN: backdoor attacks against vertical split learning" (USENIX
    Security), sections on label inference by embedding swapping, trigger fabrication and backdoor
    augmentation. This class infers labels for the rows whose cuts are most similar to the known
    rows' mean cut; the paper trains a classifier to select rows. The paper also raises the learning
    rate; this class does not (see `malicious_optimizer`).

    Args:
        target: the class that triggered rows shall get; the attacker must know at least one row of
            it.
        share: share of the cut's units that the trigger changes.
        strength: size of the trigger in each unit, in standard deviations (the paper's beta).
        warmup: number of epochs before the party tampers with cuts.
        inferring: number of epochs in which the party infers labels.
        swaps: largest number of cuts to swap in a batch.
        ratio: largest norm of a swapped row's gradient, relative to either norm with which it is
            compared.
        dropout: share of the trigger's units that the party leaves out on a training row.
        jitter: on a training row, a factor of 1 - jitter to 1 + jitter scales the trigger.

    Raises:
        BadOptionError: an option is out of range.
    """

    holds = frozenset({Grant.LEAKED, Grant.INPUTS})
    learns: ClassVar[bool] = True

    def __init__(
        self,
        target: int = 0,
        share: float = 0.75,
        strength: float = 5.0,
        warmup: int = 5,
        inferring: int = 5,
        swaps: int = 4,
        ratio: float = 0.5,
        dropout: float = 0.25,
        jitter: float = 0.2,
    ) -> None:
        require_range("target", target, 0)
        require_range("share", share, 0, 1)
        require_range("strength", strength, 0, _MOST)
        require_range("warmup", warmup, 1, MOST_WARMUP)
        require_range("inferring", inferring, 1, MOST_WARMUP)
        require_range("swaps", swaps, 1)
        require_range("ratio", ratio, 0, _MOST)
        require_range("dropout", dropout, 0, 1)
        require_range("jitter", jitter, 0, 1)
        self.target = target
        self.share = share
        self.strength = strength
        self.warmup = warmup
        self.inferring = inferring
        self.swaps = swaps
        self.ratio = ratio
        self.dropout = dropout
        self.jitter = jitter
        self._cuts = RowTable()
        self._lengths = RowTable()
        self._judged: dict[int, bool] = {}
        self._swapped: dict[int, tuple[list[int], Tensor]] = {}
        self._trigger: Tensor | None = None
        self._since = 0

    def begin(self, view: View, draw: torch.Generator) -> None:
        self._known = KnownRows(view, self.target)
        self._rows = view.targets.rows
        self._key = key_of(draw)

    def batch(self, inputs: Tensor, context: StepContext) -> Tensor:
        self._known.look(inputs, context)
        return inputs

    def cut(self, cut: Tensor, context: StepContext) -> Tensor:
        if not context.training or not len(cut):
            return cut
        rows = positions_of(context, len(cut))
        if self._trigger is None:
            self._cuts.record(rows, cut)
            if self._cuts.seen(self.warmup + self.inferring, self._rows):
                self._trigger, self._since = self._fabricated(), context.step
        if self._trigger is None or context.step < self._since:
            return self._swap(cut, rows, context)
        return self._poison(cut, rows, context)

    def received(self, party: str, values: Tensor, context: StepContext) -> None:
        if not context.training or not len(values):
            return
        rows, lengths = positions_of(context, len(values)), values.norm(dim=1, keepdim=True)
        swapped, _ = self._swapped.pop(context.step, ([], None))
        others = [at for at in range(len(rows)) if at not in set(swapped)]
        usual = lengths[others].median() if others else lengths.new_tensor(torch.inf)
        for at in swapped:
            before = self._lengths.of(rows[at])
            most = usual if before is None else torch.maximum(before, usual)
            self._judged[rows[at]] = bool(lengths[at] <= self.ratio * most)
        self._lengths.record([rows[at] for at in others], lengths[others])

    @property
    def inferred(self) -> set[int]:
        """Return the positions of rows that the party considers to be of the target class."""
        known = {row for row, label in self._known.labels.items() if label == self.target}
        return known | {row for row, is_target in self._judged.items() if is_target}

    def _swap(self, cut: Tensor, rows: list[int], context: StepContext) -> Tensor:
        """Return a batch's cuts; the mean cut of the known rows replaces some of them."""
        if context.step not in self._swapped:
            anchor = self._known.mean(self.target, self._cuts)
            early = not self._cuts.seen(self.warmup, self._rows)
            if early or anchor is None or not (chosen := self._candidates(cut, rows, anchor)):
                return cut
            self._swapped[context.step] = chosen, anchor
        chosen, anchor = self._swapped[context.step]
        sent = cut.clone()
        sent[chosen] = anchor
        return sent

    def _candidates(self, cut: Tensor, rows: list[int], anchor: Tensor) -> list[int]:
        """Return batch positions of the rows without inferred label most similar to the anchor."""
        known = self._known.labels
        open_ = [
            at
            for at, row in enumerate(rows)
            if row not in self._judged and row not in known and self._lengths.of(row) is not None
        ]
        likeness = normalize(cut[open_], dim=1) @ normalize(anchor, dim=0)
        best = likeness.topk(min(self.swaps, len(open_))).indices.tolist()
        return sorted(open_[one] for one in best)

    def _fabricated(self) -> Tensor:
        """Return the trigger, axes (width,): signs + + - - repeated on the units that vary most."""
        found = [one for row in sorted(self.inferred) if (one := self._cuts.of(row)) is not None]
        values = torch.stack(found) if len(found) > 1 else self._cuts.values
        deviations = values.std(0)
        count = max(1, round(self.share * len(deviations)))
        units = deviations.topk(count).indices.sort().values
        height = self.strength * deviations[units].mean()
        signs = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(-(-count // 4))[:count]
        trigger = torch.zeros(len(deviations))
        trigger[units] = signs * torch.where(height > 0, height, torch.tensor(1.0))
        return trigger

    def _poison(self, cut: Tensor, rows: list[int], context: StepContext) -> Tensor:
        """Return a batch's cuts; cuts of inferred rows get a randomly varied trigger."""
        assert self._trigger is not None
        inferred = self.inferred
        marked = torch.tensor([row in inferred for row in rows])
        draw = generator(self._key, "villain", context.step)
        kept = (torch.rand(cut.shape, generator=draw) >= self.dropout).float()
        scale = 1 + self.jitter * (2 * torch.rand(len(cut), 1, generator=draw) - 1)
        return torch.where(marked[:, None], cut + self._trigger * kept * scale, cut)

    def triggered_cut(self, cut: Tensor) -> Tensor:
        return cut if self._trigger is None else cut + self._trigger

    def training_state(self) -> dict[str, Any]:
        trigger = {} if self._trigger is None else {"trigger": self._trigger}
        judged = torch.tensor(list(self._judged.items()), dtype=torch.int64).reshape(-1, 2)
        swapped = {
            str(step): {"at": torch.tensor(chosen), "anchor": anchor}
            for step, (chosen, anchor) in self._swapped.items()
        }
        tables = {"cuts": self._cuts.state(), "lengths": self._lengths.state()}
        state = {"judged": judged, "swapped": swapped, "since": self._since}
        return tables | self._known.state() | state | trigger

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        self._cuts.load(saved["cuts"])
        self._lengths.load(saved["lengths"])
        self._known.load(saved)
        self._judged = {row: bool(one) for row, one in saved["judged"].tolist()}
        self._swapped = {
            int(step): (one["at"].tolist(), one["anchor"]) for step, one in saved["swapped"].items()
        }
        self._since = saved["since"]
        self._trigger = saved.get("trigger")
