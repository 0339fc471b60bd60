"""Next-item rows against a loop, and both editions of YooChoose."""

from __future__ import annotations

import numpy as np
import pytest
from set_files import clicks_of, published_clicks, write_clicks, write_filtered

from vfl.core.errors import DataError
from vfl.datasets import Dealing, SetFormat, load_bundled
from vfl.datasets.sources.sessions import next_items, read_clicks


@pytest.mark.parametrize("length", [1, 3, 20])
def test_every_beginning_of_a_session_is_a_row(length):
    rng = np.random.default_rng(length)
    sessions = [rng.integers(0, 9, rng.integers(0, 8)).tolist() for _ in range(30)]
    rows, following = next_items(sessions, length)
    want, labels = [], []
    for session in sessions:
        for end in range(1, len(session)):
            known = [item + 1 for item in session[:end]][-length:]
            want.append(known + [0] * (length - len(known)))
            labels.append(session[end])
    assert rows.tolist() == want
    assert following.tolist() == labels
    few, first = next_items(sessions, length, limit=7)
    assert few.tolist() == want[:7]
    assert first.tolist() == labels[:7]


def test_the_filtered_edition_keeps_its_parts(tmp_path):
    write_filtered(tmp_path)
    form = SetFormat(length=2)
    data = load_bundled("yoochoose_filtered", ["a"], "b", Dealing(0), form, root=tmp_path)
    assert data["a"].inputs.tolist() == [[1, 0], [5, 0], [5, 2]] * 3
    assert data["b"].labels.tolist() == [4, 1, 2] * 3
    assert data["b"].classes == (0, 1, 2, 3, 4)
    assert [part.tolist() for part in vars(data["a"].split).values()] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


@pytest.mark.parametrize(
    "text", ["head\n1\t2\n", "head\n1\t2\tx,3\n", "head\n1\t2\t-7654,4\n", "head\n1\t2\t3\t4\n"]
)
def test_sessions_of_another_form_are_refused_without_their_items(tmp_path, text):
    write_filtered(tmp_path, text)
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_bundled("yoochoose_filtered", ["a"], "b", Dealing(0), root=tmp_path)
    assert "7654" not in str(caught.value)


def test_the_real_edition_has_its_published_counts(data_root):
    if not (data_root / "yoochoose1_64").is_dir():
        pytest.skip("there is no YooChoose here")
    data = load_bundled("yoochoose_filtered", ["a"], "b", Dealing(0), root=data_root)
    assert str(data["a"].split) == "Split(train=68716, validation=23320, test=24205)"
    assert data["a"].inputs.shape == (116_241, 50)
    assert len(data["b"].classes) == 5399
    items = set(data["a"].inputs.unique().tolist()) | set((data["b"].labels + 1).tolist())
    assert len(items - {0}) == 5397


def test_published_clicks_are_filtered_then_the_last_sessions_are_split_by_time(tmp_path):
    """10 of the 640 sessions stay, 8, 1 and 1."""
    write_clicks(tmp_path, published_clicks())
    parts, items = read_clicks(tmp_path)
    even, odd = [0, 1, 0], [1, 0]  # 500 is 0, 900 is 1
    # Within a session time decides, and the rare click has gone.
    assert items == 2
    assert parts == [[even, odd] * 4, [even], [odd]]
    form = SetFormat(length=4)
    data = load_bundled("yoochoose", ["a"], "b", Dealing(0), form, root=tmp_path)
    assert str(data["a"].split) == "Split(train=12, validation=2, test=1)"


def test_clicks_of_another_form_are_refused(tmp_path):
    write_clicks(tmp_path, "1,no time,2,3\n")
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_clicks(tmp_path)
    assert "no time" not in str(caught.value)


def test_too_few_clicks_are_told(tmp_path):
    write_clicks(tmp_path, clicks_of({1: [(1, 5), (2, 5)]}))
    with pytest.raises(DataError, match="too few sessions"):
        read_clicks(tmp_path)
