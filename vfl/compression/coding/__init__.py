"""Conversion of numbers to bytes: bits and sets of indices, values, a range coder, layouts.

This text defines the payloads of codecs. Bits are packed from the most significant down; d is the
width, b the bits per value. Sizes are never in a payload, and zero bits fill the last byte. With
``none`` a payload is rows x width float32, row by row.

``topk`` and ``randtopk`` write scales and then rows, back to back.

1. Scales, with ``values`` of 1 to 8 bits only: the smallest and the largest kept value as two
   bfloat16, the first rounded down, the second up. There is one pair per batch in training, and one
   per row at inference, or none there with ``scale=agreed``.
2. A row is the set of its indices c_1 < ... < c_k, then its values in their order. The set is
   C(c_1, 1) + ... + C(c_k, k) in ceil(log2 C(d, k)) bits (``enumerative``), or k indices of
   ceil(log2 d) bits (``index``). A value is the 32 bits of a float32, or the code floor((v - min)
   2^b / (max - min)), at most 2^b - 1. The code is read as min + (code + 1/2) (max - min) / 2^b; a
   value equal to both ends is read exactly.
3. A gradient is k float32 a row.

``relu`` and ``l1`` with ``packer=enumerative`` write scales and then three tables.

1. Scales: the largest value of the batch or of each row, a bfloat16 rounded up; none with
   ``values=fp32``.
2. Of each row the number n of values above zero in ceil(log2(d + 1)) bits; of each row the rank
   of their indices in ceil(log2 C(d, n)) bits, rows of smaller n first (of the zeros' indices, if
   more than half are above zero); the codes, b bits each, row by row. Above 724 units, rows whose
   ranks would need more than 2^18 table entries have a bit for every unit.

This is the format of training frames for ``packer=range``, and for ``relu`` and ``l1`` with every
packer but ``dense``. Their queries are packed as by ``enumerative`` for k values a row, and with b
bits for every value (``dense``) otherwise, unless ``pad=no``. With ``pad=always`` the byte 0x80 and
zeros fill training frames, and gradients of ``relu`` and ``l1``. Frames are filled up to the
smallest size ceil(L 2^(-i / 4)), i = 0, 1, ..., that fits; L is one more than the largest size of
that shape.

``packer=range`` writes a byte that detects ends with different counts (3 at first), the scales, and
an integer ANS code (Duda 2013). Shares are fractions of 2^15, words have 16 bits.

1. One state: its length in the upper half of a byte, the state, at most four bytes, and words.
   Sparse cuts are coded row by row, small whole cuts column by column.
2. Several states, a power of two of at least 16, one for every 2,048 bits: that power in a byte,
   the states, four bytes each, and words. The number of columns coded at once equals the number of
   states, row by row, with one state for each column; in a row the last state takes its word first.
"""
