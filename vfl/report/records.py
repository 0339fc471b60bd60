"""What a report needs to know of a run, typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vfl.ledger import Traffic


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one epoch left behind; None where it was not measured. Bytes add up over epochs."""

    epoch: float
    train_loss: float | None = None
    validation_loss: float | None = None
    test_loss: float | None = None
    train_accuracy: float | None = None
    validation_accuracy: float | None = None
    test_accuracy: float | None = None
    train_rmse: float | None = None
    validation_rmse: float | None = None
    test_rmse: float | None = None
    validation_auc: float | None = None
    test_auc: float | None = None
    validation_hit_rate: float | None = None
    test_hit_rate: float | None = None
    validation_f1: float | None = None
    test_f1: float | None = None
    validation_log_loss: float | None = None
    test_log_loss: float | None = None
    validation_mae: float | None = None
    test_mae: float | None = None
    validation_r2: float | None = None
    test_r2: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None

    @property
    def total_bytes(self) -> float | None:
        """Both directions since the start."""
        if self.bytes_up is None or self.bytes_down is None:
            return None
        return self.bytes_up + self.bytes_down


def last_of(epochs: Sequence[Epoch], measure: str) -> float | None:
    """The last value of a measure; None where no epoch has one."""
    values = [getattr(epoch, measure) for epoch in epochs]
    return next((value for value in reversed(values) if value is not None), None)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of the whole run; None where they were not measured."""

    test_accuracy: float | None = None
    test_rmse: float | None = None
    test_r2: float | None = None
    steps_per_second: float | None = None
    formula_ratio: float | None = None
    wire_ratio: float | None = None
    seconds: float | None = None
    weights_sha256: str | None = None
    codec: str | None = None
    defense: str | None = None
    secure: str | None = None
    trust: str | None = None
    revealed: Sequence[Sequence[str]] = ()
    bytes_up: Mapping[str, float] = field(default_factory=dict)
    bytes_down: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder."""

    name: str
    created: str
    version: str
    mode: str
    command: str
    config_text: str
    label_party: str | None
    parties: tuple[str, ...]
    epochs: tuple[Epoch, ...]
    traffic: tuple[Traffic, ...]
    environment: Mapping[str, str]
    summary: Summary
