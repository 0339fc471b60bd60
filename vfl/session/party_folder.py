"""One party's own part of a run: its weights, its encoder, and what it needs to use them again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vfl.datasets import Encoder, PartyData, read_encoder
from vfl.session.terms import Terms
from vfl.storage import (
    check_format,
    load_weights,
    read_json,
    save_weights,
    stamp,
    write_json,
    write_text,
)


class PartyFolder:
    """Reads and writes one party's files of one run; they never leave the party.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, data: PartyData, terms: Terms, weights: Mapping[str, Tensor]) -> None:
        """Keep what evaluation and prediction need; the record is written last."""
        save_weights(self.path / "weights.safetensors", weights)
        if data.encoder is not None:
            write_text(self.path / "encoder.json", data.encoder.to_json(), mode=0o600)
        classes = None if data.classes is None else list(data.classes)
        record = stamp() | {"party": data.name, "classes": classes}
        write_json(self.path / "party.json", record | {"terms": terms.model_dump(mode="json")})

    def weights(self) -> dict[str, Tensor]:
        """The trained weights.

        Raises:
            RunFolderError: they are missing, damaged or of another format.
        """
        self._record()
        return load_weights(self.path / "weights.safetensors")

    def encoder(self) -> Encoder | None:
        """What turned the party's table into inputs; None for a party without columns."""
        path = self.path / "encoder.json"
        return read_encoder(path.read_text()) if path.exists() else None

    def classes(self) -> tuple[str | int, ...] | None:
        """What the outputs stand for, at the label party of a classification."""
        classes = self._record()["classes"]
        return None if classes is None else tuple(classes)

    def _record(self) -> Any:
        record = read_json(self.path / "party.json")
        check_format(record, self.path)
        return record
