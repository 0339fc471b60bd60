from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.core.errors import MisalignedError
from vfl.datasets.alignment.join import align, sort_by_id
from vfl.datasets.party import digest_of

IDS = st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True)


def table(ids, **cells) -> pd.DataFrame:
    return pd.DataFrame({"id": ids, **cells})


@given(left=IDS, right=IDS, third=IDS)
def test_rows_of_common_ids_meet(left, right, third):
    own = {"a": left, "b": right, "c": third}
    common = set(left) & set(right) & set(third)
    frames = {party: table(ids, x=[10 * n for n in ids]) for party, ids in own.items()}
    if len(common) < 0.05 * min(map(len, own.values())) or not common:
        with pytest.raises(MisalignedError):
            align(frames, "id")
        return
    for id_type, order in (("text", sorted(map(str, common))), ("number", sorted(common))):
        aligned = align(frames, "id", id_type)
        assert aligned.ids.tolist() == order
        for frame in aligned.frames.values():
            assert frame["x"].tolist() == [10 * int(n) for n in order]


def test_each_party_alone_gets_the_order_of_the_joint_form():
    rng = np.random.default_rng(0)
    ids = [f"c{n}" for n in rng.permutation(300)]
    frames = {party: table(rng.permutation(ids)) for party in ("bank", "shop")}
    digests = set()
    for party, frame in frames.items():
        ordered, found = sort_by_id(frame, "id", f"party '{party}'")
        assert ordered["id"].tolist() == found.tolist() == sorted(ids)
        digests.add(digest_of(found))
    assert digests == {digest_of(align(frames, "id").ids)}
    assert digest_of(np.array(sorted(ids)[1:])) not in digests


def test_leading_zeros_meet_as_numbers_only():
    frames = {"bank": table(["0017", "0018"]), "shop": table([17, 18])}
    with pytest.raises(MisalignedError) as caught:
        align(frames, "id")
    assert "'bank': text of 4 digits, with leading zeros, 'shop': whole numbers" in str(
        caught.value
    )
    assert 'id_type = "number"' in str(caught.value)
    assert align(frames, "id", "number").ids.tolist() == [17, 18]


def test_the_cure_for_ids_with_a_zero_fraction_aligns_them():
    frames = {"bank": table(["17.0", "18."]), "shop": table([17, 18])}
    with pytest.raises(MisalignedError, match="reads 007, 7 and 7"):
        align(frames, "id")
    assert align(frames, "id", "number").ids.tolist() == [17, 18]


def test_a_mismatch_is_told_in_counts_and_formats():
    bank = [f"C{n:07d}" for n in range(10_000)]
    shop = [*range(9_997), "C0000001", "C0000002", "C0000003"]
    with pytest.raises(MisalignedError) as caught:
        align({"bank": table(bank), "shop": table(shop)}, "id")
    assert str(caught.value).splitlines() == [
        "error[V206]: only 3 of 10 000 ids of 'bank' match 'shop'",
        "  where 2 parties together have 3 ids in common",
        "  got   'bank': text of 8 characters, 'shop': text of 1 to 8 characters",
        "  want  the same ids, written the same way, at every party",
        "  try   check that 'id' is the column by which both parties identify these rows",
        "  more  vfl explain V206",
    ]


def test_the_pair_that_matches_least_is_named():
    frames = {"a": table([1, 2, 3]), "b": table([1, 2, 3]), "c": table([7, 8, 9])}
    with pytest.raises(MisalignedError, match="none of 3 ids of 'a' match 'c'"):
        align(frames, "id")


@pytest.mark.parametrize(
    ("left", "right", "id_type", "cure"),
    [
        ([1, 2], ["01", "02"], "text", 'id_type = "number"'),
        (["a1"], ["01"], "text", "is the column"),
        ([1, 2], [3, 4], "text", "is the column"),
        ([1, 2], [3, 4], "number", "is the column"),
        ([1, 2], ["03", "04"], "number", "is the column"),
    ],
)
def test_the_cure_fits_the_formats(left, right, id_type, cure):
    with pytest.raises(MisalignedError) as caught:
        align({"a": table(left), "b": table(right)}, "id", id_type)
    assert cure in caught.value.fix


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        ([1, 2, 2, 2], "2 rows repeat another row's id"),
        (["a", " a"], "1 rows repeat another row's id"),
        ([1, None, None], "2 rows without an id"),
    ],
)
def test_rows_without_an_id_of_their_own_are_counted(ids, got):
    with pytest.raises(MisalignedError, match="the ids of party 'bank'") as caught:
        sort_by_id(table(ids), "id", "party 'bank'")
    assert got in str(caught.value)


def test_ids_that_are_no_numbers_are_refused_as_numbers():
    for odd in ("x1", "1.5", str(2**64)):
        with pytest.raises(MisalignedError, match="not all whole numbers") as caught:
            sort_by_id(table(["1", odd]), "id", "party 'bank'", "number")
        assert 'id_type = "text"' in str(caught.value)
        assert caught.value.__suppress_context__
