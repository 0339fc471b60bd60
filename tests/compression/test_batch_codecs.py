"""C3-SL, SplitFC, BottleNet++ and FedLite beside loops, brute force and scikit-learn."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import nn

from vfl.compression import StepContext, make
from vfl.compression.codebook import cluster
from vfl.compression.columns import bits_of_columns, keep_chances
from vfl.core.errors import UserError, WidthError
from vfl.core.seeds import Secret, generator


def training(step=1):
    return StepContext(step, training=True, secret=Secret.of_simulation(0, "feature"))


def drawn(rows, width, purpose="test"):
    return torch.randn(rows, width, generator=generator(0, purpose, rows, width))


def arrived(codec, cut, step=1):
    encoded = codec.encode(cut, training(step))
    return codec.decode(encoded.payload, *cut.shape, training(step))


class TestC3SL:
    def test_a_vector_is_the_sum_of_circular_convolutions(self):
        codec, cut, width = make("c3sl:rows=3"), drawn(5, 8), 8
        keys = torch.randn(3, width, generator=generator(0, "c3sl", 3, width)).double().numpy()
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        payload = codec.encode(cut, training()).payload
        sent = make("quantise:values=fp32").decode(payload, 2, width).cut.numpy()
        read = arrived(codec, cut).cut.numpy()
        for vector in range(2):
            wanted = np.zeros(width)
            rows = range(3 * vector, min(3 * vector + 3, 5))
            for row in rows:
                for at, by in itertools.product(range(width), repeat=2):
                    wanted[at] += keys[row % 3, by] * cut[row, (at - by) % width].item()
            np.testing.assert_allclose(sent[vector], wanted, atol=1e-6)
            for row in rows:
                for at in range(width):
                    value = sum(
                        keys[row % 3, by] * wanted[(at + by) % width] for by in range(width)
                    )
                    assert read[row, at] == pytest.approx(value, abs=1e-5)

    def test_gradients_are_those_of_what_was_read(self):
        """The gradient that arrives is the adjoint of encoding and decoding, found by autograd."""
        codec, cut, grad = make("c3sl:rows=4"), drawn(8, 16), drawn(8, 16, "grad")
        encoded = codec.encode(cut, training())
        saved = codec.decode(encoded.payload, 8, 16, training()).saved
        payload = codec.encode_grad(grad, saved, training())
        found = codec.decode_grad(payload, encoded.saved, 8, 16, training())
        whole = torch.stack(
            [arrived(codec, one.reshape(8, 16)).cut.flatten() for one in torch.eye(128)]
        )
        torch.testing.assert_close(found.flatten(), whole @ grad.flatten(), atol=1e-4, rtol=0)

    @pytest.mark.parametrize("width", [64, 4096])
    @pytest.mark.parametrize(("keys", "noise"), [("normal", 4.0), ("unitary", 3.0)])
    def test_noise_of_rows_that_share_a_vector_is_as_strong_as_they_are(self, width, keys, noise):
        """That of the three others, and with normal keys as much again of the row's own key."""
        cut = drawn(64, width)
        error = (arrived(make(f"c3sl:rows=4,keys={keys}"), cut).cut - cut).square().mean()
        assert error.item() == pytest.approx(noise, rel=0.25)

    def test_a_query_is_sent_row_by_row(self):
        cut, codec = drawn(3, 8), make("c3sl:rows=2")
        payload = codec.encode(cut).payload
        assert len(payload) == cut.numel() * 4
        assert torch.equal(codec.decode(payload, 3, 8).cut, cut)


class TestSplitFC:
    @pytest.mark.parametrize("keep", [0.1, 0.3, 0.7, 1.0])
    def test_chances_are_proportional_below_one(self, keep):
        deviations = np.random.default_rng(0).gamma(0.5, size=200)
        chances = keep_chances(deviations, keep)
        assert chances.mean() == pytest.approx(keep)
        factor = min(chances[chances < 1] / deviations[chances < 1], default=np.inf)
        wanted = np.minimum(1, factor * deviations)
        np.testing.assert_allclose(chances, wanted, rtol=1e-9)

    def test_columns_that_stand_still_are_equally_likely(self):
        assert keep_chances(np.zeros(4), 0.5).tolist() == [0.5] * 4

    def test_bits_are_the_best_of_all_ways_to_share_them(self):
        ranges = np.array([5.0, 2.2, 0.7, 0.1])

        def error(bits):
            return sum((one / 2**count) ** 2 for one, count in zip(ranges, bits, strict=True))

        for mean in (0.5, 1, 1.75, 2.5):
            total = round(4 * mean)
            ways = [one for one in itertools.product(range(9), repeat=4) if sum(one) == total]
            found = bits_of_columns(ranges, mean)
            assert found.sum() == total
            assert error(found) == pytest.approx(min(map(error, ways)))

    def test_on_average_nothing_is_lost(self):
        cut, codec = drawn(6, 10) * torch.linspace(0.1, 2, 10), make("splitfc:keep=0.5,bits=8")
        mean = torch.stack([arrived(codec, cut, step).cut for step in range(4000)]).mean(0)
        torch.testing.assert_close(mean, cut, atol=0.25, rtol=0)

    def test_a_gradient_is_scaled_as_its_column_was(self):
        cut, codec = drawn(40, 12), make("splitfc:keep=0.5,bits=8,grad=8")
        encoded = codec.encode(cut, training())
        decoded = codec.decode(encoded.payload, 40, 12, training())
        payload = codec.encode_grad(torch.ones(40, 12), decoded.saved, training())
        grad = codec.decode_grad(payload, encoded.saved, 40, 12, training())
        there = decoded.cut.abs().sum(0) > 0
        assert 0 < there.sum() < 12
        factors = (decoded.cut * cut).sum(0) / cut.square().sum(0)
        torch.testing.assert_close(grad[0], factors, atol=0.03, rtol=0)

    def test_it_takes_the_bytes_it_says(self):
        cut = drawn(256, 128)
        payload = make("splitfc:keep=0.25,bits=4").encode(cut, training()).payload
        kept = np.unpackbits(np.frombuffer(payload[:16], np.uint8)).sum()
        assert 20 < kept < 44
        assert len(payload) == 16 + 6 * kept + 256 * 4 * kept // 8

    def test_draws_need_a_secret(self):
        with pytest.raises(UserError, match="received no secret"):
            make("splitfc").encode(drawn(4, 4), StepContext(training=True))


class TestBottleNet:
    def test_noise_is_in_training_alone_and_as_strong_as_named(self):
        encoder = make("bottlenet:k=50,psnr=20").client_module(50)
        cut = drawn(4000, 50)
        noise = encoder.train()(cut) - encoder[:3](cut)
        assert noise.std().item() == pytest.approx(0.1, rel=0.02)
        assert torch.equal(encoder.eval()(cut), encoder(cut))

    def test_the_code_lies_between_0_and_1_and_the_decoder_is_rectified(self):
        codec, cut = make("bottlenet:k=3"), drawn(20, 8)
        code = codec.client_module(8).eval()(cut)
        assert code.shape == (20, 3)
        assert ((code > 0) & (code < 1)).all()
        assert (codec.server_module(8)(code) >= 0).all()

    def test_it_narrows_alone(self):
        with pytest.raises(WidthError):
            make("bottlenet:k=9").check(8)


class TestFedLite:
    def test_centres_are_as_good_as_those_of_scikit_learn(self):
        points = torch.cat([drawn(300, 3) * 0.3 + centre for centre in 4 * drawn(8, 3, "centres")])
        centres, codes = cluster(points, 8, 30)
        error = np.square(points.numpy() - centres[codes]).sum()
        best = KMeans(8, n_init=10, random_state=0).fit(points.numpy()).inertia_
        assert error <= 1.6 * best

    def test_every_piece_arrives_as_its_nearest_vector(self):
        cut, codec = drawn(40, 12), make("fedlite:pieces=4,clusters=5")
        payload = codec.encode(cut, training()).payload
        book = np.frombuffer(payload[: 4 * 5 * 3], "<f4").reshape(5, 3)
        for piece, got in zip(
            cut.reshape(-1, 3).numpy(), arrived(codec, cut).cut.reshape(-1, 3).numpy(), strict=True
        ):
            assert np.array_equal(got, book[np.square(piece - book).sum(1).argmin()])

    def test_the_correction_pulls_a_row_towards_what_was_sent(self):
        cut, codec = (
            drawn(10, 8).requires_grad_(),
            make("fedlite:pieces=4,clusters=2,correction=0.3"),
        )
        sent = arrived(codec, cut.detach()).cut
        codec.local_loss(cut, training()).backward()
        torch.testing.assert_close(cut.grad, 0.3 * (cut.detach() - sent) / 10)

    def test_a_width_without_equal_pieces_names_those_that_fit(self):
        with pytest.raises(WidthError, match="into 5 equal pieces"):
            make("fedlite:pieces=5").check(8)


@pytest.mark.parametrize(
    "spec",
    ["c3sl:rows=2", "splitfc:keep=0.7,bits=6", "bottlenet:k=6", "fedlite:pieces=6,clusters=16"],
)
def test_a_split_network_learns_through_it(spec):
    codec, secret = make(spec), Secret.of_simulation(0, "feature")
    torch.manual_seed(0)
    inputs = drawn(256, 6)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    encoder, decoder = codec.client_module(24), codec.server_module(24)
    bottom = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), encoder or nn.Identity())
    top = nn.Sequential(decoder or nn.Identity(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam([*bottom.parameters(), *top.parameters()], lr=0.02)
    for step in range(150):
        context = StepContext(step, training=True, secret=secret)
        loss = nn.functional.cross_entropy(top(codec.simulate(bottom(inputs), context)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bottom.eval(), top.eval()
    with torch.no_grad():
        answers = top(codec.simulate(bottom(inputs))).argmax(1)
    assert (answers == labels).float().mean() > 0.85
