"""Evidence by row over all messages of a link."""

import pytest
import torch

from vfl.attacks import SentCuts, Transcript
from vfl.core.seeds import generator

ROWS, WIDTH = 7, 3


def messages(epochs=3, batch=3):
    draw, found = generator(0, "messages"), []
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(ROWS, generator=draw)[:-1].split(batch):  # a row is left out
            cuts = torch.randn(len(rows), WIDTH, generator=draw)
            found.append(SentCuts(len(found), epoch, rows, cuts))
    return found


def mean_of(sent, row):
    own = [one.cuts[i] for one in sent for i, of in enumerate(one.rows.tolist()) if of == row]
    return torch.stack(own).mean(0) if own else torch.zeros(WIDTH)


@pytest.mark.parametrize("rows", [ROWS, 4])
def test_the_mean_of_a_row_is_over_every_message_that_names_it(rows):
    sent = messages()
    seen = Transcript(rows, sent)
    found = seen.mean(lambda one: one.cuts)
    assert torch.allclose(found, torch.stack([mean_of(sent, row) for row in range(rows)]))
    named = torch.cat([one.rows for one in sent]).bincount(minlength=ROWS)
    assert seen.times.tolist() == named[:rows].tolist()


def test_every_epoch_stands_by_itself():
    sent = messages()
    found = Transcript(ROWS, sent).by_epoch(lambda one: one.cuts)
    for epoch in (1, 2, 3):
        own = [one for one in sent if one.epoch == epoch]
        expected = torch.stack([mean_of(own, row) for row in range(ROWS)])
        assert torch.allclose(found[:, epoch - 1], expected)


def test_epochs_are_taken_from_either_end():
    seen = Transcript(ROWS, messages())
    assert seen.first(2).epochs == [1, 2]
    assert seen.last(1).epochs == [3]
    assert seen.first(0).epochs == seen.last(0).epochs == seen.epochs == [1, 2, 3]
