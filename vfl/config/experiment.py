"""The experiment: model, parties and training. This file contains no private setting of a party."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from vfl.config.grid import CompareSettings, GridSettings, ValueSettings
from vfl.config.toml import (
    Host,
    MoreMistakes,
    OptionalHost,
    ReachedAt,
    Settings,
    check,
    override,
    read_toml,
    several,
)
from vfl.core.storage import is_named_set

ALIGNMENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
PARTY_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
PartyName = Annotated[str, StringConstraints(pattern=PARTY_NAME)]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
AlignmentName = Annotated[str, StringConstraints(pattern=ALIGNMENT_NAME)]
Share = Annotated[float, Field(ge=0, lt=1)]
#: A plug-in by name, with options; every party receives it.
Spec = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[ -~]*$")]
#: Purpose of a session in words; every party receives it.
Purpose = Annotated[str, StringConstraints(max_length=80, pattern=r"^[ -~]*$")]
#: A day: longer than any sensible wait between parties.
Seconds = Annotated[float, Field(gt=0, le=86_400)]
MAX_BINS = 1024
_UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
_LEAST_MEMORY = 64 * 2**20
#: Number of values of a frame's step, an unsigned 32-bit field.
MAX_STEPS = 2**32
#: Name of the model of bottoms and a top in `model`; any other model is a secure mode.
NETWORK = "network"


#: Metrics of the validation rows for model selection; only the label party computes them.
Measure = Literal["loss", "accuracy", "auc", "log_loss", "f1", "hit_rate", "rmse", "mae", "r2"]
#: Metrics that are better if lower, and metrics of a regression.
FALLING, OF_NUMBERS = ("loss", "log_loss", "rmse", "mae"), ("loss", "rmse", "mae", "r2")
#: Treatment of rows that some feature party lacks.
MissingRows = Literal["intersection", "token"]


def memory_bytes(text: str) -> int:
    """Convert a size such as "1GiB" or "500 MB" to bytes.

    >>> memory_bytes("1.5GiB")
    1610612736

    Raises:
        ValueError: the text is not a size, or the size is too small.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(MB|MiB|GB|GiB)", text)
    if found is None:
        raise ValueError("a size is a number and MB, MiB, GB or GiB, such as '1GiB'")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < _LEAST_MEMORY:
        raise ValueError("a table needs at least 64MiB")
    return size


def _is_memory(text: str) -> str:
    memory_bytes(text)
    return text


#: Memory for a party's rows; see `memory_bytes`.
Memory = Annotated[str, StringConstraints(max_length=32), AfterValidator(_is_memory)]


#: Encodings of tables, among Python's text codecs: Unicode; then by language.
ENCODINGS = (
    *("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"),
    *("cp1252", "latin-1", "iso8859-1", "iso8859-15", "cp850", "cp437", "mac-roman"),
    *("cp1250", "iso8859-2", "cp1257", "cp1254", "iso8859-9", "cp1251", "koi8-r", "koi8-u"),
    *("cp866", "iso8859-5", "cp1253", "iso8859-7", "cp1255", "cp1256", "cp874"),
    *("cp932", "shift-jis", "euc-jp", "iso-2022-jp", "gb18030", "gbk", "gb2312", "big5"),
    *("cp949", "euc-kr"),
)


def _is_encoding(text: str) -> str:
    name = re.sub("^windows-", "cp", text.lower().replace("_", "-"))
    name = re.sub("^iso-8859", "iso8859", name)
    if name not in ENCODINGS:
        raise ValueError(f"the encodings of tables are {', '.join(ENCODINGS)}")
    return name


#: Encoding of a table's text, by the name of a Python codec.
Encoding = Annotated[str, StringConstraints(max_length=32), AfterValidator(_is_encoding)]


class TableSettings(Settings):
    """Format of a table, and encoding of its numbers.

    Attributes:
        separator, encoding, decimal, skip_lines: format of a CSV; the last is the number of lines
            above the column names. Encodings are Python's names, such as "cp1251" or "shift_jis".
        missing: further texts that mean a missing cell; or a table of them by column, with "*" for
            all other columns. Words such as NA also mean a missing cell among numbers and dates,
            unless the column's list is empty.
        dates: text columns that contain dates, and their form, such as "%d.%m.%Y"; several forms
            are joined with "|".
        numbers: text columns that contain numbers with currency, grouping or percent, and their
            decimal separator: "." or ",", and after a blank their unit, as in ", EUR" or ". kg".
        id_type: "text" compares ids letter by letter; "number" reads 007, 7 and 7.0 as the same.
        bins: largest number of bins of a number (`vfl.datasets.encode.BinnedColumn`); 0
            standardises numbers.
        tokenizer: name of a pretrained model on this machine. In a data set of texts, its tokens
            replace words; in a table, they replace each party's columns of texts. Rows
            contain a token's number plus 1, and 0 is padding.
        length: tokens, words or items of a row; by default 256 tokens for texts of a table.
        repeats: one row for an id that several rows have: "first"; "latest:COLUMN", by a column of
            dates or numbers; or "mean", which averages numbers and takes the first cell elsewhere.
            By default repeated ids are refused.
    """

    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","
    encoding: Encoding = "utf-8"
    decimal: Literal[".", ","] = "."
    skip_lines: int = Field(default=0, ge=0, le=10_000)
    missing: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    dates: dict[str, str] | None = None
    numbers: dict[str, Annotated[str, StringConstraints(pattern=r"^[.,]( \S{1,8})?$")]] | None = (
        None
    )
    id_type: Literal["text", "number"] = "text"
    bins: int = Field(default=0, ge=0, le=MAX_BINS)
    tokenizer: Annotated[str, StringConstraints(max_length=64)] | None = None
    length: int | None = Field(default=None, ge=1, le=65536)
    repeats: Annotated[str, StringConstraints(pattern=r"^(first|mean|latest:.+)$")] | None = None


class DataSettings(TableSettings):
    """Source and split of the rows, if one process runs every party.

    Attributes:
        source: the spec of a data set (`vfl list sources`; picture sets may be joined with a plus),
            or a CSV or Parquet file, relative to the experiment's file.
        id: column that identifies a row, needed if parties have files of their own.
        id_rules: normalisation rules for the ids of several parties, before a private alignment.
        alignment: a private alignment of the parties' own tables, which gives their rows and the
            order: its folder, relative to the experiment's file; in a project, its name.
        missing_rows: "intersection" leaves out rows that some party lacks; "token" keeps each row
            of the label party that at least one feature party has, and the label party learns a
            vector in place of a missing cut.
        validation, test: shares of all rows.
        split: assignment of rows to those parts. "stratified" gives every part the same share of
            every class, which needs all labels in one process; "shuffled" ignores labels. None
            means "shuffled" in a training with own code, and "stratified" in a comparison or a grid
            of classes.
        memory: approximate memory for a table whose rows are on disk, in unnamed files in TMPDIR,
            such as "1GiB"; None keeps them in memory. A party's own file sets it for its own table.
        rows: largest number of rows: the first ones of a data set by name; for tables, a draw by
            the seed from the rows that all parties have.
        folds, fold: test on one of several equal folds, counted from 1, which have equal numbers of
            rows of each class; `validation` is then a share of the other rows.
        side, classes: height and width of pictures in pixels, and number of classes to keep, the
            first ones.
        vocabulary: number of different word codes, including padding and the unknown word.
    """

    source: str = "digits"
    id: str | None = None
    id_rules: Spec = "plain"
    alignment: Annotated[str, Field(min_length=1)] | None = None
    missing_rows: MissingRows = "intersection"
    validation: Share = 0.1
    test: Share = 0.2
    split: Literal["shuffled", "stratified"] | None = None
    memory: Memory | None = None
    rows: int | None = Field(default=None, ge=1)
    folds: int | None = Field(default=None, ge=2)
    fold: int = Field(default=1, ge=1)
    side: int | None = Field(default=None, ge=1, le=1024)
    classes: int | None = Field(default=None, ge=2)
    vocabulary: int | None = Field(default=None, ge=3, lt=2**24)


class PartySettings(Settings):
    """One party with columns.

    Attributes:
        width: width of its cut.
        bottom: its model, as a spec.
        columns: names or globs of its columns; None takes an equal share in file order.
        source: the party's table, or the party.toml that describes it (in process only).
        branches: number of branches that have its rows, divided equally by the public seed, and
            train the bottom together, with differential privacy (in process only).
        shape: one row as a picture (channels, height, width); None keeps a row of columns.
        augment: augmentations of the party's own rows in each training step, as specs joined with a
            plus (`vfl list augmentations`); in a project, its own file has this setting.
    """

    width: int = Field(default=32, ge=1, le=65536)
    bottom: Spec = "mlp:hidden=64"
    columns: tuple[str, ...] | None = None
    source: str | None = None
    branches: int = Field(default=1, ge=1, le=10_000)
    shape: tuple[int, ...] | None = None
    augment: Spec = "none"


class LabelSettings(Settings):
    """The party that holds the labels and the top model.

    Attributes:
        party: name of the party; if it is also one of `parties`, it has feature columns.
        column: the label column of the party's table.
        task: whether labels are classes or numbers.
        top: the top model, as a spec.
        loss: loss of the training, as a spec (`vfl list losses`); None is cross-entropy for classes
            and the squared error for numbers.
        class_weight: "balanced" gives every class the same weight in the training loss; the class
            frequencies stay at the label party.
        hits: k of an additional metric, the share of rows whose label is among the k largest
            outputs; 0 leaves it out.
        calibration: correction of probabilities at the end of a training, by curves fitted to the
            validation rows: "isotonic" regression or "platt" scaling. All later answers of the run
            are calibrated.
    """

    party: PartyName = "label"
    column: str | None = None
    task: Literal["classification", "regression"] = "classification"
    top: str = "mlp:hidden=64"
    loss: Spec | None = None
    class_weight: Literal["none", "balanced"] = "none"
    hits: int = Field(default=0, ge=0, le=1_000_000)
    calibration: Literal["none", "isotonic", "platt"] = "none"


class TaskSettings(LabelSettings):
    """A further label party with its own labels for the same rows and bottoms (multi-task).

    Attributes:
        weight: weight of its gradients at the feature parties; those of [label] weigh 1.
        source: the party's table, if parties have separate tables.
    """

    weight: float = Field(default=1.0, gt=0, le=1e6)
    source: str | None = None


class MiddleSettings(Settings):
    """A third party without data between bottoms and head (U-shape), which receives every cut.

    Attributes:
        party: its name.
        width: width of its output, which is the head's input; `label.top` is the head.
        model: its model of the merged cuts, as the spec of a bottom.
        codec: codec of this party's output and of the output's gradient; `codec` applies to the
            cuts.
    """

    party: PartyName = "middle"
    width: int = Field(default=32, ge=1, le=65536)
    model: Spec = "mlp:hidden=64,last=relu"
    codec: Spec = "none"


class TrainSettings(Settings):
    """Length and optimisation of a training; the same at every party.

    Attributes:
        epochs, batch_size: passes over the training rows, and rows of one exchange.
        optimizer, learning_rate, momentum, weight_decay: every party's optimiser; the spec sets its
            other options (`vfl list optimizers`); momentum is for sgd.
        schedule: schedule of the learning rate over the epochs, as a spec (`vfl list schedules`);
            "none" is constant.
        warmup_steps: number of first batches over which the learning rate rises linearly to that of
            the schedule; 0 disables it.
        clip_norm: largest Euclidean norm of the gradient of each party's own weights in a step; 0
            does not clip. No party knows the norm of all parties' gradients.
        checkpoint_every: exchanges between two checkpoints.
        in_flight: largest number of cuts that may await their gradients at once. 1 is exact; m
            hides all but 1/m of a slow link's delay, but each gradient then belongs to weights that
            are m - 1 steps old.
        local_steps: optimiser steps of every party for one exchange: after the first, each repeats
            the same batch, with the cuts and gradients of the exchange.
        local_angle: limit in degrees of the angle by which a row's cut (at the label party, its
            gradient) may turn after the exchange. In the further steps, the weight of a row is the
            cosine of its angle, and 0 beyond the limit; a limit of 0 gives all rows the same
            weight.
        precision: "bfloat16" runs forward passes in automatic mixed precision; messages are float32
            in any case.
        compile: whether bottoms, top and middle run under `torch.compile`; this pays for networks
            whose steps are long, because a compilation takes minutes.
        patience: stop after this many epochs without a better validation metric; 0 never stops
            early.
        keep: "best" keeps the weights with the best validation metric, "last" the last ones.
        measure: validation metric that selects the best epoch.
        shuffle: "full" permutes all training rows in each epoch. "blocks" permutes blocks of them,
            and then the rows of each window of blocks (`vfl.session.schedule.shuffled_in_blocks`),
            and splits the rows block by block: for a table on disk.
        block_rows, window_blocks: training rows of a block, and blocks of a window.
        warm_start: name of a run that ended well; each party starts from its own part of that run,
            with its encoder and its weights, instead of new ones. Optimisers start with empty
            state.
    """

    epochs: int = Field(default=10, ge=1, le=100_000)
    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    optimizer: Spec = "adam"
    schedule: Spec = "none"
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    clip_norm: float = Field(default=0.0, ge=0, le=1e6)
    learning_rate: float = Field(default=1e-3, gt=0, le=1e6)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1000)
    checkpoint_every: int = Field(default=500, ge=1, le=1_000_000_000)
    in_flight: int = Field(default=1, ge=1, le=64)
    local_steps: int = Field(default=1, ge=1, le=64)
    local_angle: float = Field(default=0.0, ge=0, le=90)
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    patience: int = Field(default=0, ge=0, le=100_000)
    keep: Literal["last", "best"] = "last"
    measure: Measure = "loss"
    shuffle: Literal["full", "blocks"] = "full"
    block_rows: int = Field(default=4096, ge=1, le=1_000_000)
    window_blocks: int = Field(default=64, ge=1, le=1_000_000)
    warm_start: RunName | None = None

    @property
    def split_rows(self) -> int:
        """Number of rows that are split together; 0 splits all at once."""
        return 0 if self.shuffle == "full" else self.block_rows


class DPSettings(Settings):
    """Differential privacy of the trained models: DP-SGD at every party.

    Attributes:
        epsilon: privacy budget. Without `noise`, it determines the noise for which all epochs use
            the whole budget; with `noise`, the training ends before the step that would exceed the
            budget.
        noise: noise multiplier of the whole network: the standard deviation of all halves' noise
            together over their joint sensitivity, both in units of each half's clipping norm.
        delta: delta of every epsilon; below one over the number of training rows.
        clip: clipping norm of one row's gradient at one party, over all its weights.
        clips: other clipping norms, by party. A row's gradient grows with the square root of the
            number of a party's columns, and each half's noise with its clipping norm: equal norms
            favour the party with few columns.
        clip_by: "half" clips all weights of a half together; "layer" clips each of n layers to clip
            / sqrt(n).
        quantile: target share of rows whose gradients are not clipped: each clipping norm starts at
            `clip` and adapts, by noisy counts whose cost is part of the budget; None keeps the
            norms.
        sampling: "poisson" draws each row for each step independently, so that batch sizes vary and
            some batches are empty; "shuffled" takes every row once an epoch, without amplification
            by sampling.
        accountant: method that computes epsilons; "pld" needs vfl[dp] at every party.
        unit: unit of the epsilon: a "record", or a "client", which means all rows of one branch of
            the party with branches; every half then clips the mean gradient of each branch's rows.
    """

    epsilon: float | None = Field(default=None, gt=0, le=10_000)
    noise: float | None = Field(default=None, gt=0, le=1e6)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    clip: float = Field(default=1.0, ge=2**-60, le=1e6)
    clips: dict[PartyName, Annotated[float, Field(ge=2**-60, le=1e6)]] = Field(
        default_factory=dict, max_length=65
    )
    clip_by: Literal["half", "layer"] = "half"
    quantile: float | None = Field(default=None, gt=0, lt=1)
    sampling: Literal["poisson", "shuffled"] = "poisson"
    accountant: Literal["rdp", "pld"] = "rdp"
    unit: Literal["record", "client"] = "record"


class TraceSettings(Settings):
    """Recording of a party's own end of a training; off by default.

    Attributes:
        phases: phases whose frames are stored: train, validation and test; a single name needs no
            list.
        epochs: epochs whose training and validation frames are stored; empty means every epoch.
        snapshots: epochs between two snapshots of the party's own weights; 0 stores none.
    """

    phases: Annotated[
        tuple[Literal["train", "validation", "test"], ...], BeforeValidator(several)
    ] = ()
    epochs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(several)] = ()
    snapshots: int = Field(default=0, ge=0)

    @property
    def enabled(self) -> bool:
        """Return whether anything is recorded."""
        return bool(self.phases) or self.snapshots > 0


class FederationSettings(Settings):
    """Addresses and time limits of a deployment, all at the label party.

    Attributes:
        superlink: host:port of the SuperLink, as the feature parties reach it.
        stream_host: name or address of the stream for feature parties (in the certificate).
        stream_port: port of the SuperLink for the streams of all sessions; 0 takes a free port at
            each start. The SuperLink's own port can serve both, if the host is the same.
        bind_host: address that the stream listens on; empty means `stream_host`.
        certificate_days: lifetime of the SuperLink's certificate; `vfl up` renews it when a third
            is left, at most 30 days.
        join_timeout_s: time limit for the SuperLink to start, and then for parties to attach.
        step_timeout_s: time limit for one frame of a party.
        rejoin_window_s: time limit for a lost connection to come back.
        max_restarts: most restarts of a training from its last checkpoint after the loss of a
            party.
        restart_timeout_s: time limit for a lost party to come back; Flower itself needs a minute to
            notice the end of a process.
    """

    superlink: ReachedAt = "127.0.0.1:8000"
    stream_host: Host = "127.0.0.1"
    stream_port: int = Field(default=0, ge=0, le=65535)
    bind_host: OptionalHost = ""
    certificate_days: float = Field(default=90, gt=0, le=825)
    join_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 30.0
    rejoin_window_s: Seconds = 8.0
    max_restarts: int = Field(default=3, ge=0, le=1000)
    restart_timeout_s: Seconds = 180.0


class AlignSettings(Settings):
    """Settings of `vfl align`, which finds the rows that all parties have.

    Attributes:
        protocol: protocol that finds the common ids, as a spec.
        table: rows to align: "source", the parties' tables, or "predict", the tables to predict.
            `data.alignment` names the alignment.
    """

    protocol: Spec = "ecdh"
    table: Literal["source", "predict"] = "source"


def with_model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `model` by the equivalent `secure` in settings.

    >>> with_model({"model": "trees", "seed": 3})
    {'seed': 3, 'secure': 'trees'}

    Raises:
        ValueError: both settings are given, or `model` is not a text.
    """
    if "model" not in content:
        return content
    rest = {name: value for name, value in content.items() if name != "model"}
    if not isinstance(content["model"], str):
        raise ValueError(f"'model' is a text, such as '{NETWORK}'")
    if content["model"] == NETWORK:
        return rest
    if rest.get("secure", "none") != "none":
        raise ValueError("'model' and 'secure' are two names of one setting; set only one of them")
    return rest | {"secure": content["model"]}


class Experiment(Settings):
    """A whole experiment; the run folder's config.toml contains every default.

    Attributes:
        name: name of the experiment, and start of its runs' names.
        purpose: purpose of the sessions, to which parties consent (`consent.purposes`); a run keeps
            the purpose of its training.
        seed: seed of all public draws: splits and the order of the rows.
        codec, defense: specs of the compression of cuts and gradients, and of their protection.
        merge: spec of the merger that makes the top's input: concatenated cuts ("concat"), their
            sum, or another.
        secure: the label party's knowledge of the cuts: "none" protects none, "sum" discloses only
            their sum (with merge = "sum"). With "beaver" no party has first-layer weights either;
            with "permuted" no party has any weight. With "pea" parties have separate rows, and no
            party sees another's row, a gradient or a model except the last. A file may use `model`
            instead: "network" means "none"; another model, such as "trees", replaces bottoms, cuts
                and top.
        dp: differential privacy of the models; None trains without.
        trace: recordings of all parties in one process; in a federation each party's own file has
            this setting.
        middle: a third party without data that computes between bottoms and head; None without.
        tasks: further label parties, each with its own task and top; None without.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    purpose: Purpose = ""
    seed: int = Field(default=0, ge=0, lt=2**31)
    codec: Spec = "none"
    defense: Spec = "none"
    merge: Spec = "concat"
    secure: Spec = "none"
    data: DataSettings = DataSettings()
    parties: Annotated[dict[PartyName, PartySettings], Field(min_length=1, max_length=64)]
    label: LabelSettings = LabelSettings()
    middle: MiddleSettings | None = None
    tasks: Annotated[tuple[TaskSettings, ...], Field(max_length=16)] | None = None
    align: AlignSettings = AlignSettings()
    train: TrainSettings = TrainSettings()
    dp: DPSettings | None = None
    trace: TraceSettings = TraceSettings()
    federation: FederationSettings = FederationSettings()
    compare: CompareSettings | None = None
    grid: GridSettings | None = None
    value: ValueSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_its_model(cls, content: Any) -> Any:
        return with_model(content) if isinstance(content, Mapping) else content

    @property
    def feature_parties(self) -> list[str]:
        """The parties that send cuts, in merge order."""
        return [name for name in self.parties if name != self.label.party]

    @property
    def label_party(self) -> str:
        """The party that holds the labels."""
        return self.label.party

    @property
    def validation(self) -> float:
        """Share of validation rows, which end every epoch."""
        return self.data.validation

    @property
    def test(self) -> float:
        """Share of test rows, which end a training."""
        return self.data.test

    @property
    def missing_rows(self) -> MissingRows:
        """Treatment of rows that some feature party lacks."""
        return self.data.missing_rows

    @property
    def has_own_tables(self) -> bool:
        """Return whether one process runs all parties, with tables that the experiment names."""
        return any(party.source for party in self.parties.values())

    @property
    def own_sources(self) -> dict[str, str]:
        """Each party's table or party file; empty if all columns are from one table."""
        found = {name: party.source for name, party in self.parties.items() if party.source}
        if found:
            found.setdefault(self.label.party, self.data.source)
            found |= {task.party: task.source or self.data.source for task in self.tasks or ()}
        return found

    @property
    def is_table(self) -> bool:
        """Return whether rows come from files rather than from a bundled data set."""
        has_files = any(party.source for party in self.parties.values())
        return has_files or not is_named_set(self.data.source)

    def task_of(self, party: str) -> LabelSettings:
        """Label settings of a label party."""
        return next((one for one in self.tasks or () if one.party == party), self.label)


def read_experiment(
    path: Path, overrides: Sequence[str] = (), more: MoreMistakes | None = None
) -> Experiment:
    """Read an experiment file; relative paths of tables start at its own folder.

    Raises:
        ConfigError: see `vfl.config.toml.read_toml`.
    """
    return _located(read_toml(path, Experiment, overrides, more), path.resolve().parent)


def with_overrides(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """Change some settings of an experiment, and check it again as a whole.

    Raises:
        ConfigError: an override names no setting, or the settings contradict each other.
    """
    content = override(experiment.model_dump(mode="json", exclude_none=True), overrides)
    return check(content, Experiment, where="the overrides")


def _located(experiment: Experiment, folder: Path) -> Experiment:
    """Make the paths of an experiment independent of the working directory."""
    data = experiment.data
    if not is_named_set(data.source):
        data = data.model_copy(update={"source": str(folder / data.source)})
    if data.alignment is not None and experiment.has_own_tables:
        data = data.model_copy(update={"alignment": str(folder / data.alignment)})
    parties = {
        name: party.model_copy(update={"source": str(folder / party.source)})
        if party.source
        else party
        for name, party in experiment.parties.items()
    }
    tasks = experiment.tasks and tuple(
        task.model_copy(update={"source": str(folder / task.source)}) if task.source else task
        for task in experiment.tasks
    )
    return experiment.model_copy(update={"data": data, "parties": parties, "tasks": tasks})
