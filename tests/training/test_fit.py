"""`vfl.fit`: a recipe in words gives a module the weights of the same loop in plain torch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim import lr_scheduler

import vfl
from vfl.core.errors import ConfigError, DataError
from vfl.training.fitting import fit, loss_of

EPOCHS = 3


def batches(seed=0, count=6, rows=12):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, rows, 9, generator=draw)
    return list(zip(inputs, (inputs[..., :3]).argmax(2), strict=True))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))


def joined():
    torch.manual_seed(2)
    return vfl.SplitModule({"one": nn.Linear(9, 8)}, nn.Linear(8, 3), {"one": 8})


def plain(model, parts, optimizer, rate, loss_of, clip):
    """The loop that a recipe stands for."""
    steps = optimizer(model.parameters())
    schedule = lr_scheduler.LambdaLR(steps, lambda step: rate(step, step // 6 + 1))
    for _ in range(EPOCHS):
        for inputs, labels in batches():
            steps.zero_grad()
            loss_of(model(inputs), labels).backward()
            for part in parts if clip else ():
                nn.utils.clip_grad_norm_(part, clip)
            steps.step()
            schedule.step()
    return model.state_dict()


RECIPES = {
    "adam": ({}, None, lambda w: torch.optim.Adam(w, 1e-3), lambda step, epoch: 1.0,
             cross_entropy, None),
    "adamw, warm-up, smoothing": (
        {"optimizer": "adamw", "weight_decay": 0.1, "warmup_steps": 7, "learning_rate": 0.02},
        "cross_entropy:smoothing=0.1",
        lambda w: torch.optim.AdamW(w, 0.02, weight_decay=0.1),
        lambda step, epoch: min(1, (step + 1) / 7),
        lambda *pair: cross_entropy(*pair, label_smoothing=0.1), None,
    ),
    "sgd, clipping, steps of the rate": (
        {"optimizer": "sgd", "learning_rate": 0.5, "clip_norm": 0.2,
         "schedule": "step:step_size=1,gamma=0.5"}, None,
        lambda w: torch.optim.SGD(w, 0.5, momentum=0.9),
        lambda step, epoch: 0.5 ** (epoch - 1), cross_entropy, 0.2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_cut_module_has_the_weights_of_the_plain_loop(name):
    settings, loss, *how = RECIPES[name]
    whole, model = network(), network()
    split = vfl.split(model, "1", torch.zeros(2, 9))
    fit(split, batches(), epochs=EPOCHS, loss=loss, **settings)
    found = plain(whole, [[*whole[0].parameters()], [*whole[2].parameters()]], *how)
    for key, weight in found.items():
        assert torch.equal(model.state_dict()[key], weight), key


def test_joined_modules_have_them_too():
    settings, loss, *how = RECIPES["sgd, clipping, steps of the rate"]
    model = joined()
    whole = nn.Sequential(copy.deepcopy(model.bottoms["one"]), copy.deepcopy(model.top))
    fit(model, [({"one": x}, y) for x, y in batches()], epochs=EPOCHS, loss=loss, **settings)
    found = plain(whole, [[*whole[0].parameters()], [*whole[1].parameters()]], *how)
    assert torch.equal(model.bottoms["one"].weight, found["0.weight"])
    assert torch.equal(model.top.weight, found["1.weight"])


def test_the_best_epoch_of_the_validation_rows_stays():
    how = {"optimizer": "sgd", "learning_rate": 0.8, "measure": "accuracy"}
    others = batches(seed=5)
    kept, last = (vfl.split(network(), "1", torch.zeros(2, 9)) for _ in range(2))
    history = fit(kept, batches(), others, epochs=8, keep="best", **how)
    values = [record["validation_accuracy"] for record in history]
    best = values.index(max(values)) + 1
    assert history[-1]["best_epoch"] == best
    fit(last, batches(), epochs=best, **{k: v for k, v in how.items() if k != "measure"})
    for one, other in zip(kept.parameters(), last.parameters(), strict=True):
        assert torch.equal(one, other)
    assert kept.step == 8 * 6  # its draws go on, and are never used twice


def test_it_stops_when_patience_ends():
    others = [(x, (y + 1) % 3) for x, y in batches(seed=5)]  # which only get worse
    model = vfl.split(network(), "1", torch.zeros(2, 9))
    history = fit(model, batches(), others, epochs=30, patience=2, learning_rate=0.05)
    assert len(history) < 30
    assert len(history) == history[-1]["best_epoch"] + 2


def test_lower_precision_and_a_loss_of_ones_own_train():
    model = vfl.split(network(), "1", torch.zeros(2, 9))
    own = fit(
        model, batches(), epochs=9, precision="bfloat16", learning_rate=0.05,
        loss=lambda outputs, labels: cross_entropy(outputs.float(), labels),
    )  # fmt: skip
    assert own[-1]["train_loss"] < own[0]["train_loss"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"keep": "best"}, "loader of them"),
        ({"optimiser": "sgd"}, "optimizer"),
        ({"local_steps": 3}, "not have this setting"),
        ({"learning_rate": -1}, "learning_rate"),
    ],
)
def test_a_recipe_that_means_nothing_is_refused(settings, why):
    model = vfl.split(network(), "1", torch.zeros(2, 9))
    with pytest.raises(ConfigError) as caught:
        fit(model, batches(), **settings)
    assert why in f"{caught.value} {caught.value.fix}"


class Named(nn.Module):
    """A model that gives a dict, as models of several outputs do."""

    def __init__(self, keys=("logits", "hidden")):
        super().__init__()
        self.net, self.keys = network(), keys

    def forward(self, x):
        hidden = self.net[:2](x)
        return dict(zip(self.keys, (self.net[2](hidden), hidden), strict=True))


def test_logits_of_a_dict_are_found():
    whole = vfl.split(network(), "1", torch.zeros(2, 9))
    named = vfl.split(Named(), "net.1", torch.zeros(2, 9))
    one, other = (fit(model, batches(), batches(seed=5), epochs=2) for model in (whole, named))
    assert one[-1]["validation_loss"] == other[-1]["validation_loss"]
    with pytest.raises(DataError, match="no logits"):
        fit(vfl.split(Named(("out", "hidden")), "net.1", torch.zeros(2, 9)), batches(), epochs=1)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_module_is_trained():
    plain, model = (vfl.split(network(), "1", torch.zeros(2, 9)) for _ in range(2))
    fit(plain, batches(), epochs=1)
    fit(torch.compile(model, backend="eager"), batches(), epochs=1)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(
        DataError, match="not a split module"
    ):  # it would train without its replicas
        fit(nn.DataParallel(model), batches(), epochs=1)


OUTPUTS = {"rows": (4, 3), "tokens": (4, 5, 3), "pixels": (4, 3, 5, 7)}


@pytest.mark.parametrize("axes", OUTPUTS.values(), ids=OUTPUTS)
def test_the_default_loss_is_that_of_torch(axes):
    outputs = torch.randn(axes, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(outputs.numel() // 3) % 3
    if len(axes) == 4:
        labels = labels.reshape(4, 5, 7)
        wanted = cross_entropy(outputs, labels)
    else:
        labels = labels.reshape(axes[:-1])
        wanted = cross_entropy(outputs.flatten(0, -2), labels.flatten())
    assert loss_of(outputs, labels, "classification") == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("axes", [(6,), (6, 1)])
def test_the_default_loss_of_a_single_logit_is_binary(axes):
    outputs = torch.randn(axes, generator=torch.Generator().manual_seed(0))
    labels = (outputs > 0).float()
    wanted = binary_cross_entropy_with_logits(outputs, labels)
    assert loss_of(outputs, labels, "classification") == wanted
    assert loss_of(outputs, labels.long(), "classification") == wanted


def test_outputs_and_labels_that_do_not_go_together_are_refused():
    with pytest.raises(DataError, match="do not fit together") as caught:
        loss_of(torch.zeros(6, 3), torch.zeros(6), "classification")
    assert "labels.long()" in caught.value.fix
    with pytest.raises(DataError, match="do not fit together"):  # shares of classes, or several?
        loss_of(torch.zeros(6, 3), torch.zeros(6, 3), "classification")
    with pytest.raises(DataError, match="do not fit together"):
        loss_of(torch.zeros(6, 3), torch.zeros(6), "regression")
