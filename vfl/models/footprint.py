"""Computes, before any allocation, the memory that a model would need.

The module builds the model on torch's meta device, which stores no values, and runs it there on the
real number of rows. The module counts each allocation of every operation, in layers and in
functions; for example, attention weights over all pairs of tokens. The module refuses a model that
cannot run this way, and never guesses a model's memory.

Let P be the number of the bottom's parameters, and b the size of its buffers in bytes. A pass over
R rows allocates A(R) bytes; the largest tensor of the pass has L(R) bytes. Let m be the number of
batches in flight (sent, but without gradient so far), and S the number of values that the optimiser
keeps for each parameter. Let W be the larger one of the cut's widths before and after the codec.
Let R be the batch size, N the number of training rows, Q the number of rows in a query, and c the
number of columns in the party's table. A training needs this many bytes (in the bracket after P, m
counts only if it is above 1):

    4 P (2 + S + m) + b + (m + 1/2) A(R) + 4 L(R) + 128 R W

A query needs this many bytes:

    4 P + b + 2 L(Q) + 128 Q W

The following defenses add bytes to a training at a feature party. F is the value of their option
`features` (c if the option is 0). M is the number of the party's unaligned rows (rows that other
parties do not have):

    nopeek                               32 R^2 + 12 R (c + W);
    label_free (pca), anchored           64 F^2 + 163,840 F + 4 R (c + 2 F) + 4 N c;
                                         and 12 c F more if `features` > 0;
    label_free (of kinds that learn),    perceptron of 256 units behind the bottom, with its
    pretrained, few_rounds               Adam state; eight batches of 128 rows; 4 N c; with M rows
                                         8 N c + 4 M c;
    split_guard                          128 W^2 + 16 R W + 4 R c;
    split_and_denoise                    64 R W;
    santext, custext                     4 N c;
    mixup                                8 R c.

For defenses that learn, A and L are those of at least 128 rows, and S is at least 3. With [dp], S
is 6 larger. The bytes that ``passport``, ``layer_norm`` and ``potential`` need are part of the
bottom; other defenses add nothing. If parties compute the first layer on additive shares, the bytes
of the layer's ring elements count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from vfl.core.errors import SpecError, VFLError
from vfl.core.seeds import scoped
from vfl.core.torch_internals import TorchDispatchMode, tree_leaves
from vfl.models.base import Bottom, Shape


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model, and of its tensors for a training batch and for a query.

    Attributes:
        parameters: number of trainable parameters, including parameters that a defense replaces.
        weight_bytes: bytes of the parameters.
        buffer_bytes: bytes of buffers, such as running means.
        batch_bytes: bytes of the batch, and of all tensors of a pass over a training batch.
        largest_bytes: bytes of the largest tensor of that pass.
        query_bytes: bytes of the largest tensor of a pass over a query, or of the query's rows if
            these are larger.
    """

    parameters: int
    weight_bytes: int
    buffer_bytes: int
    batch_bytes: int
    largest_bytes: int
    query_bytes: int

    def training_bytes(self, optimizer_copies: int, in_flight: int = 1) -> int:
        """Return the bytes of weights, gradients, optimiser state, forward and backward passes.

        Args:
            optimizer_copies: number of values that the optimiser keeps for each parameter.
            in_flight: number of batches in flight, which wait for gradients; with more than one,
                the party keeps copies of the weights.

        >>> Footprint(10, 40, 0, batch_bytes=100, largest_bytes=30, query_bytes=0).training_bytes(2)
        430
        """
        copies = 2 + optimizer_copies + (in_flight if in_flight > 1 else 0)
        # The backward pass needs memory for gradients of tensors, and convolution kernels need
        # working memory.
        backward = self.batch_bytes // 2 + 4 * self.largest_bytes
        passes = in_flight * self.batch_bytes + backward
        return self.weight_bytes * copies + self.buffer_bytes + passes

    def inference_bytes(self) -> int:
        """Return the bytes of weights, and of tensors of two successive operations on a query."""
        return self.weight_bytes + self.buffer_bytes + 2 * self.query_bytes


def footprint(
    bottom: Bottom,
    shape: Shape,
    width: int,
    *,
    batch_size: int = 2,
    query_rows: int = 2,
    around: Callable[[nn.Module], nn.Module] | None = None,
) -> Footprint:
    """Build a bottom on meta tensors, run it on shapes only, and count its memory.

    Args:
        bottom: the bottom, before it is built.
        shape: axes of one row's inputs, without the rows axis.
        width: width of the cut.
        batch_size: number of rows in a training batch.
        query_rows: number of rows in a query.
        around: function that wraps the built bottom, such as a defense's `wrap_bottom`.

    Raises:
        SpecError: the bottom cannot read rows of this shape, or its operations cannot be counted.

    >>> from vfl.models import make_bottom
    >>> footprint(make_bottom("mlp:hidden=20000-20000"), (10,), 8).parameters
    400400008
    """
    try:
        with torch.device("meta"), scoped(0):
            core = bottom.build(shape, width)
            whole = (core if around is None else around(core)).to("meta")
            batch = _made(whole.train(), shape, batch_size)
            query = _made(whole.eval(), shape, query_rows)
    except VFLError:
        raise
    except Exception as error:
        raise SpecError(
            "the memory of this bottom cannot be computed before it is built",
            got=type(error).__name__,
            want="a bottom that torch's meta device can build and run",
            fix="name the bottom in the party's own file, which may be of any size",
        ) from error
    parameters = {id(one): one for part in (core, whole) for one in part.parameters()}.values()
    return Footprint(
        parameters=sum(one.numel() for one in parameters),
        weight_bytes=sum(_bytes(one) for one in parameters),
        buffer_bytes=sum(_bytes(one) for one in whole.buffers()),
        batch_bytes=sum(batch),
        largest_bytes=max(batch),
        query_bytes=max(query),
    )


def _made(module: nn.Module, shape: Shape, rows: int) -> Sequence[int]:
    """Return the bytes of the input rows, and of each tensor that a forward pass allocates."""
    inputs = torch.empty(rows, *shape)
    known = [inputs, *module.parameters(), *module.buffers()]
    with torch.no_grad(), _Allocations(known) as made:
        module(inputs)
    return [_bytes(inputs), *made.sizes]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records bytes that operations allocate; views and in-place results allocate nothing.

    Args:
        known: tensors that exist before the forward pass, and so are not counted.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        #: All storages that were recorded; they stay alive, because a new storage could otherwise
        #: get the address of a freed one.
        self._seen: dict[int, UntypedStorage] = {}
        for tensor in known:
            self._is_new(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and self._is_new(one):
                self.sizes.append(one.untyped_storage().nbytes())
        return made

    def _is_new(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = storage._cdata in self._seen
        self._seen[storage._cdata] = storage
        return not known
