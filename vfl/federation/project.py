"""A project on disk: one folder per party, which is copied to the party's own machine.

    PROJECT/README.md           one command line for each party
    PROJECT/label/party.toml    the label party's own file
    PROJECT/label/app/          bundle for Flower: experiment.toml and a program that calls vfl
    PROJECT/label/certificates/ certificates and keys of the SuperLink and of its authority
    PROJECT/label/keys/         the other parties' public keys
    PROJECT/label/identity.key  key that signs the log of its sessions
    PROJECT/NAME/               any other party: party.toml, ca.pem
    PROJECT/NAME/README.md      the party's instructions; only in a project for several hosts
    PROJECT/NAME/node.key       also identity.key; only if all parties are on one machine
    PROJECT/NAME/peers/         public identity keys of other parties for a secure mode; likewise
    PROJECT/trial.toml          all parties in one process; only if all tables were given

A project for several hosts contains no key of another party: each party makes its own keys with
`vfl join`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from vfl.config import (
    Consent,
    DataSettings,
    Experiment,
    Locations,
    OwnData,
    PartyFile,
    read_experiment,
    read_party_file,
    to_toml,
)
from vfl.config.party_file import tidy_store
from vfl.config.toml import MoreMistakes, check
from vfl.config.validate import OF_A_PROJECT, UNNAMED_ALIGNMENT
from vfl.core.address import Address, parse_host
from vfl.core.errors import RunFolderError, UserError
from vfl.core.storage import (
    close_to_others,
    private_folder,
    read_json,
    sweep,
    write_bytes,
    write_json,
    write_text,
)
from vfl.core.text import printable
from vfl.core.version import VERSION
from vfl.federation import bundle
from vfl.session import secure_mode
from vfl.session.secure_mode import third_party
from vfl.session.store.identity import Identity
from vfl.transport import expiry_warning, fingerprint, write_trial_certificates

#: Default port numbers: of the SuperLink, of its streams, of the first SuperNode's local API, and
#: of the services of further label parties.
_SUPERLINK_PORT, _STREAM_PORT, API_PORT, _FURTHER_SERVICES = 8000, 8001, 9094, 8081
#: Host of a project whose parties are all on this machine; vfl then makes the keys of all parties.
ONE_MACHINE = "127.0.0.1"
#: File name, in the folder of keys, of the fingerprints that the label party has compared and
#: accepted.
_ACCEPTED = "accepted.json"
#: Normalisation rules for ids that are used if every id in the described tables is a whole number.
RULES_OF_NUMBERS = "decimal+zeros"
#: Settings in place of a party's table, until the table's owner enters the real settings.
_TABLE = {"source": "data.csv", "id": "id"}
_CONSENT = Consent()
#: Session modes to which a party consents if it takes part in services (`vfl serve`).
SERVING_MODES = [*_CONSENT.modes, "serve"]
#: Prefix of comment lines in a party's own file that describe its table, and a comment about the
#: table of ranges in this file.
_NOTE = "#|"
_RANGES = (
    "# Every number of a session has a range; vfl check PARTY.toml lists them. Your own, such as:\n"
    "# train.learning_rate = [0.0, 0.1]\n"
    "# defense.clipped_noise.sigma = [1.0, 100.0]\n"
)


@dataclass(frozen=True)
class Table:
    """Description of a party's table, with the settings for the party's own file.

    Attributes:
        source: path or database address of the table, as the user gave it.
        data: settings of the section [data] that describe the table.
        features: names of the columns that the model uses as inputs.
        lines: lines of text that describe each column.
        notes: the lines among `lines` that are warnings.
        task: learning task that fits the label column; None without a label column.
        whole_ids: whether every id is a whole number.
        left_out: lines of text that name each unused column, with the reason why it is unused.
    """

    source: str
    data: dict[str, Any]
    features: list[str]
    lines: list[str]
    notes: list[str]
    task: str | None
    whole_ids: bool
    left_out: list[str]


class LabelFolder:
    """The label party's folder in a project."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.app = self.path / "app"
        self.certificates = self.path / "certificates"
        self.keys = self.path / "keys"
        self.state = self.path / "flower"
        self.streams = self.state / "streams"
        self.party_file = self.path / "party.toml"

    @classmethod
    def find(cls, path: Path) -> LabelFolder:
        """Find the label party's folder: `path` itself, or a folder in `path`.

        Raises:
            RunFolderError: neither `path` nor a folder in it is a label party's folder.
        """
        for candidate in (path, path / "label"):
            if (candidate / "app" / "experiment.toml").exists():
                return cls(candidate)
        raise RunFolderError(
            "this is not a project's label folder",
            where=str(path),
            want="a folder with app/experiment.toml",
            fix="vfl init PROJECT writes such a folder",
        )

    def tidy(self) -> None:
        """Remove temporary files that killed processes left; make vfl's folders private."""
        for folder in (self.app, self.certificates, self.keys, self.state):
            close_to_others(folder)
            sweep(folder)
        sweep(self.path, {self.party_file.name, "ca.pem"})
        if self.party_file.exists():
            tidy_store(self.party().store_path)

    def party(self) -> PartyFile:
        """Read the label party's own file."""
        return read_party_file(self.party_file)

    @property
    def runs_path(self) -> Path:
        """Folder of the project's runs, in the label party's store."""
        return self.party().store_path / "runs"

    def experiment(
        self, overrides: Sequence[str] = (), more: MoreMistakes | None = None
    ) -> Experiment:
        """Read the experiment of the project, with overridden settings for one run."""
        return read_experiment(self.app / "experiment.toml", overrides, more)

    def locations(self, overrides: Sequence[str] = ()) -> Locations:
        """Return the location (line number) of each setting in the experiment's file."""
        return Locations.of(self.app / "experiment.toml", overrides)

    def accept_key(self, name: str, content: bytes) -> None:
        """Record that a party's public keys may connect, after their fingerprint was compared."""
        write_bytes(self.keys / f"{name}.pub", content)
        write_json(self.keys / _ACCEPTED, self.accepted_keys() | {name: fingerprint(content)})

    def accepted_keys(self) -> dict[str, str]:
        """Return the fingerprint of the accepted keys of each party."""
        file = self.keys / _ACCEPTED
        return read_json(file) if file.exists() else {}

    def certificate_warnings(self) -> list[str]:
        """Return warnings about those certificates of the SuperLink that expire soon."""
        cures = {
            "server.pem": "vfl up renews it if ca.key exists; else vfl renew PROJECT --authority",
            "ca.pem": "make a new authority with: vfl renew PROJECT --authority",
        }
        found = [expiry_warning(self.certificates / name, cure) for name, cure in cures.items()]
        return [warning for warning in found if warning]


class Project:
    """Builds a project from its parties, and collects the contents of all parties' files.

    The SuperNodes' local ports are numbered in the order in which the parties are added. A party
    without a table gets placeholder settings, which the party's owner replaces, by hand or with
    `vfl join --table`.

    Args:
        name: name of the experiment.
        label_party: name of the leading label party.
        label: name of the label column; if it is empty, the project's file contains the name
            "label".
        host: host name or address under which the other parties reach the label party's machine.

    Raises:
        UserError: the host name or address is invalid.
    """

    def __init__(
        self, name: str, label_party: str = "label", label: str = "", host: str = ONE_MACHINE
    ) -> None:
        try:
            self.host = host = parse_host(host)
        except ValueError as problem:
            raise UserError(
                "the other parties cannot reach the label party at this host",
                got=host,
                fix=str(problem),
            ) from None
        self._superlink = str(Address(host, _SUPERLINK_PORT))
        self._labels = {label_party: label}
        #: Settings of the experiment's file.
        self._public: dict[str, Any] = {
            "name": name,
            "parties": {},
            "data": {},
            "label": {"party": label_party},
            "federation": {
                "superlink": self._superlink,
                "stream_host": host,
                "stream_port": _STREAM_PORT,
            },
        }
        #: Settings of the parties' own files, without the label party's file.
        self._own: dict[str, dict[str, Any]] = {}
        self._label_file: dict[str, Any] = {"data": _TABLE | {"label": label or "label"}}
        #: Settings of [consent] that are added to the files of all feature parties, and to the
        #: files of all parties.
        self._of_features: dict[str, Any] = {}
        self._of_all: dict[str, Any] = {}
        self._tables: dict[str, Table] = {}

    def add_feature_party(self, name: str) -> None:
        """Add a party that holds feature columns."""
        self._public["parties"][name] = {}
        self._own[name] = {"data": _TABLE}

    def share_first_layers(self, dealer: str) -> None:
        """Add a dealer (a party without data), and secret-share the first layers.

        See docs/secure_layer.md.
        """
        self._public |= {
            "merge": "sum",
            "secure": f"beaver:dealer={dealer}",
            "parties": {name: {"bottom": "mlp:hidden=none"} for name in self._public["parties"]},
            "train": {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.1},
        }
        self._own[dealer] = {"role": "dealer"}

    def divide_rows(self, dealer: str) -> None:
        """Let each party have separate rows with all columns and labels.

        See docs/secure_dpsgd.md.
        """
        ((label_party, label),) = self._labels.items()
        names = [label_party, *self._public["parties"]]
        self._public |= {
            "secure": f"pea:dealer={dealer}",
            "parties": {name: {"bottom": "identity"} for name in names},
            "train": {"optimizer": "sgd", "momentum": 0, "learning_rate": 1.0},
            "dp": {"epsilon": 1.0, "delta": 1e-5},
        }
        self._public["data"]["validation"] = 0
        self._public["label"]["top"] = "linear"
        for file in (*self._own.values(), self._label_file):
            file["data"] = _TABLE | {"columns": ["*"], "label": label or "label"}
        self._own[dealer] = {"role": "dealer"}

    def add_middle(self, name: str) -> None:
        """Add a middle party, which has no data and trains the middle model."""
        self._public["middle"] = {"party": name}
        self._public["label"]["top"] = "linear"
        self._own[name] = {"role": "middle"}
        self._of_features = {"middle": [name]}

    def add_label_parties(self, labels: Mapping[str, str]) -> None:
        """Add further label parties, each with its label column (or "", to be filled in later)."""
        self._labels |= labels
        self._public["tasks"] = [{"party": name} for name in labels]
        for name, column in labels.items():
            self._own[name] = {"data": _TABLE | {"label": column or "label"}}
        self._of_features = self._of_features or {"label_parties": list(labels)}

    def add_tables(self, tables: Mapping[str, Table]) -> None:
        """Add the tables of some parties; the project will then align the rows of all tables."""
        self._tables = dict(tables)
        self._public["data"]["alignment"] = UNNAMED_ALIGNMENT
        if all(table.whole_ids for table in tables.values()):
            self._public["data"]["id_rules"] = RULES_OF_NUMBERS
        for settings in (self._public["label"], *self._public.get("tasks", ())):
            if (table := tables.get(settings["party"])) is not None and table.task is not None:
                settings["task"] = table.task
        for name, table in tables.items():
            self._file(name)["data"] = table.data

    def give_columns_to_label_party(self) -> None:
        """Let the label party hold feature columns as well."""
        self._public["parties"][self._public["label"]["party"]] = {}

    def consent_to_serving(self) -> None:
        """Let every party consent to services.

        Each further label party gets its own port for a service.
        """
        self._of_all["modes"] = SERVING_MODES
        for position, task in enumerate(self._public.get("tasks", ())):
            self._own[task["party"]]["serve"] = {"port": _FURTHER_SERVICES + position}

    def keep_gaps(self) -> None:
        """Use also rows that some parties lack.

        An alignment will determine which parties lack which rows.
        """
        self._public["data"] |= {"alignment": UNNAMED_ALIGNMENT, "missing_rows": "token"}
        self._of_all["missing_rows"] = [*_CONSENT.missing_rows, "token"]

    def write(self, folder: Path) -> Path | None:
        """Write the project into a new folder; see `write_project`.

        Returns:
            Path of an experiment file that runs all parties in one process, if the tables of all
            parties were given; otherwise None.

        Raises:
            ConfigError: the settings of the project contradict each other.
            RunFolderError, UserError: see `write_project`.
        """
        # each party has different rows, so an alignment is needed
        if self.host != ONE_MACHINE and "dp" not in self._public:
            self._public["data"].setdefault("alignment", UNNAMED_ALIGNMENT)
        experiment = check(self._public, Experiment, where="the arguments")
        for position, file in enumerate(self._own.values()):
            file["node"] = {"superlink": self._superlink, "api_port": API_PORT + position}
        files = {}
        for name in (*self._own, experiment.label.party):
            file = self._file(name)
            has_columns = "role" not in file and "label" not in file["data"]
            consent = self._of_all | (self._of_features if has_columns else {})
            if name in self._own:
                leads = experiment.label.party
                consent = consent | {"members": [leads, *(one for one in self._own if one != name)]}
            content = {"party": name, **file} | ({"consent": consent} if consent else {})
            files[name] = check(content, PartyFile, where="the arguments")
        notes = {name: table.lines for name, table in self._tables.items()}
        write_project(folder, experiment, files, self.host, notes)
        everybody = {*experiment.parties, *self._labels}
        if self._labels[experiment.label.party] and everybody <= self._tables.keys():
            return write_trial(folder, experiment, self._labels)
        return None

    def _file(self, name: str) -> dict[str, Any]:
        return self._label_file if name == self._public["label"]["party"] else self._own[name]


def require_new(folder: Path) -> None:
    """Refuse to write a project into a folder that is not empty.

    Raises:
        RunFolderError: the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError(
            "this folder of a new project is not empty",
            where=str(folder),
            fix="name a new folder for the project",
        )


def write_project(
    folder: Path,
    experiment: Experiment,
    parties: Mapping[str, PartyFile],
    host: str,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> LabelFolder:
    """Write a project's folders and files, and a certificate for its SuperLink.

    Args:
        folder: path of a new folder.
        experiment: the experiment, whose settings all parties see.
        parties: the own file of each party, including the label party.
        host: host name or address of the SuperLink; with `ONE_MACHINE`, this function also makes
            the keys of all parties, otherwise each party makes its own keys.
        notes: for each party, lines about its table, which are written at the beginning of the
            party's file.

    Raises:
        RunFolderError: the folder is not empty.
        UserError: a party's name cannot be part of a file name, or is the name of vfl's own files.
    """
    require_new(folder)
    label = LabelFolder(folder / "label")
    nodes = node_parties(experiment)
    if "label" in nodes:
        raise UserError(
            "'label' is the name of the label party's folder, so no other party can have this name"
        )
    hosts = sorted({host, "127.0.0.1", "localhost", experiment.federation.stream_host})
    together = host == ONE_MACHINE
    days = experiment.federation.certificate_days
    write_trial_certificates(label.certificates, hosts, nodes, with_keys=together, days=days)
    write_text(label.app / "experiment.toml", experiment_text(experiment))
    write_text(label.app / bundle.SHIM, bundle.shim())
    write_text(label.app / bundle.SETTINGS, bundle.settings(experiment.name))
    private_folder(label.keys)
    for name, party in parties.items():
        own = label.path if name == experiment.label.party else folder / name
        told = (notes or {}).get(name, ())
        if name in nodes:
            write_party(label, experiment, party, own, told, readme=not together)
        else:
            write_text(own / "party.toml", party_text(party, False, told))
        if name in nodes and together:
            shutil.move(label.certificates / f"{name}.key", own / "node.key")
            made = label.certificates / f"{name}.pub"
            label.accept_key(name, made.read_bytes())
            made.unlink()
    signs = Identity.fresh()  # private key that signs the label party's session log
    signs.keep_at(label.path / "identity.key")
    signs.public.keep_at(label.path / "identity.pub")
    if together:
        write_identities(folder, nodes)
    write_text(folder / "README.md", _readme("project_readme.md", experiment, together=together))
    return label


def write_party(
    label: LabelFolder,
    experiment: Experiment,
    party: PartyFile,
    folder: Path,
    notes: Sequence[str] = (),
    *,
    readme: bool,
) -> None:
    """Write the folder of a party that has a SuperNode; this function makes no key.

    Args:
        label: the label party's folder.
        experiment: the experiment, whose settings all parties see.
        party: contents of the party's own file.
        folder: path of the party's folder.
        notes: lines about the party's table, which are written at the beginning of the party's
            file.
        readme: whether to write a README.md with instructions for the party's owner.

    Raises:
        RunFolderError: the folder is not empty.
    """
    require_new(folder)
    write_text(folder / "party.toml", party_text(party, True, notes))
    shutil.copy(label.certificates / "ca.pem", folder / "ca.pem")
    if readme:
        write_text(folder / "README.md", _readme("party_readme.md", experiment, party=party))


def write_trial(folder: Path, experiment: Experiment, columns: Mapping[str, str]) -> Path:
    """Write an experiment file that runs all parties of a project in one process; return its path.

    Args:
        folder: folder of a project; each party's own file must give the path of a table on this
            machine.
        experiment: the experiment of the project.
        columns: name of the label column of each label party, by party.
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
    """Return the parties that have a SuperNode: all parties except the leading label party."""
    middle = None if experiment.middle is None else experiment.middle.party
    more = [third_party(experiment), middle, *(task.party for task in experiment.tasks or ())]
    return [*experiment.feature_parties, *(name for name in more if name is not None)]


def write_identities(folder: Path, parties: Sequence[str]) -> None:
    """Write an identity key into each party's folder, and the public keys of the other parties."""
    identities = {name: Identity.fresh() for name in parties}
    for name, identity in identities.items():
        identity.keep_at(folder / name / "identity.key")
        for other in parties:
            if other != name:
                identity.public.keep_at(folder / other / "peers" / f"{name}.pub")


def experiment_text(experiment: Experiment) -> str:
    """Return the text of a project's experiment.toml."""
    head = (
        "# Settings that every party of this experiment receives. No data, no paths: those "
        "are in each\n"
    )
    of_one_process = DataSettings.model_fields.keys() - {*OF_A_PROJECT}
    text = to_toml(experiment, {"data": of_one_process, "trace": True})
    return f"{head}# party's own party.toml.\n\n{text}"


def party_text(party: PartyFile, has_node: bool, notes: Sequence[str] = ()) -> str:
    """Return the text of a party's own file; it begins with the notes about the party's table."""
    head = f"# Private settings of party '{party.party}': its data, its key, its consent.\n"
    leave_out: dict[str, Any] = {}
    if not has_node:
        leave_out = {"consent": True, "node": True, "identity": True}
    if party.data is not None:  # `vfl join` detects the settings that are missing here
        leave_out["data"] = OwnData.model_fields.keys() - party.data.model_fields_set
    text = to_toml(party, leave_out).replace("[consent.ranges]\n", f"[consent.ranges]\n{_RANGES}")
    return with_notes(f"{head}# Paths start at this file's folder.\n\n{text}", notes)


def with_notes(text: str, notes: Sequence[str]) -> str:
    """Put notes about a party's table at the beginning of the party's file; remove earlier notes.

    Args:
        text: text of the file.
        notes: notes, one per line; a prefix distinguishes these lines from the owner's comments.
    """
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(_NOTE)]
    head = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    found = [f"{_NOTE} {printable(line)}".rstrip() + "\n" for line in notes]
    return "".join([*lines[:head], *found, *lines[head:]])


def _readme(template: str, experiment: Experiment, **more: Any) -> str:
    """Return the text of a README.md, for a whole project, or for the folder of one party."""
    environment = Environment(
        loader=PackageLoader("vfl.federation"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    known: dict[str, Any] = {
        "version": VERSION,
        "experiment": experiment,
        "features": experiment.feature_parties,
        "dealer": third_party(experiment),
        "apart": secure_mode.make(experiment.secure).divides_rows,
        "middle": experiment.middle,
        "tasks": experiment.tasks or (),
        "nodes": node_parties(experiment),
    }
    return environment.get_template(template).render(known | more)
