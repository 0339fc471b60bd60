"""The experiment: model, parties and training settings.

An experiment's file contains no private setting of a party.
"""

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
    first_keys,
    override,
    read_toml,
    several,
)
from vfl.core.errors import ConfigError
from vfl.core.sources import is_named_set

ALIGNMENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
PARTY_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
PartyName = Annotated[str, StringConstraints(pattern=PARTY_NAME)]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
AlignmentName = Annotated[str, StringConstraints(pattern=ALIGNMENT_NAME)]
Share = Annotated[float, Field(ge=0, lt=1)]
#: A plug-in by name, with options; all parties receive it.
Spec = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[ -~]*$")]
#: Purpose of a session as text; all parties receive it.
Purpose = Annotated[str, StringConstraints(max_length=80, pattern=r"^[ -~]*$")]
#: Waiting time in seconds; the limit, a day, is longer than any sensible wait between parties.
Seconds = Annotated[float, Field(gt=0, le=86_400)]
MAX_BINS = 1024
_UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
_LEAST_MEMORY = 64 * 2**20
#: Number of different step numbers in a frame's header, whose field is an unsigned 32-bit integer.
MAX_STEPS = 2**32
#: Value of `model` for a neural network with bottom models and a top model; every other model is a
#: secure mode.
NETWORK = "network"


#: Metrics of the validation rows that can select the best epoch; only the label party computes
#: them.
Measure = Literal["loss", "accuracy", "auc", "log_loss", "f1", "hit_rate", "rmse", "mae", "r2"]
#: Metrics of which a lower value is better (FALLING), and metrics of a regression (OF_NUMBERS).
FALLING, OF_NUMBERS = ("loss", "log_loss", "rmse", "mae"), ("loss", "rmse", "mae", "r2")
#: Treatment of rows that some feature party does not have.
MissingRows = Literal["intersection", "token"]


def memory_bytes(text: str) -> int:
    """Convert a size such as "1GiB" or "500 MB" to bytes.

    >>> memory_bytes("1.5GiB")
    1610612736

    Raises:
        ValueError: the text is no size, or the size is too small.
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


#: Memory for a party's rows, as text; see `memory_bytes`.
Memory = Annotated[str, StringConstraints(max_length=32), AfterValidator(_is_memory)]


#: Accepted encodings of tables, as names of Python's text codecs: first Unicode, then by language.
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


#: Encoding of a table's text, as the name of a Python codec.
Encoding = Annotated[str, StringConstraints(max_length=32), AfterValidator(_is_encoding)]


class TableSettings(Settings):
    """Format of a table, and how its columns become model inputs.

    Attributes:
        separator, encoding, decimal, skip_lines: format of a CSV file; `skip_lines` is the number
            of lines above the column names. Encodings have Python's names, such as "cp1251" or
            "shift_jis".
        missing: further texts that stand for a missing cell of the table; or such texts by column,
            with "*" for all other columns. Words such as NA also stand for a missing cell in
            columns of numbers and dates, unless the column's list is empty.
        dates: text columns that contain dates, with their format, such as "%d.%m.%Y"; several
            formats are joined with "|".
        numbers: text columns that contain numbers with a currency, digit grouping or a percent
            sign, each with its decimal separator "." or ","; a blank and a unit may follow, as in
            ", EUR" or ". kg".
        id_type: "text" compares ids character by character; "number" treats 007, 7 and 7.0 as
            equal.
        bins: largest number of bins into which a number column is divided
            (`vfl.datasets.encode.BinnedColumn`); 0 standardises numbers instead.
        tokenizer: name of a pretrained language model on this machine, whose tokenizer is used. In
            a data set of texts, the tokenizer's tokens replace words; in a table, they replace each
            party's text columns. Each input value is a token's number in the tokenizer's vocabulary
            plus 1; 0 is padding.
        length: number of tokens, words or items in each row's input; by default 256 tokens for
            texts of a table.
        repeats: choice of one row for an id that several rows have: "first"; "latest:COLUMN", by a
            column of dates or numbers; or "mean", which averages numbers and uses the first row's
            value in other columns. By default, repeated ids are an error.
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
    """Source and split of the rows, for one process that runs every party.

    Attributes:
        source: spec of a data set (`vfl list sources`; image data sets may be joined with a plus),
            or a CSV or Parquet file, relative to the experiment's file.
        id: column that identifies a row; needed if parties have separate files.
        id_rules: rules that normalise the ids of all parties before a private alignment.
        alignment: folder (relative to the experiment's file) of a private alignment of the parties'
            own tables, which determines rows and their order; in a project, the alignment's name.
        missing_rows: "intersection" leaves out rows that at least one party lacks. "token" keeps
            each row of the label party that at least one feature party has; the label party learns
            a vector that replaces the cut-layer activations of a row that a party lacks.
        validation, test: shares of the rows for validation and for test.
        split: method that assigns rows to training, validation and test. "stratified" gives each of
            the three splits the same share of every class, which needs all labels in one process;
            "shuffled" ignores labels. None stands for "shuffled" in trainings, and for "stratified"
            in comparisons, grids and value studies with class labels.
        memory: approximate memory, such as "1GiB", for a table whose rows are stored on disk in
            unnamed files in TMPDIR; None keeps the rows in memory. A party's own file sets the
            memory for its own table.
        rows: largest number of rows: of a data set by name, the first rows are used; of tables, the
            rows are drawn with the seed from the rows that all parties have.
        folds, fold: test on fold number `fold` (counted from 1) of this many equal folds, which
            have equal numbers of rows of each class, if labels are classes; `validation` is then a
            share of all other rows.
        side, classes: `side` is the height and width of images in pixels; `classes` is the number
            of classes to keep, counted from the first class.
        vocabulary: number of different token numbers, including the numbers for padding and for
            unknown words.
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
    """A party that has feature columns.

    Attributes:
        width: width of the party's cut, in values per row.
        bottom: spec of the party's bottom model.
        columns: names or globs of the party's columns. None assigns all columns of a table, or an
            equal share of the columns of a data set that has a name, such as "digits".
        source: the party's table, or the party.toml that describes it (only for one process).
        branches: number of branches that the party's rows are divided among, in equal parts that
            are drawn from the public seed. The branches train the party's bottom model together,
            with differential privacy (only for one process).
        shape: axes of one row as an image (channels, height, width); None keeps a row as columns.
        augment: specs of augmentations of the party's rows in each training step, joined with a
            plus (`vfl list augmentations`); in a project, the party's own file has this setting.
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
        column: name of the label column in the party's table.
        task: whether labels are classes ("classification") or numbers ("regression").
        top: spec of the top model.
        loss: spec of the training loss (`vfl list losses`); None is cross-entropy for classes and
            squared error for numbers.
        class_weight: "balanced" gives every class the same total weight in the training loss; the
            class frequencies are not sent to other parties.
        hits: k of an additional metric: the share of rows whose label is among the k largest
            outputs; 0 turns it off.
        calibration: correction of probabilities at the end of a training, by curves that are fitted
            to the validation rows, with "isotonic" regression or "platt" scaling. All later
            predictions of the run are calibrated.
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
    """An additional label party with its own labels for the same rows and bottoms (multi-task).

    Attributes:
        weight: weight of this party's gradients when feature parties add the gradients of all label
            parties; the gradients of [label] have weight 1.
        source: the additional label party's table, if parties have separate tables.
    """

    weight: float = Field(default=1.0, gt=0, le=1e6)
    source: str | None = None


class MiddleSettings(Settings):
    """A third party without data between bottom models and head (U-shape); it receives every cut.

    Attributes:
        party: its name.
        width: width of the party's output, which is the input of the head; `label.top` is the spec
            of the head.
        model: spec of the third party's model, whose input is the merged cuts; the specs are those
            of bottom models.
        codec: codec of this party's output and of the output's gradient; the experiment's own
            setting `codec` applies to the cuts of the feature parties.
    """

    party: PartyName = "middle"
    width: int = Field(default=32, ge=1, le=65536)
    model: Spec = "mlp:hidden=64,last=relu"
    codec: Spec = "none"


class TrainSettings(Settings):
    """Length and optimisation of a training, which are the same at every party.

    Attributes:
        epochs, batch_size: number of passes over the training rows, and number of rows per
            exchange.
        optimizer, learning_rate, momentum, weight_decay: the optimiser of every party; the
            optimiser's spec can set further options (`vfl list optimizers`); momentum is for sgd.
        schedule: spec of the learning-rate schedule over the epochs (`vfl list schedules`); "none"
            keeps the learning rate constant.
        warmup_steps: number of batches at the start over which the learning rate rises linearly to
            the schedule's value; 0 turns the warm-up off.
        clip_norm: largest Euclidean norm, in one step, of the gradient of a party's own weights; 0
            turns clipping off. No party can compute the norm over all parties' gradients.
        checkpoint_every: number of exchanges (batches) between two checkpoints.
        in_flight: largest number of cuts that may wait for their gradients at the same time. With
            1, each gradient belongs to the current weights. With m, a training waits only 1/m of
            the time for a slow network, but each gradient belongs to weights that are m - 1 steps
            old.
        local_steps: number of optimiser steps of every party per exchange; steps after the first
            one use the same batch, with the cuts and gradients of the exchange again.
        local_angle: largest angle in degrees by which a row's cut (at the label party, the cut's
            gradient) may have turned since the exchange. In the further steps, the weight of a row
            is the cosine of this angle, and 0 if the angle is larger than the limit; a limit of 0
            gives all rows the same weight.
        precision: "bfloat16" runs forward passes in automatic mixed precision; messages always
            contain float32.
        compile: whether bottom, top and middle models run under `torch.compile`; compilation takes
            minutes, so this setting pays only for networks with long steps.
        patience: number of epochs without a better validation metric after which training stops; 0
            never stops early.
        keep: "best" keeps the weights with the best validation metric, "last" the weights of the
            last epoch.
        measure: validation metric that selects the best epoch.
        shuffle: "full" permutes all training rows in each epoch. "blocks" permutes blocks of
            training rows, and then the rows of each window of blocks
            (`vfl.session.schedule.shuffled_in_blocks`); it also splits rows into training,
            validation and test block by block, and is meant for tables on disk.
        block_rows, window_blocks: number of training rows in a block, and number of blocks in a
            window.
        warm_start: name of a run that ended well. Instead of new weights, each party starts with
            its own part of that run: its data encoder and its weights. Optimisers start with an
            empty state.
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
        """Number of rows that are split into training, validation and test together; 0 for all."""
        return 0 if self.shuffle == "full" else self.block_rows


class DPSettings(Settings):
    """Differential privacy of the trained models, by DP-SGD at every party.

    Attributes:
        epsilon: privacy budget. Without `noise`, vfl computes the noise for which all epochs use
            the whole budget; with `noise`, the training ends before the step that would exceed the
            budget.
        noise: noise multiplier of the whole network: the standard deviation of all parties' noise
            together, over their joint sensitivity. Both are in units of each party's clipping norm.
        delta: delta of every epsilon; choose it smaller than 1 over the number of training rows,
            which only a party with `consent.max_dp_epsilon` requires.
        clip: clipping norm of the gradient of one row at one party, over all weights of this
            party's model.
        clips: clipping norms of single parties, which replace `clip`, by party. A row's gradient
            grows with the square root of the number of a party's columns, and each party's noise
            grows with its clipping norm. Equal norms therefore favour a party with few columns.
        clip_by: "half" clips the gradient of all weights of a party together; "layer" clips each of
            n layers to clip / sqrt(n).
        quantile: target share of rows whose gradients are not clipped. Each clipping norm starts at
            `clip` and is then adapted to this share by noisy counts of rows, which cost a part of
            the budget; None keeps the norms constant.
        sampling: "poisson" draws each row independently for each step, so batch sizes vary and some
            batches are empty; "shuffled" uses every row once per epoch, without privacy
            amplification by sampling.
        accountant: method that computes epsilons; "pld" needs vfl[dp] at every party.
        unit: unit of data that an epsilon protects: a "record", or a "client", which means all rows
            of one branch of the party with branches. With "client", every party clips the mean
            gradient of each branch's rows.
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
    """Recording of a party's own messages in a training; off by default.

    Attributes:
        phases: phases whose frames are stored: train, validation, test; a single name needs no
            list.
        epochs: epochs of which training and validation frames are stored; an empty list stands for
            every epoch.
        snapshots: number of epochs between two snapshots of the party's own weights; 0 stores no
            snapshots.
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
    """Addresses and time limits of a deployment; all addresses are the label party's.

    Attributes:
        superlink: host:port under which the feature parties reach the SuperLink.
        stream_host: host name or address at which the label party accepts streams of feature
            parties; its certificate contains this name.
        stream_port: port for the streams of all sessions; 0 takes a free port at each start. If the
            streams have the same host as the SuperLink, they can also share the SuperLink's port.
        bind_host: address on which the SuperLink and the streams listen; empty means the host of
            `superlink`, and `stream_host`.
        certificate_days: lifetime of the SuperLink's certificate in days; `vfl up` renews the
            certificate when a third of its lifetime is left, but not earlier than 30 days before
            its end.
        join_timeout_s: time limit in seconds for the SuperLink to start, and then for parties to
            join.
        step_timeout_s: time limit in seconds for one frame from a party.
        rejoin_window_s: time limit in seconds for a lost connection to be restored.
        max_restarts: largest number of restarts of a training from its last checkpoint, after a
            party was lost.
        restart_timeout_s: time limit in seconds for a lost party to return; Flower itself needs a
            minute to detect that a process has ended.
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
        protocol: spec of the protocol that finds the common ids.
        table: rows to align: "source" for the parties' tables, "predict" for the tables of rows to
            predict. In the experiment, `data.alignment` sets the name of the alignment.
    """

    protocol: Spec = "ecdh"
    table: Literal["source", "predict"] = "source"


def with_model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the setting `model` by the equivalent setting `secure`.

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
    """A whole experiment; the run folder's config.toml also contains all default values.

    Attributes:
        name: name of the experiment, with which the names of its runs begin.
        purpose: purpose of the training's session, to which parties consent (`consent.purposes`);
            later sessions of a run have the purpose of the training.
        seed: seed of all public random draws, such as splits and the order of the rows.
        codec, defense: spec of the codec of cuts and gradients, and spec of the defense.
        merge: spec of the merger that makes the top's input from the cuts: concatenation
            ("concat"), sum, or another.
        secure: secure mode, which limits what the label party learns of cuts: with "none" it
            receives every cut, with "sum" only the sum of all cuts (which needs merge = "sum").
            With "beaver", in addition, no party has the first-layer weights; with "permuted" no
            party has any weights. With "pea" parties have separate rows, and no party sees another
            party's row, a gradient, or a model before the final model. A file may set `model`
            instead of `secure`. The value "network" of `model` means secure = "none"; another
            value, such as "trees", is a model that replaces bottom models, cuts and top model.
        dp: differential privacy of the models; None trains without it.
        trace: recording of the messages of all parties, if one process runs them; in a federation,
            each party's own file has this setting.
        middle: a third party without data that computes between bottom models and head; None if
            there is no such party.
        tasks: additional label parties, each with its own task and top; None if there are none.
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
        """Parties that send cuts, in the order in which the merger receives them."""
        return [name for name in self.parties if name != self.label.party]

    @property
    def label_party(self) -> str:
        """Party that holds the labels."""
        return self.label.party

    @property
    def validation(self) -> float:
        """Share of validation rows, which are evaluated at the end of every epoch."""
        return self.data.validation

    @property
    def test(self) -> float:
        """Share of test rows, which are evaluated at the end of a training."""
        return self.data.test

    @property
    def missing_rows(self) -> MissingRows:
        """Treatment of rows that some feature party does not have."""
        return self.data.missing_rows

    @property
    def has_own_tables(self) -> bool:
        """Return whether one process runs all parties, each with its table in the experiment."""
        return any(party.source for party in self.parties.values())

    @property
    def own_sources(self) -> dict[str, str]:
        """Path of each party's table or party file; empty if all columns come from one table."""
        found = {name: party.source for name, party in self.parties.items() if party.source}
        if found:
            found.setdefault(self.label.party, self.data.source)
            found |= {task.party: task.source or self.data.source for task in self.tasks or ()}
        return found

    @property
    def is_table(self) -> bool:
        """Return whether rows come from files rather than from a bundled data set."""
        return self.has_own_tables or not is_named_set(self.data.source)

    def task_of(self, party: str) -> LabelSettings:
        """Return the label settings of a label party."""
        return next((one for one in self.tasks or () if one.party == party), self.label)


def read_experiment(
    path: Path, overrides: Sequence[str] = (), more: MoreMistakes | None = None
) -> Experiment:
    """Read an experiment file; relative paths of tables are relative to the file's folder.

    Raises:
        ConfigError: the file is a party's own file; or see `vfl.config.toml.read_toml`.
    """
    keys = first_keys(path)
    if "party" in keys and "parties" not in keys:
        raise ConfigError(
            "this is one party's own file, and not an experiment",
            where=str(path),
            want="an experiment file or a project, with at least two parties",
            fix="vfl init PROJECT --from A=TABLE --from B=TABLE --label-party A --label COLUMN",
        )
    return _located(read_toml(path, Experiment, overrides, more), path.resolve().parent)


def with_overrides(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """Change some settings of an experiment, and check it again as a whole.

    Raises:
        ConfigError: an override names no setting, or the settings contradict each other.
    """
    content = override(experiment.model_dump(mode="json", exclude_none=True), overrides)
    return check(content, Experiment, where="the overrides")


def _located(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment with paths of tables that include the file's folder."""
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
