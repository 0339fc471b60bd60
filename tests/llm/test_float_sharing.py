"""The thesis' float sharing: what it computes, to the byte, and that nobody has it by accident."""

import pytest
import torch

from vfl.config.toml import check
from vfl.core.errors import BadOptionError, ConfigError, InsecureWarning
from vfl.llm.file import LlmTerms
from vfl.llm.two_party import Form, LocalRoles
from vfl.models.decoder import Decoder, DecoderShape
from vfl.mpc import private

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
