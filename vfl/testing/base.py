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
        family: the word for a member.
        specs: the members under test, at least one.
    """

    family: ClassVar[str]
    specs: ClassVar[Sequence[str]] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each spec (and phase, where a test distinguishes them)."""
        if not self.specs:
            raise ValueError(f"{type(self).__name__}.specs names no {self.family} to test")
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", self.specs)
        if "training" in metafunc.fixturenames:
            metafunc.parametrize("training", [True, False], ids=["training", "inference"])


def global_states() -> dict[str, object]:
    """Every generator that a program shares with all others, by name."""
    name, words, *rest = np.random.get_state()
    numpy = name, np.asarray(words).tobytes(), *rest
    torchs = torch.random.get_rng_state().numpy().tobytes()
    return {"torch": torchs, "numpy": numpy, "random": random.getstate()}


def draw_from_all() -> None:
    """Move every shared generator by a draw, so that one that a member seeds again is seen."""
    _ = torch.rand(1), np.random.random(), random.random()


def require_still(states: Mapping[str, object]) -> None:
    """The shared generators are as they were."""
    moved = differing(states, global_states())
    assert not moved, f"a global generator moved: {moved}"


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Names of what is not as it was."""
    return ", ".join(name for name, value in after.items() if value != before[name])
