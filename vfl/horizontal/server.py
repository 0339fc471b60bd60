"""A horizontal training at the label party, which averages updates and tests on its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from flwr.serverapp import Grid

from vfl.config import Experiment, PartyFile
from vfl.config.run_folder import RunFolder
from vfl.config.toml import check, override
from vfl.core.errors import (
    ConfigError,
    MissingPartyError,
    RunFolderError,
    StorageError,
    VFLError,
    redacted_traceback,
)
from vfl.core.processes import looks
from vfl.core.seeds import Secret
from vfl.core.storage import (
    Seal,
    append_line,
    locked,
    private_folder,
    save_weights,
    write_json,
)
from vfl.horizontal import Averager, plan_noise
from vfl.horizontal.client import build_model
from vfl.horizontal.flower import HorizontalStrategy
from vfl.horizontal.settings import HorizontalSettings
from vfl.horizontal.simulation import Evaluator, own_rows
from vfl.server.federation import nodes_by_name
from vfl.session import unexpected
from vfl.session.store.party_folder import own_ledger

_ROUND_S = 3600.0
#: Name of the file in a run's folder that marks a training as successfully ended.
OUTCOME = "horizontal.json"


def run_horizontal(
    grid: Grid, experiment: Experiment, party: PartyFile, changes: Sequence[str], run: str
) -> None:
    """Run one training in which every feature party is a client.

    Args:
        grid: Flower's grid, through which the server sends messages to the nodes.
        experiment: settings of the project: its parties, and the time within which they must
            connect.
        party: the label party's own file.
        changes: changed settings, as ``key=value``.
        run: name of the training.

    Raises:
        VFLError: the training failed; the run's folder contains a record of the same error.
    """
    path = party.run_path(run)
    private_folder(path)
    with locked(path):
        try:
            if (path / OUTCOME).exists():
                raise RunFolderError("a run of this name exists already", where=str(path))
            settings = check(override({}, changes), HorizontalSettings, where="[horizontal]")
            _train(grid, experiment, party, settings, run)
        except Exception as error:
            problem = error if isinstance(error, VFLError) else unexpected(error, party.party)
            if problem is not error:
                print(redacted_traceback(error), flush=True)
            print(problem, flush=True)
            with suppress(StorageError):
                RunFolder(path).fail(problem)
            raise problem from None


def _train(
    grid: Grid, experiment: Experiment, party: PartyFile, settings: HorizontalSettings, run: str
) -> None:
    folder, clients = RunFolder(party.run_path(run)), experiment.feature_parties
    if settings.clients != len(clients):
        raise ConfigError(
            "every feature party is a client",
            where="horizontal.clients",
            got=str(settings.clients),
            want=str(len(clients)),
        )
    inputs, labels = own_rows(party, settings)
    model = build_model(settings, tuple(inputs.shape[1:]), len(settings.classes or ()))
    # The guarantees that parties get from their own noise depend on their numbers of rows; the
    # guarantees from the server's noise do not.
    plan = plan_noise(settings, settings.batch_size)
    averager = Averager(settings, plan, model, Secret.fresh())

    def keep(figures: Mapping[str, float]) -> None:
        append_line(folder.path / "metrics.jsonl", dict(figures))

    evaluator = Evaluator(settings, averager, model, inputs, labels, keep)
    nodes = _wait_for(grid, clients, experiment.federation.join_timeout_s)
    folder.note(f"{len(nodes)} clients: {', '.join(clients)}")
    witness = own_ledger(party).witness

    def known(client: int) -> int:
        return witness.read().peers.get(clients[client], 0)

    def admit(client: int, count: int) -> None:
        witness.admit(clients[client], count)

    HorizontalStrategy(averager, evaluator, run, nodes, known, admit).run(grid, _ROUND_S)
    model_state = {str(number): layer for number, layer in averager.layers.items()}
    save_weights(
        folder.path / "weights.safetensors", model_state, Seal("weights", party.party, run)
    )
    write_json(folder.path / OUTCOME, evaluator.outcome().record())


def _wait_for(grid: Grid, names: Sequence[str], patience_s: float) -> list[int]:
    """Return Flower's ids of the parties' nodes, in the order of the parties' names."""
    missing: list[str] = []
    for _ in looks(patience_s):
        found = nodes_by_name([node for node in grid.get_nodes() if node.name in names])
        missing = [name for name in names if name not in found]
        if not missing:
            return [found[name] for name in names]
    raise MissingPartyError(
        f"no SuperNode of {', '.join(missing)} after {patience_s:g} s",
        fix="start vfl up party.toml there; if it fails, run vfl doctor party.toml there",
    )
