"""What a sparse batch costs as a pickled SciPy matrix.

vfl imports no pickle: a process of its own pickles, one batch each time it is asked, so that it
takes turns with what is measured here. It reads nothing but the batches it is handed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from vfl.bench.contenders import Cost
from vfl.bench.process import Process

#: Reads the sizes and all batches, then answers every line with the cost of the next batch.
_SCRIPT = """
import itertools, json, pickle, sys
from time import thread_time
import numpy as np
from scipy.sparse import csr_matrix
count, rows, width = json.loads(sys.stdin.buffer.readline())
raw = sys.stdin.buffer.read(4 * count * rows * width)
batches = np.frombuffer(raw, np.float32).reshape(count, rows, width)
for _, batch in zip(sys.stdin.buffer, itertools.cycle(batches)):
    began = thread_time()
    frame = pickle.dumps(csr_matrix(batch), pickle.HIGHEST_PROTOCOL)
    encoded = thread_time()
    pickle.loads(frame).toarray()
    print(json.dumps([encoded - began, thread_time() - encoded, len(frame)]), flush=True)
"""


class CsrPickle:
    """A `vfl.bench.contenders.Turn`, and a context manager. Choosing places is not counted.

    Args:
        batches: cuts, of axes (rows, width).
        k: values of largest magnitude that are left of each row.
    """

    def __init__(self, batches: Sequence[Tensor], k: int) -> None:
        self.process = Process(script=_SCRIPT)
        self.process.write(json.dumps([len(batches), *batches[0].shape]).encode() + b"\n")
        for batch in batches:
            places = torch.topk(batch.abs(), k).indices
            sparse = torch.zeros_like(batch).scatter_(1, places, batch.gather(1, places))
            self.process.write(sparse.numpy().tobytes())

    def __enter__(self) -> CsrPickle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.end(at_once=error is not None)

    def __call__(self, step: int, batch: Tensor) -> Cost:
        """The cost of the process's next batch.

        Raises:
            PeerFailedError: it ended early; its standard error says why.
        """
        self.process.write(b"\n")
        return Cost(*json.loads(self.process.read_line()))
