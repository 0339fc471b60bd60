"""Attacks on a module that the caller trained: a `SplitModule` or the result of `vfl.split`.

The program queries a copy of the module with all rows of the loader. The values that the copy sends
become the evidence of an attacker, and `AttackRunner` runs attacks as on a run.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl.attacks.base import OwnBottom, before_last
from vfl.attacks.cases import (
    Frames,
    Part,
    TrainedParts,
    Victim,
    labels_of,
    recalled_case,
    received_case,
    served_case,
    training_case,
)
from vfl.attacks.scoring import Case
from vfl.attacks.view import Evidence, Grant, Holdings, Maker
from vfl.config import GridSettings
from vfl.core.errors import DataError, UserError
from vfl.core.frame import Kind
from vfl.core.seeds import generator, scoped
from vfl.datasets import PartyData, Split
from vfl.experiments.attack_grid import attack_plan
from vfl.experiments.attack_runner import AttackRunner, FinishedAttack
from vfl.experiments.checks import check_attacks_fit, check_grid
from vfl.experiments.results import Record, attacks_of
from vfl.experiments.scenarios import (
    INFERENCE_TIME,
    QUERIES_ATTRIBUTE,
    RECORDED_QUERIES,
    RECORDED_TRAINING,
    SERVER,
    TRAINING_ATTRIBUTE,
    TRAINING_TIME,
    Cases,
    Scenario,
    attacker_of,
    scenarios_of,
)
from vfl.experiments.scores import AttackJob, ScoreRecord, ScoresFile
from vfl.session.trace import Replayed
from vfl.training.cutting import CutModel, entry_of, mapped
from vfl.training.fitting import (
    answered,
    apart,
    columns_of,
    device_of,
    labelled,
    logits_in,
    moved,
    one_a_row,
    row_digests,
)
from vfl.training.recorder import ModuleTrace, module_digest
from vfl.training.split import Crossings, SplitModule


@dataclass(eq=False)
class _Columns:
    """One party's inputs in a batch: the model's arguments that belong to this party.

    Attributes:
        arguments: tensors that have one row per input row (axis 0).
        shared: whether the party also receives inputs without a row axis, such as the edges of a
            graph.
    """

    arguments: dict[str | int, Tensor]
    shared: bool

    @property
    def is_one(self) -> bool:
        """Return whether the party has one floating-point input, whose axes are kept."""
        return len(self.arguments) == 1 and self.first.is_floating_point()

    @property
    def first(self) -> Tensor:
        """The first input tensor."""
        return next(iter(self.arguments.values()))

    def flat(self) -> Tensor:
        """Return all inputs of the party, joined into one float32 tensor, axes (rows, ...)."""
        if self.is_one:
            return self.first.float().cpu()
        parts = [one.flatten(1) if one.dim() > 1 else one[:, None] for one in self.values()]
        return torch.cat([one.float().cpu() for one in parts], 1)

    def values(self) -> Iterable[Tensor]:
        """Return the party's input tensors in order."""
        return self.arguments.values()


class _Bottom(nn.Module):
    """A party's layers as a module with one input, the result of `_Columns.flat`.

    Args:
        model: a copy of the model, which no other code changes.
        party: name of the party.
        like: the party's inputs in one batch, as an example of axes and types.
        others: arguments of the other parties, with which the whole model runs, axes (rows, ...);
            this party's cut does not depend on these arguments.
    """

    def __init__(
        self, model: Crossings, party: str, like: _Columns, others: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.core: nn.Module
        if isinstance(model, SplitModule):
            self.core = model.bottoms[party]
        else:
            assert isinstance(model, CutModel)
            self.core, self._layer = model.model, model.layer_of(party)
        self._whole = isinstance(model, CutModel)
        self._is_one = like.is_one
        self._like = {name: (one.shape[1:], one.dtype) for name, one in like.arguments.items()}
        self._others = {name: (one.shape[1:], one.dtype) for name, one in others.items()}

    def forward(self, flat: Tensor) -> Tensor:
        """Map inputs, axes (rows, columns), to cuts, axes (rows, width)."""
        named = self._arguments(flat)
        given = [named[name] for name in named if isinstance(name, int)]
        by_name = {name: one for name, one in named.items() if isinstance(name, str)}
        if not self._whole:
            made: Tensor = self.core(*given, **by_name)
            return made.flatten(1).float()
        for name, (axes, dtype) in self._others.items():
            by_name[name] = torch.zeros(len(flat), *axes, dtype=dtype, device=flat.device)

        hook = self.core.get_submodule(self._layer).register_forward_hook(_stop)
        try:
            self.core(*given, **by_name)
        except _Reached as reached:
            return reached.cut.flatten(1).float()
        finally:
            hook.remove()
        raise AssertionError("the model's cut layer did not run")

    def _arguments(self, flat: Tensor) -> dict[str | int, Tensor]:
        if self._is_one:
            return {name: flat.to(dtype) for name, (_, dtype) in self._like.items()}
        sizes = [max(1, int(np.prod(axes))) for axes, _ in self._like.values()]
        return {
            name: part.reshape(len(flat), *axes).to(dtype)
            for (name, (axes, dtype)), part in zip(
                self._like.items(), torch.split(flat, sizes, 1), strict=True
            )
        }


class _Top(nn.Module):
    """The layers of a model behind a cut, as a module whose input is this cut.

    The layers before the cut run on zeros, and a hook replaces the cut layer's output by the given
    cut.

    Args:
        model: a copy of the model, which no other code changes.
        party: party that sends the cut.
        like: the party's inputs in one batch, as an example; the model has no other inputs.
        until: party whose cut the module returns; None returns the model's outputs.
    """

    def __init__(
        self, model: CutModel, party: str, like: _Columns, until: str | None = None
    ) -> None:
        super().__init__()
        self.core, self._layer = model.model, model.layer_of(party)
        self._last = None if until is None else model.layer_of(until)
        self._like = {name: (one.shape[1:], one.dtype) for name, one in like.arguments.items()}

    def forward(self, cut: Tensor) -> Tensor:
        """Map cuts, axes (rows, width), to outputs, axes (rows, outputs)."""
        zeros = {
            str(name): torch.zeros(len(cut), *axes, dtype=dtype, device=cut.device)
            for name, (axes, dtype) in self._like.items()
        }

        def instead(module: nn.Module, inputs: Any, output: Any) -> Any:
            return mapped(output, lambda one: cut.reshape(one.shape).to(one))

        hooks = [self.core.get_submodule(self._layer).register_forward_hook(instead)]
        if self._last is not None:
            hooks.append(self.core.get_submodule(self._last).register_forward_hook(_stop))
        try:
            outputs = self.core(**zeros)
        except _Reached as reached:
            return reached.cut.flatten(1).float()
        finally:
            for hook in hooks:
                hook.remove()
        return logits_in(outputs).float()


class _Reached(Exception):
    """Error that a hook raises, with the cut, when the cut layer has run."""

    def __init__(self, cut: Tensor) -> None:
        self.cut = cut


def _stop(module: nn.Module, inputs: Any, output: Tensor) -> None:
    raise _Reached(output)


@dataclass(eq=False)
class _Seen:
    """Inputs and cuts of a module's parties for all rows of a loader, in the loader's order.

    `digests` are digests of the party's inputs by row; `rows` are positions of rows if the batches
    contain them; `outputs` are the module's outputs, axes (rows, outputs), if each row has an
    output.
    """

    cuts: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    bottom: _Bottom | None = None
    top: nn.Module | None = None
    middle: nn.Module | None = None


def _queried(model: Crossings, party: str, loader: Iterable[Any]) -> _Seen:
    """Query the module with every row of a loader.

    Raises:
        DataError: the loader returns no batch, a batch does not have one label per row, or a cut's
            number of rows is no multiple of the batch's.
    """
    seen = _Seen()
    device = device_of(model)
    # In a U-shape, an attack by the server uses the cut that the server receives; the rows and
    # inputs are the feature party's.
    source = next(iter(model.decoders)) if party == server_of(model) else party
    arrived: dict[str, Tensor] = {}
    hooks = [
        end.register_forward_pre_hook(partial(_note, arrived, name))
        for name, end in model.decoders.items()
    ]
    try:
        for batch in loader:
            inputs, labels = labelled(batch)
            columns, others, outputs = _asked(model, source, moved(inputs, device))
            labels, rows, cut = _of_task(labels, model.task), len(labels), arrived[party]
            if labels.dim() != 1 or len(columns.first) != rows or len(cut) % rows:
                raise DataError(
                    "an attack needs a label for each row",
                    where="the loader",
                    got=f"labels of axes {tuple(labels.shape)}, {len(columns.first)} rows",
                )
            seen.cuts.append(cut.reshape(rows, -1).float().cpu())
            received = arrived[source].reshape(rows, -1).float().cpu()
            seen.inputs.append(columns.flat() if source == party else received)
            seen.labels.append(labels.cpu())
            seen.digests += row_digests(columns.values())
            seen.rows += (
                [] if (given := apart(inputs)[1]) is None else torch.as_tensor(given).tolist()
            )
            seen.outputs += [] if outputs is None else [outputs.float().cpu()]
            if len(seen.labels) == 1 and not columns.shared and source == party:
                bottom = _Bottom(model, party, columns, others)
                seen.bottom = bottom if _runs_on_rows(bottom, columns.flat()) else None
                if seen.bottom is not None and not others:
                    seen.top = _top_behind(model, party, columns)
                    seen.middle = _middle_of(model, party, columns)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen.labels:
        raise DataError("the loader returns no batch", where="the loader")
    return seen


def _of_task(labels: Tensor, task: str) -> Tensor:
    """Return labels as class numbers or as real numbers, as the task requires.

    Raises:
        DataError: the labels are not whole numbers, but the module's task is classification.
    """
    labels = one_a_row(labels)
    if task == "regression":
        return labels.float()
    if labels.is_floating_point() and not labels.equal(labels.round()):
        raise DataError(
            "the labels are not whole numbers, but the module's task is classification",
            where="the loader",
            fix="task='regression' in vfl.split or SplitModule",
        )
    return labels.long()


def _note(arrived: dict[str, Tensor], name: str, end: nn.Module, given: tuple[Tensor]) -> None:
    arrived[name] = given[0]


def server_of(model: Crossings) -> str | None:
    """Return the party in the middle of a U-shape (server), which sends a cut back; else None."""
    return model.server if isinstance(model, CutModel) else None


def _runs_on_rows(bottom: _Bottom, flat: Tensor) -> bool:
    """Return whether a party's layers compute each row independently, unlike layers of a graph."""
    few = max(1, len(flat) // 2)
    try:
        with torch.no_grad():
            whole, part = bottom(flat), bottom(flat[:few])
    except (RuntimeError, ValueError, IndexError):
        return False
    return torch.allclose(whole[:few], part, rtol=1e-3, atol=1e-4)


def _asked(
    model: Crossings, party: str, inputs: Any
) -> tuple[_Columns, Mapping[str, Tensor], Tensor | None]:
    """Run the model; return the party's inputs, other arguments of the model, and outputs."""
    with torch.no_grad():
        outputs = answered(model, inputs)
    outputs = outputs if isinstance(outputs, Tensor) else entry_of(outputs, "logits")
    has_rows = outputs is not None and outputs.dim() == 2
    by_row, others, shared = columns_of(model, party, inputs)
    return _Columns(by_row, shared), others, outputs if has_rows else None


class _ModuleVictim(Victim):
    """A feature party of a module as the target of attacks, with the cuts of all rows.

    Args:
        model: a copy of the module, in evaluation mode.
        name: the party.
        data: see `Cases`.
        cuts: cuts of all rows, axes (rows, width).
        bottom: the party's layers as a module; None if the layers need all rows at once.
        top: a module with the label party's architecture, and the width of its input; None if the
            label party's layers cannot run on this party's cut alone.
    """

    def __init__(
        self,
        model: Crossings,
        name: str,
        data: Mapping[str, PartyData],
        cuts: Tensor,
        bottom: _Bottom | None,
        top: tuple[nn.Module, int] | None,
    ) -> None:
        own, label = data[name], data[model.experiment.label.party]
        assert own.inputs is not None
        assert label.labels is not None
        self.name, self._inputs, self._cuts = name, own.inputs, cuts
        self.labels = label.labels
        self.classes = 1 if label.classes is None else len(label.classes)
        self._split, self._evidence = own.split, {}
        train = self.labels[torch.from_numpy(own.split.train)]
        self._prior = None
        if self.classes > 1:
            self._prior = train.bincount(minlength=self.classes) / len(train)
        self._core = bottom
        self._layers = None if bottom is None else _with_codec(model, name, bottom)
        self._top = top

    @property
    def has_bottom(self) -> bool:
        """Return whether the party's layers can run on a subset of rows."""
        return self._core is not None

    def cuts(self, rows: Tensor) -> Tensor:
        return self._cuts[rows]

    def _makers(self) -> Holdings:
        return Holdings(
            bottom=self.own_bottom if self.has_bottom else None,
            new_bottom=self.new_bottom if self.has_bottom else None,
            new_top=self.new_top,
        )

    def own_bottom(self) -> nn.Module:
        """Return a copy of the party's layers, followed by the module that the codec adds."""
        return copy.deepcopy(_held(self._layers))

    def new_bottom(self) -> nn.Module:
        """Return a copy of the party's layers with new initial weights."""
        return _fresh(_held(self._core))

    def new_top(self, width: int) -> nn.Module:
        """Return an untrained top model, or a linear layer if the top has further inputs."""
        if self._top is not None and self._top[1] == width:
            return _fresh(self._top[0])
        return nn.Linear(width, self.classes)

    def _part(self, part: Part) -> Evidence:
        if part not in self._evidence:
            rows, own = self._rows(part), self._layers
            inputs = self._inputs[rows]
            before = None if own is None else cache(lambda: before_last(own, inputs))
            self._evidence[part] = Evidence(inputs, self._cuts[rows], before=before)
        return self._evidence[part]


def _with_codec(model: Crossings, party: str, bottom: _Bottom) -> OwnBottom:
    """Return copies of the bottom model and of the module that the codec adds after it."""
    return OwnBottom([copy.deepcopy(bottom), copy.deepcopy(model.encoders[party])], bottom)


def _top_of(model: Crossings, party: str) -> tuple[nn.Module, int] | None:
    """Return the float32 top and its input width, if a party's flat cut is the top's only input."""
    if isinstance(model, SplitModule) and list(model.bottoms) == [party] and model.is_flat(party):
        return copy.deepcopy(model.top).float(), model.widths[party]
    return None


def _top_behind(model: Crossings, party: str, like: _Columns) -> nn.Module | None:
    """Return the label party's layers as a module of a party's cuts; None if they read more.

    Args:
        model: the module.
        party: the feature party.
        like: the party's inputs in one batch; the model has no other inputs.
    """
    top: nn.Module
    if isinstance(model, CutModel):
        if list(model.experiment.parties) != [party] or model.label_inputs:
            return None
        top = _Top(model, party, like)
    elif (found := _top_of(model, party)) is not None:
        top = found[0]
    else:
        return None
    return nn.Sequential(copy.deepcopy(model.decoders[party]).float(), top)


def _middle_of(model: Crossings, party: str, like: _Columns) -> nn.Module | None:
    """Return the middle layers of a U-shape (server) as a module of the feature party's cuts.

    Args:
        model: the module.
        party: the feature party.
        like: the party's inputs in one batch; the model has no other inputs.

    Returns:
        The result is None if the module has no server, or if the server receives or sends more than
        one cut.
    """
    server = server_of(model)
    if not isinstance(model, CutModel) or list(model.experiment.parties) != [party, server]:
        return None
    middle = _Top(model, party, like, until=server)
    return nn.Sequential(copy.deepcopy(model.decoders[party]).float(), middle)


def _fresh(module: nn.Module) -> nn.Module:
    """Return a copy of a module with new initial weights, drawn from torch's global generator."""
    made = copy.deepcopy(module)
    for part in made.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    return made


class _ModuleParts(TrainedParts):
    """The trained parts of a module that attacks by the module's label party need.

    Args:
        model: a copy of the model, which no other code changes.
        data: data of every party.
        victim: the feature party that is attacked.
        top: the label party's layers; None if these layers read more than the party's cut.
        outputs: the model's outputs for all rows, axes (rows, outputs); None if rows have no
            separate outputs.
        middle: the layers of a U-shape's server; None if these layers read more than the party's
            cut.
    """

    def __init__(
        self,
        model: Crossings,
        data: Mapping[str, PartyData],
        victim: _ModuleVictim,
        top: nn.Module | None,
        outputs: Tensor | None,
        middle: nn.Module | None,
    ) -> None:
        super().__init__(model.experiment, data, {})
        self._victim, self._last, self._outputs = victim, top, outputs
        self._middle = middle
        lacking = set() if victim.has_bottom else {Grant.OTHERS_BOTTOM, Grant.BOTTOM_RECIPE}
        lacking |= {Grant.TOP} if top is None else set()
        lacking |= {Grant.OUTPUTS} if outputs is None else set()
        lacking |= {Grant.MIDDLE} if middle is None else set()
        # attacks treat the server as the label party
        if server_of(model) is not None:
            lacking |= {Grant.LABELS, Grant.OUTPUTS}
        self.lacking = frozenset(lacking)

    def bottom(self, party: str) -> nn.Module:
        """Return a copy of the feature party's layers."""
        return self._victim.own_bottom()

    def new_bottom(self, party: str) -> nn.Module:
        """Return an untrained bottom model with the feature party's architecture."""
        return self._victim.new_bottom()

    def top(self) -> nn.Module:
        """Return a copy of the label party's layers."""
        return copy.deepcopy(_held(self._last))

    def middle(self) -> nn.Module:
        """Return a copy of the layers of a U-shape's server."""
        return copy.deepcopy(_held(self._middle))

    def outputs(self, queries: Frames, rows: Tensor) -> Tensor:
        """Return the model's outputs for some rows, axes (rows, outputs)."""
        return torch.empty(len(rows), 0) if self._outputs is None else self._outputs[rows]


def _held(part: nn.Module | None) -> nn.Module:
    assert part is not None, "the attacker was not granted the missing values"
    return part


class _ModuleCases(Cases):
    """Cases of attacks on a module: attacks by a feature party, and attacks by the label party.

    Args:
        model: the module.
        data: data of every party.
        settings: settings of the grid, which define the attackers.
        victim: the feature party that attacks, or that the label party attacks.
        parts: trained parts of the module, for attacks by its label party.
        frames: function that returns the frames of the module's training, which `vfl.record`
            recorded.
        digest: digest of the recorded training; empty if the weights determine the training.
    """

    def __init__(
        self,
        model: Crossings,
        data: Mapping[str, PartyData],
        settings: GridSettings,
        victim: _ModuleVictim,
        parts: _ModuleParts,
        frames: Callable[[], Frames],
        digest: str,
    ) -> None:
        self._model, self._own_victim, self._own_parts = model, victim, parts
        self._trained, self._digest = frames, digest
        super().__init__(model.experiment, data, settings)

    def _begin(self) -> None:
        self.victim = self._own_victim

    @property
    def weights_sha256(self) -> str:
        return module_digest(self._model) + self._digest

    def _received(self, draw: torch.Generator) -> Case:
        rows = torch.arange(len(self._own_victim.labels))
        asked = Replayed(
            self.party, "up", Kind.QUERY, 0, b"", phase="test", epoch=0, rows=rows.numpy()
        )
        frames = [(asked, self.cuts(rows))]
        return received_case(self._own_parts, frames, self.party, self._leaks(), draw)

    def _recalled(self, draw: torch.Generator) -> Case:
        leaks = min(self._leaks(), len(self.data[self.party].split.train) // 2)
        return recalled_case(self._own_parts, self._trained(), self.party, leaks, draw)

    def case(self, scenario: Scenario, k: int, draw: torch.Generator) -> Case:
        if scenario == SERVER:
            own = self._own_parts
            return served_case(self._received(draw), own.middle, self._own_victim.new_top)
        if scenario != TRAINING_TIME:
            return super().case(scenario, k, draw)
        found, new_top = self._trained(), self._own_victim.new_top
        return training_case(
            self.experiment,
            self.data,
            found,
            self.party,
            k,
            draw,
            new_top,
            others_top=self._top_alone(),
        )

    def _top_alone(self) -> Maker | None:
        """Return a function that copies the top, if the top has no other party's cut as input."""
        top = getattr(self._model, "top", None)
        alone = list(self.experiment.feature_parties) == [self.party]
        return partial(copy.deepcopy, top) if alone and isinstance(top, nn.Module) else None


class ModuleAttacks:
    """Attacks on a feature party's cuts of a trained module.

    Args:
        model: the trained module; the attacks query a copy.
        loader: batches of the rows from which leaked labels are drawn.
        test: batches of the attacked rows; with None, a random half of the loader's rows is
            attacked.
        settings: attacks, numbers of leaked labels, number of draws of leaked rows, baselines, and
            the attacking party.
        trace: trace of the module's training, for attacks that use recorded frames. The value may
            also be a function that records the same training again, which is called if a score is
            missing.

    Attributes:
        settings: the given settings without attacks that are impossible on this module.
        data: data of the feature party and of the label party.
        cuts: cuts of all rows, axes (rows, width).

    Raises:
        UserError: an attack needs evidence that the attacking party does not have, or a number of
            leaked labels does not fit the rows.
        DataError: batches of the loader do not have one label per row.
    """

    def __init__(
        self,
        model: Crossings,
        loader: Iterable[Any],
        test: Iterable[Any] | None,
        settings: GridSettings,
        trace: ModuleTrace | Callable[[], ModuleTrace] | None = None,
    ) -> None:
        self._experiment = experiment = model.experiment
        settings = settings.of_task(experiment.label.task)
        if len(experiment.parties) > 1:
            settings = _with_held(settings, frozenset({Grant.TOP}), frozenset({Grant.OTHERS_TOP}))
        check_grid(experiment, settings)
        asked, party = copy.deepcopy(model).eval(), attacker_of(experiment, settings)
        _require_granted(settings, trace is not None)
        _require_roles(settings, party, server_of(model))
        with scoped(experiment.seed):  # a shuffling loader returns the same order in each call
            seen = [_queried(asked, party, one) for one in (loader, test) if one is not None]
        label = experiment.label.party
        self.data = _data_of(label, party, seen, experiment.seed)
        check_attacks_fit(experiment, settings, self.data)
        self.cuts = torch.cat([cut for one in seen for cut in one.cuts])
        outputs = [one for part in seen for one in part.outputs]
        whole = torch.cat(outputs) if sum(map(len, outputs)) == len(self.cuts) else None
        # A binary model with one logit does not have one output per class, which attacks through a
        # top model need.
        by_class = whole is not None and whole.shape[1] == labels_of(self.data[label])[1]
        top = _top_of(asked, party) if by_class else None
        victim = _ModuleVictim(asked, party, self.data, self.cuts, seen[0].bottom, top)
        last = seen[0].top if by_class else None
        parts = _ModuleParts(asked, self.data, victim, last, whole, seen[0].middle)
        none = frozenset[Grant]()
        settings = _with_held(settings, parts.lacking, none if victim.has_bottom else _LAYERS)
        if not victim.has_bottom:
            without = [one for one in settings.baselines if one in ("raw", "pca", "random")]
            settings = settings.model_copy(update={"baselines": tuple(without)})
        self.settings = settings.model_copy(update={"reconstructions": False})
        digests = [one for part in seen for one in part.digests]
        rows = [one for part in seen for one in part.rows]

        @cache
        def frames() -> Frames:
            assert trace is not None, "attacks that read these values were rejected"
            found = trace if isinstance(trace, ModuleTrace) else trace()
            return found.decoded(party, digests, rows if len(rows) == len(digests) else None)

        digest = trace.digest if isinstance(trace, ModuleTrace) else ""
        cases = _ModuleCases(asked, self.data, self.settings, victim, parts, frames, digest)
        self._runner = AttackRunner(experiment, self.data, self.settings, cases=cases)

    def on_victim(self) -> list[AttackJob]:
        """Return the jobs of all attacks on the module's trained cuts."""
        return attack_plan(self.settings).on_victim()

    def baselines(self) -> list[AttackJob]:
        """Return the jobs of the baselines of these attacks."""
        return attack_plan(self.settings).baselines(self.settings.baselines)

    def test_cuts(self, most: int) -> tuple[Tensor, Tensor]:
        """Return the cuts, axes (rows, width), and the labels of the first test rows."""
        label = self.data[self._experiment.label.party]
        assert label.labels is not None
        rows = torch.from_numpy(label.split.test)[:most]
        return self.cuts[rows], label.labels[rows]

    def run(
        self,
        jobs: Sequence[AttackJob],
        out: Path,
        on_end: Callable[[FinishedAttack], None] = lambda ended: None,
    ) -> list[ScoreRecord]:
        """Return each job's score; scores in the folder `out` are not computed again."""
        with scoped(self._experiment.seed):
            return list(self._runner.run(jobs, ScoresFile(out), on_end))


def attack_module(
    model: Crossings,
    loader: Iterable[Any],
    test: Iterable[Any] | None,
    settings: GridSettings,
    out: Path | None = None,
    on_end: Callable[[FinishedAttack], None] = lambda ended: None,
    trace: ModuleTrace | None = None,
) -> list[Record]:
    """Attack a feature party's cuts of a trained module; see `vfl.attack` and `ModuleAttacks`.

    Args:
        model: the trained module; the attacks query a copy.
        loader: batches of the rows from which leaked labels are drawn.
        test: batches of the attacked rows; with None, a random half of the loader's rows is
            attacked.
        settings: attacks, numbers of leaked labels, number of draws of leaked rows, baselines, and
            the attacking party.
        out: folder for scores; an attack with a stored score is not run again.
        on_end: callback that receives each attack when it ends.
        trace: trace of the module's training, for attacks that use recorded frames.

    Raises:
        DataError: the trace belongs to another module's training.
    """
    if trace is not None:
        trace.require_of(model)
    attacked = ModuleAttacks(model, loader, test, settings, trace)
    jobs = [*attacked.on_victim(), *attacked.baselines()]
    with tempfile.TemporaryDirectory() as forgotten:
        scores = attacked.run(jobs, out or Path(forgotten), on_end)
    found = attacks_of(model.experiment, scores, attacked.settings.baselines)
    return [replace(one, codec=model.codec_text) for one in found]


def reads_training(settings: GridSettings) -> bool:
    """Return whether at least one attack of a grid uses a recorded training."""
    return any(scenario in _RECORDED for _, scenario in scenarios_of(settings).values())


#: Scenarios that need a recorded training, and all scenarios that attacks on modules support.
_RECORDED = (TRAINING_TIME, RECORDED_TRAINING, TRAINING_ATTRIBUTE)
_KNOWN = (INFERENCE_TIME, RECORDED_QUERIES, QUERIES_ATTRIBUTE, SERVER, *_RECORDED)


def _require_granted(settings: GridSettings, recorded: bool) -> None:
    """Reject attacks by outsiders or colluding parties, and attacks that need a missing trace.

    Args:
        settings: the attacks.
        recorded: whether the module's training was recorded.

    Raises:
        UserError: an attack uses evidence that its attacker is not granted; the error contains the
            attack's name.
    """
    for spec, (attack, scenario) in scenarios_of(settings).items():
        if scenario in _RECORDED and not recorded:
            raise UserError(
                f"{spec} needs a recorded training",
                want="a trace of the module's training",
                fix="train in a block 'with vfl.record(model) as trace:', and give trace=trace",
            )
        if scenario not in _KNOWN or Grant.QUERIES in attack.needs:
            raise UserError(
                f"{spec} needs evidence that no single party of a module has",
                got=f"an attacker of '{scenario.name}'",
                want="an attack by a feature party on labels, such as the packs light and heavy, "
                "or by the label party on columns, such as inversion",
                fix="train an experiment file, whose runs record more: vfl attack RUN",
            )


def _require_roles(settings: GridSettings, party: str, server: str | None) -> None:
    """Reject attacks in a U-shape whose attacker already has the values that the attack infers.

    Args:
        settings: the attacks.
        party: the feature party that attacks or is attacked.
        server: the party in the middle, which sends a cut back; None if the module has no U-shape.

    Raises:
        UserError: an attack infers values that its attacker owns; the error suggests the right
            attacker.
    """
    for spec, (_, scenario) in scenarios_of(settings).items() if server is not None else ():
        on_labels = scenario.attacker == "feature party" and not scenario.attribute
        if on_labels is not (party == server):
            raise UserError(
                "in a U-shape the feature party has the labels, and the server has no columns",
                where="party",
                got=f"{spec}, and party '{party}'",
                want="attacks on labels by the server, or on columns of a feature party",
                fix=f"party='{server}'" if on_labels else "leave party out",
            )


#: Grants that mean the attacker's own layers.
_LAYERS = frozenset({Grant.BOTTOM, Grant.BOTTOM_RECIPE})


def _with_held(
    settings: GridSettings, of_label: frozenset[Grant], of_feature: frozenset[Grant]
) -> GridSettings:
    """Return the settings without those attacks of packs that need grants which the module lacks.

    Args:
        settings: the attacks.
        of_label: grants that a label party of this module cannot have.
        of_feature: grants that a feature party of this module cannot have.

    Raises:
        UserError: an attack that the settings list by itself needs such a grant, or all attacks of
            a pack do.
    """
    lacking = {"label party": of_label, "feature party": of_feature}
    fitting, refused = list[str](), dict[str, frozenset[Grant]]()
    for spec, (attack, scenario) in scenarios_of(settings).items():
        beyond = attack.needs & lacking.get(scenario.attacker, frozenset())
        if beyond:
            refused[spec] = beyond
        else:
            fitting.append(spec)
    if not fitting or any(spec in refused for spec in settings.attacks):
        needed = frozenset[Grant]().union(*refused.values())
        raise UserError(
            "the attacks need values that no party of this module has",
            got=", ".join(refused),
            want="attacks that do not need these values: "
            + ", ".join(str(one) for one in Grant if one in needed),
            fix=f"pack={fitting or 'logistic'}",
        )
    return settings.model_copy(update={"attacks": tuple(fitting)}) if refused else settings


def _data_of(label: str, party: str, seen: list[_Seen], seed: int) -> dict[str, PartyData]:
    """Return the data of the feature party and of the label party, as in a session."""
    parts = [torch.cat(part.labels) for part in seen]
    if len(parts) == 1:
        order = torch.randperm(len(parts[0]), generator=generator(seed, "halves"))
        half = len(order) // 2
        split = _split(order[:half].sort().values, order[half:].sort().values)
    else:
        first, second = map(len, parts)
        split = _split(torch.arange(first), torch.arange(first, first + second))
    task = "regression" if parts[0].is_floating_point() else "classification"
    classes = seen[0].outputs[0].shape[1] if seen[0].outputs else 0
    truth = data_of_labels(label, parts, task, classes, split)
    inputs = torch.cat([one for part in seen for one in part.inputs])
    return {party: PartyData(party, inputs, None, None, split, bytes(32)), label: truth}


def data_of_labels(
    name: str, parts: Sequence[Tensor], task: str, classes: int, split: Split | None = None
) -> PartyData:
    """Return a label party's data.

    Args:
        name: the party.
        parts: labels of the training rows and labels of the test rows, axes (rows,) each.
        task: "classification" or "regression".
        classes: number of outputs of the model; the result has more classes if a label is larger.
        split: split of the rows; None makes the two entries of `parts` the training and test rows.
    """
    labels, known = torch.cat(list(parts)), None
    if task == "classification":
        labels = labels.long()
        known = tuple(range(max(classes, int(labels.max()) + 1)))
    if split is None:
        first = len(parts[0])
        split = _split(torch.arange(first), torch.arange(first, len(labels)))
    return PartyData(name, None, labels, known, split, bytes(32))


def _split(train: Tensor, test: Tensor) -> Split:
    """Return the split; the rows of `train` are both training rows and validation rows."""
    return Split(train.numpy(), train.numpy(), test.numpy())
