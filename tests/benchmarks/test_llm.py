"""What `python -m benchmarks.llm` measures, on a model that answers in moments."""

import numpy as np
import pytest
import torch

from benchmarks.emulation import Wan
from benchmarks.llm import (
    bench_llm,
    bench_next_tokens,
    cut_prompts,
    decoder_task,
    shown,
)
from vfl.core.errors import ConfigError, DataError
from vfl.models.decoder import Decoder, DecoderShape


@pytest.mark.slow
def test_the_bytes_are_those_of_the_frames_and_the_line_takes_its_hops():
    rows = bench_llm(None, Wan.parse("40mbps,60ms"), 2, 8, 3, network="proxy")
    here, far = (row for row in rows if row.system == "vfl")
    assert (here.same, far.same) == (here.of, far.of) == (6, 6)
    assert (here.next_mb, here.messages) == (far.next_mb, far.messages)
    assert 0 < here.next_mb < here.first_mb
    assert here.framing is None
    assert 0 < far.framing < 0.05
    assert 0 < here.error < 0.05
    assert far.next_s > 0.9 * 0.03 * here.messages / 3
    assert "40mbps,60ms" in shown(rows)


def test_other_systems_get_the_text_the_weights_and_what_was_said_before(tmp_path):
    """The arrays alone give the wanted scores: by the formulas of both programs, in numpy."""
    torch.manual_seed(0)
    shape = DecoderShape(
        40, 16, 2, 2, inner=24, positions="rotary", norm="rms", mlp="silu", bias=False
    )
    plain, text = Decoder(shape), [3, 1, 4, 1, 5]
    task = decoder_task(plain, text, 4, "decoder", tmp_path / "arrays.npz")
    step = task.decoder
    with np.load(tmp_path / "arrays.npz") as own:
        x = own["inputs"] @ own["tokens"]
        for layer in range(step.layers):
            name = f"layers.{layer}"
            parts = _normed(x, step) @ own[f"{name}.attention_in"]
            q, k, v = (each.reshape(2, 1, 8) for each in np.split(parts, 3, -1))
            q, k = _turned(q, step), _turned(k, step)
            k = np.concatenate([own[f"{layer}.keys"], k], 1)
            v = np.concatenate([own[f"{layer}.values"], v], 1)
            chances = np.exp(q @ k.swapaxes(1, 2))
            mixed = chances / chances.sum(-1, keepdims=True) @ v
            x = x + mixed.reshape(1, 16) @ own[f"{name}.attention_out"]
            gate, up = np.split(_normed(x, step) @ own[f"{name}.mlp_in"], 2, -1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ own[f"{name}.mlp_out"]
        logits = _normed(x, step) @ own["head"]
        with torch.no_grad():
            wanted = plain(torch.tensor([text]))[0, -1:].numpy()
        np.testing.assert_allclose(logits, wanted, atol=1e-4)
        np.testing.assert_allclose(own["wanted.logits"], wanted, atol=1e-4)
        assert own["wanted.token"] == wanted.argmax()


def _normed(x, step):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + step.epsilon)


def _turned(x, step):
    first, second = np.split(x, 2, -1)
    return x * np.array(step.cos) + np.concatenate([-second, first], -1) * np.array(step.sin)


def test_a_decoder_that_other_systems_do_not_compute_is_refused():
    with pytest.raises(ConfigError, match="know no such decoder"):
        bench_llm(None, None, 1, 4, 2, peer=["spu=/nowhere/python"])


def test_next_tokens_beside_the_model_in_float64(monkeypatch):
    """Both modes; and an error that is there is found, with the margin of each other token."""
    torch.manual_seed(0)
    model = Decoder(DecoderShape(60, 32, 1, 2, tied=False)).eval()
    prompts = torch.randint(60, (6, 3), generator=torch.Generator().manual_seed(0)).tolist()
    plain, thesis, fast = bench_next_tokens(model, prompts)
    assert plain.same == thesis.same == fast.same == plain.of == 6
    assert plain.error < 1e-5 < fast.deviation < fast.error < 0.02
    assert fast.margins == []
    monkeypatch.setattr("vfl.llm.private_decoder._SCORE_SEEN", 1)
    _, _, coarse = bench_next_tokens(model, 4 * prompts)  # so many that one is another for certain
    assert coarse.same < coarse.of
    assert len(coarse.margins) == coarse.of - coarse.same
    assert all(0 < margin <= 2 * 0.5 for margin in coarse.margins)  # scores are off by one bit
    assert 0 < coarse.near <= 1


def test_prompts_are_cut_from_a_text(tmp_path):
    model, text = Decoder(DecoderShape(256, 32, 1, 2)), "a film of some length"
    found = cut_prompts(text, model, tmp_path, 5, 4)
    assert [len(each) for each in found] == [4] * 5
    assert all(bytes(each).decode() in text for each in found)
    assert found == cut_prompts(text, model, tmp_path, 5, 4)
    assert {len(each) for each in cut_prompts(None, model, tmp_path, 5, 4)} == {4}
    with pytest.raises(DataError, match="shorter"):
        cut_prompts("abc", model, tmp_path, 5, 4)
