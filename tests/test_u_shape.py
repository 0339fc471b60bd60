"""A third party between bottoms and head: the same training, and who sees what of it."""

import copy

import pytest
import torch
from killing import Killed, Killer
from torch import nn

from vfl.config import CompareSettings, Experiment
from vfl.config.party_file import Consent
from vfl.config.validate import of_project, refuse
from vfl.core.errors import ConfigError, ConsentError, SpecError
from vfl.core.frame import Kind
from vfl.core.seeds import scoped
from vfl.datasets import Dealing, load_bundled
from vfl.experiments.attack_grid import grid_cells
from vfl.experiments.comparison import comparison_of
from vfl.experiments.value import value_cells
from vfl.session import PartyFolder, Terms
from vfl.session.consent import check_consent
from vfl.training.local import LocalSession
from vfl.training.run import RunFolder, train
from vfl.training.specs import check_specs

PARTIES, WIDTH, MIDDLE = ["bank", "shop"], 6, 12
ASKED = {"party": "compute", "width": MIDDLE, "model": "mlp:hidden=20,last=relu"}


def experiment_of(middle=True, merge="concat", codec="none", **train):
    content = {
        "seed": 3,
        "merge": merge,
        "codec": codec,
        "parties": {name: {"width": WIDTH, "bottom": "mlp:hidden=16"} for name in PARTIES},
        "label": {"party": "clinic", "top": "mlp:hidden=none"},
        "train": {"epochs": 3, "batch_size": 32, "learning_rate": 0.01} | train,
    }
    return Experiment.model_validate(content | ({"middle": ASKED} if middle else {}))


@pytest.fixture(scope="module")
def digits():
    return load_bundled("digits", PARTIES, "clinic", Dealing(3, limit=400), flatten=True)


def modules_of(data, merge):
    """Bottoms, a middle and a head with first weights of their own."""
    with scoped(5):
        bottoms = {
            name: nn.Sequential(nn.Linear(data[name].inputs.shape[1], 16), nn.ReLU())
            for name in PARTIES
        }
        for bottom in bottoms.values():
            bottom.append(nn.Linear(16, WIDTH))
        merged = WIDTH if merge == "sum" else 2 * WIDTH
        middle = nn.Sequential(nn.Linear(merged, 20), nn.ReLU(), nn.Linear(20, MIDDLE), nn.ReLU())
        return bottoms, middle, nn.Linear(MIDDLE, 10)


def figures(history):
    left_out = ("seconds", "bytes_up", "bytes_down")
    return [{k: v for k, v in record.items() if k not in left_out} for record in history]


@pytest.mark.parametrize(
    ("merge", "train"),
    [
        ("concat", {"optimizer": "adam"}),
        ("sum", {"optimizer": "sgd", "weight_decay": 1e-4}),
        ("concat", {"in_flight": 3}),
        ("concat", {"patience": 1, "keep": "best", "learning_rate": 0.3}),
    ],
)
def test_middle_and_head_train_as_the_whole_top_does_bit_for_bit(digits, merge, train):
    bottoms, middle, head = modules_of(digits, merge)
    whole = nn.Sequential(copy.deepcopy(middle), copy.deepcopy(head))
    plain = LocalSession(
        experiment_of(False, merge, **train),
        digits,
        outputs=10,
        bottoms=copy.deepcopy(bottoms),
        top=whole,
    ).run()
    parts = LocalSession(
        experiment_of(True, merge, **train),
        digits,
        outputs=10,
        bottoms=bottoms | {"compute": middle},
        top=head,
    ).run()
    assert figures(parts.label.history) == figures(plain.label.history)
    for name in PARTIES:
        assert parts.weights()[name].keys() == plain.weights()[name].keys()
        for key, value in plain.weights()[name].items():
            assert torch.equal(parts.weights()[name][key], value)
    together = nn.Sequential(middle, head)
    for ours, theirs in zip(together.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    if "patience" in train:  # the middle passed the verdict on, and obeyed it
        assert parts.label.stopping.stopped == parts.middle.stopping.stopped > 0
        assert all(one.stopping.best_epoch for one in parts.clients)


def test_codecs_of_the_cuts_and_of_the_output_are_two(digits):
    settings = experiment_of(codec="topk:k=2")
    settings = settings.model_copy(
        update={"middle": settings.middle.model_copy(update={"codec": "topk:k=4"})}
    )
    session = LocalSession(settings, digits, outputs=10).run()
    sent = session.ledger.bytes_by_party("up")
    dense = LocalSession(experiment_of(), digits, outputs=10).run().ledger.bytes_by_party("up")
    assert sent["bank"] == sent["shop"] < dense["bank"]
    assert sent["bank"] < sent["compute"] < dense["compute"]


@pytest.mark.parametrize(
    ("codec", "in_flight"),
    [("randtopk:k=3,alpha=0.2,values=8", 3), ("size:k=3", 1)],
)
def test_a_killed_training_goes_on_to_the_same_bits(digits, tmp_path, codec, in_flight):
    settings = experiment_of(codec=codec, in_flight=in_flight, checkpoint_every=4, keep="best")

    def session(folder=None, observers=()):
        return LocalSession(settings, digits, outputs=10, checkpoints=folder, observers=observers)

    whole = session().run()
    for party, step, way in [("bank", 6, "up"), ("compute", 13, "down"), ("shop", 14, "down")]:
        with pytest.raises(Killed):
            session(tmp_path, [Killer(step, way, party)]).run()
    resumed = session(tmp_path).run()
    assert resumed.weights_digest() == whole.weights_digest()
    assert [one | {"seconds": 0} for one in resumed.label.history] == [
        one | {"seconds": 0} for one in whole.label.history
    ]
    assert resumed.ledger.bytes_by_party("up") == whole.ledger.bytes_by_party("up")


def test_a_run_evaluates_predicts_and_reports(digits, tmp_path):
    summary = train(experiment_of(), tmp_path, "u", data=digits)
    folder = RunFolder.open(tmp_path / "u")
    assert summary["bytes_up"].keys() == {"bank", "shop", "compute"}
    assert 1 < summary["wire_ratio"] < 1.1  # headers and queries on top of dense numbers
    assert (
        summary["trust"]
        == "compute sees every cut and no label, clinic sees the outputs of compute"
    )
    told = {(one["observer"], one["what"], one["of"]) for one in summary["revealed"]}
    assert told == {
        ("compute", "cut", "bank"),
        ("compute", "cut", "shop"),
        ("bank", "gradient of its cut", "compute"),
        ("shop", "gradient of its cut", "compute"),
        ("clinic", "output", "compute"),
        ("compute", "gradient of its output", "clinic"),
    }
    cards = {name: PartyFolder(folder.party(name)).card() for name in (*PARTIES, "compute")}
    assert cards["compute"]["role"] == "party in the middle"
    assert cards["compute"]["data"]["row_shape"] is None
    weights = PartyFolder(folder.party("compute")).weights()
    assert sum(one.numel() for one in weights.values()) == 13 * 20 + 21 * 12


class Recorder:
    """Keeps every frame by link, kind and direction."""

    def __init__(self):
        self.frames = []

    def __call__(self, party, direction, frame):
        self.frames.append((party, direction, frame.kind, bytes(frame.payload)))


def test_no_label_leaves_its_owner_and_no_cut_reaches_it(digits, tmp_path):
    """Every label is a number that nothing else is; cuts are looked for by their own bytes."""
    numbers = 1e6 + torch.arange(400).float() * 1.25
    data = dict(digits)
    data["clinic"] = copy.copy(digits["clinic"])
    object.__setattr__(data["clinic"], "labels", numbers)
    object.__setattr__(data["clinic"], "classes", None)
    settings = experiment_of().model_copy(
        update={"label": experiment_of().label.model_copy(update={"task": "regression"})}
    )
    recorder = Recorder()
    train(settings, tmp_path, "u", data=data, observers=[recorder])
    values = [one.tobytes() for one in numbers.numpy()]
    values += [one.tobytes() for one in numbers.double().numpy()]
    others = [
        path for name in (*PARTIES, "compute") for path in (tmp_path / "u").rglob(f"{name}/*")
    ]
    assert others
    for content in [payload for *_, payload in recorder.frames] + [
        path.read_bytes() for path in others if path.is_file()
    ]:
        assert not any(value in content for value in values)
    links = {(party, direction, kind) for party, direction, kind, _ in recorder.frames}
    up, down = {Kind.CUT, Kind.QUERY}, {Kind.GRAD, Kind.ACK}
    everybody = (*PARTIES, "compute")
    assert links == {(name, "up", kind) for name in everybody for kind in up} | {
        (name, "down", kind) for name in everybody for kind in down
    }
    cuts = {payload for name, _, kind, payload in recorder.frames if name in PARTIES and kind in up}
    assert cuts.isdisjoint(p for name, _, _, p in recorder.frames if name == "compute")


@pytest.mark.parametrize(
    "defense",
    ["label_dp:epsilon=2", "gradient_noise", "nopeek", "confusion"],
)
def test_defenses_of_one_end_stand_beside_a_middle(digits, defense):
    settings = experiment_of(epochs=1).model_copy(update={"defense": defense})
    check_specs(settings)
    session = LocalSession(settings, digits, outputs=10).run()
    assert session.label.history[-1]["train_loss"] > 0


@pytest.mark.parametrize("defense", ["mixup", "dcor", "split_guard"])
def test_defenses_that_join_both_ends_are_refused(digits, defense):
    settings = experiment_of().model_copy(update={"defense": defense})
    with pytest.raises(SpecError, match="cuts and labels at one party"):
        LocalSession(settings, digits, outputs=10)
    with pytest.raises(SpecError, match="cuts and labels at one party"):
        check_specs(settings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"secure": "sum", "merge": "sum"}, "hides cuts from the label party"),
        ({"middle": {"party": "bank"}}, "another party's name"),
        ({"middle": {"party": "clinic"}}, "another party's name"),
        ({"label": {"party": "shop"}}, "only computes the head"),
        ({"trace": {"phases": "train"}}, "replays links to a label party"),
        ({"grid": {}}, r"\[grid\] trains networks without"),
        ({"compare": {"codecs": ["none"]}}, r"\[compare\] trains networks without"),
        ({"middle": {"width": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_a_middle_does_not_go_with_is_refused(change, said):
    content = experiment_of().model_dump(mode="json", exclude_none=True)
    with pytest.raises(ValueError, match=said):
        Experiment.model_validate(content | change)


def test_terms_from_elsewhere_are_held_to_the_same():
    content = Terms.of(experiment_of(), "train", "u").model_dump(mode="json")
    assert Terms.model_validate(content).middle.party == "compute"
    with pytest.raises(ValueError, match="another party's name"):
        Terms.model_validate(content | {"middle": {"party": "shop"}})


def test_where_no_middle_is_played_it_is_refused_and_not_ignored(digits):
    settings, asked = experiment_of(), CompareSettings(codecs=("none",))
    for use in (
        grid_cells,
        value_cells,
        lambda one: comparison_of(one.model_copy(update={"compare": asked})),
    ):
        with pytest.raises(ConfigError, match="does not support a party in the middle"):
            use(settings)
    terms = Terms.of(settings, "train", "u")
    with pytest.raises(ConsentError, match="does not consent") as refused:
        check_consent(terms, "bank", Consent(), digits["bank"].split)
    assert "cuts for the middle party 'compute'" in refused.value.got
    check_consent(terms, "bank", Consent(middle=("compute",)), digits["bank"].split)
    refuse(of_project(settings))
