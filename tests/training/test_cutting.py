"""`vfl.split`: a model cut by name trains as it would whole, and nothing else crosses."""

import copy
import io

import pytest
import torch
from torch import nn

import vfl
from vfl.core.errors import ConfigError, DataError, SpecError, VFLError, WidthError
from vfl.session.trace import Trace

PARTIES = {"hospital": "image", "insurer": "table"}


class Residual(nn.Module):
    """Two layers, the second beside a way around it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) + x


class Pictures(nn.Module):
    """A small convolutional network with batch norm, dropout and operations in place."""

    def __init__(self, channels=4):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(True)
        )
        self.drop = nn.Dropout(0.3)
        self.body = nn.Sequential(nn.Conv2d(channels, 5, 3), nn.BatchNorm2d(5), nn.ReLU(True))
        self.head = nn.Linear(5 * 4 * 4, 3)

    def forward(self, pictures):
        return self.head(self.body(self.drop(self.stem(pictures))).flatten(1))


class PicturesAndTables(nn.Module):
    """Two towers, and a head that knows a mask of its own."""

    def __init__(self):
        super().__init__()
        self.image, self.table = nn.Linear(5, 4), nn.Linear(3, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, pictures, rows, mask=None):
        both = torch.cat([self.image(pictures), self.table(rows)], 1)
        return self.head(both if mask is None else both * mask[:, None])


class Texts(nn.Module):
    """Embedding and output share their weights; a recurrent layer gives a tuple."""

    def __init__(self):
        super().__init__()
        self.embedding, self.memory = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.memory(self.embedding(tokens))[0])


def pictures(rows=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, 8, 8, generator=draw), torch.arange(rows) % 3


def train(model, steps=3, labels_too=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    for step in range(steps):
        inputs, labels = pictures(seed=step)
        outputs = model(inputs, labels=labels) if labels_too else model(inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


@pytest.mark.parametrize("at", ["stem", "drop", "body.0", ["stem", "body"]], ids=str)
def test_without_a_codec_it_trains_the_weights_of_the_whole_model(at):
    """Dropout and batch norm included."""
    whole = Pictures()
    cut = vfl.split(copy.deepcopy(whole), at, pictures(2)[0])
    train(whole)
    train(cut)
    assert equal(whole.state_dict(), cut.model.state_dict())


def test_every_weight_has_one_owner_and_every_cut_its_bytes():
    cut = vfl.split(Pictures(), "stem", pictures(2)[0])
    assert [name.partition(".")[0] for name in cut.parts["feature"]] == ["stem"] * 7
    assert set(cut.parts["feature"]).isdisjoint(cut.parts["label"])
    assert {*cut.parts["feature"], *cut.parts["label"]} == set(cut.model.state_dict())
    train(cut, steps=1)
    assert cut.ledger.payload_bytes("train") == 2 * 8 * (4 * 6 * 6) * 4


def test_a_u_shape_sends_the_second_cut_back():
    trace = Trace()
    cut = vfl.split(Pictures(), ["stem", "body"], pictures(2)[0], observers=[trace])
    assert {name.partition(".")[0] for name in cut.parts["feature"]} == {"stem", "head"}
    train(cut, steps=1)
    assert [(frame.party, frame.direction) for frame in trace] == [
        ("feature", "up"), ("server", "down"), ("server", "up"), ("feature", "down"),
    ]  # fmt: skip


def test_parties_cut_their_own_towers():
    given = {"pictures": torch.ones(2, 5), "rows": torch.ones(2, 3)}
    cut = vfl.split(PicturesAndTables(), PARTIES, given, codec="topk:k=1")
    cut(**given).sum().backward()
    assert cut.parts["insurer"] == ["table.weight", "table.bias"]
    assert set(cut.ledger.bytes_by_party("up")) == set(PARTIES)


def test_a_tower_of_two_inputs_is_refused_by_the_name_of_its_party():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.bank, self.shop = nn.Bilinear(3, 2, 4), nn.Linear(3, 4)

        def forward(self, x, y, z):
            return self.shop(z) + self.bank(x, y)

    given = torch.ones(2, 3), torch.ones(2, 2), torch.ones(2, 3)
    with pytest.raises(SpecError, match="a single tensor of inputs") as refused:
        vfl.split(Tower(), {"bank": "bank", "shop": "shop"}, given, defense="nopeek")
    assert refused.value.where == "party 'bank'"


def test_one_tensor_may_be_the_example_of_two_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x, y):
            return self.one(x) + self.two(y)

    same = torch.zeros(2, 3)
    cut = vfl.split(Sum(), {"a": "one", "b": "two"}, (same, same))
    assert (cut.inputs_of("a"), cut.inputs_of("b")) == (["x"], ["y"])


def test_an_input_of_the_label_party_is_named():
    given = {"pictures": torch.ones(2, 5), "rows": torch.ones(2, 3), "mask": torch.ones(2)}
    with pytest.raises(SpecError, match="input 'mask'"):
        vfl.split(PicturesAndTables(), PARTIES, given)
    cut = vfl.split(PicturesAndTables(), PARTIES, given, label_inputs=["mask"])
    assert cut(**given).shape == (2, 2)
    with pytest.raises(ConfigError, match="no such input"):
        vfl.split(PicturesAndTables(), PARTIES, given, label_inputs=["weight"])


def test_what_goes_around_a_cut_is_found():
    with pytest.raises(SpecError, match="party 'label' reads input 'x'"):
        vfl.split(Residual(), "first", torch.ones(2, 6))
    model = nn.Sequential(nn.Linear(6, 6), Residual(), nn.Linear(6, 2))
    with pytest.raises(SpecError, match=r"reads a tensor of axes \(2, 6\) of feature"):
        vfl.split(model, "1.second", torch.ones(2, 6))
    assert vfl.split(model, "1", torch.ones(2, 6))(torch.ones(2, 6)).shape == (2, 2)


def test_the_server_of_a_u_shape_reads_the_cut_alone():
    model = nn.Sequential(Residual(), nn.Linear(6, 6))
    with pytest.raises(SpecError, match="party 'server' reads input 'input' of feature"):
        vfl.split(model, ["0.first", "1"], torch.ones(2, 6))
    cut = vfl.split(model, ["0.first", "0.second"], torch.ones(2, 6))  # goes around at its owner
    assert cut(torch.ones(2, 6)).shape == (2, 6)


def test_tied_weights_are_refused_or_untied():
    tokens = torch.arange(10).reshape(2, 5)
    with pytest.raises(SpecError, match=r"embedding\.weight, head\.weight"):
        vfl.split(Texts(), "embedding", tokens, row_axes=2)
    cut = vfl.split(Texts(), "embedding", tokens, row_axes=2, untie=True, codec="topk:k=3")
    own, theirs = cut.model.embedding.weight, cut.model.head.weight
    assert own is not theirs
    assert torch.equal(own, theirs)
    assert cut(torch.arange(14).reshape(2, 7)).shape == (2, 7, 20)  # texts of another length


def test_an_output_of_several_tensors_crosses_whole():
    tokens = torch.arange(10).reshape(2, 5)
    model = Texts()
    model.head = nn.Linear(8, 20)
    cut = vfl.split(model, "memory", tokens)
    assert torch.equal(cut(tokens), cut.model(tokens))
    assert set(cut.ledger.bytes_by_party("up")) == {"feature", "feature-1", "feature-2"}


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: vfl.split(Pictures(), "stern", pictures(2)[0]), ConfigError),
        (lambda: vfl.split(Pictures(), "", pictures(2)[0]), ConfigError),
        (lambda: vfl.split(Pictures(), ["stem", "body", "head"], pictures(2)[0]), ConfigError),
        (lambda: vfl.split(Pictures(), {"label": "stem"}, pictures(2)[0]), ConfigError),
        (lambda: vfl.split(Pictures(), {}, pictures(2)[0]), ConfigError),
        (lambda: vfl.split(Pictures(), "stem", {"rows": torch.ones(2, 3)}), ConfigError),
        (lambda: vfl.split(Pictures(), "stem", None), DataError),
        (lambda: vfl.split(Pictures(), "head", pictures(2)[0], row_axes=2), WidthError),
        (lambda: vfl.split(Pictures(), "stem", pictures(2)[0], row_axes=0), SpecError),
        (lambda: vfl.split(Pictures(), "stem", pictures(2)[0], codec="topkk"), SpecError),
        (lambda: vfl.split(Pictures(), "stem", pictures(2)[0], defense="bottleneck"), SpecError),
        (lambda: vfl.split(Pictures(), "stem", pictures(2)[0], defense="label_free"), SpecError),
    ],
)
def test_what_cannot_be_cut_is_refused(build, error):
    with pytest.raises(error) as refused:
        build()
    assert isinstance(refused.value, VFLError)


def test_indices_do_not_cross():
    class Argmax(nn.Module):
        def forward(self, x):
            return x.argmax(1, keepdim=True)

    model = nn.Sequential(nn.Linear(6, 4), Argmax(), nn.Flatten())
    with pytest.raises(DataError, match=r"torch\.int64"):
        vfl.split(model, "1", torch.ones(2, 6))


def test_a_cut_that_a_forward_pass_leaves_out_or_repeats_is_refused():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, times=1):
            for _ in range(times):
                x = self.layer(x)
            return x

    cut = vfl.split(Sometimes(), "layer", torch.ones(2, 3))
    for times, message in ((0, "does not reach"), (2, "runs twice")):
        with pytest.raises(DataError, match=message):
            cut(torch.ones(2, 3), times=times)


def test_a_call_without_inputs_names_the_setting_of_a_trainer():
    with pytest.raises(DataError, match="no inputs") as refused:
        vfl.split(Pictures(), "stem", pictures(2)[0])(labels=torch.zeros(2).long())
    assert "remove_unused_columns=False" in refused.value.fix


@pytest.mark.parametrize("defense", ["max_norm", "marvell", "dcor"])
def test_a_defense_acts_on_a_cut_by_name(defense):
    settings = {"at": "stem", "example": pictures(2)[0], "defense": defense}
    model = Pictures()
    model.head = nn.Linear(80, 2 if defense != "dcor" else 3)
    plain = vfl.split(copy.deepcopy(model), "stem", pictures(2)[0])
    cut = vfl.split(model, **settings)
    inputs, labels = pictures()
    labels = labels % 2 if defense != "dcor" else labels
    with pytest.raises(SpecError, match="reads the labels"):
        cut(inputs)
    for one in (plain, cut):
        torch.manual_seed(0)
        outputs = one(inputs, labels=labels)
        (nn.functional.cross_entropy(outputs, labels) + one.extra_loss()).backward()
    weights = [one.model.stem[0].weight.grad for one in (plain, cut)]
    assert not torch.equal(*weights)


def test_tokens_have_no_labels():
    tokens = torch.arange(10).reshape(2, 5)
    with pytest.raises(SpecError, match="tokens, which have no label each"):
        vfl.split(Texts(), "embedding", tokens, row_axes=2, untie=True, defense="marvell")


# --- the state, and what a step may do; the same for both kinds of module -------------------------


def two_modules():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 6, generator=draw)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    cut = vfl.split(net, "0", rows[:2], codec="randtopk:k=3")
    bottoms = {"bank": nn.Linear(6, 8)}
    joined = vfl.SplitModule(bottoms, nn.Linear(8, 2), {"bank": 8}, codec="randtopk:k=3")
    return [(cut, rows), (joined, {"bank": rows})]


@pytest.mark.parametrize("number", [0, 1], ids=["split", "SplitModule"])
def test_a_training_goes_on_from_its_state(number):
    model, rows = two_modules()[number]

    def step(one, optimizer):
        optimizer.zero_grad()
        one(rows).square().mean().backward()
        optimizer.step()

    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    copied = copy.deepcopy(model)
    again, _ = two_modules()[number]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    for one in (model, again, copied):
        own = torch.optim.Adam(one.parameters())
        own.load_state_dict(copy.deepcopy(saved["optimizer"]))
        step(one, own)
    assert model.step == again.step == copied.step == 2
    assert equal(dict(model.named_parameters()), dict(again.named_parameters()))
    assert equal(dict(model.named_parameters()), dict(copied.named_parameters()))
    assert copied.ledger is not model.ledger


@pytest.mark.parametrize("number", [0, 1], ids=["split", "SplitModule"])
def test_a_model_is_averaged(number):
    model, rows = two_modules()[number]
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert averaged.eval()(rows).shape == (8, 2)


@pytest.mark.parametrize("number", [0, 1], ids=["split", "SplitModule"])
def test_one_exchange_has_one_gradient(number):
    model, rows = two_modules()[number]
    loss = model(rows).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(SpecError, match="second backward pass"):
        loss.backward()
    with pytest.raises(SpecError, match="gradient of a gradient"):
        torch.autograd.grad(
            model(rows).square().mean(), list(model.parameters()), create_graph=True
        )


@pytest.mark.parametrize("number", [0, 1], ids=["split", "SplitModule"])
def test_gradients_of_several_batches_add_up(number):
    model, rows = two_modules()[number]
    for _ in range(2):
        (model(rows).square().mean() / 2).backward()
    assert model.step == 2
    assert all(weights.grad is not None for weights in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1], ids=["split", "SplitModule"])
def test_a_cut_keeps_its_type(number, dtype):
    model, rows = two_modules()[number]
    model.to(dtype)
    inputs = rows.to(dtype) if number == 0 else {"bank": rows["bank"].to(dtype)}
    outputs = model(inputs)
    outputs.sum().backward()
    assert outputs.dtype is dtype
    assert all(weights.grad.dtype is dtype for weights in model.parameters())


@pytest.mark.parametrize("number", [0, 1], ids=["split", "SplitModule"])
def test_automatic_mixed_precision(number):
    model, rows = two_modules()[number]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(rows).float().square().mean()
    loss.backward()
    assert all(weights.grad.isfinite().all() for weights in model.parameters())
