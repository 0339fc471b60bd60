"""Run folders written by hand, as training would leave them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sealed import record_of

from vfl.core.storage import FORMAT, Seal, sealed_text

HEAD = {
    "format": FORMAT,
    "name": "digits, left and right",
    "created": "2026-11-21T04:19:07+00:00",
    "vfl": "0.2.0",
    "mode": "federated",
    "command": "vfl train digits.toml --set codec=randtopk:k=4,alpha=0.1,values=8",
}
CONFIG = """name = "digits"
seed = 0
codec = "randtopk:k=4,alpha=0.1,values=8"
defense = "layer_norm"

[data]
source = "digits"

[label]
party = "clinic"

[parties.left]
width = 128

[parties.right]
width = 128
"""
SUMMARY = {
    "test_accuracy": 0.9722,
    "bytes_up": {"left": 310_000, "right": 310_000},
    "bytes_down": {"left": 205_000, "right": 205_000},
    "steps_per_second": 212.4,
    "weights_sha256": "5f" * 32,
    "codec": "randtopk:k=4,alpha=0.1,values=8",
    "defense": "layer_norm",
    "formula_ratio": 0.0376,
    "wire_ratio": 0.04,
    "seconds": 8.128,
}
ENVIRONMENT = {"python": "3.11.7", "torch": "2.12.1", "flwr": "1.41.0", "threads": 1}
TRAFFIC_HEADER = "party,direction,phase,frames,payload_bytes,wire_bytes,seconds"


def epochs(count: int) -> list[dict[str, Any]]:
    """Falling losses and a rising accuracy; the test accuracy with the last epoch only."""
    rows = [
        {
            "epoch": n,
            "steps": 20,
            "train_loss": 2.3 / n,
            "validation_loss": 2.4 / n**0.8,
            "validation_accuracy": 0.98 - 0.7 / n,
            "seconds": 0.4,
            "bytes_up": 31_000 * n,
            "bytes_down": 20_500 * n,
        }
        for n in range(1, count + 1)
    ]
    if rows:
        rows[-1]["test_accuracy"] = 0.9722
    return rows


def regression_epochs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "epoch": n,
            "train_loss": 9.0 / n,
            "validation_loss": 10.0 / n,
            "validation_rmse": (10.0 / n) ** 0.5,
            "validation_r2": 1 - 1 / (n + 1),
            "bytes_up": 1000 * n,
            "bytes_down": 1000 * n,
        }
        for n in range(1, count + 1)
    ]


def traffic_of(parties: Sequence[str]) -> list[str]:
    return [
        f'"{party}",{direction},{phase},{frames},{frames * 600},{frames * 616},0.25'
        for party in parties
        for phase, frames in (("train", 400), ("evaluate", 40))
        for direction in ("up", "down")
    ]


def write_run(
    folder: Path,
    *,
    head: Mapping[str, Any] = HEAD,
    config: str = CONFIG,
    metrics: Sequence[Mapping[str, Any]] = (),
    traffic: Sequence[str] = (),
    summary: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] = ENVIRONMENT,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    about = {**head, "config_sha256": hashlib.sha256(config.encode()).hexdigest()}
    (folder / "run.json").write_text(sealed_text(about, Seal("run", "clinic", folder.name)))
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics))
    (folder / "traffic.csv").write_text("".join(f"{row}\n" for row in [TRAFFIC_HEADER, *traffic]))
    (folder / "environment.json").write_text(json.dumps(environment))
    if summary is not None:
        figures = {**summary, "run_sha256": record_of(folder / "run.json")["sha256"]}
        seal = Seal("summary", "clinic", str(folder))
        (folder / "summary.json").write_text(sealed_text(figures, seal))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a run; a finished federated run of 20 epochs unless told otherwise."""

    def write(**parts: Any) -> Path:
        whole = {"metrics": epochs(20), "traffic": traffic_of(["left", "right"])}
        return write_run(tmp_path / "run", **{**whole, "summary": SUMMARY, **parts})

    return write


@pytest.fixture
def make_head() -> Callable[..., dict[str, Any]]:
    """`run.json` with some fields changed."""
    return lambda **changes: {**HEAD, **changes}


@pytest.fixture
def make_epochs() -> Callable[[int], list[dict[str, Any]]]:
    return epochs


@pytest.fixture
def make_regression() -> Callable[[int], list[dict[str, Any]]]:
    return regression_epochs


@pytest.fixture
def make_traffic() -> Callable[[Sequence[str]], list[str]]:
    return traffic_of
