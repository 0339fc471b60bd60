"""Parts of all contracts: a test for each spec, and checks of unchanged global state."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch


class Contract:
    """A class of tests, each of which runs for every spec of a subclass.

    Attributes:
        family: noun for one member of the plug-in family, such as "codec", for error messages.
        specs: specs of the members under test, at least one.
    """

    family: ClassVar[str]
    specs: ClassVar[Sequence[str]] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make one test for each spec; a test with phases runs in training and inference."""
        if not self.specs:
            raise ValueError(f"{type(self).__name__}.specs names no {self.family} to test")
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs)
        if "training" in metafunc.fixturenames:
            metafunc.parametrize("training", [True, False], ids=["training", "inference"])


def global_states() -> dict[str, object]:
    """Return the state of every global random generator, by name."""
    name, words, *rest = np.random.get_state()
    numpy = name, np.asarray(words).tobytes(), *rest
    torchs = torch.random.get_rng_state().numpy().tobytes()
    return {"torch": torchs, "numpy": numpy, "random": random.getstate()}


def draw_from_all() -> None:
    """Draw once from every global random generator, which changes results that depend on it."""
    _ = torch.rand(1), np.random.random(), random.random()


def require_still(states: Mapping[str, object]) -> None:
    """Require that the state of no global random generator has changed."""
    moved = differing(states, global_states())
    assert not moved, f"a global random generator changed: {moved}"


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return the names of entries whose values differ."""
    return ", ".join(name for name, value in after.items() if value != before[name])
