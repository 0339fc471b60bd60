"""Checks both halves make on what they are about to use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl.errors import NonFiniteError, ProtocolError, WidthError
from vfl.frame import Frame, Kind
from vfl.link import Link


def check_finite(values: Tensor, what: str, party: str, step: int) -> None:
    """Refuse NaN and Inf before they reach a model.

    The sum is finite for every finite tensor that does not overflow, and costs one pass without
    allocating; only when it is not are the entries looked at. A step makes nine such checks, so
    the sum is judged as a Python number: torch would run five operations on it.

    Raises:
        NonFiniteError: names the party and the step, and the share of entries, never a value.
    """
    if math.isfinite(values.sum().item()):
        return
    broken = int((~torch.isfinite(values)).sum())
    if broken:
        raise NonFiniteError(
            f"the {what} of party '{party}' holds NaN or Inf",
            where=f"step {step}",
            got=f"{broken} of {values.numel()} values",
            want="finite numbers",
            fix="lower the learning rate, or look for missing or huge values in the party's rows",
        )


def check_shape(cut: Tensor, rows: int, width: int, party: str) -> None:
    """Refuse a bottom whose output is not (rows, width).

    Raises:
        WidthError: with both shapes.
    """
    if cut.shape != (rows, width):
        raise WidthError(
            f"the bottom of party '{party}' gives another shape than agreed",
            got=f"{tuple(cut.shape)}",
            want=f"({rows}, {width})",
            fix=f"end the bottom in a layer of {width} units, or set the party's width",
        )


def expect(link: Link, kind: Kind, step: int, sender: str) -> Frame:
    """The next frame, which must be of this kind and step; `sender` is for the message.

    Raises:
        ProtocolError: anything else, a repeated frame included; nothing was changed by it.
    """
    frame = link.receive()
    if frame.kind is not kind or frame.step != step or frame.branch != 0:
        raise ProtocolError(
            f"a message out of turn from {sender}",
            got=f"{frame.kind.name} of step {frame.step}, branch {frame.branch}",
            want=f"{kind.name} of step {step}, branch 0",
        )
    return frame
