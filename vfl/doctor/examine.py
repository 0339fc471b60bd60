"""Which checks make sense: of the machine alone, of a label party's project, or of a party."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vfl.config import PartyFile, read_party_file
from vfl.doctor import files, machine, network
from vfl.doctor.check import Check
from vfl.exchange.exposure import third_party
from vfl.project import LabelFolder


def examine(path: Path | None = None) -> Iterator[Check]:
    """Look at everything that can be looked at without changing anything.

    Args:
        path: a project or its label folder, a party's own file, or None for the machine alone.

    Raises:
        ConfigError, RunFolderError: the path cannot be read as one of these.
    """
    if path is None:
        yield from _machine(Path())
    elif path.is_dir():
        yield from _label_party(LabelFolder.find(path))
    elif (path.resolve().parent / "app" / "experiment.toml").exists():
        yield from _label_party(LabelFolder(path.resolve().parent))
    else:
        yield from _feature_party(read_party_file(path))


def _machine(folder: Path) -> Iterator[Check]:
    yield from machine.versions()
    yield machine.cores()
    yield machine.room(folder)


def _own_files(party: PartyFile) -> Iterator[Check]:
    if party.role == "data":
        yield files.data_file(party.source_path)
    yield files.store(party.store_path)
    yield files.private("secret", party.store_path / "secret", missing="")


def _feature_party(party: PartyFile) -> Iterator[Check]:
    ca = party.beside(party.node.ca)
    yield from _machine(party.store_path)
    yield from _own_files(party)
    trusted = files.certificate("ca", ca)
    yield trusted
    yield files.node_key(party.beside(party.node.key))
    yield files.private("identity key", party.beside(party.identity.key), missing="")
    if trusted.state != "FAIL":
        yield from network.superlink_from_afar(party.node.superlink, ca)


def _label_party(label: LabelFolder) -> Iterator[Check]:
    experiment, party = label.experiment(), read_party_file(label.party_file)
    federation = experiment.federation
    host, _ = network.split_address(federation.superlink)
    ca, server = label.certificates / "ca.pem", label.certificates / "server.pem"
    yield from _machine(party.store_path)
    yield from _own_files(party)
    yield files.certificate("ca", ca)
    yield files.certificate("certificate", server, [host])
    yield files.signed_by(server, ca)
    yield files.private(
        "server key", label.certificates / "server.key", "vfl init writes one with its certificate"
    )
    dealer = third_party(experiment)
    for name in [*experiment.feature_parties, *([] if dealer is None else [dealer])]:
        yield files.public_key(name, label.keys / f"{name}.pub")
    yield from network.superlink_here(federation.superlink, federation.bind_host, ca)
    yield network.stream_port(federation.stream_host, federation.bind_host, federation.stream_port)
