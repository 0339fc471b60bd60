"""Means of a row's cuts: against counting, and against noise on real cuts."""

import pytest
import torch
from recorded_digits import Recorded, left

from vfl.attacks import Grant, Sent, make
from vfl.attacks.attribute_case import attribute_case
from vfl.attacks.averaging import mean_cuts
from vfl.attacks.case import attempt
from vfl.attacks.recorded_case import received_case, training_case
from vfl.errors import BadOptionError, NotGrantedError, UserError
from vfl.seeds import generator


def sent():
    """Row r of epoch e has the cut (r, e); row 2 is missing in epoch 3."""
    found = []
    for epoch, order in enumerate(([2, 0, 1], [0, 1, 2], [1, 0]), start=1):
        rows = torch.tensor(order)
        cuts = torch.stack([rows.float(), torch.full((len(rows),), float(epoch))], 1)
        found.append(Sent(epoch, epoch, rows, cuts))
    return found


def test_each_row_has_the_mean_of_its_own_cuts():
    assert mean_cuts(sent(), 3).tolist() == [[0.0, 2.0], [1.0, 2.0], [2.0, 1.5]]
    assert mean_cuts(sent(), 3, last=2).tolist() == [[0.0, 2.5], [1.0, 2.5], [2.0, 2.0]]


def test_a_row_without_a_cut_is_told():
    with pytest.raises(UserError, match="no recorded cut") as problem:
        mean_cuts(sent(), 3, last=1)
    assert problem.value.got == "1 of 3 rows without one"
    with pytest.raises(UserError):
        mean_cuts([], 3)


def test_it_needs_what_the_other_attack_needs_and_the_recording():
    assert make("averaging:of=logistic").needs == make("logistic").needs | {Grant.EPOCHS}
    assert make("averaging:of=gaussian_mixture,over=queries").goal == "clusters"
    assert {Grant.INPUTS, Grant.SNAPSHOTS} < make("averaging:over=snapshots").needs
    with pytest.raises(BadOptionError, match="reads none"):
        make("averaging:of=membership")


@pytest.fixture(scope="module")
def noisy():
    return Recorded("clipped_noise:norm=4,sigma=0.5", limit=700)


def test_a_label_party_reads_more_from_the_cuts_of_all_epochs(noisy):
    case = noisy.recalled()
    assert left(case, "inversion:steps=300") > 1
    assert left(case, "averaging:of=inversion:steps=300") < 0.9
    assert "label party, alone, in the training phase" in case.view.threat.sentence()


def test_it_reads_an_attribute_as_well(noisy):
    train = noisy.data["bank"].inputs[torch.from_numpy(noisy.data["bank"].split.train)]
    case = attribute_case(noisy.recalled(), train)
    single, several = (
        attempt(case, make(spec), generator(0)).value
        for spec in ("attribute", "averaging:of=attribute")
    )
    assert several > single + 0.1


def test_a_label_party_reads_more_from_queries_that_it_repeats(noisy):
    case = noisy.received()
    first, second = (one.cuts[one.rows.argsort()] for one in case.view.targets.sent[:2])
    assert not torch.equal(first, second)
    assert (
        left(case, "averaging:of=inversion:steps=300,over=queries")
        < 0.9
        < 1
        < left(case, "inversion:steps=300")
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
    once = noisy.of(received_case, 100, generator(0, "leak"), noisy.weights)
    for case, spec in (
        (once, "averaging:of=inversion:steps=300,over=queries"),
        (noisy.received(), "averaging:of=inversion:steps=300"),
        (noisy.recalled(), "averaging:of=inversion:steps=300,over=queries"),
    ):
        with pytest.raises(NotGrantedError):
            attempt(case, make(spec), generator(0))
