"""The [compare] table: what it means, and its mistakes."""

import pytest

from vfl.config import CompareSettings, Experiment, read_experiment, with_overrides
from vfl.core.errors import ConfigError
from vfl.training.specs import check_specs, spec_mistakes

FILE = """\
[parties.left]
width = 8

[compare]
codecs = ["none", "topk:k=?"]
levels = 10
accuracy = 0.8
"""


def settings(**changes):
    return CompareSettings.model_validate({"codecs": ["none", "topk:k=2"]} | changes)


def test_repeats_are_seeds_or_folds():
    assert settings().repeats == [("seed=0",), ("seed=1",), ("seed=2",)]
    assert settings(seeds=[7]).repeats == [("seed=7",)]
    assert settings(folds=2).repeats == [
        ("data.folds=2", "data.fold=1"),
        ("data.folds=2", "data.fold=2"),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codecs": []}, "at least 1 item"),
        ({"codecs": ["none", "none"]}, "none is listed twice"),
        ({"codecs": ["topk:k=?,values=?"], "levels": [5]}, "only one number"),
        ({"codecs": ["topk:k=?"]}, "'topk:k=?' needs levels"),
        ({"levels": [0], "codecs": ["topk:k=?"]}, "greater than 0"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [1, 1]}, "1 is listed twice"),
        ({"seeds": [0], "folds": 3}, "folds replace seeds"),
        ({"folds": 1}, "greater than or equal to 2"),
        ({"baseline": "size:k=2"}, "not one of codecs"),
        ({"variants": {"a b": []}}, "should match pattern"),
    ],
    ids=str,
)
def test_mistakes(changes, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        settings(**changes)


def test_mistakes_are_told_together_with_their_lines(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text(FILE.replace('"none"', '"nonne"').replace("levels", "level"))
    with pytest.raises(ConfigError) as caught:
        read_experiment(path, more=spec_mistakes)
    told = str(caught.value)
    assert "file.toml:6: no setting is called 'compare.level'; did you mean 'levels'?" in told
    assert "file.toml:5: compare.codecs: nonne: no codec is called 'nonne'; did you mean" in told


def test_a_codec_that_does_not_fit_is_told_before_anything_runs():
    experiment = Experiment.model_validate({"parties": {"left": {"width": 8}}})
    experiment = with_overrides(experiment, ['compare.codecs=["topk:k=9"]'])
    with pytest.raises(ValueError, match="topk:k=9: top-k keeps 9 values of a cut that is 8 wide"):
        check_specs(experiment)
