"""Threads of a party: one unless asked, and more only where its own model gains by them."""

import pytest
import torch
from torch import nn

from vfl.config.party_file import PartyFile
from vfl.session.threads import fastest, step_of, use_threads


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("seconds", "most", "best"),
    [
        ({1: 8.0, 2: 4.5, 4: 3.0, 8: 2.9}, 8, 4),
        ({1: 8.0, 2: 7.9}, 16, 1),  # a small model
        ({1: 8.0, 2: 90.0}, 16, 1),  # other programs use the cores
        ({1: 8.0, 2: 4.0}, 3, 2),
        ({1: 8.0}, 1, 1),
    ],
)
def test_more_threads_are_used_only_where_each_doubling_is_worth_it(seconds, most, best):
    now = 0.0

    def work():
        nonlocal now
        now += seconds[torch.get_num_threads()]

    assert fastest(work, most, lambda: now) == best


def test_a_party_uses_one_thread_unless_its_file_names_more():
    file = {"party": "bank", "data": {"source": "a.csv", "id": "i"}}
    assert use_threads(PartyFile(**file).threads) == torch.get_num_threads() == 1
    assert use_threads(PartyFile(**file, threads=2).threads) == torch.get_num_threads() == 2


def test_a_trial_changes_no_random_draw():
    state = torch.get_rng_state()
    step_of(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout()), 5, (3,))()
    step_of(nn.Identity, 5, (3,))()
    assert torch.equal(torch.get_rng_state(), state)
