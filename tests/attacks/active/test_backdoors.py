"""Backdoors by a party that infers labels itself: what each infers, and what its trigger does."""

import numpy as np
import pytest
import torch

from vfl.attacks import Evidence, Holdings, ThreatModel, View
from vfl.attacks.active import Triggering, make_adversary
from vfl.attacks.active.rows import RowTable
from vfl.compression import StepContext
from vfl.core.errors import BadOptionError, DataError
from vfl.core.seeds import generator
from vfl.models import make_bottom

ROWS, CLASSES, COLUMNS, WIDTH = 90, 3, 6, 5
LABELS = torch.arange(ROWS) % CLASSES
DRAW = generator(0, "backdoors")
INPUTS = 2 * torch.eye(CLASSES, COLUMNS)[LABELS] + torch.randn(ROWS, COLUMNS, generator=DRAW) / 4


def begun(spec, known=(0, 1, 2, 3, 4, 5)):
    adversary, known = make_adversary(spec), torch.tensor(known)
    holdings = Holdings(
        targets=Evidence(INPUTS),
        leaked=Evidence(INPUTS[known], labels=LABELS[known]),
        new_bottom=lambda: make_bottom("mlp:hidden=8").build((COLUMNS,), WIDTH),
    )
    threat = ThreatModel("feature party", "training", adversary.holds, behaviour="malicious")
    adversary.begin(View(threat, CLASSES, holdings), generator(0, "begin"))
    return adversary


def at(step, rows):
    return StepContext(step, training=True, rows=np.asarray(rows))


def epoch(adversary, number, cuts, gradients):
    """One epoch of batches of 30; the batches that were fed and the cuts that were sent."""
    fed, sent = {}, {}
    for part, rows in enumerate(torch.arange(ROWS).split(30)):
        context = at(3 * number + part, rows.numpy())
        fed |= dict(zip(rows.tolist(), adversary.batch(INPUTS[rows], context), strict=True))
        there = adversary.cut(cuts[rows], context)
        sent |= dict(zip(rows.tolist(), there, strict=True))
        adversary.received("bank", gradients(rows, there), context)
    return fed, sent


def changed(fed, whole):
    return {row for row, values in fed.items() if not torch.equal(values, whole[row])}


def test_lfba_chooses_rows_whose_gradients_point_as_the_anchors_do():
    """Classes have directions of their own; lengths, which differ, do not matter."""
    adversary = begun("lfba:target=1,share=0.3,warmup=2,columns=2,value=9")
    directions = torch.randn(CLASSES, WIDTH, generator=DRAW)
    lengths = torch.rand(ROWS, 1, generator=DRAW) + 0.01

    def gradients(rows, sent):
        return directions[LABELS[rows]] * lengths[rows]

    cuts = torch.zeros(ROWS, WIDTH)
    for number in range(2):
        assert not changed(epoch(adversary, number, cuts, gradients)[0], INPUTS)
    fed, _ = epoch(adversary, 2, cuts, gradients)
    poisoned = changed(fed, INPUTS)
    assert len(poisoned) == 27
    assert {int(LABELS[row]) for row in poisoned} == {1}
    stamped = torch.stack([fed[row] for row in sorted(poisoned)])
    assert (stamped[:, -2:] == 9).all()
    # The other columns are those of rows of any class, not the poisoned rows' own.
    own = INPUTS[sorted(poisoned)]
    assert (stamped[:, :-2] != own[:, :-2]).any(1).float().mean() > 0.8


def test_villain_infers_by_swapping_and_adds_a_trigger_to_cuts():
    """A cut of class 1 in the place of another's doubles that row's gradient, unless it is 1."""
    spec = "villain:target=1,warmup=1,inferring=3,swaps=10,ratio=1,dropout=0,jitter=0"
    adversary = begun(f"{spec},share=0.8,strength=2", known=(0, 1, 2))
    cuts = 3 * torch.eye(CLASSES, WIDTH)[LABELS] + torch.rand(ROWS, WIDTH, generator=DRAW)

    def gradients(rows, sent):
        wrong = (sent[:, 1] > 2) & (LABELS[rows] != 1)
        return torch.where(wrong[:, None], 2.0, 1.0) * torch.ones(len(rows), WIDTH)

    assert not changed(epoch(adversary, 0, cuts, gradients)[1], cuts)
    for number in (1, 2):
        swapped = changed(epoch(adversary, number, cuts, gradients)[1], cuts)
        assert len(swapped) == 30
        assert swapped <= set(adversary._judged)
    assert adversary.inferred == set(range(1, ROWS, 3))

    for number in (3, 4):
        _, sent = epoch(adversary, number, cuts, gradients)
    assert changed(sent, cuts) == adversary.inferred
    deviations = cuts[1::3].std(0)
    units = deviations.topk(4).indices.sort().values
    trigger = torch.zeros(WIDTH)
    trigger[units] = torch.tensor([1.0, 1, -1, -1]) * 2 * deviations[units].mean()
    torch.testing.assert_close(sent[1] - cuts[1], trigger, atol=1e-6, rtol=0)
    in_use = Triggering(adversary).cut(cuts[:3], StepContext())
    torch.testing.assert_close(in_use, cuts[:3] + trigger)


def test_badvfl_labels_rows_and_puts_its_trigger_where_inputs_matter():
    """Columns 0 to 2 tell the classes; the others are noise."""
    adversary = begun("badvfl:target=2,warmup=2,share=1,columns=2,value=9", known=range(12))
    cuts = 3 * torch.eye(CLASSES, WIDTH)[LABELS] + torch.rand(ROWS, WIDTH, generator=DRAW)

    def gradients(rows, sent):
        return torch.zeros(len(rows), WIDTH)

    for number in range(2):
        assert not changed(epoch(adversary, number, cuts, gradients)[0], INPUTS)
    fed, _ = epoch(adversary, 2, cuts, gradients)
    poisoned = changed(fed, INPUTS)
    assert poisoned == set(range(2, ROWS, 3))
    for row in poisoned:
        (window,) = torch.nonzero(fed[row] == 9, as_tuple=True)
        assert window.tolist() in ([0, 1], [1, 2])
    marked = adversary.triggered(INPUTS)
    assert ((marked == 9).sum(1) == 2).all()


@pytest.mark.parametrize("name", ["villain", "badvfl", "lfba"])
def test_a_known_row_of_its_class_is_needed(name):
    with pytest.raises(DataError, match="none of the leaked rows"):
        begun(f"{name}:target=2", known=(0, 1))
    with pytest.raises(BadOptionError):
        make_adversary(f"{name}:target=-1")


def test_a_table_keeps_the_newest_vector_of_each_row():
    table = RowTable()
    table.record([5, 2], torch.tensor([[1.0], [2.0]]))
    table.record([2], torch.tensor([[3.0]]))
    assert table.rows == [5, 2]
    assert table.values.tolist() == [[1.0], [3.0]]
    assert table.of(7) is None
    assert table.seen(1, 2)
    assert not table.seen(2, 2)
    other = RowTable()
    other.load(table.state())
    assert (other.rows, other.values.tolist(), other.seen(2, 2)) == (
        table.rows,
        [[1.0], [3.0]],
        False,
    )
