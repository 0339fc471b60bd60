"""A decoder that answers privately: tokens of plain torch, bytes of the models, one use of all."""

from pathlib import Path

import pytest
import torch

from vfl.core.errors import BadOptionError, DataError, ReusedPadError
from vfl.core.frame import HEADER_BYTES
from vfl.models.decoder import Decoder, DecoderShape
from vfl.mpc import private

MODES = ["fast", "thesis"]
GPT = {}
LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "mlp": "silu",
    "groups": 2,
    "bias": False,
    "tied": False,
}


def decoder(seed=0, **shape):
    torch.manual_seed(seed)
    shape = {"vocabulary": 100, "width": 64, "layers": 2, "heads": 4} | shape
    model = Decoder(DecoderShape(**shape)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.1 * torch.randn(weight.shape))
            if name == "head.weight":
                weight.mul_(3)  # so that the best of random logits stands apart
    return model


def traffic(session, phase="online"):
    """Payload bytes and messages of a phase."""
    rows = [each for each in session.traffic() if each.phase == phase]
    frames = sum(each.frames for each in rows)
    return sum(each.wire_bytes for each in rows) - HEADER_BYTES * frames, frames


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [GPT, LLAMA, {**LLAMA, "tied": True}, {**GPT, "tied": False}])
def test_greedy_tokens_are_those_of_plain_torch(mode, shape):
    model = decoder(**shape)
    with private(model, mode) as hidden:
        for prompt in ([5], [17, 3, 60, 99, 0, 41]):
            assert hidden.generate(prompt, 3) == model.generate(prompt, 3)


def logit_errors(model, prompts):
    """Chosen tokens beside plain torch's, and how far P1's scores are from the logits."""
    same, errors = 0, []
    with private(model) as hidden:
        for prompt in prompts:
            seen = []

            def pick(scores, seen=seen):
                seen.append(scores.sort().values)
                return int(scores.argmax())

            with torch.no_grad():
                logits = model(torch.tensor([prompt]))[0, -1].double()
            same += hidden.generate(prompt, 1, pick) == [int(logits.argmax())]
            errors.append(float((seen[0] - logits.sort().values).abs().max()))
    return same, max(errors)


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_logits_are_close(shape):
    prompts = torch.randint(0, 100, (20, 5), generator=torch.Generator().manual_seed(1)).tolist()
    same, worst = logit_errors(decoder(**shape), prompts)
    assert same == len(prompts)
    assert worst < 1e-2


def layer_model(mode, width, inner, keys):
    """Table 6.2 in the ring, one token in one layer: payload bytes by the steps of the protocol.

    `keys` is heads times what a head looks at. Fast: the norm's order opened and its result back (3
    + 8), queries and keys opened one way (2 x 5), scores and probabilities (4 + 3 + 7, and 7 opened
    with the values), attention's result masked (7), the second norm (3 + 5), the function (3 + 5).
    """
    if mode == "fast":
        return width * (3 + 8 + 2 * 5 + 7 + 7 + 3 + 5) + 8 * inner + keys * (4 + 3 + 7 + 7), 12
    norms = width * ((4 + 3 + 8) + (4 + 3 + 5))
    linear = width * (8 + 7 + 5) + inner * 5
    openings = 2 * (width * (2 * 5 + 7) + keys * 7)
    return norms + linear + openings + 12 * inner + keys * (4 + 3 + 7), 20


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_costs_what_the_model_says(mode):
    """To the byte: what two layers of a token cost beyond one."""
    costs = []
    for layers in (1, 2):
        model = decoder(layers=layers)
        with private(model, mode) as hidden:
            hidden.generate([1, 2, 3], 1)
            first = traffic(hidden)
        with private(model, mode) as hidden:
            hidden.generate([1, 2, 3], 2)
            both = traffic(hidden)
        costs.append([b - a for a, b in zip(first, both, strict=True)])
    found = tuple(b - a for a, b in zip(*costs, strict=True))
    assert found == layer_model(mode, 64, 256, 4 * 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_token_costs_what_the_model_says(mode):
    """The embedding by one-hot, the layers, the last norm, the head and the index."""
    model, vocabulary, width = decoder(), 100, 64
    with private(model, mode) as hidden:
        hidden.generate([9], 1)
        found = traffic(hidden)
    layers, messages = layer_model(mode, width, 256, 4)
    index = 3 * vocabulary + -(-vocabulary // 8) + 4
    ends = 5 * vocabulary + width * (3 + 5) + index, 1 + 2 + 3
    if mode == "thesis":
        ends = ends[0] + 4 * width + 5 * width + 4 * vocabulary, ends[1] + 1 + 1 + 1
    assert found == (2 * layers + ends[0], 2 * messages + ends[1])


def test_the_dealer_is_silent_online_and_p0_sees_no_text():
    with private(decoder()) as hidden:
        hidden.generate([4, 5], 2)
        online = [each for each in hidden.traffic() if each.phase == "online"]
        assert {(each.sender, each.receiver) for each in online} == {("P0", "P1"), ("P1", "P0")}
        assert {leak.observer for leak in hidden.leaks()} == {"P1"}
        assert {leak.what for leak in hidden.leaks()} == {"permuted values"}


def test_material_survives_a_restart_and_is_used_once(tmp_path: Path):
    model = decoder()
    with private(model, folder=tmp_path) as hidden:
        hidden.deal(3, 2, questions=2)
        one, two = hidden.left(3, 2)
        assert hidden.ask(one, [1, 2, 3]) == model.generate([1, 2, 3], 2)
        assert hidden.left(3, 2) == [two]
    with private(model, folder=tmp_path) as hidden:
        before = traffic(hidden, "offline")
        assert hidden.left(3, 2) == [two]
        assert hidden.generate([7, 8, 9], 2) == model.generate([7, 8, 9], 2)
        assert traffic(hidden, "offline") == before == (0, 0)
        assert not hidden.left(3, 2)
        for used in (one, two):
            with pytest.raises(ReusedPadError, match="used before"):
                hidden.ask(used, [1, 2, 3])
        assert hidden.generate([7, 8, 9], 2) == model.generate([7, 8, 9], 2)  # dealt anew


def test_a_dealing_that_was_cut_off_is_not_asked_with(tmp_path: Path):
    model = decoder(layers=1)
    with private(model, folder=tmp_path) as hidden:
        hidden.deal(2, 1)
        (name,) = hidden.left(2, 1)
        (tmp_path / "P1" / f"{name}.safetensors").unlink()
        assert hidden.left(2, 1) == []
        assert hidden.generate([1, 2], 1) == model.generate([1, 2], 1)


def test_the_same_question_twice_is_said_differently():
    model = decoder(layers=1)
    seen = []
    with private(model) as hidden:
        channel = hidden.parties.parties[1].channels[0]
        plain = channel.send_bytes

        def send(payload, number, phase):
            if phase == "online":
                seen.append(bytes(payload))
            plain(payload, number, phase)

        channel.send_bytes = send
        hidden.generate([3, 1], 1)
        first, seen = seen, []
        hidden.generate([3, 1], 1)
    assert len(first) == len(seen)
    assert not set(first) & set(seen)


def test_sampling_is_p1s_choice_of_permuted_scores():
    with private(decoder()) as hidden:
        least = hidden.generate([3], 1, lambda scores: int(scores.argmin()))
        with torch.no_grad():
            assert least == [int(decoder()(torch.tensor([[3]]))[0, -1].argmin())]


@pytest.mark.parametrize("prompt", [[], [100], [-1]])
def test_a_prompt_has_tokens_of_the_model(prompt):
    with private(decoder(layers=1)) as hidden, pytest.raises(DataError):
        hidden.generate(prompt, 1)


def test_a_text_ends_with_the_context():
    with private(decoder(layers=1, context=4)) as hidden:
        hidden.generate([1, 2, 3], 2)
        with pytest.raises(BadOptionError):
            hidden.generate([1, 2, 3], 3)


def test_a_decoder_has_no_rules_of_chapter_5():
    from vfl.mpc import Rules

    with pytest.raises(BadOptionError):
        private(decoder(layers=1), rules=Rules())


@pytest.mark.parametrize("shape", [{"heads": 3}, {"groups": 3}, {"width": 6, "heads": 2, **LLAMA}])
def test_shapes_that_do_not_fit(shape):
    with pytest.raises(BadOptionError):
        decoder(**shape)


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_the_cache_of_plain_torch_changes_nothing(shape):
    model, tokens = decoder(**shape), torch.tensor([[4, 9, 2, 77, 31]])
    cache = []
    with torch.no_grad():
        parts = [
            model(tokens[:, :2], cache),
            model(tokens[:, 2:3], cache),
            model(tokens[:, 3:], cache),
        ]
        assert torch.allclose(torch.cat(parts, 1), model(tokens), atol=1e-5)
