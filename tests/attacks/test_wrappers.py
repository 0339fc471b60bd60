"""Means of a row's cuts: against counting, and against noise on real cuts."""

import pytest
import torch
from recorded_digits import Recorded, left

from vfl.attacks import Grant, SentCuts, ThreatModel, Transcript, make
from vfl.attacks.cases import TrainedParts, Victim, received_case, summed_case, training_case
from vfl.attacks.scoring import attempt
from vfl.attacks.wrappers import mean_cuts
from vfl.config import Experiment
from vfl.core.errors import BadOptionError, NotGrantedError, TooFewRowsError, UserError
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession


def sent():
    """Row r of epoch e has the cut (r, e); row 2 is missing in epoch 3."""
    found = []
    for epoch, order in enumerate(([2, 0, 1], [0, 1, 2], [1, 0]), start=1):
        rows = torch.tensor(order)
        cuts = torch.stack([rows.float(), torch.full((len(rows),), float(epoch))], 1)
        found.append(SentCuts(epoch, epoch, rows, cuts))
    return found


def test_each_row_has_the_mean_of_its_own_cuts():
    assert mean_cuts(Transcript(3, sent())).tolist() == [[0.0, 2.0], [1.0, 2.0], [2.0, 1.5]]
    assert mean_cuts(Transcript(3, sent()), last=2).tolist() == [[0.0, 2.5], [1.0, 2.5], [2.0, 2.0]]


def test_a_row_without_a_cut_is_told():
    with pytest.raises(UserError, match="no recorded cut") as problem:
        mean_cuts(Transcript(3, sent()), last=1)
    assert problem.value.got == "1 of 3 rows without one"
    with pytest.raises(UserError):
        mean_cuts(Transcript(3, []))


@pytest.fixture(scope="module")
def noisy():
    return Recorded("clipped_noise:norm=4,sigma=0.5", limit=700)


def test_a_label_party_reads_more_from_the_cuts_of_all_epochs(noisy):
    case = noisy.recalled()
    assert left(case, "inversion:steps=150") > 1
    assert left(case, "averaging:of=inversion:steps=150") < 0.9
    assert "label party, alone, in the training phase" in case.view.threat.sentence()


def test_a_label_party_reads_more_from_queries_that_it_repeats(noisy):
    case = noisy.received()
    first, second = (one.cuts[one.rows.argsort()] for one in case.view.targets.sent[:2])
    assert not torch.equal(first, second)
    assert (
        left(case, "averaging:of=inversion:steps=150,over=queries")
        < 0.9
        < 1
        < left(case, "inversion:steps=150")
    )


def test_a_feature_party_averages_its_own_noisy_cuts(noisy):
    case = noisy.of(training_case, 1, generator(0, "leak"))
    several = attempt(case, make("averaging:of=kmeans"), generator(0)).value
    assert several > 0.75
    fitted = attempt(case, make("averaging:of=logistic,last=10"), generator(0)).value
    assert fitted > 0.5
    messages = case.view.leaked.sent
    assert {int(row) for one in messages for row in one.rows} == set(range(10))
    heard = {one.epoch: 0 for one in messages}
    assert len(heard) == 20


def test_a_feature_party_averages_the_bottoms_it_kept(noisy):
    case = noisy.victims[0].case(1, generator(0, "leak"), snapshots=noisy.kept)
    seen = case.view
    apart = [one()(seen.targets.inputs) for one in seen.snapshots]
    assert torch.allclose(seen.bottom()(seen.targets.inputs), apart[-1])
    attack = make("averaging:of=kmeans,over=snapshots,last=3")
    found = attack.run(seen.only(attack.needs), generator(0))
    wanted = make("kmeans").run(
        seen.with_cuts({"targets": torch.stack(apart[-3:]).mean(0).detach()}), generator(0)
    )
    assert torch.equal(found, wanted)
    with pytest.raises(NotGrantedError, match="bottom after every epoch"):
        attempt(noisy.victims[0].case(1, generator(0, "leak")), attack, generator(0))


def test_who_keeps_nothing_averages_nothing(noisy):
    once = received_case(noisy.trained(), noisy.frames, noisy.party, 100, generator(0, "leak"))
    for case, spec in (
        (once, "averaging:of=inversion:steps=150,over=queries"),
        (noisy.received(), "averaging:of=inversion:steps=150"),
        (noisy.recalled(), "averaging:of=inversion:steps=150,over=queries"),
    ):
        with pytest.raises(NotGrantedError):
            attempt(case, make(spec), generator(0))


PARTIES = ("bank", "shop", "post")


def trained(parties, **changes):
    data = load_bundled(
        "digits", parties, "lender", Dealing(0, validation=0.3, limit=900), flatten=True
    )
    settings = {
        "parties": {name: {"width": 12, "bottom": "mlp:hidden=32"} for name in parties},
        "label": {"party": "lender", "top": "linear"},
        "train": {"epochs": 15, "batch_size": 32, "learning_rate": 0.005},
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
    return summed_case(TrainedParts(*summed), "bank", partners, leaks, generator(0, "leak"))


@pytest.mark.parametrize("spec", ["logistic", "kmeans"])
def test_feature_parties_together_read_more_labels(victims, spec):
    case = together(victims)
    alone, pooled = (
        attempt(case, make(one), generator(0)).value for one in (spec, f"pooled:of={spec}")
    )
    assert pooled > alone + 0.05


def test_one_alone_reaches_nothing_of_the_others(victims):
    alone = victims[0].case(3, generator(0, "leak"))
    with pytest.raises(NotGrantedError, match="the holdings of its partners"):
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


def test_who_colluded_is_told(victims):
    told = together(victims).view.threat.sentence()
    assert told.startswith("A semi-honest feature party, together with shop and post, in the")
    assert told.endswith("and the holdings of its partners.")
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
    with pytest.raises(NotGrantedError, match="the holdings of its partners"):
        attempt(case, make("subtraction"), generator(0))
    assert "alone" in case.view.threat.sentence()
    with pytest.raises(TooFewRowsError, match="columns of 1000 rows"):
        of_sums(summed, [], leaks=1000)


def test_where_every_cut_is_seen_there_is_nothing_to_subtract(summed):
    experiment, data, weights = summed
    plain = experiment.model_copy(update={"secure": "none"})
    with pytest.raises(UserError, match="the label party sees every cut"):
        of_sums((plain, data, weights), ["shop"])
    with pytest.raises(BadOptionError, match="does not use cuts"):
        make("subtraction:of=membership")


@pytest.mark.parametrize("spec", ["averaging:of=principal", "pooled:of=principal"])
def test_what_the_attack_inside_refuses_is_refused(spec):
    with pytest.raises(UserError, match="two classes only"):
        make(spec).check(10, 8)
