"""The files of examples/language on a few made reviews: pretraining, fine-tuning, inversion."""

import csv
import io
import runpy
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from vfl.config import read_experiment
from vfl.core.seeds import scoped
from vfl.experiments import GridFolder
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.pages import build_report, write_results
from vfl.experiments.plan import check_specs
from vfl.experiments.results import LoadedGrid
from vfl.experiments.scheduler import run_cells
from vfl.models.decoder import Decoder
from vfl.models.language import decoder_shape, save_pretrained
from vfl.training.run import load_data, session_of

FOLDER = Path(__file__).parents[1] / "examples" / "language"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where reviews and weights are, of two steps of pretraining."""
    root = tmp_path_factory.mktemp("language")
    draw = np.random.default_rng(0)
    words = [f"word{number}" for number in range(60)]
    texts = {
        f"txt_sentoken/{side}/cv{number:03}.txt": "\n".join(
            " ".join(draw.choice(words, 20)) for _ in range(4)
        )
        for side in ("neg", "pos")
        for number in range(40)
    }
    archive = root / "review-polarity" / "review_polarity.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as file:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFL_DATA", str(root))
        patch.setenv("VFL_MODELS", str(root / "models"))
        few = ("--steps", "2", "--batch", "2")
        played(patch, "pretrain", *few)
        played(patch, "pretrain", *few, "--layers", "2", "--name", "reviews2")
        yield root, patch


def played(patch, name, *options):
    patch.setattr(sys, "argv", [name, *map(str, options)])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def lines_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_split_and_central_training_are_one(folder, capsys):
    root, patch = folder
    out = root / "fine_tuning.csv"
    played(patch, "fine_tune", "--out", out, "-s", "train.epochs=1", "-s", "parties.user.width=512")
    found = lines_of(out)
    assert [line["trained"] for line in found[:2]] == ["split", "central"]
    assert found[0]["accuracy"] == found[1]["accuracy"]
    sent = [int(float(line["cut_bytes"])) for line in found]
    assert sent[1] == 0
    assert max(sent[2:]) < sent[0] / 3
    outputs = [int(float(line["output_bytes"])) for line in found]
    assert max(outputs[2:]) < outputs[0] / 3


@pytest.mark.slow
def test_cells_are_done_once(folder, capsys):
    root, patch = folder
    out = root / "inversion.csv"
    options = ["--out", out, "--texts", 2, "--sweep", "depth"]
    played(patch, "invert", *options, "--most", 1)
    played(patch, "invert", *options, "--most", 1)
    found = lines_of(out)
    assert [line["attack"].partition(":")[0] for line in found] == [
        "text_inversion",
        "token_search",
    ]
    for line in found:
        assert 0 <= float(line["guess"]) < float(line["accuracy"]) <= 1
        assert float(line["perplexity"]) > 1


def test_the_experiments_can_be_built(folder):
    for name in ("reviews", "inversion"):
        changes = ["data.length=60", "data.test=0.2", "train.epochs=1", "parties.user.width=512"]
        experiment = read_experiment(FOLDER / f"{name}.toml", changes)
        check_specs(experiment)
        data = load_data(experiment)
        session_of(experiment, data, "train").run()


@pytest.mark.usefixtures("folder")
def test_the_published_models_experiment_can_be_built():
    """With a small model under its name."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {"[UNK]": 0, "film": 1, "good": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with scoped(0):
        path = save_pretrained("smollm2", Decoder(decoder_shape(3, 64, 2, 2)))
    made.save(str(path / "tokenizer.json"))
    changes = ["data.length=8", "parties.user.width=512", "middle.width=64"]
    experiment = read_experiment(FOLDER / "smollm2.toml", changes)
    check_specs(experiment)
    session_of(experiment, load_data(experiment), "train").run()


@pytest.mark.slow
def test_the_grid_reads_words(folder, tmp_path):
    changes = ["data.length=60", "data.test=0.2", "train.epochs=1", "parties.user.width=128"]
    experiment = read_experiment(FOLDER / "inversion.toml", [*changes, "grid.known_columns=5"])
    short = ("text_inversion:steps=20", "token_network:hidden=8,steps=20")
    asked = {"defenses": ("clipped_noise:norm=inf,sigma=1",), "codecs": (), "attacks": short}
    grid = experiment.grid.model_copy(update=asked)
    experiment = experiment.model_copy(update={"grid": grid})
    made = GridFolder(tmp_path / "grid")
    made.write(experiment, grid_cells(experiment), "vfl grid inversion.toml")
    assert run_cells(made, made.cells()) == []
    write_results(made)
    rows = LoadedGrid(made).attacks
    assert {row.subject for row in rows} == set(short)
    assert {row.measure for row in rows} == {"token_accuracy", "whole_texts"}
    assert "token accuracy" in build_report(made.path).read_text().replace("_", " ")
