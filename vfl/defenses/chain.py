"""Several defenses as one, and which hooks a defense has versions of its own of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vfl.compression import Moment
from vfl.defenses.base import Defense, LabelKind, PrivacyStatement
from vfl.errors import SpecError
from vfl.seeds import Secret


class Chain(Defense):
    """Several defenses, each hook applied in the order given."""

    def __init__(self, members: Sequence[Defense]) -> None:
        self.members = tuple(members)
        for at, member in enumerate(self.members):
            if member.once and any(type(other) is type(member) for other in self.members[:at]):
                raise SpecError(
                    f"{type(member).__name__} stands twice in a chain, and would draw the same",
                    fix="name it once, with stronger options",
                )
            member.beside(self.members[:at], self.members[at + 1 :])

    def prepare(self, kind: LabelKind) -> None:
        for member in self.members:
            member.prepare(kind)

    def labels(self, labels: Tensor, secret: Secret) -> Tensor:
        for member in self.members:
            labels = member.labels(labels, secret)
        return labels

    def wrap_bottom(self, bottom: nn.Module, width: int) -> nn.Module:
        for member in self.members:
            bottom = member.wrap_bottom(bottom, width)
        return bottom

    def fit(self, bottom: nn.Module, inputs: Tensor, secret: Secret) -> None:
        for member in self.members:
            member.fit(bottom, inputs, secret)

    def wrap_top(self, top: nn.Module, width: int) -> nn.Module:
        for member in self.members:
            top = member.wrap_top(top, width)
        return top

    def counts(self, places: Tensor, epoch: int) -> Tensor | None:
        found = [member.counts(places, epoch) for member in self.members]
        present = [one for one in found if one is not None]
        return torch.stack(present).all(dim=0) if present else None

    def batch(
        self, inputs: Tensor | None, labels: Tensor | None, moment: Moment
    ) -> tuple[Tensor | None, Tensor | None]:
        for member in self.members:
            inputs, labels = member.batch(inputs, labels, moment)
        return inputs, labels

    def embedding(self, cut: Tensor, moment: Moment) -> Tensor:
        for member in self.members:
            cut = member.embedding(cut, moment)
        return cut

    def local_loss(self, cut: Tensor, inputs: Tensor, moment: Moment) -> Tensor | None:
        return _total([member.local_loss(cut, inputs, moment) for member in self.members])

    def logits(self, logits: Tensor, moment: Moment) -> Tensor:
        for member in self.members:
            logits = member.logits(logits, moment)
        return logits

    def targets(self, targets: Tensor, classes: int, moment: Moment) -> Tensor:
        for member in self.members:
            targets = member.targets(targets, classes, moment)
        return targets

    def loss(
        self, cuts: Mapping[str, Tensor], labels: Tensor, logits: Tensor, moment: Moment
    ) -> Tensor | None:
        return _total([member.loss(cuts, labels, logits, moment) for member in self.members])

    def gradient(self, grad: Tensor, labels: Tensor, moment: Moment) -> Tensor:
        for member in self.members:
            grad = member.gradient(grad, labels, moment)
        return grad

    def received(self, cut: Tensor, grad: Tensor, moment: Moment) -> Tensor:
        for member in self.members:
            grad = member.received(cut, grad, moment)
        return grad

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        return tuple(statement for member in self.members for statement in member.privacy())

    def state_dict(self) -> Mapping[str, Tensor]:
        return {
            f"{position}.{key}": value
            for position, member in enumerate(self.members)
            for key, value in member.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for position, member in enumerate(self.members):
            prefix = f"{position}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            member.load_state_dict(own)


def uses(defense: Defense, *hooks: str) -> list[str]:
    """Which of these hooks a defense, or a member of a chain, has versions of its own of."""
    if isinstance(defense, Chain):
        return [hook for hook in hooks if any(uses(member, hook) for member in defense.members)]
    return [hook for hook in hooks if getattr(type(defense), hook) is not getattr(Defense, hook)]


def _total(terms: Sequence[Tensor | None]) -> Tensor | None:
    present = [term for term in terms if term is not None]
    return sum(present[1:], start=present[0]) if present else None
