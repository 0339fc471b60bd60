"""The loops for machine code do what numpy does, bit for bit; without numba they run as Python."""

import math

import numpy as np
import pytest
import torch

from vfl.compression import INFERENCE, StepContext, make
from vfl.compression.coding.bits import gather_marked, index_set, spread_marked
from vfl.compression.topk import find_top, random_indices
from vfl.core.errors import CorruptFrameError, VFLError
from vfl.core.seeds import Secret, generator

#: All are kept, more than half, one, and ranks of 62, 63, 124 and 195 bits.
EDGES = [(1, 1), (7, 7), (6, 4), (40, 1), (66, 28), (67, 28), (128, 60), (200, 100), (60, 32)]
SECRET = Secret.of_simulation(0, "feature")
TRAINING = StepContext(3, training=True, secret=SECRET)


def rectified(rows, width, seed=0):
    return torch.randn(rows, width, generator=generator(seed, "loops", rows, width)).relu()


def cuts(width):
    """Cuts as they occur, and what is special about each of the others."""
    levels = torch.randint(-2, 3, (9, width), generator=generator(0, "levels", width))
    fading = torch.arange(width).float().expand(3, width)
    yield rectified(6, width)
    yield -rectified(3, width) - 1
    yield levels.float()  # many ties
    yield torch.zeros(3, width)
    yield torch.full((2, width), -1.7)
    yield -levels.clamp(max=0).float() * -0.0  # zeros of both signs
    yield fading  # each place is larger than those before it
    yield fading.flip(1)
    yield rectified(1, width)
    yield rectified(0, width)
    yield torch.full((1, width), 3e38) * torch.tensor([1.0, -1.0]).repeat(width)[:width]
    yield torch.full((2, width), 1e-45)


def traffic(spec, cut):
    """Every byte and number of a cut, a query and a gradient."""
    found = []
    for context in (StepContext(3, training=True, secret=SECRET), INFERENCE):
        codec = make(spec)
        payload, kept = codec.encode(cut, context)
        decoded, saved = codec.decode(payload, *cut.shape, context)
        gradient = codec.encode_grad(cut.clamp(-9, 9) / 3, saved, context)
        back = codec.decode_grad(gradient, kept, *cut.shape, context)
        found += [
            bytes(payload),
            decoded.numpy().tobytes(),
            bytes(gradient),
            back.numpy().tobytes(),
        ]
    return found


@pytest.mark.parametrize(("width", "k"), [(128, 3), (128, 13), (300, 9), *EDGES])
def test_special_cuts_are_treated_alike(both, width, k):
    for cut in cuts(width):
        for spec in (f"topk:k={k},values=3,scale=row", f"randtopk:k={k},values=8,alpha=0.3"):
            first, second = both(lambda spec=spec, cut=cut: traffic(spec, cut))
            assert first == second


@pytest.mark.parametrize("law", ["sequential", "multinomial"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize(("width", "k"), [(128, 13), (9, 3), (6, 4), (7, 7), (40, 1)])
def test_the_same_places_are_drawn(both, width, k, alpha, law):
    top = np.argsort(np.random.default_rng(0).random((50, width)), axis=1)[:, :k]
    top.sort(axis=1)
    draws = np.random.default_rng(1).random((50, 3 * k))[:, : k if law == "sequential" else 3 * k]
    first, second = both(lambda: random_indices(top, width, alpha, law, draws))
    assert first.tolist() == second.tolist()
    assert (np.diff(second) > 0).all()
    assert second.min() >= 0
    assert second.max() < width


def top_by_sorting(row, k):
    return sorted(sorted(range(len(row)), key=lambda place: (-abs(row[place]), place))[:k])


@pytest.mark.parametrize("k", [1, 2, 9, 31, 33])
@pytest.mark.parametrize("width", [33, 64, 100])
def test_both_find_the_first_of_a_stable_sort(both, width, k):
    for cut in cuts(width):
        expected = [top_by_sorting(row, k) for row in cut.tolist()]
        sizes = [sorted(map(abs, row), reverse=True) for row in cut.tolist()]
        tied = [k < width and size[k - 1] == size[k] for size in sizes]
        for top in both(lambda cut=cut: find_top(cut, k)):
            assert top.indices.tolist() == expected
            assert top.tied.tolist() == tied


def test_a_view_is_read_in_its_own_order(both):
    cut = rectified(8, 90)
    for view in (cut[:, ::2], cut.T, cut[2:5]):
        first, second = both(lambda view=view: traffic("topk:k=2,values=4", view))
        assert first == second == traffic("topk:k=2,values=4", view.clone())


@pytest.mark.parametrize(
    ("spec", "width"),
    [
        ("topk:k=3,values=5", 128),
        ("topk:k=13,values=5", 128),
        ("topk:k=14,values=5", 600),
        ("topk:k=9,values=5", 1280),
        ("topk:k=5,values=5", 5),
        ("relu:values=3,packer=bitmap", 33),
    ],
)
def test_damaged_payloads_are_read_or_refused_alike(both, spec, width):
    codec = make(spec)
    payload = codec.encode(rectified(3, width), TRAINING).payload
    draw = np.random.default_rng(0)

    def outcome(raw):
        try:
            return codec.decode(raw, 3, width, TRAINING).cut.numpy().tobytes()
        except VFLError as refusal:
            return str(refusal)

    for case in range(60):
        raw = bytearray(payload)
        for bit in draw.integers(0, 8 * len(raw), 1 + case % 3):
            raw[bit // 8] ^= 1 << bit % 8
        damaged = [
            bytes(raw),
            bytes(raw[: case % len(raw)]),
            bytes(raw) + b"\0",
            draw.bytes(len(raw)),
        ]
        for each in damaged:
            first, second = both(lambda each=each: outcome(each))
            assert first == second


@pytest.mark.parametrize(("width", "k"), [(5, 2), (128, 3), (600, 14), (1280, 9)])
def test_a_rank_without_a_set_is_refused_by_both(both, width, k):
    sets = index_set("enumerative", width, k, code_bits=3)
    for rank in (math.comb(width, k), 2**sets.bits - 1):
        row = f"{rank:0{sets.bits}b}" + "1" * 3 * k
        raw = int(row.ljust(8 * -(-len(row) // 8), "0"), 2).to_bytes(-(-len(row) // 8), "big")

        def refused(raw=raw):
            with pytest.raises(CorruptFrameError, match="does not exist"):
                sets.unpack(memoryview(raw), 1)

        both(refused)


@pytest.mark.parametrize(
    "spec", ["quantise:values=3", "relu:values=4", "relu:values=3,packer=bitmap"]
)
@pytest.mark.parametrize("scale", ["batch", "row", "agreed"])
def test_dense_cuts_are_treated_alike(both, spec, scale):
    for width in (1, 5, 70):
        for cut in cuts(width):
            first, second = both(lambda cut=cut: traffic(f"{spec},scale={scale}", cut))
            assert first == second


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_marked_numbers_are_gathered_and_spread_alike(both, kind, share):
    draw = np.random.default_rng(1)
    mask = draw.random((7, 30)) < share
    numbers = draw.integers(0, 200, mask.shape).astype(kind)
    if kind is np.float32:
        numbers[3] = -math.inf, *[math.nan] * 28, -0.0
    for found in both(lambda: gather_marked(numbers, mask)):
        assert found.tobytes() == numbers[mask].tobytes()
    expected = np.zeros_like(numbers)
    expected[mask] = numbers[mask]
    for spread in both(lambda: spread_marked(numbers[mask], mask)):
        assert spread.tobytes() == expected.tobytes()


def test_too_few_numbers_for_a_mask_are_never_read(both):
    def refused():
        with pytest.raises(ValueError, match="mask"):
            spread_marked(np.ones(5, np.float32), np.ones((3, 4), bool))

    both(refused)
