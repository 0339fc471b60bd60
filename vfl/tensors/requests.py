"""Requests that a leader may send to a worker, and the range of every number in a request.

A request is a call of a method of `Worker`; the decorator `asked` marks such methods. The arguments
of a request are the method's parameters, and their types are defined here: each number has a
smallest and a largest value. Requests from this process and from other processes pass the same
checks. `STEPS` and `MAPS` define the parameters of each step of a computation on shares. Operands
of torch's operations are tensors, numbers, slices, and nested lists of such operands.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ArgsKwargs
from torch import Tensor

from vfl.config.toml import Settings
from vfl.core.errors import UserError, nearest
from vfl.core.registry import shortened
from vfl.mpc.many.members import MOST_HOLDERS
from vfl.mpc.ring import ELEMENT_BITS
from vfl.session.store.witness import MOST as MOST_COUNT
from vfl.tensors.convolution import NUMBERS
from vfl.tensors.pointers import Ref

F = TypeVar("F", bound=Callable[..., Any])

#: All requests that a worker accepts, each with the check of its arguments.
REQUESTS: dict[str, TypeAdapter[Any]] = {}

_MOST_AXES, _MOST_ELEMENTS = 16, 1 << 32
_MOST_NUMBER = (1 << 53) - 1
#: Largest depth of nested lists in an operand.
_DEPTH = 8
_ANY = ConfigDict(arbitrary_types_allowed=True)


def _small_enough(sizes: list[int]) -> list[int]:
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise ValueError(f"axes of at most {_MOST_ELEMENTS} elements")
    return sizes


def _numbered(ref: Ref) -> Ref:
    if not 0 < ref.number <= _MOST_NUMBER:
        raise ValueError(f"a tensor's number, 1 to {_MOST_NUMBER}")
    return ref


Flag = Annotated[bool, Strict()]
Text = Annotated[str, Field(strict=True, max_length=1 << 16)]
Parcel = Annotated[bytes, Strict()]
Values = Annotated[Tensor, WithJsonSchema({"type": "tensor"})]
#: Number of a tensor at a worker.
Number = Annotated[int, Field(strict=True, ge=1, le=_MOST_NUMBER)]
Numbers = list[Number]
#: Counter of a worker's store of spent privacy budgets; see `Worker.age`.
Count = Annotated[int, Field(strict=True, ge=0, lt=MOST_COUNT)]
At = Annotated[Ref, AfterValidator(_numbered), WithJsonSchema({"type": "tensor"})]
Readers = list[Text] | None
Keys = Annotated[list[Parcel], Field(min_length=2, max_length=MOST_HOLDERS)]
#: Fraction bits.
Bits = Annotated[int, Field(strict=True, ge=0, le=ELEMENT_BITS // 2 - 2)]
Shift = Annotated[int, Field(strict=True, ge=0, le=ELEMENT_BITS - 2)]
Factor = Annotated[int, Field(strict=True, ge=-(1 << 62), le=1 << 62)]
Size = Annotated[int, Field(strict=True, ge=0, le=_MOST_ELEMENTS)]
Sizes = Annotated[list[Size], Field(max_length=_MOST_AXES), AfterValidator(_small_enough)]
Dim = Annotated[int, Field(strict=True, ge=-_MOST_AXES - 1, le=_MOST_AXES)]
Dims = Annotated[list[Dim], Field(max_length=_MOST_AXES)]
Padding = Annotated[int, Field(strict=True, ge=0, le=1 << 20)]
Around = Annotated[list[Padding], Field(max_length=2 * _MOST_AXES)]
Product = Literal["mul", "matmul"]
Convolution = Literal["conv2d", "conv2d_input", "conv2d_weight"]
Axes = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=1 << 20)]],
                 Field(min_length=NUMBERS, max_length=NUMBERS)]  # fmt: skip
Place = Annotated[int, Field(strict=True, ge=0, le=ELEMENT_BITS - 2)]
#: Role number of a worker in a computation on shares, and number of share holders.
Role = Annotated[int, Field(strict=True, ge=0, le=MOST_HOLDERS)]
Holders = Annotated[int, Field(strict=True, ge=2, le=MOST_HOLDERS)]
Peers = Annotated[list[tuple[Text, Parcel]], Field(min_length=3, max_length=MOST_HOLDERS + 1)]
#: Standard deviations of noise: on a training's gradient sum, divided by the clip norm; and on a
#: count of votes.
Noise = Annotated[float, Field(strict=True, ge=0.01, le=1e6)]
Clip = Annotated[float, Field(strict=True, ge=1e-6, le=1e6)]
Rate = Annotated[float, Field(strict=True, gt=0, le=1)]
Sigma = Annotated[float, Field(strict=True, ge=0.01, le=1e6)]
Threshold = Annotated[float, Field(strict=True, ge=-1e12, le=1e12)]
Width = Annotated[int, Field(strict=True, ge=0, lt=1 << 20)]
Layer = Annotated[list[Text | Flag | list[Width | tuple[Width, ...]]], Field(max_length=3)]


class NoisyStep(Settings, arbitrary_types_allowed=True):
    """Arguments of one step of `private.PrivateTraining`."""

    plan: Text
    layers: Annotated[list[Layer], Field(max_length=1 << 10)]
    loss: Text
    clip: Clip
    noise: Noise
    rate: Rate
    inputs: At
    labels: At
    weights: list[At | Values]


class Contents(Settings, arbitrary_types_allowed=True):
    """Content of a message that one worker encrypts for another: a tensor and a few known fields.

    Attributes:
        value: elements of the tensor.
        readers: names of the parties that may read the tensor.
        share: whether the tensor is an additive share.
        mask: tokens of the holders, if the tensor is a mask.
        token: token of the mask that hides the tensor's values.
        votes: if the tensor contains votes: standard deviation of the noise on each count, and the
            identifier of the votes.
    """

    value: Values
    readers: Readers
    share: Flag = False
    mask: Keys | None = None
    token: Parcel | None = None
    votes: tuple[Sigma, Parcel] | None = None


def _within(value: Any, depth: int = _DEPTH) -> None:
    kind = type(value)
    if kind is int:
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError("whole numbers of at most 64 bits")
    elif kind is Ref:
        _numbered(value)
    elif isinstance(value, list | tuple):
        if not depth:
            raise ValueError(f"lists in at most {_DEPTH} lists")
        for each in value:
            _within(each, depth - 1)
    elif kind is slice:
        _within((value.start, value.stop, value.step), depth)


def _operands(values: Any) -> Any:
    if not isinstance(values, list | tuple):
        raise ValueError("a list")
    for each in values:
        _within(each)
    return values


def _named_operands(values: Any) -> Any:
    if not isinstance(values, dict):
        raise ValueError("a table")
    for each in values.values():
        _within(each)
    return values


#: Numbers in an operation of torch: 64-bit integers, and any float that a tensor can contain.
Operands = Annotated[Sequence[Any], PlainValidator(_operands), WithJsonSchema({"type": "operands"})]
NamedOperands = Annotated[
    Mapping[str, Any], PlainValidator(_named_operands), WithJsonSchema({"type": "operands"})
]


def _adapters(types: Mapping[str, Any]) -> Mapping[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(each, config=_ANY) for name, each in types.items()}


#: The parameters of each step of a computation on shares, and the parameters that follow the name
#: of each linear map.
STEPS = _adapters({
    "plus": tuple[Values], "product": tuple[Product] | tuple[Convolution, Axes],
    "divide": tuple[Shift], "negative": tuple[()], "leading": tuple[Place, Place],
    "transposed": tuple[()], "blank": tuple[Sizes],
    "mask": tuple[Sizes, Text | None], "input": tuple[()], "disclose": tuple[()],
})  # fmt: skip
MAPS = _adapters({
    "scale": tuple[Factor], "add": tuple[()],
    "by": tuple[Values, Product, Flag] | tuple[Values, Convolution, Flag, Axes],
    "reshape": tuple[Sizes], "expand": tuple[Sizes], "sum_to": tuple[Sizes],
    "gather": tuple[Values], "spread": tuple[Values, Sizes], "sum": tuple[Dims, Flag],
    "pad": tuple[Around], "stack": tuple[Dim], "cat": tuple[Dim], "clone": tuple[()],
})  # fmt: skip


def require_parameters(kind: str, parameters: Sequence[Any], where: str) -> None:
    """Refuse parameters that a step of a computation on shares does not accept.

    Raises:
        UserError: a parameter is out of range, or no step of this name exists.
    """
    steps, (name, *rest) = STEPS, [kind, *parameters]
    if kind == "linear":
        steps, (name, *rest) = MAPS, [*parameters] or [kind]
    if not isinstance(name, str) or name not in steps:
        raise UserError(
            "no worker knows this step",
            where=where,
            got=name if isinstance(name, str) else type(name).__name__,
            want=", ".join(steps),
            fix=nearest(str(name), steps),
        )
    try:
        steps[name].validate_python(tuple(rest))
    except ValidationError as error:
        raise _refused(error, f"{where}: {name}", ()) from None


def asked(method: F) -> F:
    """Mark a worker's method as a request, whose arguments are checked.

    An argument out of its range raises UserError.
    """
    name, parameters = method.__name__, tuple(inspect.signature(method).parameters)
    REQUESTS[name] = adapter = TypeAdapter[Any](cast(Any, method), config=_ANY)
    check = adapter.validator.validate_python

    @wraps(method)
    def door(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # This call checks the arguments and runs the method.
            return check(ArgsKwargs((self, *args), kwargs))
        except ValidationError as error:
            raise _refused(error, f"{name} at {self.name}", parameters) from None

    return cast(F, door)


def _refused(error: ValidationError, where: str, parameters: tuple[str, ...]) -> UserError:
    """Return an error for the first invalid argument.

    The error shows the argument's value only if it is a number.
    """
    first, *_ = error.errors(include_url=False)
    place = list(first["loc"])
    if parameters and isinstance(place[0], int) and place[0] < len(parameters):
        place[0] = parameters[place[0]]
    given, wanted = first["input"], first["msg"].removeprefix("Input should be ")
    number = isinstance(given, int | float) and not isinstance(given, bool)
    return UserError(
        "a worker does not accept this argument",
        where=": ".join([where, ".".join(map(str, place))]) if place else where,
        got=shortened(given) if number else type(given).__name__,
        want=wanted.removeprefix("Value error, "),
        fix="use arguments that vfl/tensors/requests.py allows",
    )
