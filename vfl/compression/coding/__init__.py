"""Conversion of numbers to bytes: bits and sets of indices, value codes, a range coder, layouts.

This text defines the payload formats of codecs. Bits are packed with the most significant bit
first; d is the width of a cut, and b is the number of bits per value. A payload never states its
sizes, and zero bits fill its last byte. With the codec ``none``, a payload is rows x width float32
numbers, row by row.

The codecs ``topk`` and ``randtopk`` write scales and then rows, without gaps.

1. If ``values`` is 1 to 8 bits, the scales are the smallest and the largest kept value as two
   bfloat16 numbers. The first is rounded down, and the second is rounded up. Otherwise there are no
   scales. In training, a batch has one pair of scales. A query has one pair per row, or no scales
   with ``scale=agreed``.
2. A row consists of the set of its indices c_1 < ... < c_k and then its k values in the same order.
   With ``enumerative``, the set is written as the number C(c_1, 1) + ... + C(c_k, k) in
   ceil(log2 C(d, k)) bits. With ``index``, it is written as k indices of ceil(log2 d) bits each. A
   value is written as the 32 bits of a float32, or as the code floor((v - min) 2^b / (max - min)),
   at most 2^b - 1. The decoder turns a code into the value min + (code + 1/2) (max - min) / 2^b; if
   min and max are equal, the value is exact.
3. A gradient is k float32 numbers per row.

The codecs ``relu`` and ``l1`` with ``packer=enumerative`` write scales and then three tables.

1. Scales: the largest value of the batch or of each row, as a bfloat16 that is rounded up; no
   scales with ``values=fp32``.
2. The first table has the number n of values above zero for each row, in ceil(log2(d + 1)) bits.
   For each row, the second table has the rank of these values' set of indices among all sets of n
   indices. A rank takes ceil(log2 C(d, n)) bits; rows with a smaller n come first. If more than
   half of a row's values are above zero, the rank is that of the zeros' indices. The third table
   has the codes of these values, b bits each, row by row. If the width is above 724 and ranks would
   need more than 2^18 table entries, the second table has a bit for every unit instead.

With ``pad=no``, queries have the same format as training frames. With other paddings, a format with
lengths that depend on the values is used in training frames only: this concerns ``packer=range``,
and ``relu`` and ``l1`` with every packer except ``dense``. The queries of these codecs use
``enumerative`` if a row has k values, and otherwise ``dense``, with b bits for every value. With
``pad=always``, the byte 0x80 and then zeros are appended to training frames, and to gradients of
``relu`` and ``l1``. The padded length is the smallest of the lengths ceil(L 2^(-i / 4)), i = 0, 1,
..., that fits; L is one more than the largest length of a frame with this shape.

``packer=range`` writes three parts: a tag byte, with which the decoder detects that its counts
differ from the encoder's (3 before the first step); the scales; and an integer ANS code (Duda
2013). The share (probability) of a symbol is a multiple of 1 / 2^15, and words have 16 bits.

1. An ANS code with one state consists of a byte whose upper half is the state's length, the state
(at most four bytes), and the words. Cuts with k values per row are coded row by row, and small cuts
with
   all values column by column.
2. An ANS code with several states consists of a byte with the exponent e, the 2^e states of four
bytes each, and the words. There is about one state for every 2,048 bits, and e is at least 4. The
coder takes
   2^e columns at a time, row by row, with one state for each column. Within a row, the last state
   reads its word first.
"""
