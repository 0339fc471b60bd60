"""Converts a torch module to a private module, with three parties as threads of this process.

The private module is for trials, tests and measurements; with ``secure = "permuted"``, the same
parties train in a session. Each layer of the module becomes a layer on shares; if a layer has no
such form, the error names the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vfl.core.errors import BadOptionError, DataError, PrivateLayerError, WidthError
from vfl.core.products import members_of
from vfl.core.registry import named, require, require_choice, require_range, require_seconds
from vfl.core.seeds import permutation
from vfl.mpc.channel import Leak, Traffic
from vfl.mpc.rules import P0, P1, Mode, Rules
from vfl.mpc.shares import SharedTensor
from vfl.mpc.three_party.network import Layer, Loss, Network, share_targets
from vfl.mpc.three_party.party import Party
from vfl.mpc.three_party.trio import Trio

_Result = TypeVar("_Result")
Kind = TypeVar("Kind", bound=nn.Module)

_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.GELU: "gelu",
    nn.Softplus: "softplus",
}
#: Classes of modules that do nothing at inference, or that leave rows unchanged.
_IDLE = (nn.Identity, nn.Dropout, nn.Flatten)
#: Number of rows in a batch of `PrivateModule.fit`, if the caller states none.
_BATCH_ROWS = 64
_SOFTMAX = "leave it out: the receiver of the outputs applies it"
_FUNCTION = "nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU or nn.Softplus"
_NORM = "fold it into the nn.Linear before it: torch.nn.utils.fusion.fuse_linear_bn_eval"
_FEATURES = "keep it at the owner of the columns, as a bottom, and share its outputs"
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
    "Flatten": "nn.Flatten(1), which keeps rows separate",
    "LSTM": _FEATURES,
    "GRU": _FEATURES,
    "LeakyReLU": _FUNCTION,
    "ELU": _FUNCTION,
    "SiLU": _FUNCTION,
}


@overload
def private(
    module: nn.Sequential,
    mode: Mode = "fast",
    *,
    rules: Rules | None = None,
    timeout_s: float = 30.0,
) -> PrivateModule: ...


@overload
def private(
    module: nn.Module,
    mode: Mode = "fast",
    *,
    timeout_s: float = 30.0,
    folder: Path | None = None,
    form: Any = None,
) -> Any: ...


def private(
    module: nn.Module,
    mode: Mode = "fast",
    *,
    rules: Rules | None = None,
    timeout_s: float = 30.0,
    folder: Path | None = None,
    form: Any = None,
) -> Any:
    """Make a module that three parties compute; no party has both inputs and weights.

    P1 owns the weights (and the targets of a training), P0 owns the inputs and receives the
    outputs, and P2 deals and evaluates functions. All parties must follow the protocol and not
    collude; P2 sees the values before every function in permuted order.

    Transformers use other protocols. For a `vfl.models.decoder.Decoder` or `Encoder`, the roles are
    those of chapter 6 (`vfl.llm.private_decoder`): P0 owns the weights, P1 owns the text and sees
    permuted values, and P2 only deals ahead of time.

    Args:
        module: a `Decoder` or `Encoder`, or an `nn.Sequential` of `nn.Linear`, element-wise
            functions, `nn.Flatten` and `nn.Dropout`; dropout is removed.
        mode: "fast", or "thesis" for chapter 5 as the thesis prints it; see `Rules`.
        rules: rules that replace the mode's default rules; not allowed for a transformer.
        timeout_s: number of seconds that a party waits for another party; wide layers and many rows
            need more.
        folder: folder for a transformer's dealt offline material; by default a temporary folder.
        form: form that replaces the mode's default form; allowed only for a transformer.

    Raises:
        PrivateLayerError: the module has a layer that cannot be computed on shares; the error names
            the layer and suggests a replacement.
        BadOptionError: `timeout_s` is shorter than 1 ms or longer than a week; or an argument does
            not suit this kind of module.
        RingRangeError: a weight is too large for the ring.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> inputs = torch.tensor([[0.5, -1.0, 2.0]])
    >>> with private(model) as hidden:
    ...     bool((hidden(inputs) - model(inputs)).abs().max() < 2e-5)
    True
    """
    require_seconds("timeout_s", timeout_s)
    for path in members_of("vfl.mpc.private").values():
        member = named(path)
        if isinstance(module, member.computes):
            require("rules", rules, "none for a transformer: use form", rules is None)
            return member(module, form or mode, timeout_s, folder)
    require(
        "folder", folder, "no argument: only a transformer has offline material", folder is None
    )
    require("form", form, "no argument: only a transformer has a form", form is None)
    return PrivateModule(module, rules or Rules(mode), timeout_s)


class PrivateModule(nn.Module):
    """Module that `private` returns; the end of its `with` block ends the three threads."""

    def __init__(self, module: nn.Module, rules: Rules, timeout_s: float) -> None:
        super().__init__()
        self._layers = layers_of(module)
        # a list, because torch would otherwise register these weights as parameters of this module
        self._template = [module]
        terms = {"layers": [repr(layer) for layer in self._layers]}
        self._trio = Trio(rules, terms, timeout_s)
        values = weights_of(module)

        def share(party: Party) -> Network:
            own = values if party.role == P1 else None
            network = Network.share(party, self._layers, P1, own)
            network.open(party, phase="setup")
            return network

        self._networks = self._run(share)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of axes (rows, outputs) in the inputs' type.

        Only P0 learns the outputs. If the inputs are integers, the outputs are float32.

        Raises:
            DataError: `inputs` is not a tensor of real numbers with rows and columns.
            WidthError: the number of input columns differs from that of the first layer.
            RingRangeError: an input or an activation is too large for the ring.
        """
        flat = self._flat(inputs)

        def infer(party: Party) -> Tensor | None:
            shared = _inputs(party, flat)
            network = self._networks[party.role]
            outputs = network.infer(party, shared)
            found = party.reveal(outputs, "outputs", P0)
            if found is not None:
                network.check_outputs(party.rules, found)
            return found

        outputs = self._run(infer)[P0]
        assert outputs is not None, "P0 receives the outputs"
        return outputs.to(inputs.dtype if inputs.is_floating_point() else torch.float32)

    def fit(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        loss: Loss = "cross_entropy",
        learning_rate: float = 0.1,
        batch_size: int | None = None,
        epochs: int = 1,
        seed: int = 0,
    ) -> PrivateModule:
        """Train by gradient descent on shares; no party sees a new weight, a gradient or a loss.

        Args:
            inputs: inputs of axes (rows, columns), which P0 owns.
            targets: targets of axes (rows, outputs) or (rows,), which P1 owns; from 0 to 1 for
                "cross_entropy".
            loss: "squared" or "cross_entropy"; "cross_entropy" needs a final sigmoid.
            learning_rate: learning rate, by which the mean gradient of a batch is multiplied.
            batch_size: number of rows in a batch, at most all rows; by default 64, or all rows if
                there are fewer. The last batch of an epoch has the remaining rows, and is left out
                if it has only one row.
            epochs: number of passes over the rows.
            seed: public seed that determines the order of the rows.

        Raises:
            BadOptionError: an option's value does not fit the module or the rows.
            DataError: an argument is not a tensor of real numbers, or a target is outside a
                sigmoid's range.
            WidthError: the number of input columns differs from that of the first layer, or there
                are not as many targets as rows.
            RingRangeError: an input, a target or an activation is too large for the ring.
        """
        flat = self._flat(inputs)
        _require_numbers("targets", targets, "(rows, outputs) or (rows,)", 1)
        require_range("epochs", epochs, 1)
        require_range("seed", seed, 0)
        if len(targets) != len(flat):
            raise WidthError(
                "every row needs a target", got=f"{len(targets)}", want=f"{len(flat)}, as rows"
            )
        wanted = targets.detach().double().reshape(len(flat), -1)
        batch_size = min(_BATCH_ROWS, len(flat)) if batch_size is None else batch_size
        self._check_training(loss, learning_rate, batch_size, wanted)

        def train(party: Party) -> None:
            role = party.role
            (rows,) = party.open(_inputs(party, flat), phase="setup")
            labels = share_targets(party, P1, wanted.shape, wanted if role == P1 else None)
            network = self._networks[role]
            for index in batches(len(flat), batch_size, epochs, seed):
                batch = rows.rows(index), labels.rows(index)
                network.train_step(party, *batch, loss, learning_rate)

        self._run(train)
        return self

    def reveal(self) -> nn.Module:
        """Return a copy of the module with the present weights, which P1 thereby learns."""
        weights = self._run(lambda party: self._networks[party.role].reveal(party, P1))[P1]
        return with_weights(self._template[0], weights)

    def traffic(self) -> list[Traffic]:
        """Return the traffic between the parties since the private module was made."""
        return self._trio.traffic()

    def leaks(self) -> list[Leak]:
        """Return the values that each party has learned since the private module was made."""
        return self._trio.leaks()

    def close(self) -> None:
        """End the three threads."""
        self._trio.close()

    def __enter__(self) -> PrivateModule:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, program: Callable[[Party], _Result]) -> list[_Result]:
        return self._trio.run(program)

    def _flat(self, inputs: Tensor) -> Tensor:
        _require_numbers("inputs", inputs, "(rows, columns)", 2)
        flat = inputs.detach().cpu().double().flatten(1)
        if flat.shape[1] != self._layers[0].inputs:
            raise WidthError(
                "the inputs must have as many columns as the first layer has inputs",
                got=f"{flat.shape[1]} values a row",
                want=f"{self._layers[0].inputs}",
            )
        return flat

    def _check_training(self, loss: Loss, rate: float, batch_size: int, wanted: Tensor) -> None:
        require_choice("loss", loss, ("cross_entropy", "squared"))
        require_range("learning_rate", rate, 1e-9, 100)
        require_range("batch_size", batch_size, 1, len(wanted))
        last = self._layers[-1]
        if loss == "cross_entropy" and last.function != "sigmoid":
            raise BadOptionError(
                "cross entropy needs a model that ends in a sigmoid",
                where="option 'loss'",
                got=f"a model that ends in {last.function or 'a linear layer'}",
                want="nn.Sigmoid as the last layer",
                fix='add it, or take loss="squared"',
            )
        if wanted.shape[1] != last.outputs:
            raise WidthError(
                "the targets have another number of columns than the last layer has outputs",
                got=f"{wanted.shape[1]} values a row",
                want=f"{last.outputs}",
            )
        if loss == "cross_entropy" and not ((wanted >= 0) & (wanted <= 1)).all():
            # Divisions are exact for differences between targets from 0 to 1 and outputs of a
            # sigmoid; larger differences could wrap around in the ring.
            raise DataError(
                "some targets are outside the range of a sigmoid",
                where="targets",
                got="some below 0, above 1 or not finite",
                want="0 to 1",
                fix='scale them, or take loss="squared"',
            )


def _require_numbers(name: str, given: object, axes: str, least: int) -> None:
    """Refuse an argument that is not a tensor of real numbers, or has too few axes or no row."""
    got = type(given).__name__
    if isinstance(given, Tensor):
        got = f"{given.dtype} of axes {tuple(given.shape)}"
        if given.dim() >= least and len(given) and not given.is_complex():
            return
    raise DataError(
        "these rows cannot be shared",
        where=name,
        got=got,
        want=f"a tensor of real numbers, axes {axes}, at least a row",
        fix="torch.as_tensor converts an array to a tensor; write a single row as row[None]",
    )


def _inputs(party: Party, flat: Tensor) -> SharedTensor:
    own = flat if party.role == P0 else None
    return party.share(P0, flat.shape, own, "inputs", scale="the columns")


def batches(count: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield the row positions of each batch, int64; the public seed determines their order.

    A last batch of only one row is left out, as in `vfl train`.
    """
    for epoch in range(epochs):
        order = torch.from_numpy(permutation(seed, count, "mpc", epoch))
        for start in range(0, count, batch_size):
            index = order[start : start + batch_size]
            if len(index) > 1 or len(index) == min(batch_size, count):
                yield index


def layers_of(module: nn.Module) -> list[Layer]:
    """Return the structure of a module that consists of `nn.Linear` and element-wise functions.

    Raises:
        PrivateLayerError: a layer is of another kind, and the error suggests a replacement; or
            weights are used twice or do not fit; or the module has side effects such as hooks; or
            it has no layer.
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
    """Return the weights of a module that `layers_of` accepts, by name.

    Matrices have the axes (inputs, outputs).
    """
    found: dict[str, Tensor] = {}
    for index, linear in enumerate(_linears(module)):
        found[f"{index}.weight"] = linear.weight.detach().cpu().double().t().contiguous()
        if linear.bias is not None:
            found[f"{index}.bias"] = linear.bias.detach().cpu().double()
    return found


def with_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the module with other weights; the module itself does not change."""
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
    """Return whether a module computes the same as `kind`.

    A subclass may compute something else.
    """
    return isinstance(module, kind) and type(module).forward is kind.forward


def _passes(module: nn.Module) -> bool:
    """Return whether a module returns its rows unchanged."""
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return False
    return any(_is(module, kind) for kind in _IDLE)


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers in the order of execution; only `nn.Sequential` defines such an order."""
    _require_plain(name, module)
    if _is(module, nn.Sequential):
        # `named_children` would leave out a module that occurs for the second time.
        for part, each in module._modules.items():
            assert each is not None, "nn.Sequential has modules only"
            yield from _leaves(each, f"{name}.{part}" if name else part)
    else:
        yield name, module


def _require_plain(name: str, module: nn.Module) -> None:
    """Refuse a module with hooks or similar additions; on shares, they would be ignored."""
    what, want = (
        "a layer has additions such as hooks, which are not computed on shares",
        "layers as they are",
    )
    kind = type(module).__name__
    if module._forward_hooks or module._forward_pre_hooks:
        fix = "remove them, and write their computation as layers"
        raise _refused(what, name, f"{kind} with forward hooks", want, fix)
    if is_parametrized(module):
        fix = "torch.nn.utils.parametrize.remove_parametrizations makes them plain weights"
        raise _refused(what, name, f"{kind} with parametrized weights", want, fix)


def _require_own_weights(name: str, linear: nn.Linear, used: dict[int, str]) -> None:
    """Refuse weights that occur twice, because each layer's weights are trained separately."""
    for parameter in linear.parameters():
        before = used.setdefault(id(parameter), name)
        if before != name:
            raise _refused(
                "two layers have the same weights",
                name,
                f"weights of {_where(before)}",
                "weights of its own for every nn.Linear",
                "a copy.deepcopy of the layer where it occurs again; functions may occur again",
            )


def _require_shape(name: str, linear: nn.Linear, before: int | None) -> None:
    """Refuse weights that are not real numbers, or do not fit the previous layer's width.

    Args:
        name: name of the layer.
        linear: the layer.
        before: number of outputs of the previous layer; None if this is the first layer.
    """
    what = "a layer cannot be computed with these weights"
    if not linear.weight.is_floating_point():
        want = "weights of real numbers, such as float32"
        raise _refused(what, name, f"weights of {linear.weight.dtype}", want)
    if before not in (None, linear.in_features):
        want = f"{before}, as the layer before it returns"
        raise _refused(what, name, f"{linear.in_features} inputs", want)


def _refused(
    what: str, name: str, got: str, want: str, fix: str | None = None
) -> PrivateLayerError:
    return PrivateLayerError(what, where=_where(name), got=got, want=want, fix=fix)


def _where(name: str) -> str:
    return f"layer '{name}'" if name else "the model"


def _function(name: str, module: nn.Module) -> str:
    """Return the name of a module's function; refuse options that shares do not support."""
    exact = True
    if isinstance(module, nn.GELU):
        exact = module.approximate == "none"
    elif isinstance(module, nn.Softplus):
        exact = (module.beta, module.threshold) == (1.0, 20.0)
    if not exact:
        raise _refused(
            "a layer has options that are not supported on shares",
            name,
            repr(module),
            f"nn.{type(module).__name__}() with its defaults",
            "use the layer without options",
        )
    return _FUNCTIONS[type(module)]


def _refusal(name: str, module: nn.Module, *, follows: bool) -> PrivateLayerError:
    kind = type(module).__name__
    fix = _INSTEAD.get(kind)
    if follows:
        fix = "put an nn.Linear before it; a function comes after a linear layer"
    elif fix is None:
        fix = "write the model as an nn.Sequential of nn.Linear and element-wise functions"
    want = f"nn.Sequential, nn.Linear, nn.Flatten, nn.Dropout, {_FUNCTION}"
    return _refused("a layer cannot be computed on shares", name, kind, want, fix)
