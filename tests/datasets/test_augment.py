"""Augmentations by name, under contract; own functions; what a training does with them."""

import copy
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy, pad

from vfl.config import Experiment
from vfl.core.errors import ConfigError, DataError, SpecError
from vfl.core.registry import parse
from vfl.core.seeds import Secret, permutation, scoped
from vfl.datasets import Dealing, load_bundled
from vfl.datasets.augment import AUGMENTATIONS, Crop, Flip, augmentation_of
from vfl.session import Terms
from vfl.testing import AugmentationContract
from vfl.training.local import LocalSession
from vfl.training.specs import checked


class TestAugmentations(AugmentationContract):
    specs = (*AUGMENTATIONS.names(), "crop:padding=1", "mask:share=0.5")

    def test_every_registered_name_is_under_contract(self):
        assert {parse(spec)[0] for spec in self.specs} == set(AUGMENTATIONS.names())


def test_crops_and_mirrored_pictures_are_of_the_picture():
    pictures = torch.rand(40, 2, 5, 4)
    with scoped(0):
        cropped, mirrored = Crop(padding=2)(pictures), Flip()(pictures)
    wide = pad(pictures, [2] * 4)
    for one in range(40):
        windows = [wide[one, :, y : y + 5, x : x + 4] for y in range(5) for x in range(5)]
        assert any(torch.equal(cropped[one], window) for window in windows)
        kept = torch.equal(mirrored[one], pictures[one])
        assert kept or torch.equal(mirrored[one], pictures[one].flip(2))
    assert 8 < sum(torch.equal(a, b) for a, b in zip(mirrored, pictures, strict=True)) < 32


PARTIES = ["one", "label"]


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", PARTIES, "label", Dealing(5, limit=200))


def content(**more):
    return {
        "seed": 5,
        "parties": {
            name: {"width": 8, "bottom": "mlp:hidden=16", "augment": "noise:sigma=0.3+mask"}
            for name in PARTIES
        },
        "label": {"top": "mlp:hidden=12"},
        "train": {"epochs": 2, "batch_size": 24, "optimizer": "sgd", "learning_rate": 0.1},
    } | more


def test_owners_train_on_augmented_rows_as_a_plain_loop_does(data):
    session = LocalSession(Experiment.model_validate(content()), data, outputs=10)
    own = session.label.model
    modules = {"one": session.clients[0].end.model["bottom"], "label": own["bottom"]}
    modules |= {"top": own["top"]}
    modules = {name: copy.deepcopy(module) for name, module in modules.items()}
    weights = [w for module in modules.values() for w in module.parameters()]
    steps, step = torch.optim.SGD(weights, 0.1, momentum=0.9), 0
    labels, split = data["label"].labels, data["label"].split
    for epoch in (1, 2):
        order = torch.from_numpy(split.train[permutation(5, len(split.train), "order", epoch)])
        for rows in order.split(24):
            cuts = []
            for name in PARTIES:
                inputs = data[name].inputs[rows]
                with scoped(Secret.of_simulation(5, name).number("augment", step)):
                    inputs = inputs + 0.3 * torch.randn(inputs.shape)
                    inputs = inputs * (torch.rand(inputs.shape) >= 0.1)
                cuts.append(modules[name](inputs))
            steps.zero_grad()
            cross_entropy(modules["top"](torch.cat(cuts, 1)), labels[rows]).backward()
            steps.step()
            step += 1
        step += -(-len(split.validation) // 1024)
    session.run()
    trained = session.clients[0].end.model["bottom"].state_dict()
    for name, weight in modules["one"].state_dict().items():
        assert torch.equal(trained[name], weight)
    for name, weight in modules["label"].state_dict().items():
        assert torch.equal(own["bottom"].state_dict()[name], weight)


def test_nothing_of_it_is_in_the_terms_that_others_see(data):
    experiment = Experiment.model_validate(content())
    assert "augment" not in Terms.of(experiment, "train", "run").model_dump_json()


def test_pictures_are_asked_for_by_name():
    with pytest.raises(SpecError, match="'flip' is for pictures"):
        augmentation_of("noise+flip", (12,))


def halved(rows):
    return rows / 2


def shortened(rows):
    return rows[:1]


def test_a_function_of_ones_own_is_for_the_own_file_alone():
    path = f"{__name__}:halved"
    rows = torch.ones(3, 2)
    assert torch.equal(augmentation_of(f"noise:sigma=0+{path}", (2,), own=True)(rows), rows / 2)
    assert not augmentation_of(path, (2,), own=True).rows_apart
    with pytest.raises(SpecError):
        augmentation_of(path, (2,))
    with pytest.raises(DataError, match="changes the shape or the type of rows"):
        augmentation_of(f"{__name__}:shortened", (2,), own=True)(rows)


def test_an_experiment_never_imports_what_it_names(tmp_path, monkeypatch):
    """A file from another party: its names of functions are refused, and nothing runs."""
    (tmp_path / "planted.py").write_text("raise SystemExit('code of another party ran')")
    monkeypatch.syspath_prepend(tmp_path)
    mine = {"one": {"source": "planted:rows"}, "two": {"source": "table.csv"}}
    cases = [
        {"data": {"source": "planted:rows"}, "label": {"column": "y"}},
        {"parties": mine, "data": {"source": "table.csv", "id": "id"}, "label": {"column": "y"}},
        {"parties": {"one": {"augment": "planted:rows"}}},
        {"parties": {"one": {"bottom": "planted:rows"}}},
        {"tasks": [{"party": "more", "column": "y", "source": "planted:rows"}]},
    ]
    for case in cases:
        with pytest.raises((ConfigError, SpecError)) as caught:
            checked({"parties": {"one": {}}} | case, "an experiment")
        assert "planted" in f"{caught.value} {caught.value.got}"
    assert "planted" not in sys.modules


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"secure": "permuted", "merge": "sum"}, "no party has a bottom"),
        ({"parties": {"one": {"augment": "flip:x=1"}}}, "x"),
    ],
)
def test_what_changes_no_input_is_refused(data, more, why):
    with pytest.raises((ValueError, SpecError, ConfigError), match=why):
        LocalSession(checked(content(**more), "here"), data, outputs=10)
