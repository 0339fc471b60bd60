"""The label party's Flower app: each call of `flwr run` runs one session."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from vfl.config import Experiment, read_experiment, read_party_file
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    ConfigError,
    PeerFailedError,
    VFLError,
    redacted_output,
    redacted_traceback,
)
from vfl.core.products import modes
from vfl.core.registry import named
from vfl.server.session import run_session
from vfl.session import Terms
from vfl.session.store.party_folder import own_terms
from vfl.session.terms import AlignTerms

PARTY_FILE_VARIABLE = "VFL_PARTY_FILE"


def server_app(folder: Path) -> ServerApp:
    """Return the ServerApp of a project.

    Args:
        folder: folder of the app bundle, which contains ``experiment.toml``.

    The SuperLink's environment variable VFL_PARTY_FILE names the label party's own file, so that a
    Flower run contains no path of the label party.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        with without_data(), redacted_output():
            play(grid, folder, context.run_config)

    return app


def play(grid: Grid, folder: Path, config: Mapping[str, Any]) -> None:
    """Run the session that a Flower run's configuration requests."""
    overrides = json.loads(str(config["overrides"]))
    party = read_party_file(_own_file(str(config["label-file"])))
    mode, run = str(config["mode"]), str(config["run"])
    if added := modes().get(mode):
        experiment = read_experiment(folder / "experiment.toml")
        named(added.plays)(grid, experiment, party, overrides, run)
        return
    told: Sequence[str] = ()
    if mode in ("evaluate", "predict"):  # these modes of a session have no separate settings
        told, overrides = overrides, []
    today = experiment = read_experiment(folder / "experiment.toml", overrides)
    if config["resume"] or mode not in ("train", "align"):
        experiment = _as_trained(today, party.run_path(run))
    if mode == "align":
        terms: Terms = AlignTerms.asked(experiment, run)
    else:
        terms = own_terms(experiment, mode, run, party)  # type: ignore[arg-type]
    if told:
        terms = terms.asked_with(told)
    run_session(
        grid,
        experiment,
        party,
        terms,
        resume=bool(config["resume"]),
        simulation=bool(config["party-files"]),
        settings=overrides,
        today=today.feature_parties,
    )


@contextmanager
def without_data() -> Iterator[None]:
    """From the `with` block, raise only errors of vfl without causes: Flower logs causes."""
    try:
        yield
    except VFLError as error:
        raise error from None
    except Exception as bug:
        print(redacted_traceback(bug), flush=True)
        raise PeerFailedError(
            "the label party's app failed unexpectedly",
            got=type(bug).__name__,
            fix="the lines above this line in its log show where the error occurred",
        ) from None


def _as_trained(experiment: Experiment, run: Path) -> Experiment:
    """Return the settings of a run's training, with today's addresses and time limits."""
    trained = RunFolder.open(run).experiment()
    return trained.model_copy(update={"federation": experiment.federation})


def _own_file(named: str) -> Path:
    path = named or os.environ.get(PARTY_FILE_VARIABLE, "")
    if not path:
        raise ConfigError(
            "the environment variables do not name the label party's own file",
            want=f"{PARTY_FILE_VARIABLE} in the environment of the SuperLink process",
            fix="start the SuperLink with: vfl up PROJECT",
        )
    return Path(path)
