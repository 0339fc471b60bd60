"""Two parties, and a dealer who is gone when they begin, against the contract of holders."""

import torch

from vfl.llm.two_party import Form, LocalRoles
from vfl.mpc.rules import MODES
from vfl.testing import HolderContract, Protocol


def draw(*shape, seed, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


WEIGHT = draw(4, 20, seed=4, scale=0.3)
ASKED = draw(8, 4, seed=5)


def prediction(party, note):
    own = (WEIGHT,) if party.role == 0 else ()
    constant = party.constant("layer", tuple(WEIGHT.shape), 16, *own)

    def program(role):
        values = ASKED if role.role == 1 else None
        product = role.multiply(role.question(ASKED.shape, values, 14, 40, "values"), constant)
        return role.show_all(role.apply(product, torch.relu, 14, 40, "relu", "elements"), "y")

    material = party.prepare(program)
    return None if party.role == 2 else party.answer(program, material)


def two(mode):
    return Protocol(
        lambda timeout_s: LocalRoles(Form(mode), {}, timeout_s),
        prediction,
        (ASKED @ WEIGHT).relu(),
        tolerance=0.05,
    )


PROTOCOLS = {mode: two(mode) for mode in MODES}


class TestProtocols(HolderContract):
    protocols = PROTOCOLS
