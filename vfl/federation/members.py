"""Adds, removes and renames parties of an existing project.

The label party changes the experiment, and every party changes its own file; all of them use the
same commands. No command changes a file of another party; `add` writes the folder of a new party.
The commands edit files as text, so that comments remain; see `vfl.config.edit`.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.config.edit import Changed, Edit, at_keys, below, without_keys
from vfl.config.experiment import PARTY_NAME
from vfl.config.toml import check, items_of, split_key
from vfl.core.address import parse_address
from vfl.core.errors import ConfigError, MissingDataError, UserError
from vfl.core.storage import rename_sealed, write_bytes
from vfl.datasets.alignment.positions import Alignment, versions
from vfl.federation import deployment
from vfl.federation.joining import make_keys, write_public
from vfl.federation.project import (
    API_PORT,
    ONE_MACHINE,
    SERVING_MODES,
    LabelFolder,
    Table,
    node_parties,
    write_party,
)
from vfl.session.store.identity import Identity
from vfl.session.store.party_folder import own_ledger
from vfl.transport import fingerprint, renew_node_key

#: Settings that a new feature party receives from the experiment's other feature parties, if all of
#: these have the same value.
_LIKE_OTHERS = ("width", "bottom")
#: Tables of experiment.toml in which each key is the name of a feature party.
_NAMED_IN = (("parties",), ("dp", "clips"))
#: Settings of a party's own file that are lists of party names.
_LISTS = (("consent", "members"), ("consent", "parties"))
_MOST_KEY_BYTES = 16_384
_OLD_RUNS = "earlier runs continue with their own parties; start a new training, without --from"


@dataclass(frozen=True)
class Change:
    """A completed change of a project's parties, and the next steps that people have to take.

    Attributes:
        done: sentences that describe the change.
        then: next steps in order; each is a pair: the party that takes the step, and a command line
            or a sentence.
        stays: sentences that describe the consequences for existing runs, alignments and files.
    """

    done: tuple[str, ...]
    then: tuple[tuple[str, str], ...] = ()
    stays: tuple[str, ...] = ()


# --- at the label party --------------------------------------------------------------------------


def add(label: LabelFolder, name: str, table: Table | None, *, serves: bool = False) -> Change:
    """Add a feature party to a project: extend the experiment, and write the party's folder.

    If all parties are on one machine, this function also makes the new party's keys; otherwise the
    new party makes its keys with `vfl join`.

    Args:
        label: the label party's folder.
        name: name of the new party.
        table: table of the new party, if the table is on this machine; otherwise None.
        serves: whether the new party's file consents to services (serving sessions); the party may
            change this setting later.

    Raises:
        ConfigError: the name is in use or invalid, the changed experiment is invalid, or a table is
            given although the parties are on several machines.
        RunFolderError: the party's folder is not empty.
    """
    experiment = label.experiment()
    _require_new_name(experiment, name)
    others, settings = node_parties(experiment), _like_the_others(experiment)
    folder, together = label.path.parent / name, _on_one_machine(experiment)
    if table is not None and not together:
        raise ConfigError(
            f"the table of party '{name}' stays on that party's own host",
            got="--table",
            want="a project whose parties are all on this machine",
            fix=f"leave --table out; party {name} runs vfl join {name} --table TABLE",
        )

    def entered(source: dict[str, str]) -> Edit:
        said = settings | source
        lines = [f"[parties.{name}]", *(f"{key} = {json.dumps(said[key])}" for key in said)]
        return Edit(
            lambda text: below(text, "parties", lines),
            lambda content: content["parties"].update({name: said}),
        )

    change = entered({}).of(label.app / "experiment.toml", Experiment)
    trial = _trial(label, entered({"source": f"{name}/party.toml"}))
    data = {"source": "data.csv", "id": "id"} if table is None else table.data
    node = {"superlink": experiment.federation.superlink, "api_port": API_PORT}
    if together:
        node["api_port"] = 1 + max((_api_port(label, one) for one in others), default=API_PORT - 1)
    consent = {"members": [experiment.label.party, *others]}
    if serves:
        consent["modes"] = SERVING_MODES
    content = {"party": name, "data": data, "node": node, "consent": consent}
    party = check(content, PartyFile, where="the arguments")
    lines = () if table is None else table.lines
    write_party(label, change.checked, party, folder, lines, readme=not together)
    for one in (change, *trial):
        one.write()
    _note(label.party_file, "added", name)
    if together:
        return _added_here(label, change.checked, name, folder, others)
    accept = f"vfl party accept {name}.pub"
    read_out = "--fingerprint TEXT, as that party reads it aloud"
    then = [
        (experiment.label.party, f"send {folder} to {name}"),
        (name, f"vfl join {name} --table TABLE   # then send {name}.pub to all others"),
        (experiment.label.party, f"{accept} {label.path} {read_out}"),
        *((one, f"{accept} {one} {read_out}, if it consents") for one in others),
        *((name, f"vfl party accept {one}.pub {name} {read_out}") for one in others),
        (name, f"vfl up {name}"),
    ]
    done = (
        f"{name} is in the experiment; it joins the project with the folder {folder}, which "
        "contains no key yet"
    )
    return Change((done,), (*then, *_afresh(label, change.checked)), (_OLD_RUNS,))


def _added_here(
    label: LabelFolder, experiment: Experiment, name: str, folder: Path, others: Sequence[str]
) -> Change:
    """Make the keys of a new party on this machine; return the change with the next steps."""
    keys = make_keys(folder)
    label.accept_key(name, keys.file.read_bytes())
    project = label.path.parent
    for one in others:
        with suppress(MissingDataError):  # the folder of this party was moved to another host
            own = Identity.kept_at(project / one / "identity.key")
            own.public.keep_at(folder / "peers" / f"{one}.pub")
    accept = f'vfl party accept {keys.file} {{}} --fingerprint "{keys.fingerprint}"'
    then = [(one, accept.format(project / one)) for one in others]
    then.append((name, f"vfl up {folder}"))
    done = f"{name} is in the experiment; its keys are in {folder}"
    return Change((done,), (*then, *_afresh(label, experiment)), (_OLD_RUNS,))


def remove(label: LabelFolder, name: str) -> Change:
    """Remove a feature party from a project: its settings, its key and its alignment positions.

    Raises:
        ConfigError: the named party is not a feature party, or is the only feature party.
    """
    experiment = label.experiment()
    _require_feature_party(experiment, name)
    if len(experiment.feature_parties) == 1:
        raise ConfigError(f"'{name}' is the only feature party", fix="vfl party add NAME first")
    changed = _change_experiment(label, _left(name))
    for key in label.keys.glob(f"{name}.pub"):
        key.unlink()
    dropped, kept = _drop_positions(label.party(), name)
    _note(label.party_file, "removed", name)
    done = [f"{name} is no longer part of the experiment, and vfl up withdraws its key"]
    if dropped or kept:
        done.append(
            f"the row positions of {name} were removed from {dropped + kept} versions of alignments"
        )
    then = [
        (name, "stop vfl up; the folder, the table, the weights and the log remain with this party")
    ]
    then += [
        (one, f"vfl party remove {name} {one}   # to refuse further sessions with it")
        for one in node_parties(changed)
    ]
    stays = [
        f"earlier runs with {name} can still be read. vfl predict and vfl serve can use such "
        f'a run without {name} only if it was trained with data.missing_rows = "token"; otherwise '
        "train again"
    ]
    return Change(tuple(done), (*then, *_afresh(label, changed)), tuple(stays))


def rename(label: LabelFolder, old: str, new: str) -> Change:
    """Rename a feature party in the experiment; the party's SuperNode then needs a new key.

    Flower binds a key to the name with which the key was registered, and never registers the same
    key again.

    Raises:
        ConfigError: the party is not a feature party, or the new name is in use.
    """
    experiment = label.experiment()
    _require_feature_party(experiment, old)
    _require_new_name(experiment, new)
    changed = _change_experiment(label, _renamed_in_experiment(old, new))
    (label.keys / f"{old}.pub").unlink(missing_ok=True)
    own_ledger(label.party()).witness.renamed(old, new)
    _note(label.party_file, "renamed", old, new)
    then = [
        (new, f"vfl party rename {old} {new} {old}   # with vfl up stopped; then send {new}.pub"),
        (
            experiment.label.party,
            f"vfl party accept {new}.pub {label.path} --fingerprint TEXT, as {new} reads it aloud",
        ),
        (new, f"vfl up {old}"),
    ]
    then += [
        (one, f"vfl party rename {old} {new} {one}") for one in node_parties(changed) if one != new
    ]
    return Change(
        (
            f"{old} has the new name {new} in the experiment; the old key of its SuperNode "
            f"belongs to the name {old}",
        ),
        (*then, *_afresh(label, changed)),
        (
            "the party's identity, ledger and log continue; its runs can be read: vfl status, "
            "report and log",
            f"earlier runs contain the name {old} and can no longer predict or serve: train again",
        ),
    )


# --- at any other party --------------------------------------------------------------------------


def accept(folder: Path, public: Path, read_out: str) -> Change:
    """Accept another party's keys if their fingerprint matches.

    A party other than the label party then also consents to sessions with the owner of the keys.

    Args:
        folder: folder of the party that accepts the keys: the label party, or any other party.
        public: the file NAME.pub with the public keys of the new party.
        read_out: fingerprint that the owner of the keys has read aloud by telephone.

    Raises:
        ConfigError: the keys have another fingerprint; or, at the label party, no party of the
            experiment has this name, or the key was withdrawn earlier; or, at another party, the
            file is not named after another party.
        MissingDataError: the file does not exist.
        UserError: the file contains no public key.
    """
    name, content = public.stem, _read_key(public)
    if not re.fullmatch(r"[0-9a-f]{32}", typed := _hex(read_out)):
        raise ConfigError(
            "this is not a whole fingerprint",
            got=f"{len(typed)} characters",
            want="all 32 digits 0-9 and a-f, as vfl join prints them at that party",
            fix="type the fingerprint again",
        )
    if not hmac.compare_digest(typed.encode(), _hex(fingerprint(content)).encode()):
        raise ConfigError(
            "these keys do not have the fingerprint that was read aloud",
            where=str(public),
            got="another fingerprint",
            want="the fingerprint that vfl join prints at that party",
            fix=f"ask {name} to send {name}.pub again, through a different channel",
        )
    if (folder / "app").is_dir():
        return _accept_connections(LabelFolder(folder), folder, public, content)
    return _accept_sessions(folder / "party.toml", public, content)


def _accept_connections(label: LabelFolder, folder: Path, public: Path, content: bytes) -> Change:
    """At the label party, let a party of the experiment connect with these keys."""
    name, known = public.stem, node_parties(label.experiment())
    if name not in known:
        raise ConfigError(
            "no party of the experiment has this name",
            got=public.name,
            want=", ".join(f"{one}.pub" for one in known),
            fix=f"vfl party add {name} {folder}",
        )
    if deployment.was_registered(label, content):
        raise ConfigError(
            "this key was withdrawn from a party, and the SuperLink never registers the same "
            "key again",
            where=str(public),
            fix=f"{name} runs vfl renew party.toml, and sends {name}.pub again",
        )
    label.accept_key(name, content)
    _note(label.party_file, "accepted", name)
    return Change((f"party {name} may connect; vfl up registers its key",))


def _accept_sessions(file: Path, public: Path, content: bytes) -> Change:
    """At another party, consent to sessions with the owner of these keys, and store the keys."""
    name, party = public.stem, read_party_file(file)
    if name == party.party or not re.fullmatch(PARTY_NAME, name):
        raise ConfigError(
            "this file is not named after another party", got=public.name, want="OTHER.pub"
        )
    members = party.consent.members
    if not any(fnmatchcase(name, one) for one in members):
        listed = _in_lists(lambda text: _appended(text, name), lambda one: [name, *one], _LISTS[:1])
        listed.of(file, PartyFile).write()
    write_bytes(party.beside(party.identity.peers) / f"{name}.pub", content)
    _note(file, "accepted", name)
    return Change(
        (f"{party.party} consents to sessions with {name}; the key of this party is stored",)
    )


def withdraw(folder: Path, name: str) -> Change:
    """Withdraw this party's consent to sessions with a party; delete that party's key.

    Raises:
        ConfigError: after the change, this party's own file still consents to sessions with that
            party, or the named party is this party itself.
    """
    file = folder / "party.toml"
    party = read_party_file(file)
    if name == party.party:
        raise ConfigError(
            "only the label party can remove this party from the project",
            fix=f"at the label party, run: vfl party remove {name}",
        )

    def without(names: list[str]) -> list[str]:
        return [one for one in names if one != name]

    _in_lists(lambda text: _taken_out(text, name), without, _LISTS).of(file, PartyFile).write()
    if any(fnmatchcase(name, one) for one in read_party_file(file).consent.members):
        raise ConfigError(
            f"party '{party.party}' still consents to sessions with '{name}'",
            where=f"{file}: consent.members",
            got=", ".join(party.consent.members),
            fix="in this setting, list only the parties that may take part in sessions",
        )
    (party.beside(party.identity.peers) / f"{name}.pub").unlink(missing_ok=True)
    _note(file, "removed", name)
    return Change(
        (
            f"{party.party} refuses sessions with {name}, also sessions with runs that both "
            "parties trained",
        )
    )


def follow(folder: Path, old: str, new: str) -> Change:
    """Apply the renaming of a party to this party's files; this party may be the renamed one.

    The ledgers of the renamed party continue under its new name. Its row positions of alignments
    are deleted, because an alignment contains the names of its parties.

    Raises:
        ConfigError: the new name is in use, or is not a valid party name.
        UserError: this party is renamed while its SuperNode is running.
    """
    file = folder / "party.toml"
    party = read_party_file(file)
    if not re.fullmatch(PARTY_NAME, new) or new in (party.party, *party.consent.members):
        raise ConfigError(
            "this name is in use, or is not a valid party name",
            got=new,
            want="a small letter, then at most 31 small letters, digits, '_' or '-'",
        )
    if party.party == old:
        return _follow_itself(folder, party, new)
    listed = _in_lists(
        lambda text: _exchanged(text, old, new), lambda names: _swapped(names, old, new), _LISTS
    )
    listed.of(file, PartyFile).write()
    peers = party.beside(party.identity.peers)
    if (peers / f"{old}.pub").exists():
        (peers / f"{old}.pub").replace(peers / f"{new}.pub")
    own_ledger(party).witness.renamed(old, new)
    _note(file, "renamed", old, new)
    return Change((f"{party.party} now uses the name {new} for {old}",))


def _follow_itself(folder: Path, party: PartyFile, new: str) -> Change:
    """Rename the party that owns a folder: its file, ledgers and keys; see `follow`."""
    file, old = folder / "party.toml", party.party
    if deployment.supernode_runs(party):
        raise UserError(
            "this party's service is running", where=str(folder), fix="stop vfl up first"
        )
    change = Edit(
        lambda text: at_keys(text, ("party",), lambda value: _exchanged(value, old, new)),
        lambda content: content.update(party=new),
    ).of(file, PartyFile)
    _note(file, "renamed", old, new)
    for sealed in (*party.store_path.glob("sessions/**/*"), *party.store_path.glob("alignments/*")):
        if sealed.is_file():
            rename_sealed(sealed, old, new)
    for positions in party.store_path.glob("alignments/*/*/*.positions"):
        positions.unlink()
    # the name changes last: if the process is killed earlier, the command can be repeated
    change.write()
    (folder / f"{old}.pub").unlink(missing_ok=True)
    renamed = read_party_file(file)
    renew_node_key(renamed.beside(renamed.node.key))
    keys = write_public(renamed)
    done = (
        f"{old} has the new name {new} in its own file and ledger; its folder is still {folder}",
        f"its SuperNode has a new key; the fingerprint of {keys.file} is: {keys.fingerprint}",
    )
    accept = f"vfl party accept {new}.pub PROJECT --fingerprint TEXT, as you read it aloud"
    then = [("label party", accept), (new, f"vfl up {folder}")]
    return Change(done, tuple(then))


# --- edits of files that several commands use ----------------------------------------------------


def _in_lists(
    text: Callable[[str], str],
    meant: Callable[[list[str]], list[str]],
    lists: Sequence[tuple[str, str]],
) -> Edit:
    """Make an edit that changes lists of party names in a party's own file."""

    def edit(content: str) -> str:
        for key in lists:
            content = at_keys(content, key, text)
        return content

    def change(content: dict[str, Any]) -> None:
        for table, key in lists:
            if key in content.get(table, {}):
                content[table][key] = meant(content[table][key])

    return Edit(edit, change)


def _appended(line: str, name: str) -> str:
    head, bracket, rest = line.partition("[")
    gap = "" if rest.lstrip().startswith("]") else "," if rest.startswith("\n") else ", "
    return f'{head}{bracket}"{name}"{gap}{rest}'


def _taken_out(line: str, name: str) -> str:
    shorter = re.sub(rf"""(["']){re.escape(name)}\1[ \t]*(,[ \t]*)?""", "", line)
    return re.sub(r",[ \t]*\]", "]", shorter)


def _exchanged(line: str, old: str, new: str) -> str:
    return re.sub(rf"""(["']){re.escape(old)}\1""", rf"\g<1>{new}\g<1>", line)


def _swapped(names: Sequence[str], old: str, new: str) -> list[str]:
    return [new if one == old else one for one in names]


def _left(name: str) -> Edit:
    keys = [(*table, name) for table in _NAMED_IN]

    def meant(content: dict[str, Any]) -> None:
        del content["parties"][name]
        content.get("dp", {}).get("clips", {}).pop(name, None)

    return Edit(lambda text: without_keys(text, keys), meant)


def _renamed_in_experiment(old: str, new: str) -> Edit:
    word = re.compile(rf"(?<![\w-]){re.escape(old)}(?![\w-])")

    def edit(text: str) -> str:
        lines = text.splitlines(keepends=True)
        for item in items_of(lines):
            if any(item.key[: len(table) + 1] == (*table, old) for table in _NAMED_IN):
                head, equals, value = lines[item.start].partition("=" if not item.header else "]")
                named = item.header or old in split_key(head)
                lines[item.start] = (word.sub(new, head, 1) if named else head) + equals + value
        return "".join(lines)

    def meant(content: dict[str, Any]) -> None:
        for table in (content["parties"], content.get("dp", {}).get("clips", {})):
            # the order of the parties must not change: their cuts are concatenated in this order
            for key in [*table]:
                table[new if key == old else key] = table.pop(key)

    return Edit(edit, meant)


def _change_experiment(label: LabelFolder, edit: Edit) -> Experiment:
    """Apply an edit to a project's experiment, and to trial.toml; return the new experiment."""
    changes = [edit.of(label.app / "experiment.toml", Experiment), *_trial(label, edit)]
    for one in changes:
        one.write()
    changed: Experiment = changes[0].checked
    return changed


def _trial(label: LabelFolder, edit: Edit) -> list[Changed]:
    """Return the same edit for the file trial.toml, if the project has this file."""
    path = label.path.parent / "trial.toml"
    return [edit.of(path, Experiment)] if path.exists() else []


def _on_one_machine(experiment: Experiment) -> bool:
    return parse_address(experiment.federation.superlink).host == ONE_MACHINE


def _require_new_name(experiment: Experiment, name: str) -> None:
    taken = {experiment.label.party, *experiment.parties, *node_parties(experiment), "label"}
    if name in taken or not re.fullmatch(PARTY_NAME, name):
        raise ConfigError(
            "a new party needs a name that is not in use",
            got=name,
            want="a small letter, then at most 31 small letters, digits, '_' or '-'; and not "
            + ", ".join(sorted(taken)),
        )


def _require_feature_party(experiment: Experiment, name: str) -> None:
    if name not in experiment.feature_parties:
        raise ConfigError(
            "the project has no feature party of this name",
            got=name,
            want=", ".join(experiment.feature_parties),
            fix="use vfl init to change a label party, a dealer or a middle party",
        )


def _like_the_others(experiment: Experiment) -> dict[str, Any]:
    """Return the settings for a new party: those that are equal at all other feature parties."""
    others = [experiment.parties[name].model_dump() for name in experiment.feature_parties]
    return {
        key: others[0][key] for key in _LIKE_OTHERS if all(one[key] == others[0][key]
        for one in others)
    }  # fmt: skip


def _api_port(label: LabelFolder, name: str) -> int:
    """Return the port of a SuperNode's local API.

    Without a party.toml, the result is one less than the default port.
    """
    file = label.path.parent / name / "party.toml"
    return read_party_file(file).node.api_port if file.exists() else API_PORT - 1


def _drop_positions(party: PartyFile, name: str) -> tuple[int, int]:
    """Delete a party's row positions from alignments.

    Return how many versions of alignments were deleted, and how many were kept. A version
    that permits missing rows is kept, but then lists no row of this party.
    """
    dropped = kept = 0
    for folder in party.store_path.glob("alignments/*/*"):
        for version in versions(folder):
            found = Alignment.read(folder, party.party, version)
            if name not in found.agreed.parties:
                continue
            if name in found.held:
                found.lacking(name).keep(folder)
                kept += 1
            else:
                (folder / f"{version:04d}.positions").unlink()
                dropped += 1
    return dropped, kept


def _note(file: Path, event: Any, *parties: str) -> None:
    """Append a line to the signed session log of the party that owns this file."""
    own_ledger(read_party_file(file)).note(event, parties=parties)


def _afresh(label: LabelFolder, experiment: Experiment) -> list[tuple[str, str]]:
    """Return the steps that the label party takes when all parties are connected again."""
    aligns = [f"vfl align {label.path}"] if experiment.data.alignment else []
    return [(experiment.label.party, one) for one in (*aligns, f"vfl train {label.path}")]


def _read_key(public: Path) -> bytes:
    try:
        content = public.read_bytes()
    except OSError:
        raise MissingDataError(
            "the file with this key does not exist", where=str(public), want="NAME.pub"
        ) from None
    if len(content) > _MOST_KEY_BYTES:
        raise UserError("this is no public key", where=str(public), got="a file that is too large")
    return content


def _hex(text: str) -> str:
    return "".join(text.split()).lower()
