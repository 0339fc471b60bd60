"""Training of a cell (one training of a grid) on its data, and measurements afterwards."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from vfl import defenses
from vfl.clients import FeatureParty
from vfl.compression import Codec
from vfl.compression.measure import measure_codec
from vfl.config import Experiment, TraceSettings
from vfl.config.run_folder import RunFolder
from vfl.config.validate import check_one_label_party
from vfl.core.seeds import Secret
from vfl.core.storage import stamp
from vfl.datasets import PartyData
from vfl.experiments.cells import Cell, GridFolder
from vfl.session import CHECKPOINTS, Adversary, FeatureEnd, secure_mode
from vfl.session.schedule import QUERY_ROWS
from vfl.session.secure_mode import shared_bottom_error
from vfl.training.local import LocalSession
from vfl.training.run import load_data, train, trained


class DataCache:
    """Cache of the data of the last experiment, for the next experiment if it has the same data."""

    def __init__(self) -> None:
        self._about = ""
        self._data: Mapping[str, PartyData] = {}

    def of(self, experiment: Experiment) -> Mapping[str, PartyData]:
        """Return the data of every party; see `vfl.training.run.load_data`."""
        about = about_rows(experiment)
        if about != self._about:
            self._data = {}  # free the old data before the new data are loaded
            self._data = load_data(experiment)
            self._about = about
        return self._data


def train_cell(
    cell: Cell,
    folder: GridFolder,
    data: Mapping[str, PartyData],
    device: str = "cpu",
    trace: TraceSettings | None = None,
    adversaries: Mapping[str, Adversary] | None = None,
    bottoms: Mapping[str, nn.Module] | None = None,
) -> None:
    """Train a cell unless it is finished, from its last checkpoint if any; then clean up.

    Args:
        cell: the cell to train.
        folder: folder of the grid.
        data: data of every party.
        device: device on which the models are trained.
        trace: recording of the training, which does not change the weights; None uses the cell's
            own setting.
        adversaries: adversaries after their `begin`, by party name.
        bottoms: bottom modules with initial weights that replace the experiment's specs, by party.
    """
    experiment = cell.experiment if trace is None else recording(cell.experiment, trace)
    path = folder.cells_path / cell.name
    if path.exists() and not (path / "metrics.jsonl").exists():
        shutil.rmtree(path)  # an earlier process ended before the run folder was complete
    if not (path / "summary.json").exists():
        train(
            experiment,
            path.parent,
            path.name,
            command=str(folder.head("command")),
            resume=path.exists(),
            data=data,
            adversaries=adversaries,
            bottoms=bottoms,
            device=device,
        )
    for checkpoints in path.glob(f"parties/*/{CHECKPOINTS}"):
        shutil.rmtree(checkpoints)


def recording(experiment: Experiment, trace: TraceSettings) -> Experiment:
    """Return an experiment with other recordings in place of its own."""
    return experiment.model_copy(update={"trace": trace})


def about_rows(experiment: Experiment) -> str:
    """Return all settings that determine the data that `load_data` returns, as text."""
    own = {"width", "bottom"}
    parties = {name: one.model_dump(exclude=own) for name, one in experiment.parties.items()}
    label = experiment.label.model_dump(exclude={"top", "class_weight", "calibration"})
    mode, defense = secure_mode.make(experiment.secure), defenses.make(experiment.defense)
    how = [mode.divides_rows, mode.reads_cells, defense.unaligned, experiment.train.split_rows]
    about = [experiment.seed, experiment.data.model_dump(), parties, label, how]
    return json.dumps(about, sort_keys=True)


def measure_cell(
    folder: RunFolder, data: Mapping[str, PartyData], device: str = "cpu"
) -> dict[str, Any]:
    """Return the record `codec.json` for a finished run of a comparison.

    Args:
        folder: folder of the run, which contains the weights.
        data: data of every party.
        device: device on which the bottom models run.

    Returns:
        An entry `train` with metrics of the training rows, computed without random draws, unlike
        the metrics of epochs; and an entry `parties` with the measures of each feature party's
        codec on the cuts of test rows.
    """
    experiment = folder.experiment()
    session = trained(folder, _asking_training_rows(data), "evaluate", device).run()
    check_one_label_party(experiment, "a comparison")
    if not isinstance(session, LocalSession):
        raise shared_bottom_error(experiment.feature_parties[0])
    rows = torch.from_numpy(data[experiment.label.party].split.test)
    secrets = {name: Secret.of_simulation(experiment.seed, name) for name in data}
    parties = {
        client.name: _measured(client, rows, experiment.train.batch_size, secrets[client.name])
        for client in session.clients
    }
    train = {
        name.removeprefix("test_"): value
        for name, value in session.label.history[-1].items()
        if name.startswith("test_") and math.isfinite(value)
    }
    return stamp() | {"train": train, "parties": parties}


def _asking_training_rows(data: Mapping[str, PartyData]) -> dict[str, PartyData]:
    """Return the same data with a split in which an evaluation uses the training rows."""
    return {
        name: replace(own, split=replace(own.split, test=own.split.train))
        for name, own in data.items()
    }


def _measured(client: FeatureParty, rows: Tensor, batch_size: int, secret: Secret) -> Any:
    assert isinstance(client.end, FeatureEnd), "a comparison refuses shared first layers"
    codec, cut = client.end.codec.unmasked, client.cut(rows)
    return codec_figures(codec, cut, client.end.width, batch_size, secret)


def codec_figures(
    codec: Codec, cut: Tensor, width: int, batch_size: int, secret: Secret
) -> dict[str, Any]:
    """Return a codec's measures on a cut, for `codec.json`; see `measure_codec`, `unit_usage`."""
    units = unit_usage(codec, cut)
    sizes = measure_codec(codec, cut, width=width, batch_size=batch_size, secret=secret)
    bound = sizes.entropy_bound_bytes
    finite = {"entropy_bound_bytes": bound if math.isfinite(bound) else None}  # JSON has no NaN
    return asdict(sizes) | finite | units


def unit_usage(codec: Codec, cut: Tensor) -> dict[str, Any]:
    """Count the rows for which a codec transmits each unit of a cut, without random draws.

    For a codec that keeps k values of each row, `usage` is C_i of thesis equation (3-21), the
    number of rows whose top k contain unit i. A unit whose value is zero does not count, even if
    the codec sends it as one of the k values.

    Args:
        codec: codec with the state that it has after the training.
        cut: cut before the codec, axes (rows, width).

    Returns:
        `usage`: for each unit, the number of rows in which it is not zero after decoding;
        `dead_units`: number of units that are zero in every row; `nonzeros`: mean number of
        non-zero units per row after decoding.
    """
    arrived = torch.cat([_arrived(codec, part) for part in torch.split(cut, QUERY_ROWS)])
    return {
        "usage": arrived.sum(dim=0).tolist(),
        "dead_units": int((cut == 0).all(dim=0).sum()),
        "nonzeros": float(arrived.sum(dim=1).float().mean()),
    }


def _arrived(codec: Codec, cut: Tensor) -> Tensor:
    rows, width = cut.shape
    decoded = codec.decode(codec.encode(cut).payload, rows, width).cut
    return (decoded != 0) & (cut != 0)
