"""Form (shape and type) of an operation's result, derived from the forms of its operands alone.

A worker reports to its leader the shape of a result, and whether torch could compute the result at
all. For secret tensors, neither may depend on a value: the shape of `x[x > t]`, or an error about a
label out of range, would disclose a comparison with a secret. So the operation runs first on
tensors without values (torch's "meta" device), and is refused if its form depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Errors that torch raises for operands that do not fit together; their texts may contain values of
#: tensors.
UNFIT = (RuntimeError, IndexError, TypeError, ValueError)


class Form(NamedTuple):
    """Shape, type and options of a tensor, without its values; a form is hashable."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return the form of a tensor, without reading its values."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> Tensor:
        """Return a tensor of this form without values."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_() if self.requires_grad else made


def foreseen(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hidden: Collection[int],
) -> Form:
    """Return the form of ``call(*args, **kwargs)``; it must not depend on hidden values.

    Args:
        call: an operation of torch.
        args: its operands.
        kwargs: keyword arguments of the operation.
        hidden: `id` of each tensor whose values must not affect the form; the values of other index
            tensors may affect it.

    Raises:
        ValueError: torch cannot compute the result for these forms, or the result's form depends on
            hidden values.
    """
    try:
        if call is Tensor.__getitem__ and not any(id(one) in hidden for one in _tensors(args[1:])):
            return Form.of(call(Form.of(args[0]).empty(), *args[1:]))
        named = tuple((key, _frozen(value)) for key, value in sorted(kwargs.items()))
        return _foreseen(call, _frozen(tuple(args)), named, torch.is_grad_enabled())
    except Exception:  # torch raises various kinds of errors if values are missing
        raise ValueError("the shape of this result depends on values") from None


def lost(form: Form, operands: Sequence[Tensor]) -> Tensor:
    """Return a substitute, NaN or 0, for a result that torch failed to compute from the values.

    Args:
        form: form of the missing result.
        operands: tensors to which gradients flow from the substitute as from the missing result.
    """
    made = torch.zeros(form.shape, dtype=form.dtype)
    if not form.dtype.is_floating_point:
        return made
    for each in operands:
        if form.requires_grad and each.requires_grad:
            made = made + each.sum().to(form.dtype) * torch.nan
    return made + torch.nan


@lru_cache(maxsize=1024)
def _foreseen(call: Callable[..., Any], args: Any, named: Any, grad: bool) -> Form:
    with torch.set_grad_enabled(grad):
        found = call(*_thawed(args), **{key: _thawed(value) for key, value in named})
    if not isinstance(found, Tensor):
        raise TypeError("several results")
    return Form.of(found)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [one for each in values for one in _tensors(each)]
    return []


def _frozen(value: Any) -> Any:
    """Return a hashable copy of a value.

    Copies of two values are equal only if the values have equal types.
    """
    if isinstance(value, Tensor):
        return Form.of(value)
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple, tuple(_frozen(each) for each in value))
    if isinstance(value, slice):
        return (slice, (value.start, value.stop, value.step))
    return (type(value), value)


def _thawed(value: Any) -> Any:
    if isinstance(value, Form):
        return value.empty()
    kind, content = value
    if kind in (list, tuple):
        return kind(_thawed(each) for each in content)
    return slice(*content) if kind is slice else content
