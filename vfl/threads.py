"""How many threads a party's arithmetic uses."""

from __future__ import annotations


def use_one_thread() -> None:
    """One torch thread: several parties share a machine, and sums keep their order bit for bit."""
    import torch

    torch.set_num_threads(1)
