"""A half leaves vfl as one file that computes the same, and a run's halves can be moved."""

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from model_folders import write_model

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import MissingPackageError, RunFolderError, SpecError, TrainedRowsError
from vfl.session import PartyFolder
from vfl.training import evaluate, predict
from vfl.training import export as room
from vfl.training.export import TOLERANCE, export_half
from vfl.training.run import load_data, train, trained

CODEC = "topk:k=4"


def experiment_of(**more):
    settings = {
        "name": "halves",
        "seed": 3,
        "codec": CODEC,
        "data": {"source": "breast_cancer"},
        "label": {"party": "lab", "top": "mlp:hidden=8"},
        "train": {"epochs": 2},
        "parties": {
            "clinic": {"width": 8, "bottom": "periodic:hidden=8,frequencies=4"},
            "shop": {"width": 6, "bottom": "mlp:hidden=8,batch_norm=true"},
            "lab": {"width": 4},
        },
    }
    return Experiment.model_validate(settings | more)


def run_of(tmp_path, name="run", **more):
    experiment = experiment_of(**more)
    train(experiment, tmp_path, name)
    return tmp_path / name, experiment


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole, tmp_path):
    """A copy of a run, and its experiment."""
    folder, experiment = whole
    return Path(shutil.copytree(folder, tmp_path / "run")), experiment


def cut_of(session, party, rows):
    """What the party itself computes for its rows, before the codec."""
    (client,) = (one for one in session.clients if one.name == party)
    return client.cut(torch.as_tensor(rows)).numpy()


def loaded(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own reader
        return torch.export.load(str(path)).module()


def answers_of(path, values):
    """What a file computes, by the program that reads its form."""
    if path.suffix == ".pt2":
        with torch.no_grad():
            return loaded(path)(*map(torch.from_numpy, values.values())).numpy()
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, values)[0]


def exported(run, party, to, out=None):
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    return export_half(run, party, to, out)


@pytest.mark.parametrize(("to", "party"), [("onnx", "clinic"), ("torch", "shop")])
def test_the_file_gives_the_cut_of_the_party(run, to, party, tmp_path):
    folder, experiment = run
    made = exported(folder, party, to, tmp_path / "out")
    assert made["difference"] <= TOLERANCE
    data = load_data(experiment)
    for rows in (1, 40):  # any number of rows, not that of the example
        session = trained(RunFolder(folder), data, "predict")
        expected = cut_of(session, party, range(rows))
        found = answers_of(
            tmp_path / "out" / ("bottom.onnx" if to == "onnx" else "bottom.pt2"),
            {"columns": data[party].inputs[:rows].numpy()},
        )
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(
    ("to", "bottom"),
    [
        ("onnx", "textcnn:words=20,embedding=4"),
        ("onnx", "gru4rec:items=20,embedding=4"),
        ("torch", "gru4rec:items=20,embedding=4"),
        ("onnx", "pretrained:name=tiny"),
    ],
)
def test_bottoms_of_words_and_items_leave_as_files(tmp_path, monkeypatch, to, bottom):
    monkeypatch.setenv("VFL_MODELS", str(tmp_path / "models"))
    write_model(tmp_path / "models" / "tiny", "bert")
    (tmp_path / "models" / "tiny" / "tokenizer.json").write_text("{}")
    experiment = experiment_of(
        data={"source": "digits"},
        parties={"clinic": {"width": 6, "bottom": bottom}},
        train={"epochs": 1},
        codec="none",
    )
    whole = load_data(experiment)
    numbers = (whole["clinic"].inputs.flatten(1)[:, 20:30] * 16).round()
    words = dict(whole) | {"clinic": dataclasses.replace(whole["clinic"], inputs=numbers)}
    monkeypatch.setattr("vfl.training.run.load_data", lambda *_, **__: words)
    train(experiment, tmp_path, "run")
    found = export_half(tmp_path / "run", "clinic", to, tmp_path / "out")
    assert found["difference"] <= TOLERANCE


@pytest.mark.parametrize(
    ("to", "task"),
    [("torch", "classification"), ("onnx", "regression"), ("onnx", "isotonic"), ("torch", "platt")],
)
def test_halves_together_give_the_predictions_of_the_run(tmp_path, to, task):
    """The label party's file takes what the feature parties' files compute, in either form."""
    more = {"codec": "none"}
    if task in ("isotonic", "platt"):
        more |= {"label": {"party": "lab", "top": "mlp:hidden=8", "calibration": task}}
    if task == "regression":
        from sklearn.datasets import load_diabetes

        load_diabetes(as_frame=True).frame.to_csv(tmp_path / "table.csv", index=False)
        parties = {
            "clinic": {"width": 8, "columns": ["age", "sex", "b*"]},
            "shop": {"width": 8, "columns": ["s1", "s2", "s3"]},
            "lab": {"width": 8, "columns": ["s4", "s5", "s6"]},
        }
        more |= {
            "data": {"source": str(tmp_path / "table.csv")},
            "label": {"party": "lab", "column": "target", "task": "regression"},
            "parties": parties,
            "merge": "sum",
        }
    folder, experiment = run_of(tmp_path, **more)
    data = load_data(experiment)
    rows = data["lab"].split.test
    session, values = trained(RunFolder(folder), data, "predict").run(), {}
    for party, form in (("clinic", "torch"), ("shop", "onnx")):
        if task == "isotonic":
            made = exported(folder, party, form)
            own = {"columns": data[party].inputs[rows].numpy()}
            values[f"cut_{party}"] = answers_of(Path(made["half"]), own)
        else:  # which are those of the files
            values[f"cut_{party}"] = cut_of(session, party, rows)
    made = exported(folder, "lab", to)
    assert made["inputs"] == "cut_clinic, cut_shop, columns"
    values["columns"] = data["lab"].inputs[rows].numpy()
    found = answers_of(Path(made["half"]), values)
    expected = session.outputs().numpy()
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_what_lies_beside_the_file(run):
    folder, _ = run
    made = exported(folder, "clinic", "torch")
    target = folder / "parties" / "clinic" / "export"
    assert {path.name for path in target.iterdir()} == {"bottom.pt2", "card.json", "encoder.json"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in target.iterdir())
    card = json.loads((target / "card.json").read_text())
    assert card["exported"]["half"] == "bottom.pt2"
    assert card["terms"]["codec"] == CODEC
    encoder = PartyFolder(target.parent).encoder()
    assert (target / "encoder.json").read_text() == encoder.to_json() + "\n"
    assert made["encoder"] == str(target / "encoder.json")


def test_no_pickle_lies_in_a_torch_program(run):
    import zipfile

    folder, _ = run
    made = exported(folder, "shop", "torch")
    with zipfile.ZipFile(made["half"]) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    (examples,) = (name for name in inside if name.endswith((".pkl", ".pt")))
    assert inside[examples] == b""  # torch's reader asks for the file, and not for rows in it
    assert not [name for name, content in inside.items() if content.startswith(b"\x80\x02")]


def test_nothing_is_prepared_to_be_reported_to_the_makers_of_a_runtime(tmp_path):
    pytest.importorskip("onnxruntime")
    program = "import vfl.training.export, onnxruntime"
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("ORT_")}
    quiet |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", program], env=quiet, check=True, timeout=60)
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name]


def test_the_half_of_another_run_is_refused(tmp_path):
    """Both runs have one name and one shape, so that only the digest tells them apart."""
    folder, _ = run_of(tmp_path, "one")
    other, _ = run_of(tmp_path, "two", seed=4)
    shutil.rmtree(folder / "parties" / "clinic")
    shutil.copytree(other / "parties" / "clinic", folder / "parties" / "clinic")
    with pytest.raises(RunFolderError, match="not the final weights of the training"):
        export_half(folder, "clinic", "torch", None)
    with pytest.raises(
        TrainedRowsError, match="this run trained on are unknown"
    ):  # of a card of other rows
        evaluate(RunFolder(folder))
    shutil.copy(other / "parties" / "shop" / "card.json", folder / "parties" / "shop")
    with pytest.raises(RunFolderError, match="card belongs to other weights"):
        PartyFolder(folder / "parties" / "shop").card()


def test_halves_that_were_moved_to_another_host_answer_the_same(run, tmp_path):
    folder, _ = run
    before = evaluate(RunFolder(folder))
    predictions = predict(RunFolder(folder)).read_text()
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(folder, moved)
    shutil.rmtree(folder)
    after = evaluate(RunFolder.open(moved))
    assert {k: v for k, v in after.items() if k.startswith("test_")} == {
        k: v for k, v in before.items() if k.startswith("test_")
    }
    assert after["weights_sha256"] == before["weights_sha256"]
    assert predict(RunFolder(moved)).read_text() == predictions
    assert export_half(moved, "shop", "torch", None)["difference"] <= TOLERANCE


def test_under_a_secure_sum_the_top_takes_the_sum(tmp_path):
    parties = {"clinic": {"width": 8}, "shop": {"width": 8}}
    more = {"codec": "none", "merge": "sum", "secure": "sum", "parties": parties}
    folder, experiment = run_of(tmp_path, **more)
    made = export_half(folder, "lab", "torch", None)
    assert made["inputs"] == "cut_sum"
    data = load_data(experiment)
    rows, values = data["lab"].split.test, []
    for party in parties:
        path = Path(export_half(folder, party, "torch", None)["half"])
        values.append(answers_of(path, {"columns": data[party].inputs[rows].numpy()}))
    found = answers_of(Path(made["half"]), {"cut_sum": sum(values)})
    expected = trained(RunFolder(folder), data, "predict").run().outputs().numpy()
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()  # a ring rounds


def test_noise_at_inference_cannot_be_left_out_silently(tmp_path):
    defense = "clipped_noise:sigma=1,queries=true"
    parties = {"clinic": {"width": 8}, "shop": {"width": 8}}
    folder, _ = run_of(tmp_path, defense=defense, parties=parties)
    with pytest.raises(SpecError, match="adds noise to its outputs"):
        export_half(folder, "clinic", "torch", None)


def test_a_half_that_nobody_has_is_not_exported(tmp_path):
    parties = {
        "clinic": {"width": 8, "bottom": "mlp:hidden=none"},
        "shop": {"width": 8, "bottom": "mlp:hidden=none"},
    }
    more = {"codec": "none", "merge": "sum", "secure": "beaver", "parties": parties}
    more |= {"train": {"epochs": 1, "optimizer": "sgd", "momentum": 0}}
    folder, _ = run_of(tmp_path, **more)
    with pytest.raises(SpecError):
        export_half(folder, "clinic", "torch", None)
    assert not (folder / "parties" / "clinic" / "export").exists()


def test_missing_packages_are_named(run, monkeypatch):
    folder, _ = run
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"vfl\[onnx\]"):
        export_half(folder, "clinic", "onnx", None)
