"""Many horizontal trainings: in this process, in Flower's simulation on Ray, or in a project."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vfl.config.run_folder import new_run_name
from vfl.core.errors import ConfigError, MissingPackageError, UserError
from vfl.core.storage import private_folder, read_json, write_json
from vfl.federation import upstream
from vfl.federation.programs import QUIET
from vfl.federation.project import LabelFolder
from vfl.horizontal import Outcome, simulate
from vfl.horizontal.settings import HorizontalSettings, HorizontalStudy
from vfl.horizontal.simulation import Tested, simulated_server
from vfl.training import federated

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

#: Time limit in seconds for all clients in one round.
_ROUND_S = 3600.0
#: Time limit in seconds for Flower's simulation to start.
_START_S = 120.0
_RUN = "simulation"


@dataclass(frozen=True, slots=True)
class Trained:
    """One training of a study and its result.

    Attributes:
        title: variant and swept values of the training.
        settings: all settings.
        record: result of the training, as `Outcome.record` returns it.
    """

    title: str
    settings: HorizontalSettings
    record: Mapping[str, Any]


def train_study(
    study: HorizontalStudy,
    folder: Path,
    engine: Literal["process", "ray"] = "process",
    say: Callable[[str], None] = lambda line: None,
) -> list[Trained]:
    """Run all trainings of a study, except those whose result file already exists.

    Args:
        study: content of a settings file; see `vfl.horizontal.settings`.
        folder: folder with one result file for each training, named by a digest of its settings.
        engine: name of the engine that runs the clients; both engines yield the same weights.
        say: function that receives one line of text about each training.

    Raises:
        VFLError: a training failed; the files of the other trainings remain.
    """
    private_folder(folder)
    found, trainings = [], study.trainings()
    for number, (title, settings) in enumerate(trainings, start=1):
        text = settings.model_dump_json(exclude_none=True)
        path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        if not path.exists():
            run = simulate if engine == "process" else simulate_on_ray
            record = run(settings, lambda tested: say(_line(tested))).record()
            settings_told = settings.model_dump(mode="json", exclude_none=True)
            write_json(path, {"title": title, "settings": settings_told, **record})
        record = read_json(path)
        found.append(Trained(title, settings, record))
        accuracy, seconds = record["accuracy"], record["seconds"]
        name = title or settings.name
        say(f"{number} of {len(trainings)}  {name}  accuracy {accuracy:.4f}  {seconds:.0f} s")
    return found


def _line(tested: Mapping[str, float]) -> str:
    rest = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in tested.items()][1:]
    return f"  round {tested['round']:.0f}  {'  '.join(rest)}"


def train_project(
    settings: HorizontalSettings,
    label: LabelFolder,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Train with the parties of a project as clients, on the parties' own tables.

    Args:
        settings: settings of the training; every feature party is a client.
        label: folder of the label party, whose SuperLink is running.
        say: function that receives the result of each test, and a message when parties connect.

    Returns:
        Folder of the run at the label party.

    Raises:
        ConfigError: the settings do not list the classes.
        VFLError: the error that ended the training, as the party reported it.
    """
    clients = len(label.experiment().feature_parties)
    told = settings.model_dump(mode="json", exclude_none=True) | {
        "clients": clients,
        "sampled": min(settings.sampled, clients),
    }
    if settings.classes is None:
        raise ConfigError(
            "the settings must list the classes of the parties' own tables, in one order",
            where="horizontal.classes",
            fix='-s \'horizontal.classes=["no", "yes"]\'',
        )
    overrides = [f"{name}={json.dumps(value)}" for name, value in told.items()]
    return federated.run_session(
        label,
        "horizontal",
        new_run_name(settings.name),
        overrides=overrides,
        on_epoch=lambda record: say(_line(record)),
        on_note=say,
    )


def simulate_on_ray(settings: HorizontalSettings, on_test: Tested | None = None) -> Outcome:
    """Train in Flower's simulation on Ray; see `vfl.horizontal.simulate`.

    Flower's usage reports are switched off, and all sockets listen on the loopback interface only.

    Raises:
        MissingPackageError: Ray is not installed.
        UserError: the process imported Flower earlier, with Flower's telemetry switched on.
    """
    if find_spec("ray") is None:
        raise MissingPackageError(
            "a Flower simulation needs Ray, its engine",
            want="ray",
            fix="pip install 'vfl[simulation]', or --engine process",
        )
    with _quiet(), warnings.catch_warnings():
        # `run_simulation` is deprecated, but it exists in every version of Flower that vfl allows.
        warnings.simplefilter("ignore", DeprecationWarning)
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        from vfl.horizontal.flower import (
            HorizontalStrategy,
            simulated_client_app,
            wait_for_nodes,
        )

        if upstream.TELEMETRY.load().FLWR_TELEMETRY_ENABLED != "0":
            raise UserError(
                "Flower was imported while its telemetry was switched on",
                fix="set the environment variable FLWR_TELEMETRY_ENABLED=0 before Python starts",
            )
        logging.getLogger("flwr").setLevel(logging.ERROR)
        _, averager, evaluator = simulated_server(settings, on_test)
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            nodes = wait_for_nodes(grid, settings.clients, _START_S)
            HorizontalStrategy(averager, evaluator, _RUN, nodes).run(grid, _ROUND_S)

        config: dict[str, Any] = {
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"include_dashboard": False, "_node_ip_address": "127.0.0.1"},
        }
        run_simulation(server, simulated_client_app(), settings.clients, "ray", config)
    return evaluator.outcome()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Flower and Ray, by environment variables, from reporting usage and from listening."""
    before = dict(os.environ)
    os.environ |= QUIET
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
