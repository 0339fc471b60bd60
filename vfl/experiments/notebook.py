"""Functions for notebooks: `vfl.train`, `vfl.compare`, `vfl.grid`, `vfl.value`; the class `Run`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vfl.config import Experiment, GridSettings, Locations, with_overrides
from vfl.config.run_folder import RunFolder, new_run_name
from vfl.config.toml import check, override
from vfl.core.errors import ConfigError, UserError
from vfl.core.registry import command_of
from vfl.experiments.attack_grid import attack_finished_run
from vfl.experiments.attack_runner import FinishedAttack
from vfl.experiments.attack_tables import summary_table
from vfl.experiments.glance import Glance
from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.module_grid import Build, Fit, Recipe
from vfl.experiments.modules import attack_module
from vfl.experiments.pages import build_report, glance
from vfl.experiments.results import Record, table_of
from vfl.experiments.scheduler import FinishedCell
from vfl.experiments.study import (
    Kind,
    Results,
    Study,
    framed,
    overrides_of,
    plan_modules,
    plan_study,
    run_study,
    train_alone,
)
from vfl.experiments.value import alone_scores
from vfl.training import run as trainer
from vfl.training.fitting import recipe_of
from vfl.training.recorder import ModuleTrace
from vfl.training.specs import check_specs, read_checked
from vfl.training.split import crossings_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

#: Path of an experiment file, content of such a file, or an `Experiment`.
AnyExperiment = str | Path | Mapping[str, Any] | Experiment


class Run:
    """A finished training.

    Args:
        path: its folder.

    Raises:
        RunFolderError: the folder contains no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder.open(Path(path))
        self.path = self.folder.path

    @property
    def summary(self) -> dict[str, Any]:
        """Metrics of the run: quality on test rows, bytes, speed, privacy statements."""
        return self.folder.summary()

    @property
    def table(self) -> pd.DataFrame:
        """Metrics of the run as a table with one row per epoch."""
        import pandas as pd

        return pd.DataFrame(LoadedRun(self.path).history)

    @property
    def glance(self) -> Glance:
        """Summary of the run: four numbers and a sentence."""
        return glance(self.path)

    @property
    def page(self) -> Path:
        """Path of the run's page, a self-contained HTML file; each access builds the page again."""
        return build_report(self.path)

    def predict(self) -> pd.DataFrame:
        """Return predictions for the test rows, in the format of `vfl predict`."""
        import pandas as pd

        return pd.read_csv(trainer.predict(self.folder))

    def attack(self, *attacks: str, progress: bool = False, **settings: object) -> Attacks:
        """Attack the run's test rows; attacks whose score is stored are not run again.

        Args:
            attacks: specs of attacks, or packs such as "light"; by default the pack "light".
            progress: whether to show a progress bar.
            settings: settings of [grid], such as `leaks=[1, 5]`, `draws=3` or `measure="auc"`.

        Raises:
            UserError, RunFolderError: see `vfl attack`.
        """
        asked = _asked(attacks, settings)
        with _bar("attacks", 1, progress) as step:
            rows = attack_finished_run(self.folder, asked, on_end=_shown(step))
        return Attacks(self, rows, asked)

    def alone(self) -> pd.DataFrame:
        """Return the metrics of each party trained alone, one row per party; train missing ones.

        Raises:
            ConfigError, RunFolderError: see `vfl report --alone`.
        """
        import pandas as pd

        train_alone(self.path)
        found = {
            party: one for party, own in alone_scores(self.path).items() for one in own.values()
        }
        return pd.DataFrame.from_dict(found, orient="index")

    def plot(self) -> Figure:
        """Plot the training and validation loss by epoch.

        Raises:
            UserError: matplotlib is not installed.
        """
        from vfl.experiments.plots import plot_run

        return plot_run(self.path)

    def __repr__(self) -> str:
        return f"<run {self.path}: {self.glance.sentence}>"

    def _repr_html_(self) -> str:
        return framed(self.path)


class Attacks:
    """Results of attacks on a run or a module.

    Attributes:
        run: the attacked run; None if the attacks were on a module.
        rows: one record per measure, attack, number of leaked labels and draw of leaked rows.
    """

    def __init__(self, run: Run | None, rows: Sequence[Record], settings: GridSettings) -> None:
        self.run, self.rows, self._settings = run, rows, settings

    @property
    def table(self) -> pd.DataFrame:
        """The results as a table; its column `no_model` is the best value without the model."""
        return table_of(self.rows)

    def __repr__(self) -> str:
        return summary_table(self.rows, self._settings.measure).markdown()

    def _repr_html_(self) -> str:
        import pandas as pd

        shown = summary_table(self.rows, self._settings.measure)
        return str(pd.DataFrame(shown.rows, columns=list(shown.head)).to_html(index=False))


def train(
    experiment: AnyExperiment,
    *settings: str,
    runs: str | Path = "runs",
    name: str | None = None,
    download: bool = False,
    device: str = "cpu",
    progress: bool = True,
) -> Run:
    """Train an experiment with every party in this process.

    Args:
        experiment: path of an experiment file, its content, or an `Experiment`.
        settings: overrides such as "train.epochs=5" or "codec=topk:k=4".
        runs: parent folder of the run's folder.
        name: name of the run's folder; by default the date and time with the experiment's name.
        download: whether to download a data set that is not on this machine.
        device: device on which the models are trained.
        progress: whether to show a progress bar.

    Raises:
        VFLError: see `vfl train`.
    """
    made, locations, called = _read(experiment, settings)
    name = name or new_run_name(made.name)
    again = _command("train", called, settings, Path(runs) / name, device)
    with _bar("epochs", made.train.epochs, progress) as step, locations.located(Experiment):
        summary = trainer.train(
            made,
            Path(runs),
            name,
            command=again,
            download=download,
            device=device,
            on_epoch=lambda record: step(f"epoch {record['epoch']}"),
        )
    build_report(Path(summary["run"]))
    return Run(summary["run"])


def attack(
    victim: str | Path | Run | nn.Module,
    loader: Iterable[Any] | None = None,
    test: Iterable[Any] | None = None,
    *,
    pack: str | Sequence[str] = "light",
    trace: ModuleTrace | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    **settings: object,
) -> Attacks:
    """Attack a finished run, or a module that you trained.

    An attacker on a module's labels is a feature party that attacks after the training. This
    attacker has its own inputs, its layers, the cuts that it sends, and a few leaked labels of each
    class. An attacker on columns, for example with the attack `inversion`, is the label party; it
    knows the columns of some rows of the loader. In a U-shape, the party in the middle (server)
    attacks labels and columns. With a trace of the training, attacks that use recorded gradients
    run as well. The attacker of such an attack has the gradients of each step, and infers labels of
    training rows. The result shows, for each attack, its guess and the best baseline without the
    model.

    Args:
        victim: a `Run` or its folder; or a `SplitModule` or the result of `vfl.split`, which may
            also be compiled, or averaged by `AveragedModel`.
        loader: for a module: batches `(inputs, labels)`, or dicts with `labels`; labels of these
            rows may leak to the attacker. The batches' inputs are the module's inputs; for a
            `SplitModule`, a tuple has one entry per party, in the module's order.
        test: batches of the attacked rows, in the same form as `loader`; with None, a random half
            of the loader's rows is attacked.
        pack: a pack of attacks, the spec of an attack, or a list of these (`vfl list packs`).
        trace: for a module: trace of the module's training, which `vfl.record` recorded.
        out: for a module: folder for scores; an attack whose score is stored there is not run
            again.
        progress: whether to show a progress bar.
        settings: settings of [grid], such as `leaks=[1, 10]`, `draws=3`, `party="bank"`.

    Raises:
        UserError: the attacker lacks evidence that an attack needs, or a number of leaked labels
            does not fit the data.
        DataError: a batch does not have one label per row.
        RunFolderError: see `vfl attack`.
    """
    specs = [pack] if isinstance(pack, str) else list(pack)
    if isinstance(victim, str | Path | Run):
        run = victim if isinstance(victim, Run) else Run(victim)
        if any(one is not None for one in (loader, test, out, trace)):
            raise UserError(
                "a run has its own rows, recording and folder",
                got="a loader, trace= or out=",
            )
        return run.attack(*specs, progress=progress, **settings)
    model = crossings_of(victim)
    if loader is None:
        raise UserError(
            "an attack on a module needs a loader of rows", want="vfl.attack(model, loader)"
        )
    asked = _asked(specs, settings)
    with _bar("attacks", 1, progress) as step:
        folder = None if out is None else Path(out)
        rows = attack_module(model, loader, test, asked, folder, _shown(step), trace)
    return Attacks(None, rows, asked)


def _asked(specs: Sequence[str], settings: Mapping[str, object]) -> GridSettings:
    """Return the grid settings for attacks on a single victim."""
    given = {"attacks": list(specs) or None, "leaks": [1, 5, 10], "draws": 3, **settings}
    return check(override({}, overrides_of(None, given)), GridSettings, where="the settings")


def _shown(step: Any) -> Callable[[FinishedAttack], None]:
    """Return a callback that advances a progress bar after each attack."""

    def ended(one: FinishedAttack) -> None:
        step(one.score.attack, one.done, one.total)

    return ended


def compare(experiment: AnyExperiment | Build, *settings: Any, **options: Any) -> Results:
    """Compare codecs; see `vfl compare`.

    Args:
        experiment: see `train`; or a function `build(codec, defense, seed)` that returns an
            untrained `SplitModule` or a model from `vfl.split`; or the name of such a function,
            "package.module:function".
        settings: overrides of settings; if `experiment` builds a module, the data loaders instead,
            as in `grid`.
        options: `codecs`, `seeds`, `levels` and other settings of `[compare]`; also `out` (the
            study's folder), `jobs`, `ray`, `device` and `progress`. For modules, `defenses` is a
            further option; every codec is then trained with each of these defenses.
    """
    if _is_build(experiment):
        return _module_study("compare", experiment, *_loaders("compare", settings), **options)
    return _study("compare", cast(AnyExperiment, experiment), settings, **options)


def grid(experiment: AnyExperiment | Build, *settings: Any, **options: Any) -> Results:
    """Run all attacks on all defenses; see `vfl grid`.

    Alternatively, a function `build(codec, defense, seed)` builds a module of your own for each
    cell (one training). Each module is trained on the batches of a loader, tested and attacked::

        vfl.grid(build, loader, test, defenses=["dcor:alpha=0.1"], attacks=["light"], seeds=[0, 1])

    `fit=function(model, loader)` sets your own training loop. Without `fit`, `vfl.fit` trains with
    the settings `train`, such as `{"epochs": 20, "optimizer": "adamw", "warmup_steps": 100}`, and
    `loss`. A loader is any iterable that can be iterated repeatedly, or a function of the seed that
    returns such an iterable; without `test`, every fifth batch is held out for tests. If Python can
    import all functions by name, `jobs` and `ray` run trainings in other processes. A repeated call
    with the same folder `out` continues where the earlier call stopped.

    Args:
        experiment: see `compare`.
        settings: overrides of settings; for a module, a loader of the training rows, and optionally
            a loader of the test rows.
        options: `defenses`, `attacks`, `leaks`, `draws`, `seeds` and other settings of `[grid]`;
            also `out`, `jobs`, `ray`, `device` and `progress`. For modules, further options are
            `codec`, `test`, `fit`, `train`, `loss`, `epochs`, `learning_rate` and `name`.

    Raises:
        ConfigError: `build` ignores one of its arguments, or other processes need a function that
            they cannot import by name.
        DataError: `build` returns no split module, or a loader can be read only once.
    """
    if _is_build(experiment):
        return _module_study("grid", experiment, *_loaders("grid", settings), **options)
    return _study("grid", cast(AnyExperiment, experiment), settings, **options)


def value(experiment: AnyExperiment, *settings: str, **options: Any) -> Results:
    """Measure what each party gains from training together; see `vfl value`.

    Args:
        experiment: see `train`.
        settings: overrides.
        options: settings of `[value]`; also `out`, `jobs`, `ray`, `device` and `progress`.
    """
    return _study("value", experiment, settings, **options)


_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _is_build(given: AnyExperiment | Build) -> bool:
    """Return whether a value is a function that builds modules, or a function's name."""
    return callable(given) or (isinstance(given, str) and bool(_NAME.fullmatch(given)))


def _loaders(kind: str, given: Sequence[Any]) -> Sequence[Any]:
    """Return the data loaders that the caller passed to a study of modules.

    Raises:
        UserError: the caller passed more than two loaders.
    """
    if len(given) > 2:
        raise UserError(
            "a module is trained on one loader and tested on another",
            got=f"{len(given)} arguments after build",
            want=f"vfl.{kind}(build, loader, test, name=value, ...)",
        )
    return given


def _module_study(
    kind: Literal["compare", "grid"],
    build: Any,
    loader: Any = None,
    test: Any = None,
    *,
    fit: Fit | str | None = None,
    train: Mapping[str, Any] | None = None,
    loss: str | None = None,
    epochs: int | None = None,
    learning_rate: float | None = None,
    codec: str = "none",
    defense: str = "none",
    name: str | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: bool = True,
    ray: str | None = None,
    **options: object,
) -> Results:
    if loader is None:
        raise UserError(
            "a study of modules needs a loader of training rows",
            want=f"vfl.{kind}(build, loader, test)",
        )
    given = {"epochs": epochs, "learning_rate": learning_rate}
    how = {**(train or {}), **{key: one for key, one in given.items() if one is not None}}
    recipe_of(how)
    if fit is not None and (unused := [*how, *([] if loss is None else ["loss"])]):
        raise ConfigError(
            "these settings are for vfl.fit, but your own function trains here",
            where="fit",
            got=", ".join(unused),
            fix="leave them out and set them in your function, or leave fit out",
        )
    if callable(loss):
        raise ConfigError(
            "in a grid or a comparison, a loss is given by its spec",
            where="loss",
            got="a function",
            want="for example 'cross_entropy:smoothing=0.1'",
            fix="fit=function, in which you call vfl.fit(model, loader, loss=...)",
        )
    recipe = Recipe.of(build, loader, test, fit, train=how, loss=loss)
    name = name or f"module-{kind}"
    study = plan_modules(kind, recipe, name, codec, defense, options)
    said = ", ".join(recipe.names.get(role, role) for role in ("build", "loader"))
    command = f"vfl.{kind}({said}, ...) in Python, with the same arguments"
    return _run(
        study, Path(out or Path("runs") / name), command, jobs, device, progress, ray, recipe
    )


def _run(
    study: Study,
    path: Path,
    command: str,
    jobs: int,
    device: str,
    progress: bool,
    ray: str | None,
    recipe: Recipe | None = None,
) -> Results:
    """Run a study with a progress bar."""
    with _bar("cells", len(study.cells), progress) as step:

        def ended(cell: FinishedCell) -> None:
            step(cell.cell.title + (" failed" if cell.failure else ""), cell.done, cell.total)

        return run_study(study, path, command, None, jobs, device, ended, ray, recipe)


def _study(
    kind: Kind,
    experiment: AnyExperiment,
    settings: Sequence[str],
    *,
    out: str | Path | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: bool = True,
    ray: str | None = None,
    **options: object,
) -> Results:
    overrides = [*settings, *overrides_of(kind, options)]
    made, locations, called = _read(experiment, overrides)
    path = Path(out) if out is not None else Path("runs") / made.name
    command = _command(kind, called, overrides, path, device, "--out", str(path))
    return _run(plan_study(kind, made, locations), path, command, jobs, device, progress, ray)


def _read(
    experiment: AnyExperiment, overrides: Sequence[str]
) -> tuple[Experiment, Locations, str | None]:
    """Return the checked experiment, the lines of its settings, and its file or None."""
    if isinstance(experiment, str | Path):
        return *read_checked(Path(experiment), overrides), str(experiment)
    made = experiment
    if not isinstance(made, Experiment):
        made = check(dict(made), Experiment, where="the experiment")
    made = with_overrides(made, overrides)
    check_specs(made)
    return made, Locations(), None


def _command(
    name: str, called: str | None, overrides: Sequence[str], folder: Path, device: str, *more: str
) -> str:
    """Return a command that repeats the run, with the experiment's file or the run's folder."""
    if called is None:
        return command_of(name, str(folder / "config.toml"), *more, device=device)
    return command_of(name, called, *more, settings=overrides, device=device)


@contextmanager
def _bar(what: str, total: int, shown: bool) -> Iterator[Any]:
    """Show a progress bar in a terminal or notebook; yield a function that advances the bar."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(what, total=total)

        def step(words: str, done: int | None = None, total: int | None = None) -> None:
            advance = 1 if done is None else None
            bar.update(task, description=words, completed=done, advance=advance, total=total)

        yield step
