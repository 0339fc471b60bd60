"""The facts of `vfl check`, against what a training then does."""

import pytest

from vfl.config import read_experiment
from vfl.core.errors import ConfigError, SpecError, WidthError
from vfl.core.frame import HEADER_BYTES
from vfl.core.traffic import CONTROL
from vfl.defenses import DEFENSES
from vfl.experiments import plan
from vfl.training.local import LocalSession
from vfl.training.run import load_data, train

TEXT = """\
name = "plan"
codec = "topk:k=3,values=8"
[data]
source = "digits"
rows = 300
[parties.left]
width = 16
[parties.right]
width = 8
[train]
epochs = 2
batch_size = 50
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(TEXT)
    return file


def test_few_rows_that_choose_the_epoch_are_told(path):
    told = "chosen_by_few_rows"
    assert told not in plan.of_experiment(path)
    for setting in ("train.keep=best", "train.patience=1"):
        assert plan.of_experiment(path, [setting])[told].startswith("only 30 validation rows")
    enough = ["train.keep=best", "data.rows=1000"]
    assert told not in plan.of_experiment(path, enough)


def test_counts_of_rows_and_steps(path):
    facts = plan.of_experiment(path)
    assert [facts[f"{part}_rows"] for part in ("train", "validation", "test")] == [210, 30, 60]
    assert (facts["steps_per_epoch"], facts["epochs"]) == (5, 2)
    assert facts["inputs"] == {"left": "1x8x4", "right": "1x8x4"}
    assert facts["privacy"] == "promises nothing"
    # k of d values of b bits, each with ceil(log2 d) bits of its place, of 32 bits a value
    assert facts["formula_ratio"] == pytest.approx(3 / 16 * (8 + 4) / 32, abs=1e-5)


@pytest.mark.parametrize("setting", ["data.folds=10", "data.split=stratified"])
def test_a_project_has_no_strata(path, setting):
    path.write_text(TEXT.replace("rows = 300\n", ""))  # refused before
    with pytest.raises(
        ConfigError, match=r"(?s)feature parties have none.*" + setting.split("=")[0]
    ):
        plan.check_public(read_experiment(path, [setting]))


def test_bytes_of_a_dense_codec_are_known_beforehand(path, tmp_path):
    """A payload may have 64 bytes more than its values, which this codec does not use."""
    facts = plan.of_experiment(path, ["codec=none"])
    rows, exchanges = 2 * (210 + 30) + 60, 2 * (5 + 1) + 1
    up = 4 * rows * (16 + 8) + 2 * exchanges * HEADER_BYTES
    down = 4 * 2 * 210 * (16 + 8) + 2 * exchanges * HEADER_BYTES
    summary = train(read_experiment(path, ["codec=none"]), tmp_path, "dense")
    sent = [*summary["bytes_up"].values(), *summary["bytes_down"].values()]
    assert sum(sent) == up + down
    assert facts["at_most_bytes"] == up + down + 64 * 2 * (exchanges + 2 * 5)


def test_a_codec_must_fit_every_width(path):
    with pytest.raises(WidthError, match="8 wide") as caught:
        plan.of_experiment(path, ["codec=topk:k=9"])
    assert caught.value.where == "plan.toml: codec"
    facts = plan.of_experiment(path, ["codec=topk:k=9", "parties.right.width=9"])
    assert facts["codec"] == "topk:k=9"


def test_several_wrong_specs_are_told_together(path):
    with pytest.raises(ConfigError, match="2 problems in plan") as caught:
        plan.of_experiment(path, ["label.top=liner", "defense=zzzzz"])
    assert "label.top: no top is called 'liner'; did you mean 'linear'?" in caught.value.what
    known = ", ".join(DEFENSES.names())
    assert f"defense: no defense is called 'zzzzz'; want {known}" in caught.value.what


def test_a_defense_must_serve_the_task(path):
    overrides = ["defense=dcor+potential", "label.task=regression"]
    with pytest.raises(SpecError, match="'potential' needs classes") as caught:
        plan.of_experiment(path, overrides)
    assert caught.value.where == "plan.toml: defense"
    with pytest.raises(ConfigError, match=r"label\.task") as caught:
        plan.of_experiment(path, ["defense=potential", "label.task=regresion"])
    assert "about classes" not in str(caught.value)


def test_a_bottom_must_fit_the_rows(path):
    facts = plan.of_experiment(path, ["parties.left.bottom=cnn:channels=2-4"])
    assert facts["inputs"]["left"] == "1x8x4"
    overrides = ["data.source=breast_cancer", "parties.left.bottom=cnn"]
    with pytest.raises(SpecError, match="takes pictures"):
        plan.of_experiment(path, overrides)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            "label_dp:flip=0.16",
            "epsilon 3.855 for one label in one training",
        ),  # ln(0.84 * 9 / 0.16)
        ("gradient_noise:sigma=4", "epsilon 1.993, delta 1e-05 for one label in one exchange"),
        ("gradient_noise:norm=inf", "by noise without a bound (no epsilon)"),
    ],
)
def test_what_a_defense_promises(path, spec, told):
    assert told in plan.of_experiment(path, [f"defense={spec}"])["privacy"]


def test_a_defense_that_means_nothing_for_the_labels(path):
    with pytest.raises(SpecError, match="'marvell' hides which of two classes") as caught:
        plan.of_experiment(path, ["defense=layer_norm+marvell"])
    assert (caught.value.where, caught.value.got) == ("plan.toml: defense", "10 classes")
    with pytest.raises(SpecError, match="'tpsl' needs every row to weigh the same"):
        plan.of_experiment(path, ["defense=tpsl", "label.class_weight=balanced"])
    with pytest.raises(SpecError, match="'label_dp' needs classes") as caught:
        plan.of_experiment(path, ["defense=label_dp:flip=0.1", "label.task=regression"])
    assert caught.value.where == "plan.toml: defense"


def party_toml(folder, label=""):
    rows = "".join(f"r{n},{n % 7},{n % 3},{n % 2}\n" for n in range(40))
    (folder / "rows.csv").write_text(f"id,a,b,paid\n{rows}")
    path = folder / "party.toml"
    path.write_text(f'party = "bank"\n[data]\nsource = "rows.csv"\nid = "id"\n{label}')
    return path


def test_a_feature_party_takes_every_column_but_the_id(tmp_path):
    facts = plan.of_party_file(party_toml(tmp_path))
    assert (facts["party"], facts["rows"], facts["inputs"]) == ("bank", 40, "3")
    assert facts["consent"]["codecs"] == ["*"]
    assert facts["ranges"]["train.learning_rate"] == [0, 10]


def test_a_range_of_nothing_is_found_in_the_file(tmp_path):
    path = party_toml(tmp_path)
    path.write_text(f"{path.read_text()}[consent.ranges]\ntrain.learning_rat = [0, 1]\n")
    with pytest.raises(ConfigError, match=r"did you mean 'train\.learning_rate'") as caught:
        plan.of_party_file(path)
    assert caught.value.where == "party.toml:5: consent.ranges"


SGD = ["train.optimizer=sgd", "train.momentum=0"]
SUM = ["codec=none", "merge=sum", "parties.left.width=8"]


def test_who_learns_what_of_the_cuts_is_told(path):
    assert plan.of_experiment(path)["secure"] == "label sees every cut"
    told = plan.of_experiment(path, [*SUM, "secure=sum:bits=8"])["secure"]
    assert told.startswith("label learns the sum alone, unless it colludes")
    assert told.endswith("0.25 x the bytes of float32, each value exact to 2^-4 and within 7.875")


def test_shared_first_layers_are_planned_with_the_bytes_that_will_be_sent(path):
    bottoms = [f"parties.{name}.bottom=mlp:hidden=none" for name in ("left", "right")]
    overrides = [*SUM, *SGD, *bottoms, "secure=beaver", "train.epochs=2", "parties.right.width=8"]
    facts = plan.of_experiment(path, overrides)
    assert facts["secure"].startswith("label learns the sum alone and no party has first-layer")
    experiment = read_experiment(path, overrides)
    assert "in_flight" not in str(plan.link_advice(experiment, 210, 0.04, 80))
    session = LocalSession(experiment, load_data(experiment), outputs=10).run()
    rows = [row for row in session.ledger.rows() if row.phase != CONTROL]
    queries = sum(row.frames for row in rows if row.phase == "evaluate") // 4
    trained = sum(row.frames for row in rows if row.phase == "train") // 4
    sent = sum(row.wire_bytes for row in rows)
    assert facts["at_most_bytes"] == sent + trained + queries


def test_a_third_partys_bytes_are_planned_too(path):
    bottoms = [f"parties.{name}.bottom=mlp:hidden=none" for name in ("left", "right")]
    overrides = [*SUM, *SGD, *bottoms, "secure=beaver:dealer=notary", "train.epochs=2"]
    facts = plan.of_experiment(path, [*overrides, "parties.right.width=8"])
    assert "unless notary, which deals, colludes with label or a feature party" in facts["secure"]
    assert "or both holders of a layer's shares collude" in facts["secure"]
    experiment = read_experiment(path, [*overrides, "parties.right.width=8"])
    session = LocalSession(experiment, load_data(experiment), outputs=10).run()
    rows = [row for row in session.ledger.rows() if row.phase != CONTROL]
    exchanges = sum(row.frames for row in rows if (row.party, row.direction) == ("notary", "down"))
    sent = sum(row.wire_bytes for row in rows)
    assert facts["at_most_bytes"] == sent + 2 * exchanges, "an answer may carry a byte"


@pytest.mark.parametrize(
    ("overrides", "want"),
    [
        (["secure=sum"], "merge = 'sum'"),
        ([*SUM, "secure=sum", "codec=topk:k=3"], "codec = 'none'"),
        ([*SUM, "secure=sum", "defense=potential"], "a defense of inputs"),
        ([*SUM, "secure=sum", "trace.phases=train"], "no [trace]"),
        ([*SUM, "secure=sum:bits=12"], "8, 16, 32"),
        ([*SUM, "secure=bever"], "beaver, none, pea, permuted, sum"),
        ([*SUM, "secure=beaver"], "train.optimizer = sgd"),
        ([*SUM, "secure=beaver", *SGD], "bottom = 'mlp:hidden=none'"),
        ([*SUM, "secure=beaver:dealer=right", *SGD], "dealer=label"),
    ],
)
def test_a_secure_mode_that_cannot_be_is_told_with_its_place(path, overrides, want):
    with pytest.raises(SpecError) as caught:
        plan.of_experiment(path, overrides)
    assert caught.value.want.startswith(want)
    assert "secure" in caught.value.where
