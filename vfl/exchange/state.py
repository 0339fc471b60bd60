"""What a half must keep to predict or go on: weights, and what codec and defense learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class Stateful(Protocol):
    """What codecs and defenses have in common."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """State that moved during training."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""


def gather(model: nn.Module, owners: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """The model's weights under their own names, each owner's state under ``<owner>/``."""
    state = dict(model.state_dict())
    for owner, holder in owners.items():
        state |= {f"{owner}/{key}": value for key, value in holder.state_dict().items()}
    return state


def restore(model: nn.Module, owners: Mapping[str, Stateful], state: Mapping[str, Tensor]) -> None:
    """Load what `gather` gave."""
    model.load_state_dict({key: value for key, value in state.items() if "/" not in key})
    for owner, holder in owners.items():
        prefix = f"{owner}/"
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        holder.load_state_dict(own)
