"""A pretrained decoder cut in three: embedding and head at the user, blocks at a server."""

import pytest
import torch
import torch.nn.functional as F

import vfl
from vfl.core.seeds import scoped
from vfl.models.decoder import Decoder, DecoderShape, generate
from vfl.models.lora import adapt

TEXTS = torch.randint(0, 60, (4, 9), generator=torch.Generator().manual_seed(0))
LLAMA = {"positions": "rotary", "norm": "rms", "mlp": "silu", "groups": 2, "bias": False}
GEMMA = LLAMA | {
    "mlp": "gated_gelu_tanh", "norms_at": "both", "head_norm": True, "embedding_scale": 6.0,
    "windows": (3, 0, 3, 0), "window_theta": 100.0,
}  # fmt: skip


def decoder(rank=0, bits=32, **shape):
    with scoped(3):
        model = Decoder(DecoderShape(vocabulary=60, width=32, layers=4, **shape))
        return adapt(model, rank, 8.0, bits) if rank else model


def cut_in_three(model, **settings):
    at = ["layers.0", "layers.2"]
    return vfl.split(model, at=at, example=TEXTS, row_axes=2, **settings)


def trained(model, steps=3):
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, 1e-2)
    for _ in range(steps):
        logits = model(TEXTS[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), TEXTS[:, 1:].flatten())
        if hasattr(model, "extra_loss"):
            loss = loss + model.extra_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("shape", [{}, LLAMA, GEMMA], ids=["gpt2", "llama", "gemma"])
@pytest.mark.parametrize("rank", [0, 2])
def test_training_and_answers_are_those_of_the_whole_model(shape, rank):
    plain, cut = decoder(rank, **shape), cut_in_three(decoder(rank, **shape))
    trained(plain)
    trained(cut)
    for ours, theirs in zip(cut.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert generate(cut.eval(), [5, 17, 3], 6) == generate(plain.eval(), [5, 17, 3], 6)


def test_a_new_token_sends_one_vector_up_and_one_down():
    cut = cut_in_three(decoder(**LLAMA)).eval()
    sent = []
    for count in (1, 2, 3):
        before = cut.ledger.total_bytes("up") + cut.ledger.total_bytes("down")
        generate(cut, [5, 17, 3], count)
        sent.append(cut.ledger.total_bytes("up") + cut.ledger.total_bytes("down") - before)
    token = sent[1] - sent[0]
    assert sent[2] - sent[1] == token
    assert 2 * 32 * 4 < token < 2 * 32 * 4 + 200  # frames have headers


def test_the_user_holds_embedding_and_head_and_the_server_no_token():
    parts = cut_in_three(decoder(**LLAMA)).parts
    assert {name.split(".")[0] for name in parts["server"]} == {"layers"}
    assert all(name.startswith(("layers.1.", "layers.2.")) for name in parts["server"])
    others = {name for party, names in parts.items() if party != "server" for name in names}
    assert {"tokens.weight", "norm.weight"} <= others


@pytest.mark.parametrize("codec", ["quantise:values=8", "topk:k=8"])
def test_codecs_make_training_and_answers_smaller(codec):
    sent = {}
    for spec in ("none", codec):
        model = trained(cut_in_three(decoder(**LLAMA), codec=spec), steps=40).eval()
        with torch.no_grad():
            logits = model(TEXTS[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), TEXTS[:, 1:].flatten())
        assert loss.item() < 2  # a guess has log(60), 4.1
        generate(model, [5, 17, 3], 5)
        sent[spec] = model.ledger.total_bytes("up")
    assert sent[codec] < 0.7 * sent["none"]


@pytest.mark.parametrize("bits", [8, 4])
def test_frozen_weights_of_few_bits_train_adapters_across_the_cut(bits):
    plain = trained(decoder(2, bits, **LLAMA))
    cut = trained(cut_in_three(decoder(2, bits, **LLAMA)))
    state = plain.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in cut.model.state_dict().items())
    assert generate(cut.eval(), [5, 17, 3], 6) == generate(plain.eval(), [5, 17, 3], 6)
