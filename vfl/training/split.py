"""A split network as one torch module, for anybody's own training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl import compression, defenses
from vfl.compression import Codec, StepContext
from vfl.core.errors import DataError, SpecError, WidthError
from vfl.core.frame import Frame, Kind, Observer
from vfl.core.ledger import Ledger
from vfl.core.seeds import Secret
from vfl.session.exchange import check_finite, check_shape


class SplitModule(nn.Module):
    """Bottoms, cut and top in one module; every forward and backward pass crosses real frames.

    What the top sees, and the gradients the bottoms get, are decoded from the bytes that would
    travel, so a loop around this module trains what a federation would. `ledger` counts them.

    Args:
        bottoms: each feature party's model, from axes (rows, ...) to (rows, its width).
        top: the label party's model, from the merged cuts to outputs.
        widths: width of each party's cut.
        codec, defense: specs, as everywhere.
        merge: "concat" or "sum".
        seed: stands in for the parties' secrets, which in one process protect nobody.
        observers: told about every frame besides the ledger, a `Trace` for example.

    >>> bottoms = {"bank": nn.Linear(3, 4), "shop": nn.Linear(5, 4)}
    >>> model = SplitModule(bottoms, nn.Linear(8, 2), {"bank": 4, "shop": 4}, codec="topk:k=2")
    >>> model({"bank": torch.ones(6, 3), "shop": torch.ones(6, 5)}).shape
    torch.Size([6, 2])

    Raises:
        SpecError: an unknown codec or defense, one that does not fit a width, or a defense that
            needs the training loop or all the training rows.
    """

    def __init__(
        self,
        bottoms: Mapping[str, nn.Module],
        top: nn.Module,
        widths: Mapping[str, int],
        *,
        codec: str = "none",
        defense: str = "none",
        merge: str = "concat",
        seed: int = 0,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__()
        _check_parties(bottoms, widths, merge)
        self.widths = dict(widths)
        self.merge = merge
        self.ledger = Ledger()
        self.step = 0
        self._observers: tuple[Observer, ...] = (self.ledger, *observers)
        self._defense = _reachable(defense)
        self._codecs = {name: compression.make(codec) for name in bottoms}
        self._secrets = {name: Secret.of_simulation(seed, name) for name in bottoms}
        self._label_secret = Secret.of_simulation(seed, "label")
        self.bottoms = nn.ModuleDict()
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        for name, bottom in bottoms.items():
            width, own = widths[name], self._codecs[name]
            own.check(width)
            self.bottoms[name] = self._defense.wrap_bottom(bottom, width)
            self.encoders[name] = own.client_module(width) or nn.Identity()
            self.decoders[name] = own.server_module(width) or nn.Identity()
        merged = sum(widths.values()) if merge == "concat" else next(iter(widths.values()))
        self.top = self._defense.wrap_top(top, merged)
        self._extra: Tensor | None = None

    def forward(self, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
        """Outputs for a batch.

        Args:
            inputs: each party's own rows, axes (rows, ...), in the same order.
            labels: axes (rows,); needed in training by defenses that look at labels.
        """
        context = StepContext(self.step, self.training)
        cuts = {name: self._cross(name, inputs[name], labels, context) for name in self.bottoms}
        parts = list(cuts.values())
        merged = torch.cat(parts, dim=1) if self.merge == "concat" else sum(parts[1:], parts[0])
        outputs = self._defense.logits(self.top(merged), self._context(context, self._label_secret))
        if self.training:
            if labels is not None:
                self._add(self._defense.loss(cuts, labels, outputs, context))
            self.step += 1
        return outputs

    def extra_loss(self) -> Tensor:
        """What codec and defense add to the loss of the last forward pass; 0 if nothing."""
        extra, self._extra = self._extra, None
        return torch.zeros(()) if extra is None else extra

    def _cross(
        self, name: str, rows: Tensor, labels: Tensor | None, context: StepContext
    ) -> Tensor:
        codec = self._codecs[name]
        here = self._context(context, self._secrets[name])
        guarded = StepContext(context.step, context.training, self._secrets[name])
        cut: Tensor = self._defense.embedding(self.bottoms[name](rows), guarded)
        check_shape(cut, len(rows), self.widths[name], name)
        cut = self.encoders[name](cut)
        check_finite(cut.detach(), "cut", name, context.step)
        if self.training:
            self._add(codec.local_loss(cut, here))
            self._add(self._defense.local_loss(cut, rows, here))
        # Each party's gradients get draws of their own, as in `vfl.session.LabelEnd`.
        there = self._context(context, Secret(self._label_secret.key("half", name)))
        crossing = _Crossing(name, codec, self._defense, labels, self._observers, here, there)
        arrived: Tensor = self.decoders[name](_Cross.apply(cut, crossing))  # type: ignore[no-untyped-call]
        return arrived

    def _context(self, context: StepContext, secret: Secret) -> StepContext:
        return StepContext(context.step, context.training, secret if context.training else None)

    def _add(self, term: Tensor | None) -> None:
        if term is not None:
            self._extra = term if self._extra is None else self._extra + term


@dataclass(frozen=True, eq=False)
class _Crossing:
    """One cut's way to the label party and its gradient's way back."""

    party: str
    codec: Codec
    defense: defenses.Defense
    labels: Tensor | None
    observers: Sequence[Observer]
    here: StepContext
    there: StepContext

    def up(self, cut: Tensor) -> tuple[Tensor, Any, Any]:
        payload, kept = self.codec.encode(cut, self.here)
        kind = Kind.CUT if self.here.training else Kind.QUERY
        self._tell("up", Frame(kind, self.here.step, payload))
        rows, width = cut.shape
        decoded, saved = self.codec.decode(payload, rows, width, self.there)
        return decoded, kept, saved

    def down(self, grad: Tensor, kept: Any, saved: Any) -> Tensor:
        if self.labels is not None:
            grad = self.defense.gradient(grad, self.labels, self.there)
        check_finite(grad, "gradient", self.party, self.there.step)
        payload = self.codec.encode_grad(grad.contiguous(), saved, self.there)
        self._tell("down", Frame(Kind.GRAD, self.there.step, payload))
        rows, width = grad.shape
        received = self.codec.decode_grad(payload, kept, rows, width, self.here)
        self.codec.commit(self.here.step)
        return received

    def _tell(self, direction: str, frame: Frame) -> None:
        for observer in self.observers:
            observer(self.party, direction, frame)


class _Cross(torch.autograd.Function):
    """A crossing as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, cut: Tensor, crossing: _Crossing) -> Tensor:
        decoded, kept, saved = crossing.up(cut.detach())
        ctx.way_back = (crossing, kept, saved)
        return decoded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        crossing, kept, saved = ctx.way_back
        return crossing.down(grads[0], kept, saved), None


def _reachable(spec: str) -> defenses.Defense:
    """The defense, unless it acts where this module has no hand."""
    defense = defenses.make(spec)
    if missed := defenses.uses(defense, "labels", "counts", "batch", "fit", "targets", "received"):
        raise SpecError(
            "SplitModule cannot apply this defense: labels and loop are the caller's",
            got=f"{spec}, which acts on {', '.join(missed)}",
            want="a defense of models, cuts, losses or gradients",
            fix="train with VFLClassifier or vfl train",
        )
    return defense


def _check_parties(bottoms: Mapping[str, nn.Module], widths: Mapping[str, int], merge: str) -> None:
    if set(bottoms) != set(widths) or not bottoms:
        raise DataError(
            "every party needs one bottom and one width",
            got=f"bottoms of {', '.join(bottoms)}; widths of {', '.join(widths)}",
        )
    if merge == "sum" and len(set(widths.values())) > 1:
        raise WidthError("a sum needs equal widths", got=str(sorted(set(widths.values()))))
