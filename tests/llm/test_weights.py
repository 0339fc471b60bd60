"""Weights that are shared a block at a time: what each party keeps of them, and on disk."""

import numpy as np
import pytest
import torch

from vfl.core.errors import RingRangeError, RunFolderError
from vfl.llm import weights
from vfl.llm.packing import pack_elements
from vfl.llm.two_party import Form, LocalRoles
from vfl.llm.weights import (
    Drawn,
    LayerShape,
    Packed,
    WeightStore,
    Whole,
    multiplied,
    room_for,
    spans,
)

LAYER = LayerShape("layer", (50, 24), 12, 40)
WEIGHT = torch.randn(50, 24, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(weights, "BLOCK", 7 * 24)


@pytest.fixture
def shared():
    """What each party has."""

    def share(party):
        return party.constant(LAYER, *([WEIGHT, torch.ones(24)] if party.role == 0 else []))

    with LocalRoles(Form(), {}) as parties:
        yield parties.run(share)


def whole(matrix):
    return torch.cat([block for _, block in matrix.blocks()])


def test_masked_weights_and_mask_are_the_weights_and_come_in_blocks(shared):
    own, masked, mask = shared[0].weight, whole(shared[1].masked), whole(shared[2].mask)
    assert torch.equal(own.long(), torch.round(WEIGHT.double() * 2**12).long())
    assert torch.equal((masked + mask) % 2**40, own.long() % 2**40)
    assert own.dtype == torch.int16
    assert len(shared[1].masked.sizes) == len(spans(LAYER.shape)) == 8
    assert [one.weight is None for one in shared] == [False, True, True]
    assert shared[0].mask is None


def test_masked_weights_are_uniform(shared):
    bits = whole(shared[1].masked).numpy().view("u1").reshape(-1, 8)[:, :5]
    ones = np.unpackbits(bits).mean()
    assert abs(ones - 0.5) < 0.01  # 48,000 fair coins, 4.4 deviations


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_products_are_those_of_the_whole_matrix(shared, rows, turned):
    source = torch.Generator().manual_seed(rows)
    for matrix in (Whole(shared[0].weight), shared[1].masked, shared[2].mask):
        right = whole(matrix).long()
        right = right.t() if turned else right
        left = torch.randint(-(2**62), 2**62, (rows, len(right)), generator=source)
        wanted = (left[:, :, None] * right[None]).sum(1)
        assert torch.equal(multiplied(left, matrix, turned=turned), wanted)


def test_what_was_kept_is_what_is_read_again(shared, tmp_path):
    for constant in shared:
        store = WeightStore(tmp_path / "layers", "owner", "setup")
        kept = store.put(constant)
        again = WeightStore(tmp_path / "layers", "owner", "setup").get(LAYER)
        for one in (kept, again):
            for name in ("masked", "mask"):
                before, after = getattr(constant, name), getattr(one, name)
                assert (before is None) == (after is None)
                assert before is None or torch.equal(whole(before), whole(after))
            assert constant.weight is None or torch.equal(constant.weight, one.weight)
            assert constant.bias is None or torch.equal(constant.bias.double(), one.bias)
        for path in (tmp_path / "layers").iterdir():
            assert path.stat().st_mode & 0o777 == 0o600
            path.unlink()


@pytest.mark.parametrize("party", [0, 1, 2])
def test_damaged_weights_and_those_of_another_sharing_are_refused(shared, tmp_path, party):
    store = WeightStore(tmp_path, "owner", "setup")
    store.put(shared[party])

    def use(store):
        constant = store.get(LAYER)
        return constant.masked and whole(constant.masked)

    with pytest.raises(RunFolderError, match="another kind, party or run"):
        use(WeightStore(tmp_path, "owner", "other"))
    path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    damaged = bytearray(path.read_bytes())
    damaged[-40] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(RunFolderError, match="not as it was written"):
        use(store)
    path.unlink()
    with pytest.raises(RunFolderError, match="missing"):
        use(store)


def test_a_seed_is_not_shown():
    assert "0" * 8 not in repr(Drawn(bytes(32), (2, 2)))


def test_weights_are_as_narrow_as_their_largest():
    for most, kind in ((7.9, torch.int16), (8.0, torch.int32), (2.0**25, torch.int64)):
        assert room_for(torch.tensor([[0.0, -most]]), 12).dtype == kind


def test_a_weight_that_does_not_fit_names_its_layer():
    huge = torch.full((4, 4), 2.0**40)

    def share(party):
        return party.constant(LayerShape("big", (4, 4), 12), *([huge] if party.role == 0 else []))

    with LocalRoles(Form(), {}, timeout_s=2) as parties, pytest.raises(RingRangeError) as caught:
        parties.run(share)
    assert caught.value.where == "big"


def test_a_product_in_a_larger_ring_than_the_weights_were_shared_for_is_refused(shared):
    def program(party):
        constant = shared[party.role]
        asked = party.question((2, 50), None, 12, 41, "x")
        return party.multiply(asked, constant)

    with (
        LocalRoles(Form(), {}, timeout_s=2) as parties,
        pytest.raises(ValueError, match="ring of 40 bits"),
    ):
        parties.run(lambda party: party.prepare(lambda role: program(role)))


@pytest.mark.parametrize("bits", [9, 24, 41, 63])
def test_packed_blocks_in_memory(bits):
    elements = torch.arange(6).reshape(3, 2) * 3
    packed = Packed((3, 2), bits, lambda: iter([pack_elements(elements, bits)]))
    assert torch.equal(whole(packed), elements)
