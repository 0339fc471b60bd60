"""Attacks by P2 of a private network, which sees the values before every function, permuted.

>>> import torch
>>> twice = seen_twice(torch.tensor([0.5, 3.0, -1.0]), torch.tensor([2.0, -0.25, 3.0]))
>>> twice.tolist()  # behind new dummies, the value of a row that is asked again
[1]

They are pure functions of what P2 receives and of what is public: rules, shapes, which rows a
batch has. `Victim` computes for real and keeps what reached P2; scores are given outside.
"""

from __future__ import annotations

from vfl.attacks.permuted.candidates import found_shares, like_multisets
from vfl.attacks.permuted.dummies import seen_twice, stands_out
from vfl.attacks.permuted.evidence import correlation, nearest, same_class
from vfl.attacks.permuted.labels import labels_by_place, labels_from_sums
from vfl.attacks.permuted.linking import by_rank, recognised
from vfl.attacks.permuted.shuffled import solve_shuffled
from vfl.attacks.permuted.victim import Victim, drawn_weights, on_grid, places, plain_sums

__all__ = [
    "Victim",
    "by_rank",
    "correlation",
    "drawn_weights",
    "found_shares",
    "labels_by_place",
    "labels_from_sums",
    "like_multisets",
    "nearest",
    "on_grid",
    "places",
    "plain_sums",
    "recognised",
    "same_class",
    "seen_twice",
    "solve_shuffled",
    "stands_out",
]
