"""All rules of a configuration: which settings contradict each other, and why.

A rule yields all mistakes that it finds, so that all mistakes of a file are reported together:

- `HELD_TO` lists the rules for each class of settings, which are checked when a file is read.
- `of_one_process` has further rules for an experiment in which one process runs every party;
  `of_project` has rules for parties with separate files.
- `named_plugins` lists the settings that name a plug-in, with its family. Each plug-in itself
  rejects what it does not support; `vfl.training.specs` builds all plug-ins to find out.

The type of a setting defines only the limits of this single setting.
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
from vfl.core.sources import is_database, is_loader, is_named_set, is_object, may_be_csv

#: A setting that has no effect, and the reason.
Idle = tuple[str, str]

#: Name of an alignment if the experiment sets no name.
UNNAMED_ALIGNMENT = "alignment"
#: Settings of [data] that a project's experiment may have; settings of tables are in each party's
#: own file.
OF_A_PROJECT = ("alignment", "id_rules", "missing_rows", "test", "validation")
#: Settings of [data] that are only for CSV files, for any table, and for data sets by name.
_OF_CSV = ("separator", "encoding", "decimal", "skip_lines")
_OF_TABLES = ("id", *_OF_CSV, "missing", "dates", "numbers", "id_type", "repeats")
_OF_SETS = ("side", "classes", "vocabulary")
#: Names of the TOML tables for studies that train networks with a single label party.
STUDIES = ("compare", "grid", "value")
#: Validation metrics that only a classification has.
_OF_CLASSES = ("loss", "accuracy", "auc", "log_loss", "f1", "hit_rate")


class Agreed(Protocol):
    """Settings that all parties know: from an experiment, or from the terms of a session."""

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


# Rules for a single table of settings.


def of_data(data: DataSettings) -> Iterator[str]:
    """Yield mistakes about folds of a split, and about a table on disk."""
    if data.fold > (data.folds or 1):
        have = f"data.folds is {data.folds}" if data.folds else "data.folds is not set"
        yield f"fold = {data.fold}, and {have}"
    if data.folds and data.split == "shuffled":
        yield "folds are a split of their own: leave split = 'shuffled' out"
    if data.memory is not None:
        if data.folds or data.split == "stratified":
            yield "memory keeps the table on disk, but folds and strata need all labels at once"
        if data.rows is not None:
            yield "memory keeps the table on disk, which always uses all its rows: leave rows out"


def of_label(label: LabelSettings) -> Iterator[str]:
    """Yield settings that only a classification uses."""
    for name in ("hits", "class_weight", "calibration") if label.task == "regression" else ():
        if set_by_hand(label, name):
            yield f"{name} is for classification; a regression has no classes"


def of_train(train: TrainSettings) -> Iterator[str]:
    """Yield mistakes about local steps or compiled code beside several cuts in flight."""
    if train.local_steps > 1 and train.in_flight > 1:
        yield (
            "train.local_steps repeats the last exchange before the next one: leave "
            "train.in_flight at 1"
        )
    if train.compile and train.in_flight > 1:
        yield (
            "train.compile needs train.in_flight = 1: with several cuts in flight a "
            "forward pass uses copies of the weights, which compiled code does not "
            "support"
        )


def _of_local_steps(agreed: Agreed) -> Iterator[str]:
    """Yield mistakes about local steps, which need a model at each party and stored messages."""
    if agreed.train.local_steps == 1:
        return
    why = ""
    if agreed.dp is not None:
        why = "[dp] accounts for one step of each batch"
    elif agreed.secure.partition(":")[0] not in ("none", "sum"):
        why = f"under secure = '{agreed.secure}' no party has a model that it could train alone"
    elif agreed.middle is not None:
        why = "a party in the middle ([middle]) has no inputs of its own for further steps"
    elif agreed.missing_rows != "intersection":
        why = "vectors for missing rows (data.missing_rows = 'token') are only trained in exchanges"
    if why:
        yield f"train.local_steps trains between exchanges: {why}"


def of_dp(dp: DPSettings) -> Iterator[str]:
    """Yield a mistake if neither epsilon nor noise is set."""
    if dp.epsilon is None and dp.noise is None:
        yield "dp needs an epsilon, a noise, or both"


def of_compare(compare: CompareSettings) -> Iterator[str]:
    """Yield mistakes about repeats, levels and the baseline codec."""
    wanted = next((spec for spec in compare.codecs if WANTED in spec), None)
    if wanted and not compare.levels:
        yield f"'{wanted}' needs levels, such as levels = [2.86]"
    if compare.folds is not None and compare.seeds is not None:
        yield "folds replace seeds; set only one of them"
    if compare.seeds == ():
        yield "seeds is empty, so there would be no training"
    if compare.baseline is not None and compare.baseline not in compare.codecs:
        yield f"baseline = '{compare.baseline}' is not one of codecs"


def of_grid(grid: GridSettings) -> Iterator[str]:
    """Yield a mistake if attacks on label-free bottom models are not among the grid's attacks."""
    others = [spec for spec in grid.baseline_specs if spec not in grid.attack_specs]
    if others:
        yield f"baseline_attacks has to be a part of attacks, and {others[0]} is not one of them"


def of_own_data(data: OwnData) -> Iterator[str]:
    """Yield mistakes about a party's own table: images, and settings for another kind of table."""
    if data.bins and data.shape:
        yield "bins is for plain columns, but shape makes images of the columns"
    if data.length is not None and data.tokenizer is None:
        yield "length is a number of tokens, and needs tokenizer"
    sources = [data.source, *([data.predict] if data.predict else [])]
    if not any(map(may_be_csv, sources)):
        for name in set_by_hand(data, *_OF_CSV):
            yield f"{name} describes a CSV, but no file of this party is a CSV"
    if data.query is not None and not any(map(_is_asked, sources)):
        yield "query is for a database, but this table is a file"
    if data.predict_query is not None and not _is_asked(sources[-1]):
        yield "predict_query is for a database, but the rows to predict are in a file"


def of_party_file(party: PartyFile) -> Iterator[str]:
    """Yield mistakes about a party's role, and about settings that need data or labels."""
    if party.role == "data" and party.data is None:
        yield "[data] is missing: add the table; or role = 'dealer' or 'middle'"
    if party.role != "data":
        if party.data is not None:
            yield f"a party with role = '{party.role}' has no data: leave [data] out"
        for name in set_by_hand(party, "bottom", "augment", "trace", "serve"):
            yield f"a party with role = '{party.role}' has no data, so {name} has no effect"
    elif party.data is not None and party.data.label is None and party.serve is not None:
        yield "[serve] is for a party with labels, but data.label names no column"
    if set_by_hand(party.node, "ranks_key") and not party.node.ranks_at:
        yield "node.ranks_key is for ranks on several machines: node.ranks_at is their address"
    for name, why in idle_in_trace(party.trace):
        yield f"{name} would have no effect: {why}"


# Rules for settings that all parties know.


def of_agreed(agreed: Agreed) -> Iterator[str]:
    """Yield mistakes in an experiment, or in the terms of a session from a peer."""
    if not agreed.feature_parties:
        yield "no feature party: every party in 'parties' is the label party"
    if agreed.validation + agreed.test >= 1:
        yield "data.validation + data.test leave no training rows"
    judged = agreed.train.patience > 0 or agreed.train.keep == "best"
    if judged and agreed.validation == 0:
        yield "train.patience and train.keep = 'best' need data.validation > 0"
    yield from _of_dp_beside(agreed)
    if agreed.train.warm_start and agreed.secure.partition(":")[0] not in ("none", "sum"):
        yield (
            "train.warm_start needs secure = 'none' or 'sum': in another mode no party "
            "has a part of a run from which it could start alone"
        )
    yield from _of_branches(agreed)
    yield from _of_local_steps(agreed)
    if agreed.missing_rows == "token":
        for why in _wants_every_row(agreed):
            yield f"data.missing_rows = 'token' is not possible here: {why}"
    yield from _of_tasks(agreed)
    yield from _of_middle(agreed)


def _of_dp_beside(agreed: Agreed) -> Iterator[str]:
    """Yield mistakes in settings that are valid without [dp] but contradict [dp]."""
    dp, train = agreed.dp, agreed.train
    if dp is None:
        return
    if agreed.secure.partition(":")[0] not in ("none", "sum", "pea"):
        why = "no party has a model whose gradients it could clip"
        yield f"[dp] needs secure = 'none', 'sum' or 'pea': {why}"
    if agreed.middle is not None or agreed.tasks:
        yield (
            "[dp] accounts for one top and its bottoms, but neither for [middle] nor for [[tasks]]"
        )
    if train.clip_norm:
        yield "[dp] bounds each row's gradient by dp.clip: leave train.clip_norm out"
    if train.precision != "float32":
        yield (
            "[dp] needs train.precision = 'float32': lower precision would round the norms of rows"
        )
    if train.warm_start:
        yield "[dp] accounts for a training from its initial weights on: leave train.warm_start out"
    if train.compile:
        yield "[dp] needs train.compile = false: it computes every layer's gradients row by row"
    if dp.epsilon and dp.noise and (train.patience or train.keep == "best"):
        yield "a training that ends with dp.epsilon needs train.patience = 0 and keep = 'last'"
    if train.shuffle != "full":
        yield "[dp] draws batches in its own way (dp.sampling): leave train.shuffle out"
    unknown = sorted(set(dp.clips) - {*agreed.parties, agreed.label_party})
    if unknown:
        yield f"dp.clips has a name that is no party of the experiment: {unknown[0]}"


def _of_branches(agreed: Agreed) -> Iterator[str]:
    """Yield mistakes about branches that train one bottom model together."""
    dp = agreed.dp
    several = [name for name, party in agreed.parties.items() if party.branches > 1]
    if dp is None:
        if several:
            yield "branches train a bottom with noise, so they need [dp]"
        return
    if dp.unit == "client" and len(several) != 1:
        yield f"dp.unit = 'client' needs one party with branches, and {len(several)} have branches"
    if dp.unit == "client" and dp.sampling != "poisson":
        yield "dp.unit = 'client' draws each branch independently: set dp.sampling = 'poisson'"
    if several and dp.quantile is not None:
        yield "dp.quantile counts a party's rows together, but branches have separate rows"


def _wants_every_row(agreed: Agreed) -> Iterator[str]:
    """Yield reasons why a training cannot use rows that some party lacks."""
    mode = agreed.secure.partition(":")[0]
    if mode != "none" and not takes_missing_rows(mode):
        yield f"under secure = '{agreed.secure}' the label party receives no single cut to replace"
    if agreed.dp is not None:
        yield "[dp] does not account for the vector that replaces missing cuts and learns from rows"
    if agreed.tasks:
        yield "several label parties ([[tasks]]) need every row at every party"
    if agreed.middle is not None:
        yield "a party in the middle ([middle]) has no vector for a missing cut"


def _of_tasks(agreed: Agreed) -> Iterator[str]:
    """Yield mistakes about several label parties."""
    further = further_label_parties(agreed)
    if not further:
        return
    if len({agreed.label_party, *further}) <= len(further):
        yield "two label parties of [label] and [[tasks]] have the same name"
    for name in further:
        if name in agreed.parties:
            yield f"'{name}' of [[tasks]] has columns; give them to a feature party"
    if agreed.secure != "none":
        yield f"secure = '{agreed.secure}' has one label party, but [[tasks]] have more"
    if agreed.middle is not None:
        yield "[middle] supports one label party, but [[tasks]] have more"
    if agreed.train.patience > 0 or agreed.train.keep == "best":
        yield (
            "train.patience and train.keep = 'best' need the validation loss of one task, "
            "but label parties do not disclose theirs to each other; leave them out with "
            "[[tasks]]"
        )


def _of_middle(agreed: Agreed) -> Iterator[str]:
    """Yield mistakes about a party in the middle."""
    if agreed.middle is None:
        return
    name, label_party = agreed.middle.party, agreed.label_party
    if name == label_party or name in agreed.parties:
        yield f"middle.party = '{name}' is also another party's name"
    if label_party in agreed.parties:
        yield (
            f"the label party '{label_party}' has columns, but with [middle] it only "
            "computes the head; give the columns to a separate feature party"
        )
    if agreed.secure != "none":
        yield (
            f"secure = '{agreed.secure}' hides cuts from the label party, which receives "
            "no cuts with [middle]"
        )


def further_label_parties(agreed: Agreed) -> list[str]:
    """Return all label parties but the leading one; a session's terms list their names."""
    return [getattr(task, "party", task) for task in agreed.tasks or ()]


def of_experiment(experiment: Experiment) -> Iterator[str]:
    """Yield mistakes in settings that a session's terms lack: rows, traces and studies."""
    data, trace = experiment.data, experiment.trace
    if data.missing_rows == "token":
        yield from _of_missing_rows(experiment)
    if data.split == "stratified" and experiment.label.task == "regression":
        yield "data.split = 'stratified' is for classes, but these labels are numbers"
    if experiment.is_table and (given := set_by_hand(data, *_OF_SETS)):
        yield f"data.{given[0]} is for data sets by name, but this is a table"
    if experiment.is_table and data.length is not None and data.tokenizer is None:
        yield "data.length of a table is a number of tokens, and needs data.tokenizer"
    yield from _of_code(experiment)
    yield from _of_calibration(experiment)
    measure, kind = experiment.train.measure, experiment.label.task
    if measure not in (own := OF_NUMBERS if kind == "regression" else _OF_CLASSES):
        yield f"train.measure = '{measure}' is no metric of a {kind}: {', '.join(own)}"
    beyond = [epoch for epoch in trace.epochs if epoch > experiment.train.epochs]
    if beyond:
        yield f"trace.epochs contains {beyond[0]}, but train.epochs is {experiment.train.epochs}"
    for task in experiment.tasks or ():
        if task.column is None and experiment.is_table:
            yield f"'{task.party}' of [[tasks]] needs the name of its label column"
    if experiment.tasks:
        others = "one label party, but [[tasks]] have others"
        yield from _of_readers(experiment, "with one label party", others)
    if experiment.middle is not None:
        others = "a label party, but [middle] has others"
        yield from _of_readers(experiment, "without a party in the middle", others)


def _of_missing_rows(experiment: Experiment) -> Iterator[str]:
    no_token = "data.missing_rows = 'token' is not possible here"
    if not experiment.has_own_tables and experiment.data.alignment is None:
        yield (
            f"{no_token}: only parties with separate tables, [parties.NAME] with a "
            "source, lack rows; in a federation an alignment finds them, "
            "data.alignment = 'NAME'"
        )
    if experiment.trace.enabled:
        why = "a trace ([trace]) and attacks on it assume that every party has every row"
        yield f"{no_token}: {why}"


def _of_readers(experiment: Experiment, trained: str, replayed: str) -> Iterator[str]:
    """Yield a mistake for each study or trace; both need one label party and no middle party."""
    for name in set_by_hand(experiment, *STUDIES):
        yield f"[{name}] trains networks {trained}"
    if experiment.trace.enabled:
        yield f"[trace] replays links to {replayed}"


def _of_code(experiment: Experiment) -> Iterator[str]:
    """Yield mistakes about functions, which are allowed only in a party's own file."""
    sources = [("data", experiment.data.source)]
    sources += [(f"parties.{name}", one.source or "") for name, one in experiment.parties.items()]
    sources += [(f"tasks of '{one.party}'", one.source or "") for one in experiment.tasks or ()]
    for where, source in sources:
        if is_loader(source):
            yield (
                f"{where}: source = '{source}' names a function, which is only allowed in "
                "[data] of that party's own party.toml; an experiment uses a data set by "
                "name, which --plugin adds"
            )
    augmented = [name for name, one in experiment.parties.items() if one.augment != "none"]
    if augmented and experiment.secure.partition(":")[0] not in ("none", "sum"):
        yield (
            f"parties.{augmented[0]}.augment changes inputs of a bottom, and under "
            f"secure = '{experiment.secure}' no party has a bottom"
        )


def _of_calibration(experiment: Experiment) -> Iterator[str]:
    """Yield mistakes about calibration, which uses labels of validation rows without noise."""
    labels = [("label", experiment.label), *(("tasks", one) for one in experiment.tasks or ())]
    for where, label in labels:
        if label.calibration == "none":
            continue
        asked = f"{where}.calibration = '{label.calibration}'"
        if experiment.data.validation == 0:
            yield f"{asked} is fitted to validation rows: data.validation > 0"
        if experiment.dp is not None:
            yield (
                f"{asked} uses labels of validation rows, which the noise of [dp] does not protect"
            )


# Rules for an experiment in one process.


def of_one_process(experiment: Experiment) -> Iterator[ConfigError]:
    """Yield mistakes about the sources of data, if one process runs every party."""
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
            got=f"{named}, whose columns the parties get in equal parts, in order",
            fix="leave 'columns' out, or name a CSV or Parquet file as 'data.source'",
        )
    if not by_name and experiment.label.column is None:
        yield ConfigError(
            "a table needs 'label.column', the column of the labels",
            fix='[label] with column = "NAME"',
        )
    tables = [party.source for party in experiment.parties.values() if party.source]
    if data.memory is not None and (tables or by_name):
        yield ConfigError(
            "'data.memory' is for one table that holds the columns of all parties",
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
    """Yield a mistake if only some parties describe their tables by party files."""
    sources = experiment.own_sources
    plain = [name for name, source in sources.items() if not is_file_of_party(source)]
    if len(plain) == len(sources):
        return
    yield from of_bins(experiment)
    if plain:
        yield ConfigError(
            "if one party's source is a party file, every party's has to be one",
            where=f"parties.{plain[0]}.source",
            got=sources[plain[0]],
        )


def of_training_here(
    experiment: Experiment, own_parts: Collection[str], rows_apart: bool
) -> Iterator[ConfigError]:
    """Yield all mistakes of a training in one process that runs every party.

    Args:
        experiment: the experiment to train.
        own_parts: see `idle_in_one_process`.
        rows_apart: whether each party has separate rows; see `SecureMode.divides_rows`.
    """
    yield from of_one_process(experiment)
    if experiment.data.folds and "test" in own_parts:
        yield ConfigError(
            "folds take turns as test rows, but this data set has its own test rows",
            where="data.folds",
            got=f"data.source = '{experiment.data.source}'",
            fix="leave data.folds out",
        )
    if rows_apart:
        yield from of_rows_apart(experiment)
    idle = idle_in_one_process(experiment, own_parts), idle_in_training(experiment)
    yield from of_idle(one for found in idle for one in found)


def of_rows_apart(experiment: Experiment) -> Iterator[ConfigError]:
    """Yield mistakes for parties with separate rows and the same columns."""
    cure = "leave it out, or secure = 'pea:divided=columns'"
    whole = "parties with separate rows have all columns, and no common rows"
    for name, party in experiment.parties.items():
        if party.columns:
            yield ConfigError(whole, where=f"parties.{name}.columns", fix=cure)
    if experiment.data.alignment:
        yield ConfigError(whole, where="data.alignment", fix=cure)
    if experiment.has_own_tables and experiment.data.rows is not None:
        yield ConfigError(
            "parties with separate rows always use all of them",
            where="data.rows",
            fix="leave data.rows out, or shorten the tables",
        )


def idle_in_one_process(experiment: Experiment, own_parts: Collection[str]) -> Iterator[Idle]:
    """Yield settings that have no effect in a process that runs every party.

    Args:
        experiment: the experiment to train.
        own_parts: names of settings in [data] that a data set by name ignores, because the data set
            has its own split.
    """
    data, by_name = experiment.data, not experiment.is_table
    files = [party.source for party in experiment.parties.values() if party.source]
    described = any(is_file_of_party(source) for source in [*files, data.source])
    if described or by_name:
        whose = "each party's own file has this setting" if described else "it is for tables"
        of_texts = ("tokenizer", "length") if described else ()
        named = set_by_hand(data, *_OF_TABLES, *of_texts)
        yield from ((f"data.{name}", whose) for name in named)
    elif not any(map(may_be_csv, [data.source, *files])):
        no_csv = "this setting describes a CSV, but no table is a CSV"
        yield from ((f"data.{name}", no_csv) for name in set_by_hand(data, *_OF_CSV))
    if not files:  # `vfl align` uses both settings
        for name in set_by_hand(data, "id_rules", "alignment"):
            yield f"data.{name}", "only parties with separate sources are aligned"
    for name in set_by_hand(data, *own_parts):
        yield f"data.{name}", f"the data set '{data.source}' has {name} rows of its own"
    for name, party in experiment.parties.items():
        if party.shape is not None and (described or not files):
            yield f"parties.{name}.shape", "this setting is for parties with separate tables"
    if experiment.label.column is not None and by_name:
        yield "label.column", "a data set by name has one label"
    for task in experiment.tasks or ():
        if task.source is not None and not files:
            yield f"tasks.source of '{task.party}'", "all parties' columns are in one table"


def idle_in_training(experiment: Experiment) -> Iterator[Idle]:
    """Yield settings that have no effect in any training."""
    train = experiment.train
    if train.optimizer.partition(":")[0].lower() != "sgd":
        for name in set_by_hand(train, "momentum"):
            yield f"train.{name}", f"train.optimizer = '{train.optimizer}' has no momentum"
    if train.local_steps == 1:
        for name in set_by_hand(train, "local_angle"):
            yield f"train.{name}", "train.local_steps = 1 makes no further step after an exchange"
    if not train.patience and train.keep != "best":
        for name in set_by_hand(train, "measure"):
            yield f"train.{name}", "neither train.patience nor train.keep = 'best' uses it"
    if train.shuffle != "blocks":
        for name in set_by_hand(train, "block_rows", "window_blocks"):
            yield f"train.{name}", "train.shuffle = 'full' has no blocks"
    yield from idle_in_trace(experiment.trace)


def idle_in_trace(trace: TraceSettings) -> Iterator[Idle]:
    """Yield settings of a recording that has no effect."""
    if trace.epochs and not trace.phases:
        yield "trace.epochs", "trace.phases lists no frames to store"


def idle_in_grid(grid: GridSettings, read: Collection[str]) -> Iterator[Idle]:
    """Yield grid settings that no attack of the grid uses.

    Args:
        grid: the grid.
        read: settings that at least one attack reads.
    """
    if len(grid.trainings) == 1:
        for name in set_by_hand(grid, "known"):
            yield f"grid.{name}", "no training has an adversary"
    for name in set_by_hand(grid, "attribute", "known_columns", "reconstructions"):
        if name not in read:
            yield f"grid.{name}", "none of the attacks uses this setting"


def of_idle(found: Iterable[Idle]) -> Iterator[ConfigError]:
    """Yield one mistake that reports all settings without an effect."""
    listed = list(found)
    if listed:
        yield ConfigError(
            "settings would have no effect here",
            where=listed[0][0],
            got="; ".join(f"{name}: {why}" for name, why in listed),
            want="settings that each have an effect",
            fix="leave them out",
        )


def of_project(experiment: Experiment) -> Iterator[ConfigError]:
    """Yield mistakes: settings that only a party's own file may have, and idle settings."""
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
            "a project's experiment.toml names no party's table, and no augmentations of its rows",
            got=", ".join(found),
            fix="put them in that party's own party.toml, settings of its table in [data]",
        )
    yield from of_bins(experiment)
    data = experiment.data
    here = {*OF_A_PROJECT, "bins", "folds", "fold", "split"}
    elsewhere = set_by_hand(data, *(name for name in type(data).model_fields if name not in here))
    if elsewhere:
        yield ConfigError(
            "no session on Flower uses this setting: each party reads its own table",
            where=f"data.{elsewhere[0]}",
            got=", ".join(f"data.{name}" for name in elsewhere),
            want=", ".join(OF_A_PROJECT),
            fix="leave it out, or put it in [data] of a party's own party.toml if it is "
            "allowed there",
        )
    yield from of_idle(idle_in_training(experiment))
    if data.alignment is not None and not re.fullmatch(ALIGNMENT_NAME, data.alignment):
        yield ConfigError(
            "a project's alignment has a name, not a folder",
            where="data.alignment",
            got=data.alignment,
            fix=f'alignment = "{UNNAMED_ALIGNMENT}"',
        )
    if data.folds or data.split == "stratified":
        yield ConfigError(
            "stratification needs the labels, and a project's feature parties have none",
            got="data.folds" if data.folds else "data.split",
            fix="leave it out; data.test is the share of test rows",
        )
    if set_by_hand(experiment, "trace"):
        yield ConfigError(
            "a project's experiment.toml cannot enable a party's trace",
            got="[trace]",
            fix="put it in the party.toml of the party that wants to record its own part",
        )


def of_bins(experiment: Experiment) -> Iterator[ConfigError]:
    """Yield a mistake about bins, if parties' own files describe the tables."""
    if experiment.data.bins:
        yield ConfigError(
            "each party's own file sets the encoding of its numbers",
            where="data.bins",
            got=str(experiment.data.bins),
            fix="put 'bins' in [data] of that party's own party.toml",
        )


def of_leading_party(experiment: Experiment, party: PartyFile) -> Iterator[ConfigError]:
    """Yield mistakes in the leading label party's own file, given its project's experiment."""
    named, own = experiment.label.column, party.data and party.data.label
    if named is not None and named != own:
        yield ConfigError(
            "the label party's own file names a project's label column",
            where="label.column",
            got=named,
            want=f"data.label of {party.party}'s own file: {own or 'none'}",
            fix="leave column out of [label], or change data.label in that party.toml",
        )
    idle = []
    if party.bottom is not None:
        idle.append(("bottom", "the experiment sets the label party's bottom"))
    if party.augment != "none" and party.party not in experiment.parties:
        idle.append(("augment", f"[parties] of the experiment has no '{party.party}'"))
    if party.data and party.data.columns and party.party not in experiment.parties:
        idle.append(("data.columns", f"[parties] of the experiment has no '{party.party}'"))
    yield from of_idle((f"{name} of {party.party}'s own file", why) for name, why in idle)


def of_one_label_party(experiment: Experiment, what: str) -> Iterator[ConfigError]:
    """Yield mistakes about roles of parties that a study or an attack does not support."""
    if experiment.tasks:
        yield ConfigError(
            f"{what} does not support several label parties",
            got=f"[[tasks]] of {', '.join(task.party for task in experiment.tasks)}",
            want="one label party",
            fix="leave [[tasks]] out; vfl train, evaluate, predict, serve and report take them",
        )
    if experiment.middle is not None:
        yield ConfigError(
            f"{what} does not support a party in the middle",
            got=f"[middle] with party = '{experiment.middle.party}'",
            want="bottoms at the feature parties and the whole top at the label party",
            fix="leave [middle] out; vfl train, evaluate, predict, serve and report take it",
        )


def of_complete_rows(experiment: Experiment, what: str) -> Iterator[ConfigError]:
    """Yield a mistake if some party may lack rows."""
    if experiment.data.missing_rows != "intersection":
        yield ConfigError(
            f"{what} needs every party's cut of every row",
            where="data.missing_rows",
            got=experiment.data.missing_rows,
            want="intersection",
        )


# Settings that name a plug-in, with the plug-in's family.


class Named(NamedTuple):
    """A plug-in that a setting names.

    Attributes:
        setting: parts of the setting's name.
        family: kind of plug-in.
        spec: name and options of the plug-in.
        beside: values that the plug-in must fit: widths of cuts, or whether labels are numbers.
        listed: whether the setting names several plug-ins.
    """

    setting: tuple[str, ...]
    family: str
    spec: str
    beside: Any = None
    listed: bool = False


def named_plugins(content: Mapping[str, Any]) -> Iterator[Named]:
    """Yield every plug-in that an experiment names, even if other settings are wrong.

    `grid.models` is left out: its specs must be of the kind of the experiment's own model, which
    the checks of a grid require.
    """
    label = table_in(content, "label")
    usual_task = LabelSettings().task
    tasks = [one for one in content.get("tasks") or () if isinstance(one, Mapping)]
    numbers = "regression" in [one.get("task") for one in (label, *tasks)]
    widths = _widths(content)
    leading = label.get("party", LabelSettings().party)
    sent = [width for one, width in widths.items() if one != leading]
    for setting, family, beside in _named_once(content, widths, sent, numbers):
        *tables, key = setting
        spec = reduce(table_in, tables, content).get(key)
        if isinstance(spec, str) and (family != "data set" or is_named_set(spec)):
            yield Named(setting, family, spec, beside)
    for one in tasks:
        if isinstance(top := one.get("top"), str):
            yield Named(("tasks", "top"), "top", top)
        if isinstance(loss := one.get("loss"), str):
            yield Named(("tasks", "loss"), "loss", loss, one.get("task", usual_task))
    for table, key, family, beside in (
        ("compare", "codecs", "wanted codec", sent),
        ("grid", "defenses", "defense", numbers),
        ("grid", "codecs", "codec", sent),
        ("grid", "adversaries", "adversary", None),
        ("grid", "attacks", "attack", None),
        ("value", "defenses", "defense", numbers),
        ("value", "codecs", "codec", sent),
    ):
        listed = table_in(content, table).get(key)
        for spec in listed if isinstance(listed, list | tuple) else [listed]:
            if isinstance(spec, str):
                yield Named((table, key), family, spec, beside, listed=True)


def _widths(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths of all parties' cuts, by party."""
    parties, usual = table_in(content, "parties"), PartySettings().width
    return {one: table_in(parties, one).get("width", usual) for one in parties}


def _named_once(
    content: Mapping[str, Any], widths: Mapping[str, Any], sent: list[Any], numbers: bool
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield each setting that names a single plug-in, with its family and the values it must fit.

    Args:
        content: settings of an experiment.
        widths: widths of all parties' cuts, by party.
        sent: widths of the feature parties' cuts.
        numbers: whether labels are numbers.
    """
    label = table_in(content, "label")
    yield ("codec",), "codec", sent
    yield ("defense",), "defense", numbers
    yield ("merge",), "merger", [*widths.values()]
    yield ("secure",), "secure", content
    yield ("data", "source"), "data set", None
    yield ("data", "id_rules"), "id rules", None
    yield ("align", "protocol"), "alignment", None
    yield ("train", "optimizer"), "optimizer", content
    yield ("train", "schedule"), "schedule", content
    yield ("label", "top"), "top", None
    yield ("label", "loss"), "loss", label.get("task", LabelSettings().task)
    yield from ((("parties", name, "bottom"), "bottom", None) for name in widths)
    yield from ((("parties", name, "augment"), "augmentation", None) for name in widths)
    if content.get("model", NETWORK) != NETWORK:
        yield ("model",), "model", content
    if middle := table_in(content, "middle"):
        yield ("middle", "model"), "bottom", None
        yield ("middle", "codec"), "codec", [middle.get("width", MiddleSettings().width)]
        yield ("defense",), "defense beside a middle", None
    if dp := table_in(content, "dp"):
        sampling = dp.get("sampling", DPSettings.model_fields["sampling"].default)
        yield ("codec",), "codec beside dp", sent
        yield ("defense",), "defense beside dp", sampling


def table_in(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of settings; empty if it is missing or has another type."""
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


# Functions that report mistakes.


def check_one_process(experiment: Experiment) -> None:
    """Raise an error if one process that runs every party cannot use the sources of data.

    Raises:
        ConfigError: see `of_one_process`.
    """
    refuse(of_one_process(experiment))


def check_one_label_party(experiment: Experiment, what: str) -> None:
    """Reject a middle party, or several label parties, where these are not supported.

    Raises:
        ConfigError: see `of_one_label_party`.
    """
    refuse(of_one_label_party(experiment, what))


def refuse(found: Iterable[ConfigError]) -> None:
    """Raise all found mistakes as one error.

    Raises:
        ConfigError: at least one mistake was found.
    """
    raise_mistakes(mistakes_of(found))


def set_by_hand(settings: Settings, *names: str) -> list[str]:
    """Return the names of settings whose values differ from their defaults."""
    fields = type(settings).model_fields
    defaults = {
        name: fields[name].get_default(call_default_factory=True, validated_data={})
        for name in names
    }
    return [name for name in names if getattr(settings, name) != defaults[name]]


def is_file_of_party(source: str) -> bool:
    """Return whether a party's source is a party file, which describes the party's table."""
    return source.endswith(".toml")


def _is_asked(source: str) -> bool:
    return is_database(source) and not (is_object(source) or is_loader(source))


#: Rules for each class of settings; a subclass has the same rules.
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
