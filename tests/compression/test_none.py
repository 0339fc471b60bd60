import pytest
import torch

from vfl.compression import make
from vfl.core.errors import TruncatedFrameError


def test_a_payload_is_the_values_in_row_order():
    payload = make("none").encode(torch.tensor([[1.0, -2.0], [0.5, 0.0]])).payload
    assert bytes(payload).hex(" ", 4) == "0000803f 000000c0 0000003f 00000000"


def test_strided_cuts_are_sent_in_row_order():
    cut = torch.arange(6.0).view(2, 3).t()
    payload = make("none").encode(cut).payload
    assert torch.equal(make("none").decode(payload, 3, 2).cut, cut)


@pytest.mark.parametrize("payload_bytes", [0, 23, 25, 48])
def test_another_length_is_refused(payload_bytes):
    with pytest.raises(TruncatedFrameError, match="24 bytes for 2 rows of 3"):
        make("none").decode(bytes(payload_bytes), 2, 3)
