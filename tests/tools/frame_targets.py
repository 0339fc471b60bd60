"""What is fuzzed: real frames of every codec and greeting, each with the code that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vfl.compression import INFERENCE, StepContext, make
from vfl.core.errors import AuthenticationError
from vfl.core.frame import HANDSHAKE_LIMIT_BYTES, Frame, Kind, to_bytes
from vfl.core.seeds import Secret, generator
from vfl.session.exchange import check_finite
from vfl.transport.handshake import (
    ANSWER_LIMIT_BYTES,
    Hello,
    Welcome,
    error_frame,
    in_session,
    read_refusal,
)

#: Every registered codec, with each of its formats of values and places.
SPECS = (
    "none",
    "topk:k=1",
    "topk:k=3",
    "topk:k=3,values=8",
    "topk:k=3,packer=index",
    "topk:k=3,values=8,packer=index",
    "topk:k=3,values=bf16,packer=bitmap,grad=bf16",
    "topk:k=3,values=4,packer=range,grad=4",
    "quantise:values=4,grad=8",
    "quantise:values=2,packer=range,scale=row",
    "relu:values=4,packer=bitmap,grad=4",
    "relu:values=fp32,packer=dense",
    "relu:values=4,packer=enumerative",
    "l1:target=3",
    "size:k=2,values=8",
    "sign:grad=2",
    "rate:bits=4",
    "randtopk:k=3,alpha=0.2",
    "randtopk:k=2,alpha=0.2,values=8,packer=index",
    "error_feedback:k=2,values=4,grad=4",
    "aqsgd:values=4",
    "c3sl:rows=2,values=8,grad=4",
    "splitfc:keep=0.5,bits=3,grad=3",
    "bottlenet:k=2",
    "fedlite:pieces=1,clusters=3,grad=4",
)
SHAPES = ((0, 12), (1, 3), (1, 12), (5, 12), (3, 40))
GREETING_SHARE = 10  # one frame in ten is a greeting
PEER = "the peer"
STEP = 3


@dataclass(frozen=True)
class Target:
    """A frame and its reader.

    Attributes:
        name: name of the parsed content, for a report.
        raw: the whole frame, undamaged.
        limit_bytes: the largest payload the reader's link would accept.
        read: the tensor a frame decodes to, None for a greeting; raises what a party would.
        shape: the agreed axes (rows, width) of that tensor; None for a greeting.
    """

    name: str
    raw: bytes
    limit_bytes: int
    read: Callable[[Frame], Tensor | None]
    shape: tuple[int, int] | None = None


def all_targets() -> list[Target]:
    """Cuts, queries and gradients of every codec and shape, and greetings among them."""
    coded = [target for spec in SPECS for shape in SHAPES for target in _coded(spec, *shape)]
    greetings = list(_greetings())
    copies = -(-len(coded) // (len(greetings) * (GREETING_SHARE - 1)))
    return coded + greetings * copies


def _coded(spec: str, rows: int, width: int) -> Iterator[Target]:
    """The frames one cut causes: itself in training, itself as a query, and its gradient."""
    codec = make(spec)
    codec.check(width)
    wire_width = codec.wire_width(width)
    shape = (rows, wire_width)
    cut = torch.randn(shape, generator=generator(0, "fuzz", spec, rows, width))
    sender = StepContext(STEP, True, Secret.of_simulation(0, PEER), np.arange(rows))
    reader = StepContext(STEP, training=True, rows=np.arange(rows))
    encoded = codec.encode(cut, sender)
    saved = codec.decode(encoded.payload, *shape, reader).saved
    gradient = codec.encode_grad(cut / 8, saved, sender)

    def read_cut(frame: Frame) -> Tensor:
        return _finite(codec.decode(_payload(frame), *shape, reader).cut)

    def read_query(frame: Frame) -> Tensor:
        return _finite(codec.decode(_payload(frame), *shape, INFERENCE).cut)

    def read_gradient(frame: Frame) -> Tensor:
        return _finite(codec.decode_grad(_payload(frame), encoded.saved, *shape, reader))

    query = codec.encode(cut, INFERENCE).payload
    limit_bytes = codec.payload_limit(*shape)
    for kind, payload, read in (
        (Kind.CUT, encoded.payload, read_cut),
        (Kind.QUERY, query, read_query),
        (Kind.GRAD, gradient, read_gradient),
    ):
        raw = to_bytes(Frame(kind, STEP, payload))
        yield Target(f"{kind.name} {spec} {rows}x{width}", raw, limit_bytes, read, shape)


def _payload(frame: Frame) -> memoryview:
    """The payload of a frame of the session; its kind is not asked, so that decoders see more."""
    return memoryview(in_session(frame, PEER).payload)


def _finite(values: Tensor) -> Tensor:
    """What an exchange does behind every decoder."""
    check_finite(values, "cut", PEER, STEP)
    return values


def _greetings() -> Iterator[Target]:
    about = {"version": "1", "digests": ["0a1b2c", "3d4e5f"], "rows": [12, 3], "resume": None}
    hello = Hello("session-1", "17", "secret-token", about, sent=4, received=3)
    welcome = Welcome(received=4, terms=about | {"share": 0.25})
    refusal = error_frame(AuthenticationError("wrong token", where=PEER, fix="ask for another"))

    def read_hello(frame: Frame) -> None:
        Hello.of(frame)

    def read_answer(frame: Frame) -> None:
        if frame.kind is Kind.ERROR:
            read_refusal(frame, PEER)
        else:
            Welcome.of(frame)

    yield Target("HELLO", to_bytes(hello.frame()), HANDSHAKE_LIMIT_BYTES, read_hello)
    for frame in (welcome.frame(), refusal):
        yield Target(frame.kind.name, to_bytes(frame), ANSWER_LIMIT_BYTES, read_answer)
