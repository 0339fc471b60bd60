"""Configuration: TOML files checked as a whole; every mistake is reported with its line."""

from __future__ import annotations

from vfl.config.experiment import (
    DataSettings,
    Experiment,
    FederationSettings,
    LabelSettings,
    MiddleSettings,
    PartySettings,
    TableSettings,
    TraceSettings,
    TrainSettings,
    memory_bytes,
    read_experiment,
    with_overrides,
)
from vfl.config.grid import PACKS, WANTED, CompareSettings, GridSettings, ValueSettings
from vfl.config.party_file import (
    Consent,
    MonitorSettings,
    OwnData,
    PartyFile,
    ServeSettings,
    is_party_file,
    read_party_file,
)
from vfl.config.toml import Locations, to_toml
from vfl.config.validate import check_one_process

__all__ = [
    "PACKS",
    "WANTED",
    "CompareSettings",
    "Consent",
    "DataSettings",
    "Experiment",
    "FederationSettings",
    "GridSettings",
    "LabelSettings",
    "Locations",
    "MiddleSettings",
    "MonitorSettings",
    "OwnData",
    "PartyFile",
    "PartySettings",
    "ServeSettings",
    "TableSettings",
    "TraceSettings",
    "TrainSettings",
    "ValueSettings",
    "check_one_process",
    "is_party_file",
    "memory_bytes",
    "read_experiment",
    "read_party_file",
    "to_toml",
    "with_overrides",
]
