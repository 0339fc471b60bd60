"""What contracts compare before and after: shared generators, and what a view can give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl.attacks import Evidence, Heard, Holdings, Sent, View
from vfl.errors import NotGrantedError


def global_states() -> dict[str, str]:
    """Every generator that a program shares with all others, by name."""
    states = (torch.random.get_rng_state().tolist(), np.random.get_state(), random.getstate())
    return dict(zip(("torch", "numpy", "random"), map(str, states), strict=True))


def states_after(first: Callable[[], object]) -> dict[str, str]:
    """`global_states` once a first run is over, which may import what draws (scikit-learn does).

    Every generator moves on by a draw in between, so that a second run is seen to seed one again.
    """
    first()
    _ = torch.rand(1), np.random.random(), random.random()
    return global_states()


def contents(view: View) -> dict[str, tuple[bytes, bool]]:
    """What there is to grant, by name: values as bytes, and whether a graph is kept of them."""
    return {
        name: (values.detach().numpy().tobytes(), values.requires_grad)
        for name, values in _tensors("view", view._holdings)
    }


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Names of what is not as it was."""
    return ", ".join(name for name, value in after.items() if value != before[name])


def without_the_rest(view: View) -> View:
    """The same grants, and nothing behind the view that they do not open; rows stay as many."""

    def kept(name: str, value: object) -> object:
        if isinstance(value, Evidence):
            return _opened(view, name, value)
        if name == "partners" and _opens(lambda: view.partners):
            return [without_the_rest(one) for one in view.partners]
        return value if _opens(lambda: view._held(name)) else _blank(value)

    held = vars(view._holdings).items()
    return view.instead(**{name: kept(name, value) for name, value in held})


def _opened(view: View, name: str, rows: Evidence) -> Evidence:
    """A group of rows, blank where no grant opens it."""

    def kept(column: str, value: Any) -> Any:
        return value if _opens(lambda: getattr(getattr(view, name), column)) else _blank(value)

    return Evidence(**{column: kept(column, value) for column, value in vars(rows).items()})


def _blank(value: object) -> Tensor | None:
    return torch.zeros_like(value) if isinstance(value, Tensor) else None


def _opens(reach: Callable[[], object]) -> bool:
    try:
        reach()
    except NotGrantedError:
        return False
    return True


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in evidence, with its name; what is kept for whoever asks is asked for."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors(f"{name}[{number}]", one)
    elif isinstance(value, View):
        yield from _tensors(name, value._holdings)
    elif isinstance(value, Holdings | Evidence | Sent | Heard):
        for part, held in vars(value).items():
            yield from _tensors(f"{name}.{part}", held)
    elif name.endswith((".before", ".sent", ".cuts")) and callable(value):
        yield from _tensors(name, value())
