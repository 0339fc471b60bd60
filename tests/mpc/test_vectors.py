"""The test vectors beside docs/results/mpc.md are what the code computes."""

import csv
from pathlib import Path

import torch

from vfl.core.text import as_written
from vfl.mpc import PadStream, Rules, make_party
from vfl.mpc.permuted import permutation
from vfl.mpc.ring import encode

KEY = bytes(range(32))
FILE = Path(__file__).parents[2] / "docs" / "results" / "mpc_vectors.csv"


def printed(row):
    """The words of the row whose name begins so."""
    with FILE.open(encoding="utf-8", newline="") as file:
        (found,) = [
            one["value"] for one in csv.DictReader(file) if as_written(one["what"]).startswith(row)
        ]
    return found.split()


def in_hex(words):
    return [f"{int(word) % 2**64:016x}" for word in words]


def test_pads():
    words = PadStream(KEY).elements64(2, "mask", 0, 7)
    assert in_hex(words) == printed('elements64(2) of purpose "mask"')


def test_permutation():
    order = permutation(PadStream(KEY), 8, "order", 1)
    assert [str(place) for place in order] == printed("permutation of 8 elements")


def test_encoding():
    assert in_hex(encode(torch.tensor([-1.5, 0.1]), 23, "x")) == printed("-1.5 and 0.1")


def test_keys_of_a_pair():
    party = make_party(0, {}, Rules())
    party.use_key(1, KEY, "session", 0)
    assert in_hex(party.pad(1, (2,), "share", 1)) == printed("the pad of P0 and P1")
