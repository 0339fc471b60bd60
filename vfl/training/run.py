"""Train, evaluate and predict in one process; each run has its own folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Unpack

import numpy as np
import torch

from vfl import defenses
from vfl.clients.whole_network import WholeNetworkParty
from vfl.config import (
    Experiment,
    check_one_process,
    memory_bytes,
    read_party_file,
)
from vfl.config.experiment import PartySettings
from vfl.config.run_folder import RunFolder
from vfl.config.validate import is_file_of_party, refuse
from vfl.core.errors import ConfigError, DisagreementError, TrainedRowsError, VFLError
from vfl.core.sources import is_database
from vfl.core.storage import joint_digest, locked, weights_digest
from vfl.datasets import (
    Dealing,
    Encoder,
    Fold,
    Label,
    OwnTable,
    PartyData,
    SetFormat,
    Split,
    load_bundled,
    load_own,
    load_parties,
    load_table,
)
from vfl.datasets.describe import left_out
from vfl.datasets.doubts import doubts
from vfl.datasets.load import NO_ENCODERS
from vfl.datasets.on_disk import OnDisk
from vfl.server.whole_network import WholeNetworkLabel
from vfl.session import Adversary, Checkpoints, Mode, PartyFolder, Terms, secure_mode
from vfl.session.label import EpochRecord, summarise
from vfl.session.label.summary import revealed, test_figures, write_predictions
from vfl.session.progress import ProgressReport, Tell
from vfl.session.store.party_folder import (
    own_table,
    require_numbers,
    require_same_top,
    table_format,
)
from vfl.training.local import LocalSession, Options
from vfl.training.specs import mistakes_here
from vfl.training.whole_network import WholeNetworkSession

AnySession = LocalSession | WholeNetworkSession
#: Name of a subfolder in a dishonest party's part of a run, which contains what this party learned
#: in the training.
_ADVERSARY = "adversary"


def load_data(experiment: Experiment, *, download: bool = False) -> dict[str, PartyData]:
    """Load the aligned rows of every party from the data sources in the experiment.

    Args:
        experiment: experiment with `data.source`, or with a `source` for each party.
        download: whether to download a bundled data set that is not on this machine.

    Raises:
        ConfigError: a setting has no effect on these data or on their training.
        DataError: see `vfl.datasets`.
    """
    refuse(mistakes_here(experiment))
    return _load(experiment, NO_ENCODERS, download=download)


def load_again(folder: RunFolder) -> dict[str, PartyData]:
    """Load every party's current rows, encoded as in the training of a finished run.

    Raises:
        DataError: see `vfl.datasets`.
    """
    folder.require_experiment()
    experiment = folder.experiment()
    check_one_process(experiment)
    parts = {name: PartyFolder(folder.party(name)) for name in experiment.parties}
    encoders = {name: own for name, part in parts.items() if (own := part.encoder()) is not None}
    return _load(experiment, encoders, download=False)


def _load(
    experiment: Experiment, encoders: Mapping[str, Encoder], *, download: bool
) -> dict[str, PartyData]:
    if secure_mode.make(experiment.secure).divides_rows:
        return _rows_apart(experiment, encoders, download=download)
    data, label = experiment.data, experiment.label
    cells = secure_mode.make(experiment.secure).reads_cells
    dealing = _dealing(experiment)
    if not experiment.is_table:
        return load_bundled(
            data.source,
            list(experiment.parties),
            label.party,
            dealing,
            SetFormat(data.side, data.classes, data.length, data.vocabulary, data.tokenizer),
            as_cells=cells,
            download=download,
        )
    labels = [
        Label(one.party, str(one.column), one.task) for one in (label, *(experiment.tasks or ()))
    ]
    if tables := own_tables(experiment):
        return load_parties(
            {name: _of_cells(table) if cells else table for name, table in tables.items()},
            {name: party.columns for name, party in experiment.parties.items()},
            labels,
            dealing,
            None if data.alignment is None else Path(data.alignment),
            data.missing_rows,
            defenses.make(experiment.defense).unaligned,
            encoders,
        )
    columns = {name: party.columns or ("*",) for name, party in experiment.parties.items()}
    memory = data.memory
    place = None if memory is None else OnDisk(Path(gettempdir()), memory_bytes(memory))
    table = OwnTable(data.source, data.id or "", form=table_format(data))
    table = _of_cells(table) if cells else table
    return load_table(table, columns, labels, dealing, encoders, place)


def _dealing(experiment: Experiment) -> Dealing:
    """Return the experiment's rule that assigns rows to training, validation and test."""
    data = experiment.data
    return Dealing(
        experiment.seed,
        data.validation,
        data.test,
        Fold(data.fold, data.folds) if data.folds else None,
        data.split == "stratified",
        experiment.train.split_rows if experiment.is_table else 0,
        data.rows,
    )


def _of_cells(table: OwnTable) -> OwnTable:
    return replace(table, form=table.form.of_cells())


def load_rows(folder: RunFolder) -> dict[str, PartyData]:
    """Load rows on which a finished run can be tested; see `PartyFolder.rows_left`.

    Raises:
        DataError: see `load_data` and `PartyFolder.rows_left`.
    """
    data = load_again(folder)
    return {name: PartyFolder(folder.party(name)).rows_left(own) for name, own in data.items()}


def training_rows(folder: RunFolder) -> dict[str, PartyData]:
    """Load the rows of a finished run for every party, with the split of the run's training.

    Raises:
        TrainedRowsError: the parties' tables have changed since the training, and contain different
            rows now.
        DataError: see `load_rows`.
    """
    data = load_rows(folder)
    if any(own.unseen is not None for own in data.values()):
        raise TrainedRowsError(
            "the tables have different rows than in the training of this run",
            where=str(folder.path),
            want="the rows of the training, which an attack on the run needs",
            fix="restore the tables of the training, or train again",
        )
    return data


def _rows_apart(
    experiment: Experiment, encoders: Mapping[str, Encoder], *, download: bool
) -> dict[str, PartyData]:
    """Return separate rows for each party, from the party's table or as a share of one table.

    All test rows belong to the label party.

    Raises:
        ExposedCutError: the secure mode rejects the rows, for example if the label party has none.
        DataError: see `load_data`.
    """
    label = experiment.label
    secure_mode.make(experiment.secure).refuse(experiment)
    if tables := own_tables(experiment):
        return {
            name: _own_rows(name, table, experiment, encoders.get(name))
            for name, table in tables.items()
        }
    alone = experiment.model_copy(
        update={"parties": {label.party: PartySettings(width=1)}, "secure": "none", "dp": None}
    )
    (whole,) = _load(alone, encoders, download=download).values()
    parts = np.array_split(whole.split.train, len(experiment.parties))
    splits = {name: Split(part) for name, part in zip(experiment.parties, parts, strict=True)}
    splits[label.party] = replace(splits[label.party], test=whole.split.test)
    return {name: replace(whole, name=name, split=split) for name, split in splits.items()}


def _own_rows(
    name: str, table: OwnTable, experiment: Experiment, encoder: Encoder | None
) -> PartyData:
    data, label = experiment.data, experiment.label
    test = data.test if name == label.party else 0.0
    learned = Label(name, str(label.column), label.task)
    dealing = Dealing(experiment.seed, data.validation, test)
    found = load_own(name, table, learned, dealing, encoder=encoder)
    require_numbers(found)
    return found


def data_doubts(experiment: Experiment, data: Mapping[str, PartyData]) -> list[str]:
    """Return warnings about the data of a one-process experiment; see `vfl.datasets.doubts`."""
    found = doubts(data)
    if not experiment.is_table:
        return found
    own, label = experiment.data, experiment.label
    tables = own_tables(experiment) or {
        "no party": OwnTable(own.source, own.id or "", None, table_format(own))
    }
    read = {name for each in data.values() for name in each.columns}
    of_labels = [label.column, *(task.column for task in experiment.tasks or ())]
    labels = [name for name in of_labels if name is not None]
    for name, table in tables.items():
        begin = "no party is given" if name == "no party" else f"{name} leaves out"
        found += left_out(table, {*labels, *(data[name].columns if name in data else read)}, begin)
    return found


def own_tables(experiment: Experiment) -> dict[str, OwnTable]:
    """Return each party's table, if the parties have separate tables or party files."""
    data, sources = experiment.data, experiment.own_sources
    if any(map(is_file_of_party, sources.values())):
        return {name: _own_table(name, source) for name, source in sources.items()}
    form = table_format(data)
    shapes = {name: party.shape for name, party in experiment.parties.items()}
    return {
        name: OwnTable(source, str(data.id), None, form, shapes.get(name))
        for name, source in sources.items()
    }


def sources_read(experiment: Experiment) -> dict[str, str]:
    """Return the paths of tables that `load_data` reads, by party, or one entry for all parties.

    Settings of [data] that the parties' own tables replace are left out.
    """
    tables = own_tables(experiment) if experiment.is_table else {}
    found = {name: str(table.source) for name, table in tables.items()}
    found = found or {"all parties": experiment.data.source}
    return {  # a database address may contain a password
        name: "a database" if is_database(source) else source for name, source in found.items()
    }


def _own_table(name: str, source: str) -> OwnTable:
    """Return a party's table, as the party's own file describes it."""
    party = read_party_file(Path(source))
    own = party.table
    if own.memory is not None:
        raise ConfigError(
            "one process that plays all parties joins their tables in memory",
            where="data.memory",
            got=f"memory = '{own.memory}' at '{name}'",
            fix="leave it out here, or train in a federation, where each party reads its own",
        )
    return own_table(party)


def session_of(
    experiment: Experiment, data: Mapping[str, PartyData], mode: Mode, **options: Unpack[Options]
) -> AnySession:
    """Build a session with every party in this process, ready to run; see `LocalSession`.

    Raises:
        SpecError: a plug-in cannot be built, or does not fit the data or the cut.
    """
    kind: type[AnySession] = LocalSession
    if secure_mode.make(experiment.secure).whole_network:
        kind = WholeNetworkSession
    outputs = data[experiment.label.party].outputs
    return kind(experiment, data, mode=mode, outputs=outputs, **options)


def trained(
    folder: RunFolder,
    data: Mapping[str, PartyData],
    mode: Mode,
    device: str = "cpu",
    tell: Tell | None = None,
    serving: Sequence[str] = (),
    explained: Sequence[str] = (),
    adversaries: Mapping[str, Adversary] | None = None,
) -> AnySession:
    """Build a session with the final weights of a finished run, ready to evaluate or predict.

    Args:
        folder: folder of the run.
        data: data of every party.
        mode: evaluate, predict or serve.
        device: device on which the models run.
        tell: callback that receives the session's progress, which is also stored in the run's
            folder.
        serving: see `Options`.
        explained: see `Options`.
        adversaries: see `Options`.

    Raises:
        RunFolderError: the weights are damaged, or belong to another run.
    """
    experiment = folder.experiment()
    owners = _with_middle(experiment, data)
    weights = {party: PartyFolder(folder.party(party)).weights() for party in owners}
    digests = ((party, weights_digest(state)) for party, state in weights.items())
    folder.check_weights(joint_digest(digests))
    options: Options = {"weights": weights, "device": device, "on_progress": _noted(folder, tell)}
    options["serving"], options["explained"] = serving, explained
    options["adversaries"] = adversaries
    return session_of(experiment, data, mode, **options)


def _noted(folder: RunFolder, tell: Tell | None) -> Tell:
    """Return a callback that stores a session's progress in the run's folder and passes it on."""

    def note(report: ProgressReport) -> None:
        folder.progress(report.record())
        if tell is not None:
            tell(report)

    return note


def _with_middle(experiment: Experiment, data: Mapping[str, PartyData]) -> dict[str, PartyData]:
    """Return data of all parties with weights; the middle party, if any, gets data without rows."""
    if experiment.middle is None:
        return dict(data)
    name, split = experiment.middle.party, data[experiment.label.party].split
    return {**data, name: PartyData(name, None, None, None, split, b"")}


def train(
    experiment: Experiment,
    root: Path,
    name: str,
    *,
    command: str = "vfl train",
    resume: bool = False,
    download: bool = False,
    data: Mapping[str, PartyData] | None = None,
    **options: Unpack[Options],
) -> dict[str, Any]:
    """Train in one process; return the run's summary, whose entry `run` is the run's folder.

    Args:
        experiment: the experiment to train.
        root: parent folder of the run's folder.
        name: name of the run's folder.
        command: command that repeats the run, to be stored in the record.
        resume: whether to continue the run with this name from its last committed checkpoint.
        download: whether to download a bundled data set that is not on this machine.
        data: the parties' data, as `load_data` returns them; None loads the data here.
        options: options of `LocalSession`; what an adversary learned is stored with the adversary's
            weights.

    Raises:
        VFLError: the data cannot be loaded, or the training failed; if the training failed, the
            file failure.json in the run's folder contains the same error.
    """
    begun = experiment.train.warm_start
    if begun is not None:  # the data are encoded as in the earlier run
        data, options["weights"] = _as_left_by(RunFolder.open(root / begun), experiment)
    data = load_data(experiment, download=download) if data is None else data
    found: list[str] = []
    if say := options.get("say"):
        found = data_doubts(experiment, data)
        for line in found:
            say(f"look at: {line}")
    with locked(root / name):
        if resume:
            folder = RunFolder.reopen(root / name)
        else:
            folder = RunFolder.create(root / name, experiment, "in-process", command)

        on_epoch = options.get("on_epoch")

        def record(epoch: EpochRecord) -> None:
            folder.epoch(epoch)
            if on_epoch:
                on_epoch(epoch)

        options |= {"on_epoch": record, "checkpoints": folder.path / "parties"}
        options["on_progress"] = _noted(folder, options.get("on_progress"))
        try:
            session = session_of(experiment, data, "train", **options).run()
        except VFLError as error:
            folder.fail(error)
            raise
        summary = _summary(folder, session)
        _save_parties(folder, session, _with_middle(experiment, data), test_figures(summary))
        for party, adversary in (options.get("adversaries") or {}).items():
            _learned(folder, party, experiment).save(0, adversary.training_state())
        if doubted := [*found, *summary.get("warnings", ())]:
            summary["warnings"] = doubted
        summary["sources"] = sources_read(experiment)
        folder.finish(summary, session.whole_ledger(), session.label.progress.kept_scores())
        return summary


def _save_parties(
    folder: RunFolder,
    session: AnySession,
    data: Mapping[str, PartyData],
    figures: Mapping[str, Any],
) -> None:
    """Store each party's part of a trained model, and the leading label party's metrics."""
    weights, label, tasks = session.weights(), session.label, _tasks(session)
    for party, own in data.items():
        leads = party == label.name
        PartyFolder(folder.party(party)).save(
            own,
            session.terms,
            weights[party],
            figures if leads else tasks.get(party),
            torch.cat(label.tested) if leads and label.tested else None,
            label.privacy() if label.terms.secure != "none" else None,
            _figures_of(session, party),
        )


def _as_left_by(
    earlier: RunFolder, experiment: Experiment
) -> tuple[dict[str, PartyData], dict[str, dict[str, torch.Tensor]]]:
    """Return every party's data, encoded as in an earlier run, and that run's final weights.

    Raises:
        ConfigError, DataError: see `load_data`.
        DisagreementError: the earlier run had another network or other parties.
    """
    refuse(mistakes_here(experiment))
    require_same_top(earlier.experiment(), experiment)
    terms = Terms.of(experiment, "train", experiment.name)
    middle = [] if experiment.middle is None else [experiment.middle.party]
    label, tasks = experiment.label.party, [task.party for task in experiment.tasks or ()]
    everybody = dict.fromkeys([*experiment.parties, label, *tasks, *middle])
    parts = {name: PartyFolder(earlier.party(name)) for name in everybody}
    for part in parts.values():
        part.require_network(terms)
    encoders = {name: own for name, part in parts.items() if (own := part.encoder()) is not None}
    data = {
        name: parts[name].in_own_classes(own)
        for name, own in _load(experiment, encoders, download=False).items()
    }
    return data, {name: part.weights() for name, part in parts.items()}


def _accounts_of(session: AnySession) -> dict[str, Any]:
    """Return metrics that only a process that runs all parties can collect."""
    if tasks := _tasks(session):
        return {"tasks": tasks}
    if not isinstance(session, WholeNetworkSession):
        return {}
    agreed = revealed(session.terms, session.label.progress)
    return {
        "revealed": [asdict(one) for one in (*agreed, *session.revealed())],
        "traffic": session.traffic(),
    }


def _figures_of(session: AnySession, party: str) -> dict[str, Any]:
    """Return the metrics, from the training, of one party's part of the model."""
    if not isinstance(session, WholeNetworkSession):
        return {}
    everybody = {one.name: one.figures() for one in session.clients}
    return everybody.get(party, session.label.figures())


def _tasks(session: AnySession) -> dict[str, dict[str, Any]]:
    """Return metrics and bytes of additional label parties."""
    if not isinstance(session, LocalSession):
        return {}
    found = {}
    for name, one in session.others.items():
        whole = summarise(one, one.weights_digest(), "")
        sent = {way: whole[way] for way in ("bytes_up", "bytes_down")}
        found[name] = test_figures(whole) | sent | {"weight": session.terms.tasks[name].weight}
    return found


def load_adversary(folder: RunFolder, party: str, adversary: Adversary) -> None:
    """Restore an adversary, after its `begin`, to the state it had at the end of this run.

    Raises:
        RunFolderError: the party had no adversary, or another version of vfl wrote the run.
    """
    adversary.load_training_state(_learned(folder, party, folder.experiment()).load(0))


def _learned(folder: RunFolder, party: str, experiment: Experiment) -> Checkpoints:
    terms = Terms.of(experiment, "train", experiment.name)
    return Checkpoints(folder.party(party) / _ADVERSARY, party, terms.run, terms.digest())


def evaluate(
    folder: RunFolder,
    device: str = "cpu",
    tell: Tell | None = None,
    explained: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate a run on its test rows, and on new rows of changed tables.

    Raises:
        TrainedRowsError: no row is left for a test, or the rows of the training are not known.
    """
    return _evaluated(folder, load_rows(folder), device, tell, explained)


def _evaluated(
    folder: RunFolder,
    rows: Mapping[str, PartyData],
    device: str,
    tell: Tell | None,
    explained: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """Evaluate a run on these rows; store and return the summary, with the entries `more`."""
    with locked(folder.path):
        session = trained(folder, rows, "evaluate", device, tell, explained=explained).run()
        _keep_explained(folder, session, rows)
        summary = _summary(folder, session) | more
        folder.evaluated(summary)
    return summary


def _summary(folder: RunFolder, session: AnySession) -> dict[str, Any]:
    """Summarise a finished session of all parties."""
    digest, path = session.weights_digest(), str(folder.path)
    return summarise(session.label, digest, path, session.terms) | _accounts_of(session)


def evaluate_together(
    folders: Sequence[RunFolder], device: str = "cpu", tell: Tell | None = None
) -> list[dict[str, Any]]:
    """Evaluate several runs on common rows that none of these runs trained or validated on.

    Each run stores its metrics as one more evaluation, in which `common_rows` is the number of
    rows, and `beside` lists the other runs.

    Args:
        folders: folders of runs that were trained in one process.
        device: device on which the models run.
        tell: callback that receives the progress.

    Raises:
        TrainedRowsError: no common row is left for a test, or the rows of a training are not known.
        DisagreementError: the runs read different data, so rows cannot be compared.
    """
    loaded = [load_again(folder) for folder in folders]
    labels = [
        (PartyFolder(folder.party(name)), data[name])
        for folder, data in zip(folders, loaded, strict=True)
        for name in [folder.experiment().label.party]
    ]
    names = [folder.path.name for folder in folders]
    if len({own.ids_digest for _, own in labels}) > 1:
        raise DisagreementError(
            "these runs read different rows, so they have no common set of rows",
            where=", ".join(names),
            want="experiments with the same table, id and data.rows",
        )
    common = np.logical_and.reduce([part.may_test(own) for part, own in labels])
    test = np.flatnonzero(common)
    if not len(test):
        raise TrainedRowsError(
            "at least one of these runs was trained or validated on each row",
            where=", ".join(names),
            fix="runs with the same seed and split, or rows that none of them has used",
        )
    found = []
    for folder, data in zip(folders, loaded, strict=True):
        rows = {
            name: replace(
                PartyFolder(folder.party(name)).rows_left(own), split=Split(test=test), unseen=None
            )
            for name, own in data.items()
        }
        found.append(_evaluated(folder, rows, device, tell, common_rows=len(test), beside=names))
    return found


def _keep_explained(folder: RunFolder, session: AnySession, data: Mapping[str, PartyData]) -> None:
    """Store Shapley values of columns in the run folders of the columns' owners."""
    if not isinstance(session, WholeNetworkSession):
        return
    everybody: list[WholeNetworkParty | WholeNetworkLabel] = [*session.clients, session.label]
    for one in everybody:
        part = PartyFolder(folder.party(one.name))
        part.save_explained(data[one.name], session.terms, one.column_values())


def predict(
    folder: RunFolder,
    device: str = "cpu",
    tell: Tell | None = None,
    explained: Sequence[str] = (),
) -> Path:
    """Predict the rows on which `evaluate` would test a run; return the path of the CSV file."""
    experiment = folder.experiment()
    data = load_rows(folder)
    path = folder.path / "predictions.csv"
    label = data[experiment.label.party]
    with locked(folder.path):
        session = trained(folder, data, "predict", device, tell, explained=explained).run()
        _keep_explained(folder, session, data)
        for party, own in data.items():
            PartyFolder(folder.party(party)).save_predicted(own)
        asked = session.label
        answered = asked.outputs, label.classes, asked.remarked, asked.uncalibrated
        write_predictions(path, label, *answered)
        if isinstance(session, LocalSession):
            for name, one in session.others.items():
                own_path = folder.path / f"predictions-{name}.csv"
                told = one.outputs, data[name].classes, (), one.uncalibrated
                write_predictions(own_path, data[name], *told)
    return path
