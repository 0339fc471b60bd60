"""Every rule of a configuration: which settings do not go together, and why.

A rule yields the mistakes it finds, so that all of a file are told at once:

- `HELD_TO` says which rules the settings of each class are held to when they are read.
- `of_one_process` and `of_project` are what else an experiment is held to where one process plays
  every party, and where each party has a file of its own.
- `named_plugins` says which setting names a plug-in of which family. Each plug-in refuses itself
  what it cannot do; `vfl.training.specs` asks them all.

What one setting may be by itself stands with it, in its type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

from vfl.config.experiment import (
    ALIGNMENT_NAME,
    NETWORK,
    OF_NUMBERS,
    DataSettings,
    DPSettings,
    Experiment,
    LabelSettings,
    MiddleSettings,
    PartySettings,
    TraceSettings,
    TrainSettings,
)
from vfl.config.grid import WANTED, CompareSettings, GridSettings
from vfl.config.party_file import OwnData, PartyFile
from vfl.config.toml import Rule, Settings, mistakes_of, raise_mistakes
from vfl.core.errors import ConfigError
from vfl.core.products import takes_missing_rows
from vfl.core.storage import is_database, is_loader, is_named_set, is_object, may_be_csv

#: A setting that changes nothing, and why.
Idle = tuple[str, str]

#: What an alignment is called that the experiment has not named.
UNNAMED_ALIGNMENT = "alignment"
#: The settings of [data] that a project's experiment has; tables are in each party's own file.
OF_A_PROJECT = ("alignment", "id_rules", "missing_rows", "test", "validation")
#: Of [data]: what only a CSV has, what any table has, and what data sets by name have.
_OF_CSV = ("separator", "encoding", "decimal", "skip_lines")
_OF_TABLES = ("id", *_OF_CSV, "missing", "dates", "numbers", "id_type")
_OF_SETS = ("side", "classes", "vocabulary")
#: Studies, which train networks of one label party.
_STUDIES = ("compare", "grid", "value")
#: What the validation rows of a classification are measured by.
_OF_CLASSES = ("loss", "accuracy", "auc", "log_loss", "f1", "hit_rate")


class Agreed(Protocol):
    """The settings that all parties know: an experiment's, or the terms of a session."""

    @property
    def feature_parties(self) -> Collection[str]: ...
    @property
    def label_party(self) -> str: ...
    @property
    def parties(self) -> Mapping[str, Any]: ...
    @property
    def tasks(self) -> Collection[Any] | None: ...
    @property
    def middle(self) -> MiddleSettings | None: ...
    @property
    def merge(self) -> str: ...
    @property
    def secure(self) -> str: ...
    @property
    def train(self) -> TrainSettings: ...
    @property
    def dp(self) -> DPSettings | None: ...
    @property
    def validation(self) -> float: ...
    @property
    def test(self) -> float: ...
    @property
    def missing_rows(self) -> str: ...


# One table of settings.


def of_data(data: DataSettings) -> Iterator[str]:
    """Folds of a split, and what a table on disk cannot give."""
    if data.fold > (data.folds or 1):
        have = f"data.folds is {data.folds}" if data.folds else "data.folds is not set"
        yield f"fold = {data.fold}, and {have}"
    if data.folds and data.split == "shuffled":
        yield "folds have as many rows of each class; leave split = 'shuffled' out"
    if data.memory is not None:
        if data.folds or data.split == "stratified":
            yield "memory keeps the table on disk, and folds and strata look at all labels at once"
        if data.rows is not None:
            yield "memory keeps the table on disk, which gives all its rows: leave rows out"


def of_label(label: LabelSettings) -> Iterator[str]:
    """Yield settings that only a classification uses."""
    for name in ("hits", "class_weight", "calibration") if label.task == "regression" else ():
        if set_by_hand(label, name):
            yield f"{name} is for classification; a regression has no classes"


def of_train(train: TrainSettings) -> Iterator[str]:
    """Compiled code and the weights that it takes."""
    if train.local_steps > 1 and train.in_flight > 1:
        yield (
            "train.local_steps goes on with the last exchange before the next one: leave "
            "train.in_flight at 1"
        )
    if train.compile and train.in_flight > 1:
        yield (
            "train.compile needs train.in_flight = 1: with several cuts in flight a forward "
            "pass runs on copies of the weights, which compiled code does not take"
        )


def _of_local_steps(agreed: Agreed) -> Iterator[str]:
    """Steps between exchanges, which need an own model and what the last exchange brought."""
    if agreed.train.local_steps == 1:
        return
    why = ""
    if agreed.dp is not None:
        why = "[dp] counts one step of each batch"
    elif agreed.secure.partition(":")[0] not in ("none", "sum"):
        why = f"under secure = '{agreed.secure}' no party has a model that it could move alone"
    elif agreed.middle is not None:
        why = "a party in the middle ([middle]) has no inputs of its own to go on with"
    elif agreed.missing_rows != "intersection":
        why = "vectors for rows that are missing (data.missing_rows = 'token') learn at exchanges"
    if why:
        yield f"train.local_steps goes on between exchanges: {why}"


def of_dp(dp: DPSettings) -> Iterator[str]:
    """What noise follows from."""
    if dp.epsilon is None and dp.noise is None:
        yield "dp needs an epsilon to keep, a noise, or both"


def of_compare(compare: CompareSettings) -> Iterator[str]:
    """Repeats, levels and the codec that others are set against."""
    wanted = next((spec for spec in compare.codecs if WANTED in spec), None)
    if wanted and not compare.levels:
        yield f"'{wanted}' needs levels, such as levels = [2.86]"
    if compare.folds is not None and compare.seeds is not None:
        yield "folds take the place of seeds; give one of them"
    if compare.seeds == ():
        yield "seeds is empty, so nothing would be trained"
    if compare.baseline is not None and compare.baseline not in compare.codecs:
        yield f"baseline = '{compare.baseline}' is none of codecs"


def of_grid(grid: GridSettings) -> Iterator[str]:
    """Attacks that label-free bottoms meet too."""
    others = [spec for spec in grid.baseline_specs if spec not in grid.attack_specs]
    if others:
        yield f"baseline_attacks are some of the attacks, and {others[0]} is none"


def of_own_data(data: OwnData) -> Iterator[str]:
    """A party's own table: pictures, and settings of other kinds of tables."""
    if data.bins and data.shape:
        yield "bins are of plain columns, and shape makes a picture of them"
    if data.length is not None and data.tokenizer is None:
        yield "length is a number of tokens, and needs tokenizer"
    sources = [data.source, *([data.predict] if data.predict else [])]
    if not any(map(may_be_csv, sources)):
        for name in set_by_hand(data, *_OF_CSV):
            yield f"{name} says how a CSV is written, and no file of this party is one"
    if data.query is not None and not any(map(_is_asked, sources)):
        yield "query is asked of a database, and this table is a file"
    if data.predict_query is not None and not _is_asked(sources[-1]):
        yield "predict_query is asked of a database, and the rows to predict are in a file"


def of_party_file(party: PartyFile) -> Iterator[str]:
    """A party's role, and what only a party with data, or with labels, has."""
    if party.role == "data" and party.data is None:
        yield "[data] is missing: which table; or role = 'dealer' or 'middle'"
    if party.role != "data":
        if party.data is not None:
            yield f"a party with role = '{party.role}' has no data: leave [data] out"
        for name in set_by_hand(party, "bottom", "augment", "trace", "serve"):
            yield f"a party with role = '{party.role}' has no data, so {name} changes nothing"
    elif party.data is not None and party.data.label is None and party.serve is not None:
        yield "[serve] is of a party with labels, and data.label names none"
    if set_by_hand(party.node, "ranks_key") and not party.node.ranks_at:
        yield "node.ranks_key is for ranks on several machines: node.ranks_at says where they meet"
    for name, why in idle_in_trace(party.trace):
        yield f"{name} would change nothing: {why}"


# What all parties know.


def of_agreed(agreed: Agreed) -> Iterator[str]:
    """What an experiment and the terms of a session, which somebody else may send, are held to."""
    if not agreed.feature_parties:
        yield "no feature party: every party in 'parties' is the label party"
    if agreed.validation + agreed.test >= 1:
        yield "data.validation + data.test leave no rows to train on"
    judged = agreed.train.patience > 0 or agreed.train.keep == "best"
    if judged and agreed.validation == 0:
        yield "train.patience and train.keep = 'best' need data.validation > 0"
    yield from _of_dp_beside(agreed)
    if agreed.train.warm_start and agreed.secure.partition(":")[0] not in ("none", "sum"):
        yield (
            "train.warm_start needs secure = 'none' or 'sum': in another mode no party has a part "
            "of a run that it could go on from alone"
        )
    yield from _of_branches(agreed)
    yield from _of_local_steps(agreed)
    if agreed.missing_rows == "token":
        for why in _wants_every_row(agreed):
            yield f"data.missing_rows = 'token' does not go here: {why}"
    yield from _of_tasks(agreed)
    yield from _of_middle(agreed)


def _of_dp_beside(agreed: Agreed) -> Iterator[str]:
    """Settings that are right by themselves and do not go with [dp]."""
    dp, train = agreed.dp, agreed.train
    if dp is None:
        return
    if agreed.secure.partition(":")[0] not in ("none", "sum", "pea"):
        why = "no party has a half whose gradients it could clip"
        yield f"[dp] needs secure = 'none', 'sum' or 'pea': {why}"
    if agreed.middle is not None or agreed.tasks:
        yield "[dp] counts one top and its bottoms, and neither [middle] nor [[tasks]] is counted"
    if train.clip_norm:
        yield "[dp] bounds each row's gradient by dp.clip: leave train.clip_norm out"
    if train.precision != "float32":
        yield "[dp] needs train.precision = 'float32': norms of rows must not be rounded below it"
    if train.warm_start:
        yield "[dp] counts a training from its first weights on: leave train.warm_start out"
    if train.compile:
        yield "[dp] needs train.compile = false: it looks at every layer's gradients by row"
    if dp.epsilon and dp.noise and (train.patience or train.keep == "best"):
        yield "a training that ends with dp.epsilon needs train.patience = 0 and keep = 'last'"
    if train.shuffle != "full":
        yield "[dp] draws batches in its own way (dp.sampling): leave train.shuffle out"
    unknown = sorted(set(dp.clips) - {*agreed.parties, agreed.label_party})
    if unknown:
        yield f"dp.clips names no party of the experiment: {unknown[0]}"


def _of_branches(agreed: Agreed) -> Iterator[str]:
    """Branches that train one bottom together."""
    dp = agreed.dp
    several = [name for name, party in agreed.parties.items() if party.branches > 1]
    if dp is None:
        if several:
            yield "branches train a bottom with noise, so they need [dp]"
        return
    if dp.unit == "client" and len(several) != 1:
        yield f"dp.unit = 'client' is about the branches of one party, and {len(several)} have any"
    if dp.unit == "client" and dp.sampling != "poisson":
        yield "dp.unit = 'client' draws each branch by itself: dp.sampling = 'poisson'"
    if several and dp.quantile is not None:
        yield "dp.quantile counts rows at one place, and branches have theirs apart"


def _wants_every_row(agreed: Agreed) -> Iterator[str]:
    """Why rows that some party lacks cannot stay."""
    mode = agreed.secure.partition(":")[0]
    if mode != "none" and not takes_missing_rows(mode):
        yield f"under secure = '{agreed.secure}' the label party never has a cut to replace"
    if agreed.dp is not None:
        yield "[dp] does not count what a vector for missing cuts learns of a row"
    if agreed.tasks:
        yield "several label parties ([[tasks]]) have rows of their own each"
    if agreed.middle is not None:
        yield "a party in the middle ([middle]) has no vector for a cut that is missing"


def _of_tasks(agreed: Agreed) -> Iterator[str]:
    """Several label parties."""
    further = further_label_parties(agreed)
    if not further:
        return
    if len({agreed.label_party, *further}) <= len(further):
        yield "two label parties of [label] and [[tasks]] have one name"
    for name in further:
        if name in agreed.parties:
            yield f"'{name}' of [[tasks]] has columns; give them to a feature party"
    if agreed.secure != "none":
        yield f"secure = '{agreed.secure}' has one label party, and [[tasks]] have more"
    if agreed.middle is not None:
        yield "[middle] stands before one label party, and [[tasks]] have more"
    if agreed.train.patience > 0 or agreed.train.keep == "best":
        yield (
            "train.patience and train.keep = 'best' judge the validation loss of one task, and no "
            "label party tells another of its own; leave them out beside [[tasks]]"
        )


def _of_middle(agreed: Agreed) -> Iterator[str]:
    """A party in the middle."""
    if agreed.middle is None:
        return
    name, label_party = agreed.middle.party, agreed.label_party
    if name == label_party or name in agreed.parties:
        yield f"middle.party = '{name}' is another party's name as well"
    if label_party in agreed.parties:
        yield (
            f"the label party '{label_party}' has columns, and with [middle] it computes the "
            "head alone; give the columns to a feature party of their own"
        )
    if agreed.secure != "none":
        yield (
            f"secure = '{agreed.secure}' hides cuts from the label party, and with [middle] it "
            "gets none of them"
        )


def further_label_parties(agreed: Agreed) -> list[str]:
    """The label parties beside the one that leads; terms have them by name."""
    return [getattr(task, "party", task) for task in agreed.tasks or ()]


def of_experiment(experiment: Experiment) -> Iterator[str]:
    """What an experiment says beyond the terms of its sessions: its rows, traces and studies."""
    data, trace = experiment.data, experiment.trace
    if data.missing_rows == "token":
        no_token = "data.missing_rows = 'token' does not go here"
        if not experiment.has_own_tables and data.alignment is None:
            yield (
                f"{no_token}: only parties with tables of their own, [parties.NAME] with a source, "
                "lack rows; those of a federation find them by an alignment, "
                "data.alignment = 'NAME'"
            )
        if trace.enabled:
            why = "a trace ([trace]) and what reads it take every party to have every row"
            yield f"{no_token}: {why}"
    if data.split == "stratified" and experiment.label.task == "regression":
        yield "data.split = 'stratified' is for classes, and these labels are numbers"
    if experiment.is_table and (given := set_by_hand(data, *_OF_SETS)):
        yield f"data.{given[0]} is for data sets by name, and this is a table"
    if experiment.is_table and data.length is not None and data.tokenizer is None:
        yield "data.length of a table is a number of tokens, and needs data.tokenizer"
    yield from _of_code(experiment)
    yield from _of_calibration(experiment)
    measure, kind = experiment.train.measure, experiment.label.task
    if measure not in (own := OF_NUMBERS if kind == "regression" else _OF_CLASSES):
        yield f"train.measure = '{measure}' is not of a {kind}: {', '.join(own)}"
    beyond = [epoch for epoch in trace.epochs if epoch > experiment.train.epochs]
    if beyond:
        yield f"trace.epochs has {beyond[0]}, and train.epochs {experiment.train.epochs}"
    for task in experiment.tasks or ():
        if task.column is None and experiment.is_table:
            yield f"'{task.party}' of [[tasks]] needs the column that it learns"
    studies = set_by_hand(experiment, *_STUDIES)
    if experiment.tasks:
        yield from (f"[{name}] trains networks with one label party" for name in studies)
        if trace.enabled:
            yield "[trace] replays links to one label party, and [[tasks]] have others"
    if experiment.middle is not None:
        yield from (f"[{name}] trains networks without a party in the middle" for name in studies)
        if trace.enabled:
            yield "[trace] replays links to a label party, and [middle] has others"


def _of_code(experiment: Experiment) -> Iterator[str]:
    """Functions, which a party's own file alone may name: an experiment is written by others."""
    sources = [("data", experiment.data.source)]
    sources += [(f"parties.{name}", one.source or "") for name, one in experiment.parties.items()]
    sources += [(f"tasks of '{one.party}'", one.source or "") for one in experiment.tasks or ()]
    for where, source in sources:
        if is_loader(source):
            yield (
                f"{where}: source = '{source}' names a function, which only [data] of that party's "
                "own party.toml may do; an experiment takes a data set by name, which --plugin adds"
            )
    augmented = [name for name, one in experiment.parties.items() if one.augment != "none"]
    if augmented and experiment.secure.partition(":")[0] not in ("none", "sum"):
        yield (
            f"parties.{augmented[0]}.augment changes inputs of a bottom, and under secure = "
            f"'{experiment.secure}' no party has one"
        )


def _of_calibration(experiment: Experiment) -> Iterator[str]:
    """Curves that are fitted to validation rows, whose labels no noise covers."""
    labels = [("label", experiment.label), *(("tasks", one) for one in experiment.tasks or ())]
    for where, label in labels:
        if label.calibration == "none":
            continue
        asked = f"{where}.calibration = '{label.calibration}'"
        if experiment.data.validation == 0:
            yield f"{asked} is fitted to validation rows: data.validation > 0"
        if experiment.dp is not None:
            yield f"{asked} reads labels of validation rows, and the noise of [dp] covers none"


# An experiment at one place.


def of_one_process(experiment: Experiment) -> Iterator[ConfigError]:
    """Where one process that plays everybody finds rows."""
    data, by_name = experiment.data, not experiment.is_table
    named = f"the bundled set '{data.source}'"
    if data.bins and by_name:
        yield ConfigError(
            "'data.bins' is for tables",
            got=f"the data set '{data.source}'",
            fix="leave 'bins' out, or name a CSV or Parquet file as 'data.source'",
        )
    if experiment.tasks and by_name:
        yield ConfigError(
            "several label parties need a table with a column for each",
            where="data.source",
            got=f"{named}, which has one label",
            fix="name a CSV or Parquet file as 'data.source'",
        )
    naming = [name for name, party in experiment.parties.items() if party.columns]
    if naming and by_name:
        yield ConfigError(
            f"'parties.{naming[0]}.columns' is for tables",
            got=f"{named}, which parties share evenly in order",
            fix="leave 'columns' out, or name a CSV or Parquet file as 'data.source'",
        )
    if not by_name and experiment.label.column is None:
        yield ConfigError(
            "a table needs 'label.column', the column that is learned",
            fix='[label] with column = "NAME"',
        )
    tables = [party.source for party in experiment.parties.values() if party.source]
    if data.memory is not None and (tables or by_name):
        yield ConfigError(
            "'data.memory' is for one table whose columns parties share",
            where="data.memory",
            got="tables of several parties" if tables else f"the data set '{data.source}'",
            fix="leave it out; in a federation each party's own file may set it",
        )
    yield from of_own_sources(experiment)
    if data.id is None and any(not is_file_of_party(source) for source in tables):
        yield ConfigError(
            "parties with files of their own need 'data.id', the column they share",
            fix='[data] with id = "NAME"',
        )


def of_own_sources(experiment: Experiment) -> Iterator[ConfigError]:
    """Tables of the parties' own, which party files describe at every party or at none."""
    sources = experiment.own_sources
    plain = [name for name, source in sources.items() if not is_file_of_party(source)]
    if len(plain) == len(sources):
        return
    yield from of_bins(experiment)
    if plain:
        yield ConfigError(
            "once one party's source is a party file, every party's is",
            where=f"parties.{plain[0]}.source",
            got=sources[plain[0]],
        )


def of_training_here(
    experiment: Experiment, own_parts: Collection[str], rows_apart: bool
) -> Iterator[ConfigError]:
    """All that one process which plays everybody is held to before it trains.

    Args:
        experiment: what is trained.
        own_parts: see `idle_in_one_process`.
        rows_apart: whether each party has rows of its own, see `SecureMode.divides_rows`.
    """
    yield from of_one_process(experiment)
    if experiment.data.folds and "test" in own_parts:
        yield ConfigError(
            "folds take turns as test rows, and this data set has test rows of its own",
            where="data.folds",
            got=f"data.source = '{experiment.data.source}'",
            fix="leave data.folds out",
        )
    if rows_apart:
        yield from of_rows_apart(experiment)
    idle = idle_in_one_process(experiment, own_parts), idle_in_training(experiment)
    yield from of_idle(one for found in idle for one in found)


def of_rows_apart(experiment: Experiment) -> Iterator[ConfigError]:
    """Parties with rows of their own, which have all columns."""
    cure = "leave it out, or secure = 'pea:divided=columns'"
    whole = "parties with rows of their own have all columns, and no row in common"
    for name, party in experiment.parties.items():
        if party.columns:
            yield ConfigError(whole, where=f"parties.{name}.columns", fix=cure)
    if experiment.data.alignment:
        yield ConfigError(whole, where="data.alignment", fix=cure)
    if experiment.has_own_tables and experiment.data.rows is not None:
        yield ConfigError(
            "parties with rows of their own bring all of them",
            where="data.rows",
            fix="leave data.rows out, or shorten the tables",
        )


def idle_in_one_process(experiment: Experiment, own_parts: Collection[str]) -> Iterator[Idle]:
    """Settings that change nothing in a process that plays everybody.

    Args:
        experiment: what is trained.
        own_parts: the shares of [data] that a data set by name does not follow, for it has such
            rows of its own.
    """
    data, by_name = experiment.data, not experiment.is_table
    files = [party.source for party in experiment.parties.values() if party.source]
    described = any(is_file_of_party(source) for source in [*files, data.source])
    if described or by_name:
        whose = "a party's own file says it" if described else "it is for tables"
        of_texts = ("tokenizer", "length") if described else ()
        named = set_by_hand(data, *_OF_TABLES, *of_texts)
        yield from ((f"data.{name}", whose) for name in named)
    elif not any(map(may_be_csv, [data.source, *files])):
        no_csv = "it says how a CSV is written, and no table is one"
        yield from ((f"data.{name}", no_csv) for name in set_by_hand(data, *_OF_CSV))
    if not files:  # `vfl align` follows both
        for name in set_by_hand(data, "id_rules", "alignment"):
            yield f"data.{name}", "only parties with a source each are aligned"
    for name in set_by_hand(data, *own_parts):
        yield f"data.{name}", f"the data set '{data.source}' has {name} rows of its own"
    for name, party in experiment.parties.items():
        if party.shape is not None and (described or not files):
            yield f"parties.{name}.shape", "it is for parties with a CSV file each"
    if experiment.label.column is not None and by_name:
        yield "label.column", "a data set by name has one label"
    for task in experiment.tasks or ():
        if task.source is not None and not files:
            yield f"tasks.source of '{task.party}'", "all columns are of one table"


def idle_in_training(experiment: Experiment) -> Iterator[Idle]:
    """Settings that change nothing in any training."""
    train = experiment.train
    if train.optimizer.partition(":")[0].lower() != "sgd":
        for name in set_by_hand(train, "momentum"):
            yield f"train.{name}", f"train.optimizer = '{train.optimizer}' has none"
    if train.local_steps == 1:
        for name in set_by_hand(train, "local_angle"):
            yield f"train.{name}", "train.local_steps = 1 takes no further step"
    if not train.patience and train.keep != "best":
        for name in set_by_hand(train, "measure"):
            yield f"train.{name}", "neither train.patience nor train.keep = 'best' judges by it"
    if train.shuffle != "blocks":
        for name in set_by_hand(train, "block_rows", "window_blocks"):
            yield f"train.{name}", "train.shuffle = 'full' has no blocks"
    yield from idle_in_trace(experiment.trace)


def idle_in_trace(trace: TraceSettings) -> Iterator[Idle]:
    """Settings of a recording that records nothing."""
    if trace.epochs and not trace.phases:
        yield "trace.epochs", "trace.phases names no frames to keep"


def idle_in_grid(grid: GridSettings, read: Collection[str]) -> Iterator[Idle]:
    """Settings of a grid that no attack of it reads.

    Args:
        grid: the grid.
        read: the settings that some attack reads.
    """
    if len(grid.trainings) == 1:
        for name in set_by_hand(grid, "known"):
            yield f"grid.{name}", "no adversary is trained against"
    for name in set_by_hand(grid, "attribute", "known_columns", "reconstructions"):
        if name not in read:
            yield f"grid.{name}", "none of the attacks reads it"


def of_idle(found: Iterable[Idle]) -> Iterator[ConfigError]:
    """One mistake that tells every setting which changes nothing."""
    listed = list(found)
    if listed:
        yield ConfigError(
            "settings would change nothing here",
            where=listed[0][0],
            got="; ".join(f"{name}: {why}" for name, why in listed),
            want="settings that each have an effect",
            fix="leave them out",
        )


def of_project(experiment: Experiment) -> Iterator[ConfigError]:
    """What parties keep to themselves, and what no session on Flower looks at."""
    found = [
        f"parties.{name}.{setting}"
        for name, party in experiment.parties.items()
        for setting in set_by_hand(party, "columns", "source", "shape", "augment")
    ]
    found += [
        f"tasks.{setting} of '{task.party}'"
        for task in experiment.tasks or ()
        for setting in set_by_hand(task, "column", "source")
    ]
    if found:
        yield ConfigError(
            "a project's experiment.toml names no party's table, nor what it does with its rows",
            got=", ".join(found),
            fix="put them in that party's own party.toml, those of its table in [data]",
        )
    yield from of_bins(experiment)
    data = experiment.data
    here = {*OF_A_PROJECT, "bins", "folds", "fold", "split"}
    elsewhere = set_by_hand(data, *(name for name in type(data).model_fields if name not in here))
    if elsewhere:
        yield ConfigError(
            "no session on Flower looks at this setting: each party reads a table of its own",
            where=f"data.{elsewhere[0]}",
            got=", ".join(f"data.{name}" for name in elsewhere),
            want=", ".join(OF_A_PROJECT),
            fix="leave it out, or put it in [data] of a party's own party.toml if that has it",
        )
    yield from of_idle(idle_in_training(experiment))
    if data.alignment is not None and not re.fullmatch(ALIGNMENT_NAME, data.alignment):
        yield ConfigError(
            "a project's alignment has a name, and no folder",
            where="data.alignment",
            got=data.alignment,
            fix=f'alignment = "{UNNAMED_ALIGNMENT}"',
        )
    if data.folds or data.split == "stratified":
        yield ConfigError(
            "strata are made where all labels are, and a project's feature parties have none",
            got="data.folds" if data.folds else "data.split",
            fix="leave it out; data.test is the share of test rows",
        )
    if set_by_hand(experiment, "trace"):
        yield ConfigError(
            "a project's experiment.toml switches on nobody's trace",
            got="[trace]",
            fix="put it in the party.toml of the party that wants to record its own side",
        )


def of_bins(experiment: Experiment) -> Iterator[ConfigError]:
    """Bins for parties whose own files say how their tables are read."""
    if experiment.data.bins:
        yield ConfigError(
            "each party's own file says what its numbers become",
            where="data.bins",
            got=str(experiment.data.bins),
            fix="put 'bins' in [data] of that party's own party.toml",
        )


def of_leading_party(experiment: Experiment, party: PartyFile) -> Iterator[ConfigError]:
    """What the leading label party's own file says, beside the experiment of its project."""
    named, own = experiment.label.column, party.data and party.data.label
    if named is not None and named != own:
        yield ConfigError(
            "a project's label column is the one that the label party's own file names",
            where="label.column",
            got=named,
            want=f"data.label of {party.party}'s own file: {own or 'none'}",
            fix="leave column out of [label], or change data.label in that party.toml",
        )
    idle = []
    if party.bottom is not None:
        idle.append(("bottom", "the label party's bottom is the one that the experiment names"))
    if party.augment != "none" and party.party not in experiment.parties:
        idle.append(("augment", f"[parties] of the experiment has no '{party.party}'"))
    if party.data and party.data.columns and party.party not in experiment.parties:
        idle.append(("data.columns", f"[parties] of the experiment has no '{party.party}'"))
    yield from of_idle((f"{name} of {party.party}'s own file", why) for name, why in idle)


def of_one_label_party(experiment: Experiment, what: str) -> Iterator[ConfigError]:
    """Roles that have no place in a study or an attack."""
    if experiment.tasks:
        yield ConfigError(
            f"{what} has no place for several label parties",
            got=f"[[tasks]] of {', '.join(task.party for task in experiment.tasks)}",
            want="one label party",
            fix="leave [[tasks]] out; vfl train, evaluate, predict, serve and report take them",
        )
    if experiment.middle is not None:
        yield ConfigError(
            f"{what} has no place for a party in the middle",
            got=f"[middle] with party = '{experiment.middle.party}'",
            want="bottoms at the feature parties and the whole top at the label party",
            fix="leave [middle] out; vfl train, evaluate, predict, serve and report take it",
        )


def of_complete_rows(experiment: Experiment, what: str) -> Iterator[ConfigError]:
    """Rows that some party lacks."""
    if experiment.data.missing_rows != "intersection":
        yield ConfigError(
            f"{what} needs every party's cut of every row",
            where="data.missing_rows",
            got=experiment.data.missing_rows,
            want="intersection",
        )


# Which setting names a plug-in of which family.


class Named(NamedTuple):
    """A plug-in that a setting names.

    Attributes:
        setting: the setting's parts.
        family: what kind of plug-in it is.
        spec: it and its options.
        beside: what it has to go with: widths of cuts, or whether labels are numbers.
        listed: whether it is one of several that the setting names.
    """

    setting: tuple[str, ...]
    family: str
    spec: str
    beside: Any = None
    listed: bool = False


def named_plugins(content: Mapping[str, Any]) -> Iterator[Named]:
    """Every plug-in that an experiment names; its settings may be wrong themselves."""
    label, parties = table_in(content, "label"), table_in(content, "parties")
    leading = label.get("party", LabelSettings().party)
    tasks = [one for one in content.get("tasks") or () if isinstance(one, Mapping)]
    numbers = "regression" in [one.get("task") for one in (label, *tasks)]
    usual = PartySettings().width
    everybodys = {one: table_in(parties, one).get("width", usual) for one in parties}
    widths = [width for one, width in everybodys.items() if one != leading]
    single: list[tuple[tuple[str, ...], str, Any]] = [
        (("codec",), "codec", widths),
        (("defense",), "defense", numbers),
        (("merge",), "merger", [*everybodys.values()]),
        (("secure",), "secure", content),
        (("data", "source"), "data set", None),
        (("train", "optimizer"), "optimizer", content),
        (("train", "schedule"), "schedule", content),
        (("label", "top"), "top", None),
        (("label", "loss"), "loss", label.get("task", LabelSettings().task)),
        *((("parties", name, "bottom"), "bottom", None) for name in parties),
        *((("parties", name, "augment"), "augmentation", None) for name in parties),
    ]
    if content.get("model", NETWORK) != NETWORK:
        single.append((("model",), "model", content))
    if middle := table_in(content, "middle"):
        width = middle.get("width", MiddleSettings().width)
        single += [
            (("middle", "model"), "bottom", None),
            (("middle", "codec"), "codec", [width]),
            (("defense",), "defense beside a middle", None),
        ]
    if dp := table_in(content, "dp"):
        sampling = dp.get("sampling", DPSettings.model_fields["sampling"].default)
        single += [
            (("codec",), "codec beside dp", widths),
            (("defense",), "defense beside dp", sampling),
        ]
    for setting, family, beside in single:
        *tables, key = setting
        spec = reduce(table_in, tables, content).get(key)
        if isinstance(spec, str) and (family != "data set" or is_named_set(spec)):
            yield Named(setting, family, spec, beside)
    for one in tasks:
        if isinstance(top := one.get("top"), str):
            yield Named(("tasks", "top"), "top", top)
        if isinstance(loss := one.get("loss"), str):
            yield Named(("tasks", "loss"), "loss", loss, one.get("task", LabelSettings().task))
    for table, key, family, beside in (
        ("compare", "codecs", "wanted codec", widths),
        ("grid", "defenses", "defense", numbers),
        ("grid", "codecs", "codec", widths),
        ("grid", "adversaries", "adversary", None),
        ("grid", "attacks", "attack", None),
        ("value", "defenses", "defense", numbers),
        ("value", "codecs", "codec", widths),
    ):
        listed = table_in(content, table).get(key)
        for spec in listed if isinstance(listed, list | tuple) else [listed]:
            if isinstance(spec, str):
                yield Named((table, key), family, spec, beside, listed=True)


def table_in(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of some settings; an empty one where it is missing or something else."""
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


# Telling mistakes.


def check_one_process(experiment: Experiment) -> None:
    """Refuse an experiment that does not say where one process that plays everybody finds rows.

    Raises:
        ConfigError: see `of_one_process`.
    """
    refuse(of_one_process(experiment))


def check_one_label_party(experiment: Experiment, what: str) -> None:
    """Refuse an experiment with a middle, or with several label parties, where it has no place.

    Raises:
        ConfigError: see `of_one_label_party`.
    """
    refuse(of_one_label_party(experiment, what))


def refuse(found: Iterable[ConfigError]) -> None:
    """Raise every mistake that was found, as one error.

    Raises:
        ConfigError: there is one.
    """
    raise_mistakes(mistakes_of(found))


def set_by_hand(settings: Settings, *names: str) -> list[str]:
    """Those of some settings that are not as they are by default."""
    fields = type(settings).model_fields
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in names}
    return [name for name in names if getattr(settings, name) != defaults[name]]


def is_file_of_party(source: str) -> bool:
    """Whether a party's source is its own file, which describes its table."""
    return source.endswith(".toml")


def _is_asked(source: str) -> bool:
    return is_database(source) and not (is_object(source) or is_loader(source))


#: The rules of each class of settings; one that derives from it is held to the same.
HELD_TO: Mapping[type[Settings], Sequence[Rule]] = {
    DataSettings: [of_data],
    LabelSettings: [of_label],
    TrainSettings: [of_train],
    DPSettings: [of_dp],
    CompareSettings: [of_compare],
    GridSettings: [of_grid],
    OwnData: [of_own_data],
    PartyFile: [of_party_file],
    Experiment: [of_agreed, of_experiment],
}
for _settings, _rules in HELD_TO.items():
    _settings.held_to = _rules
