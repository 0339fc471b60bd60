"""Remote and shared tensors: run torch code on values that are in other processes or secret.

    alice, bob, carol = vfl.tensors.virtual("alice", "bob", "carol")
    pointer = vfl.tensors.send(x, alice)
    shared = vfl.tensors.fix_precision(x).share(alice, bob, dealer=carol)

Ordinary torch code runs on remote tensors and on shared tensors. After `hook()`, torch's tensors
and modules have further methods such as `send` and `share`. Workers made by `virtual` run in this
process and protect no secret; workers of a `Pool` are other processes; a `Party` runs the same
program as all other parties. docs/tensors.md describes what each kind of worker protects.

Shares support:

    arithmetic    + - * / @, whole powers, bmm, sum, mean, var; also with numbers and public tensors
    axes          reshape, permute, cat, stack, pad, flip, roll, and slices
    indices       public lists, indices and booleans; gather, index_select
    comparisons   < > <= >= == !=, where, masked_fill, max, min, argmax, argmin, abs, sign, clamp
    functions     exp, log, sqrt, rsqrt, reciprocal, erf, relu, sigmoid, tanh, gelu, silu, softmax,
                  log_softmax
    layers        linear, conv2d, avg_pool2d, max_pool2d, batch_norm, layer_norm, dropout
    losses        cross_entropy and nll_loss of public or shared labels, mse_loss, l1_loss, binary
                  cross-entropy
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.tensors.base import ChainTensor
    from vfl.tensors.fixed import FixedPrecisionTensor
    from vfl.tensors.methods import Party, fix_precision, hook, share, unhook
    from vfl.tensors.pointers import PointerTensor
    from vfl.tensors.private import PrivateTraining, pate
    from vfl.tensors.remote import Pool, Ticket, serve
    from vfl.tensors.workers import Worker, find, get, send, virtual

__all__ = [
    "ChainTensor",
    "FixedPrecisionTensor",
    "Party",
    "PointerTensor",
    "Pool",
    "PrivateTraining",
    "Ticket",
    "Worker",
    "find",
    "fix_precision",
    "get",
    "hook",
    "pate",
    "send",
    "serve",
    "share",
    "unhook",
    "virtual",
]

__getattr__ = lazy_names(__name__)
