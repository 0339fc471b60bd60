import math

import pytest
import torch

from vfl.compression import INFERENCE, StepContext, make
from vfl.core.errors import UserError
from vfl.core.seeds import Secret, generator

SECRET = Secret.of_simulation(0, "feature")


def training(step=1, secret=SECRET):
    return StepContext(step, training=True, secret=secret)


def normal_cut(rows, width):
    return torch.randn(rows, width, generator=generator(rows, "test", width))


def kept_places(spec, cut, context):
    codec = make(spec)
    payload = codec.encode(cut, context).payload
    decoder_context = StepContext(context.step, context.training)
    return codec.decode(payload, *cut.shape, decoder_context).saved


@pytest.mark.parametrize("law", ["sequential", "multinomial"])
@pytest.mark.parametrize("values", ["fp32", "8"])
def test_inference_is_plain_top_k(law, values):
    cut = normal_cut(40, 30)
    plain = make(f"topk:k=4,values={values}").encode(cut).payload
    codec = make(f"randtopk:k=4,alpha=0.9,law={law},values={values}")
    assert codec.encode(cut).payload == plain
    assert codec.encode(cut, StepContext(7, training=False, secret=SECRET)).payload == plain


def test_alpha_zero_is_plain_top_k_in_training_too():
    cut = normal_cut(40, 30)
    plain = make("topk:k=4").encode(cut, training()).payload
    assert make("randtopk:k=4,alpha=0").encode(cut, training()).payload == plain


def test_replacements_keep_the_values_of_their_places():
    cut = normal_cut(200, 30)
    codec = make("randtopk:k=4,alpha=0.5")
    payload, kept = codec.encode(cut, training())
    decoded = codec.decode(payload, 200, 30, StepContext(1, training=True)).cut
    mask = torch.zeros(200, 30).scatter(1, kept, 1.0)
    assert (mask.sum(dim=1) == 4).all()
    assert torch.equal(decoded, cut * mask)
    top = torch.zeros(200, 30).scatter(1, cut.abs().topk(4).indices, 1.0)
    replaced = (mask * (1 - top)).sum() / mask.sum()
    assert replaced == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 800))


def test_steps_and_secrets_have_draws_of_their_own():
    cut = normal_cut(40, 30)
    indices = [
        kept_places("randtopk:k=4,alpha=0.5", cut, context)
        for context in (training(1), training(2), training(1, Secret.of_simulation(1, "feature")))
    ]
    assert not torch.equal(indices[0], indices[1])
    assert not torch.equal(indices[0], indices[2])


def test_training_without_a_secret_is_refused():
    codec = make("randtopk:k=2")
    with pytest.raises(UserError, match="no secret"):
        codec.encode(normal_cut(3, 8), StepContext(4, training=True))
    codec.encode(normal_cut(3, 8), INFERENCE)
