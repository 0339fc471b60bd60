"""Hidden states of a pretrained model as a bottom."""

import copy

import pytest
import torch
from model_folders import write_model

from vfl.config import Experiment
from vfl.core.errors import BadOptionError, DataError, MissingDataError, SpecError, WidthError
from vfl.core.seeds import scoped
from vfl.models import make_bottom, require_tokens
from vfl.models.footprint import footprint
from vfl.models.pretrained import load_pretrained
from vfl.training.run import train

#: 0 is padding, other numbers are tokens plus 1.
ROWS = torch.tensor([[4.0, 18, 30, 0, 0, 0], [7, 7, 2, 90, 11, 5], [0, 0, 0, 0, 0, 0]])


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    write_model(tmp_path / "bert", "bert")
    (tmp_path / "bert" / "tokenizer.json").write_text("{}")
    return load_pretrained(tmp_path / "bert", "body")


def built(spec, width=64, steps=6):
    with scoped(0):
        return make_bottom(f"pretrained:name=bert,norm=false{spec}").build((steps,), width)


@pytest.mark.parametrize(
    ("spec", "layer", "pool"),
    [
        ("", None, lambda one: one.mean(0)),
        (",layer=1", 1, lambda one: one.mean(0)),
        (",layer=0,pool=max", 0, lambda one: one.amax(0)),
        (",layer=2,pool=first", 2, lambda one: one[0]),
        (",pool=last", None, lambda one: one[-1]),
    ],
)
def test_features_are_those_of_each_text_alone(model, spec, layer, pool):
    cut = built(spec)(ROWS)
    for row, count in ((0, 3), (1, 6)):
        tokens = ROWS[row : row + 1, :count].long() - 1
        with torch.no_grad():
            want = pool(model.hidden(tokens, layer)[0])
        torch.testing.assert_close(cut[row], want, atol=1e-5, rtol=1e-5)
    assert cut[2].isfinite().all()


def test_values_behind_the_tokens_go_beside_the_features(model):
    rows = torch.cat([ROWS, torch.randn(3, 2)], 1)
    cut = built(",tokens=6", width=66, steps=8)(rows)
    assert torch.equal(cut[:, :64], built("")(ROWS))
    assert torch.equal(cut[:, 64:], rows[:, 6:])
    assert make_bottom("pretrained:name=bert,tokens=6").columns((8,)) == 66
    with pytest.raises(SpecError, match="tokens=N"):
        built("", steps=8)(rows.abs())
    with pytest.raises(BadOptionError, match="tokens"):
        built(",tokens=9", steps=8)


@pytest.mark.parametrize(
    ("spec", "steps", "tokens", "told"),
    [
        ("pretrained:name=bert", 6, 0, "read other columns as tokens"),  # columns of 0 and 1
        ("pretrained:name=bert", 8, 6, "read other columns as tokens"),
        ("pretrained:name=bert,tokens=4", 8, 6, "read tokens as measurements"),
        ("textcnn:words=100", 6, 0, "read other columns as tokens"),
        ("gru4rec:items=9", 8, 6, "read other columns as tokens"),
        ("pretrained:name=bert,tokens=6", 8, 6, None),
        ("pretrained:name=bert", 6, 6, None),
        ("pretrained:name=bert", 6, None, None),  # a data set by name has tokens without an encoder
        ("mlp", 8, 6, None),
    ],
)
def test_other_columns_are_not_read_as_tokens(model, spec, steps, tokens, told):
    bottom = make_bottom(spec)
    if told is None:
        require_tokens(bottom, (steps,), 66, tokens)
        return
    with pytest.raises(SpecError, match=told) as refused:
        require_tokens(bottom, (steps,), 66, tokens)
    assert ("data.tokenizer" if not tokens else f"pretrained with tokens={tokens}") in (
        refused.value.fix
    )


def test_a_table_of_flags_is_not_read_as_tokens(model, tmp_path):
    """The party's own run refuses it, whose encoder says which inputs are tokens."""
    lines = [f"{bool(n % 2)},{bool(n % 3)},{n % 5},{n % 2}" for n in range(80)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["member,insured,visits,target", *lines]))
    experiment = Experiment.model_validate(
        {
            "name": "flags",
            "data": {"source": str(table)},
            "parties": {
                "clinic": {
                    "width": 4, "columns": ["member", "insured"], "bottom": "pretrained:name=bert",
                },
                "lab": {"width": 4, "columns": ["visits"]},
            },
            "label": {"party": "lab", "column": "target"},
            "train": {"epochs": 1},
        }
    )  # fmt: skip
    with pytest.raises(SpecError, match="read other columns as tokens") as refused:
        train(experiment, tmp_path, "run")
    assert "data.tokenizer" in refused.value.fix


def test_features_are_normalised_row_by_row(model):
    with scoped(0):
        cut = make_bottom("pretrained:name=bert").build((6,), 64)(ROWS)
    raw = built("")(ROWS)
    want = (raw - raw.mean(1, keepdim=True)) / raw.var(1, keepdim=True, correction=0).sqrt()
    torch.testing.assert_close(cut[:2], want[:2], atol=1e-3, rtol=1e-3)


def test_long_texts_are_read_in_windows(model):
    rows = torch.randint(1, 91, (2, 70), generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        parts = [model.hidden(part.long() - 1) for part in rows.split(32, 1)]
    torch.testing.assert_close(built("", steps=70)(rows), torch.cat(parts, 1).mean(1))
    with pytest.raises(WidthError, match="70 tokens"):
        built(",pool=last", steps=70)


def test_a_frozen_model_computes_each_row_once_and_is_no_weight_of_the_run(model, monkeypatch):
    module = built("", width=5)
    assert set(module.state_dict()) == {"0._extra_state", "2.weight", "2.bias"}
    first, computed = module(ROWS), []
    kept = module[0]._kept
    real = kept.model.hidden
    monkeypatch.setattr(
        kept.model, "hidden", lambda *given, **named: computed.append(1) or real(*given, **named)
    )
    assert torch.equal(copy.deepcopy(module)(ROWS.flip(0)).flip(0), first)
    assert not computed
    first.sum().backward()
    assert module[2].weight.grad.abs().sum() > 0


def test_memory_of_the_frozen_model_is_counted(model):
    """A party's limit on memory is checked before a model is built."""
    counted = footprint(make_bottom("pretrained:name=bert"), (6,), 5)
    assert counted.parameters == 64 * 5 + 5
    assert counted.buffer_bytes == 4 * sum(each.numel() for each in model.parameters())


def test_weights_beside_another_frozen_model_are_refused(model, tmp_path):
    trained = built("", width=5).state_dict()
    built("", width=5).load_state_dict(trained)
    write_model(tmp_path / "bert", "bert", seed=1)
    with pytest.raises(DataError, match="not the one of this run"):
        built("", width=5).load_state_dict(trained)


def test_adapters_train_inside_the_model(model):
    module = built(",rank=2", width=5)
    before = module(ROWS).detach()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    module(ROWS).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module(ROWS), before)
    assert {
        name.rpartition(".")[2] for name, p in module[0].named_parameters() if p.requires_grad
    } == {"a", "b"}


@pytest.fixture
def decoder(tmp_path, monkeypatch):
    """A decoder whose tokenizer has a word for each of its 90 tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    write_model(tmp_path / "llama", "llama")
    words = {" good": 7, " bad": 11, "\n\n": 3, "so": 5, "[UNK]": 0}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    split = tokenizers.Regex("\n\n| ?[a-z]+")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(split, "isolated")
    made.save(str(tmp_path / "llama" / "tokenizer.json"))
    return load_pretrained(tmp_path / "llama")


@pytest.mark.parametrize("tail", [0, 2])
def test_answers_to_a_question_are_logits_behind_each_text(decoder, tail):
    spec = f"pretrained:name=llama,pool=last,norm=false,prompt=so,words=good-bad,tail={tail}"
    cut = make_bottom(spec).build((6,), 2)(ROWS)
    for row, count in ((0, 3), (1, 6)):
        tokens = [*(ROWS[row, :count].long() - 1).tolist()[-tail:], 3, 5]
        with torch.no_grad():
            want = decoder(torch.tensor([tokens]))[0, -1, [7, 11]]
        torch.testing.assert_close(cut[row], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("words", ["words=good-splendid so", "words=good,pool=mean"])
def test_answers_that_cannot_be_given_are_refused(decoder, words):
    pool = "" if "pool" in words else ",pool=last"
    with pytest.raises(BadOptionError, match="words"):
        make_bottom(f"pretrained:name=llama,{words}{pool}").build((6,), 2)


def test_features_on_disk_are_found_by_the_next_process(model, tmp_path, monkeypatch):
    first = built(",keep=disk")(ROWS)
    (file,) = (tmp_path / ".features").glob("*/rows.bin")
    assert file.stat().st_mode & 0o77 == 0
    again = built(",keep=disk")
    computed = []
    real = again[0]._kept.model.hidden
    monkeypatch.setattr(
        again[0]._kept.model, "hidden",
        lambda *given, **named: computed.append(1) or real(*given, **named),
    )  # fmt: skip
    assert torch.equal(again(ROWS), first)
    assert not computed
    built(",keep=disk,layer=1")(ROWS)  # another reading of the same rows
    assert len(list((tmp_path / ".features").glob("*/rows.bin"))) == 2


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-3], lambda content: content[:9] + b"x" + content[10:]]
)
def test_features_that_were_damaged_are_computed_again(model, tmp_path, damage):
    first = built(",keep=disk")(ROWS)
    (file,) = (tmp_path / ".features").glob("*/rows.bin")
    whole = len(file.read_bytes())
    file.write_bytes(damage(file.read_bytes()))
    assert torch.equal(built(",keep=disk")(ROWS), first)
    assert len(file.read_bytes()) == whole


def test_half_the_precision_is_near(model):
    torch.testing.assert_close(
        built(",precision=bfloat16")(ROWS), built("")(ROWS), atol=0.05, rtol=0.05
    )


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (",layer=3", BadOptionError),
        (",pool=median", BadOptionError),
        (",layer=-2", BadOptionError),
        (",part=whole", BadOptionError),
    ],
)
def test_options_out_of_range(model, spec, error):
    with pytest.raises(error):
        built(spec)


@pytest.mark.parametrize("name", ["../bert", "/tmp/bert", "Bert"])
def test_a_name_is_no_path(model, name):
    with pytest.raises(BadOptionError, match="pretrained"):
        make_bottom(f"pretrained:name={name}").build((6,), 64)


def test_a_model_that_is_not_there(model):
    with pytest.raises(MissingDataError, match="vfl model add"):
        make_bottom("pretrained:name=gpt").build((6,), 64)


def test_pictures_are_resized(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        image_size=16, patch_size=4,
    )  # fmt: skip
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    bottom = make_bottom("pretrained:name=vit,pool=first,norm=false").build((3, 8, 8), 32)
    pictures = torch.rand(2, 3, 8, 8)
    large = torch.nn.functional.interpolate(pictures, (16, 16), mode="bilinear", antialias=True)
    with torch.no_grad():
        want = load_pretrained(tmp_path / "vit", "body").hidden(large)[:, 0]
    torch.testing.assert_close(bottom(pictures), want)
