"""Split-N-Denoise: the law of its noise, and what the repair of a returned cut is worth."""

import numpy as np
import pytest
import torch
from torch import nn

import vfl
from vfl.compression import StepContext
from vfl.core.errors import SpecError
from vfl.core.seeds import Secret, generator
from vfl.defenses import make

ROWS, TOKENS, WIDTH = 400, 3, 4


def noise_of(spec, rows=4000, width=WIDTH):
    context = StepContext(training=True, secret=Secret.of_simulation(0, "user"))
    return make(spec).embedding(torch.zeros(rows, width), context).double().numpy()


def test_lengths_of_noise_have_the_gamma_law_and_directions_are_uniform():
    found = noise_of("split_and_denoise:eta=2")
    lengths = np.linalg.norm(found, axis=1)
    assert lengths.mean() == pytest.approx(WIDTH / 2, rel=0.03)
    assert lengths.var() == pytest.approx(WIDTH / 4, rel=0.1)
    directions = found / lengths[:, None]
    assert abs(directions.mean(0)).max() < 0.03
    assert np.cov(directions.T) == pytest.approx(np.eye(WIDTH) / WIDTH, abs=0.02)


def test_rows_are_clipped_after_the_noise():
    lengths = np.linalg.norm(noise_of("split_and_denoise:eta=1,norm=0.5"), axis=1)
    assert lengths.max() <= 0.5 + 1e-6
    assert np.isclose(lengths, 0.5).mean() > 0.9


class Words(nn.Module):
    """Token vectors at the user, a mean at the server, a class at the user."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, WIDTH)
        self.server = nn.Linear(WIDTH, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, texts):
        return self.last(self.server(self.words(texts)).mean(1))


def texts():
    draw = generator(0, "texts")
    labels = torch.arange(ROWS) % 3
    own = 4 * labels[:, None] + torch.randint(4, (ROWS, TOKENS), generator=draw)
    return torch.where(torch.rand(ROWS, TOKENS, generator=draw) < 0.7, own, own.roll(1, 0)), labels


def accuracy(defense, epochs=30):
    rows, labels = texts()
    torch.manual_seed(0)
    model = vfl.split(Words(), ["words", "server"], rows[:2], row_axes=2, defense=defense)
    loader = [(rows[part], labels[part]) for part in torch.arange(ROWS).split(50)]
    vfl.fit(model, loader, epochs=epochs, learning_rate=0.01)
    with torch.no_grad():
        return (model.eval()(rows).argmax(1) == labels).float().mean().item(), model


def test_the_user_repairs_what_the_server_returns():
    repaired, model = accuracy("split_and_denoise:eta=2")
    assert model.restorer is not None
    assert any(name.startswith("restorer.") for name in model.state_dict())
    assert repaired > 0.8


def test_without_a_way_back_the_noise_is_left():
    rows, _ = texts()
    torch.manual_seed(0)
    model = vfl.split(Words(), "words", rows[:2], row_axes=2, defense="snd:eta=2")
    assert model.restorer is None


class TwoBack(Words):
    """The server sends two tensors back."""

    def __init__(self):
        super().__init__()
        self.server = nn.LSTM(WIDTH, 6, batch_first=True)

    def forward(self, texts):
        outputs, (last, _) = self.server(self.words(texts))
        return self.last(outputs.mean(1) + last[0])


def test_several_tensors_that_come_back_are_refused():
    with pytest.raises(SpecError, match="cannot act on this model") as refused:
        vfl.split(TwoBack(), ["words", "server"], texts()[0][:2], defense="snd")
    assert refused.value.want == "one tensor each way in a U-shape"
