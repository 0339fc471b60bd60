"""Join a project as a party: add its table to the received folder, and make its keys there.

The label party makes the folder and sends it to the joining party. For the joining party's safety,
this module reports unusual settings in the folder's party.toml, and writes no key outside of the
folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vfl.config import DataSettings, Experiment, PartyFile, TableSettings, read_party_file
from vfl.config.edit import Edit, with_settings, without_keys
from vfl.config.toml import check
from vfl.config.validate import UNNAMED_ALIGNMENT
from vfl.core.errors import ConfigError, MissingDataError
from vfl.core.sources import database_beside, is_database, is_loader
from vfl.core.storage import write_bytes, write_text
from vfl.datasets.describe import TableReport, describe
from vfl.federation.project import RULES_OF_NUMBERS, LabelFolder, with_notes
from vfl.session.secure_mode import third_party
from vfl.session.store.identity import Identity
from vfl.transport import fingerprint, node_key_pair, public_half

#: Settings in the section [data] that name rows other than those of the table.
_OTHER_ROWS = ("predict", "predict_query")
#: Settings in the section [data] that do not depend on the table.
_OF_ANY_TABLE = ("predict", "predict_query", "memory", "shape", "bins", "label")


@dataclass(frozen=True)
class PublicKeys:
    """A party's public keys, one key per line of a file: the SuperNode's key and the identity key.

    Attributes:
        file: path of NAME.pub, which the party sends to the other parties.
        whose: origin of the keys: "new" if they were just made; "found" if a key was in the folder
            already. An earlier command of this party or the sender of the folder may have made such
            a key; no file in the folder can show which, because the sender may write any file.
        fingerprint: fingerprint of the keys; the sender and the receiver of the file compare the
            fingerprint by telephone.
    """

    file: Path
    whose: Literal["new", "found"]
    fingerprint: str


def folder_of(path: Path) -> Path:
    """Return a party's folder, which contains party.toml.

    The argument may be this folder, its party.toml, or a label party's project.

    Raises:
        ConfigError: the folder has no party.toml.
    """
    folder = path if path.is_dir() else path.parent
    for one in (folder, folder / "label"):
        if (one / "party.toml").is_file():
            return one
    raise ConfigError(
        "this is not a party's folder",
        where=str(path),
        want="the folder with party.toml that the label party sent",
        fix="vfl init PROJECT --host NAME writes one for each party",
    )


def require_no_way_out(folder: Path) -> None:
    """Refuse a received folder that contains a symbolic link to a path outside of the folder.

    Raises:
        ConfigError: the folder contains such a link; the error names the link, whose target is not
            opened.
    """
    whole = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(whole):
            raise ConfigError(
                "a link in the received folder leads outside of it",
                where=str(path),
                want="only files in the folder, so that none of your other files is read or "
                "written",
                fix="remove the link; the option --table accepts a table outside of the folder",
            )


def require_no_loader(party: PartyFile, table: str | None) -> None:
    """Refuse a received party.toml whose [data] names a Python function, which vfl would run.

    The sender of the folder chose the Python function, so the function could be harmful. The
    joining party may name a function itself with the option --table.

    Args:
        party: the received party.toml.
        table: table that the joining party names; it replaces `data.source` in the file; None keeps
            `data.source`.

    Raises:
        ConfigError: a setting in [data] names a Python function; the error names the setting.
    """
    data = party.data
    for name in ("predict",) if table else ("source", "predict"):
        if data is not None and is_loader(said := getattr(data, name)):
            raise ConfigError(
                "a received file names a function that would run on this machine",
                where=f"{party.path}: data.{name}",
                got=str(said),
                want="a table",
                fix="remove the line; vfl join FOLDER --table TABLE adds your own table",
            )


def checked_encoding(name: str | None) -> str | None:
    """Return the text encoding of the option --encoding, spelled as [data] encoding spells it.

    Raises:
        ConfigError: the encoding is unknown; the error lists the encodings that vfl can read.
    """
    if name is None:
        return None
    return check({"encoding": name}, TableSettings, where="--encoding").encoding


def merge_table(
    folder: Path,
    source: str | None,
    id_column: str | None,
    label: str | None,
    query: str | None,
    encoding: str | None = None,
) -> TableReport:
    """Write the path and the detected settings of a table into [data] of a party's file.

    Without `source`, this function examines the table that the party's file already names, and
    keeps the settings in the file. At the label party, it also changes the settings of the
    experiment that its table determines: the task, the alignment, the id rules and own columns.

    Args:
        folder: folder of the party.
        source: path of the table, relative to the working directory, or address of a database; with
            None, the table in the party's file.
        id_column: name of the table's id column; with None, vfl finds the column.
        label: name of the table's label column; None if the table has no label column, or the file
            names the column.
        query: SQL query, if the table is in a database.
        encoding: encoding of a CSV file; None keeps the encoding in the party's file, or detects
            it.

    Raises:
        ConfigError: the party has no data, or a setting is invalid.
        MissingDataError: the table that the file names does not exist.
        DataError: the table cannot be read.
    """
    party = read_party_file(folder / "party.toml")
    if party.data is None:
        raise ConfigError(
            f"party '{party.party}' has no data", got="--table", fix="leave --table out"
        )
    old = party.data
    said: dict[str, Any] = {name: getattr(old, name) for name in sorted(old.model_fields_set)}
    if source is None:
        place, source = party.source_path, old.source
        if isinstance(place, Path) and not place.exists():
            raise MissingDataError(
                "the table in this party's file does not exist",
                where=str(folder / "party.toml"),
                got=f'data.source = "{old.source}"',
                fix=f"vfl join {folder} --table TABLE",
            )
        id_column = id_column or (old.id if "id" in said else None)
        encoding = encoding or said.get("encoding")
    else:
        said = {name: said[name] for name in _OF_ANY_TABLE if name in said}
        place = database_beside(source, Path.cwd()) if is_database(source) else Path(source)
        source = place if isinstance(place, str) else _seen_from(folder, place)
    label = label or said.get("label")
    asked = query or said.get("query")
    known = checked_encoding(encoding)
    report = describe(
        place, None, id_column, label, query=asked, repeats=old.repeats, encoding=known
    )
    given = {"source": source} | ({"label": label} if label else {})
    data = report.settings() | said | given
    if (folder / "app").is_dir():
        experiment = _at_the_label_party(LabelFolder(folder), report)
        if party.party not in experiment.parties:
            data.pop("columns", None)
    checked = check({"party": party.party, "data": data}, PartyFile, where="the table")
    changed = _edit_of_data(checked, said.keys() - given.keys()).of(party.path, PartyFile)
    write_text(party.path, with_notes(changed.text, report.lines()))
    return report


def _edit_of_data(wanted: PartyFile, kept: Set[str]) -> Edit:
    """Make an edit that writes [data] of `wanted` to a party's file, except settings in `kept`."""
    content: dict[str, Any] = wanted.model_dump(mode="json", exclude_unset=True, exclude_none=True)[
        "data"
    ]

    def changed(before: Mapping[str, Any]) -> dict[str, Any]:
        return content | {key: before[key] for key in kept & before.keys() & content.keys()}

    def text(file: str) -> str:
        before = tomllib.loads(file)["data"]
        gone = [("data", key) for key in before.keys() - content.keys()]
        return with_settings(without_keys(file, gone), ("data",), changed(before))

    return Edit(text, lambda file: file.update(data=changed(file["data"])))


def _seen_from(folder: Path, table: Path) -> str:
    """Return a table's path as written in a party's file: relative if it is inside the folder."""
    table = table.resolve()
    inside = table.is_relative_to(folder.resolve())
    return str(table.relative_to(folder.resolve()) if inside else table)


def _at_the_label_party(label: LabelFolder, report: TableReport) -> Experiment:
    """Return the label party's experiment after the changes that its table requires."""
    experiment = label.experiment()
    own, said = experiment.label.party, dict[tuple[str, ...], dict[str, Any]]()
    if report.task is not None and report.task != experiment.label.task:
        said["label",] = {"task": report.task}
    if report.features and third_party(experiment) is None and own not in experiment.parties:
        said["parties",] = {own: {}}
    if experiment.data.alignment is None:
        said["data",] = {"alignment": UNNAMED_ALIGNMENT}
    if report.whole_ids and experiment.data.id_rules == DataSettings().id_rules:
        said.setdefault(("data",), {})["id_rules"] = RULES_OF_NUMBERS

    def text(file: str) -> str:
        for table, settings in said.items():
            file = with_settings(file, table, settings)
        return file

    def meant(content: dict[str, Any]) -> None:
        for (table,), settings in said.items():
            content.setdefault(table, {}).update(settings)

    changed = Edit(text, meant).of(label.app / "experiment.toml", Experiment)
    if said:
        changed.write()
    after: Experiment = changed.checked
    return after


def make_keys(folder: Path) -> PublicKeys:
    """Make the keys that a party's folder lacks, and write the public keys to NAME.pub.

    Raises:
        ConfigError: the party's file names a path for a key outside of the folder.
    """
    party = read_party_file(folder / "party.toml")
    node, identity = party.beside(party.node.key), party.beside(party.identity.key)
    for name, path in (("node.key", node), ("identity.key", identity)):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                "the received file sets a path outside its folder for a key",
                where=f"{folder / 'party.toml'}: {name}",
                fix=f'set it to "{name}"',
            )
    found = node.exists() or identity.exists()
    if not node.exists():
        write_bytes(node, node_key_pair()[0])
    if not identity.exists():
        Identity.fresh().keep_at(identity)
    return write_public(party, "found" if found else "new")


def write_public(party: PartyFile, whose: Literal["new", "found"] = "new") -> PublicKeys:
    """Write the public keys of a party to NAME.pub in the party's folder.

    Raises:
        UserError: a key file contains no private key, or there is no key file.
    """
    file = party.beside(f"{party.party}.pub")
    keys = [party.beside(name) for name in (party.node.key, party.identity.key)]
    lines = [public_half(key) for key in keys if key.exists()]
    content = b"".join(line + b"\n" for line in lines)
    write_bytes(file, content)
    return PublicKeys(file, whose, fingerprint(content))


def unusual(party: PartyFile) -> list[str]:
    """Return the settings that differ from vfl's defaults; the file's owner checks them.

    Of the settings in [data], these are the ones that name other rows than those of the table.
    """
    said = party.model_dump(mode="json", exclude={"party", "role", "data"})
    node = {"superlink": party.node.superlink, "api_port": party.node.api_port}
    whose = {"party": party.party, "role": party.role, "data": party.data, "node": node}
    usual = PartyFile.model_validate(whose).model_dump(mode="json")
    found = []
    for name, value in said.items():
        plain = usual[name]
        if isinstance(value, dict) and isinstance(plain, dict):
            more = {f"{name}.{key}": one for key, one in value.items() if one != plain.get(key)}
            found += [f"{key} = {_shown(one)}" for key, one in more.items()]
        elif value != plain:
            found.append(f"{name} = {_shown(value)}")
    for name in _OTHER_ROWS:
        if party.data is not None and (value := getattr(party.data, name)) is not None:
            found.append(f"data.{name} = {_shown(value)}")
    return found


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
