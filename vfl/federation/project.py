"""A project on disk: one folder an owner, to be copied to the owner's machine.

PROJECT/README.md             one command line a party
PROJECT/label/party.toml      the label party's own file
PROJECT/label/app/            what Flower bundles: experiment.toml and a shim over vfl
PROJECT/label/certificates/   the SuperLink's certificate and key, and the authority's
PROJECT/label/keys/           the other parties' public keys
PROJECT/NAME/                 a feature party, or one that deals: party.toml, ca.pem, node.key,
                              identity.key
PROJECT/NAME/peers/           the others' public identity keys, for a secure mode
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from vfl.config import (
    DataSettings,
    Experiment,
    Locations,
    PartyFile,
    read_experiment,
    read_party_file,
    to_toml,
)
from vfl.config.experiment import OF_A_PROJECT
from vfl.config.party_file import tidy_store
from vfl.config.toml import MoreMistakes
from vfl.core.errors import RunFolderError, UserError
from vfl.core.storage import close_to_others, private_folder, sweep, write_text
from vfl.core.text import printable
from vfl.core.version import VERSION
from vfl.federation import bundle
from vfl.session import secure
from vfl.session.identity import Identity
from vfl.session.secure import third_party
from vfl.transport import expiry_warning, write_trial_certificates

#: In a party's own file, below the table of ranges.
_RANGES = (
    "# Every number of a session has a range; vfl check PARTY.toml lists them. Your own, such as:\n"
    "# train.learning_rate = [0.0, 0.1]\n"
    "# defense.clipped_noise.sigma = [1.0, 100.0]\n"
)


class LabelFolder:
    """The label party's folder of a project."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.app = self.path / "app"
        self.certificates = self.path / "certificates"
        self.keys = self.path / "keys"
        self.state = self.path / "flower"
        self.party_file = self.path / "party.toml"

    @classmethod
    def find(cls, path: Path) -> LabelFolder:
        """The label party's folder at or below `path`.

        Raises:
            RunFolderError: there is none.
        """
        for candidate in (path, path / "label"):
            if (candidate / "app" / "experiment.toml").exists():
                return cls(candidate)
        raise RunFolderError(
            "this is not a project's label folder",
            where=str(path),
            want="a folder with app/experiment.toml",
            fix="vfl init PROJECT writes one",
        )

    def tidy(self) -> None:
        """Remove what killed writes left, and close to others the folders that vfl made."""
        for folder in (self.app, self.certificates, self.keys, self.state):
            close_to_others(folder)
            sweep(folder)
        sweep(self.path, {self.party_file.name, "ca.pem"})
        if self.party_file.exists():
            tidy_store(read_party_file(self.party_file).store_path)

    def experiment(
        self, overrides: Sequence[str] = (), more: MoreMistakes | None = None
    ) -> Experiment:
        """The experiment everybody is told about, with some settings changed for one run."""
        return read_experiment(self.app / "experiment.toml", overrides, more)

    def locations(self, overrides: Sequence[str] = ()) -> Locations:
        """Where the experiment's settings stand in its file."""
        return Locations.of(self.app / "experiment.toml", overrides)

    def certificate_warnings(self) -> list[str]:
        """What is to be said about certificates of the SuperLink that end soon."""
        cures = {
            "server.pem": "renew it with: vfl renew PROJECT",
            "ca.pem": "make a new authority with: vfl renew PROJECT --authority",
        }
        found = [expiry_warning(self.certificates / name, cure) for name, cure in cures.items()]
        return [warning for warning in found if warning]


def write_project(
    folder: Path,
    experiment: Experiment,
    parties: Mapping[str, PartyFile],
    host: str,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> LabelFolder:
    """Write a whole project with certificates and keys for a trial.

    Args:
        folder: a new folder.
        experiment: the public part.
        parties: every party's own file, the label party's included.
        host: name or address the SuperLink is reached by.
        notes: lines about a party's table, for the head of its file.

    Raises:
        RunFolderError: the folder holds something already.
        UserError: a party has a name that cannot name its files.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError("this folder is not empty", where=str(folder), fix="name a new one")
    label = LabelFolder(folder / "label")
    nodes = node_parties(experiment)
    if "label" in nodes:
        raise UserError("no other party can have the name of the label party's folder, 'label'")
    hosts = sorted({host, "127.0.0.1", "localhost", experiment.federation.stream_host})
    write_trial_certificates(label.certificates, hosts, nodes)
    write_text(label.app / "experiment.toml", _experiment_text(experiment))
    write_text(label.app / bundle.SHIM, bundle.shim())
    write_text(label.app / bundle.SETTINGS, bundle.settings(experiment.name))
    private_folder(label.keys)
    for name, party in parties.items():
        own = label.path if name == experiment.label.party else folder / name
        told = (notes or {}).get(name, ())
        write_text(own / "party.toml", party_text(party, name in nodes, told))
        if name in nodes:
            shutil.copy(label.certificates / "ca.pem", own / "ca.pem")
            shutil.move(label.certificates / f"{name}.key", own / "node.key")
            shutil.move(label.certificates / f"{name}.pub", label.keys / f"{name}.pub")
    _write_identities(folder, nodes)
    _write_readme(folder, experiment)
    return label


def write_trial(folder: Path, experiment: Experiment, columns: Mapping[str, str]) -> Path:
    """Write an experiment in which one process plays every party of a project; its file.

    Args:
        folder: of a project whose parties' files name tables of this machine.
        experiment: the project's.
        columns: label column of each label party's table.
    """
    sources = {
        name: f"{'label' if name == experiment.label.party else name}/party.toml"
        for name in experiment.parties
    }
    content = experiment.model_dump(mode="json", exclude_none=True, exclude={"federation", "trace"})
    content["data"] = {"source": "label/party.toml"} | {
        name: content["data"][name] for name in ("validation", "test", "id_rules", "missing_rows")
    }
    content["label"]["column"] = columns[experiment.label.party]
    for task in content.get("tasks", ()):
        name = task["party"]
        task |= {"column": columns[name], "source": f"{name}/party.toml"}
    for name, source in sources.items():
        content["parties"][name]["source"] = source
    head = "# Every party of this project in one process, with the tables their own files name.\n\n"
    path = folder / "trial.toml"
    write_text(path, head + tomli_w.dumps(content))
    return path


def node_parties(experiment: Experiment) -> list[str]:
    """The parties that have a SuperNode: the feature parties, and one that has no data."""
    middle = None if experiment.middle is None else experiment.middle.party
    more = [third_party(experiment), middle, *(task.party for task in experiment.tasks or ())]
    return [*experiment.feature_parties, *(name for name in more if name is not None)]


def _write_identities(folder: Path, parties: Sequence[str]) -> None:
    """An identity key for each party that has a node, and everybody's public one at the others."""
    for name in parties:
        identity = Identity.fresh()
        identity.keep_at(folder / name / "identity.key")
        identity.public.keep_at(folder / name / "identity.pub")
        for other in parties:
            if other != name:
                identity.public.keep_at(folder / other / "peers" / f"{name}.pub")


def _experiment_text(experiment: Experiment) -> str:
    head = "# What every party of this experiment is told. No data, no paths: those are in each\n"
    of_one_process = set(DataSettings.model_fields) - OF_A_PROJECT
    text = to_toml(experiment, {"data": of_one_process, "trace": True})
    return f"{head}# party's own party.toml.\n\n{text}"


def party_text(party: PartyFile, has_node: bool, notes: Sequence[str] = ()) -> str:
    """A party's own file, with what was found of its table at its head."""
    head = (
        f"# What party '{party.party}' keeps to itself: its data, its key, what it consents to.\n"
    )
    leave_out = {} if has_node else {"consent": True, "node": True, "identity": True}
    found = "".join(f"# {printable(line)}".rstrip() + "\n" for line in notes)
    found = f"#\n{found}" if found else ""
    text = to_toml(party, leave_out).replace("[consent.ranges]\n", f"[consent.ranges]\n{_RANGES}")
    return f"{head}# Paths start at this file's folder.\n{found}\n{text}"


def _write_readme(folder: Path, experiment: Experiment) -> None:
    environment = Environment(
        loader=PackageLoader("vfl.federation"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    text = environment.get_template("project_readme.md").render(
        version=VERSION,
        experiment=experiment,
        features=experiment.feature_parties,
        dealer=third_party(experiment),
        apart=secure.make(experiment.secure).divides_rows,
        middle=experiment.middle,
        tasks=experiment.tasks or (),
    )
    write_text(folder / "README.md", text)
