"""``vfl demo``, ``init``, ``join``, ``check``, ``doctor``: first commands for a new project."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vfl.cli.federation import run_among_parties
from vfl.cli.output import (
    Json,
    Set,
    argument,
    emit,
    option,
    print_line,
    quick_imports,
    say,
    say_epoch,
    show_training,
)
from vfl.core.text import printable
from vfl.core.traffic import size

_WHOSE = {
    "new": "your new keys",
    "found": "keys that this folder already contained. vfl cannot check who made them: if it was "
    "not you, the folder's sender has them too, so make your own: vfl renew {file}, then "
    "vfl renew {file} --identity",
}
_MOST_NOTES = 4  # largest number of notes about a table that a command prints

if TYPE_CHECKING:
    from vfl.config import Experiment
    from vfl.datasets.describe import TableReport
    from vfl.federation.project import Table


def demo(
    folder: Annotated[
        Path | None, argument("Folder for the demo; by default a new folder under runs/.", "FOLDER")
    ] = None,
    in_process: Annotated[
        bool, option("All parties in this process, without Flower.", "--in-process")
    ] = False,
    settings: Set = None,
    json: Json = False,
) -> None:
    """Train on images of digits: left and right halves at two parties, labels at a third.

    Without --in-process, the command starts a SuperLink and two SuperNodes on this machine (TLS,
    registered keys), trains on them, and then ends these services. All files stay in FOLDER, by
    default a new folder under runs/.
    """
    if not in_process:
        run_among_parties()
    with quick_imports():
        from vfl.config.run_folder import new_run_name
        from vfl.core.seeds import use_one_thread
        from vfl.training import demo as trial

    use_one_thread()
    folder = folder or Path("runs") / new_run_name("demo")
    label = trial.write_demo(folder, settings or [])
    say(f"the project of the demo is {folder}")
    if in_process:
        run = trial.run_in_process(folder, label, say_epoch)
    else:
        run = trial.run_federated(folder, label, say, say_epoch)
    show_training(run, json)


def init(
    folder: Annotated[
        Path | None,
        argument(
            "A new folder for a project; without it, a party file next to the only table.", "FOLDER"
        ),
    ] = None,
    party: Annotated[
        list[str] | None, option("A feature party; repeat the option for each party.")
    ] = None,
    tables: Annotated[
        list[str] | None,
        option(
            "A table (CSV, Parquet, database) to describe; once per party.",
            "[PARTY=]TABLE",
            "--from",
        ),
    ] = None,
    label: Annotated[
        str, option("Label column of the label party's table, or of the only one.")
    ] = "",
    ids: Annotated[
        list[str] | None,
        option("The id column, if vfl does not find it.", "[PARTY=]COLUMN", "--id"),
    ] = None,
    queries: Annotated[
        list[str] | None, option("Query to a database.", "[PARTY=]SQL", "--query")
    ] = None,
    repeats: Annotated[
        list[str] | None,
        option(
            "Row to keep for each repeated id: first, latest:COLUMN or mean.",
            "[PARTY=]HOW",
            "--repeats",
        ),
    ] = None,
    encodings: Annotated[
        list[str] | None,
        option(
            "Encoding of a CSV if vfl does not find it, such as cp1251 or shift_jis.",
            "[PARTY=]NAME",
            "--encoding",
        ),
    ] = None,
    label_party: Annotated[str, option("The party with the labels.")] = "label",
    dealer: Annotated[str, option("A dealer without data, whose name turns on --secure.")] = "",
    secure: Annotated[
        str,
        option(
            "With a dealer: beaver (first layers are secret-shared), or pea (every party has "
            "separate rows with all columns and labels, and DP-SGD runs on shares).",
        ),
    ] = "beaver",
    tasks: Annotated[
        list[str] | None,
        option(
            "An additional label party with its own task, and the label column of its table.",
            "PARTY[=COLUMN]",
            "--task",
        ),
    ] = None,
    middle: Annotated[
        str,
        option("A party without data that computes between bottoms and head, and sees no label."),
    ] = "",
    host: Annotated[
        str, option("Name or address at which the other parties reach the label party.")
    ] = "127.0.0.1",
    serve: Annotated[bool, option("Let party files also consent to serving.", "--serve")] = False,
    gaps: Annotated[
        bool,
        option("Keep rows that some party lacks; party files also consent to this.", "--gaps"),
    ] = False,
) -> None:
    """Write a project: experiment, Flower app, certificates, and a file for each party.

    FOLDER must be a new folder. FOLDER/README.md has the commands of each party. Without --host,
    all parties are on this machine and the command makes their keys; with --host, each party makes
    its own keys with `vfl join`. The command describes the tables that --from gives: party files
    contain their format, their columns and warnings. If every party has a table, trial.toml trains
    with all of them in one process. With only --from TABLE, the command writes a party.toml in the
    folder of that table.
    """
    from vfl.core.errors import ConfigError
    from vfl.federation.project import Project

    parties = party or []
    _check_parties(parties)
    if secure not in ("beaver", "pea") or (secure == "pea" and not (dealer and not tables)):
        raise ConfigError(
            "this mode needs a dealer, and party files that you complete by hand",
            where="--secure",
            got=secure,
            want="beaver, or pea with --dealer and without --from",
        )
    further = dict(map(_task_of, tasks or ()))
    labels = {label_party: label} | further
    given = GivenTables(tables or [], ids or [], queries or [], repeats or [], encodings or [])
    found = described(given, labels, label_party, project=folder is not None)
    if folder is None:
        _write_party_file(found, label, party or dealer or middle or tasks)
        return
    parties += [name for name in found if name not in (*labels, *parties)]
    if not parties:
        raise ConfigError(
            "a project needs a feature party", fix="--party NAME, or --from NAME=TABLE for another"
        )
    project = Project(folder.resolve().name, label_party, label, host)
    for name in parties:
        project.add_feature_party(name)
    if dealer and secure == "pea":
        project.divide_rows(dealer)
    elif dealer:
        project.share_first_layers(dealer)
    elif label_party in found and found[label_party].features:
        project.give_columns_to_label_party()
    if middle:
        project.add_middle(middle)
    if tasks:
        further.pop(label_party, None)
        project.add_label_parties(further)
    if found:
        project.add_tables(found)
    if serve:
        project.consent_to_serving()
    if gaps:
        project.keep_gaps()
    trial = project.write(folder)
    for name, one in found.items():
        _say_notes(name, one.source, one.features, one.left_out, one.notes)
    if trial:
        say(f"vfl train {trial} trains in one process")
    say(f"wrote {folder}; {folder / 'README.md'} has each party's command")


def join(
    folder: Annotated[Path, argument("The folder that the label party sent.", "FOLDER")],
    table: Annotated[str | None, option("Your table; by default the one in party.toml.")] = None,
    ids: Annotated[
        str | None, option("The table's id column, if vfl does not find it.", "COLUMN", "--id")
    ] = None,
    label: Annotated[str | None, option("For a label party: its label column.", "COLUMN")] = None,
    query: Annotated[str | None, option("Query to a database.")] = None,
    encoding: Annotated[
        str | None, option("Encoding of a CSV if vfl does not find it, such as cp1251.", "NAME")
    ] = None,
    json: Json = False,
) -> None:
    """Join a project: put your table into party.toml, make your keys, and check both.

    The command describes the table, and sets the table's format and input columns in `[data]`; the
    rest of party.toml is unchanged. The command makes the party's keys if they are missing. Then
    send NAME.pub, the public keys, to the label party, and read their fingerprint aloud to the
    label party. The label party gives PROJECT as FOLDER; it gets no keys, and the command adapts
    the experiment to the table (task, own columns, alignment and id rules).
    """
    from vfl.config import read_party_file
    from vfl.experiments import plan
    from vfl.federation import joining
    from vfl.federation.project import LabelFolder

    folder = joining.folder_of(folder)
    file, leads = folder / "party.toml", (folder / "app").is_dir()
    if not leads:
        joining.require_no_way_out(folder)
    party = read_party_file(file)
    if not leads:
        joining.require_no_loader(party, table)
    facts: dict[str, Any] = {"party": party.party, "file": str(file)}
    if party.role == "data" or table is not None:
        report = joining.merge_table(folder, table, ids, label, query, encoding)
        party = read_party_file(file)
        notes = _notes(report.lines())
        _say_notes(party.party, party.table.source, report.features, report.left_out, notes)
        facts |= {"ids": party.table.id, "features": report.features, "look_at": notes}
    if leads:
        facts |= {"rows": plan.of_project(LabelFolder(folder))["train_rows"]}
        facts["then"] = f"vfl status {folder}"
    else:
        keys = joining.make_keys(folder)
        facts |= {"says": joining.unusual(party), "send": str(keys.file)}
        facts |= {"fingerprint": keys.fingerprint, "keys": keys.whose}
        facts |= {"rows": plan.of_party_file(file).get("rows"), "then": f"vfl up {folder}"}
    if json:
        emit(facts)
        return
    if facts["rows"] is not None:
        print_line("rows", f"{facts['rows']}, ids in '{printable(facts['ids'])}'")
    for setting in facts.get("says", ()):
        print_line("your file says", printable(setting))
    if not leads:
        whose = _WHOSE[keys.whose].format(file=shlex.quote(str(file)))
        print_line("keys", f"{keys.file} is the public half of {whose}")
        print_line("fingerprint", keys.fingerprint)
        print_line("send", f"{keys.file.name} to the label party; read the fingerprint aloud")
    print_line("then", facts["then"])


def _check_parties(names: list[str]) -> None:
    from vfl.core.errors import ConfigError

    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"party '{twice[0]}' is named twice",
            where="--party",
            want="one name for each party",
            fix="omit one of them, or rename the other party",
        )


class GivenTables(NamedTuple):
    """Tables of parties and their options, each as ``[PARTY=]VALUE`` on the command line.

    Attributes:
        tables: the tables.
        ids: id columns.
        queries: database queries.
        repeats: rules for repeated ids.
        encodings: encodings of CSV files.
    """

    tables: Sequence[str]
    ids: Sequence[str] = ()
    queries: Sequence[str] = ()
    repeats: Sequence[str] = ()
    encodings: Sequence[str] = ()


def described(
    given: GivenTables, labels: Mapping[str, str], label_party: str, project: bool
) -> dict[str, Table]:
    """Describe the tables by party; a table without a party gets the name of its file.

    Args:
        given: the tables.
        labels: label columns by party; "" if the command line gave no column.
        label_party: name of the leading label party.
        project: whether the tables belong to several parties.
    """
    from vfl.datasets.describe import describe, tells_label
    from vfl.federation.joining import checked_encoding

    sources = _sources(given.tables, labels, label_party, project)
    ids, queries, repeats, encodings = (dict(map(_named, options)) for options in given[1:])

    def of(options: Mapping[str, str], name: str) -> str | None:
        return options.get(name, options.get(""))

    label = labels[label_party]
    reports = {
        name: describe(
            source,
            None,
            of(ids, name),
            labels.get(name) or (label if label and not project else None),
            query=of(queries, name),
            say=say,
            repeats=of(repeats, name),
            encoding=checked_encoding(of(encodings, name)),
        )
        for name, source in sources.items()
    }
    # Only the label party may know how well another party's columns predict the label.
    beyond = [
        line
        for name, report in reports.items()
        if label and name not in labels and label_party in reports
        for line in tells_label(
            (sources[label_party], reports[label_party]), (sources[name], report), name
        )
    ]
    same_ids = len({report.form.id_type for report in reports.values()}) == 1
    found = {}
    for name, report in reports.items():
        more = {} if same_ids else {"id_type": "text"}
        # the command line gave the party a task, but no label column
        has_inputs = name not in labels or name == label_party
        lines = report.lines() + (beyond if name == label_party else [])
        found[name] = _table(sources[name], report, more, lines, has_inputs)
    return found


def _sources(
    tables: Sequence[str], labels: Mapping[str, str], label_party: str, project: bool
) -> dict[str, str]:
    """Return the tables by party.

    Raises:
        ConfigError: a table has no party, the label party has no table, or a label party's table
            has no label column.
    """
    from vfl.core.errors import ConfigError

    sources = dict(map(_named, tables))
    if len(sources) < len(tables) or ("" in sources and len(tables) > 1):
        raise ConfigError("each of several tables needs a party", fix="--from NAME=TABLE")
    if "" in sources:
        source = sources.pop("")
        sources[_party_of(source)] = source
    if labels[label_party] and project and sources and label_party not in sources:
        raise ConfigError(
            f"the label party '{label_party}' has no table",
            got=", ".join(sources),
            fix=f"--from {label_party}=TABLE, or name one of them by --label-party NAME",
        )
    for name in labels if project or label_party in sources else ():
        if name in sources and not labels[name]:
            fix = "--label COLUMN" if name == label_party else f"--task {name}=COLUMN"
            raise ConfigError("the label party's table needs a label column", got=name, fix=fix)
    return sources


def _table(
    source: str, report: TableReport, more: dict[str, str], lines: list[str], has_inputs: bool
) -> Table:
    """Return a described table for a project.

    Args:
        source: the table as given on the command line.
        report: its description.
        more: further settings of the table.
        lines: lines of text that describe each column.
        has_inputs: whether columns of the table become inputs.
    """
    from vfl.core.sources import database_beside, is_database
    from vfl.federation.project import Table

    place = str(Path(source).resolve())
    if is_database(source):
        place = database_beside(source, Path.cwd())
    data, features = {"source": place} | report.settings() | more, report.features
    if not has_inputs:
        data, features = {key: own for key, own in data.items() if key != "columns"}, []
    about = report.task, report.whole_ids, report.left_out
    return Table(source, data, features, lines, _notes(lines), *about)


def _notes(lines: Sequence[str]) -> list[str]:
    """Return the warnings and notes among the lines about a table."""
    return [line for line in lines if line.startswith(("look at ", "note: "))]


def _named(text: str) -> tuple[str, str]:
    """Split ``PARTY=REST`` into party and rest; without a party, the party is ""."""
    match = re.fullmatch(r"([a-z][a-z0-9_-]{0,31})=(.*)", text, re.DOTALL)
    return (match[1], match[2]) if match else ("", text)


def _task_of(text: str) -> tuple[str, str]:
    """Split ``PARTY=COLUMN`` into party and column; the column is empty if none is given."""
    name, _, column = text.partition("=")
    return name, column


def _party_of(source: str) -> str:
    """Return a valid party name that is derived from the file name of a table."""
    stem = re.sub(r"[^a-z0-9_-]+", "-", Path(source).name.partition(".")[0].lower()).strip("-_")
    return stem[:32] if stem[:1].isalpha() else "party"


def _say_notes(
    name: str,
    source: str,
    features: Sequence[str],
    left_out: Sequence[str],
    notes: Sequence[str],
) -> None:
    say(f"{name}: {len(features)} columns of {source} become inputs")
    for line in (*left_out, *notes[:_MOST_NOTES]):
        say(f"  {line}")
    if more := len(notes[_MOST_NOTES:]):
        say(f"  and {more} more, at the head of its party.toml")


def _write_party_file(found: dict[str, Table], label: str, others: object) -> None:
    """Write a party file into the folder of the only table; for a database, into this folder."""
    from vfl.config import PartyFile
    from vfl.config.toml import check
    from vfl.core.errors import ConfigError, RunFolderError
    from vfl.core.sources import is_database
    from vfl.core.storage import write_text
    from vfl.federation.project import party_text

    if len(found) != 1 or others:
        raise ConfigError(
            "a project needs a folder", fix="vfl init FOLDER ..., or vfl init --from TABLE alone"
        )
    ((name, own),) = found.items()
    beside = Path() if is_database(own.source) else Path(own.source).parent
    path = beside / "party.toml"
    if path.exists():
        raise RunFolderError("a party file exists already", where=str(path), fix="move it away")
    source = own.source if is_database(own.source) else Path(own.source).name
    party = check(
        {"party": name, "data": own.data | {"source": source}}, PartyFile, where="the table"
    )
    write_text(path, party_text(party, has_node=not label, notes=own.lines))
    _say_notes(name, own.source, own.features, own.left_out, own.notes)
    say(f"wrote {path}; vfl check {path} shows the inputs from the table")


def check(
    path: Annotated[
        Path,
        argument(
            "An experiment file, a party's own file, or a project.",
            "EXPERIMENT.toml|party.toml|PROJECT",
        ),
    ],
    settings: Set = None,
    measure: Annotated[
        bool, option("Measure the round trip to the SuperLink.", "--measure")
    ] = False,
    round_trip_ms: Annotated[
        float | None, option("Round-trip time that a feature party measured, for advice on speed.")
    ] = None,
    mbps: Annotated[
        float | None,
        option("With --round-trip-ms or --measure: bandwidth of the label party in Mbit/s."),
    ] = None,
    json: Json = False,
) -> None:
    """Check files and data without training, and show the plan.

    For an experiment file, the command also checks data and models; for a party file, the table of
    that party; for a project, the label party's table and model. A remote party measures its
    round-trip time to the SuperLink with --measure; with --round-trip-ms, the label party gets
    advice for this time.
    """
    from vfl.core.errors import ConfigError
    from vfl.experiments import plan
    from vfl.transport import round_trip_s

    facts, experiment, address = _plan_of(path, settings or [])
    if measure:
        if not address:
            raise ConfigError(
                "an experiment in one process has no network link to measure",
                got=f"--measure {path}",
            )
        round_trip_ms = 1000 * round_trip_s(address)
    if round_trip_ms is not None:
        facts |= (
            plan.link_advice(experiment, facts["train_rows"], round_trip_ms / 1000, mbps)
            if experiment
            else _measured(round_trip_ms)
        )
    if json:
        emit(facts)
        return
    advice = facts.pop("advice", [])
    columns, look_at = facts.pop("columns", []), facts.pop("look_at", [])
    for name, value in facts.items():
        print_line(name.replace("_", " "), _shown(name, value), 24)
    for line in advice:
        print_line("advice", line, 24)
    if columns:
        from vfl.datasets.describe import ColumnReport, table_of_columns

        print("\n".join(table_of_columns([ColumnReport(**column) for column in columns])))
    for line in look_at:
        print_line("look at", line, 24)
    print("no mistake found" + (", but read the lines above" if look_at else ""))


def doctor(
    path: Annotated[
        Path | None,
        argument(
            "A project, or a party's own file; by default only this machine.",
            "PROJECT|party.toml",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check for possible problems; print one line per check, with OK, WARN or FAIL and a solution.

    The command checks versions, cores and disk. With PROJECT, it also checks files, keys,
    certificates, ports and, while the SuperLink runs, the clock; with party.toml, files, keys, the
    certificate, the connection to the SuperLink, and the clock. The command changes nothing, and
    contacts only the addresses in the given files. The exit code is 2 if any check is FAIL.
    """
    from dataclasses import asdict

    from vfl.federation.doctor import examine

    checks = []
    for check in examine(path):
        checks.append(check)
        if not json:
            print(f"{check.state:<4}  {check.name:<15} {check.found}")
            if check.fix and check.state != "OK":
                print(f"{'':<22}try {check.fix}")
    failed = sum(check.state == "FAIL" for check in checks)
    if json:
        emit({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        print(f"{failed} of {len(checks)} checks failed" if failed else "no problem found")
    if failed:
        raise typer.Exit(2)


def _plan_of(path: Path, settings: list[str]) -> tuple[dict[str, Any], Experiment | None, str]:
    """Return facts about a path, its experiment or None, and its SuperLink's address or ""."""
    from vfl.config import is_party_file, read_experiment, read_party_file
    from vfl.core.errors import ConfigError
    from vfl.experiments import plan
    from vfl.federation.project import LabelFolder

    if path.is_dir():
        label = LabelFolder.find(path)
        facts = plan.of_project(label, settings)
        experiment = label.experiment(settings)
        return facts, experiment, experiment.federation.superlink
    if is_party_file(path):
        if settings:
            raise ConfigError("--set changes an experiment, not a party's own file", got=str(path))
        return plan.of_party_file(path), None, read_party_file(path).node.superlink
    return plan.of_experiment(path, settings), read_experiment(path, settings), ""


def _measured(round_trip_ms: float) -> dict[str, Any]:
    """Return the round-trip time, and the command by which the label party gets advice for it."""
    command = f"vfl check PROJECT --round-trip-ms {round_trip_ms:.0f}"
    return {
        "round_trip_ms": round(round_trip_ms, 1),
        "advice": [f"the label party gets advice with: {command}"],
    }


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, each)}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return size(value) if name.endswith("bytes") else str(value)
