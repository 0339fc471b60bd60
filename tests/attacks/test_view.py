"""An attacker reaches what it was granted, and nothing else."""

import pytest
import torch

from vfl.attacks import (
    Evidence,
    Grant,
    Holdings,
    RecordedExchange,
    SentCuts,
    ThreatModel,
    View,
)
from vfl.attacks.view import IN_TRAINING
from vfl.core.errors import NotGrantedError, UserError

ROWS, WIDTH = 6, 3


def holdings():
    rows = Evidence(
        torch.ones(ROWS, 2),
        torch.zeros(ROWS, WIDTH),
        torch.arange(ROWS),
        torch.ones(ROWS, 2),
        sent=lambda: [SentCuts(1, 1, torch.arange(ROWS), torch.zeros(ROWS, WIDTH))],
    )
    return Holdings(
        targets=rows,
        leaked=rows,
        unlabelled=rows,
        prior=torch.ones(2) / 2,
        bottom=lambda: torch.nn.Linear(2, WIDTH),
        new_bottom=lambda: torch.nn.Linear(2, WIDTH),
        new_top=lambda width: torch.nn.Linear(width, 2),
        top=lambda: torch.nn.Linear(WIDTH, 2),
        merge="sum",
        others_bottom=lambda: torch.nn.Linear(2, WIDTH),
        others_top=lambda: torch.nn.Linear(WIDTH, 2),
        snapshots=[lambda: torch.nn.Linear(2, WIDTH)],
        partners=[View(ThreatModel("feature party", "inference", frozenset()), 2, Holdings(rows))],
        exchanges=[],
        told="what a protocol tells",
        middle=lambda: torch.nn.Linear(WIDTH, WIDTH),
    )


REACHES = {
    Grant.INPUTS: lambda view: view.targets.inputs,
    Grant.CUTS: lambda view: view.targets.cuts,
    Grant.LABELS: lambda view: view.targets.labels,
    Grant.OUTPUTS: lambda view: view.targets.outputs,
    Grant.UNLABELLED: lambda view: view.unlabelled.rows,
    Grant.PRIOR: lambda view: view.prior,
    Grant.BOTTOM: lambda view: view.bottom(),
    Grant.BOTTOM_RECIPE: lambda view: view.new_bottom(),
    Grant.TOP_RECIPE: lambda view: view.new_top(WIDTH),
    Grant.TOP: lambda view: view.top(),
    Grant.OTHERS_BOTTOM: lambda view: view.others_bottom(),
    Grant.OTHERS_TOP: lambda view: view.others_top(),
    Grant.SNAPSHOTS: lambda view: view.snapshots[0](),
    Grant.PARTNERS: lambda view: view.partners[0],
    Grant.QUERIES: lambda view: view.targets.sent[0],
    Grant.PROTOCOL: lambda view: view.told,
    Grant.MIDDLE: lambda view: view.middle(),
}
#: Grants that share a door with others, or are of the training phase.
SHARED = {
    Grant.EPOCHS: lambda view: view.targets.sent[0],
    Grant.GRADIENTS: lambda view: view.exchanges,
    Grant.LEAKED: lambda view: view.leaked.labels,
    Grant.LEAKED_ATTRIBUTES: lambda view: view.leaked.labels,
    Grant.LEAKED_INPUTS: lambda view: view.leaked.inputs,
    Grant.AUXILIARY: lambda view: (view.leaked.inputs, view.leaked.labels),
}


def view(*grants, who="feature party", phase="inference"):
    return View(ThreatModel(who, phase, frozenset(grants)), 2, holdings())


@pytest.mark.parametrize("grant", REACHES)
def test_a_grant_opens_its_own_door_alone(grant):
    assert REACHES[grant](view(grant)) is not None
    others = [one for one in Grant if one != grant and one not in IN_TRAINING]
    with pytest.raises(NotGrantedError, match=str(grant)):
        REACHES[grant](view(*others))


def test_no_grant_opens_nothing():
    assert {*REACHES, *SHARED} == {*Grant}
    for grant, reach in SHARED.items():
        assert reach(view(grant, phase="training")) is not None
        with pytest.raises(NotGrantedError, match=str(grant)):
            reach(view())


def test_who_has_its_top_knows_how_cuts_meet():
    assert view(Grant.TOP).merge == "sum"
    with pytest.raises(NotGrantedError, match="its own top"):
        _ = view(Grant.CUTS, Grant.TOP_RECIPE).merge


def test_leaks_open_the_leaked_rows_and_no_others():
    seen = view(Grant.LEAKED, Grant.LEAKED_INPUTS)
    assert seen.leaked.labels is not None
    assert seen.leaked.inputs is not None
    for reach in (lambda: seen.targets.inputs, lambda: seen.targets.labels):
        with pytest.raises(NotGrantedError):
            reach()
    with pytest.raises(NotGrantedError, match="gradients"):
        _ = seen.exchanges


def test_an_attack_gets_no_more_than_it_says_it_needs():
    seen = view(Grant.CUTS, Grant.INPUTS).only({Grant.CUTS})
    assert seen.targets.cuts.shape == (ROWS, WIDTH)
    with pytest.raises(NotGrantedError):
        _ = seen.targets.inputs


def test_an_attack_that_needs_more_is_refused_before_it_runs():
    with pytest.raises(NotGrantedError) as problem:
        view(Grant.CUTS).only({Grant.CUTS, Grant.LEAKED})
    assert (problem.value.got, problem.value.want) == ("CUTS", "LEAKED")


def test_what_is_granted_and_not_there_is_said():
    empty = View(ThreatModel("feature party", "inference", frozenset(Grant) - IN_TRAINING), 2,
                 Holdings())  # fmt: skip
    with pytest.raises(NotGrantedError, match="does not contain a few leaked labels"):
        _ = empty.leaked


def test_a_view_shows_no_data():
    assert "tensor" not in repr(view(*REACHES)) + repr(holdings()) + repr(view(*REACHES).targets)


def test_what_no_such_party_has_is_counterfactual():
    own = ThreatModel("feature party", "training", frozenset({Grant.GRADIENTS, Grant.BOTTOM}))
    assert own.counterfactual == frozenset()
    white_box = ThreatModel(
        "label party", "inference", frozenset({Grant.CUTS, Grant.OTHERS_BOTTOM})
    )
    assert white_box.counterfactual == {Grant.OTHERS_BOTTOM}
    assert white_box.sentence() == (
        "A semi-honest label party, alone, in the inference phase, holding the cuts that "
        "travelled, and counterfactually the victim's bottom."
    )


def test_a_threat_that_contradicts_itself_is_refused():
    for grant in IN_TRAINING:
        with pytest.raises(UserError, match=f"{grant}: in the training phase only"):
            ThreatModel("feature party", "inference", frozenset({grant}))
    with pytest.raises(UserError, match="no training phase to record"):
        ThreatModel("feature party", "training", frozenset(), trained_by="owner")
    with pytest.raises(UserError, match="no such who"):
        ThreatModel("bank", "training", frozenset())


def test_labels_that_are_withheld_are_of_further_targets():
    """Each row keeps its columns, its messages and its exchanges, at its new place."""
    rows, leaked, hidden = 4, 3, torch.tensor([True, False, True])
    order = [0, 1, 2, 3, 4, 6, 5]  # where targets, hidden and kept leaked rows stand afterwards

    def group(start, stop, labels=None):
        names = torch.arange(start, stop)
        sent = [SentCuts(1, 1, torch.arange(stop - start), names[:, None].float())]
        return Evidence(
            names[:, None].float(), names[:, None].float(), labels,
            before=lambda: names[:, None].float(), sent=lambda: sent,
        )  # fmt: skip

    everyone = torch.arange(rows + leaked)
    exchange = RecordedExchange(1, 1, everyone, lambda: None, everyone[:, None].float())
    holdings = Holdings(
        group(0, rows), group(rows, rows + leaked, torch.tensor([0, 1, 1])), exchanges=[exchange]
    )
    grants = frozenset({Grant.INPUTS, Grant.BOTTOM, Grant.CUTS, Grant.LEAKED})
    grants |= {Grant.GRADIENTS, Grant.EPOCHS}
    view = View(ThreatModel("feature party", "training", grants), 2, holdings).withholding(hidden)
    for read in (
        lambda seen: seen.inputs, lambda seen: seen.cuts, lambda seen: seen.before,
        lambda seen: seen.transcript.mean(lambda one: one.cuts),
    ):  # fmt: skip
        found = torch.cat([read(view.targets), read(view.leaked)])[:, 0]
        assert found.tolist() == order
    assert view.leaked.labels.tolist() == [1]
    assert view.targets._evidence.labels is None
    assert view.transcript.mean(lambda one: one.gradients)[:, 0].tolist() == order
