"""What each attack is for: a case that is lost where that part of it is left out."""

import pytest
import torch
from torch import nn

from vfl.attacks import Evidence, Grant, Holdings, ThreatModel, View, make
from vfl.attacks.base import fit, through
from vfl.attacks.labels.mixmatch import mixed
from vfl.attacks.membership.likelihood_ratio import scaled_confidence
from vfl.attacks.scoring import accuracy, auc
from vfl.core.seeds import generator, scoped


def reached(view, truth, spec):
    """The accuracy of an attack with no more than it needs."""
    attack = make(spec)
    return accuracy(attack.run(view.only(attack.needs), generator(0, "draw")), truth)


def seen_by(who, holdings):
    grants = {
        Grant.INPUTS, Grant.BOTTOM, Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED, Grant.TOP_RECIPE,
        Grant.BOTTOM_RECIPE, Grant.OUTPUTS, Grant.LABELS, Grant.LEAKED_INPUTS, Grant.OTHERS_BOTTOM,
    }  # fmt: skip
    return View(ThreatModel(who, "inference", frozenset(grants)), 2, holdings)


def long_classes(rows, purpose):
    """Two classes side by side, each three times as long as the gap between them is wide."""
    labels = torch.arange(rows) % 2
    noise = torch.randn(rows, 2, generator=generator(0, purpose))
    return torch.stack([2 * (2 * labels - 1) + 0.4 * noise[:, 0], 1.5 * noise[:, 1]], 1), labels


def misleading():
    """One leaked row of each class, at opposite ends: the line between them is a wrong border."""
    known, labels = torch.tensor([[-2.0, 2.0], [2.0, -2.0]]), torch.tensor([0, 1])
    (further, _), (targets, truth) = long_classes(400, "further"), long_classes(400, "targets")
    held = Holdings(
        targets=Evidence(targets, targets),
        leaked=Evidence(known, known, labels),
        unlabelled=Evidence(further, further),
        bottom=nn.Identity,
        new_top=lambda width: nn.Linear(width, 2),
    )
    return seen_by("feature party", held), truth


@pytest.mark.parametrize(
    ("with_them", "without"),
    [
        ("self_training:scaler=none", "logistic:scaler=none"),
        ("model_completion:steps=600", "model_completion:steps=600,weight=0"),
    ],
)
def test_unlabelled_rows_show_where_the_border_is(with_them, without):
    view, truth = misleading()
    assert reached(view, truth, without) < 0.92
    assert reached(view, truth, with_them) > 0.99


def test_a_student_unlearns_what_its_teacher_did_not_know():
    """Inputs tell the classes apart badly, and what they err by stands in the cut as well."""

    def rows(count, purpose):
        labels = torch.arange(count) % 2
        sides, noise = 2 * labels - 1, torch.randn(count, 2, generator=generator(1, purpose))
        cuts = torch.stack([2 * sides + 0.4 * noise[:, 1], 2 * noise[:, 0]], 1)
        return sides[:, None] + noise[:, :1], cuts, labels

    inputs, cuts, truth = rows(400, "targets")
    held = Holdings(
        targets=Evidence(inputs, cuts),
        leaked=Evidence(*rows(4, "known")),
        unlabelled=Evidence(*rows(400, "further")[:2]),
    )
    view = seen_by("feature party", held)
    assert reached(view, truth, "label_propagation:at=inputs") < 0.9
    assert reached(view, truth, "teacher_student:rounds=0") < 0.9
    assert reached(view, truth, "teacher_student") > 0.96


def test_a_mixed_row_is_itself_for_the_most_part():
    """Rows and class shares are unit vectors, so that their shares can be read off."""
    rows = torch.eye(8)
    with scoped(0):
        for _ in range(20):
            inputs, wanted = mixed(rows, rows, 0.75)
            assert torch.equal(inputs, wanted)
            assert (inputs.diagonal() >= 0.5).all()
            assert torch.allclose(inputs.sum(1), torch.ones(8))


def test_a_row_is_compared_with_what_it_looks_like_to_others():
    """Most rows are easy: being sure of them says little of who was trained on."""
    draw = generator(0, "members")
    rows = torch.randn(600, 2, generator=draw) * torch.tensor([4.0, 1.0])
    labels, member = (rows[:, 0] > 0).long(), torch.arange(300) % 2 == 0
    with scoped(3):
        network = nn.Linear(2, 2)
    outputs = through(fit(network, rows[300:], labels[300:], 200, 0.01, draw), rows[:300])
    outputs[member, labels[:300][member]] += 3
    held = Holdings(
        targets=Evidence(rows[:300], None, labels[:300], outputs),
        leaked=Evidence(rows[300:], labels=labels[300:]),
        new_bottom=nn.Identity,
        new_top=lambda width: nn.Linear(width, 2),
    )
    attack = make("likelihood_ratio")
    found = attack.run(seen_by("outsider", held).only(attack.needs), generator(0, "draw"))
    assert auc(scaled_confidence(outputs, labels[:300]), member) < 0.75
    assert auc(found, member) > 0.9


def test_pixels_that_no_cut_tells_of_are_like_their_neighbours():
    """The bottom gives every other pixel of smooth pictures."""

    class Half(nn.Module):
        def forward(self, pictures):
            return pictures.flatten(1)[:, dark]

    indices, slope = torch.arange(8), torch.linspace(0, 1, 8)
    dark = ((indices[:, None] + indices) % 2 == 0).flatten()
    powers = [(one, other) for one in (0.5, 1.0, 2.0) for other in (0.5, 1.0, 2.0)]
    pictures = torch.stack([torch.outer(slope**a, slope.flip(0) ** b)[None] for a, b in powers])
    held = Holdings(targets=Evidence(cuts=Half()(pictures)), others_bottom=Half, shape=(1, 8, 8))

    def error(spec):
        attack = make(spec)
        found = attack.run(seen_by("label party", held).only(attack.needs), generator(0, "draw"))
        return (found - pictures).square().mean().item()

    assert error("white_box_inversion") < error("white_box_inversion:smooth=0") / 20
