"""SplitModule refuses what an experiment file refuses, and trains what a session trains.

Every registered defense and codec: in a loop of one's own it does what it does in a session, or it
is refused by name.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from torch import nn

from vfl import SplitModule, VFLClassifier, VFLRegressor, models
from vfl.compression import CODECS
from vfl.config import Experiment
from vfl.core.errors import DataError, SpecError, VFLError
from vfl.core.seeds import generator
from vfl.datasets import PartyData, Split
from vfl.defenses import DEFENSES, make, uses
from vfl.session import Terms, rules
from vfl.session.trace import Trace
from vfl.training.local import LocalSession
from vfl.training.specs import read_checked

WIDTH = 6
COLUMNS = {"bank": 3, "shop": 5, "post": 4}


def code_of(build):
    """The code of the error that building ends with; None where it is accepted."""
    try:
        build()
    except VFLError as error:
        return error.code
    return None


# --- refusals -------------------------------------------------------------------------------------

BAD = {
    "codec unknown": {"codec": "topkk:k=2"},
    "codec's bad value": {"codec": "topk:k=0"},
    "codec wider than the cut": {"codec": "topk:k=9"},
    "codec wider than one cut": {"codec": "topk:k=4", "widths": (6, 3)},
    "codec too long": {"codec": "x" * 600},
    "defense unknown": {"defense": "potentiall"},
    "defense's bad value": {"defense": "potential:alpha=-1"},
    "defense beside what voids it": {"defense": "potential+gradient_noise"},
    "defense of classes for numbers": {"defense": "potential", "task": "regression"},
    "merge unknown": {"merge": "median"},
    "sum of two widths": {"merge": "sum", "widths": (6, 4)},
    "width of nothing": {"widths": (6, 0)},
    "width no whole number": {"widths": (6, 2.5)},
    "party's name": {"names": ("Bank", "shop")},
    "task unknown": {"task": "ranking"},
    "seed below zero": {"seed": -1},
    "two mistakes": {"codec": "topk:k=0", "defense": "potential:alpha=-1"},
}
GOOD = {
    "nothing": {},
    "codec": {"codec": "topk:k=2,values=4"},
    "defense": {"defense": "potential+bottleneck"},
    "sum": {"merge": "sum"},
    "numbers": {"defense": "dcor", "task": "regression"},
    "widths": {"widths": (6, 4)},
}
#: An estimator has one width and a class for each task, and it draws its own names.
OF_ESTIMATORS = {
    name: settings
    for name, settings in (BAD | GOOD).items()
    if not {"widths", "names"} & set(settings) and settings.get("task") != "ranking"
}


def by_module(widths=(WIDTH, WIDTH), names=("bank", "shop"), **settings):
    bottoms = {name: nn.Linear(3, 4) for name in names}
    SplitModule(bottoms, nn.Linear(8, 2), dict(zip(names, widths, strict=True)), **settings)


def by_file(path, widths=(WIDTH, WIDTH), names=("bank", "shop"), task="classification", **settings):
    parties = {name: {"width": width} for name, width in zip(names, widths, strict=True)}
    content = settings | {"parties": parties, "label": {"task": task}}
    path.write_text(tomli_w.dumps(content))
    read_checked(path)


def by_estimator(task="classification", **settings):
    kind = VFLRegressor if task == "regression" else VFLClassifier
    settings["random_state"] = settings.pop("seed", 0)
    rows = pd.DataFrame(np.arange(24.0).reshape(8, 3), columns=["a", "b", "c"])
    parties = {"bank": ["a"], "shop": ["b", "c"]}
    kind(parties, width=WIDTH, epochs=1, **settings).fit(rows, np.arange(8) % 2)


@pytest.mark.parametrize("settings", [*BAD.values(), *GOOD.values()], ids=[*BAD, *GOOD])
def test_it_is_refused_exactly_where_a_file_is(tmp_path, settings):
    code = code_of(lambda: by_file(tmp_path / "experiment.toml", **settings))
    assert (code is None) is (settings in GOOD.values())
    assert code_of(lambda: by_module(**settings)) == code


@pytest.mark.parametrize("settings", OF_ESTIMATORS.values(), ids=OF_ESTIMATORS)
def test_an_estimator_is_refused_exactly_where_a_file_is(tmp_path, settings):
    code = code_of(lambda: by_file(tmp_path / "experiment.toml", **settings))
    assert code_of(lambda: by_estimator(**settings)) == code


#: What estimators have and modules do not: their arguments, and the same in a file.
ARGUMENTS = [
    ({"secure": "summ"}, {}),
    ({"secure": "sum", "merge": "sum", "codec": "topk:k=2"}, {}),
    ({"secure": "beaver", "merge": "sum"}, {}),
    ({"bottom": "mlpp"}, {"parties": "bottom"}),
    ({"top": "mlp:depth=2"}, {"label": "top"}),
    ({"label_party": "Lender"}, {"label": "label_party"}),
    ({"batch_size": 0}, {"train": "batch_size"}),
    ({"optimizer": "adamwings"}, {"train": "optimizer"}),
    ({"learning_rate": 0.0}, {"train": "learning_rate"}),
    ({"patience": 2}, {"train": "patience"}),
    ({"keep": "best"}, {"train": "keep"}),
    ({"validation": 1.0}, {"data": "validation"}),
]


@pytest.mark.parametrize(("arguments", "places"), ARGUMENTS, ids=lambda one: str(list(one.items())))
def test_the_other_arguments_of_an_estimator_are_held_to_a_files_rules(tmp_path, arguments, places):
    parties = {"bank": {"width": WIDTH}, "shop": {"width": WIDTH}}
    content = {"parties": parties, "label": {}, "train": {}, "data": {"validation": 0.0}}
    for name, value in arguments.items():
        table = next((table for table, known in places.items() if known == name), None)
        for place in parties.values() if table == "parties" else [content.get(table, content)]:
            place[{"label_party": "party"}.get(name, name)] = value
    path = tmp_path / "experiment.toml"
    path.write_text(tomli_w.dumps(content))
    code = code_of(lambda: read_checked(path))
    assert code is not None
    assert code_of(lambda: by_estimator(**arguments)) == code


# --- whole trainings ------------------------------------------------------------------------------


def data_of(classes=2, rows=48):
    """Rows of classes that lie apart, at two feature parties and a label party."""
    draw, labels = generator(0, "members"), torch.arange(rows) % classes
    nothing = np.empty(0, dtype=np.int64)
    split = Split(np.arange(rows), nothing, nothing)
    found = {}
    for name, columns in COLUMNS.items():
        means = 2 * torch.eye(classes, columns)[labels]
        inputs = means + torch.randn(rows, columns, generator=draw)
        found[name] = PartyData(name, inputs, None, None, split, b"rows")
    found["label"] = PartyData("label", None, labels, tuple(range(classes)), split, b"rows")
    return found


def experiment_of(codec="none", defense="none"):
    party = {"width": WIDTH, "bottom": "mlp:hidden=8"}
    train = {"epochs": 2, "batch_size": 12, "optimizer": "sgd", "learning_rate": 0.05}
    return Experiment.model_validate(
        {
            "codec": codec,
            "defense": defense,
            "parties": dict.fromkeys(COLUMNS, party),
            "label": {"top": "linear"},
            "train": train,
            "data": {"validation": 0.0, "test": 0.0},
        }
    )


def part_of(weights, name):
    prefix = f"{name}."
    return {k.removeprefix(prefix): v.clone() for k, v in weights.items() if k.startswith(prefix)}


def module_of(start, codec, defense, observers=()):
    """A module with the weights that a session starts with."""
    recipe = models.make_bottom("mlp:hidden=8")
    bottoms = {name: recipe.build((columns,), WIDTH) for name, columns in COLUMNS.items()}
    top = models.make_top("linear").build(len(COLUMNS) * WIDTH, 2)
    widths = dict.fromkeys(COLUMNS, WIDTH)
    model = SplitModule(bottoms, top, widths, codec=codec, defense=defense, observers=observers)
    for name in COLUMNS:
        model.bottoms[name].load_state_dict(part_of(start[name], "bottom"))
        model.encoders[name].load_state_dict(part_of(start[name], "codec"))
        model.decoders[name].load_state_dict(part_of(start["label"], f"codec-{name}"))
    model.top.load_state_dict(part_of(start["label"], "top"))
    return model


def train(model, data):
    """The loop of somebody else, over the batches of the session's epochs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    terms = Terms.of(experiment_of(), "train", "run")
    for exchange in rules.schedule(terms, data["label"].split):
        rows = torch.from_numpy(exchange.rows)
        labels = data["label"].labels[rows]
        outputs = model({name: data[name].inputs[rows] for name in COLUMNS}, labels, rows)
        loss = nn.functional.cross_entropy(outputs, labels) + model.extra_loss()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def require_equal(model, weights):
    for name in COLUMNS:
        compare(model.bottoms[name], part_of(weights[name], "bottom"))
        compare(model.encoders[name], part_of(weights[name], "codec"))
    compare(model.top, part_of(weights["label"], "top"))


def compare(module, expected):
    state = module.state_dict()
    assert set(state) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


#: Options without a default, and ones under which a few steps show something.
OPTIONS = {
    "label_dp": "label_dp:epsilon=1",
    "max_norm": "max_norm",
    "probe": "probe:support=4",
    "label_dp_two_stage": "label_dp_two_stage:epochs=1",
    "l1": "l1:target=3",
    "randtopk": "randtopk:k=3",
    "topk": "topk:k=3",
    "size": "size:k=3",
    "error_feedback": "error_feedback:k=2",
    "bottlenet": "bottlenet:k=3",
    "fedlite": "fedlite:pieces=3,clusters=4",
}
#: Columns of this module's parties are no words.
DEFENSE_SPECS = [
    OPTIONS.get(name, name) for name in DEFENSES.names() if not DEFENSES.member(name).of_words
]
CODEC_SPECS = [OPTIONS.get(name, name) for name in CODECS.names()]
#: What they act on is not this module's.
REFUSED = {
    "anchored", "confusion", "few_rounds", "label_dp", "label_dp_two_stage", "label_free", "mixup",
    "pretrained", "split_guard", "tpsl",
}  # fmt: skip


def spec_name(spec):
    return spec.partition(":")[0]


ACCEPTED = [spec for spec in DEFENSE_SPECS if spec_name(spec) not in REFUSED]


@pytest.mark.parametrize("spec", DEFENSE_SPECS)
def test_every_defense_acts_as_in_a_session_or_is_refused(spec):
    data, experiment = data_of(), experiment_of(defense=spec)
    session = LocalSession(experiment, data, outputs=2)
    start = session.weights()
    if spec_name(spec) in REFUSED:
        with pytest.raises(SpecError, match="loop are the caller's") as refused:
            module_of(start, "none", spec)
        assert refused.value.got.startswith(f"{spec}, which acts on ")
        return
    model = module_of(start, "none", spec)
    train(model, data)
    session.run()
    require_equal(model, session.weights())
    for direction in ("up", "down"):
        assert model.ledger.total_bytes(direction) == session.ledger.total_bytes(direction)
    plain = module_of(LocalSession(experiment_of(), data, outputs=2).weights(), "none", "none")
    train(plain, data)
    inputs = {name: data[name].inputs for name in COLUMNS}
    same = torch.equal(model.eval()(inputs), plain.eval()(inputs))
    harmless = spec in ("none", "vflip", "subspace_votes")  # two change poisoned cuts alone
    assert same is harmless, "a training without it ends with the same outputs"


@pytest.mark.parametrize("spec", ACCEPTED)
def test_a_query_sends_what_a_session_sends(spec):
    """Some defenses act on the cuts of predictions as well."""
    data, trace, asked = data_of(), Trace(), Trace()
    start = LocalSession(experiment_of(defense=spec), data, outputs=2).weights()
    model = module_of(start, "none", spec, observers=[trace]).eval()
    with torch.no_grad():
        outputs = model({name: data[name].inputs for name in COLUMNS})
    everything = Split(*[np.empty(0, dtype=np.int64)] * 2, np.arange(len(outputs)))
    rows = {name: replace(one, split=everything) for name, one in data.items()}
    session = LocalSession(
        experiment_of(defense=spec),
        rows,
        mode="predict",
        outputs=2,
        weights=start,
        observers=[asked],
    )
    session.run()
    torch.testing.assert_close(outputs, session.outputs())
    sent = [frame.payload for frame in asked if frame.direction == "up"]
    assert [frame.payload for frame in trace] == sent


@pytest.mark.parametrize("spec", CODEC_SPECS)
def test_every_codec_trains_what_a_session_trains(spec):
    data = data_of()
    session = LocalSession(experiment_of(codec=spec), data, outputs=2)
    model = module_of(session.weights(), spec, "none")
    train(model, data)
    session.run()
    require_equal(model, session.weights())
    for direction in ("up", "down"):
        assert model.ledger.total_bytes(direction) == session.ledger.total_bytes(direction)


# --- steps in which something is missing ----------------------------------------------------------

ON_LABELS = [spec for spec in ACCEPTED if uses(make(spec), "loss", "gradient")]
IN_THE_LOSS = [spec for spec in ACCEPTED if uses(make(spec), "loss", "local_loss")]
ON_GRADIENTS = [spec for spec in ACCEPTED if uses(make(spec), "loss", "gradient", "local_loss")]


def fresh(codec="none", defense="none", classes=2, observers=(), task="classification"):
    torch.manual_seed(0)
    bottoms = {name: nn.Linear(columns, WIDTH) for name, columns in COLUMNS.items()}
    top, widths = nn.Linear(len(COLUMNS) * WIDTH, classes), dict.fromkeys(COLUMNS, WIDTH)
    settings = {"codec": codec, "defense": defense, "observers": observers, "task": task}
    return SplitModule(bottoms, top, widths, **settings)


def batch_of(rows=8):
    draw = generator(0, "batch")
    return {name: torch.randn(rows, n, generator=draw) for name, n in COLUMNS.items()}


LABELS = torch.arange(8) % 2


@pytest.mark.parametrize("spec", ON_LABELS)
def test_a_training_batch_without_labels_is_refused_and_a_query_is_not(spec):
    model = fresh(defense=spec)
    with pytest.raises(SpecError, match="reads the labels of each training batch"):
        model(batch_of())
    assert model.step == 0
    assert model.ledger.total_bytes("up") == 0
    assert model.eval()(batch_of()).shape == (8, 2)


@pytest.mark.parametrize("spec", [*IN_THE_LOSS, "layer_norm+potential"])
def test_a_loss_without_its_term_is_refused_before_a_gradient_leaves(spec):
    trace = Trace()
    model = fresh(defense=spec, observers=[trace])
    loss = nn.functional.cross_entropy(model(batch_of(), LABELS), LABELS)
    with pytest.raises(SpecError, match="given loss lacks"):
        loss.backward()
    assert [frame.direction for frame in trace] == ["up"] * len(COLUMNS)
    assert all(weights.grad is None for weights in model.bottoms.parameters())


@pytest.mark.parametrize("codec", ["l1:target=3", "rate"])
def test_a_codecs_own_term_is_required_too(codec):
    model = fresh(codec=codec)
    with pytest.raises(SpecError, match="given loss lacks"):
        model(batch_of()).sum().backward()
    (model(batch_of()).sum() + model.extra_loss()).backward()


@pytest.mark.parametrize("first", [True, False])
def test_the_term_may_be_taken_before_or_after_the_task_loss(first):
    """Also of a term that no gradient of a decoded cut waits for."""
    model = fresh(defense="nopeek")
    outputs = model(batch_of())
    if first:
        extra = model.extra_loss()
        loss = nn.functional.cross_entropy(outputs, LABELS)
    else:
        loss = nn.functional.cross_entropy(outputs, LABELS)
        extra = model.extra_loss()
    (loss + extra).backward()
    assert all(weights.grad is not None for weights in model.bottoms.parameters())


@pytest.mark.parametrize("spec", ON_GRADIENTS)
def test_a_training_in_evaluation_mode_is_refused(spec):
    model = fresh(defense=spec).eval()
    outputs = model(batch_of(), LABELS)
    with pytest.raises(SpecError, match="acts in training steps"):
        nn.functional.cross_entropy(outputs, LABELS).backward()
    plain = fresh().eval()
    plain(batch_of()).sum().backward()  # a saliency map, for example


@pytest.mark.parametrize("spec", ["marvell", "max_norm"])
def test_labels_that_a_defense_means_nothing_for_are_refused_as_in_a_session(spec):
    code = code_of(lambda: LocalSession(experiment_of(defense=spec), data_of(3), outputs=3))
    labels = torch.arange(8) % 3
    assert code is not None
    assert code_of(lambda: fresh(defense=spec, classes=3)(batch_of(), labels)) == code


@pytest.mark.parametrize(
    ("labels", "classes", "task"),
    [
        (torch.arange(7) % 2, 2, "classification"),
        (torch.zeros(8, 1, dtype=torch.long), 2, "classification"),
        (torch.arange(8) % 3, 2, "classification"),
        (torch.arange(8) % 2 - 1, 2, "classification"),
        (torch.ones(8), 2, "classification"),
        (torch.zeros(8, dtype=torch.long), 1, "classification"),
        (torch.zeros(8, dtype=torch.long), 1, "regression"),
    ],
    ids=["rows", "axes", "too large", "negative", "numbers", "one output", "codes"],
)
def test_labels_of_another_form_are_refused(labels, classes, task):
    with pytest.raises(DataError):
        fresh(defense="dcor", classes=classes, task=task)(batch_of(), labels)


def test_draws_of_models_follow_from_the_seed_and_leave_other_generators_alone():
    """Dropout and a defense's own layers, as in a session."""
    before = torch.random.get_rng_state()
    bottoms = {"bank": nn.Sequential(nn.Linear(3, WIDTH), nn.Dropout())}
    torch.random.set_rng_state(before)
    outputs = []
    for seed in (0, 0, 1):
        model = SplitModule(bottoms, nn.Identity(), {"bank": WIDTH}, defense="none", seed=seed)
        outputs.append(model({"bank": batch_of()["bank"]}))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
