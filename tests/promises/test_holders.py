"""What parties that hold shares, and those who see what comes of it, can learn."""

from dataclasses import replace

import numpy as np
import torch
from promise import BrokenPromiseError

from vfl.core.errors import PrivacyError
from vfl.mpc.many.members import LocalMembers
from vfl.mpc.secure_dpsgd import SecureSgd, shared_rows
from vfl.privacy.accountants import GaussianSteps, epsilon_by

#: The example of docs/secure_dpsgd.md.
TERMS = SecureSgd(
    rows=(300, 500),
    columns=8,
    classes=2,
    steps=20,
    batch_size=200,
    learning_rate=4.0,
    clip=1.0,
    noise=2.0,
)
DELTA = 1e-5


def of_the_row_in_most_batches(terms):
    """Its exact epsilon to whoever works out the batches from the terms, with all noise there."""
    batches = np.concatenate([terms.batch(step).numpy() for step in range(terms.steps)])
    most = int(np.bincount(batches).max())
    whole = terms.noise * 1.5**0.5  # each of m holders adds 3 / (2 m) of the variance
    return most, epsilon_by(GaussianSteps(whole, most), DELTA, "pld")


def test_the_stated_epsilon_counts_batches_that_everybody_can_work_out():
    """The epsilon of a training on shares holds against whoever knows its terms."""
    stated = TERMS.statement(DELTA).epsilon
    try:
        most, exact = of_the_row_in_most_batches(TERMS)
    except PrivacyError:  # without a key that outsiders lack, there are no batches
        terms = replace(TERMS, seed=0)
        stated = terms.statement(DELTA).epsilon
        most, exact = of_the_row_in_most_batches(terms)
    if exact > stated:
        raise BrokenPromiseError(
            f"stated epsilon {stated:.2f}; a row is in {most} of {TERMS.steps} public batches, "
            f"and its exact epsilon is {exact:.2f}"
        )


def test_the_dealer_cannot_say_whose_rows_a_batch_has():
    """The dealer, who is told which positions a batch has, does not know whose rows these are."""
    terms = replace(TERMS, rows=(20, 20), columns=1, batch_size=10)
    inputs = torch.arange(1, 41).double()[:, None] / 16
    parts = [(inputs[:20], torch.zeros(20)), (inputs[20:], torch.zeros(20)), None]

    def program(member):
        return member.reveal(shared_rows(member, terms, parts[member.role]).inputs, "rows")

    with LocalMembers(2, timeout_s=60) as members:
        (found, *_) = members.run(program)
    assert torch.allclose(found[:, 0].sort().values, inputs[:, 0], atol=1e-4)
    named = int(torch.isclose(found[:, 0], inputs[:, 0], atol=1e-4).sum())
    if named > 10:  # of a random order one on average
        raise BrokenPromiseError(f"the dealer names the row at {named} of 40 positions")
