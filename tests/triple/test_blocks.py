"""Tables larger than a frame: rows are shared, opened and asked in blocks."""

import pytest

from vfl.mpc import three_party
from vfl.mpc.channel import Channel
from vfl.triple import infer_private, train_private


@pytest.fixture
def sizes(monkeypatch):
    """Bytes of every frame that a party sends."""
    found = []
    send = Channel.send_bytes

    def watched(self, payload, number, phase):
        found.append(len(payload))
        send(self, payload, number, phase)

    monkeypatch.setattr(Channel, "send_bytes", watched)
    return found


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize("label", ["lender", "shop"])
def test_no_frame_is_larger_than_a_block_and_a_batch(
    tmp_path, experiment, monkeypatch, sizes, mode, label
):
    asked = experiment("digits", label, rows=400, batch_rows=8, epochs=1)
    cards, largest = [], []
    for name, block_bytes in (("whole", 1 << 26), ("blocks", 1 << 13)):
        monkeypatch.setattr(three_party, "BLOCK_BYTES", block_bytes)
        cards.append(
            train_private(
                asked,
                tmp_path / name,
                mode=mode,
                processes=False,
                weights_seed=0,
                learning_rate=0.1,
            )
        )
        answered = infer_private(tmp_path / name, processes=False)
        assert answered["test_accuracy"] == cards[-1]["test_accuracy"]
        largest.append(max(sizes))
        sizes.clear()
    weights, header = 8 * 64 * 10, 16
    opened, batch = 8 * 32 * 280, 8 * 64 * 80  # one holder's columns; both operands of a product
    assert largest[0] >= (opened if mode == "fast" else batch)
    assert largest[1] <= (1 << 13) + weights + 8 * 8 * 64 + header
    whole, blocks = cards
    assert blocks["test_accuracy"] == pytest.approx(whole["test_accuracy"], abs=0.03)
    assert blocks["test_log_loss"] == pytest.approx(whole["test_log_loss"], rel=1e-3)


def test_blocks_are_of_one_size_so_that_none_is_nearly_alone(monkeypatch):
    monkeypatch.setattr(three_party, "BLOCK_BYTES", 800)
    found = list(three_party.row_blocks(101, 2))
    assert found == [(0, 33), (33, 67), (67, 101)]
    assert list(three_party.row_blocks(0, 2)) == [(0, 0)]
    assert list(three_party.row_blocks(3, 1000)) == [(0, 1), (1, 2), (2, 3)]
