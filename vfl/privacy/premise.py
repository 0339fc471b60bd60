"""Test whether DP-SGD's conditions hold for a model, on synthetic rows instead of a party's rows.

DP-SGD clips each row's gradient. That bounds the effect of one row on the release only under three
conditions: a row's output and gradient depend on no other row, a pass through the model changes no
other lasting state, and the norms are those of the true gradients. `prove` tests all three
conditions; `require_rows_apart` tests only that a row's output depends on no other row, which
suffices for noise on rows. The tests use batches of several sizes, including the lengths of the
model's own inner axes: a faulty module may confuse axis 0 (rows) with another axis only if both are
equally long.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl.core.errors import PrivacyError
from vfl.core.seeds import scoped
from vfl.privacy.dpsgd import RowClipper, gradients
from vfl.privacy.row_gradients import Call

#: Function that maps the rows of each input to outputs, as in the training.
Forward = Callable[..., object]

_SIZE, _OTHER_SIZE = 3, 2
#: Largest batch size that the test takes from the lengths of the model's inner axes.
_LARGEST_INNER = 64
#: Tolerances, relative to the largest value, for the same batch, for another batch size, and for
#: norms: a larger difference is more than rounding.
_SAME_BATCH, _OTHER_BATCH, _NORM = 1e-5, 1e-3, 5e-3
_FIX = "a model that treats each row separately and stores nothing of it, such as mlp, cnn or vit"


def _normal(shape: tuple[int, ...], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, others = torch.randn((2, *shape), generator=draw)
    return rows, 100 * others


def _moderate(shape: tuple[int, ...], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, others = torch.rand((2, *shape), generator=draw)
    return rows, others


def _codes(shape: tuple[int, ...], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randint(2, shape, generator=draw).float()
    return rows, 1 - rows


#: Functions that make synthetic rows, and further rows to replace the first ones; the test uses the
#: first function whose rows the model accepts.
_KINDS = (_normal, _moderate, _codes)
Rows = Sequence[Tensor]


def prove(
    clipper: RowClipper,
    forward: Forward,
    shapes: Sequence[tuple[int, ...]],
    where: str,
    most_rows: int = _LARGEST_INNER,
) -> None:
    """Refuse a model that mixes the rows of a batch; the test leaves the model unchanged.

    If the rules for layers give the true row gradients at every tested batch size, the clipper will
    use these rules in the training. If the rules fail, the clipper will use one backward pass per
    row. The rules fail, for example, for weights that a function also uses outside their layer, or
    for layers whose axis 0 is the steps of a sequence.

    Args:
        clipper: clipper of the model's gradients.
        forward: function that maps rows of each input, axes (rows, *shape), to outputs, axes (rows,
            width).
        shapes: shape of one row of each input.
        where: name of the model's owner, for the error message.
        most_rows: largest number of rows in a batch of the training; the test's batches are no
            larger, except batches of two and three rows.

    Raises:
        PrivacyError: the model mixes rows; the error names the layer where it can be identified.
    """
    if not any(weight.requires_grad for weight in clipper.model.parameters()):
        return
    with _tried(_Trial(clipper.model, forward, shapes, where, clipper)) as trial:
        trial.all(most_rows)


def require_rows_apart(
    model: nn.Module, forward: Forward, shapes: Sequence[tuple[int, ...]], where: str
) -> None:
    """Refuse a model whose outputs for a row depend on other rows, in training or evaluation.

    Args:
        model: the model; the test leaves it unchanged.
        forward: function that maps rows of each input, axes (rows, *shape), to outputs, axes (rows,
            width).
        shapes: shape of one row of each input.
        where: name of the model's owner, for the message.

    Raises:
        PrivacyError: the model mixes rows; the error names the layer where it can be identified.
    """
    with _tried(_Trial(model, forward, shapes, where)) as trial:
        trial.rows_apart()


@dataclass(frozen=True, slots=True)
class _Pass:
    """One call of a module: its first input and its output; None if that is no tensor."""

    module: nn.Module
    inputs: Tensor | None
    output: Tensor | None


class _Trial:
    """A test of one model, with or without its clipper."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        shapes: Sequence[tuple[int, ...]],
        where: str,
        clipper: RowClipper | None = None,
    ) -> None:
        self.model, self._forward, self._shapes, self._where = model, forward, shapes, where
        self._clipper, self._kind = clipper, _KINDS[0]
        self._weights = [one for one in model.parameters() if one.requires_grad]
        self._before: dict[str, Tensor] = {}
        #: Buffers and their first values; in a test of outputs only, every pass starts with these
        #: values.
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def all(self, most_rows: int) -> None:
        """Run all tests that DP-SGD needs."""
        self.model.train()
        _move(self._weights)
        self._before = self._tensors()
        rows, others = self._choose_rows()
        if self._clipper is not None and self._clipper.trusts_rules is None:
            self._clipper.trusts_rules = True
        self._try_state(rows, others)
        self._try_batches(rows, most_rows)
        self._try_sizes(rows)
        self.model.eval()
        self._outputs(rows)
        self._require_unchanged()

    def rows_apart(self) -> None:
        """Test only that a row's output does not depend on other rows."""
        _move(self._weights)
        self._buffers = [(one, one.detach().clone()) for one in self.model.buffers()]
        for training in (True, False):
            self.model.train(training)
            rows, _ = self._choose_rows()
            self._try_batches(rows, _LARGEST_INNER)
            self._try_sizes(rows)

    def refusal(self, what: str, layer: str = "", **said: str) -> PrivacyError:
        """Return an error about the tested model that names the model's owner and the layer."""
        where = f"{self._where}, {layer}" if layer else self._where
        return PrivacyError(what, where=where, **({"fix": _FIX} | said))

    # The next methods make synthetic rows, and compute the model's results for these rows.

    def _made_up(self, size: int) -> tuple[Rows, Rows]:
        """Make synthetic rows of every input, and other rows to replace them."""
        draw = torch.Generator().manual_seed(0)
        device = next((one.device for one in self.model.parameters()), None)
        found = [self._kind((size, *shape), draw) for shape in self._shapes]
        return [one.to(device) for one, _ in found], [other.to(device) for _, other in found]

    def _choose_rows(self) -> tuple[Rows, Rows]:
        """Choose synthetic rows that the model accepts.

        For example, an embedding accepts only word indices.
        """
        for self._kind in _KINDS:
            rows, others = self._made_up(_SIZE)
            try:
                found = [self._outputs(rows), self._outputs(others)]
            except PrivacyError:
                raise
            except Exception:
                if self._kind is _KINDS[-1]:
                    raise
                continue
            if all(bool(one.isfinite().all()) for one in found):
                return rows, others
        raise ArithmeticError("outputs are not finite, whatever kind of synthetic rows is used")

    def _outputs(self, rows: Rows, key: int = 0) -> Tensor:
        """Return the model's outputs; calls with the same key draw the same random numbers."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        with _seeded(key):
            found = self._forward(*rows)
        size = len(rows[0])
        if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != size:
            axes = getattr(found, "shape", None)
            made = type(found).__name__ if axes is None else f"axes {tuple(axes)}"
            raise self.refusal(
                "the model does not return one row of outputs for each row",
                got=f"{made} for {size} rows",
                want="one tensor of axes (rows, width)",
                fix="a module whose forward returns that tensor alone",
            )
        return found

    def _passes(self, rows: Rows) -> list[_Pass]:
        """Return the calls of every module in one forward pass."""
        passes: list[_Pass] = []

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            passes.append(_Pass(module, _tensor_of(inputs), _tensor_of(output)))

        handles = [one.register_forward_hook(note) for one in self.model.modules()]
        try:
            self._outputs(rows)
        finally:
            for handle in handles:
                handle.remove()
        return passes

    def _inner_sizes(self, passes: Sequence[_Pass], most_rows: int) -> list[int]:
        """Return the lengths of the axes inside the model, up to a limit.

        If a batch has as many rows as such an axis is long, a faulty model may confuse the two
        axes.
        """
        tensors = [one for each in passes for one in (each.inputs, each.output) if one is not None]
        fit = set(range(2, min(most_rows, _LARGEST_INNER) + 1)) - {_SIZE, _OTHER_SIZE}
        first = sorted(fit & {one.shape[0] for one in tensors if one.dim()})
        second = sorted(fit & {one.shape[1] for one in tensors if one.dim() > 1})
        return [*first[:2], *[one for one in second if one not in first][:1]]

    # Required properties.

    def _try_state(self, rows: Rows, others: Rows) -> None:
        """Test that a forward pass changes no weight or buffer, and affects no later pass."""
        before = self._outputs(rows)
        gradients(before, self._gradients_at(before, range(len(before))), self._weights)
        self._require_unchanged()
        self._outputs(others)
        if _differ(before, self._outputs(rows), _SAME_BATCH):
            first = self._passes(rows)
            self._outputs(others)
            everywhere = list(range(len(before)))
            raise self.refusal(
                "a layer carries state from one batch to the next, which no noise hides",
                self._culprit(first, self._passes(rows), everywhere, everywhere),
                got="the same rows and random draws gave other outputs after a pass of other rows",
                want="outputs that depend only on rows, weights and torch's own generator",
            )

    def _try_batches(self, rows: Rows, most_rows: int) -> None:
        inner_sizes = self._inner_sizes(self._passes(rows), most_rows)
        self._try_batch(_OTHER_SIZE, [])
        self._try_batch(_SIZE, [[row] for row in range(_SIZE)])
        for size in inner_sizes:
            self._try_batch(size, [[0, size - 1]])

    def _try_batch(self, size: int, kept: Sequence[list[int]]) -> None:
        """Test that some rows' outputs and gradients stay the same when all other rows change."""
        rows, others = self._made_up(size)
        clipper = self._clipper
        recording = nullcontext(list[Call]()) if clipper is None else clipper.recording()
        with recording as calls:
            output = self._outputs(rows)
        for part in kept:
            at = torch.tensor(part, device=output.device)
            pairs = zip(rows, others, strict=True)
            mixed = [other.index_copy(0, at, one[part]) for one, other in pairs]
            again = self._outputs(mixed)
            if _differ(output[part], again[part], 0.0):
                raise self._mixes(self._passes(rows), self._passes(mixed), part, part)
            if clipper is not None and len(part) == 1:
                self._try_gradients(output, again, part)
        checked = [row for part in kept for row in part]
        if clipper is not None and clipper.trusts_rules:
            clipper.trusts_rules = clipper.follows_rules(calls, size) and (
                not checked or self._rules_hold(clipper, output, calls, checked)
            )

    def _try_gradients(self, output: Tensor, again: Tensor, row: list[int]) -> None:
        """Test that the weight gradient of a row does not depend on the other rows of its batch."""
        grad = self._gradients_at(output, row)
        found = (gradients(made, grad, self._weights) for made in (output, again))
        pairs = zip(*found, strict=True)
        if any(_differ(one, other, _OTHER_BATCH) for one, other in pairs):
            raise self.refusal(
                "a row's gradient depends on the other rows of its batch, so that clipping rows"
                " bounds nothing",
                got=f"a row had another gradient in another batch of {len(output)}",
                want="a gradient that depends only on the row and the weights",
            )

    def _rules_hold(
        self, clipper: RowClipper, output: Tensor, calls: Sequence[Call], checked: Sequence[int]
    ) -> bool:
        """Return whether the layers' rules give true norms and clipped sums of row gradients."""
        grad = self._gradients_at(output, checked)
        total, norms = clipper.sums(output, grad, self._weights, calls)
        expected, true_norms = self._clipped(clipper, output, grad, checked)
        wrong = (norms[:, checked].double() - true_norms).abs()
        least = 1e-4 * float(true_norms.max())
        close = bool((wrong <= _NORM * true_norms.clamp_min(least)).all())
        bounds = clipper.norms[:, None].to(true_norms)
        apart = float((total - torch.cat([one.reshape(-1) for one in expected])).norm())
        return close and apart <= 2 * _NORM * float(true_norms.minimum(bounds).sum())

    def _try_sizes(self, rows: Rows) -> None:
        """Test that a row's output is the same in a smaller batch and at another position.

        The test switches off torch's dropout layers. A model that still draws random numbers would
        draw different numbers for a different batch size, so this test skips such a model.
        """
        _switch_off_dropout(self.model)
        output = self._outputs(rows)
        if _differ(output, self._outputs(rows, key=1), _SAME_BATCH):
            return
        for part in ([_SIZE - 1, 0], [0], [_SIZE - 1]):
            fewer = [one[part] for one in rows]
            if _differ(output[part], self._outputs(fewer), _OTHER_BATCH):
                to = list(range(len(part)))
                raise self._mixes(self._passes(rows), self._passes(fewer), part, to)

    # Helper methods of the tests.

    def _gradients_at(self, output: Tensor, rows: Sequence[int]) -> Tensor:
        """Make synthetic gradients of some rows' outputs, and 0 for all other rows."""
        draw = torch.Generator().manual_seed(1)
        drawn = torch.randn(output.shape, generator=draw).to(output)
        kept = torch.zeros(len(output), 1).index_fill(0, torch.tensor(list(rows)), 1.0)
        return drawn * kept.to(output)

    def _clipped(
        self, clipper: RowClipper, output: Tensor, grad: Tensor, rows: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the sum of some rows' clipped gradients, and their norms, axes (groups, rows)."""
        bounds, group_of = clipper.norms, clipper.group_of
        sums = [torch.zeros_like(weight) for weight in self._weights]
        norms = torch.zeros(len(bounds), len(rows), dtype=torch.float64, device=output.device)
        for at, row in enumerate(rows):
            alone = torch.zeros_like(grad)
            alone[row] = grad[row]
            found = gradients(output, alone, self._weights)
            for group, one in zip(group_of, found, strict=True):
                norms[group, at] = torch.hypot(norms[group, at], one.double().norm())
            for total, group, one in zip(sums, group_of, found, strict=True):
                length = float(norms[group, at])
                total.add_(one, alpha=min(1.0, float(bounds[group]) / length) if length else 0.0)
        return sums, norms

    def _tensors(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: one.detach().clone() for name, one in named}

    def _require_unchanged(self) -> None:
        for name, now in self._tensors().items():
            before = self._before.setdefault(name, now)
            if before.shape != now.shape or not torch.equal(before.nan_to_num(), now.nan_to_num()):
                path, _, own = name.rpartition(".")
                layer = self._named(self.model.get_submodule(path))
                raise self.refusal(
                    "a forward pass changes values that are released without noise",
                    layer,
                    got=f"another value of '{own}' after a batch",
                    want="weights that only the optimiser changes, and constant buffers",
                    fix="a layer without running statistics, such as GroupNorm or LayerNorm",
                )

    def _mixes(
        self, first: Sequence[_Pass], second: Sequence[_Pass], at: list[int], to: list[int]
    ) -> PrivacyError:
        return self.refusal(
            "a row's output depends on the other rows of its batch, so that clipping"
            " does not bound the effect of a row",
            self._culprit(first, second, at, to),
            got="the same row had another output in a batch of other rows",
            want="an output that depends only on the row and the weights",
        )

    def _culprit(
        self, first: Sequence[_Pass], second: Sequence[_Pass], at: list[int], to: list[int]
    ) -> str:
        """Return the name of the first module whose inputs are equal but whose outputs differ.

        The name is empty if there is no such module.
        """
        for one, two in zip(first, second, strict=False):
            if one.module is not two.module or None in (one.inputs, two.inputs):
                continue
            inputs, output = (_picked(each, at) for each in (one.inputs, one.output))
            same, other = (_picked(each, to) for each in (two.inputs, two.output))
            if inputs is None or same is None or _differ(inputs, same, _OTHER_BATCH):
                continue
            if output is not None and other is not None and _differ(output, other, _SAME_BATCH):
                return self._named(one.module)
        return ""

    def _named(self, module: nn.Module) -> str:
        path = next(name for name, one in self.model.named_modules() if one is module)
        return f"layer '{path}' ({type(module).__name__})" if path else type(module).__name__


@torch.no_grad()
def _move(weights: Sequence[Tensor]) -> None:
    """Move all weights away from their initial values.

    An initial weight of 0 could hide that a row depends on other rows.
    """
    draw = torch.Generator().manual_seed(2)
    for weight in weights:
        deviation = 0.3 * float(weight.square().mean().sqrt()) or 0.1
        weight += deviation * torch.randn(weight.shape, generator=draw).to(weight)


def _tensor_of(values: Any) -> Tensor | None:
    """Return a copy of the first tensor among a module's inputs or outputs."""
    while isinstance(values, tuple | list) and values:
        values = values[0]
    return values.detach().clone() if isinstance(values, Tensor) else None


def _picked(values: Tensor | None, rows: list[int]) -> Tensor | None:
    if values is None or not values.dim() or len(values) <= max(rows):
        return None
    return values[rows]


def _differ(one: Tensor, other: Tensor, rounding: float) -> bool:
    if one.shape != other.shape:
        return True
    if not one.numel():
        return False
    one, other = one.detach().double(), other.detach().double()
    largest = max(float(one.abs().max()), float(other.abs().max()))
    return not float((one - other).abs().max()) <= rounding * largest


def _switch_off_dropout(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # type: ignore[assignment]


@contextmanager
def _seeded(key: int) -> Iterator[None]:
    """Seed all global generators with `key` in this context; restore their states afterwards."""
    with scoped(key):
        numpy, python = np.random.get_state(), random.getstate()
        np.random.seed(key)
        random.seed(key)
        try:
            yield
        finally:
            np.random.set_state(numpy)
            random.setstate(python)


@contextmanager
def _tried(trial: _Trial) -> Iterator[_Trial]:
    """Restore the model after a test; convert exceptions that the model raises to refusals."""
    with _left_as_it_was(trial.model):
        try:
            yield trial
        except PrivacyError:
            raise
        except Exception as error:
            raise trial.refusal(
                "the model cannot be tested on random rows before a private session begins",
                got=type(error).__name__,  # the text of the exception may contain data
                want="a model for any number of rows, with a gradient for each row",
                fix="run it on torch.randn(3, *shape), or on zeros and ones, in batches of 1 to 3",
            ) from error


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore weights, buffers, gradients and attributes of all modules after the context."""
    tensors = [*model.parameters(), *model.buffers()]
    copies = [(one, one.detach().clone(), one.grad) for one in tensors]
    attributes = [(vars(one), dict(vars(one))) for one in model.modules()]
    held = [
        (value, copy(value))
        for _, own in attributes
        for value in own.values()
        if isinstance(value, dict | list | set)
    ]
    for one in tensors:
        one.grad = None
    try:
        yield
    finally:
        for own, before in [*attributes, *held]:
            own.clear()
            (own.extend if isinstance(own, list) else own.update)(before)
        with torch.no_grad():
            for one, kept, grad in copies:
                if not torch.equal(one, kept):
                    one.copy_(kept)
                one.grad = grad
