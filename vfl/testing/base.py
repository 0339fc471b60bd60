"""Shared parts of all contracts: a test for each spec, and state that a member must not change."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch


class Contract:
    """Tests that run for each spec of a subclass.

    Attributes:
        family: word for a member.
        specs: the members under test, at least one.
    """

    family: ClassVar[str]
    specs: ClassVar[Sequence[str]] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make one test per spec (and per phase, if a test distinguishes phases)."""
        if not self.specs:
            raise ValueError(f"{type(self).__name__}.specs names no {self.family} to test")
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs)
        if "training" in metafunc.fixturenames:
            metafunc.parametrize("training", [True, False], ids=["training", "inference"])


def global_states() -> dict[str, object]:
    """Return the state of every shared generator, by name."""
    name, words, *rest = np.random.get_state()
    numpy = name, np.asarray(words).tobytes(), *rest
    torchs = torch.random.get_rng_state().numpy().tobytes()
    return {"torch": torchs, "numpy": numpy, "random": random.getstate()}


def draw_from_all() -> None:
    """Draw once from every shared generator, so that a member's reseeding becomes visible."""
    _ = torch.rand(1), np.random.random(), random.random()


def require_still(states: Mapping[str, object]) -> None:
    """Require that the shared generators are unchanged."""
    moved = differing(states, global_states())
    assert not moved, f"a global generator moved: {moved}"


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return the names of entries that changed."""
    return ", ".join(name for name, value in after.items() if value != before[name])
