"""``vfl privacy``: the epsilon for a given noise, the noise for a given budget, and audits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vfl.cli.output import Download, Json, Set, argument, emit, option, print_line, say

privacy = typer.Typer(
    no_args_is_help=True, help="Plan differential privacy: from noise to epsilon, and back."
)

Rows = Annotated[int | None, option("Training rows.", min=1)]
BatchSize = Annotated[
    int | None, option("Rows per batch; with Poisson sampling, the expected number of rows.", min=1)
]
Epochs = Annotated[int | None, option("Number of passes over the rows.", min=1)]
Rate = Annotated[
    float | None,
    option("Probability that a step uses a row, in place of --rows and --batch-size."),
]
Steps = Annotated[int | None, option("Steps, in place of epochs.", min=1)]
Delta = Annotated[
    float, option("Delta; should be below 1 over the number of rows, which vfl does not check.")
]
Sampling = Annotated[
    Literal["poisson", "shuffled"],
    option("Method that samples batches; shuffled batches have no privacy amplification."),
]


@privacy.command()
def epsilon(
    noise: Annotated[
        float, option("Noise multiplier: standard deviation of the noise over the clipping norm.")
    ],
    rows: Rows = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    sampling_rate: Rate = None,
    steps: Steps = None,
    delta: Delta = 1e-5,
    sampling: Sampling = "poisson",
    json: Json = False,
) -> None:
    """Print the epsilon of a training with this noise multiplier, computed by every accountant.

    Give --rows, --batch-size and --epochs, or --sampling-rate and --steps.
    """
    from vfl.core.errors import MissingPackageError
    from vfl.privacy import accountants

    plan = _planned(rows, batch_size, epochs, sampling_rate, steps, sampling)
    steps_of = accountants.GaussianSteps(noise / plan["sensitivity"], plan["steps"], plan["rate"])
    told: dict[str, Any] = {}
    for name in accountants.ACCOUNTANTS.names():
        try:
            told[name] = accountants.epsilon_by(steps_of, delta, name)
        except MissingPackageError as missing:
            told[name] = None
            typer.echo(f"{missing.what}: {missing.fix}", err=True)
    if plan["rate"] == 1:
        told["exact"] = accountants.epsilon_of(steps_of, delta)
    _tell(told | _facts(plan, delta) | {"noise": noise}, json)


@privacy.command()
def noise(
    epsilon: Annotated[float, option("The budget.")],
    rows: Rows = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    sampling_rate: Rate = None,
    steps: Steps = None,
    delta: Delta = 1e-5,
    sampling: Sampling = "poisson",
    accountant: Annotated[
        str, option("Accountant that computes epsilon; see `vfl list accountants`.")
    ] = "rdp",
    json: Json = False,
) -> None:
    """Print the smallest noise multiplier with which a training stays within a privacy budget.

    Give --rows, --batch-size and --epochs, or --sampling-rate and --steps.
    """
    from vfl.privacy.accountants import noise_for

    plan = _planned(rows, batch_size, epochs, sampling_rate, steps, sampling)
    least = noise_for(epsilon, delta, plan["steps"], plan["rate"], accountant)
    facts = _facts(plan, delta) | {"epsilon": epsilon, "accountant": accountant}
    _tell({"noise": least * plan["sensitivity"]} | facts, json)


@privacy.command()
def audit(
    path: Annotated[
        Path,
        argument("An experiment with [dp], or a run of such an experiment.", "EXPERIMENT.toml|RUN"),
    ],
    settings: Set = None,
    canaries: Annotated[
        int,
        option(
            "Number of rows (canaries) that a coin flip includes in a training or leaves out.",
            min=1,
        ),
    ] = 200,
    trainings: Annotated[
        int,
        option("If more than one: audit with this many trainings, with one canary each.", min=1),
    ] = 1,
    confidence: Annotated[
        float, option("Confidence level of the lower bound.", min=0.5, max=0.9999)
    ] = 0.95,
    seed: Annotated[int, option("Seed of canaries and of coin flips.")] = 0,
    download: Download = False,
    json: Json = False,
) -> None:
    """Train with inserted rows (canaries), and prove a lower bound on the training's epsilon.

    A lower bound above the claimed epsilon refutes the claim. For a run that one process trained,
    the audit is stored with the run and shown in its report. The exit code is 1 if the claim is
    refuted.
    """
    from vfl.config.run_folder import RunFolder
    from vfl.core.seeds import use_one_thread
    from vfl.training.privacy_audit import audit as audited
    from vfl.training.run import load_data
    from vfl.training.specs import read_checked

    use_one_thread()
    folder = RunFolder.open(path) if path.is_dir() else None
    if folder is not None and settings:
        raise typer.BadParameter("a run keeps its settings", param_hint="--set")
    experiment = folder.experiment() if folder else read_checked(path, settings or [])[0]
    data = load_data(experiment, download=download)
    report = audited(
        experiment,
        data,
        canaries=canaries,
        confidence=confidence,
        trainings=trainings,
        seed=seed,
        say=say,
    )
    if folder is not None:
        folder.audited(report.as_dict())
    emit(report.as_dict()) if json else print(report)
    if report.refuted:
        raise typer.Exit(1)


def _planned(
    rows: int | None,
    batch_size: int | None,
    epochs: int | None,
    rate: float | None,
    steps: int | None,
    sampling: str,
) -> dict[str, Any]:
    """Return a planned training's number of steps, sampling rate, sensitivity and relation.

    The number of steps counts those in which a given row can take part. The sensitivity is a
    multiple of the clipping norm.

    Raises:
        BadParameter: the options describe no training, or two trainings.
    """
    by_rows, by_rate = (rows, batch_size, epochs), (rate, steps)
    if (None in by_rows) == (None in by_rate) or any(by_rows) == any(by_rate):
        wanted = "either --rows, --batch-size and --epochs, or --sampling-rate and --steps"
        raise typer.BadParameter(f"give {wanted}")
    if sampling == "shuffled":
        if epochs is None:
            raise typer.BadParameter("shuffled batches need --rows, --batch-size and --epochs")
        # Each row is in one batch per epoch; replacing a row changes the batch's sum of clipped
        # gradients by up to two clipping norms.
        return {"steps": epochs, "rate": 1.0, "sensitivity": 2.0, "relation": "replace"}
    if rows is not None and batch_size is not None and epochs is not None:
        from vfl.privacy.accountants import poisson_steps

        a_step = poisson_steps(rows, batch_size)
        rate, steps = min(1.0, batch_size / rows), epochs * a_step
    return {"steps": steps, "rate": rate, "sensitivity": 1.0, "relation": "add or remove"}


def _facts(plan: Mapping[str, Any], delta: float) -> dict[str, Any]:
    names = {"delta": delta, "sampling_rate": plan["rate"], "steps": plan["steps"]}
    return names | {"unit": "record", "relation": plan["relation"]}


def _tell(told: Mapping[str, Any], json: bool) -> None:
    if json:
        emit(told)
        return
    for name, value in told.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        print_line(name.replace("_", " "), "not installed" if value is None else text, 20)
