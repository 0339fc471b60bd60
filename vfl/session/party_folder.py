"""One party's own part of a run: its weights, its encoder, and what it needs to use them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vfl.datasets import Encoder, PartyData, read_encoder
from vfl.errors import RunFolderError
from vfl.session.terms import Terms
from vfl.storage import (
    Seal,
    load_weights,
    read_sealed_json,
    save_weights,
    weights_digest,
    write_sealed_json,
)

_WEIGHTS, _ENCODER, _RECORD = "weights.safetensors", "encoder.json", "party.json"


class PartyFolder:
    """Reads and writes one party's files of one run; they never leave the party.

    The record names the run and holds the digest of the weights, and all three files are sealed: a
    folder of another party, or files of two runs, are refused.

    Args:
        path: the folder; its name is the party's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, data: PartyData, terms: Terms, weights: Mapping[str, Tensor]) -> None:
        """Keep what evaluation and prediction need; the record is written last."""
        save_weights(self.path / _WEIGHTS, weights, self._seal("weights", terms.run))
        encoder = None if data.encoder is None else json.loads(data.encoder.to_json())
        if encoder is not None:
            seal = self._seal("encoder", terms.run)
            write_sealed_json(self.path / _ENCODER, {"encoder": encoder}, seal)
        classes = None if data.classes is None else list(data.classes)
        record = {
            "classes": classes,
            "encodes": encoder is not None,
            "weights": weights_digest(weights),
            "terms": terms.model_dump(mode="json"),
        }
        write_sealed_json(self.path / _RECORD, record, self._seal("party's part", terms.run))

    def weights(self) -> dict[str, Tensor]:
        """The trained weights.

        Raises:
            RunFolderError: they are missing, not as they were written, or of another training.
        """
        record = self._record()
        path = self.path / _WEIGHTS
        weights = load_weights(path, self._seal("weights", record["run"]))
        if weights_digest(weights) != record["weights"]:
            raise RunFolderError(
                "these weights are not those the training ended with",
                where=str(path),
                got=f"weights {weights_digest(weights)[:8]}...",
                want=f"weights {record['weights'][:8]}...",
                fix="put both files of that training back from a copy, or train again",
            )
        return weights

    def encoder(self) -> Encoder | None:
        """What turned the party's table into inputs; None for a party without columns.

        Raises:
            RunFolderError: it is missing, not as it was written, or of another training.
        """
        record = self._record()
        if not record["encodes"]:
            return None
        seal = self._seal("encoder", record["run"])
        return read_encoder(json.dumps(read_sealed_json(self.path / _ENCODER, seal)["encoder"]))

    def classes(self) -> tuple[str | int, ...] | None:
        """What the outputs stand for, at the label party of a classification."""
        classes = self._record()["classes"]
        return None if classes is None else tuple(classes)

    def _record(self) -> dict[str, Any]:
        return read_sealed_json(self.path / _RECORD, self._seal("party's part", None))

    def _seal(self, kind: str, run: str | None) -> Seal:
        return Seal(kind, self.path.name, run)
