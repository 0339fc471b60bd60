"""The premise of DP-SGD: models that keep rows apart pass and keep their state; others do not."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from vfl.config import Experiment
from vfl.core.errors import PrivacyError
from vfl.datasets import Dealing, load_bundled
from vfl.models import make_bottom
from vfl.privacy.dpsgd import RowClipper
from vfl.privacy.premise import prove, require_rows_apart
from vfl.training.local import LocalSession

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm.*:FutureWarning", "ignore:Using padding='same':UserWarning"
)


class Lambda(nn.Module):
    """A module of one function, with the modules that it uses."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, rows):
        return self.function(self, rows)


def tokens_first(layer, tokens, width):
    """`layer` at each token of rows of axes (rows, tokens * width), which it takes first."""

    def forward(module, rows):
        first = rows.reshape(len(rows), tokens, width).transpose(0, 1)
        return module.layer(first).transpose(0, 1).flatten(1)

    return Lambda(forward, layer=layer)


def tied(layer):
    """A layer of as many inputs as outputs, and its weight once more beside it."""
    return Lambda(lambda own, rows: functional.linear(own.layer(rows), own.layer.weight.T),
                  layer=layer)  # fmt: skip


# --- sums -----------------------------------------------------------------------------------------

sizes = st.integers(1, 4)


@st.composite
def dense(draw, inputs):
    """Some layers from (rows, inputs) to (rows, width)."""
    layers, width = [], inputs
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(
            ["linear", "norm", "groups", "tanh", "weight norm", "parametrised", "tokens", "tied",
             "flipped"]
        ))  # fmt: skip
        outputs = draw(sizes)
        linear = nn.Linear(width, outputs, bias=draw(st.booleans()))
        if kind == "norm":
            layers.append(nn.LayerNorm(width, bias=draw(st.booleans())))
        elif kind == "groups" and width > 1:  # torch wants more than one number to take a mean of
            layers.append(nn.GroupNorm(1, width))
        elif kind == "tanh":
            layers.append(nn.Tanh())
        elif kind == "tokens":
            layers.append(tokens_first(nn.Linear(1, 2), width, 1))
            width *= 2
        elif kind == "tied":
            layers.append(tied(nn.Linear(width, width, bias=False)))
        else:
            width = outputs
            if kind == "flipped":
                layers.append(
                    Lambda(lambda own, rows: own.layer(rows.flip(0)).flip(0), layer=linear)
                )
            elif kind == "weight norm":
                layers.append(nn.utils.weight_norm(linear))
            elif kind == "parametrised":
                layers.append(nn.utils.parametrizations.weight_norm(linear))
            else:
                layers.append(linear)
    layers.append(nn.Linear(width, draw(sizes)))
    return layers


@st.composite
def models(draw):
    """A model that keeps rows apart, and the axes of its rows."""
    torch.manual_seed(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["columns", "picture", "sequence", "codes"]))
    front, shape = [], (draw(sizes),)
    if kind == "picture":
        shape = (2, draw(st.integers(3, 5)), draw(st.integers(3, 5)))
        groups = draw(st.sampled_from([1, 2]))
        padding = draw(st.sampled_from([0, 1, "same"]))
        stride = 1 if padding == "same" else draw(st.integers(1, 2))
        front = [nn.Conv2d(2, 4, draw(st.integers(1, 3)), stride, padding, groups=groups,
                           bias=draw(st.booleans())), nn.Tanh(), nn.GroupNorm(2, 4),
                 nn.Flatten()]  # fmt: skip
    elif kind == "sequence":
        shape = (3, draw(st.integers(3, 5)))
        front = [nn.Conv1d(3, 2, 2, dilation=draw(st.integers(1, 2))), nn.Flatten()]
    elif kind == "codes":
        embedding = nn.Embedding(3, 2, padding_idx=draw(st.sampled_from([None, 0])))
        front = [Lambda(lambda own, rows: rows.abs().long().clamp(max=2)), embedding,
                 nn.Linear(2, 2), nn.Flatten()]  # fmt: skip
    width = nn.Sequential(*front)(torch.zeros(1, *shape)).shape[1]
    model = nn.Sequential(*front, *draw(dense(width)))
    for weight in list(model.parameters())[:-1]:
        weight.requires_grad_(draw(st.integers(0, 4)) > 0)
    return model, shape


def by_row(model, rows, grad):
    """Every row through the model by itself: its gradient of each weight, in float64."""
    weights = [one for one in model.parameters() if one.requires_grad]
    found = []
    for row, of_row in zip(rows, grad, strict=True):
        made = torch.autograd.grad(model(row[None]), weights, of_row[None], allow_unused=True)
        pairs = zip(made, weights, strict=True)
        found.append([torch.zeros_like(w) if g is None else g.double() for g, w in pairs])
    return weights, found


def clipped(found, clipper):
    """Sums of rows' gradients, each group of weights clipped to its norm; and the norms."""
    sums = [torch.zeros_like(one, dtype=torch.float64) for one in found[0]]
    norms = torch.zeros(len(clipper.norms), len(found), dtype=torch.float64)
    for row, grads in enumerate(found):
        for group, bound in enumerate(clipper.norms.tolist()):
            places = [at for at, one in enumerate(clipper.group_of) if one == group]
            length = sum(float(grads[at].square().sum()) for at in places) ** 0.5
            norms[group, row] = length
            for at in places:
                sums[at] += grads[at] * (min(1.0, bound / length) if length else 1.0)
    return sums, norms


@settings(max_examples=50)
@given(
    models(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0.01, 1.0, 1e6]),
    st.sampled_from(["half", "layer"]), st.booleans(),
)  # fmt: skip
def test_sums_are_those_of_true_gradients_of_rows(made, size, norm, by, twice):
    """For every layer with a rule, layers without, weights of other names, and all together.

    A batch may have as many rows as any axis inside is long.
    """
    model, shape = made
    clipper = RowClipper(model, norm, by)
    prove(clipper, model, [shape], "the model")
    rows = 2 * torch.randn(size, *shape)
    with clipper.recording() as calls:
        output = model(rows)
    grad = torch.randn_like(output) * (1e3 if twice else 1.0)
    weights, found = by_row(model, rows, grad)
    total, norms = clipper.sums(output, grad, weights, calls)
    expected, true_norms = clipped(found, clipper)
    largest = float(true_norms.max())
    torch.testing.assert_close(norms.double(), true_norms, rtol=1e-2, atol=1e-4 * largest + 1e-12)
    bound = float(true_norms.minimum(clipper.norms[:, None]).sum()) + 1e-12
    apart = float((total - torch.cat([one.reshape(-1) for one in expected])).norm())
    assert apart <= 1e-2 * bound


def test_a_layer_with_other_weights_than_its_rule_knows_takes_a_pass_a_row():
    layers = {
        "weight norm": nn.utils.weight_norm(nn.Linear(3, 3)),
        "parametrised": nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        "pruned": nn.Linear(3, 3),
        "hooked before": nn.Linear(3, 3),
        "hooked after": nn.Linear(3, 3),
        "another forward": nn.Linear(3, 3),
        "one more weight": nn.Linear(3, 3),
    }
    prune.identity(layers["pruned"], "weight")
    layers["hooked before"].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    layers["hooked after"].register_forward_hook(lambda module, inputs, output: output * 2)
    layers["another forward"].forward = torch.tanh
    layers["one more weight"].scale = nn.Parameter(torch.ones(1))
    for name, layer in {"as it is": nn.Linear(3, 3), **layers}.items():
        clipper = RowClipper(layer, 1.0)
        clipper.trusts_rules = True
        with clipper.recording() as calls:
            layer(torch.randn(4, 3))
        assert clipper.follows_rules(calls, 4) is (name == "as it is"), name


def test_rules_count_once_a_trial_had_rows_first_in_batches_of_every_size():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(tokens_first(nn.Linear(2, 3), 4, 2), nn.Linear(12, 2))
    for one, shape, expected in ((layer, (2,), True), (model, (8,), False)):
        clipper = RowClipper(one, 1.0)
        with clipper.recording() as calls:
            one(torch.randn(4, *shape))
        assert not clipper.follows_rules(calls, 4)
        prove(clipper, one, [shape], "the model")
        assert clipper.follows_rules(calls, 4) is expected
        assert not clipper.follows_rules(calls, 5)


def test_rules_that_failed_for_rows_of_one_shape_are_not_trusted_for_another():
    layer = nn.Linear(3, 3)
    model = tokens_first(layer, 4, 3)

    def forward(rows):
        return model(rows) if rows.shape[1] == 12 else layer(rows)

    clipper = RowClipper(model, 1.0)
    for shape in ((12,), (3,)):
        prove(clipper, forward, [shape], "the model")
        assert clipper.trusts_rules is False


# --- models that pass, without a trace ------------------------------------------------------------

BUILT_IN = {
    "mlp:hidden=16-8,dropout=0.3": (6,),
    "cnn:channels=3-4": (1, 8, 8),
    "vit:patch=4,tokens=8,layers=1,heads=2": (1, 8, 8),
    "gru4rec:items=9,embedding=4": (5,),
    "textcnn:words=10,embedding=4,dropout=0.5": (7,),
    "decoder_front:words=10,tokens=8,layers=2,heads=2,front=1": (5,),
    "periodic:hidden=8": (4,),
    "identity": (40,),
}


def width_of(spec):
    return 6 if spec.startswith("textcnn") else 40


class Draws(nn.Module):
    """Noise of all generators that a program shares; attributes and gradients that a pass sets."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.last = nn.Linear(4, 3), {}, None
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, rows):
        self.last, self.seen[len(rows)] = rows, True
        self.linear.bias.sum().backward()
        noise = torch.randn(3) + np.random.random() + random.random()
        return self.dropout(self.linear(rows)) * self.scale + noise


PASSING = {
    **{spec: (lambda spec=spec, shape=shape: make_bottom(spec).build(shape, width_of(spec)), shape)
       for spec, shape in BUILT_IN.items()},
    "draws": (Draws, (4,)),
    "weight norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 3)), (4,)),
    "dropout between": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
                        (4,)),
    "dropout by a function": (lambda: Lambda(lambda own, rows: functional.dropout(own.layer(rows)),
                                             layer=nn.Linear(4, 3)), (4,)),
    "recurrent": (lambda: Lambda(lambda own, rows: own.gru(rows)[0][:, -1],
                                 gru=nn.GRU(3, 4, 2, batch_first=True, dropout=0.5)), (5, 3)),
    "attention": (lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
                                        nn.Flatten()), (3, 4)),
    "one column": (lambda: nn.Linear(1, 1), (1,)),
    "numbers above 0": (lambda: Lambda(lambda own, rows: own.layer(rows.log1p()),
                                       layer=nn.Linear(4, 3)), (4,)),
}  # fmt: skip


def everything(model):
    """What a trial might change."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    others = [
        {name: copy.copy(value) if type(value) in (dict, list, set) else value
         for name, value in vars(one).items()
         if name not in ("_parameters", "_buffers", "_modules", "weight")}
        for one in model.modules()
    ]  # fmt: skip
    generators = (torch.random.get_rng_state().tolist(), str(np.random.get_state()),
                  random.getstate())  # fmt: skip
    return state, grads, others, generators


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", PASSING)
def test_models_that_keep_rows_apart_pass_and_stay_as_they_are(name, training):
    make, shape = PASSING[name]
    model = make().train(training)
    clipper = RowClipper(model, 0.1)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    before = everything(model)
    prove(clipper, model, [shape], "the model")
    assert same(before, everything(model))


# --- models that are refused ----------------------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self, update):
        super().__init__()
        self.update, self.times = update, 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, rows):
        kept = self.mean.clone()
        self.update(self, rows)
        return rows + kept + self.times


def counts(module, rows):
    module.times += 1


def of_rows(function):
    return nn.Sequential(nn.Linear(4, 4), Lambda(lambda own, rows: function(rows)))


class NoneYet(nn.Module):
    """Mixes rows by a weight that begins at 0."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.zeros(1))

    def forward(self, rows):
        return rows + self.share * rows.mean(0)


REFUSED = {
    "not at first": (nn.Sequential(nn.Linear(4, 4), NoneYet()), "layer '1' (NoneYet)",
                     "other rows"),
    "mean": (of_rows(lambda rows: rows - rows.mean(0)), "layer '1' (Lambda)", "other rows"),
    "a little of the mean": (of_rows(lambda rows: rows + 1e-5 * rows.mean(0)), "'1'", "other rows"),
    "largest": (of_rows(lambda rows: rows / rows.abs().max()), "layer '1'", "other rows"),
    "neighbour": (of_rows(lambda rows: rows + rows.roll(1, 0)), "layer '1'", "other rows"),
    "how many": (of_rows(lambda rows: rows / len(rows)), "layer '1'", "other rows"),
    "place": (of_rows(lambda rows: rows * torch.arange(len(rows))[:, None]), "'1'", "other rows"),
    "softmax over rows": (nn.Sequential(nn.Linear(4, 4), nn.Softmax(0)), "(Softmax)", "other rows"),
    "batch of tokens": (
        of_rows(lambda rows: rows + rows.mean(0) if len(rows) == 4 else rows), "'1'", "other rows"),
    "under dropout": (nn.Sequential(nn.Dropout(0.5), of_rows(lambda rows: rows - rows.mean(0))),
                      "layer '1.1'", "other rows"),
    "gradient": (of_rows(lambda rows: rows - (rows.mean(0) - rows.mean(0).detach())), "the model",
                 "gradient depends"),
    "a GRU of one sequence": (Lambda(lambda own, rows: own.gru(rows)[0], gru=nn.GRU(4, 3)),
                              "layer 'gru' (GRU)", "other rows"),
    "attention over rows": (nn.TransformerEncoderLayer(4, 2, 8), "MultiheadAttention",
                            "other rows"),
    "running mean": (nn.Sequential(nn.Linear(4, 4), Keeps(
        lambda own, rows: own.mean.add_(rows.detach().mean(0)))), "layer '1' (Keeps)", "released"),
    "in evaluation alone": (nn.Sequential(nn.Linear(4, 4), Keeps(
        lambda own, rows: None if own.training else own.mean.add_(1))), "'1' (Keeps)", "released"),
    "spectral norm": (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "SpectralNorm",
                      "released"),
    "a counter": (nn.Sequential(nn.Linear(4, 4), Keeps(counts)), "layer '1' (Keeps)", "next"),
    "a bare GRU": (nn.GRU(4, 3), "the model", "one row of outputs"),
    "one row less an axis": (of_rows(torch.squeeze), "the model", "one row of outputs"),
    "no gradient": (of_rows(torch.detach), "the model", "cannot be tested"),
    "other columns": (nn.Linear(5, 4), "the model", "cannot be tested"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_keep_rows_apart_is_refused_by_name(name):
    model, where, what = REFUSED[name]
    clipper, before = RowClipper(model, 1.0), copy.deepcopy(model.state_dict())
    with pytest.raises(PrivacyError) as caught:
        prove(clipper, model, [(4,)], "the model")
    error = caught.value
    assert where in error.where
    assert what in error.what
    assert all((error.got, error.want, error.fix))
    assert same(dict(before), dict(model.state_dict()))


def test_a_model_of_several_inputs_is_tried_with_all_of_them():
    layer = nn.Linear(5, 2)

    def outputs(cut, own):
        return layer(torch.cat([cut, own.flatten(1)], 1))

    prove(RowClipper(layer, 1.0), outputs, [(3,), (2, 1)], "the model")
    with pytest.raises(PrivacyError, match="other rows"):
        prove(RowClipper(layer, 1.0), lambda cut, own: outputs(cut.mean(0) + 0 * cut, own),
              [(3,), (2, 1)], "the model")  # fmt: skip


def test_noise_on_rows_needs_a_model_that_keeps_them_apart():
    """In training and in evaluation, with and without weights; what moves a buffer may stay."""
    in_evaluation = Lambda(lambda own, rows: rows if own.training else rows - rows.mean(0))
    for mixing in (REFUSED["mean"][0], in_evaluation):
        with pytest.raises(PrivacyError, match="other rows"):
            require_rows_apart(mixing, mixing, [(4,)], "the bottom")
    for name in ("spectral norm", "no gradient"):
        require_rows_apart(REFUSED[name][0], REFUSED[name][0], [(4,)], "the bottom")
    require_rows_apart(nn.Identity(), nn.Identity(), [(4,)], "the bottom")


@pytest.mark.parametrize("settings", [{"dp": {"epsilon": 8.0}}, {"defense": "gradient_noise"}])
def test_a_top_that_mixes_rows_is_refused_where_an_epsilon_is_of_one(settings):
    data = load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=100))
    widths = {name: {"width": 4} for name in ("left", "right")}
    asked = Experiment.model_validate({"parties": widths, "data": {"rows": 100}} | settings)
    centred = nn.Sequential(nn.Linear(8, 10), Lambda(lambda own, rows: rows - rows.mean(0)))
    with pytest.raises(PrivacyError, match="other rows") as caught:
        LocalSession(asked, data, outputs=10, top=centred)
    assert "layer 'top.1' (Lambda)" in caught.value.where
