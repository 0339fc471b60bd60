"""Cases made of recordings: what they hold is what the session had, and attacks run on them."""

from functools import cache

import pytest
import torch

from vfl.attacks import Grant, make
from vfl.attacks.cases import (
    TrainedParts,
    decoded,
    draw_leak,
    last_cuts,
    received_case,
    training_case,
)
from vfl.attacks.scoring import attempt, attempt_all
from vfl.config import Experiment
from vfl.core.errors import NotGrantedError, TooFewRowsError
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.session.trace import Trace
from vfl.training.local import LocalSession


@cache
def trained(*parties, owner="lender", top="linear", epochs=4, batch_size=40, **changes):
    data = load_bundled("digits", list(parties), owner, Dealing(0, validation=0.2, limit=600))
    settings = {
        "parties": {name: {"width": 10, "bottom": "mlp:hidden=32"} for name in parties},
        "label": {"party": owner, "top": top},
        "train": {"epochs": epochs, "batch_size": batch_size, "learning_rate": 0.01},
    }
    experiment = Experiment.model_validate(settings | changes)
    trace = Trace()
    session = LocalSession(experiment, data, outputs=10, observers=[trace]).run()
    frames = list(decoded(trace, session.terms, data[owner].split))
    return experiment, data, frames, session


@pytest.fixture(scope="module")
def alone():
    return trained("bank")


def heard_by_the_bank(victim, k=1):
    experiment, data, frames, _ = victim
    return training_case(experiment, data, frames, "bank", k, generator(0, "leak"))


def received_from_the_bank(victim, leaks=100):
    experiment, data, frames, session = victim
    parts = TrainedParts(experiment, data, session.weights())
    return received_case(parts, frames, "bank", leaks, generator(0, "leak"))


@pytest.mark.parametrize(("spec", "least"), [("gradient_similarity", 0.95), ("surrogate", 0.9)])
def test_gradients_tell_the_labels(alone, spec, least):
    assert attempt(heard_by_the_bank(alone), make(spec), generator(0)).value >= least


@pytest.mark.parametrize("defense", ["none", "gradient_noise:norm=0.1,sigma=1"])
def test_the_top_of_the_label_party_tells_every_label(defense):
    experiment, data, frames, session = trained("bank", top="mlp:hidden=16", defense=defense)
    draw, parts = generator(0, "leak"), TrainedParts(experiment, data, session.weights())
    case = training_case(experiment, data, frames, "bank", 0, draw, others_top=parts.top)
    assert case.view.threat.counterfactual == {Grant.OTHERS_TOP}
    score = attempt(case, make("exact"), generator(0))
    assert score.value > 0.98 if defense == "none" else score.value < 0.9
    with pytest.raises(NotGrantedError, match="the label party's top"):
        attempt(heard_by_the_bank((experiment, data, frames, session)), make("exact"), draw)


def test_nothing_behind_the_cut_tells_every_label():
    victim = trained("bank", "shop", merge="sum", top="identity")
    score = attempt(heard_by_the_bank(victim), make("direct_label"), generator(0))
    assert score.value == 1


def test_leaked_rows_are_no_targets(alone):
    case = heard_by_the_bank(alone, k=2)
    rows = len(alone[1]["lender"].split.train)
    assert (case.view.leaked.rows, case.view.targets.rows) == (20, rows - 20)
    assert sorted(set(torch.cat([one.rows for one in case.view.exchanges]).tolist())) == [
        *range(rows)
    ]
    with pytest.raises(NotGrantedError):
        _ = heard_by_the_bank(alone, k=0).view.leaked


def test_partners_hand_over_their_columns_of_the_same_rows():
    experiment, data, frames, _ = trained("bank", "shop")
    draw = generator(0, "leak")
    case = training_case(experiment, data, frames, "bank", 1, draw, partners=["shop"])
    alone = training_case(experiment, data, frames, "bank", 1, generator(0, "leak"))
    train = torch.from_numpy(data["lender"].split.train)
    leaked = draw_leak(data["lender"].labels[train], 1, generator(0, "leak"))
    (partner,) = case.view.only({Grant.INPUTS, Grant.LEAKED, Grant.PARTNERS}).partners
    assert torch.equal(partner.leaked.inputs, data["shop"].inputs[train[leaked]])
    assert partner.targets.rows == case.view.targets.rows == alone.view.targets.rows
    assert Grant.PARTNERS not in alone.view.threat.grants


def test_who_heard_a_training_has_its_own_cuts_of_the_last_epoch(alone):
    _, data, frames, _ = alone
    case = heard_by_the_bank(alone)
    train = torch.from_numpy(data["lender"].split.train)
    told = [one for one in frames if one[0].phase == "train"]
    wanted = last_cuts(told, "bank", train)
    leaked = draw_leak(data["lender"].labels[train], 1, generator(0, "leak"))
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[leaked] = False
    assert torch.equal(case.view.targets.cuts, wanted[rest])
    assert torch.equal(case.view.leaked.cuts, wanted[leaked])


def test_an_epoch_may_leave_a_row_without_a_cut():
    """A remainder of one row is no batch; what needs no cuts goes on."""
    experiment, data, frames, _ = trained("bank", epochs=1, batch_size=359)
    assert len(data["lender"].split.train) == 360
    case = training_case(experiment, data, frames, "bank", 1, generator(0, "leak"))
    assert attempt(case, make("gradient_similarity"), generator(0)).value > 0.5
    with pytest.raises(NotGrantedError, match="does not contain the cuts"):
        _ = case.view.targets.cuts


def test_an_inversion_beats_the_mean_picture(alone):
    mse, psnr, ssim = attempt_all(
        received_from_the_bank(alone), make("inversion:steps=150"), generator(0)
    )
    assert mse.value < 0.8 * mse.guess
    assert psnr.value > psnr.guess
    assert ssim.value > ssim.guess


@pytest.mark.parametrize(("merge", "codec"), [("concat", "none"), ("sum", "size:k=6")])
def test_the_parts_answer_as_the_session_did(merge, codec):
    """The label party has columns of its own."""
    victim = trained("bank", "shop", owner="shop", merge=merge, codec=codec)
    experiment, data, _, session = victim
    state = torch.random.get_rng_state()
    case = received_from_the_bank(victim)
    assert case.view.others_bottom() is not case.view.others_bottom()
    assert torch.equal(torch.random.get_rng_state(), state)
    told = LocalSession(
        experiment, data, mode="predict", outputs=10, weights=session.weights()
    ).run()
    seen = case.view.targets
    assert torch.allclose(seen.outputs, told.outputs(), atol=1e-5)
    if codec == "none":
        assert torch.allclose(case.view.others_bottom()(case.inputs), seen.cuts, atol=1e-5)
        known = case.view.leaked
        assert torch.allclose(case.view.others_bottom()(known.inputs), known.cuts, atol=1e-5)
    own = case.view.bottom()(seen.inputs)
    assert own.shape == (seen.rows, 10)
    assert case.view.threat.counterfactual == {Grant.OTHERS_BOTTOM}


@pytest.mark.parametrize(
    ("parties", "merge"),
    [(("bank", "shop"), "concat"), (("shop", "bank"), "max")],
)
def test_a_label_party_with_columns_knows_how_cuts_meet(parties, merge):
    """Both are as wide, so that halves the wrong way round would fit the top."""
    case = received_from_the_bank(trained(*parties, owner="shop", merge=merge, codec="none"))
    view = case.view
    victims, own = view.others_bottom()(case.inputs), view.bottom()(view.targets.inputs)
    found = view.top()(view.merge(victims, own))
    assert torch.allclose(found, view.targets.outputs, atol=1e-5)


def test_more_leaks_than_rows_are_refused(alone):
    with pytest.raises(TooFewRowsError, match="columns of 1000 rows"):
        received_from_the_bank(alone, leaks=1000)


@pytest.mark.parametrize("defense", ["layer_norm", "label_free"])
def test_answers_are_the_networks_where_the_label_party_has_columns(defense):
    """A defense stands around a feature party's bottom, and not around the label party's own."""
    victim = trained("bank", "shop", owner="shop", defense=defense)
    outputs = received_from_the_bank(victim).view.targets.outputs
    label = victim[1]["shop"]
    right = outputs.argmax(1) == label.labels[torch.from_numpy(label.split.test)]
    measured = victim[3].label.history[-1]["test_accuracy"]
    assert float(right.float().mean()) == pytest.approx(measured)
