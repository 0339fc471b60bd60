"""How large a model would be, counted before anything is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vfl.core.errors import SpecError, VFLError
from vfl.core.seeds import scoped
from vfl.models.base import Bottom, Shape

_FLOAT_BYTES = 4
_ROWS = 2  # of the pass that counts; one row may mean something else to a layer
#: By class: what one position of a sequence takes behind such a layer.
_PER_STEP = {nn.Embedding: "embedding_dim", nn.Conv1d: "out_channels", nn.Linear: "out_features"}
_GRU_STATES = 4  # three gates and the state


@dataclass(frozen=True, slots=True)
class Footprint:
    """Numbers a model consists of and makes; float32 each.

    Attributes:
        parameters: that training may change.
        buffers: kept beside them, such as running means.
        activations: outputs of all layers, a row.
        largest: output of the largest layer, a row.
    """

    parameters: int
    buffers: int
    activations: int
    largest: int

    def training_bytes(self, rows: int, optimizer_copies: int, in_flight: int = 1) -> int:
        """Weights, gradients, the optimiser's state, and what a backward pass needs.

        Args:
            rows: of a batch.
            optimizer_copies: numbers the optimiser keeps of every parameter.
            in_flight: batches whose gradients are awaited; more than one needs copies of weights.

        >>> Footprint(parameters=10, buffers=0, activations=5, largest=5).training_bytes(8, 2)
        320
        """
        copies = 2 + optimizer_copies + (in_flight if in_flight > 1 else 0)
        numbers = self.parameters * copies + self.buffers + in_flight * rows * self.activations
        return _FLOAT_BYTES * numbers

    def inference_bytes(self, rows: int) -> int:
        """Weights, and what two layers in a row make of a query."""
        return _FLOAT_BYTES * (self.parameters + self.buffers + 2 * rows * self.largest)


def footprint(bottom: Bottom, shape: Shape, width: int) -> Footprint:
    """Build a bottom of shapes alone, on torch's meta device, and count.

    Args:
        bottom: the recipe.
        shape: axes of one row without the rows axis.
        width: columns of the cut.

    Raises:
        SpecError: it does not fit such rows, or cannot be counted.

    >>> from vfl.models import make_bottom
    >>> footprint(make_bottom("mlp:hidden=20000-20000"), (10,), 8).parameters
    400400008
    """
    try:
        with torch.device("meta"), scoped(0):
            module = bottom.build(shape, width).eval()
            sizes = _outputs(module, shape)
    except VFLError:
        raise
    except Exception as error:
        raise SpecError(
            "this bottom cannot be counted before it is built",
            got=type(error).__name__,
            want="a bottom that torch's meta device can build",
            fix="name the bottom in the party's own file, which may be of any size",
        ) from error
    return Footprint(
        parameters=sum(one.numel() for one in module.parameters()),
        buffers=sum(one.numel() for one in module.buffers()),
        activations=sum(sizes),
        largest=max(sizes, default=width),
    )


def _outputs(module: nn.Module, shape: Shape) -> list[int]:
    """Numbers each layer makes of a row."""
    sizes: list[int] = []

    def count(layer: nn.Module, given: Any, made: Any) -> None:
        if isinstance(made, Tensor):
            sizes.append(made.numel() // _ROWS)

    leaves = [part for part in module.modules() if not list(part.children())]
    hooks = [leaf.register_forward_hook(count) for leaf in leaves]
    try:
        with torch.no_grad():
            module(torch.empty(_ROWS, *shape))
    except (RuntimeError, NotImplementedError):  # a model of numbers looks at them, and has none
        return [_per_step(leaf) * max(shape) for leaf in leaves]
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


def _per_step(layer: nn.Module) -> int:
    """What one step of a sequence takes behind a layer."""
    if isinstance(layer, nn.GRU):
        return _GRU_STATES * layer.hidden_size * layer.num_layers
    names = [name for kind, name in _PER_STEP.items() if isinstance(layer, kind)]
    return int(getattr(layer, names[0])) if names else 0
