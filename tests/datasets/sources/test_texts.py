"""Words as numbers, against counting by hand; film reviews and articles."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from set_files import reviews_of, write_articles, write_reviews

from vfl.core.errors import BadOptionError, DataError
from vfl.datasets import Dealing, Fold, SetFormat, load_bundled
from vfl.datasets.sources.texts import Texts


def test_words_are_numbered_by_frequency_in_training_rows():
    rng = np.random.default_rng(0)
    words = [f"w{n}" for n in range(30)]
    texts = [" ".join(rng.choice(words, rng.integers(0, 12))) for _ in range(40)]
    train = np.arange(0, 40, 2)
    got = Texts.of(texts, length=8, vocabulary=12).rows(train)
    counts = Counter(word for row in train for word in texts[row].split()[:8])
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:10]
    number = {word: place + 2 for place, word in enumerate(ranked)}
    want = [[number.get(word, 1) for word in text.split()[:8]] for text in texts]
    assert got.dtype == np.float32
    assert got.tolist() == [row + [0] * (8 - len(row)) for row in want]


def test_other_rows_do_not_reach_the_vocabulary():
    texts = ["a b a", "c c c c", "b"]
    assert Texts.of(texts, 3, 9).rows(np.array([0, 2])).tolist() == [
        [2, 3, 2],
        [1, 1, 1],
        [3, 0, 0],
    ]


def test_reviews_take_turns(tmp_path):
    write_reviews(tmp_path, reviews_of(10) | {"poldata.README.2.0": "no review"})
    form = SetFormat(length=3, vocabulary=9)
    data = load_bundled("review_polarity", ["a"], "b", Dealing(0), form, root=tmp_path)
    assert data["a"].inputs.shape == (20, 3)
    assert data["a"].inputs[:, 0].tolist() == [2] * 20  # "a" is the most frequent word
    assert data["b"].labels.tolist() == [0, 1] * 10
    assert data["b"].classes == ("neg", "pos")
    assert len(data["a"].inputs[::2].unique(dim=0)) == 1
    few = load_bundled("review_polarity", ["a"], "b", Dealing(0, limit=8), root=tmp_path)
    assert few["b"].labels.tolist() == [0, 1] * 4
    assert few["a"].inputs.shape == (8, 400)


def test_damaged_reviews_are_refused(tmp_path):
    write_reviews(tmp_path / "one", {"neg/cv1.txt": "only one side"})
    with pytest.raises(DataError, match="two classes"):
        load_bundled("review_polarity", ["a"], "b", Dealing(0), root=tmp_path / "one")
    (tmp_path / "review-polarity").mkdir()
    (tmp_path / "review-polarity" / "review_polarity.tar.gz").write_bytes(b"\x1f\x8bno archive")
    with pytest.raises(DataError, match="cannot be read"):
        load_bundled("review_polarity", ["a"], "b", Dealing(0), root=tmp_path)


def test_the_real_reviews(data_root):
    if not (data_root / "review-polarity").is_dir():
        pytest.skip("there are no reviews here")
    data = load_bundled("review_polarity", ["a"], "b", Dealing(0), root=data_root)
    assert data["a"].inputs.shape == (2000, 400)
    assert data["b"].labels.bincount().tolist() == [1000, 1000]
    assert data["a"].inputs.max() == 19_999
    assert 0 < (data["a"].inputs[data["a"].split.test] == 1).float().mean() < 0.1


def test_articles_keep_their_parts(tmp_path):
    write_articles(tmp_path)
    form = SetFormat(length=4, vocabulary=5)
    data = load_bundled("dbpedia", ["a"], "b", Dealing(0), form, root=tmp_path)
    assert str(data["b"].split) == "Split(train=6, validation=2, test=3)"
    assert data["b"].classes == ("Airport", "River")
    assert data["b"].labels.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert data["a"].inputs[0].tolist() == [2, 3, 1, 0]  # na, the, and a word too many
    few = load_bundled("dbpedia", ["a"], "b", Dealing(0, limit=6), form, root=tmp_path)
    assert str(few["b"].split) == "Split(train=3, validation=1, test=2)"
    with pytest.raises(BadOptionError, match="test rows of its own"):
        load_bundled("dbpedia", ["a"], "b", Dealing(0, fold=Fold(1, 2)), root=tmp_path)


def test_articles_of_another_form(tmp_path):
    write_articles(tmp_path)
    (tmp_path / "dbpedia-classes" / "DBPEDIA_val.csv").write_text("text,class\na,b\n")
    with pytest.raises(DataError, match="columns text and l3"):
        load_bundled("dbpedia", ["a"], "b", Dealing(0), root=tmp_path)
