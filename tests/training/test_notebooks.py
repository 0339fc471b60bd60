"""What a researcher brings: each model is trained as in a plain loop, compared and attacked.

Each of the four is a model that was not written for vfl. What follows the model's own code is what
its notebook adds.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import relu
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vfl
from vfl.training.fitting import answered, labelled, loss_of

QUICK = {"seeds": [0], "leaks": [2], "draws": 1, "attacks": ["logistic"], "baselines": ["raw"]}
QUICK |= {"progress": False, "measure": "accuracy"}


class Pictures(Dataset):
    """Pictures of two classes, cropped and flipped anew in each pass, as CIFAR is."""

    def __init__(self, rows, augment):
        draw = torch.Generator().manual_seed(rows)
        self.labels, self.augment = torch.arange(rows) % 2, augment
        self.pictures = (
            torch.randn(rows, 3, 16, 16, generator=draw) + self.labels[:, None, None, None]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        picture = self.pictures[row]
        if self.augment:
            left, top = torch.randint(0, 5, (2,)).tolist()
            picture = nn.functional.pad(picture, [2] * 4)[:, top : top + 16, left : left + 16]
            picture = picture.flip(2) if torch.rand(()) < 0.5 else picture
        return picture, self.labels[row]


def resnet():
    from torchvision.models import resnet18

    return resnet18(num_classes=2), "layer2", torch.zeros(2, 3, 16, 16)


def pictures():
    train = DataLoader(Pictures(24, augment=True), 12, shuffle=True)
    return train, DataLoader(Pictures(16, augment=False), 8)


class ImageAndTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(8))
        self.table = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 2))

    def forward(self, image, table):
        return self.head(torch.cat([self.image(image), self.table(table)], 1))


def image_and_table():
    model, example = ImageAndTable(), (torch.zeros(2, 1, 6, 6), torch.zeros(2, 5))
    model(*example)
    return model, {"hospital": "image", "insurer": "table"}, example


def patients():
    draw, labels = torch.Generator().manual_seed(0), torch.arange(60) % 2
    image = torch.randn(60, 1, 6, 6, generator=draw) + labels[:, None, None, None]
    table = torch.randn(60, 5, generator=draw) + labels[:, None]
    whole = TensorDataset(image, table, labels)
    first, second = (
        torch.utils.data.Subset(whole, range(40)),
        torch.utils.data.Subset(whole, range(40, 60)),
    )
    return DataLoader(first, 10, shuffle=True), DataLoader(second, 10)


class MessagePassing(nn.Module):
    """Sums over the edges that lead to a node, from lists of their ends."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, nodes, edges):
        source, target = edges
        nodes = nodes + torch.zeros_like(nodes).index_add(0, target, nodes[source])
        hidden = self.norm(relu(self.inner(nodes)))
        return self.outer(hidden + torch.zeros_like(hidden).index_add(0, target, hidden[source]))


def graph():
    example = torch.zeros(4, 6), torch.tensor([[0, 1, 2], [1, 2, 3]])
    return MessagePassing(), "norm", example


def graphs():
    def one(seed):
        draw, labels = torch.Generator().manual_seed(seed), torch.arange(30) % 2
        edges = torch.randint(0, 30, (2, 60), generator=draw)
        edges = edges[:, labels[edges[0]] == labels[edges[1]]]
        return torch.randn(30, 6, generator=draw) + labels[:, None], edges, labels

    return [one(0), one(1)], [one(2)]


class Judge(nn.Module):
    """GPT-2 of Hugging Face that says which of two kinds a text is."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        size = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        self.gpt = transformers.GPT2Model(transformers.GPT2Config(vocab_size=20, **size, **ends))
        self.head = nn.Linear(16, 2)

    def forward(self, words):
        return self.head(self.gpt(words).last_hidden_state[:, -1])


def language():
    return Judge(), "gpt.h.0", torch.ones(2, 8, dtype=torch.long)


def texts():
    draw, labels = torch.Generator().manual_seed(0), torch.arange(40) % 2
    words = torch.randint(1, 10, (40, 8), generator=draw) + 9 * labels[:, None]
    batches = [
        {"words": own, "labels": of}
        for own, of in zip(words.split(10), labels.split(10), strict=True)
    ]
    return batches[:3], batches[3:]


EXTRA = {"graph": {"label_inputs": ["edges"]}}
MODELS = {
    "resnet": (resnet, pictures),
    "image_and_table": (image_and_table, patients),
    "graph": (graph, graphs),
    "language": (language, texts),
}
each = pytest.mark.parametrize("name", MODELS)


def builder(name, make):
    """What a notebook writes besides the model."""

    def build(codec, defense, seed):
        torch.manual_seed(seed)
        model, at, example = make()
        given = {"codec": codec, "defense": defense, "seed": seed}
        return vfl.split(model, at, example, **given, **EXTRA.get(name, {}))

    return build


def plain_answers(model, inputs, labels):
    if isinstance(model, vfl.training.split.Crossings):
        return answered(model, inputs, labels)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def recipe(how, model, loader):
    """A training of two epochs; the module that a paper would report."""
    optimizer = Adam(model.parameters(), 0.01) if how == "adam" else SGD(model.parameters(), 0.05)
    schedule = CosineAnnealingLR(optimizer, 4)
    ema = get_ema_multi_avg_fn(0.9) if how == "ema" else None
    average = AveragedModel(model, multi_avg_fn=ema, use_buffers=how == "ema")
    for _ in range(2):
        for step, batch in enumerate(loader):
            inputs, labels = labelled(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                loss = loss_of(plain_answers(model, inputs, labels), labels, "classification")
            loss.backward()
            if how == "accumulation" and step % 2 == 0:
                continue
            if how == "clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        schedule.step()
    return average.module if how in ("swa", "ema") else model


RECIPES = ["sgd", "adam", "swa", "ema", "accumulation", "clipping", "autocast"]
TRAININGS = [
    pytest.param(name, how, marks=[pytest.mark.slow] if name == "resnet" and how != "swa" else [])
    for name in MODELS
    for how in RECIPES
]


def trained(name, how, cut):
    """The weights of a training by a recipe, in a plain loop or with a cut."""
    make, rows = MODELS[name]
    torch.manual_seed(0)
    model = builder(name, make)("none", "none", 0) if cut else make()[0]
    torch.manual_seed(1)
    found = recipe(how, model.train(), rows()[0])
    return (found.model if cut else found).state_dict()


def are_equal(some, others):
    return all(torch.equal(value, others[key]) for key, value in some.items())


@pytest.mark.parametrize(("name", "how"), TRAININGS)
def test_each_recipe_ends_with_the_weights_of_the_plain_loop(name, how):
    plain, ours = trained(name, how, cut=False), trained(name, how, cut=True)
    if not are_equal(plain, ours):
        if not are_equal(plain, trained(name, how, cut=False)):
            pytest.skip("the plain loop gives other bits each time: bfloat16 convolutions here")
        pytest.fail("a cut without a codec changes what is trained")


@each
def test_each_is_compared_and_attacked_in_a_few_lines(name, tmp_path):
    make, rows = MODELS[name]
    build, (train, test) = builder(name, make), rows()
    two = vfl.compare(
        build, train, test, codecs=["none", "quantise:values=8"], seeds=[0], epochs=1,
        out=tmp_path / "codecs", progress=False,
    )  # fmt: skip
    assert not two.failed
    sent = two.table[(two.table.measure == "wire_ratio") & (two.table.subject == "training")]
    sent = sent.set_index("codec").value
    assert sent["quantise:values=8"] < 0.7 * sent["none"]
    grid = vfl.grid(build, train, test, defenses=["none"], epochs=1, out=tmp_path / "grid", **QUICK)
    assert not grid.failed
    table = grid.table
    found = table[(table.evaluator == "attack") & (table.measure == "accuracy")]
    assert len(found) == 1
    assert found.guess.notna().all()
    assert found.no_model.notna().all()
