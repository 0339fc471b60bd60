"""The figures of a whole run, from what happened."""

from __future__ import annotations

from typing import Any

from vfl import compression
from vfl.server.label_party import LabelParty


def summarise(party: LabelParty, weights_sha256: str, run: str) -> dict[str, Any]:
    """Quality, bytes and speed of a finished training or evaluation.

    The formula ratio is the codec's as the literature prints it; the wire ratio divides all bytes
    of training frames, both ways and headers included, by dense float32 both ways.
    """
    terms, ledger, progress = party.terms, party.ledger, party.progress
    last = party.history[-1] if party.history else {}
    codec = compression.make(terms.codec)
    widths = [terms.parties[name].width for name in terms.feature_parties]
    dense_bytes = 2 * 4 * progress.train_rows * sum(widths)
    sent = sum(row.wire_bytes for row in ledger.rows() if row.phase == "train")
    formula = sum(codec.formula_ratio(width) * width for width in widths) / sum(widths)
    speed = progress.train_steps / progress.train_seconds if progress.train_seconds else None
    figures = {key: value for key, value in last.items() if key.startswith("test_")}
    figures["epochs"] = len(party.history)
    if "best_epoch" in last:
        figures["best_epoch"] = last["best_epoch"]
    return figures | {
        "bytes_up": ledger.bytes_by_party("up"),
        "bytes_down": ledger.bytes_by_party("down"),
        "steps": progress.train_steps,
        "steps_per_second": None if speed is None else round(speed, 1),
        "seconds": round(progress.train_seconds, 3),
        "codec": terms.codec,
        "defense": terms.defense,
        "formula_ratio": formula,
        "wire_ratio": sent / dense_bytes if dense_bytes else None,
        "weights_sha256": weights_sha256,
        "run": run,
    }
