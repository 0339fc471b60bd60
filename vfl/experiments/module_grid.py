"""Grids and comparisons of modules that a caller builds: `vfl.grid(build, loader, ...)`.

A cell (one training) is a run folder as in any grid, so that tables, pages and the scheduler work
as for experiment files. Functions of the caller make models and data, in place of an experiment's
settings. A function that other processes can import is identified by its name,
"package.module:function"; if a function comes from a notebook, the calling process trains all
cells.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError, DataError, RunFolderError, UserError, VFLError
from vfl.core.registry import named
from vfl.core.seeds import Secret, derive, scoped
from vfl.core.storage import stamp, write_json
from vfl.datasets import PartyData
from vfl.experiments.attack_grid import keep_pictures_of
from vfl.experiments.attack_runner import codes_of
from vfl.experiments.cells import (
    CODEC,
    HONEST,
    PICTURES,
    Cell,
    GridFolder,
    code_of,
    grid_settings_of,
)
from vfl.experiments.modules import ModuleAttacks, data_of_labels, reads_training
from vfl.experiments.scenarios import attacker_of
from vfl.experiments.scores import BASELINES, OF_CELL, setting_text, write_scores
from vfl.experiments.staleness import put_aside_if_stale
from vfl.experiments.training import codec_figures
from vfl.models.losses import make_loss
from vfl.session import Checkpoints
from vfl.session.label.quality import classification_quality, regression_quality
from vfl.session.label.summary import guess_of, traffic_figures
from vfl.training.cutting import tensors_of
from vfl.training.fitting import (
    RECIPE,
    answered,
    device_of,
    fit,
    judged,
    labelled,
    logits_in,
    loss_of,
    moved,
    one_a_row,
    recipe_of,
    row_digests,
)
from vfl.training.recorder import ModuleTrace, module_digest
from vfl.training.split import Crossings, crossings_of

#: Function that makes an untrained module from the spec of a codec, the spec of a defense, and a
#: seed.
Build = Callable[[str, str, int], Crossings]
#: Function that trains a module on a loader; it may return another module, such as a module with
#: averaged weights.
Fit = Callable[[Crossings, Iterable[Any]], Any]
#: File name of a cell's trained module in its run folder.
_MODULE = "module"
#: Largest size in bytes of the test rows' cuts on which a codec is measured.
_MEASURED_BYTES = 2**26
#: If the caller gives no test rows, one of this many batches is held out for tests.
_HELD_OUT = 5
_ROLES = ("build", "loader", "test", "fit")
_PACKAGE = Path(__file__).parents[1]


@dataclass(eq=False)
class Recipe:
    """Functions that build and train the modules of a grid, and load their rows.

    Attributes:
        build: function that makes an untrained module; see `Build`.
        loader: iterable over batches of the training rows, which must be iterable repeatedly; or a
            function that makes it from the seed.
        test: the same kind of value for the test rows; None holds out every fifth batch of
            `loader`.
        fit: function that trains a module; None uses `vfl.fit` with the settings `train` and
            `loss`.
        train, loss: settings of `vfl.fit`.
        names: import names of the functions, by role, so that other processes can import them.
    """

    build: Build
    loader: Any
    test: Any = None
    fit: Fit | None = None
    train: Mapping[str, Any] = field(default_factory=dict)
    loss: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows: tuple[int, Rows] | None = None

    @classmethod
    def of(cls, build: Any, loader: Any, test: Any = None, fit: Any = None, **own: Any) -> Recipe:
        """Return a recipe from functions, or from the functions' import names.

        Raises:
            ConfigError: an import name refers to no existing function.
        """
        given = dict(zip(_ROLES, (build, loader, test, fit), strict=True))
        names = {role: name for role, one in given.items() if (name := _name_of(one)) is not None}
        found = {
            role: _imported(role, one) if isinstance(one, str) else one
            for role, one in given.items()
        }
        return cls(**found, names=names, **own)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Recipe:
        """Restore a recipe from its record in a grid's folder, in another process.

        Raises:
            UserError: the recipe contains functions that other processes cannot import.
        """
        if record["here"]:
            raise UserError(
                "this grid was made of functions of a notebook or a script",
                got=", ".join(record["here"]),
                want="functions of a module that Python can import",
                fix="call vfl.grid or vfl.compare again in that notebook, with jobs=1",
            )
        own = {name: record[name] for name in ("train", "loss")}
        return cls.of(*(record["names"].get(role) for role in _ROLES), **own)

    @property
    def here(self) -> list[str]:
        """Return the roles of functions that only this process has."""
        return [
            role for role in _ROLES if getattr(self, role) is not None and role not in self.names
        ]

    @property
    def record(self) -> dict[str, Any]:
        """The recipe as a record for the grid's folder."""
        own = {"train": dict(self.train), "loss": self.loss}
        return {"names": dict(self.names), "here": self.here, **own}

    def require_names(self) -> None:
        """Reject a training in several processes if only this process has the functions.

        Raises:
            ConfigError: a function has no importable name; the error lists all such functions.
        """
        if self.here:
            raise ConfigError(
                "other processes import these functions by name",
                where="jobs, ray",
                got=f"{', '.join(self.here)} without a name that Python can import",
                want="functions at the top of a module that Python can import, or their names "
                "'package.module:function'",
                fix="jobs=1, which trains in this process; name a loader's function of the seed",
            )

    def built(self) -> str:
        """Return a digest of the code and the values from which `build` makes modules."""
        behind = [_behind(one) for role in _ROLES if callable(one := getattr(self, role))]
        code = code_of(*(one for functions, _ in behind for one in functions))
        held = "".join(_ADDRESS.sub("", text) for _, text in behind)
        if held.strip():  # the text is hashed, because values inside a callable may be private data
            code += hashlib.sha256(held.encode()).hexdigest()
        how = sorted(recipe_of(self.train).model_dump(include={*RECIPE}).items())
        settings = "" if self.fit else f"{how} {self.loss}"
        return f"{code} {settings}".strip()

    def module(self, codec: str, defense: str, seed: int) -> Crossings:
        """Return an untrained module that the caller's function `build` makes.

        Args:
            codec: a spec.
            defense: a spec.
            seed: seed of the initial weights and of the parties' secrets.

        Raises:
            DataError: `build` does not return a split module.
            ConfigError: the module's codec, defense or seed differs from the requested one.
            UserError: `build` raises an error.
        """
        asked = codec, defense, seed
        try:
            signature(self.build).bind(*asked)
        except TypeError as error:
            raise ConfigError(
                "build needs the arguments codec, defense and seed",
                where="build",
                got=str(error),
                want="build(codec, defense, seed)",
            ) from None
        with scoped(derive(seed, "build")), _running("build"):
            made = crossings_of(self.build(*asked))
        own = made.experiment
        if codec not in made.codec_specs or (own.defense, own.seed) != (defense, seed):
            raise ConfigError(
                "build returned a module whose settings differ from the requested ones",
                got=_settings_text(made.codec_text, own.defense, own.seed),
                want=_settings_text(*asked),
                fix="pass all arguments of build(codec, defense, seed) to vfl.split or SplitModule",
            )
        return made

    def of_cell(self, experiment: Experiment, device: str) -> Crossings:
        """Return the untrained module for a cell; see `module`."""
        return self.module(experiment.codec, experiment.defense, experiment.seed).to(device)

    def experiment(self, name: str, codec: str, defense: str) -> Experiment:
        """Return an experiment with the settings that all modules of the recipe share.

        Args:
            name: name of the study.
            codec: codec of all modules; for studies that do not compare codecs.
            defense: defense of all modules; for studies that do not compare defenses.
        """
        made = self.module(codec, defense, 0).experiment
        train: dict[str, Any] = {"batch_size": self.rows(0).batch_size}
        if self.fit is None:
            train |= recipe_of(self.train).model_dump(include={*RECIPE})
        if self.loss is not None:
            make_loss(self.loss, made.label.task)  # this module is built only to check the recipe
        update = {
            "name": name,
            "purpose": "functions of the caller make models and rows: see grid.json",
            "train": made.train.model_copy(update=train),
        }
        return made.model_copy(update=update)

    def rows(self, seed: int) -> Rows:
        """Return the training and test rows for a seed; the rows for the last seed are cached."""
        if not any(isinstance(one, FunctionType | type) for one in (self.loader, self.test)):
            seed = 0  # a loader that is no function gives the same rows for all seeds
        if self._rows is None or self._rows[0] != seed:
            with scoped(derive(seed, "loader")):
                self._rows = seed, Rows.of(_made(self.loader, seed), _made(self.test, seed))
        return self._rows[1]

    def trained(
        self, model: Crossings, rows: Rows, on_epoch: Callable[[dict[str, Any]], None]
    ) -> Crossings:
        """Train a module; return this module, or the module that `fit` returns."""
        with scoped(derive(model.experiment.seed, "fit")):
            if self.fit is None:
                fit(model, rows.loader, loss=self.loss, on_epoch=on_epoch, **self.train)
                return model
            found = self.fit(model, rows.loader)
        # `fit` returned nothing, or the history that `vfl.fit` returns
        if found is None or isinstance(found, list):
            return model
        return crossings_of(found)


#: Memory address of an object in its `repr`; the address differs between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _behind(given: object) -> tuple[list[FunctionType | type], str]:
    """Return the functions and classes that a callable contains, and its other values as text."""
    if isinstance(given, FunctionType | type):
        return [given], ""
    if isinstance(given, partial):
        functions, text = _behind(given.func)
        return functions, f"{text} {given.args} {sorted(given.keywords.items())}"
    if isinstance(given, MethodType):
        functions, text = _behind(given.__self__)
        return [given.__func__, *functions], text  # type: ignore[list-item]  # it is a function
    return [type(given)], f" {sorted(getattr(given, '__dict__', {}).items())}"


def _settings_text(codec: str, defense: str, seed: int) -> str:
    return f"codec '{codec}', defense '{defense}', seed {seed}"


def _name_of(given: Any) -> str | None:
    """Return a function's import name for other processes; None if it has no such name."""
    if isinstance(given, str):
        return given
    if not isinstance(given, FunctionType | type) or given.__module__ == "__main__":
        return None
    module = sys.modules.get(given.__module__)
    is_there = getattr(module, given.__qualname__, None) is given and hasattr(module, "__file__")
    return f"{given.__module__}:{given.__qualname__}" if is_there else None


def _imported(role: str, name: str) -> Any:
    try:
        return named(name)
    except (ImportError, AttributeError, ValueError):
        raise ConfigError(
            "no function has that name",
            where=role,
            got=name,
            want="'package.module:function', as Python imports it here",
        ) from None


def _made(given: Any, seed: int) -> Any:
    """Return a loader unchanged, or the loader that a function returns for a seed."""
    if not isinstance(given, FunctionType | type):
        return given
    with _running("loader"):
        return given(seed)


@contextmanager
def _running(role: str) -> Iterator[None]:
    """Convert an error of the caller's function to a UserError with the error's line, not its text.

    Raises:
        UserError: the caller's function raised an error, which becomes the cause of the UserError.
    """
    try:
        yield
    except VFLError:
        raise
    except Exception as error:
        _, where = last_line(error, lambda file: "-packages" not in file and not is_of_vfl(file))
        raise UserError(
            f"the function that you gave as {role} ended with an error",
            where=where,
            got=type(error).__name__,
            fix="the error itself is printed above, as the cause",
        ) from error


def last_line(error: Exception, counts: Callable[[str], bool]) -> tuple[str, str]:
    """Return the file of the last executed line, and this line with its function as text.

    Args:
        error: the error that ended a function.
        counts: function that returns whether lines of a file count; if no executed line counts, the
            result is the last one of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = ([one for one in frames if counts(one.filename)] or frames)[-1]
    return last.filename, f"{last.filename}:{last.lineno} in {last.name}"


def is_of_vfl(file: str) -> bool:
    """Return whether a file belongs to vfl."""
    return Path(file).is_relative_to(_PACKAGE)


@dataclass(frozen=True, eq=False)
class Rows:
    """The training rows and test rows of a grid's cells.

    Attributes:
        loader: batches of the training rows.
        test: batches of the test rows.
        digest: digest of all rows, which does not depend on their order.
        batch_size: number of rows in the first training batch.
        labels: labels of the training rows and labels of the test rows, in the order of the
            loaders.
    """

    loader: Iterable[Any]
    test: Iterable[Any]
    digest: str
    batch_size: int
    labels: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, loader: Iterable[Any], test: Iterable[Any] | None) -> Rows:
        """Return the rows of two loaders, or of one loader of which some batches are held out.

        Raises:
            DataError: a loader can be iterated only once, or is empty, or a batch has no labels.
        """
        if test is None:
            loader, test = _held_out(list(_again(loader)))
        sums, labels = [], []
        for one in (loader, test):
            found, own, of_labels = _sum_of(one)
            # If a row's inputs differ in each pass, for example as augmented images, only the
            # labels can identify the data set
            sums.append(found if _sum_of(one)[0] == found else of_labels)
            labels.append(own)
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()[:12]
        first = len(labelled(next(iter(loader)))[1])
        return cls(loader, test, digest, first, (labels[0], labels[1]))

    def data(self, name: str, task: str, classes: int) -> PartyData:
        """Return the label party's data, as in a session."""
        return data_of_labels(name, self.labels, task, classes)


def _again(loader: Any) -> Iterable[Any]:
    """Return a loader; reject a loader that cannot be iterated twice."""
    if not isinstance(loader, Iterable) or iter(loader) is loader:
        raise DataError(
            "a loader must return its batches again in each epoch",
            where="the loader",
            got=f"a {type(loader).__name__}",
            want="a DataLoader, a list of batches, or a function that makes one from the seed",
        )
    return loader


def _held_out(batches: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return training batches and test batches; every fifth batch is a test batch."""
    if len(batches) < 2:
        raise DataError(
            "these batches cannot be divided into training rows and test rows",
            where="the loader",
            got=f"{len(batches)} batches",
            want="two batches or more",
            fix="pass test=, a loader of test rows",
        )
    every = min(_HELD_OUT, len(batches))
    first = [one for place, one in enumerate(batches, 1) if place % every]
    return first, batches[every - 1 :: every]


def _sum_of(loader: Iterable[Any]) -> tuple[int, Tensor, int]:
    """Return the sum of the rows' digests, the rows' labels, and the sum of the labels' digests."""
    total, of_labels, found = 0, 0, list[Tensor]()
    for batch in _again(loader):
        inputs, labels = labelled(batch)
        tensors = [*tensors_of(inputs), labels]
        by_row = [one for one in tensors if one.dim() and len(one) == len(labels)]
        whole = [one for one in tensors if not any(one is other for other in by_row)]
        total += sum(row_digests(by_row)) + sum(sum(row_digests([one[None]])) for one in whole)
        of_labels += sum(row_digests([labels]))
        found.append(one_a_row(labels).cpu())
    if not found:
        raise DataError("the loader returns no batch", where="the loader")
    return total, torch.cat([one.flatten(1) if one.dim() > 1 else one for one in found]), of_labels


# --- cells ----------------------------------------------------------------------------------------


def run_module_cell(cell: Cell, folder: GridFolder, recipe: Recipe, device: str = "cpu") -> None:
    """Complete a cell: train its module if needed, then attack the module or measure its codecs.

    Args:
        cell: the cell to complete.
        folder: folder of the grid.
        recipe: functions that build and train the module.
        device: device on which the module is trained.
    """
    path = folder.cells_path / cell.name
    rows = recipe.rows(cell.experiment.seed)
    put_aside_if_stale(cell, folder, rows.digest, {"built": recipe.built()})
    attacked = folder.kind == "attacks"
    recorded = attacked and reads_training(grid_settings_of(folder.experiment()))
    trace: ModuleTrace | None = None
    if cell.victim == BASELINES:
        model = recipe.of_cell(cell.experiment, device)
    else:
        model, trace = _trained_module(cell, folder, recipe, device, recorded=recorded)

    def recording() -> ModuleTrace:
        return _recorded_again(cell, path, recipe, device) if trace is None else trace

    if attacked:
        _attack(model, cell, folder, rows, recording)
    elif not (path / CODEC).exists():
        write_json(path / CODEC, _codec_record(model, rows))


def _trained_module(
    cell: Cell, folder: GridFolder, recipe: Recipe, device: str, *, recorded: bool
) -> tuple[Crossings, ModuleTrace | None]:
    """Return the trained module of a cell, with a trace if this call trains and records it."""
    path, experiment = folder.cells_path / cell.name, cell.experiment
    rows = recipe.rows(experiment.seed)
    model = recipe.of_cell(experiment, device)
    kept = Checkpoints(path / _MODULE, experiment.label.party, cell.name, recipe.built())
    if (path / "summary.json").exists():
        model.load_state_dict(kept.load(0))
        return model, None
    if path.exists():
        shutil.rmtree(path)  # an earlier process ended before it had finished the training
    run = RunFolder.create(path, experiment, "module", str(folder.head("command")))
    began = time.perf_counter()
    trace = ModuleTrace(model) if recorded else None
    with _counted(model) as dense_bytes, nullcontext() if trace is None else trace:
        found = recipe.trained(model, rows, run.epoch)
    seconds, ledger = time.perf_counter() - began, model.ledger
    links = [(experiment.codec, party.width) for party in experiment.parties.values()]
    traffic = traffic_figures(ledger, links, sum(dense_bytes.values()))
    figures, classes = _tested(found, rows.test)
    guess = guess_of(rows.data(experiment.label.party, found.task, classes)) if classes else {}
    kept.save(0, found.state_dict())
    summary = {
        **{f"test_{name}": value for name, value in figures.items()},
        "epochs": recipe_of(recipe.train).epochs if recipe.fit is None else None,
        "guess": guess,
        "steps": model.step,
        "steps_per_second": round(model.step / seconds, 1),
        "seconds": round(seconds, 3),
        "codec": found.codec_text,
        "defense": experiment.defense,
        **traffic,
        "secure": experiment.secure,
        "privacy": [one.as_dict() for one in found.privacy()],
        "weights_sha256": module_digest(found),
        "run": str(path),
    }
    run.finish(summary, ledger)
    return found, trace


def _recorded_again(cell: Cell, path: Path, recipe: Recipe, device: str) -> ModuleTrace:
    """Train a cell's module again, to the same weights, and record this training.

    Raises:
        RunFolderError: the weights of the new training differ from the stored weights.
    """
    model = recipe.of_cell(cell.experiment, device)
    with ModuleTrace(model) as trace:
        found = recipe.trained(model, recipe.rows(cell.experiment.seed), lambda epoch: None)
    before, now = str(RunFolder(path).summary()["weights_sha256"]), module_digest(found)
    if before != now:
        raise RunFolderError(
            "the training was repeated for a recording, but gave other weights",
            where=str(path),
            got=f"weights {now[:8]}...",
            want=f"weights {before[:8]}...",
            fix="draw random numbers in build, fit and loader only from torch's generator; or give "
            "another folder, in which the first training is recorded",
        )
    return trace


@contextmanager
def _counted(model: Crossings) -> Iterator[dict[str, int]]:
    """Count each party's bytes of training cuts as dense float32, while the block runs."""
    found = dict.fromkeys(model.decoders, 0)

    def count(party: str, width: int, end: torch.nn.Module, given: tuple[Tensor]) -> None:
        # copies of the module have the same hook
        if model.training and end is model.decoders[party]:
            found[party] += 4 * len(given[0]) * width

    hooks = [
        model.decoders[name].register_forward_pre_hook(partial(count, name, party.width))
        for name, party in model.experiment.parties.items()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _tested(model: Crossings, test: Iterable[Any]) -> tuple[dict[str, float], int]:
    """Return metrics of test rows and the number of classes (regression 1, multi-label 0)."""
    device, outputs, codes, losses = device_of(model), [], [], []
    model.eval()
    with torch.no_grad():
        for batch in test:
            inputs, labels = moved(labelled(batch), device)
            labels = one_a_row(labels)
            by_row, several = labels.dim() == 1, labels.is_floating_point()
            answer = answered(model, inputs, None if by_row else labels)
            if by_row or several:
                found, truths = judged(logits_in(answer), labels, model.task)
                outputs.append(found.cpu())
                codes.append(truths.cpu())
            else:
                losses.append((len(labels), float(loss_of(answer, labels, model.task))))
    if losses:
        rows = sum(count for count, _ in losses)
        return {"loss": sum(count * loss for count, loss in losses) / rows}, 0
    whole, truth = torch.cat(outputs), torch.cat(codes)
    quality = regression_quality if model.task == "regression" else classification_quality
    return quality(whole, truth), whole.shape[1] if by_row else 0


def _codec_record(model: Crossings, rows: Rows) -> dict[str, Any]:
    """Return the record `codec.json`: measures of each codec on the cuts of test rows."""
    cuts: dict[str, list[Tensor]] = {name: [] for name in model.encoders}
    hooks = [
        end.register_forward_hook(partial(_keep, cuts[name]))
        for name, end in model.encoders.items()
    ]
    device, asked = device_of(model), 0
    model.eval()
    try:
        with torch.no_grad():
            for batch in rows.test:
                inputs, labels = moved(labelled(batch), device)
                answered(model, inputs)
                asked += len(labels)
                if sum(4 * one.numel() for own in cuts.values() for one in own) > _MEASURED_BYTES:
                    break
    finally:
        for hook in hooks:
            hook.remove()
    seed = model.experiment.seed
    parties = {
        name: codec_figures(
            model.codecs[name],
            torch.cat(own),
            model.experiment.parties[name].width,
            rows.batch_size,
            Secret.of_simulation(seed, name),
        )
        for name, own in cuts.items()
        if own  # no encoder here for the cut that returns in a U-shape
    }
    counts = {"train_rows": len(rows.labels[0]), "test_rows": len(rows.labels[1])}
    return stamp() | {"train": {}, "parties": parties, **counts}


def _keep(into: list[Tensor], module: torch.nn.Module, given: Any, sent: Tensor) -> None:
    into.append(sent.detach().float().cpu())


def _attack(
    model: Crossings,
    cell: Cell,
    folder: GridFolder,
    rows: Rows,
    recording: Callable[[], ModuleTrace],
) -> None:
    """Run every attack of the grid that has no score for this cell yet."""
    path, settings = folder.cells_path / cell.name, grid_settings_of(folder.experiment())
    attacked = ModuleAttacks(model, rows.loader, rows.test, settings, recording)
    jobs = attacked.baselines() if cell.victim == BASELINES else attacked.on_victim()
    scores = attacked.run(jobs, path)
    first = cell.experiment.seed == settings.seeds[0] and cell.victim != BASELINES
    if first and settings.pictures and model.task == "classification":
        _draw(attacked, path, attacker_of(cell.experiment, settings), settings.pictures)
    write_scores(path / OF_CELL, setting_text(settings), scores, codes_of(scores))


def _draw(attacked: ModuleAttacks, path: Path, party: str, most: int) -> None:
    """Store pictures (charts) of the test rows' cuts, unless they exist."""
    if not (path / PICTURES).exists():
        shown = attacked.test_cuts(most)
        keep_pictures_of(path, *shown, {"rows": most, "party": party})


# --- planning -------------------------------------------------------------------------------------


def check_study(kind: str, experiment: Experiment) -> None:
    """Reject settings of a study that have no effect on modules.

    Raises:
        ConfigError: the study has a mistake; the error describes the first one.
    """
    grid, compare = experiment.grid, experiment.compare
    asked: dict[str, object] = {}
    if grid is not None:
        honest = [one for one in grid.adversaries if one != HONEST]
        asked = {"models": grid.models, "adversaries": honest, "record": grid.record}
        asked |= {"leaks_from": grid.leaks_from == "validation"}
        asked |= {"unlabelled": grid.unlabelled == "validation"}
    if compare is not None:
        asked = {"folds": compare.folds, "accuracy": compare.accuracy}
    for name, value in asked.items():
        if value:
            raise ConfigError(
                "this setting has no effect if functions build and train the module",
                where=f"{kind}.{name}",
                want="only training and test rows, which the loaders return",
                fix=f"leave {name} out, or use an experiment file",
            )


def variant_name(spec: str) -> str:
    """Return a defense's spec in the form of a variant's name.

    >>> variant_name("dcor:alpha=0.5")
    'dcor-alpha-0.5'
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", spec)[:32].strip("-")
