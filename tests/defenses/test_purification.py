"""VFLIP, CoPur and votes of subspaces: which party is flagged, and what is read in its place."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from vfl.compression import INFERENCE, StepContext
from vfl.config import Experiment
from vfl.core.errors import SpecError
from vfl.core.seeds import generator, scoped
from vfl.datasets import PartyData, Split
from vfl.defenses import make
from vfl.defenses.purification import flagged_share
from vfl.training.local import LocalSession

PARTIES, UNITS = 4, 3
TRAINING = StepContext(training=True)


def together(rows, purpose="rows"):
    """Cuts of parties that see one hidden number each row, so that each tells of the others."""
    draw = generator(0, "purification", purpose)
    hidden = torch.randn(rows, 2, generator=draw)
    maps = torch.randn(2, PARTIES * UNITS, generator=generator(0, "maps"))
    noise = 0.05 * torch.randn(rows, PARTIES * UNITS, generator=draw)
    return torch.tanh(hidden @ maps) + noise


@cache
def trained(spec, steps=250):
    """The wrapped top of a defense whose networks have learned how cuts go together."""
    with scoped(0):
        defense = make(spec)
        defense.merged([UNITS] * PARTIES)
        top = defense.wrap_top(nn.Identity(), PARTIES * UNITS).train()
        optimizer = torch.optim.Adam(top.parameters(), lr=0.005)
        cuts = together(512)
        for step in range(steps):
            rows = cuts[(torch.arange(64) + 64 * step) % len(cuts)]
            outputs = top(rows)
            optimizer.zero_grad()
            defense.loss({}, torch.zeros(64), outputs, TRAINING).backward()
            optimizer.step()
    return top.eval()


def with_party_of_another_row(cuts, party):
    mixed = cuts.reshape(len(cuts), PARTIES, UNITS).clone()
    mixed[:, party] = mixed[:, party].roll(1, 0)
    return mixed.reshape(len(cuts), -1)


def error(found, cuts):
    return (found - cuts).square().mean().item()


@pytest.mark.parametrize("spec", ["vflip:hidden=32", "copur:hidden=32,code=3"])
def test_a_party_that_does_not_fit_is_written_anew(spec):
    top, cuts = trained(spec), together(200, "test")
    with torch.no_grad():
        mixed = with_party_of_another_row(cuts, 2)
        assert error(top(mixed), cuts) < 0.6 * error(mixed, cuts)
        assert error(top(cuts), cuts) < 0.1


def test_votes_are_counted_as_by_a_loop():
    top, cuts = trained("vflip:hidden=32"), together(60, "test")
    norm = top.scale
    mixed = with_party_of_another_row(cuts, 1)
    rows = (mixed - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    flagged = top.flagged(rows)
    for row in range(60):
        for judged in range(PARTIES):
            votes = 0
            for shown in set(range(PARTIES)) - {judged}:
                alone = torch.zeros(PARTIES, UNITS)
                alone[shown] = rows[row].reshape(PARTIES, UNITS)[shown]
                with torch.no_grad():
                    written = top.network(alone.reshape(1, -1)).reshape(PARTIES, UNITS)
                far = (written[judged] - rows[row].reshape(PARTIES, UNITS)[judged]).norm()
                mean = top.means[judged, shown]
                spread = (top.squares[judged, shown] - mean**2).sqrt()
                votes += bool(far > mean + 2 * spread)
            assert bool(flagged[row, judged]) == (votes >= 2)
    assert flagged[:, 1].float().mean() > 5 * flagged[:, [0, 2, 3]].float().mean()


def test_flags_are_counted_by_party_over_all_predictions():
    top, cuts = trained("vflip:hidden=32"), together(60, "test")
    assert flagged_share(nn.Identity(), 0) is None
    norm = top.scale
    rows = (cuts - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    wanted = top.flagged(rows).float().mean(0)
    top.rows_judged, top.flags = 0, torch.zeros(PARTIES, dtype=torch.int64)
    with torch.no_grad():
        for part in cuts.split(25):
            top(part)
    found = [flagged_share(nn.ModuleDict({"top": top}), party) for party in range(PARTIES)]
    assert found == pytest.approx(wanted.tolist())


def test_rows_without_a_flag_are_read_as_they_came():
    top, cuts = trained("vflip:hidden=32"), together(60, "test")
    norm = top.scale
    rows = (cuts - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    calm = ~top.flagged(rows).any(1)
    assert calm.float().mean() > 0.7
    with torch.no_grad():
        assert torch.equal(top(cuts)[calm], cuts[calm])


def test_networks_of_a_defense_do_not_teach_the_bottoms():
    defense = make("vflip")
    defense.merged([2, 2, 2])
    top = defense.wrap_top(nn.Linear(6, 2), 6).train()
    cut = torch.randn(8, 6, generator=generator(0, "cut")).requires_grad_()
    outputs = top(cut)
    defense.loss({}, torch.zeros(8), outputs, TRAINING).backward()
    assert cut.grad is None
    assert defense.loss({}, torch.zeros(8), outputs, TRAINING) is None


def voting(spec="subspace_votes:views=5,rows=256", steps=40):
    """A top whose answer is the sign of the first unit, after some training batches."""
    with scoped(0):
        defense = make(spec)
        defense.merged([UNITS] * PARTIES)
        last = nn.Linear(PARTIES * UNITS, 1)
        last.weight.data.zero_()[0, 0] = 1
        top = defense.wrap_top(last, PARTIES * UNITS).train()
        cuts = together(512)
        for step in range(steps):
            top(cuts[(torch.arange(64) + 64 * step) % len(cuts)])
    return top.eval(), cuts


def test_views_vote_as_in_a_loop():
    top, cuts = voting()
    rows = cuts[:40].clone().reshape(40, PARTIES, UNITS)
    rows[:20, 2] += 10
    values = top.standardised(rows.flatten(1))
    answers = (rows[:, 0, 0] > 0).long()
    flagged = top.flagged(values, answers)
    for row in range(40):
        known = top.known[top.answers_of_known == answers[row]].reshape(-1, PARTIES, UNITS)
        for judged in range(PARTIES):
            votes = 0
            for view in top.views:
                usual = (known[:, judged] @ view).numpy()
                centre = np.quantile(usual, 0.5, axis=0, method="lower")
                away = np.linalg.norm(usual - centre, axis=1)
                middle = np.quantile(away, 0.5, method="lower")
                spread = 1.4826 * np.quantile(abs(away - middle), 0.5, method="lower")
                own = (values[row].reshape(PARTIES, UNITS)[judged] @ view).numpy()
                votes += np.linalg.norm(own - centre) > middle + 4 * spread
            assert bool(flagged[row, judged]) == (votes >= 3)
    assert flagged[:20, 2].all()
    assert flagged[20:].float().mean() < 0.05


def test_a_flagged_row_teaches_nothing_and_is_answered_without_its_party():
    top, cuts = voting()
    rows = cuts[:20].clone()
    rows[:5, 2 * UNITS : 3 * UNITS] += 10
    mean = torch.where(torch.arange(20)[:, None] < 5, top.moments()[0], rows)
    with torch.no_grad():
        found = top(rows)
    assert torch.equal(found, top.top(rows)), "the answer reads another party alone"
    top.top.weight.data[0, 2 * UNITS] = 0.01  # now it reads the flagged party too
    with torch.no_grad():
        found = top(rows)
        rows[:5, 2 * UNITS : 3 * UNITS] = mean[:5, 2 * UNITS : 3 * UNITS]
        torch.testing.assert_close(found, top.top(rows))
    assert flagged_share(top, 2) == pytest.approx(5 / 20, abs=0.06)
    poisoned = cuts[:20].clone()
    poisoned[:5, 2 * UNITS : 3 * UNITS] += 10
    poisoned.requires_grad_()
    top.train()(poisoned).sum().backward()
    assert (poisoned.grad[:5] == 0).all()
    assert (poisoned.grad[5:, 0] != 0).float().mean() > 0.8


@pytest.mark.parametrize(
    ("spec", "widths"),
    [
        *[("copur", [3, 5]), ("copur", [8]), ("layer_norm+vflip", [4, 4])],
        ("subspace_votes", [8]),
    ],
)
def test_a_merged_cut_without_enough_equal_cuts_is_refused(spec, widths):
    with pytest.raises(SpecError, match="must be concatenated") as refused:
        make(spec).merged(widths)
    assert ", ".join(map(str, widths)) in refused.value.got


@pytest.mark.parametrize("merge", ["concat", "sum"])
def test_a_training_tells_the_number_of_cuts(merge):
    """The label party's own cut counts; a sum leaves no party's cut to compare."""
    party, rows = {"width": 4, "bottom": "mlp:hidden=4"}, torch.randn(40, 2, generator=generator(0))
    experiment = Experiment.model_validate(
        {
            "parties": {"bank": party, "shop": party, "lender": party},
            "label": {"party": "lender"},
            "defense": "layer_norm+vflip",
            "merge": merge,
            "train": {"epochs": 1, "batch_size": 20},
        }
    )
    split = Split(np.arange(40), np.arange(0), np.arange(0))
    data = {name: PartyData(name, rows, None, None, split, b"rows") for name in ("bank", "shop")}
    data["lender"] = PartyData("lender", rows, torch.arange(40) % 2, (0, 1), split, b"rows")
    if merge == "sum":
        with pytest.raises(SpecError, match="concatenated"):
            LocalSession(experiment, data, outputs=2)
        return
    weights = LocalSession(experiment, data, outputs=2).run().weights()["lender"]
    assert weights["top.means"].shape == (3, 3)


def test_a_search_without_steps_is_the_autoencoder():
    top, cuts = trained("copur:hidden=32,code=3,steps=0", steps=30), together(9, "test")
    norm = top.scale
    deviation = (norm.running_var + norm.eps).sqrt()
    with torch.no_grad():
        code = top.encoder((cuts - norm.running_mean) / deviation)
        wanted = top.decoder(code) * deviation + norm.running_mean
        torch.testing.assert_close(top(cuts), wanted)
        assert torch.equal(make("copur").logits(cuts, INFERENCE), cuts)
