"""The figures of a whole run, from what happened."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vfl import compression
from vfl.exchange.exposure import what_is_told
from vfl.server.label_party import LabelParty
from vfl.server.revealed import revealed


def summarise(party: LabelParty, weights_sha256: str, run: str) -> dict[str, Any]:
    """Quality, bytes, speed and leakage of a finished training or evaluation.

    The formula ratio is the codec's as the literature prints it; the wire ratio divides all bytes
    of training frames, both ways and headers included, by dense float32 both ways; those with `up`
    and `down` are of one way alone.
    """
    terms, ledger, progress = party.terms, party.ledger, party.progress
    last = party.history[-1] if party.history else {}
    codec = compression.make(terms.codec)
    widths = [terms.parties[name].width for name in terms.feature_parties]
    dense_bytes = 4 * progress.train_rows * sum(widths)
    sent = {"up": 0, "down": 0}
    for row in ledger.rows():
        if row.phase == "train":
            sent[row.direction] += row.wire_bytes
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
        "wire_ratio": sum(sent.values()) / (2 * dense_bytes) if dense_bytes else None,
        "wire_ratio_up": sent["up"] / dense_bytes if dense_bytes else None,
        "wire_ratio_down": sent["down"] / dense_bytes if dense_bytes else None,
        "secure": terms.secure,
        "trust": what_is_told(terms),
        "revealed": [asdict(one) for one in revealed(terms, progress)],
        "weights_sha256": weights_sha256,
        "run": run,
    }
