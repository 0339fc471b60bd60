"""Conversion of numbers to bytes: bits and sets of indices, value codes, a range coder, layouts.

This docstring defines the payload formats of codecs. In a byte, the most significant bit comes
first. d is the width of a cut, and b is the number of bits per value. A payload never states its
sizes, and zero bits fill its last byte. With the codec ``none``, a payload is rows x width float32
numbers, row by row. With ``scale=agreed``, a byte precedes the scales; it shows whether both
parties have the same running means.

The codecs ``topk`` and ``randtopk`` write scales (range limits of the values) and then rows,
without gaps.

1. If the option ``values`` is 1 to 8 bits, the scales are the smallest and the largest kept value
   as two bfloat16 numbers: the smallest rounded down, the largest rounded up. With other values of
   this option, there are no scales. In training, a batch has one pair of scales. A query has one
   pair per row, or no scales with ``scale=agreed`` (after the first training step).
2. A row consists of the set of its indices c_1 < ... < c_k and then of its k values in the same
   order. With ``packer=enumerative``, the set is written as the number C(c_1, 1) + ... + C(c_k, k)
   in ceil(log2 C(d, k)) bits, where C is the binomial coefficient. With ``packer=index``, the set
   is written as k indices of ceil(log2 d) bits each; with ``packer=bitmap``, as one bit for each of
   the d units. A value v is written as the 32 bits of a float32 or the 16 bits of a bfloat16, or as
   a code: floor((v - min) 2^b / (max - min)), at most 2^b - 1. The decoder turns a code into the
   value min + (code + 1/2) (max - min) / 2^b; if min and max are equal, the value is exact.
3. With ``grad=fp32``, a gradient has k float32 numbers per row.

The codecs ``relu`` and ``l1`` with ``packer=enumerative`` write scales and then three tables.

1. The scales are the largest value of the batch or of each row, as a bfloat16 that is rounded up;
   with ``values=fp32`` there are no scales.
2. The first table has, for each row, the number n of values above zero, in ceil(log2(d + 1)) bits.
   For each row, the second table has the rank of the set of these values' indices among all sets of
   n indices. A rank takes ceil(log2 C(d, n)) bits; rows with a smaller n come first. If more than
   half of a row's values are above zero, the rank is that of the set of the zeros' indices. The
   third table has the codes of the values above zero, b bits each, row by row. If the
   width is above 724, some ranks would need more than 2^18 table entries; in place of such a rank,
   the second table has one bit for every unit of the row.

With ``pad=no``, queries have the same format as training frames. With other values of ``pad``, only
training frames use formats whose lengths depend on the values: the format of ``packer=range``, and
those of ``relu`` and ``l1`` with every packer except ``dense``. The queries of these codecs use
``enumerative`` if a row has k values, and otherwise ``dense``, with b bits for every value. With
``pad=always``, the byte 0x80 and then zeros are appended to these training frames, and to gradients
of ``relu`` and ``l1``. The padded length is the smallest of the lengths ceil(L 2^(-i / 4)), i = 0,
1, ..., that fits; L is one more than the largest length of a frame with this shape.

``packer=range`` writes three parts: a tag byte, with which the decoder detects that its counts
differ from the encoder's; the scales; and an integer ANS code (asymmetric numeral systems, Duda
2013) of the symbols. Before the first step, the tag byte is 3. The share (probability) of a symbol
is a multiple of 1 / 2^15, and the ANS code consists of words of 16 bits.

1. An ANS code with one state begins with a byte whose upper half is the state's length in bytes.
   The state (at most four bytes) and the words follow. Cuts with k values per row are coded row by
   row, and small cuts with all values column by column.
2. An ANS code with several states begins with a byte that contains the exponent e. The 2^e states
   of four bytes each and the words follow. There is about one state for every 2,048 bits, and e is
   at least 4. The coder takes 2^e columns at a time, row by row, with one state for each column.
   Within a row, the word of the last state comes first.
"""
