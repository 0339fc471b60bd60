"""``vfl compare``, ``value``, ``grid``, ``attack``, ``submit``, ``verify``, ``compress``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import (
    Device,
    Download,
    Json,
    Run,
    Set,
    argument,
    emit,
    option,
    print_line,
    quick_imports,
    say,
)
from vfl.core.errors import ConfigError, UserError, record_lines
from vfl.core.registry import command_of

if TYPE_CHECKING:
    from torch import Tensor

    from vfl.experiments.attack_runner import FinishedAttack
    from vfl.experiments.scheduler import FinishedCell
    from vfl.experiments.study import Kind

Attacks = Annotated[
    list[str] | None,
    option(
        "An attack, or a pack of attacks: thesis, quick, light, heavy, numbers (on numeric "
        "labels), columns (on a party's inputs) or members (on membership in the training rows); "
        "vfl list packs lists their attacks. Repeat.",
        "SPEC",
        "--attack",
    ),
]
Out = Annotated[Path | None, option("Output folder; by default runs/NAME.", "FOLDER")]
Jobs = Annotated[
    int, option("Number of cells that run at the same time, each in its own process.", min=1)
]
Ray = Annotated[
    str | None,
    option(
        "Run cells on Ray: only on this machine (local), or on a cluster of your own machines. "
        "Resources per cell may follow, as in local,cpus=2,gpus=0.5,memory=2GB.",
        "local|auto|ADDRESS",
    ),
]
DryRun = Annotated[bool, option("List the cells without training.", "--dry-run")]


def compare(
    path: Annotated[
        Path, argument("An experiment file, with or without [compare].", "EXPERIMENT.toml")
    ],
    codec: Annotated[
        list[str] | None,
        option(
            "A codec to compare; --level determines the number in place of a ?. Repeat.", "SPEC"
        ),
    ] = None,
    seeds: Annotated[
        str | None, option("Seeds; each codec is trained once per seed.", "0,1,2")
    ] = None,
    level: Annotated[
        list[float] | None,
        option("Largest size of a frame, in percent of dense float32. Repeat.", "PERCENT"),
    ] = None,
    settings: Set = None,
    out: Out = None,
    jobs: Jobs = 1,
    ray: Ray = None,
    only: Annotated[
        str | None,
        option(
            "Train only cells whose line in the output of --dry-run contains this text, as whole "
            "words.",
            "WORDS",
        ),
    ] = None,
    dry_run: DryRun = False,
    download: Download = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Compare codecs: train each codec with several seeds, and write a table and a page.

    The same command continues where an earlier call stopped, even in the middle of a training, and
    trains only missing cells (one cell is one training).
    """
    given = {"codecs": codec, "seeds": _numbers(seeds), "levels": level}
    _study("compare", path, settings, given, out, jobs, ray, dry_run, download, device, json, only)


def value(
    path: Annotated[
        Path, argument("An experiment file, with or without [value].", "EXPERIMENT.toml")
    ],
    codec: Annotated[
        list[str] | None, option("A codec whose cost is measured. Repeat.", "SPEC")
    ] = None,
    defense: Annotated[
        list[str] | None, option("A defense whose cost is measured. Repeat.", "SPEC")
    ] = None,
    seeds: Annotated[
        str | None, option("Seeds; each kind of training runs once per seed.", "0,1,2")
    ] = None,
    measure: Annotated[
        str | None, option("Metric to compare; by default auc, or rmse for a regression.")
    ] = None,
    settings: Set = None,
    out: Out = None,
    jobs: Jobs = 1,
    ray: Ray = None,
    dry_run: DryRun = False,
    download: Download = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Measure the value of joining: each party alone, split training, all data in one place.

    Every training uses only rows that all parties have. The same command continues where an earlier
    call stopped, and trains only missing cells (one cell is one training).
    """
    given = {
        "codecs": codec,
        "defenses": defense,
        "seeds": _numbers(seeds),
        "measure": measure,
    }
    _study("value", path, settings, given, out, jobs, ray, dry_run, download, device, json)


def grid(
    path: Annotated[
        Path,
        argument(
            "An experiment file, with or without [grid]; quick is a small one on digits; with "
            "--add-attack, the folder of a grid.",
            "EXPERIMENT.toml|quick|RUN",
        ),
    ],
    add_attack: Annotated[
        Path | None,
        option(
            "Score an attack from your own file on every victim that RUN stored; --attack gives "
            "its options.",
            "FILE.py",
        ),
    ] = None,
    defense: Annotated[
        list[str] | None, option("A defense to attack, in addition to none. Repeat.", "SPEC")
    ] = None,
    codec: Annotated[list[str] | None, option("A codec as a defense. Repeat.", "SPEC")] = None,
    attack: Attacks = None,
    adversary: Annotated[
        list[str] | None,
        option("An adversary that tampers during a victim's training. Repeat.", "SPEC"),
    ] = None,
    leaks: Annotated[str | None, option("Numbers of leaked labels per class.", "1,5,10")] = None,
    draws: Annotated[int | None, option("Number of draws of leaked rows per victim.")] = None,
    seeds: Annotated[
        str | None, option("Seeds; each defense has one victim per seed.", "0,1,2")
    ] = None,
    settings: Set = None,
    out: Out = None,
    jobs: Jobs = 1,
    ray: Ray = None,
    dry_run: DryRun = False,
    download: Download = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Attack the models of every defense with all attacks, and write a table and a page.

    One victim (attacked model) is trained per defense or codec, adversary and seed; the leaked rows
    are the same for all defenses. The same command continues where an earlier call stopped, and
    computes only missing results.
    """
    if add_attack is not None:
        wrong = {
            "--defense": defense, "--codec": codec, "--adversary": adversary, "--leaks": leaks,
            "--draws": draws, "--seeds": seeds, "-s": settings, "--out": out, "--ray": ray,
            "--dry-run": dry_run, "--download": download,
        }  # fmt: skip
        _refuse_beside("--add-attack", [name for name, value in wrong.items() if value])
        _add_attack(path, add_attack, attack or (), jobs, device, json)
        return
    given = {
        "defenses": defense,
        "attacks": attack,
        "draws": draws,
        "codecs": codec,
        "adversaries": adversary,
        "leaks": _numbers(leaks),
        "seeds": _numbers(seeds),
    }
    _study("grid", path, settings, given, out, jobs, ray, dry_run, download, device, json)


def attack(
    run: Run,
    attacks: Attacks = None,
    leaks: Annotated[str, option("Numbers of leaked labels per class.", "1,5,10")] = "1,5,10",
    draws: Annotated[int, option("Draws of leaked rows.", min=1)] = 3,
    party: Annotated[
        str | None,
        option("The feature party that attacks or is attacked; by default the first."),
    ] = None,
    settings: Set = None,
    json: Json = False,
) -> None:
    """Attack a run's test rows; compare each attack with baselines that do not use the run's model.

    --set changes a setting of [grid], such as leaks_from=validation or trained_by=owner. Scores are
    stored in the run's folder and shown on the run's page; an attack whose score is stored is not
    repeated. Attacks on gradients need a run that was trained with -s trace.phases=train, and most
    attacks on columns a run trained with -s 'trace.phases=["validation", "test"]'; an error names
    the missing recording.
    """
    from vfl.config import GridSettings
    from vfl.config.run_folder import RunFolder
    from vfl.config.toml import check, override
    from vfl.core.seeds import use_one_thread
    from vfl.experiments.attack_grid import attack_finished_run
    from vfl.experiments.attack_tables import (
        means_over_draws,
        searches_table,
        sentences,
        summary_table,
    )
    from vfl.experiments.pages import build_report, glance
    from vfl.experiments.study import overrides_of

    use_one_thread()
    given = {"attacks": attacks, "leaks": _numbers(leaks), "draws": draws, "party": party}
    overrides = [*overrides_of(None, given), *(settings or [])]
    asked = check(override({}, overrides), GridSettings, where="the options")
    rows = attack_finished_run(RunFolder.open(run), asked, say, _Paced(say_attack))
    results = [summary_table(rows, asked.measure).markdown()]
    if (searches := searches_table(rows)) is not None:
        results.append(searches.markdown())
    results += [f"{attack:<28} {sentence}" for attack, sentence in sentences(rows).items()]
    page = build_report(run)
    if json:
        emit(
            [row.as_json() | found for row, found in zip(rows, means_over_draws(rows), strict=True)]
        )
    else:
        _print_results(glance(run).sentence, "\n".join(results), page)


def submit(
    path: Annotated[Path, argument("The folder of a comparison or a grid.", "RUN")],
    out: Annotated[Path, option("New folder of the submission.", "FOLDER")],
    author: Annotated[str, option("Author of the submission.", "NAME")],
    json: Json = False,
) -> None:
    """Write a study's results as a folder; other people can repeat a part with `vfl verify`.

    The folder contains the experiment, every measured figure with versions and digests, and the
    files given by --plugin. The folder contains no data and no models.
    """
    from vfl.experiments import submission

    submission.submit(path, out, author)
    if json:
        emit({"submission": str(out), "then": f"vfl verify {out}"})
    else:
        print(f"wrote {out}; anyone can repeat a tenth of it: vfl verify {out}")


def verify(
    path: Annotated[Path, argument("A submission, from `vfl submit`.", "FOLDER")],
    share: Annotated[
        float,
        option(
            "Share of the trainings to repeat; at least one training is repeated.", min=0.0, max=1.0
        ),
    ] = 0.1,
    draw: Annotated[int, option("Seed of the random choice.")] = 0,
    out: Annotated[
        Path | None, option("Repeated trainings; by default runs/verify-NAME.", "FOLDER")
    ] = None,
    jobs: Jobs = 1,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Repeat some trainings and attacks of a submission, and compare the results with its figures.

    The exit code is 1 if fewer than 95 % of the figures match, if a figure of quality does not
    match, or if the data sets differ; if a training fails, it is the code of its error. Code of the
    submission's plug-ins runs only if you load that code with --plugin FILE.
    """
    from vfl.core.seeds import use_one_thread
    from vfl.experiments import submission

    use_one_thread()
    target = out or Path("runs") / f"verify-{path.resolve().name}"
    found = submission.verify(path, target, share, draw, jobs, device, say_cell)
    if json:
        emit(found.record())
    else:
        print("\n".join([*(str(one) for one in found.checks if not one.holds), found.sentence]))
    exit_with_failures(found.failed)
    if not found.holds:
        raise typer.Exit(1)


def compress(
    path: Annotated[
        Path,
        argument(
            "A saved cut with axes (rows, width), or RUN/parties/PARTY with a trace.",
            "CUT.npy|CUT.npz|TRACE",
        ),
    ],
    codec: Annotated[
        list[str] | None, option("A codec such as topk:k=3,values=8; may be repeated.", "--codec")
    ] = None,
    batch_size: Annotated[
        int | None,
        option("Rows per frame; by default 256, or as in the traced training.", min=1),
    ] = None,
    inference: Annotated[
        bool,
        option("Measure frames of predictions, which have one scale for each row.", "--inference"),
    ] = False,
    array: Annotated[str | None, option("Name of the array in a .npz file.")] = None,
    party: Annotated[
        str | None, option("Feature party whose cuts are used from a label party's trace.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare codecs on a saved cut or a trace: frame sizes, entropy, error and times.

    Each frame is encoded, framed, checked and decoded. Without --codec, the command measures one or
    two codecs of each kind. From a trace, the training cuts of one feature party are used.

    Columns: bytes of frames with headers, as the ledger counts (--json: wire_bytes); their share of
    4 bytes for each value (wire_ratio); that share as the literature counts, without headers
    (formula_ratio); the order-0 entropy of the symbols with known frequencies, without headers and
    scales (entropy_bound_bytes); the L2 norm of the loss over that of the cut (relative_error);
    times of the median frame on this machine. size, sign, rate and bottlenet have a trained part,
    which is untrained here: their error is not shown, and rate has its initial size.
    """
    from vfl.compression.compare import compare_codecs, default_specs, format_table
    from vfl.training.specs import check_codecs

    cut, recorded_rows = _cut_of(path, array, party)
    specs = codec or default_specs(cut.shape[1])
    check_codecs(specs, cut.shape[1], "--codec")
    frame_rows = recorded_rows if batch_size is None else batch_size
    rows = compare_codecs(cut, specs, batch_size=frame_rows, training=not inference, say=say)
    if json:
        emit([row.record() for row in rows])
    else:
        print(format_table(rows))


def worker(
    folder: Annotated[Path, argument("The folder of a grid.", "FOLDER")],
    device: Device = "cpu",
    outside: Annotated[
        bool, option("Run only attacks from outside, on stored victims.", "--outside")
    ] = False,
) -> None:
    """Run the cells whose names arrive on standard input; `--jobs` above 1 starts this command."""
    with quick_imports():
        from vfl.core.seeds import use_one_thread
        from vfl.experiments.scheduler import serve

    use_one_thread()
    serve(folder, device, outside)


def _profile(path: Path, folder: Path) -> Path:
    """Return vfl's bundled experiment with this name, unless a file with this name exists."""
    profile = folder / f"{path}.toml"
    return (
        profile if not path.is_file() and path.parts == (path.name,) and profile.exists() else path
    )


def _numbers(text: str | None) -> list[int] | None:
    """Parse a list of integers that are separated by commas.

    Raises:
        ConfigError: the text is no list of integers.
    """
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("a list of whole numbers", got=text, want="1,5,10") from None


def _study(
    kind: Kind,
    path: Path,
    settings: list[str] | None,
    given: Mapping[str, object],
    out: Path | None,
    jobs: int,
    ray: str | None,
    dry_run: bool,
    download: bool,
    device: str,
    json: bool,
    only: str | None = None,
) -> None:
    """Train a study's cells, report each cell, print results; if cells failed, end with a code."""
    with quick_imports():
        from vfl import experiments as room
        from vfl.core.seeds import use_one_thread
        from vfl.experiments.study import overrides_of, plan_study, run_study
        from vfl.training.run import load_data
        from vfl.training.specs import read_checked

    overrides = [*(settings or []), *overrides_of(kind, given)]
    experiment, locations = read_checked(_profile(path, Path(room.__file__).parent), overrides)
    study = plan_study(kind, experiment, locations)
    cells = room.chosen(study.cells, only) if only else study.cells
    if dry_run:
        print("\n".join(study.lines(cells)))
        return
    use_one_thread()
    if download:
        load_data(cells[0].experiment, download=True)
    target = out or Path("runs") / experiment.name
    say(f"{len(cells)} cells in {target}")
    place = ["--out", str(out)] if out else []
    command = command_of(kind, str(path), *place, settings=overrides, device=device)
    found = run_study(study, target, command, cells, jobs, device, say_cell, ray)
    if json:
        emit(found.content | {"report": str(found.page), "sentence": found.glance.sentence})
    else:
        _print_results(found.glance.sentence, found.text, found.page)
    exit_with_failures(found.failed)


def _refuse_beside(option: str, others: Sequence[str]) -> None:
    """Raise an error for options that have no effect in combination with another option.

    Raises:
        ConfigError: an option has no effect in combination with `option`.
    """
    if others:
        raise ConfigError(
            f"{option} uses a grid without changes", got=", ".join(others), fix="leave them out"
        )


def _add_attack(
    run: Path, file: Path, specs: Sequence[str], jobs: int, device: str, json: bool
) -> None:
    """Score an attack from the user's file on a grid's victims, and report changed verdicts."""
    from vfl.core.seeds import use_one_thread
    from vfl.experiments.study import add_attack

    use_one_thread()
    found = add_attack(run, file, specs, jobs, device, say_cell)
    if json:
        emit(found.content)
    else:
        _print_results(found.glance.sentence, found.text, found.page)
    exit_with_failures(found.failed)


def say_cell(ended: FinishedCell) -> None:
    """Print one line about a finished cell (one training), with the estimated remaining time."""
    from vfl.experiments.tables import seconds_text

    left = "" if ended.done == ended.total else f"  about {seconds_text(ended.left_s)} left"
    state = f"failed: {ended.failure['what']}" if ended.failure else seconds_text(ended.seconds)
    share = f"{ended.done} of {ended.total}, {ended.done / ended.total:.0%}"
    rate = f"  {60 * ended.per_second:.3g} cells/min" if ended.per_second else ""
    say(f"{share}  {ended.cell.title}  {state}{rate}{left}")


def say_attack(ended: FinishedAttack) -> None:
    """Print one line about a finished attack, with the estimated remaining time."""
    from vfl.experiments.tables import seconds_text

    one, share = ended.score, f"{ended.done} of {ended.total}, {ended.done / ended.total:.0%}"
    leak = f" k={one.k}" if one.k else ""
    left = "" if ended.left_s <= 0 else f"  about {seconds_text(ended.left_s)} left"
    say(f"{share}  {one.attack}{leak}  {seconds_text(one.seconds)}{left}")


class _Paced:
    """Passes finished attacks on, with at least a few seconds between two calls; skips others."""

    def __init__(self, told: Callable[[FinishedAttack], None], every_s: float = 3.0) -> None:
        self._told, self._every_s, self._next = told, every_s, 0.0

    def __call__(self, ended: FinishedAttack) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._told(ended)


def _print_results(sentence: str, results: str, page: Path) -> None:
    print(fill(sentence, 100), end="\n\n")
    print(results)
    print_line("report", page)


def exit_with_failures(failed: Sequence[FinishedCell]) -> None:
    """Report the failures of a study's cells, and end with the worst exit code."""
    for ended in failed:
        record = ended.failure or {}
        say("\n".join([f"failed: {ended.cell.title}: {record['what']}", *record_lines(record)]))
    if failed:
        raise typer.Exit(max(int((ended.failure or {})["exit"]) for ended in failed))


def _cut_of(path: Path, array: str | None, party: str | None) -> tuple[Tensor, int]:
    """Return the cut of a file or trace, and the default number of rows per frame."""
    from vfl.compression.measure import read_cut
    from vfl.session.trace import TRACE, read, training_cuts

    folder = path.is_dir()
    if (party if not folder else array) is not None:
        option, kind = ("--array", "an .npz file") if folder else ("--party", "a trace")
        raise UserError(f"{option} is for {kind}", got=str(path), fix="leave it out")
    if not folder:
        return read_cut(path, array), 256
    recording = read(path / TRACE if (path / TRACE).is_dir() else path)
    if recording.terms.codec != "none":
        say(f"recorded with codec {recording.terms.codec}: the cuts include this codec's error")
    return training_cuts(recording, party), recording.terms.train.batch_size
