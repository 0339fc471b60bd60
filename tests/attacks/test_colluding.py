"""Parties that collude read more than one alone, and one alone reaches nothing of the others'."""

import pytest
import torch

from vfl.attacks import Grant, ThreatModel, make
from vfl.attacks.case import attempt
from vfl.attacks.features import features
from vfl.attacks.summed_case import summed_case
from vfl.attacks.victim import Victim
from vfl.config import Experiment
from vfl.datasets import load_bundled
from vfl.errors import BadOptionError, NotGrantedError, TooFewRowsError, UserError
from vfl.local import LocalSession
from vfl.seeds import generator

PARTIES = ("bank", "shop", "post")


def trained(parties, **changes):
    data = load_bundled("digits", parties, 0, "lender", limit=900, validation=0.3, flatten=True)
    settings = {
        "parties": {name: {"width": 12, "bottom": "mlp:hidden=32"} for name in parties},
        "label": {"party": "lender", "top": "linear"},
        "train": {"epochs": 15, "batch_rows": 32, "learning_rate": 0.005},
    }
    experiment = Experiment.model_validate(settings | changes)
    session = LocalSession(experiment, data, outputs=10).run()
    return experiment, data, session.weights()


@pytest.fixture(scope="module")
def victims():
    experiment, data, weights = trained(PARTIES)
    return [Victim(experiment, data, name, weights[name]) for name in PARTIES]


def together(victims, k=3):
    own, *others = victims
    return own.case(k, generator(0, "leak"), partners=others)


@pytest.fixture(scope="module")
def summed():
    return trained(PARTIES[:2], secure="sum", merge="sum")


def of_sums(summed, partners, leaks=200):
    experiment, data, weights = summed
    draw = generator(0, "leak")
    return summed_case(experiment, data, "bank", partners, leaks, draw, weights)


@pytest.mark.parametrize("spec", ["logistic", "kmeans", "fine_tuning", "teacher_student"])
def test_feature_parties_together_read_more_labels(victims, spec):
    case = together(victims)
    alone, pooled = (
        attempt(case, make(one), generator(0)).value for one in (spec, f"pooled:of={spec}")
    )
    assert pooled > alone + 0.05


def test_one_alone_reaches_nothing_of_the_others(victims):
    alone = victims[0].case(3, generator(0, "leak"))
    with pytest.raises(NotGrantedError, match="what its partners hold"):
        _ = alone.view.partners
    with pytest.raises(NotGrantedError):
        attempt(alone, make("pooled:of=logistic"), generator(0))
    case = together(victims)
    with pytest.raises(NotGrantedError):
        _ = case.view.only(make("logistic").needs).partners
    assert case.view.only(make("logistic").needs).threat.colluding == ()


def test_partners_hold_the_same_rows_and_give_what_is_asked_for(victims):
    attack = make("pooled:of=logistic")
    case = together(victims)
    own, partners = case.view, case.view.only(attack.needs).partners
    assert len(partners) == 2
    for victim, partner in zip(victims[1:], partners, strict=True):
        same = victim.case(3, generator(0, "leak")).view
        assert torch.equal(partner.targets.cuts, same.targets.cuts)
        assert torch.equal(partner.leaked.labels, own.leaked.labels)
        with pytest.raises(NotGrantedError):
            partner.bottom()


@pytest.mark.parametrize("layer", ["bottom", "learned", "before"])
def test_layers_of_bottoms_together_are_those_apart(victims, layer):
    case = together(victims)
    views = [case.view, *case.view.partners]
    wanted = torch.cat([features(one, one.targets, layer) for one in views], 1)
    found = []

    class Look(type(make("logistic"))):
        def run(self, view, draw):
            found.append(features(view, view.targets, layer))
            return torch.zeros(view.targets.rows, view.classes)

    attack = make("pooled:of=logistic")
    attack.inner = Look(at=layer)
    attack.run(case.view, generator(0))
    assert torch.allclose(found[0], wanted, atol=1e-5)


def test_who_colluded_is_told(victims):
    told = together(victims).view.threat.sentence()
    assert told.startswith("A semi-honest feature party, together with shop and post, in the")
    assert told.endswith("and what its partners hold.")
    with pytest.raises(UserError, match="does not collude"):
        ThreatModel("feature party", "inference", frozenset({Grant.CUTS}), colluding=("shop",))


def test_a_label_party_reads_more_with_all_but_one(summed):
    case = of_sums(summed, ["shop"])
    scores = [
        attempt(case, make(spec), generator(0))
        for spec in ("inversion:steps=400", "subtraction:of=inversion:steps=400")
    ]
    alone, colluding = (one.value / one.guess for one in scores)
    assert colluding < alone - 0.1


def test_what_is_left_of_the_sum_is_the_cut_to_the_last_bit(summed):
    experiment, data, weights = summed
    case = of_sums(summed, ["shop"])
    left = case.view.targets.cuts - case.view.partners[0].targets.cuts
    test = torch.from_numpy(data["bank"].split.test)
    own = Victim(experiment, data, "bank", weights["bank"]).cuts(test)
    assert (left - own).abs().max() <= 2**-16
    assert (case.view.targets.cuts - own).abs().max() > 1


def test_a_label_party_alone_has_no_partner(summed):
    case = of_sums(summed, [])
    with pytest.raises(NotGrantedError, match="what its partners hold"):
        attempt(case, make("subtraction"), generator(0))
    assert "alone" in case.view.threat.sentence()
    with pytest.raises(TooFewRowsError, match="1000 rows of columns"):
        of_sums(summed, [], leaks=1000)


def test_where_every_cut_is_seen_there_is_nothing_to_subtract(summed):
    experiment, data, weights = summed
    plain = experiment.model_copy(update={"secure": "none"})
    with pytest.raises(UserError, match="the label party sees every cut"):
        of_sums((plain, data, weights), ["shop"])
    with pytest.raises(BadOptionError, match="reads none"):
        make("subtraction:of=membership")


@pytest.mark.parametrize("spec", ["averaging:of=principal", "pooled:of=principal"])
def test_what_the_attack_inside_refuses_is_refused(spec):
    with pytest.raises(UserError, match="two classes apart"):
        make(spec).check(10, 8)
