"""A torch module as layers that can be computed on shares, or a refusal that names the layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vfl.errors import PrivateLayerError
from vfl.mpc.layers import Layer

Kind = TypeVar("Kind", bound=nn.Module)

_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.GELU: "gelu",
    nn.Softplus: "softplus",
}
#: What does nothing at inference, or nothing to rows.
_IDLE = (nn.Identity, nn.Dropout, nn.Flatten)
_SOFTMAX = "leave it out: whoever receives the outputs applies it"
_FUNCTION = "nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU or nn.Softplus"
_NORM = "fold it into the nn.Linear before it: torch.nn.utils.fusion.fuse_linear_bn_eval"
_FEATURES = "keep it at the owner of the columns, as a bottom, and share what it gives"
_INSTEAD: Mapping[str, str] = {
    "Softmax": _SOFTMAX,
    "LogSoftmax": _SOFTMAX,
    "BatchNorm1d": _NORM,
    "LayerNorm": "scale the columns at their owner, and train without it",
    "Conv1d": _FEATURES,
    "Conv2d": _FEATURES,
    "MaxPool2d": _FEATURES,
    "AvgPool2d": _FEATURES,
    "Embedding": _FEATURES,
    "Flatten": "nn.Flatten(1), which keeps rows apart",
    "LSTM": _FEATURES,
    "GRU": _FEATURES,
    "LeakyReLU": _FUNCTION,
    "ELU": _FUNCTION,
    "SiLU": _FUNCTION,
}


def layers_of(module: nn.Module) -> list[Layer]:
    """The structure of a module made of `nn.Linear` and element-wise functions.

    Raises:
        PrivateLayerError: a layer of another kind, named with what to use; weights that are used
            twice, or fit nothing; what happens besides the layers; or no layer at all.
    """
    layers: list[Layer] = []
    used: dict[int, str] = {}
    for name, each in _leaves(module, ""):
        if _is(each, nn.Linear):
            _require_own_weights(name, each, used)
            _require_shape(name, each, layers[-1].outputs if layers else None)
            layers.append(
                Layer(each.in_features, each.out_features, "", bias=each.bias is not None)
            )
        elif type(each) in _FUNCTIONS and layers and not layers[-1].function:
            last = layers[-1]
            layers[-1] = Layer(last.inputs, last.outputs, _function(name, each), last.bias)
        elif not _passes(each):
            raise _refusal(name, each, follows=type(each) in _FUNCTIONS)
    if not layers:
        raise _refusal("", module, follows=False)
    return layers


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module that `layers_of` accepts, named by layer; axes (inputs, outputs)."""
    found: dict[str, Tensor] = {}
    for index, linear in enumerate(_linears(module)):
        found[f"{index}.weight"] = linear.weight.detach().cpu().double().t().contiguous()
        if linear.bias is not None:
            found[f"{index}.bias"] = linear.bias.detach().cpu().double()
    return found


def with_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module with other weights; the module itself stays as it is."""
    changed = copy.deepcopy(module)
    with torch.no_grad():
        for index, linear in enumerate(_linears(changed)):
            linear.weight.copy_(weights[f"{index}.weight"].t())
            if linear.bias is not None:
                linear.bias.copy_(weights[f"{index}.bias"])
    return changed


def _linears(module: nn.Module) -> Sequence[nn.Linear]:
    return [each for _, each in _leaves(module, "") if isinstance(each, nn.Linear)]


def _is(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a module computes what this kind does; a class derived from it may not."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def _passes(module: nn.Module) -> bool:
    """Whether rows pass a module as they are."""
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return False
    return any(_is(module, kind) for kind in _IDLE)


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers in the order in which they run, which only `nn.Sequential` tells."""
    _require_plain(name, module)
    if _is(module, nn.Sequential):
        # `named_children` would leave out a module that comes again.
        for part, each in module._modules.items():
            assert each is not None, "nn.Sequential has modules only"
            yield from _leaves(each, f"{name}.{part}" if name else part)
    else:
        yield name, module


def _require_plain(name: str, module: nn.Module) -> None:
    """Refuse what a module does besides its own layer, for nothing of that would be done."""
    got = fix = ""
    if module._forward_hooks or module._forward_pre_hooks:
        got, fix = "forward hooks", "remove them, and write what they compute as layers"
    elif is_parametrized(module):
        got = "parametrized weights"
        fix = "torch.nn.utils.parametrize.remove_parametrizations makes them plain weights"
    if got:
        raise PrivateLayerError(
            "a layer does something that is not computed on shares",
            where=_where(name),
            got=f"{type(module).__name__} with {got}",
            want="layers as they are",
            fix=fix,
        )


def _require_own_weights(name: str, linear: nn.Linear, used: dict[int, str]) -> None:
    """Refuse weights that come again: each layer's are shared and trained by themselves."""
    for parameter in linear.parameters():
        before = used.setdefault(id(parameter), name)
        if before != name:
            raise PrivateLayerError(
                "two layers have the same weights",
                where=_where(name),
                got=f"weights of {_where(before)}",
                want="weights of its own for every nn.Linear",
                fix="copy.deepcopy the layer where it comes again; functions may come again",
            )


def _require_shape(name: str, linear: nn.Linear, before: int | None) -> None:
    """Refuse weights that are no real numbers, or of another width than the layer before.

    Args:
        name: of the layer.
        linear: it.
        before: outputs of the layer before it, if there is one.
    """
    got = want = ""
    if not linear.weight.is_floating_point():
        got, want = f"weights of {linear.weight.dtype}", "weights of real numbers, such as float32"
    elif before not in (None, linear.in_features):
        got, want = f"{linear.in_features} inputs", f"{before}, as the layer before it gives"
    if got:
        raise PrivateLayerError(
            "a layer cannot be computed with these weights", where=_where(name), got=got, want=want
        )


def _where(name: str) -> str:
    return f"layer '{name}'" if name else "the model"


def _function(name: str, module: nn.Module) -> str:
    """A function whose options are those that are computed."""
    exact = True
    if isinstance(module, nn.GELU):
        exact = module.approximate == "none"
    elif isinstance(module, nn.Softplus):
        exact = (module.beta, module.threshold) == (1.0, 20.0)
    if not exact:
        raise PrivateLayerError(
            "a layer has options that are not computed on shares",
            where=f"layer '{name}'",
            got=repr(module),
            want=f"nn.{type(module).__name__}() as it is by default",
            fix="take the layer without options",
        )
    return _FUNCTIONS[type(module)]


def _refusal(name: str, module: nn.Module, *, follows: bool) -> PrivateLayerError:
    kind = type(module).__name__
    fix = _INSTEAD.get(kind)
    if follows:
        fix = "put an nn.Linear before it; a function comes after a linear layer"
    elif fix is None:
        fix = "write the model as an nn.Sequential of nn.Linear and element-wise functions"
    return PrivateLayerError(
        "a layer cannot be computed on shares",
        where=_where(name),
        got=kind,
        want=f"nn.Sequential, nn.Linear, nn.Flatten, nn.Dropout, {_FUNCTION}",
        fix=fix,
    )
