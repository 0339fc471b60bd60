"""The parts of a decoder against the whole, and adapters against their formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vfl.core.errors import BadOptionError, DataError, MissingDataError, SpecError, WidthError
from vfl.core.seeds import scoped
from vfl.models import make_bottom, make_top
from vfl.models.decoder import Decoder
from vfl.models.language import decoder_shape, save_pretrained
from vfl.models.lora import _NORMAL_FLOAT as NORMAL_FLOAT
from vfl.models.lora import LoRAEmbedding, LoRALinear, QuantisedEmbedding, QuantisedLinear
from vfl.models.pretrained import Weights

SIZES = "words=30,tokens=8,layers=3,heads=2"
TEXTS = torch.tensor([[3.0, 29, 1, 7, 0], [2, 2, 5, 11, 8]])


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """A decoder whose weights are kept under the name 'small'."""
    monkeypatch.setenv("VFL_MODELS", str(tmp_path))
    with scoped(1):
        model = Decoder(decoder_shape(30, 8, 3, 2))
    assert save_pretrained("small", model) == tmp_path / "small"
    return model


@pytest.mark.parametrize("front", [0, 1, 3])
def test_the_parts_together_are_the_pretrained_whole(whole, front):
    options = f"{SIZES},front={front},pretrained=small"
    below = make_bottom(f"decoder_front:{options}").build((5,), 40)
    above = make_bottom(f"decoder_middle:{options}").build((40,), 8)
    normed = []
    whole.norm.register_forward_hook(lambda module, given, found: normed.append(found))
    whole(TEXTS.long())
    torch.testing.assert_close(above(below(TEXTS)), normed[0].mean(1))
    top = make_top(f"decoder:{options}").build(40, 2)
    torch.testing.assert_close(top[0](below(TEXTS)), normed[0].mean(1))


def test_a_narrow_cut_is_about_the_first_words(whole):
    spec = f"decoder_front:{SIZES},front=2,pretrained=small"
    cut = make_bottom(spec).build((5,), 24)(TEXTS)
    torch.testing.assert_close(cut, make_bottom(spec).build((5,), 40)(TEXTS)[:, :24])


def test_an_adapter_is_its_formula_and_begins_as_nothing():
    with scoped(2):
        base = nn.Linear(6, 4)
        layer, x = LoRALinear(base, rank=2, alpha=3.0), torch.randn(5, 6)
        assert torch.equal(layer(x), base(x))
        nn.init.normal_(layer.b)
    weight = base.weight + 1.5 * layer.b @ layer.a
    torch.testing.assert_close(layer(x), x @ weight.T + base.bias)
    torch.testing.assert_close(layer.merged()(x), layer(x))


def test_an_adapter_of_words_is_its_formula_too():
    with scoped(2):
        base = nn.Embedding(9, 4)
        words, numbers = LoRAEmbedding(base, rank=2, alpha=3.0), torch.tensor([[0, 8], [8, 3]])
        assert torch.equal(words(numbers), base(numbers))
        nn.init.normal_(words.a)
    torch.testing.assert_close(words(numbers), (base.weight + 1.5 * words.a @ words.b)[numbers])
    torch.testing.assert_close(words.weight[numbers], words(numbers))


def test_only_adapters_learn():
    spec = f"decoder_middle:{SIZES},front=1,rank=2"
    with scoped(3):
        module = make_bottom(spec).build((40,), 8)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.randn(3, 40)).square().sum().backward()
            optimizer.step()
    moved = {n for n, value in module.state_dict().items() if not torch.equal(value, before[n])}
    learned = {name for name, value in module.named_parameters() if value.requires_grad}
    assert moved == learned
    assert {name.rpartition(".")[2] for name in learned} == {"a", "b"}
    assert len(learned) == 2 * 4 * 2  # two matrices at four linear layers of two blocks


def test_what_does_not_fit_is_refused(whole):
    front = make_bottom(f"decoder_front:{SIZES}")
    with pytest.raises(WidthError, match="multiple of 8"):
        front.build((5,), 39)
    with pytest.raises(WidthError, match="width 40 or less"):
        front.build((5,), 48)
    with pytest.raises(WidthError, match="one vector per text"):
        make_bottom(f"decoder_middle:{SIZES}").build((40,), 16)
    with pytest.raises(SpecError, match="another architecture"):
        make_bottom("decoder_front:words=31,tokens=8,pretrained=small").build((5,), 40)
    with pytest.raises(BadOptionError, match="option 'front'"):
        make_bottom(f"decoder_front:{SIZES},front=4")


@pytest.mark.parametrize("name", ["../small", "Small", "a/b", "..", "-x"])
def test_a_name_of_weights_is_no_path(name):
    with pytest.raises(BadOptionError, match="option 'pretrained'"):
        make_bottom(f"decoder_front:{SIZES},pretrained={name}")


def test_weights_that_are_not_there_or_damaged_are_told(whole, tmp_path):
    with pytest.raises(MissingDataError, match="no pretrained model 'large'"):
        make_bottom(f"decoder_front:{SIZES},pretrained=large").build((5,), 40)
    kept = tmp_path / "small" / "model.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(DataError, match="this model is not supported"):
        make_bottom(f"decoder_front:{SIZES},pretrained=small").build((5,), 40)


@pytest.mark.parametrize(("bits", "most"), [(8, 1 / 254), (4, 0.152)])
def test_quantised_weights_are_near_and_small(bits, most):
    with scoped(4):
        base, x = nn.Linear(70, 9), torch.randn(5, 70)
    layer = QuantisedLinear(base, bits)
    flat = base.weight.detach().flatten()
    for start in range(0, 630, 64):
        part, found = flat[start : start + 64], layer.weight.flatten()[start : start + 64]
        assert (found - part).abs().max() <= most * part.abs().max() + 1e-7
    torch.testing.assert_close(layer(x), x @ layer.weight.T + base.bias)
    held = sum(each.numel() * each.element_size() for each in layer.buffers())
    assert held <= 640 * (bits / 8 + 4 / 64)
    with pytest.raises(BadOptionError, match="bits"):
        QuantisedLinear(base, 3)


def test_the_four_bit_levels_are_their_nearest():
    """By a search over all sixteen, not by middles."""
    with scoped(5):
        base = nn.Linear(64, 3, bias=False)
    layer = QuantisedLinear(base, 4)
    levels = torch.tensor(NORMAL_FLOAT)
    for row, found in zip(base.weight.detach(), layer.weight, strict=True):
        scaled = row / row.abs().max()
        want = levels[(scaled[:, None] - levels).abs().argmin(1)] * row.abs().max()
        torch.testing.assert_close(found, want)


def test_quantised_words_are_near_small_and_restored_one_by_one():
    with scoped(6):
        base = nn.Embedding(50, 70)
    words, numbers = QuantisedEmbedding.of(base), torch.tensor([[0, 49], [7, 7]])
    wanted = base.weight.detach()
    for start, end in ((0, 64), (64, 70)):
        part, found = wanted[:, start:end], words.weight[:, start:end]
        most = part.abs().amax(1, keepdim=True) / 254
        assert ((found - part).abs() <= most + 1e-6).all()
    assert torch.equal(words(numbers), words.weight[numbers])
    assert sum(each.numel() * each.element_size() for each in words.buffers()) == 50 * (128 + 8)


@pytest.mark.parametrize(
    ("spec", "shape", "width"),
    [("decoder_front", (5,), 40), ("decoder_middle", (40,), 8)],
    ids=["front", "middle"],
)
def test_checkpointed_blocks_give_the_same_gradients_and_keep_less(spec, shape, width):
    given = TEXTS if spec == "decoder_front" else torch.ones(2, 40)
    found = {}
    for option in ("false", "true"):
        options = f"words=30,tokens=8,layers=6,heads=2,front=3,checkpoint={option}"
        with scoped(7):
            module = make_bottom(f"{spec}:{options}").build(shape, width).train()
        kept = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = module(given)
        weights = {each.untyped_storage().data_ptr() for each in module.parameters()}
        bytes_kept = sum(size for at, size in kept.items() if at not in weights)
        made.square().sum().backward()
        found[option] = bytes_kept, [each.grad for each in module.parameters()]
    assert all(map(torch.equal, found["false"][1], found["true"][1]))
    assert found["true"][0] < found["false"][0] / 3


@pytest.mark.parametrize("bits", [32, 8])
def test_a_party_reads_the_weights_of_its_own_part_alone(whole, monkeypatch, bits):
    read = []
    for name in ("take", "pieces"):
        plain = getattr(Weights, name)
        monkeypatch.setattr(
            Weights,
            name,
            lambda self, key, *rest, plain=plain: read.append(key) or plain(self, key, *rest),
        )
    rank = 0 if bits == 32 else 2
    options = f"{SIZES},front=1,pretrained=small,bits={bits},rank={rank}"
    front = make_bottom(f"decoder_front:{options}").build((5,), 40)
    assert {".".join(name.split(".")[:2]) for name in read} == {"tokens.weight", "layers.0"}
    near = torch.testing.assert_close
    near(front.words.weight, whole.tokens.weight, atol=0 if bits == 32 else 0.02, rtol=0)
    read.clear()
    make_bottom(f"decoder_middle:{options}").build((40,), 8)
    assert {".".join(name.split(".")[:2]) for name in read} == {
        "norm.weight",
        "layers.1",
        "layers.2",
    }
