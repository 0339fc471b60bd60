"""The thesis' float sharing: what it computes, to the byte, and that nobody has it by accident."""

import math

import pytest
import torch
import torch.nn.functional as F

from vfl.config.toml import check
from vfl.core.errors import BadOptionError, ConfigError, InsecureWarning
from vfl.core.frame import HEADER_BYTES
from vfl.llm.as_printed import SCALE, normal
from vfl.llm.file import LlmTerms
from vfl.llm.two_party import Form, LocalRoles
from vfl.models.decoder import Decoder, DecoderShape
from vfl.mpc import private
from vfl.mpc.stream import PadStream

FLOATS = "ignore:float sharing is insecure"
LAYOUTS = [
    {},
    {"positions": "rotary", "norm": "rms", "mlp": "silu", "bias": False},
]


@pytest.mark.filterwarnings(FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decoder_answers_with_it(layout):
    torch.manual_seed(0)
    model = Decoder(DecoderShape(vocabulary=60, width=32, layers=2, heads=2, **layout)).eval()
    with private(model, form=Form("thesis", sharing="insecure_float")) as hidden:
        assert hidden.generate([4, 9, 3], 3) == model.generate([4, 9, 3], 3)
        leaks = {(leak.observer, leak.what) for leak in hidden.leaks()}
    assert {("P0", "values under noise"), ("P1", "values under noise")} <= leaks


@pytest.mark.filterwarnings(FLOATS)
def test_a_function_of_table_6_1():
    """12 bytes an element in three messages, as printed."""
    values = torch.linspace(-4, 4, 300, dtype=torch.float64)[None]

    def program(party):
        own = party.question(values.shape, values if party.role else None, 14, 40, "values")
        return party.apply(own, F.gelu, 14, 40, "layer", "elements")

    with LocalRoles(Form("thesis", sharing="insecure_float"), {}) as parties:
        material = parties.run(lambda party: party.prepare(program))
        found = parties.run(lambda party: party.answer(program, material[party.role]), (0, 1))
        online = [row for row in parties.traffic() if row.phase == "online"]
    assert (found[0].share + found[1].share - F.gelu(values)).abs().max() < 1e-4
    frames = sum(row.frames for row in online)
    assert (frames, sum(row.wire_bytes for row in online)) == (3, 12 * 300 + 3 * HEADER_BYTES)


@pytest.mark.filterwarnings(FLOATS)
def test_a_question_that_was_never_multiplied_is_shown():
    values = torch.linspace(-4, 4, 12, dtype=torch.float64).reshape(3, 4)

    def program(party):
        own = party.question(values.shape, values if party.role else None, 14, 40, "values")
        return party.show_all(own, "answer")

    with LocalRoles(Form("thesis", sharing="insecure_float"), {}) as parties:
        material = parties.run(lambda party: party.prepare(program))
        found = parties.run(lambda party: party.answer(program, material[party.role]), (0, 1))
    assert found[0] is None
    assert torch.allclose(found[1], values, atol=1e-6)


def test_masks_are_normal_and_alike_at_both_ends():
    one, other = (normal(PadStream(bytes(range(32))), 20_001, "D", 3) for _ in range(2))
    assert (one == other).all()
    assert abs(one.mean()) < 0.03
    assert one.std() == pytest.approx(1, rel=0.02)
    within = (abs(one) < 1.5).mean()
    assert within == pytest.approx(math.erf(1.5 / 2**0.5), abs=0.01)


@pytest.mark.filterwarnings(FLOATS)
def test_a_share_is_a_hundred_times_its_value():
    with LocalRoles(Form("thesis", sharing="insecure_float"), {}) as parties:
        pads = parties.run(lambda party: party.pad(1 - party.role, (4000,), "V", 1), (0, 1))
    assert torch.equal(*pads)
    assert float(pads[0].std()) == pytest.approx(SCALE, rel=0.05)


def test_it_is_asked_for_by_a_name_that_says_what_it_is():
    with pytest.warns(InsecureWarning, match="insecure"):
        Form("thesis", sharing="insecure_float")
    assert Form("thesis").sharing == Form().sharing == "ring"
    with pytest.raises(BadOptionError):
        Form(sharing="insecure_float")
    with pytest.raises(BadOptionError):
        Form("thesis", sharing="float")


def test_a_project_that_serves_cannot_ask_for_it():
    shape = {"vocabulary": 60, "width": 32, "layers": 1, "heads": 2}
    terms = {"project": "0" * 32, "shape": shape, "mode": "thesis"}
    assert check(terms, LlmTerms, "the terms").mode == "thesis"
    with pytest.raises(ConfigError, match="sharing"):
        check(terms | {"sharing": "insecure_float"}, LlmTerms, "the terms")
