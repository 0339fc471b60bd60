"""Attacks by P2 of a private network, which sees the values before every function, permuted.

>>> import torch
>>> twice = seen_twice(torch.tensor([0.5, 3.0, -1.0]), torch.tensor([2.0, -0.25, 3.0]))
>>> twice.tolist()  # behind new dummies, the value of a row that is asked again
[1]

They are pure functions of what P2 receives and of what is public: rules, shapes, which rows a
batch has. `Victim` computes for real and keeps what reached P2; scores are given outside.
"""

from __future__ import annotations

from vfl.attacks.permuted.attacks import (
    by_rank,
    correlation,
    found_shares,
    labels_by_place,
    labels_from_sums,
    like_multisets,
    nearest,
    recognised,
    same_class,
    seen_twice,
    solve_shuffled,
    stands_out,
)
from vfl.attacks.permuted.victim import Victim, drawn_weights, matched_indices, on_grid, plain_sums

__all__ = [
    "Victim",
    "by_rank",
    "correlation",
    "drawn_weights",
    "found_shares",
    "labels_by_place",
    "labels_from_sums",
    "like_multisets",
    "matched_indices",
    "nearest",
    "on_grid",
    "plain_sums",
    "recognised",
    "same_class",
    "seen_twice",
    "solve_shuffled",
    "stands_out",
]
