import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.compression.coding.bits import from_bits, pack, packed_bytes, to_bits, unpack
from vfl.core.errors import CorruptFrameError, TruncatedFrameError


@st.composite
def tables(draw):
    field_bits = draw(st.integers(0, 130))
    count = draw(st.integers(1, 5))
    field = st.integers(0, 2**field_bits - 1)
    row = st.lists(field, min_size=count, max_size=count)
    return field_bits, count, draw(st.lists(row, max_size=6))


@settings(deadline=None, derandomize=True)
@given(tables())
def test_bits_are_the_binary_numerals_side_by_side(table):
    field_bits, count, rows = table
    wide = object if field_bits > 63 else np.int64
    fields = np.array(rows, wide).reshape(len(rows), count)
    text = "".join(f"{field:0{field_bits}b}" for row in rows for field in row if field_bits)
    payload = pack(to_bits(fields, field_bits))
    padded = text.ljust(8 * len(payload), "0")
    assert f"{int.from_bytes(payload, 'big'):0{len(padded)}b}" == (padded or "0")
    assert len(payload) == packed_bytes(len(rows), count * field_bits) == -(-len(text) // 8)
    back = from_bits(unpack(payload, len(rows), count * field_bits), field_bits, count)
    assert back.tolist() == rows


def test_a_payload_of_another_length_is_refused():
    for payload in (b"", b"abc", b"abcde"):
        with pytest.raises(TruncatedFrameError, match="4 bytes for 3 rows"):
            unpack(payload, rows=3, row_bits=9)


@pytest.mark.parametrize("bit", range(5))
def test_a_bit_behind_the_last_row_is_refused(bit):
    with pytest.raises(CorruptFrameError, match="after its last row"):
        unpack(bytes([255, 255, 255, 224 | 1 << bit]), rows=3, row_bits=9)
