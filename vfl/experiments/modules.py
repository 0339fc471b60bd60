"""Attacks on a module that its caller trained: `SplitModule`, or what `vfl.split` made.

A copy of the module answers queries about the loader's rows. What crosses becomes the evidence of
the feature party that attacks, and `AttackRunner` does the rest as it does for a run.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl.attacks.base import OwnBottom, before_last
from vfl.attacks.cases import Frames, Part, Victim, training_case
from vfl.attacks.scoring import Case
from vfl.attacks.view import Evidence, Grant, Holdings, Maker
from vfl.config import GridSettings
from vfl.core.errors import DataError, UserError
from vfl.core.seeds import generator, scoped
from vfl.core.storage import weights_digest
from vfl.datasets import PartyData, Split
from vfl.experiments.attack_grid import attack_plan
from vfl.experiments.attack_runner import AttackRunner, FinishedAttack
from vfl.experiments.checks import check_attacks_fit, check_grid
from vfl.experiments.results import Record, attacks_of
from vfl.experiments.scenarios import (
    INFERENCE_TIME,
    TRAINING_TIME,
    Cases,
    Scenario,
    attacker_of,
    scenarios_of,
)
from vfl.experiments.scores import AttackJob, ScoreRecord, ScoresFile
from vfl.training.cutting import CutModel
from vfl.training.fitting import (
    answered,
    apart,
    columns_of,
    device_of,
    labelled,
    moved,
    row_digests,
)
from vfl.training.recorder import ModuleTrace
from vfl.training.split import Crossings, SplitModule


@dataclass(eq=False)
class _Columns:
    """One party's inputs of a batch: its arguments of the model, by position or name.

    Attributes:
        arguments: tensors with a row of axis 0 each.
        shared: whether the party is given something besides, such as the edges of a graph.
    """

    arguments: dict[str | int, Tensor]
    shared: bool

    @property
    def is_one(self) -> bool:
        """Whether it is a single tensor of floating-point numbers, which keeps its axes."""
        return len(self.arguments) == 1 and self.first.is_floating_point()

    @property
    def first(self) -> Tensor:
        """The first argument."""
        return next(iter(self.arguments.values()))

    def flat(self) -> Tensor:
        """Return all of it as float32, axes (rows, ...)."""
        if self.is_one:
            return self.first.float().cpu()
        parts = [one.flatten(1) if one.dim() > 1 else one[:, None] for one in self.values()]
        return torch.cat([one.float().cpu() for one in parts], 1)

    def values(self) -> Iterable[Tensor]:
        """Return the arguments in order."""
        return self.arguments.values()


class _Bottom(nn.Module):
    """A party's layers as a module of one tensor: what `_Columns.flat` gives.

    Args:
        model: a copy that is changed no more.
        party: whose.
        like: its inputs of some batch.
        others: arguments of a whole model that other parties hold, of axes (rows, ...); the cut
            does not depend on them.
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
        """Axes (rows, columns) in, (rows, width) out."""
        named = self._arguments(flat)
        given = [named[name] for name in named if isinstance(name, int)]
        by_name = {name: one for name, one in named.items() if isinstance(name, str)}
        if not self._whole:
            made: Tensor = self.core(*given, **by_name)
            return made.flatten(1)
        for name, (axes, dtype) in self._others.items():
            by_name[name] = torch.zeros(len(flat), *axes, dtype=dtype, device=flat.device)

        def stop(module: nn.Module, inputs: Any, output: Any) -> None:
            raise _Reached(output)

        hook = self.core.get_submodule(self._layer).register_forward_hook(stop)
        try:
            self.core(*given, **by_name)
        except _Reached as reached:
            return reached.cut.flatten(1)
        finally:
            hook.remove()
        raise AssertionError("the model has passed its cut before")

    def _arguments(self, flat: Tensor) -> dict[str | int, Tensor]:
        if self._is_one:
            return dict.fromkeys(self._like, flat)
        sizes = [max(1, int(np.prod(axes))) for axes, _ in self._like.values()]
        return {
            name: part.reshape(len(flat), *axes).to(dtype)
            for (name, (axes, dtype)), part in zip(
                self._like.items(), torch.split(flat, sizes, 1), strict=True
            )
        }


class _Reached(Exception):
    """The layer of a cut has run."""

    def __init__(self, cut: Tensor) -> None:
        self.cut = cut


@dataclass(eq=False)
class _Seen:
    """Inputs and cuts of a module's parties for a loader's rows, in the loader's order.

    `digests` are digests of the party's inputs; `rows` are positions, if the batches contain them.
    """

    cuts: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    bottom: _Bottom | None = None
    outputs: int = 0


def _queried(model: Crossings, party: str, loader: Iterable[Any]) -> _Seen:
    """Ask the module about every row of a loader.

    Raises:
        DataError: a batch has no label a row, or a cut of other rows.
    """
    seen = _Seen()
    device = device_of(model)
    arrived: list[Tensor] = []
    hook = model.decoders[party].register_forward_pre_hook(lambda _, got: arrived.append(got[0]))
    try:
        for batch in loader:
            inputs, labels = labelled(batch)
            columns, others, outputs = _asked(model, party, moved(inputs, device))
            rows, cut = len(labels), arrived.pop()
            if labels.dim() != 1 or len(columns.first) != rows or len(cut) % rows:
                raise DataError(
                    "an attack needs a label for each row",
                    where="the loader",
                    got=f"labels of axes {tuple(labels.shape)}, {len(columns.first)} rows",
                )
            seen.cuts.append(cut.reshape(rows, -1).float().cpu())
            seen.inputs.append(columns.flat())
            seen.labels.append(labels.cpu())
            seen.digests += row_digests(columns.values())
            seen.rows += (
                [] if (given := apart(inputs)[1]) is None else torch.as_tensor(given).tolist()
            )
            seen.outputs = outputs
            if len(seen.labels) == 1 and not columns.shared:
                bottom = _Bottom(model, party, columns, others)
                seen.bottom = bottom if _runs_on_rows(bottom, columns.flat()) else None
    finally:
        hook.remove()
    if not seen.labels:
        raise DataError("the loader gives no batch", where="the loader")
    return seen


def _runs_on_rows(bottom: _Bottom, flat: Tensor) -> bool:
    """Whether a party's layers make the same of some rows as of all; those of a graph do not."""
    few = max(1, len(flat) // 2)
    try:
        with torch.no_grad():
            whole, part = bottom(flat), bottom(flat[:few])
    except (RuntimeError, ValueError, IndexError):
        return False
    return torch.allclose(whole[:few], part, rtol=1e-3, atol=1e-4)


def _asked(model: Crossings, party: str, inputs: Any) -> tuple[_Columns, Mapping[str, Tensor], int]:
    """Return a query: the party's inputs, others' inputs for its layers, and outputs."""
    with torch.no_grad():
        outputs = answered(model, inputs)
    outputs = getattr(outputs, "logits", outputs)
    classes = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.dim() == 2 else 0
    by_row, others, shared = columns_of(model, party, inputs)
    return _Columns(by_row, shared), others, classes


class _ModuleVictim(Victim):
    """A feature party of a module, with the cuts that it sent of all rows.

    Args:
        model: a copy in evaluation mode.
        name: the party.
        data: see `Cases`.
        cuts: of all rows, axes (rows, width).
        bottom: its layers; None where they cannot run on some rows alone.
    """

    def __init__(
        self,
        model: Crossings,
        name: str,
        data: Mapping[str, PartyData],
        cuts: Tensor,
        bottom: _Bottom | None,
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
        self._top = _top_of(model, name)

    @property
    def has_bottom(self) -> bool:
        """Whether its layers run on some rows alone."""
        return self._core is not None

    def cuts(self, rows: Tensor) -> Tensor:
        return self._cuts[rows]

    def _makers(self) -> Holdings:
        core, own = self._core, self._layers
        return Holdings(
            bottom=None if own is None else lambda: copy.deepcopy(own),
            new_bottom=None if core is None else lambda: _fresh(core),
            new_top=self.new_top,
        )

    def new_top(self, width: int) -> nn.Module:
        """Return an untrained top; a linear layer if the module's own top takes other cuts."""
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
    """Return the bottom and the codec's module behind it, as copies of one module."""
    return OwnBottom([copy.deepcopy(bottom), copy.deepcopy(model.encoders[party])], bottom)


def _top_of(model: Crossings, party: str) -> tuple[nn.Module, int] | None:
    """Return the top and its input width, if one party's flat cut is its only input."""
    if isinstance(model, SplitModule) and list(model.bottoms) == [party] and model.is_flat(party):
        return model.top, model.widths[party]
    return None


def _fresh(module: nn.Module) -> nn.Module:
    """Return a copy with new initial weights, from the caller's random numbers."""
    made = copy.deepcopy(module)
    for part in made.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
    return made


class _ModuleCases(Cases):
    """The cases of a module: those of a feature party in use.

    Args:
        model: the module.
        data: every party's rows.
        settings: who attacks.
        victim: the feature party.
        frames: gives those of its training, as `vfl.record` recorded it.
        digest: of that training; empty where it follows from the weights.
    """

    def __init__(
        self,
        model: Crossings,
        data: Mapping[str, PartyData],
        settings: GridSettings,
        victim: _ModuleVictim,
        frames: Callable[[], Frames],
        digest: str,
    ) -> None:
        self._model, self._own_victim = model, victim
        self._trained, self._digest = frames, digest
        super().__init__(model.experiment, data, settings)

    def _begin(self) -> None:
        self.victim = self._own_victim

    @property
    def weights_sha256(self) -> str:
        state = {name: one for name, one in self._model.state_dict().items() if _is_tensor(one)}
        return weights_digest(state) + self._digest

    def case(self, scenario: Scenario, k: int, draw: torch.Generator) -> Case:
        if scenario == INFERENCE_TIME:
            return super().case(scenario, k, draw)
        assert scenario == TRAINING_TIME, "others were refused"
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
        """Return a maker of the module's top, where the party alone feeds it."""
        top = getattr(self._model, "top", None)
        alone = list(self.experiment.feature_parties) == [self.party]
        return partial(copy.deepcopy, top) if alone and isinstance(top, nn.Module) else None


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


class ModuleAttacks:
    """Attacks on a feature party's cuts of a trained module.

    Args:
        model: the module; a copy is asked.
        loader: gives the rows that leaked labels are drawn from.
        test: gives the rows that are attacked; None takes a random half of the loader's.
        settings: attacks, leaks, draws, baselines and who attacks.
        trace: of its training, for attacks that read it; or a function that records it if a score
            is not there yet, where the trace follows from the weights.

    Attributes:
        settings: the same, without what such a module cannot be set against.
        data: the rows of the feature party and of the label party.
        cuts: what crossed, of all rows, axes (rows, width).

    Raises:
        UserError: an attack needs more than such a party holds, or a leak does not fit the rows.
        DataError: a loader's batches have no label a row.
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
        check_grid(experiment, settings)
        _require_granted(settings, trace is not None)
        asked, party = copy.deepcopy(model).eval(), attacker_of(experiment, settings)
        with scoped(experiment.seed):  # a loader that shuffles gives the same order in each call
            seen = [_queried(asked, party, one) for one in (loader, test) if one is not None]
        self.data = _data_of(experiment.label.party, party, seen, experiment.seed)
        check_attacks_fit(experiment, settings, self.data)
        self.cuts = torch.cat([cut for one in seen for cut in one.cuts])
        victim = _ModuleVictim(asked, party, self.data, self.cuts, seen[0].bottom)
        if not victim.has_bottom:
            _require_cuts_alone(settings)
            without = [one for one in settings.baselines if one in ("raw", "pca", "random")]
            settings = settings.model_copy(update={"baselines": tuple(without)})
        self.settings = settings.model_copy(update={"reconstructions": False})
        digests = [one for part in seen for one in part.digests]
        rows = [one for part in seen for one in part.rows]

        @cache
        def frames() -> Frames:
            assert trace is not None, "attacks that read it were refused"
            found = trace if isinstance(trace, ModuleTrace) else trace()
            return found.decoded(party, digests, rows if len(rows) == len(digests) else None)

        digest = trace.digest if isinstance(trace, ModuleTrace) else ""
        cases = _ModuleCases(asked, self.data, self.settings, victim, frames, digest)
        self._runner = AttackRunner(experiment, self.data, self.settings, cases=cases)

    def on_victim(self) -> list[AttackJob]:
        """Return every attack on the module's own cuts."""
        return attack_plan(self.settings).on_victim()

    def baselines(self) -> list[AttackJob]:
        """Return the baselines of these attacks."""
        return attack_plan(self.settings).baselines(self.settings.baselines)

    def test_cuts(self, most: int) -> tuple[Tensor, Tensor]:
        """Return the cuts of the first test rows, axes (rows, width), and their labels."""
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
        """Return the score of each job; the folder `out` stores scores to avoid repeated runs."""
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
        model: the module; a copy is asked.
        loader: gives the rows that leaked labels are drawn from.
        test: gives the rows that are attacked; None takes a random half of the loader's.
        settings: attacks, leaks, draws, baselines and who attacks.
        out: a folder that keeps scores; what has one is not run again.
        on_end: gets every attack as it ends.
        trace: of the module's training, for attacks that read it.
    """
    attacked = ModuleAttacks(model, loader, test, settings, trace)
    jobs = [*attacked.on_victim(), *attacked.baselines()]
    with tempfile.TemporaryDirectory() as forgotten:
        scores = attacked.run(jobs, out or Path(forgotten), on_end)
    return attacks_of(model.experiment, scores, attacked.settings.baselines)


def reads_training(settings: GridSettings) -> bool:
    """Whether an attack of a grid reads a recorded training."""
    return any(scenario == TRAINING_TIME for _, scenario in scenarios_of(settings).values())


def _require_granted(settings: GridSettings, recorded: bool) -> None:
    """Refuse attacks of label parties and outsiders, and those on a training without a trace.

    Args:
        settings: the attacks.
        recorded: whether the training was recorded.

    Raises:
        UserError: with what they would read.
    """
    for spec, (_, scenario) in scenarios_of(settings).items():
        if scenario == TRAINING_TIME and not recorded:
            raise UserError(
                f"{spec} reads a recorded training",
                want="a trace of the module's training",
                fix="train in a block 'with vfl.record(model) as trace:', and give trace=trace",
            )
        if scenario not in (INFERENCE_TIME, TRAINING_TIME):
            raise UserError(
                f"{spec} needs more than a feature party of a module holds",
                got=f"an attacker of '{scenario.name}'",
                want="an attack by a feature party on cuts, such as the packs light and heavy, or "
                "on gradients of a recorded training, such as gradient_norm",
                fix="train an experiment file, whose runs record a training: vfl attack RUN",
            )


#: Grants that are layers of the attacker's own.
_LAYERS = frozenset({Grant.BOTTOM, Grant.BOTTOM_RECIPE})


def _require_cuts_alone(settings: GridSettings) -> None:
    """Refuse attacks that run a party's layers, where these need more than the rows.

    Raises:
        UserError: with their names.
    """
    found = {
        spec: not attack.needs & _LAYERS for spec, (attack, _) in scenarios_of(settings).items()
    }
    if refused := [spec for spec, fits in found.items() if not fits]:
        raise UserError(
            "attacks run the party's layers on some rows, and here these need all rows",
            got=", ".join(refused),
            want="attacks on cuts alone",
            fix=f"pack={[spec for spec, fits in found.items() if fits] or 'logistic'}",
        )


def _data_of(label: str, party: str, seen: list[_Seen], seed: int) -> dict[str, PartyData]:
    """Return the rows of the feature party and the label party, as in a session."""
    parts = [torch.cat(part.labels) for part in seen]
    if len(parts) == 1:
        order = torch.randperm(len(parts[0]), generator=generator(seed, "halves"))
        half = len(order) // 2
        split = _split(order[:half].sort().values, order[half:].sort().values)
    else:
        first, second = map(len, parts)
        split = _split(torch.arange(first), torch.arange(first, first + second))
    task = "regression" if parts[0].is_floating_point() else "classification"
    truth = data_of_labels(label, parts, task, seen[0].outputs, split)
    inputs = torch.cat([one for part in seen for one in part.inputs])
    return {party: PartyData(party, inputs, None, None, split, bytes(32)), label: truth}


def data_of_labels(
    name: str, parts: Sequence[Tensor], task: str, classes: int, split: Split | None = None
) -> PartyData:
    """Return a label party's rows.

    Args:
        name: the party.
        parts: labels of the training rows, then of the test rows, axes (rows,).
        task: "classification" or "regression".
        classes: outputs of the model; more where a label is above them.
        split: of the rows; None takes the parts as they are.
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
    return Split(train.numpy(), np.empty(0, np.int64), test.numpy())
