"""The chain of objects behind a tensor: a torch tensor first, then representations of its values.

A `ChainTensor` is a torch tensor without memory for values. When torch code uses such a tensor,
torch calls `__torch_function__`, which calls the method `operate` of the tensor's class. The
attribute `child` is the next object of the chain, which represents the values. To add a new kind of
object to the chain, write one class with the method `operate`; see docs/tensors.md.

Operations have names such as `torch.add`, `functional.linear` and `tensor.add_`. `OPERATIONS` lists
all operations that a worker accepts: none of them shows a value. Results are tensors; a worker
refuses an operation that returns several of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from vfl.core.errors import UserError

_NAMES = """
add sub rsub mul div neg pow square sqrt rsqrt reciprocal exp log abs sign clamp erf
matmul mm bmm relu leaky_relu hardtanh sigmoid tanh gelu silu softmax log_softmax dropout
linear conv2d avg_pool2d max_pool2d adaptive_avg_pool2d layer_norm batch_norm
mean var sum cumsum amax amin max min argmax argmin maximum minimum lt le gt ge eq ne
where masked_fill cat stack gather index_select flip roll pad
mse_loss l1_loss cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits
zeros_like ones_like clone addcmul addcdiv lerp
__rsub__ __radd__ __rmul__ __rtruediv__ __rpow__ __rmatmul__ __pow__
add_ sub_ mul_ div_ zero_ addcmul_ addcdiv_ lerp_ sqrt_ copy_
"""
_VIEWS = """
reshape view flatten t transpose permute movedim squeeze unsqueeze expand narrow select
detach float double long
__getitem__
"""
_EMPTY = torch.empty(0)


def _operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    spaces = (("torch", torch), ("functional", functional), ("tensor", torch.Tensor))
    for prefix, space in spaces:
        for name in (_NAMES + _VIEWS).split():
            if callable(operation := getattr(space, name, None)):
                yield f"{prefix}.{name}", operation


OPERATIONS: Mapping[str, Callable[..., Any]] = dict(_operations())
#: `VIEWS` are names of operations whose result may share memory with their first operand;
#: `IN_PLACE` are names of operations that change their first operand.
VIEWS = frozenset(name for name in OPERATIONS if name.rpartition(".")[2] in _VIEWS.split())
IN_PLACE = frozenset(name for name in OPERATIONS if name[-1] == "_" != name[-2])
_NAME_OF: dict[Callable[..., Any], str] = {}
for _name, _operation in OPERATIONS.items():
    _NAME_OF.setdefault(_operation, _name)
# Python calls these two functions for the operators == and !=.
_NAME_OF |= {Tensor.__eq__: "tensor.eq", Tensor.__ne__: "tensor.ne"}


class ChainTensor(Tensor):
    """A torch tensor whose values are at a worker, or in another representation.

    Attributes:
        child: the next object of the chain, which represents the values.
        parent: the previous object of the chain, if there is one and it still exists.
        shape: shape of the represented values.
    """

    child: Any = None
    #: Name of this kind of tensor in error messages.
    kind = "a chain tensor"
    _shape = torch.Size()
    _parent: Callable[[], Any] | None = None
    _wants_grad = False

    @staticmethod
    def __new__(cls: type[ChainTensor], *args: object, **kwargs: object) -> ChainTensor:
        """Make the torch tensor at the start of the chain; it has no memory for values."""
        return torch.Tensor._make_subclass(cls, _EMPTY)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation on this tensor; torch calls this method instead of the operation."""
        name = _NAME_OF.get(func)
        if name is not None:
            return cls.operate(name, args, kwargs or {})
        if func is torch.is_complex:
            return False
        owner = getattr(func, "__self__", None) if func.__name__ == "__get__" else func
        cls.refuse(getattr(owner, "__name__", func.__name__))

    # The operation is called directly here, because torch's default `__torch_function__` takes as
    # much time as all other steps of an operation together.

    def __add__(self, other: Any) -> Any:
        return self.operate("tensor.add", (self, other), {})

    def __sub__(self, other: Any) -> Any:
        return self.operate("tensor.sub", (self, other), {})

    def __mul__(self, other: Any) -> Any:
        return self.operate("tensor.mul", (self, other), {})

    def __matmul__(self, other: Any) -> Any:
        return self.operate("tensor.matmul", (self, other), {})

    @classmethod
    def operate(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation of this name; each class of chain objects overrides this method.

        Raises:
            UserError: the class does not support the operation.
        """
        cls.refuse(name)

    @classmethod
    def refuse(cls, name: str) -> NoReturn:
        """Raise the error for an operation that this class does not support."""
        raise UserError(
            f"{cls.kind} does not support this operation",
            got=name,
            fix="docs/tensors.md lists the operations; call get() first if you may see the values",
        )

    def link(self, child: Any) -> None:
        """Make another object the next object of the chain."""
        self.child = child
        if isinstance(child, ChainTensor | Link):
            child._parent = weakref.ref(self)

    @property
    def parent(self) -> Any:
        """The previous object of the chain."""
        return None if self._parent is None else self._parent()

    def chain(self) -> list[Any]:
        """Return this object and all objects after it in the chain."""
        below = getattr(self.child, "chain", None)
        return [self, *(below() if below else [])]

    shape = property(lambda self: self._shape)
    ndim = property(lambda self: len(self._shape))
    device = torch.device("cpu")
    is_leaf = property(lambda self: True)
    is_sparse = property(lambda self: False)
    T = property(lambda self: self.t())
    __hash__ = torch.Tensor.__hash__

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the length of one axis."""
        return self._shape if dim is None else self._shape[dim]

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self._shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return self._shape.numel()

    def __len__(self) -> int:
        return self._shape[0]

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __bool__(self) -> NoReturn:
        self.refuse("bool")

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse("serialisation")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.refuse("deepcopy")


class Link:
    """An object of the chain that is not itself a torch tensor."""

    _parent: Callable[[], Any] | None = None

    @property
    def parent(self) -> Any:
        """The previous object of the chain."""
        return None if self._parent is None else self._parent()

    def chain(self) -> list[Any]:
        """Return a list of this object alone.

        The tensors to which it refers are at workers.
        """
        return [self]


def axes(shape: Sequence[int]) -> str:
    """Format a shape for use in `repr`.

    >>> axes((5, 3)), axes(())
    ('5x3', 'scalar')
    """
    return "x".join(map(str, shape)) or "scalar"
