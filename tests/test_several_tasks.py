"""Several label parties over the same bottoms: what is learned, what is sent, who sees what."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from killing import Killed, Killer
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from vfl.config import Experiment, PartySettings
from vfl.config.party_file import Consent
from vfl.config.validate import of_project, refuse
from vfl.core.errors import (
    ConfigError,
    ConsentError,
    LabelLeakError,
    MissingColumnError,
    SharedColumnError,
)
from vfl.core.frame import Kind
from vfl.core.seeds import permutation, scoped
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.value import value_cells
from vfl.session import PartyFolder, Terms
from vfl.session.consent import check_consent
from vfl.training.local import LocalSession
from vfl.training.run import RunFolder, evaluate, load_data, predict, train
from vfl.transport.link import Observed, local_pair

ROWS, WIDTH, EVERYBODY = 240, 5, ("bank", "shop", "clinic", "insurer")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    draw = np.random.default_rng(0)
    columns = draw.normal(size=(ROWS, 6)).astype(np.float32)
    frame = pd.DataFrame(columns, columns=[f"x{number}" for number in range(6)])
    frame["ill"] = np.where(columns[:, 0] + columns[:, 3] > 0, "yes", "no")
    # No other number of the test is near these; their bytes are looked for.
    frame["cost"] = 71_000.0 + 1000 * columns[:, 1] - 500 * columns[:, 4]
    frame.insert(0, "key", range(ROWS))
    path = tmp_path_factory.mktemp("table") / "table.csv"
    frame.to_csv(path, index=False)
    return path


def experiment_of(table, **changes):
    content = {
        "seed": 2,
        "data": {"source": str(table), "id": "key"},
        "parties": {
            "bank": {"width": WIDTH, "columns": ["x[0-2]"], "bottom": "mlp:hidden=8"},
            "shop": {"width": WIDTH, "columns": ["x[3-5]"], "bottom": "mlp:hidden=8"},
        },
        "label": {"party": "clinic", "column": "ill", "top": "linear"},
        "tasks": [
            {
                "party": "insurer",
                "column": "cost",
                "task": "regression",
                "top": "mlp:hidden=7",
                "weight": 0.3,
            }
        ],
        "train": {"epochs": 3, "batch_size": 32, "learning_rate": 0.01},
    }
    return Experiment.model_validate(content | changes)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_bottoms_learn_from_the_weighted_sum_and_each_top_from_its_own_labels(table, optimizer):
    """Beside a loop of plain torch: two losses, two backward passes, one sum at the cuts."""
    settings = experiment_of(
        table, train={"epochs": 2, "batch_size": 32, "optimizer": optimizer, "learning_rate": 0.01}
    )
    data = load_data(settings)
    with scoped(7):
        bottoms = {
            name: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, WIDTH))
            for name in ("bank", "shop")
        }
        tops = {"clinic": nn.Linear(2 * WIDTH, 2), "insurer": nn.Linear(2 * WIDTH, 1)}
    by_hand = nn.ModuleDict(copy.deepcopy(bottoms | tops))
    LocalSession(
        settings,
        data,
        outputs=2,
        bottoms=bottoms | {"insurer": tops["insurer"]},
        top=tops["clinic"],
    ).run()

    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    more = {"momentum": 0.9} if optimizer == "sgd" else {}
    stepper = kind(by_hand.parameters(), lr=0.01, **more)
    rows = data["clinic"].split.train
    cost = data["insurer"].labels.double()
    known = cost[torch.from_numpy(rows)]
    cost = (cost - known.mean()) / known.std(correction=0)
    for epoch in (1, 2):
        order = rows[permutation(2, len(rows), "order", epoch)]
        for start in range(0, len(order), 32):
            batch = torch.from_numpy(order[start : start + 32])
            cuts = [by_hand[name](data[name].inputs[batch]) for name in ("bank", "shop")]
            leaf = torch.cat(cuts, 1).detach().requires_grad_()
            cross_entropy(by_hand["clinic"](leaf), data["clinic"].labels[batch]).backward()
            first, leaf.grad = leaf.grad, None
            mse_loss(by_hand["insurer"](leaf)[:, 0], cost[batch].float()).backward()
            total = first + 0.3 * leaf.grad
            for part in by_hand.children():
                if part in (by_hand["bank"], by_hand["shop"]):
                    part.zero_grad()
            torch.cat(cuts, 1).backward(total)
            stepper.step()
            by_hand.zero_grad()
    for name, module in (bottoms | tops).items():
        for ours, theirs in zip(module.parameters(), by_hand[name].parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5), name


@pytest.mark.parametrize(
    ("codec", "in_flight"),
    [
        ("randtopk:k=2,alpha=0.2", 3),
        ("topk:k=2,values=4,packer=range,grad=4", 1),
    ],
)
def test_a_killed_training_goes_on_to_the_same_bits(table, tmp_path, codec, in_flight):
    settings = experiment_of(
        table,
        codec=codec,
        train={"epochs": 3, "batch_size": 32, "checkpoint_every": 3, "in_flight": in_flight},
    )
    data = load_data(settings)

    def session(folder=None, observers=()):
        return LocalSession(settings, data, outputs=2, checkpoints=folder, observers=observers)

    whole = session().run()
    for party, step, way in [("bank", 4, "up"), ("shop", 9, "down"), ("shop", 10, "up")]:
        with pytest.raises(Killed):
            session(tmp_path, [Killer(step, way, party)]).run()
    resumed = session(tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()
    for ours, theirs in (
        (resumed.label, whole.label),
        (resumed.others["insurer"], whole.others["insurer"]),
    ):
        assert [one | {"seconds": 0} for one in ours.history] == [
            one | {"seconds": 0} for one in theirs.history
        ]
    sent = whole.whole_ledger().bytes_by_party("up")
    assert resumed.whole_ledger().bytes_by_party("up") == sent
    assert sent["bank"] == sent["bank to insurer"]


def test_a_run_evaluates_predicts_and_tells_of_every_task(table, tmp_path):
    settings = experiment_of(table)
    summary = train(settings, tmp_path, "m", data=load_data(settings))
    run = RunFolder.open(tmp_path / "m")
    assert summary["trust"] == "clinic and insurer see every cut"
    told = {(one["observer"], one["what"], one["of"]) for one in summary["revealed"]}
    for taker in ("clinic", "insurer"):
        for name in ("bank", "shop"):
            assert (taker, "cut", name) in told
            assert (name, "gradient of its cut", taker) in told
    assert len(told) == 8
    insurer = summary["tasks"]["insurer"]
    assert insurer["weight"] == 0.3
    assert insurer["bytes_up"] == summary["bytes_up"]
    assert "test_rmse" in insurer
    lines = (run.path / "traffic.csv").read_text()
    assert "bank to insurer" in lines
    again = evaluate(run)
    assert again["tasks"]["insurer"]["test_rmse"] == insurer["test_rmse"]
    assert again["test_auc"] == summary["test_auc"]
    answers = {
        "clinic": pd.read_csv(predict(run)),
        "insurer": pd.read_csv(run.path / "predictions-insurer.csv"),
    }
    assert answers["clinic"].columns.tolist()[-1] == "probability_yes"
    own = pd.read_csv(table).set_index("key")["cost"].loc[answers["insurer"]["id"]].to_numpy()
    found = float(np.sqrt(np.mean((answers["insurer"]["prediction"] - own) ** 2)))
    assert found == pytest.approx(insurer["test_rmse"])
    card = PartyFolder(run.party("insurer")).card()
    assert card["role"] == "label party"
    assert card["test_figures"]["test_rmse"] == insurer["test_rmse"]


class Listening:
    """Keeps every frame that crosses a link of any label party."""

    def __init__(self):
        self.links = []

    def connect(self, party):
        here, there = local_pair()
        kept = []
        self.links.append((party, kept))

        def observer(name, direction, frame):
            kept.append((direction, frame.kind, bytes(frame.payload)))

        return Observed(here, party, "label", [observer]), there


def test_both_label_parties_get_the_same_bytes_and_no_label_leaves_its_owner(table, tmp_path):
    settings = experiment_of(table)
    data, listening = load_data(settings), Listening()
    train(settings, tmp_path, "m", data=data, connect=listening.connect)
    assert [party for party, _ in listening.links] == ["bank", "bank", "shop", "shop"]
    for (_, one), (_, other) in (listening.links[:2], listening.links[2:]):
        up = [[frame for frame in kept if frame[0] == "up"] for kept in (one, other)]
        assert up[0] == up[1]
        down = [[frame for frame in kept if frame[1] is Kind.GRAD] for kept in (one, other)]
        assert down[0] != down[1]
    costs = data["insurer"].labels
    marked = [
        one.tobytes() for kind in (np.float32, np.float64) for one in costs.numpy().astype(kind)
    ]
    others = [path for name in EVERYBODY[:3] for path in (tmp_path / "m").rglob(f"{name}/*")]
    contents = [payload for _, kept in listening.links for *_, payload in kept]
    contents += [path.read_bytes() for path in others if path.is_file()]
    assert len(contents) > 100
    assert not any(value in content for content in contents for value in marked)


def test_no_label_is_a_feature_whoever_learns_it(table):
    every = experiment_of(table)
    globbed = {"bank": PartySettings(columns=("x[0-2]",)), "shop": PartySettings(columns=("*",))}
    with pytest.raises(SharedColumnError, match="x0"):
        load_data(every.model_copy(update={"parties": globbed}))
    asked = {"bank": PartySettings(columns=("x*",))}
    assert load_data(every.model_copy(update={"parties": asked}))["bank"].inputs.shape[1] == 6
    everything = {"bank": PartySettings(columns=("*",))}
    assert load_data(every.model_copy(update={"parties": everything}))["bank"].inputs.shape[1] == 6
    named = {"bank": PartySettings(columns=("x0", "cost"))}
    with pytest.raises((LabelLeakError, MissingColumnError)):
        load_data(every.model_copy(update={"parties": named}))


def test_every_party_may_have_a_table_of_its_own(table, tmp_path):
    frame, draw = pd.read_csv(table), np.random.default_rng(1)
    parts = {
        "bank": ["x0", "x1", "x2"],
        "shop": ["x3", "x4", "x5"],
        "clinic": ["ill"],
        "insurer": ["cost"],
    }
    common = set(range(ROWS))
    for name, columns in parts.items():
        keep = draw.permutation(ROWS)[: ROWS - 20]
        common &= set(keep.tolist())
        frame.loc[keep, ["key", *columns]].to_csv(tmp_path / f"{name}.csv", index=False)
    settings = experiment_of(
        table,
        data={"source": str(tmp_path / "clinic.csv"), "id": "key"},
        parties={name: {"source": str(tmp_path / f"{name}.csv")} for name in ("bank", "shop")},
        tasks=[
            {
                "party": "insurer",
                "column": "cost",
                "task": "regression",
                "source": str(tmp_path / "insurer.csv"),
            }
        ],
    )
    data = load_data(settings)
    assert {one.rows for one in data.values()} == {len(common)}
    ids = [int(one) for one in data["insurer"].ids]
    expected = frame.set_index("key").loc[ids, "cost"].to_numpy()
    assert np.allclose(data["insurer"].labels.numpy(), expected)
    assert data["bank"].inputs.shape[1] == 3
    session = LocalSession(settings, data, outputs=2).run()
    assert session.others["insurer"].history[-1]["test_rmse"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"secure": "sum", "merge": "sum"}, "has one label party"),
        ({"middle": {"party": "compute"}}, "supports one label party"),
        ({"train": {"patience": 2}}, "need the validation loss of one task"),
        ({"train": {"keep": "best"}}, "need the validation loss of one task"),
        ({"tasks": [{"party": "clinic", "column": "cost"}]}, "have the same name"),
        ({"tasks": [{"party": "bank", "column": "cost"}]}, "has columns"),
        ({"tasks": [{"party": "insurer"}]}, "needs the name of its label column"),
        ({"tasks": [{"party": "insurer", "column": "cost", "weight": 0}]}, "greater than 0"),
        ({"trace": {"phases": "train"}}, "replays links to one label party"),
        ({"grid": {}}, "one label party"),
    ],
)
def test_what_several_tasks_do_not_go_with_is_refused(table, change, said):
    content = experiment_of(table).model_dump(mode="json", exclude_none=True)
    with pytest.raises(ValueError, match=said):
        Experiment.model_validate(content | change)


def test_a_label_party_that_leads_may_have_columns_which_stay_with_it(table):
    settings = experiment_of(table)
    own = settings.parties["shop"]
    parties = {"bank": settings.parties["bank"], "clinic": own}
    settings = settings.model_copy(update={"parties": parties})
    session = LocalSession(settings, load_data(settings), outputs=2).run()
    assert session.whole_ledger().bytes_by_party("up").keys() == {"bank", "bank to insurer"}
    assert session.label.model["top"].in_features == 2 * WIDTH
    assert session.others["insurer"].model["top"][0].in_features == WIDTH


def test_where_one_label_party_is_played_several_are_refused_and_not_ignored(table):
    settings = experiment_of(table)
    data = load_data(settings)
    for use in (grid_cells, value_cells):
        with pytest.raises(ConfigError, match="does not support several label parties"):
            use(settings)
    digits = settings.model_copy(
        update={"data": settings.data.model_copy(update={"source": "digits"})}
    )
    with pytest.raises(ConfigError, match="which has one label"):
        load_data(digits)
    terms = Terms.of(settings, "train", "m")
    with pytest.raises(ConsentError) as refused:
        check_consent(terms, "bank", Consent(), data["bank"].split)
    assert "label parties in addition to 'clinic': insurer" in refused.value.got
    check_consent(terms, "bank", Consent(label_parties=("insurer",)), data["bank"].split)
    plain = {name: PartySettings() for name in ("bank", "shop")}
    with pytest.raises(ConfigError, match="names no party's table"):
        refuse(of_project(settings.model_copy(update={"parties": plain})))
    with pytest.raises(ValueError, match=r"'bank' of ..tasks.. has columns"):
        Terms.model_validate(terms.model_dump(mode="json") | {"tasks": {"bank": {"weight": 1.0}}})
