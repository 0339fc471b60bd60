"""The examples do what their first lines say; a warning in one of them is an error here."""

import io
import re
import runpy
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from vfl.attacks import ATTACKS
from vfl.attacks.active import ADVERSARIES
from vfl.compression import CODECS
from vfl.config import read_experiment, with_overrides
from vfl.datasets import SOURCES
from vfl.defenses import DEFENSES
from vfl.experiments.leaderboard import OF_LABELS
from vfl.experiments.plan import check_specs, of_experiment
from vfl.experiments.value import value_cells
from vfl.models import MERGERS
from vfl.privacy.accountants import ACCOUNTANTS
from vfl.testing import (
    AccountantContract,
    AdversaryContract,
    AttackContract,
    DefenseContract,
    MergerContract,
    SourceContract,
)
from vfl.training.run import load_data, train

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = {
    "own_loop.py": 0.93,
    "outside_defense.py": 0.93,
    "outside_merger.py": 0.85,
    "inner_layers.py": 0.9,
    "outside_accountant.py": None,
    "outside_codec.py": None,
    "attack_a_training.py": None,
    "outside_attack.py": None,
    "outside_pipeline.py": None,
    "outside_source.py": None,
    "outside_adversary.py": None,
}
EXPERIMENTS = [
    "backdoors_digits.toml",
    "backdoors_mnist.toml",
    "branches.toml",
    "breast_cancer.toml",
    "compare_digits.toml",
    "hidden_labels.toml",
    "mnist_halves.toml",
    "network_on_shares.toml",
    "pea.toml",
    "tampered_digits.toml",
]
#: Read by `vfl horizontal`; tests/horizontal trains what it names.
HORIZONTAL = ("horizontal.toml", "horizontal_trends.toml")
SHORT = 80  # lines


def test_every_example_is_tested():
    found = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")}
    assert found == {*PROGRAMS, *EXPERIMENTS, *HORIZONTAL}
    assert max(len((EXAMPLES / name).read_text().splitlines()) for name in found) <= SHORT


def test_the_index_lists_every_example_and_nothing_else():
    index = (EXAMPLES / "README.md").read_text()
    listed, folder = set(), ""
    for line in index.splitlines():
        found = re.findall(r"`([\w/]+(?:\.(?:py|toml|ipynb)|/))`", line.rpartition("|")[0])
        folder = found.pop(0) if found and found[0].endswith("/") else ""
        listed |= {folder + name for name in found}
    kept = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*")
            if path.suffix in (".py", ".toml", ".ipynb")}  # fmt: skip
    assert listed == kept


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each program prints, and nothing else is left of it: no file, no member, no message."""
    folder, printed = tmp_path_factory.mktemp("empty"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for registry in (ACCOUNTANTS, ADVERSARIES, ATTACKS, CODECS, DEFENSES, MERGERS, SOURCES):
            patch.setattr(registry, "_members", dict(registry._members))
        for name in PROGRAMS:
            out, err = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                runpy.run_path(str(EXAMPLES / name), run_name="__main__")
            assert err.getvalue() == ""
            printed[name] = out.getvalue()
    assert list(folder.iterdir()) == []
    return printed


@pytest.mark.parametrize("name", [name for name, least in PROGRAMS.items() if least])
def test_an_example_learns(name, outputs):
    found = re.findall(r"accuracy (\d\.\d+)", outputs[name])
    assert found
    assert all(PROGRAMS[name] < float(accuracy) <= 1 for accuracy in found)


def test_the_codec_from_outside_halves_the_bytes(outputs):
    first, *values = outputs["outside_codec.py"].splitlines()
    assert first == "3 values in 6 bytes"
    assert "2.0000" in values[0]


def test_the_accountant_from_outside_is_a_little_worse_than_rdp(outputs):
    found = re.findall(r"epsilon (\d\.\d+)", outputs["outside_accountant.py"])
    ours, theirs = map(float, found)
    assert theirs < ours < 1.2 * theirs


def test_inner_layers_tell_less_when_they_repel(outputs):
    read = [int(share) for share in re.findall(r"labels (\d+)%", outputs["inner_layers.py"])]
    assert read[1] < read[0] - 10


def test_attacks_on_a_training_beat_their_guesses(outputs):
    found = re.findall(r"(\w+) +(\d+\.\d+) +guess +(\d+\.\d+)", outputs["attack_a_training.py"])
    of_classes = set(OF_LABELS) - {"r2"}
    assert {measure for measure, _, _ in found} == {
        *of_classes, *(f"matched_{one}" for one in of_classes), "mse", "psnr", "ssim",
    }  # fmt: skip
    for measure, value, guess in found:
        assert (float(value) < float(guess)) == (measure == "mse")


class FromOutside:
    """Its file alone makes a member like ours; this process forgets it afterwards."""

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        monkeypatch.setattr(self.registry, "_members", dict(self.registry._members))
        runpy.run_path(str(EXAMPLES / self.file))


class TestTheAccountantFromOutside(FromOutside, AccountantContract):
    registry, file = ACCOUNTANTS, "outside_accountant.py"
    specs = ("zcdp",)


class TestTheMergerFromOutside(FromOutside, MergerContract):
    registry, file = MERGERS, "outside_merger.py"
    specs = ("attention", "attention:heads=1")


class TestTheAttackFromOutside(FromOutside, AttackContract):
    registry, file = ATTACKS, "outside_attack.py"
    specs = ("mahalanobis", "mahalanobis:shrink=0.5")


class TestTheAdversaryFromOutside(FromOutside, AdversaryContract):
    registry, file = ADVERSARIES, "outside_adversary.py"
    specs = ("shuffling", "shuffling:share=1")


class TestTheDefenseFromOutside(FromOutside, DefenseContract):
    registry, file = DEFENSES, "outside_defense.py"
    specs = ("rounded_gradient", "rounded_gradient:steps=1", "rounded_gradient+layer_norm")


class TestTheDataSetFromOutside(FromOutside, SourceContract):
    registry, file = SOURCES, "outside_source.py"
    specs = ("rings", "rings:noise=0.2")

    def test_an_experiment_trains_on_it(self, spec, tmp_path):
        experiment = read_experiment(EXAMPLES / "breast_cancer.toml")
        experiment = with_overrides(experiment, [f"data.source={spec}", "train.epochs=1"])
        assert not experiment.is_table
        assert train(experiment, tmp_path, "one")["test_accuracy"] >= 0


def test_the_adversary_from_outside_spoils_the_network(outputs):
    found = re.findall(r"test accuracy (\d\.\d+)", outputs["outside_adversary.py"])
    honest, some, all_of_them = map(float, found)
    assert honest > some + 0.03 > all_of_them + 0.06


def test_the_attack_from_outside_reads_more_from_cuts_than_from_columns(outputs):
    found = re.findall(r"reaches (\d.\d+)  on raw columns (\d.\d+)", outputs["outside_attack.py"])
    values = [tuple(map(float, pair)) for pair in found]
    assert len(values) == 3
    assert all(reached > raw for reached, raw in values)
    assert values[0][0] < values[-1][0]


@pytest.mark.parametrize(
    ("name", "folder", "cells", "inputs"),
    [
        ("adult", None, 35, None),
        ("bank_marketing", "bank-marketing", 51, (45211, 59)),
        ("credit_default", "credit-default", 51, (30000, 90)),
    ],
)
def test_what_joining_buys_on_real_tables(name, folder, cells, inputs, data_root):
    experiment = read_experiment(EXAMPLES / "value" / f"{name}.toml")
    check_specs(experiment)
    assert len(value_cells(experiment)) == cells
    if folder is None:
        return
    table = data_root / folder / experiment.data.source.rpartition("/")[2]
    if not table.exists():
        pytest.skip(f"{folder} is not installed")
    data = load_data(with_overrides(experiment, [f"data.source={table}"]))
    assert tuple(data["lender"].inputs.shape) == inputs


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_specs_of_an_experiment_can_be_built(name):
    facts = check_specs(read_experiment(EXAMPLES / name))
    assert facts["parties"]


def test_the_experiment_on_a_bundled_table_trains(tmp_path):
    path = EXAMPLES / "breast_cancer.toml"
    assert of_experiment(path)["label_party"] == "pathology"
    assert train(read_experiment(path), tmp_path, "one")["test_accuracy"] > 0.95


def test_the_experiment_on_mnist_finds_its_pictures(data_root, monkeypatch):
    monkeypatch.setenv("VFL_DATA", str(data_root))
    facts = of_experiment(EXAMPLES / "mnist_halves.toml", ["data.rows=700"])
    assert facts["inputs"] == {"left": "1x28x14", "right": "1x28x14"}


def test_the_comparison_is_the_one_its_page_shows():
    path = EXAMPLES / "compare_digits.toml"
    docs = EXAMPLES.parent / "docs"
    page = (docs / "comparing.md").read_text()
    shown = next(block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL))
    assert tomllib.loads(shown) == tomllib.loads(path.read_text())
    codecs = of_experiment(path)["compared"]
    assert codecs[:3] == ["none", "topk:k=2", "topk:k=5"]
    results = (docs / "results" / "comparing.md").read_text()
    assert all(f"| {codec} |" in results for codec in codecs)
