"""`vfl model`: pretrained models by name."""

import json

import pytest
from model_folders import write_model


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("VFL_MODELS", str(tmp_path / "models"))


def test_a_model_is_added_described_and_listed(vfl, tmp_path):
    write_model(tmp_path / "hf", "llama")
    done = vfl("model", "add", "hf", "small")
    assert done.code == 0
    assert "layers 2, width 64, heads 4, groups 2, vocabulary 90" in done.out
    facts = json.loads(vfl("model", "show", "small", "--json").out)
    assert facts["family"] == "llama"
    part = facts["parts"]["whole"]
    assert part["weights"] * 4 == part["float32_bytes"]
    assert part["cut_bytes_per_token"] == 4 * 64
    assert part["file_bytes"] == (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert json.loads(vfl("model", "list", "--json").out) == ["small"]
    assert vfl("model", "show", "hf").out.startswith("llama in hf\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "nothing"), "vfl model add"),
        (("add", "nothing", "small"), "this model does not exist"),
        (("add", "hf", "../small"), "such as reviews"),
    ],
)
def test_mistakes(vfl, words, said):
    done = vfl("model", *words)
    assert done.code == 2
    assert said in done.err


def test_an_empty_folder_says_what_to_do(vfl):
    assert "vfl model add" in vfl("model", "list").err
