"""Common parts of all contracts: a test for each spec, and global state that must not change."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch


class Contract:
    """A class of tests, each of which runs for every spec of a subclass.

    Attributes:
        family: name for a member of the family, as in messages.
        specs: specs of the members under test, at least one.
    """

    family: ClassVar[str]
    specs: ClassVar[Sequence[str]] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make one test for each spec, and for each phase if the test has phases."""
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
    """Draw once from every global random generator, to make a member's seeding visible."""
    _ = torch.rand(1), np.random.random(), random.random()


def require_still(states: Mapping[str, object]) -> None:
    """Require that no global random generator has changed."""
    moved = differing(states, global_states())
    assert not moved, f"a global random generator changed: {moved}"


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return the names of the entries that differ."""
    return ", ".join(name for name, value in after.items() if value != before[name])
