"""Two parties, and a dealer who is gone when they begin, against the contract of holders."""

import torch

from vfl.llm.private_decoder import mixture, scores_of, softmax
from vfl.llm.two_party import Form, Growing, LocalRoles
from vfl.llm.weights import LayerShape
from vfl.mpc.rules import MODES
from vfl.testing import HolderContract, Protocol


def draw(*shape, seed, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


WEIGHT = draw(4, 20, seed=4, scale=0.3)
ASKED = draw(8, 4, seed=5)


#: Of two steps of attention: keys, queries and values of two heads that share a group.
STEPS = [tuple(draw(heads, 1, 4, seed=10 * step + heads) for heads in (1, 2, 3)) for step in (1, 2)]
STEPS = [(keys, queries, more[:1]) for keys, queries, more in STEPS]
KEYS, VALUES = (torch.cat([step[place] for step in STEPS], 1) for place in (0, 2))
MIXED = mixture(VALUES, torch.softmax(scores_of(KEYS, STEPS[-1][1]), -1))


def asked_of(constants, steps):
    """What a party does in both phases: P0's constants, then steps on what P1 asks."""

    def both(party, note):
        kept = {
            name: party.constant(
                LayerShape(name, tuple(each.shape), 16), *([each] if party.role == 0 else [])
            )
            for name, each in constants.items()
        }
        material = party.prepare(lambda role: steps(role, kept))
        return None if party.role == 2 else party.answer(lambda role: steps(role, kept), material)

    return both


def question(role, values, bits, ring):
    return role.question(values.shape, values if role.role == 1 else None, bits, ring, "values")


def prediction(role, kept):
    product = role.multiply(question(role, ASKED, 14, 40), kept["layer"])
    return role.show_all(role.apply(product, torch.relu, 14, 40, "relu", "elements"), "y")


def choice(role, kept):
    scores = role.multiply(question(role, ASKED, 14, 40), kept["layer"])
    found = role.choose(scores, lambda row: int(row.argmax()))
    return torch.tensor(found) if role.role == 1 and not role.offline else None


def mix(role, kept):
    caches = Growing(), Growing()

    def known(values, ring):
        flat = role.multiply(question(role, values.reshape(1, -1), 8, ring), kept[str(len(values))])
        return flat.map(lambda share: share.reshape(values.shape)).dropped(16)

    for count, step in enumerate(STEPS, 1):
        k, q, v = (known(each, ring) for each, ring in zip(step, (56, 56, 58), strict=True))
        scores = role.multiply_growing(caches[0], k, q, scores_of, (2, 1, count), (caches[1], v))
        flat = scores.map(lambda share, n=count: share.reshape(2, n))
        mixed = role.mix(flat, softmax, 12, "attention", caches[1], v, mixture, 8, 11)
    return role.show_all(mixed, "mixture")


def two(mode, constants, steps, result, tolerance):
    return Protocol(
        lambda timeout_s: LocalRoles(Form(mode), {}, timeout_s),
        asked_of(constants, steps),
        result,
        tolerance=tolerance,
    )


LAYER = {"layer": WEIGHT}
EYES = {str(heads): torch.eye(4 * heads, dtype=torch.float64) for heads in (1, 2)}


PROTOCOLS = {
    **{mode: two(mode, LAYER, prediction, (ASKED @ WEIGHT).relu(), 0.05) for mode in MODES},
    **{
        f"choose, {mode}": two(mode, LAYER, choice, (ASKED @ WEIGHT).argmax(1), 0.0)
        for mode in MODES
    },
}


class TestProtocols(HolderContract):
    protocols = PROTOCOLS


class TestMix(HolderContract):
    protocols = {"mix": two("fast", EYES, mix, MIXED, 0.03)}  # noqa: RUF012
    #: A lie of the right form is not found; predictions say so in a tenth of the messages.
    test_well_formed_false_message_is_detected_by_macs = None
