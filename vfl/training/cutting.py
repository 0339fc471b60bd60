"""`vfl.split`: splits an existing model into parts that belong to several parties.

The model stays one module, and runs as its author wrote it. At a named layer (the cut layer), a
hook sends the layer's output in frames, and the model continues with the values that the receiver
decodes. One forward pass on an example input shows which operations each party computes, and which
values other than the cuts would cross between parties.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vfl import defenses
from vfl.core.errors import ConfigError, DataError, SpecError, WidthError, nearest
from vfl.core.frame import Observer
from vfl.core.registry import require_range
from vfl.core.seeds import scoped
from vfl.core.torch_internals import TorchDispatchMode
from vfl.training.split import Crossings, ForwardPass, arguments_of, taking

_FEATURE, _LABEL, _SERVER = "feature", "label", "server"
#: Hooks of defenses that replace the bottom or top model.
_ON_MODELS = ("wrap_bottom", "wrap_top")


def split(
    model: nn.Module,
    at: str | Sequence[str] | Mapping[str, str],
    example: Any,
    *,
    label_inputs: Collection[str] = (),
    row_axes: int = 1,
    untie: bool = False,
    codec: str = "none",
    defense: str = "none",
    task: str = "classification",
    seed: int = 0,
    observers: Sequence[Observer] = (),
) -> CutModel:
    """Split a model at named layers; forward and backward passes then send real frames.

    Weights, dropout and the model's own code do not change. Without codec and defense, a training
    ends with bitwise the same weights as a training of the unsplit model in the same loop.

    Args:
        model: any module; `split` makes no copy, and each forward pass adds hooks to its layers.
        at: name of the cut layer in `model.named_modules`. Alternatives: a dict with one layer per
            feature party; or two layers if the feature party sends a cut at the first, and the
            server sends a cut back at the second (U-shape: Vepakomma et al. 2018, section 3).
        example: the arguments of one forward pass: a tensor, a tuple, or a dict by argument name.
        label_inputs: names of model inputs that the label party has as well as the feature party,
            such as a mask.
        row_axes: number of leading axes of a cut that a codec counts as rows: 1 for (rows, ...), 2
            for tokens with axes (rows, tokens, width).
        untie: whether to give the label party separate weights where layers before and after the
            cut use the same weights.
        codec: spec of a codec, used for every cut.
        defense: spec of a defense that acts on cuts, gradients or outputs.
        task: "classification", or "regression" for numeric labels.
        seed: seed from which the parties' secrets are derived; real secrets would protect nothing,
            because one process holds all of them.
        observers: objects that receive every frame in addition to the ledger, for example a
            `Trace`.

    Raises:
        ConfigError: the layer does not exist, the example's forward pass does not reach it exactly
            once, the model does not accept the example, or a layer has no weights yet.
        SpecError: `SplitModule` rejects the settings; a defense replaces models, or cannot act on
            this model; values other than the cuts cross between parties; two parties use the same
            weights; or a cut has no axis after its row axes.
        DataError: a tensor at a cut contains integers, or a layer rejects the example's axes.

    >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> cut = split(model, at="1", example=torch.ones(2, 6), codec="topk:k=2")
    >>> cut(torch.ones(3, 6)).shape, cut.ledger.total_bytes("up") > 0
    (torch.Size([3, 2]), True)
    >>> cut.parts
    {'feature': ['0.weight', '0.bias'], 'label': ['2.weight', '2.bias']}
    """
    require_range("row_axes", row_axes, 1, 8)
    if not isinstance(model, nn.Module) or not isinstance(at, str | Sequence | Mapping):
        raise ConfigError(
            "a model is cut at layers, which are given by name",
            got=f"model of type {type(model).__name__}, at of type {type(at).__name__}",
            want="a torch module, and names of model.named_modules()",
        )
    if lazy := [name for name, one in model.named_parameters() if is_lazy(one)]:
        raise ConfigError(
            "a layer has no weights before the model has run",
            where="model",
            got=", ".join(lazy),
            fix="run the model on the example first: model(*example)",
        )
    given = _Given(example, frozenset(label_inputs))
    owners = _owners_of(at)
    traced = _trace(model, owners, given)
    traced.check_crossings()
    if untie:
        _untie(model, traced)
        traced = _trace(model, owners, given)
    traced.check_weights()
    cuts = [cut for one in traced.cuts for cut in one.tensors(row_axes)]
    return CutModel(
        model,
        cuts,
        traced,
        codec=codec,
        defense=defense,
        task=task,
        seed=seed,
        observers=observers,
        by_row=row_axes == 1,
    )


@dataclass(frozen=True)
class _Cut:
    """One tensor that crosses between two parties in a forward pass.

    Attributes:
        name: name of the tensor in the ledger, which is also the key of its codec.
        layer: name of the layer whose output contains the cut.
        position: position of the tensor among the tensors in this output.
        row_axes: number of leading axes that a codec counts as rows.
        width: number of values per row.
        back: whether a server sends the tensor back to the feature party (U-shape).
    """

    name: str
    layer: str
    position: int
    row_axes: int
    width: int
    back: bool


class CutModel(Crossings):
    """A model that sends the outputs of named layers in frames; the result of `split`.

    Attributes:
        model: the model that was split.
        parts: names of the weights of each party, by party.
        label_inputs: names of the model's arguments that the label party has as well as the feature
            party.
        by_row: whether each row of a cut belongs to one input row of the model, instead of one
            token.
        server: name of the party that sends a cut back in a U-shape; None if the model has no
            U-shape.
        ledger: ledger of all frames that were sent.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[_Cut],
        traced: _Traced,
        *,
        codec: str,
        defense: str,
        task: str,
        seed: int,
        observers: Sequence[Observer],
        by_row: bool,
    ) -> None:
        super().__init__(
            {cut.name: cut.width for cut in cuts},
            codec=codec,
            defense=defense,
            task=task,
            seed=seed,
            observers=observers,
            elsewhere=_ON_MODELS,
        )
        self.model, self.by_row = model, by_row
        self.parts, self.label_inputs = traced.parts(), traced.shared
        self._cuts = list(cuts)
        self._layers = list(dict.fromkeys(cut.layer for cut in cuts))
        self.server = next((cut.name for cut in cuts if cut.back), None)
        self._gives_rows = bool(defenses.uses(self._defense, "local_loss"))
        self._rows_of = traced.inputs_of_cuts()
        self._signature = inspect.signature(model.forward)
        self._takes_labels = "labels" in self._signature.parameters
        self._takes_rows = "rows" in self._signature.parameters
        if any(one.needs_rows for one in self._codecs.values()) and (
            not by_row or self._takes_rows
        ):
            why = (
                "its argument 'rows' belongs to the model itself"
                if by_row
                else "tokens have no positions"
            )
            fix = (
                "another name for that argument" if by_row else "row_axes=1 for texts of one length"
            )
            raise SpecError(f"this codec keeps state for each row, and {why}", got=codec, fix=fix)
        for cut in cuts:
            with scoped(self._secrets[cut.name].number("init")):
                self._add_ends(cut.name, cut.width)
        self._refuse_defense(defense, traced.outputs, by_row)
        self.restorer: nn.Module | None = None
        if self.server is not None and defenses.uses(self._defense, "restorer"):
            first, last = (cut.width for cut in cuts)
            with scoped(self._secrets[cuts[0].name].number("restorer")):
                self.restorer = self._defense.restorer(first, last)

    def forward(
        self, *inputs: Any, labels: Tensor | None = None, rows: Any = None, **named: Any
    ) -> Any:
        """Return the outputs of the model.

        Args:
            *inputs: arguments of the model.
            **named: arguments of the model by name.
            labels: labels of the rows. Defenses that read labels need them in training. The model
                receives the labels only if its `forward` has an argument with this name.
            rows: position of each row in your table, integers with axes (rows,). Codecs with state
                for each row need these positions in training. If the model itself has an argument
                `rows`, only the model receives the value.

        Raises:
            SpecError: see `SplitModule.forward`.
            DataError: this forward pass does not reach a cut layer, or the call has no inputs.
            WidthError: the number of a cut's values per row differs from the example.
        """
        if not inputs and not named:
            raise DataError(
                "the model got no inputs",
                want=", ".join(self._signature.parameters),
                fix="remove_unused_columns=False in the TrainingArguments of a Hugging Face "
                "Trainer, which drops columns that this module's forward does not name",
            )
        if labels is not None and self._takes_labels:
            named["labels"] = labels
        if rows is not None and self._takes_rows:
            named["rows"], rows = rows, None
        forward_pass = self._begin(labels, rows)
        arrived: dict[str, Tensor] = {}
        kept: list[Tensor] = []

        def cross(layer: str, module: nn.Module, given: Any, output: Any) -> Any:
            send = iter([cut for cut in self._cuts if cut.layer == layer])

            def one(values: Tensor) -> Tensor:
                cut = next(send)
                if cut.name in arrived:
                    raise DataError("a cut layer runs twice in one forward pass", where=layer)
                rows = self._rows(cut, inputs, named)
                arrived[cut.name] = self._through(cut, values, rows, forward_pass, kept)
                return arrived[cut.name]

            return mapped(output, one)

        hooks = [
            self.model.get_submodule(layer).register_forward_hook(partial(cross, layer))
            for layer in self._layers
        ]
        try:
            with taking("the model", (*inputs, *named.values())):
                outputs = self._called(inputs, named)
        finally:
            for hook in hooks:
                hook.remove()
        if len(arrived) < len(self._cuts):
            missed = [cut.layer for cut in self._cuts if cut.name not in arrived]
            raise DataError(
                "this forward pass does not reach a cut", where=missed[0], got=f"step {self.step}"
            )
        logits = _logits(outputs)
        if logits is not None:
            used = () if labels is None else self._cuts
            flat = {cut.name: arrived[cut.name].flatten(cut.row_axes) for cut in used}
            finished = self._finish(flat, logits, forward_pass)
            outputs = finished if isinstance(outputs, Tensor) else outputs
        self._count(forward_pass.addition)
        return outputs

    def _called(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the model; if its arguments do not fit, raise an error that names them."""
        try:
            return self.model(*inputs, **named)
        except TypeError:
            try:
                self._signature.bind(*inputs, **named)
            except TypeError as error:
                raise DataError(
                    "the arguments of the model differ from those of a batch",
                    got=str(error),
                    want=", ".join(self._signature.parameters),
                    fix="batches with the arguments of its forward alone, and 'labels'",
                ) from None
            raise

    def layer_of(self, party: str) -> str:
        """Return the name of the layer whose output is a party's cut."""
        return next(cut.layer for cut in self._cuts if cut.name == party)

    def inputs_of(self, party: str) -> Sequence[str]:
        """Return the names of those arguments of the model from which a party's cut is computed."""
        return self._rows_of[party]

    def arguments(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's arguments by name; labels and rows only if the model has them."""
        left_out = {"labels": not self._takes_labels, "rows": not self._takes_rows}
        named = {name: one for name, one in named.items() if not left_out.get(name)}
        return dict(_named(self._signature, inputs, named))

    def _through(
        self,
        cut: _Cut,
        values: Tensor,
        rows: Tensor | None,
        forward_pass: ForwardPass,
        kept: list[Tensor],
    ) -> Tensor:
        """Send one tensor; return the values that the receiver decodes, with the tensor's axes.

        Args:
            cut: the cut.
            values: its values.
            rows: see `_send`.
            forward_pass: the forward pass.
            kept: list to which the cut before and after the defense is appended, for the cut that
                comes back in a U-shape.
        """
        axes = values.shape
        if prod(axes[cut.row_axes :]) != cut.width:
            raise WidthError(
                "a row of a cut has another number of values than in the example",
                where=f"layer '{cut.layer}'",
                got=f"axes {tuple(axes)}",
                want=f"{cut.width} values in all axes from {cut.row_axes} on",
                fix="row_axes=2 for tokens of texts of different lengths",
            )
        is_flat = len(axes) == 2 and cut.row_axes == 1
        flat = values if is_flat else values.reshape(prod(axes[: cut.row_axes]), cut.width)
        # In a U-shape the feature party has the labels, and sends gradients of the cut that the
        # server sent back.
        own = (
            forward_pass if cut.back or self.server is None else forward_pass._replace(labels=None)
        )
        if not cut.back:
            guarded = self._guarded(cut.name, flat, forward_pass.context)
            kept += [one.reshape(*axes[: cut.row_axes], -1) for one in (flat, guarded)]
            flat = self.encoders[cut.name](guarded)
        sent = self._send(cut.name, flat, rows, own, back=cut.back)
        if cut.back and self.restorer is not None:
            sent = self.restorer(sent.reshape(*axes[: cut.row_axes], -1), *kept)
        return sent if is_flat else sent.reshape(axes)

    def _rows(self, cut: _Cut, inputs: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
        """Return a party's inputs as one tensor if the defense uses them, or else None."""
        if cut.back or not self._gives_rows:
            return None
        (name,) = self._rows_of[cut.name]
        (rows,) = tensors_of(dict(_named(self._signature, inputs, named))[name])
        return rows

    def _refuse_defense(self, spec: str, outputs: Any, by_row: bool) -> None:
        """Raise an error for a defense that cannot act on this model.

        Raises:
            SpecError: the defense needs one label per row, a single tensor of inputs, a single
                tensor in each direction, or a tensor of logits.
        """
        lacking = where = None
        several = [party for party, names in self._rows_of.items() if len(names) != 1]
        if self._on_labels and not by_row:
            lacking = (
                "one label for each row of a cut, but the rows are tokens, which have no label each"
            )
        elif self._gives_rows and several:
            lacking, where = "a single tensor of inputs per party", f"party '{several[0]}'"
        elif (
            self.server is not None
            and len(self._cuts) != 2
            and defenses.uses(self._defense, "restorer")
        ):
            lacking = "one tensor each way in a U-shape"
        elif defenses.uses(self._defense, "logits") and not isinstance(outputs, Tensor):
            lacking = "a model whose output is a tensor of logits"
        elif defenses.uses(self._defense, "loss") and _logits(outputs) is None:
            lacking = "a model whose output is a tensor, or has one as `logits`"
        if lacking is not None:
            raise SpecError(
                "this defense cannot act on this model", where=where, got=spec, want=lacking
            )


# Recording of the forward pass on the example: which values each operation reads and creates.


class _Given:
    """The arguments of the example, with which `split` runs the model once.

    Args:
        example: see `split`.
        label_inputs: names of the arguments that the label party has as well as the feature party.
    """

    def __init__(self, example: Any, label_inputs: frozenset[str]) -> None:
        # The tensors are copied, because a tensor that is passed as two arguments would count as
        # one value.
        self.args, self.named = mapped(arguments_of(example), torch.clone)
        self.label_inputs = label_inputs

    def by_name(self, model: nn.Module) -> list[tuple[str, Any]]:
        """Return every argument with the name that the model gives it.

        Raises:
            ConfigError: the model does not accept these arguments, or `label_inputs` contains a
                name that is no argument.
        """
        try:
            found = list(_named(inspect.signature(model.forward), self.args, self.named))
        except TypeError as error:
            raise ConfigError(
                "the model does not accept the example", where="example", got=str(error)
            ) from None
        if strange := self.label_inputs - {name for name, _ in found}:
            raise ConfigError(
                "the example has no such input",
                where="label_inputs",
                got=", ".join(sorted(strange)),
                want=", ".join(name for name, _ in found),
            )
        return found


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the values that each operation reads and creates.

    A number identifies each value of a tensor. All views of a tensor have the tensor's number. An
    in-place operation gives the tensor a new number, because its value is new; the record then says
    that this value was computed from all values that the operation read.

    Attributes:
        events: for each computed value in order: the value's number, the values from which it was
            computed, and the layer.
        axes: axes of the tensor of each value, by the value's number.
        layers: names of the layers that are running at this point, the innermost layer last.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, frozenset[int], str]] = []
        self.axes: list[tuple[int, ...]] = []
        self.layers: list[str] = []
        self._value_at: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = frozenset(map(self.value, tensors_of((args, kwargs or {}))))
        in_place = func.__name__.partition(".")[0].endswith("_") or "out" in (kwargs or {})
        for made in tensors_of(result):
            if in_place or self._memory(made) not in self._value_at:
                layer = self.layers[-1] if self.layers else ""
                self.events.append((self.new_value(made), read, layer))
        return result

    def value(self, tensor: Tensor) -> int:
        """Return the number of the value in a tensor."""
        found = self._value_at.get(self._memory(tensor))
        return self.new_value(tensor) if found is None else found

    def new_value(self, tensor: Tensor) -> int:
        """Assign a new number to a tensor's value."""
        self._alive.append(tensor)  # kept, so that no other tensor gets the same memory
        self.axes.append(tuple(tensor.shape))
        found = self._value_at[self._memory(tensor)] = len(self.axes) - 1
        return found

    def _memory(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided or not tensor.numel():
            return -id(tensor)
        return tensor.untyped_storage().data_ptr()


@dataclass
class _TracedCut:
    """One cut in the recorded forward pass on the example.

    Attributes:
        owner: party that sends the cut.
        layer: layer whose output is the cut.
        left, arrived: numbers of the values of the cut's tensors before and after they cross.
        axes: axes of each of the cut's tensors.
    """

    owner: str
    layer: str
    left: list[int]
    arrived: list[int]
    axes: list[tuple[int, ...]]

    def tensors(self, row_axes: int) -> list[_Cut]:
        """Return a description of each tensor that the cut sends.

        Raises:
            WidthError: a tensor has no axis after its row axes.
        """
        if any(len(axes) <= row_axes for axes in self.axes):
            raise WidthError(
                "a cut needs an axis after its row axes",
                where=f"layer '{self.layer}'",
                got=f"axes {min(self.axes, key=len)}",
                want=f"more than {row_axes} axes",
            )
        return [
            _Cut(
                self.owner if not position else f"{self.owner}-{position}",
                self.layer,
                position,
                row_axes,
                prod(axes[row_axes:]),
                self.owner == _SERVER,
            )
            for position, axes in enumerate(self.axes)
        ]


@dataclass
class _Traced:
    """The operations of the forward pass on the example, with each operation's party.

    Attributes:
        tape: its operations.
        cuts: cuts in the order in which they cross.
        inputs, weights: names of the model's inputs and of its weights (parameters and buffers), by
            the value's number.
        parameters: value numbers of those weights that are parameters.
        shared: names of inputs that the label party has as well as the feature party.
        outputs: outputs of the model for the example.
    """

    tape: _Tape
    cuts: list[_TracedCut]
    inputs: dict[int, str]
    weights: dict[int, list[str]]
    parameters: set[int]
    shared: frozenset[str]
    outputs: Any

    def __post_init__(self) -> None:
        self._reads: dict[int, set[int]] = defaultdict(set)
        self._children: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for made, read, layer in self.tape.events:
            self._reads[made] |= read
            for value in read:
                self._children[value].append((made, layer))
        self._arrived = {value: cut.owner for cut in self.cuts for value in cut.arrived}
        self._private = {value for value, name in self.inputs.items() if name not in self.shared}
        last = _FEATURE if any(cut.owner == _SERVER for cut in self.cuts) else _LABEL
        # For each cut, and then for the model's outputs: the party that computes it, and all values
        # on which it depends.
        self._stages = [(cut.owner, self._before(cut.left)) for cut in self.cuts]
        ends = list(map(self.tape.value, tensors_of(self.outputs)))
        self._stages.append((last, self._before(ends)))

    def parts(self) -> dict[str, list[str]]:
        """Return the names of each party's weights.

        A weight that the example does not use belongs to the party that has other weights of the
        same layer, or else to the party that computes the last operations.
        """
        owners: dict[str, list[str]] = {}
        for value, names in self.weights.items():
            found = dict.fromkeys(owner for owner, stage in self._stages if value in stage)
            owners |= {name: [*found] for name in names}
        of_layer = {name.rpartition(".")[0]: users for name, users in owners.items() if users}
        parts: dict[str, list[str]] = {owner: [] for owner, _ in self._stages}
        for name, users in owners.items():
            layer = name.rpartition(".")[0]
            for owner in users or of_layer.get(layer, [self._stages[-1][0]]):
                parts[owner].append(name)
        return parts

    def inputs_of_cuts(self) -> dict[str, list[str]]:
        """Return the names of the inputs from which each party's cut is computed."""
        return {
            owner: [self.inputs[value] for value in self.inputs if value in stage]
            for owner, stage in self._stages[:-1]
        }

    def tied(self) -> dict[int, list[str]]:
        """Return parameters that several parties use, with the layers of the last such party."""
        found = {}
        for value in self.parameters:
            users = [owner for owner, stage in self._stages if value in stage]
            if len(set(users)) > 1:
                stage = [mine for owner, mine in self._stages if owner == users[-1]][-1]
                found[value] = [layer for child, layer in self._children[value] if child in stage]
        return found

    def check_weights(self) -> None:
        """Raise an error if two parties use the same weights.

        Raises:
            SpecError: two parties use the same weights; the error names these weights.
        """
        if tied := self.tied():
            raise SpecError(
                "two parties use the same weights, but each party must have its own",
                got=", ".join(name for value in tied for name in self.weights[value]),
                fix="untie=True, or layers on one side of the cut",
            )

    def check_crossings(self) -> None:
        """Raise an error if values other than the cuts cross between parties.

        Raises:
            SpecError: an operation of one party reads a value that another party computed or owns.
        """
        private = self._behind_inputs()
        for at, (owner, stage) in enumerate(self._stages):
            for other, earlier in self._stages[:at]:
                if other != owner and (common := stage & earlier & private):
                    self._refuse(owner, other, stage, common)
        final, stage = self._stages[-1]
        if final == _LABEL and (held := [value for value in self._private if value in stage]):
            self._refuse(final, "a feature party", stage, set(held))
        for owner, stage in self._stages[:-1]:
            if owner == _SERVER and (held := [value for value in self.inputs if value in stage]):
                self._refuse(owner, _FEATURE, stage, set(held))

    def _refuse(self, owner: str, other: str, stage: set[int], common: set[int]) -> NoReturn:
        """Raise an error that names a layer of one party which reads a value of another party."""
        for value in common:
            for child, layer in self._children[value]:
                if child in stage and child not in common:
                    name = self.inputs.get(value)
                    what = (
                        f"input '{name}'" if name else f"a tensor of axes {self.tape.axes[value]}"
                    )
                    raise SpecError(
                        "values other than the cut cross between two parties",
                        where=f"layer '{layer}'" if layer else "the model's own forward",
                        got=f"party '{owner}' reads {what} of {other}",
                        want="operations after the cut that read only the cut",
                        fix="cut at a layer that all of it passes, or label_inputs=[...]",
                    )
        raise SpecError(
            "values other than the cut cross between two parties",
            got=f"party '{owner}' returns a value of {other}",
            fix="cut at a layer that all of it passes",
        )

    def _before(self, keys: Iterable[int]) -> set[int]:
        """Return the given values and all values that they depend on, back to the received cuts."""
        found: set[int] = set()
        todo = list(keys)
        while todo:
            value = todo.pop()
            if value not in found:
                found.add(value)
                todo += () if value in self._arrived else self._reads[value]
        return found

    def _behind_inputs(self) -> set[int]:
        """Return all values that depend on a cut, or on an input that only one party has."""
        found = self._private | set(self._arrived)
        for made, read, _ in self.tape.events:
            if found & read:
                found.add(made)
        return found


def _owners_of(at: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the name of each cut layer, by the party that sends the cut."""
    if isinstance(at, str):
        return {_FEATURE: at}
    if isinstance(at, Mapping):
        if at and _LABEL not in at and _SERVER not in at:
            return dict(at)
        raise ConfigError(
            "feature parties cannot have these names",
            where="at",
            got=", ".join(at) or "no party",
            want=f"a layer by party, and no party '{_LABEL}' or '{_SERVER}'",
        )
    if len(at) != 2:
        raise ConfigError(
            "two layers in order make a U-shape",
            where="at",
            got=f"{len(at)} layers",
            want="one name, two names, or a name for each party",
        )
    return dict(zip((_FEATURE, _SERVER), at, strict=True))


def _trace(model: nn.Module, owners: Mapping[str, str], given: _Given) -> _Traced:
    """Run the model on the example in evaluation mode, and record every operation.

    Raises:
        ConfigError: a layer does not exist, or the example's forward pass does not reach it exactly
            once.
        DataError: a tensor at a cut contains integers.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    for layer in owners.values():
        if layer not in layers or not layer:
            raise ConfigError(
                "the model has no such layer",
                where="at",
                got=f"'{layer}'",
                want="a name of model.named_modules()",
                fix=nearest(layer, layers),
            )
    tape, cuts = _Tape(), []
    arguments = given.by_name(model)
    inputs = {tape.value(one): name for name, value in arguments for one in tensors_of(value)}
    weights: dict[int, list[str]] = defaultdict(list)
    for name, held in _weights(model):
        weights[tape.value(held)].append(name)

    def enter(name: str, *_: Any) -> None:
        tape.layers.append(name)

    def leave(*_: Any) -> None:
        tape.layers.pop()

    def cross(owner: str, layer: str, module: nn.Module, args: Any, output: Any) -> Any:
        left = list(tensors_of(output))
        if not left or any(not one.is_floating_point() for one in left):
            raise DataError(
                "a cut must hold floating-point numbers",
                where=f"layer '{layer}'",
                got=", ".join(sorted({str(one.dtype) for one in left})) or "no tensor",
                fix="cut after the layer that turns indices into numbers",
            )
        arrived: list[Tensor] = []

        def one(values: Tensor) -> Tensor:
            arrived.append(values.clone())
            tape.new_value(arrived[-1])
            return arrived[-1]

        handed_on = mapped(output, one)
        before, behind = ([tape.value(values) for values in some] for some in (left, arrived))
        axes = [tuple(values.shape) for values in left]
        cuts.append(_TracedCut(owner, layer, before, behind, axes))
        return handed_on

    training = [module for module in model.modules() if module.training]

    def back_to_training() -> None:
        for module in training:
            module.training = True

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        for owner, layer in owners.items():
            hook = partial(cross, owner, layer)
            stack.enter_context(layers[layer].register_forward_hook(hook))
        stack.callback(back_to_training)
        stack.enter_context(torch.no_grad())
        stack.enter_context(tape)
        with taking("the model", [*given.args, *given.named.values()]):
            outputs = model.eval()(*given.args, **given.named)
    if sorted(cut.layer for cut in cuts) != sorted(owners.values()):
        raise ConfigError(
            "the example must pass each cut layer exactly once",
            where="at",
            got=", ".join(cut.layer for cut in cuts) or "no cut layer",
            want=", ".join(owners.values()),
        )
    parameters = set(map(tape.value, model.parameters()))
    return _Traced(tape, cuts, inputs, weights, parameters, given.label_inputs, outputs)


def _untie(model: nn.Module, traced: _Traced) -> None:
    """Give layers after a cut separate weights where layers before the cut use the same weights."""
    for key, users in traced.tied().items():
        for name in traced.weights[key]:
            layer, _, own = name.rpartition(".")
            if layer in users:
                module = model.get_submodule(layer)
                setattr(module, own, copy.deepcopy(getattr(module, own)))


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _named(
    signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Return the arguments of a call by name, with the names from a function's signature."""
    for name, value in signature.bind(*args, **named).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _logits(outputs: Any) -> Tensor | None:
    """Return the model's logits: its output, or the output's entry `logits`."""
    return outputs if isinstance(outputs, Tensor) else entry_of(outputs, "logits")


def entry_of(outputs: Any, name: str) -> Tensor | None:
    """Return a named tensor of a model's outputs, from a dict's entry or an object's attribute."""
    held = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return held if isinstance(held, Tensor) else None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in an argument or an output, including nested ones, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_of(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for place in fields(value):
            yield from tensors_of(getattr(value, place.name))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of an output with every tensor replaced, in the order of `tensors_of`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        found: Any = copy.copy(value)
        for name, one in value.items():
            found[name] = mapped(one, change)
        return found
    if isinstance(value, tuple | list):
        parts = [mapped(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        for place in fields(value):
            setattr(found, place.name, mapped(getattr(value, place.name), change))
        return found
    return value
