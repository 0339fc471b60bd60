"""The experiment: what is trained, by whom, how. It holds nothing a party keeps to itself."""

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
#: A plug-in by name, with options; every party is sent it.
Spec = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[ -~]*$")]
#: What a session is for, in words; every party is sent it.
Purpose = Annotated[str, StringConstraints(max_length=80, pattern=r"^[ -~]*$")]
#: A day: longer than any wait between parties is meant to be.
Seconds = Annotated[float, Field(gt=0, le=86_400)]
MAX_BINS = 1024
_UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
_LEAST_MEMORY = 64 * 2**20
#: Numbers of a frame's step, an unsigned 32-bit field.
MAX_STEPS = 2**32
#: The model of bottoms and a top, where `model` says so; any other one is a secure mode by itself.
NETWORK = "network"


#: What validation rows are measured by; the label party alone computes it.
Measure = Literal["loss", "accuracy", "auc", "log_loss", "f1", "hit_rate", "rmse", "mae", "r2"]
#: Of these, what is better where it is lower, and what a regression has.
FALLING, OF_NUMBERS = ("loss", "log_loss", "rmse", "mae"), ("loss", "rmse", "mae", "r2")
#: What becomes of rows that some feature party lacks.
MissingRows = Literal["intersection", "token"]


def memory_bytes(text: str) -> int:
    """A size such as "1GiB" or "500 MB" in bytes.

    >>> memory_bytes("1.5GiB")
    1610612736

    Raises:
        ValueError: it is none, or too small to work in.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(MB|MiB|GB|GiB)", text)
    if found is None:
        raise ValueError("a size is a number and MB, MiB, GB or GiB, such as '1GiB'")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < _LEAST_MEMORY:
        raise ValueError("a table is not handled in less than 64MiB")
    return size


def _is_memory(text: str) -> str:
    memory_bytes(text)
    return text


#: How much memory a party's rows may take; see `memory_bytes`.
Memory = Annotated[str, StringConstraints(max_length=32), AfterValidator(_is_memory)]


class TableSettings(Settings):
    """How a table is written, and what its numbers become.

    Attributes:
        separator, encoding, decimal, skip_lines: how a CSV is written; the last are lines above
            that of the names.
        missing: further texts that mean a missing cell; or a table of them by column, with "*" for
            those that are not named. Words such as NA mean it among numbers and dates anyway,
            unless a column is named with none.
        dates: columns of text that hold dates, and how they are written, such as "%d.%m.%Y";
            several ways are joined with "|".
        numbers: columns of text that hold numbers with currency, grouping or percent, and the sign
            before their decimals: "." or ",".
        id_type: "text" compares ids letter by letter; "number" reads 007, 7 and 7.0 as the same.
        bins: most bins a number is told by (`vfl.datasets.encode.BinnedColumn`); 0 standardises
            numbers.
        tokenizer: name of a pretrained model on this machine; of a data set of texts, its tokens
            take the place of words, and of a table, a party whose only column holds texts gets
            their tokens. Rows hold a token's number plus 1, and 0 is padding.
        length: tokens, words or items a row; without it a table's texts have 256 tokens.
    """

    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","
    encoding: Literal[
        "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "latin-1"
    ] = "utf-8"
    decimal: Literal[".", ","] = "."
    skip_lines: int = Field(default=0, ge=0, le=10_000)
    missing: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    dates: dict[str, str] | None = None
    numbers: dict[str, Literal[".", ","]] | None = None
    id_type: Literal["text", "number"] = "text"
    bins: int = Field(default=0, ge=0, le=MAX_BINS)
    tokenizer: Annotated[str, StringConstraints(max_length=64)] | None = None
    length: int | None = Field(default=None, ge=1, le=65536)


class DataSettings(TableSettings):
    """Where rows come from when one process plays every party.

    Attributes:
        source: the spec of a data set (`vfl list sources`; picture sets may be joined with a plus),
            or a CSV or Parquet file, relative to the experiment's file.
        id: column that names a row, needed when parties have files of their own.
        id_rules: how ids of several parties are written alike before a private alignment.
        alignment: a private alignment of the parties' own tables, which gives their rows and the
            order: its folder, relative to the experiment's file; in a project its name.
        missing_rows: "intersection" leaves rows out that some party lacks; "token" keeps each row
            of the label party that at least one feature party has, and the label party learns a
            vector that stands for a cut that is missing.
        validation, test: shares of the rows.
        split: how rows are dealt to those parts. "stratified" gives every part its share of every
            class, which needs all labels in one process; "shuffled" looks at no label. None is
            shuffled in a training of one's own, and stratified in a comparison or a grid of
            classes.
        memory: the rows of a table lie on disk, in files without a name in TMPDIR, and handling
            them takes about so much memory, such as "1GiB"; None keeps them in memory. A party's
            own file says it for its own table.
        rows: use at most so many rows: the first ones of a data set by name, and of tables as many
            that the seed draws, of those that all parties have.
        folds, fold: test on the rows of one fold, counted from 1, of so many equal ones with as
            many rows of each class; `validation` is then a share of the other rows.
        side, classes: pictures of so many pixels a side, rows of the first so many classes only.
        vocabulary: how many different numbers words may have, padding and the unknown word
            included.
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
        columns: names or globs of its columns; None takes an even share in file order.
        source: its own table, or the party.toml that describes it (in process only).
        branches: so many branches have its rows, dealt out evenly by the public seed, and train the
            bottom together, with differential privacy (in process only).
        shape: one row as a picture (channels, height, width); None keeps a row of columns.
        augment: what it does with its own rows each time that it trains on them, as specs joined
            with a plus (`vfl list augmentations`); in a project its own file says it.
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
        party: its name; if it is one of `parties` too, it has columns of its own.
        column: the label column of its table.
        task: whether labels are classes or numbers.
        top: the top model, as a spec.
        loss: what a training minimises, as a spec (`vfl list losses`); None is cross-entropy of
            classes and the squared error of numbers.
        class_weight: "balanced" lets every class count as much as any other in the training loss,
            however rare; how rare each is stays at the label party.
        hits: also tell how often the label is among the so many largest outputs; 0 does not.
        calibration: how probabilities are mended at the end of a training, by curves fitted to the
            validation rows: "isotonic" regression or "platt" scaling. Every answer of the run is
            calibrated from then on.
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
    """A further label party with labels of its own over the same rows and bottoms (multi-task).

    Attributes:
        weight: of its gradients at the feature parties, where those of [label] weigh 1.
        source: its own table, where parties have tables of their own.
    """

    weight: float = Field(default=1.0, gt=0, le=1e6)
    source: str | None = None


class MiddleSettings(Settings):
    """A third party without data between bottoms and head (U-shape): every cut goes to it.

    Attributes:
        party: its name.
        width: of its output, which is the head's input; `label.top` is the head.
        model: what it computes of the merged cuts, as the spec of a bottom.
        codec: of its output and the gradient of that; `codec` is of the cuts.
    """

    party: PartyName = "middle"
    width: int = Field(default=32, ge=1, le=65536)
    model: Spec = "mlp:hidden=64,last=relu"
    codec: Spec = "none"


class TrainSettings(Settings):
    """How long and how fast; the same at every party.

    Attributes:
        epochs, batch_size: passes over the training rows, and rows of one exchange.
        optimizer, learning_rate, momentum, weight_decay: of every party's own optimiser, whose
            other options are in its spec (`vfl list optimizers`); momentum is of sgd.
        schedule: how the learning rate changes from epoch to epoch, as a spec (`vfl list
            schedules`); "none" leaves it.
        warmup_steps: over so many first batches the learning rate rises linearly to what the
            schedule says; 0 begins with it.
        clip_norm: the gradient of each party's own weights is scaled down to this Euclidean norm
            before a step; 0 leaves it. No party knows the norm of all parties' gradients.
        checkpoint_every: exchanges between two checkpoints.
        in_flight: cuts that may await their gradients at once. 1 is exact; m hides all but a share
            of a slow link's delay, and each gradient is then that of weights m - 1 steps old.
        local_steps: optimiser steps of every party for one exchange: after the first, each goes on
            with the same batch, the cuts that it received and the gradients that it received.
        local_angle: such a further step weighs a row by the cosine of the angle by which its cut
            has turned since the exchange, at the label party its gradient, and by 0 beyond so many
            degrees; 0 weighs all rows alike.
        precision: "bfloat16" runs forward passes in automatic mixed precision; what crosses is
            float32 either way.
        compile: whether bottoms, top and middle run as `torch.compile` makes them, for networks
            whose steps are long enough to make up for the minutes that compiling may take.
        patience: stop after so many epochs without a better validation measure; 0 never stops.
        keep: "best" ends with the weights of the best validation measure, "last" with the last.
        measure: what of the validation rows says which epoch is better.
        shuffle: "full" permutes all training rows in each epoch. "blocks" permutes blocks of them,
            and then the rows of each window of blocks (`vfl.session.schedule.shuffled_in_blocks`),
            and deals rows to the parts of the split block by block: for a table on disk.
        block_rows, window_blocks: training rows of a block, and blocks of a window.
        warm_start: name of a run that ended well; each party begins with its own part of that run,
            its encoder and its weights, in place of new ones. Optimisers begin anew.
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
        """Rows that are dealt to the parts of the split at a time; 0 deals all at once."""
        return 0 if self.shuffle == "full" else self.block_rows


class DPSettings(Settings):
    """Differential privacy of the models a training leaves: DP-SGD at every party.

    Attributes:
        epsilon: the budget. Alone it gives the noise with which all epochs spend it; beside
            `noise` the training ends before the step that would exceed it.
        noise: multiplier of the whole network: the deviation of all halves' noise together over
            their joint sensitivity, both in units of each half's clip norm.
        delta: of every epsilon; below one over the training rows.
        clip: bound of one row's gradient at one party, of all its weights together.
        clips: other bounds, by party. A row's gradient grows with the root of a party's columns,
            and each half's noise with its bound: equal ones favour the party of few columns.
        clip_by: "half" bounds all weights of a half together; "layer" bounds each of n layers by
            clip / sqrt(n).
        quantile: the share of rows whose gradients should stay as they are: each clip norm starts
            at `clip` and follows it, by noisy counts that the noise pays for; None keeps the norms.
        sampling: "poisson" draws each row for each step by itself, so that batches are uneven and
            some are empty; "shuffled" takes every row once an epoch and gains nothing by sampling.
        accountant: what epsilons are computed with; "pld" needs vfl[dp] at every party.
        unit: what the epsilon is of: a "record", or a "client", all rows of one branch of the party
            that has branches; every half then clips the mean gradient of each branch's rows.
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
    """What a party records of its own side of a training; nothing unless it is asked for.

    Attributes:
        phases: whose frames are kept, of train, validation and test; one name needs no list.
        epochs: epochs whose training and validation frames are kept; empty means every epoch.
        snapshots: epochs between two snapshots of the party's own weights; 0 keeps none.
    """

    phases: Annotated[
        tuple[Literal["train", "validation", "test"], ...], BeforeValidator(several)
    ] = ()
    epochs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(several)] = ()
    snapshots: int = Field(default=0, ge=0)

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return bool(self.phases) or self.snapshots > 0


class FederationSettings(Settings):
    """Addresses and patience of a deployment, all at the label party.

    Attributes:
        superlink: host:port of the SuperLink, as the feature parties reach it.
        stream_host: name or address feature parties reach the stream at (in the certificate).
        stream_port: where the SuperLink listens for the streams of all sessions; 0 takes a free
            port at each start, and the SuperLink's own port has both, which needs the same host.
        bind_host: address the stream listens on; empty means `stream_host`.
        certificate_days: how long the SuperLink's certificate is good; `vfl up` renews it when a
            third is left, 30 days at most.
        join_timeout_s: how long parties may take to come at the start.
        step_timeout_s: how long a party may take for one frame.
        rejoin_window_s: how long a cut stream may take to come back.
        max_restarts: how often a training goes on from its last checkpoint after a party was lost.
        restart_timeout_s: how long the lost party may take to come back then; Flower itself needs
            a minute to notice that a process is gone.
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
    """How `vfl align` finds the rows that all parties have.

    Attributes:
        protocol: how common ids are found, as a spec.
        table: whose rows: of the parties' tables, or of the files they predict. The alignment is
            named by `data.alignment`.
    """

    protocol: Spec = "ecdh"
    table: Literal["source", "predict"] = "source"


def with_model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings in which `secure` names the model that `model` named.

    >>> with_model({"model": "trees", "seed": 3})
    {'seed': 3, 'secure': 'trees'}

    Raises:
        ValueError: both are given, or `model` is no text.
    """
    if "model" not in content:
        return content
    rest = {name: value for name, value in content.items() if name != "model"}
    if not isinstance(content["model"], str):
        raise ValueError(f"'model' is a text, such as '{NETWORK}'")
    if content["model"] == NETWORK:
        return rest
    if rest.get("secure", "none") != "none":
        raise ValueError("'model' and 'secure' both say how the parties compute together")
    return rest | {"secure": content["model"]}


class Experiment(Settings):
    """A whole experiment; every default is written out in the run folder's config.toml.

    Attributes:
        name: of the experiment, and the beginning of its runs' names.
        purpose: what the sessions are for, in words that parties consent to (`consent.purposes`);
            a run keeps the one that it was trained for.
        seed: what everybody may know is drawn from it: splits and the order of the rows.
        codec, defense: specs of what compresses cuts and gradients, and of what protects them.
        merge: what the label party's top reads, as the spec of a merger: the cuts side by side
            ("concat"), their sum, or another.
        secure: what of the cuts the label party learns: "none" hides none, "sum" tells it their
            sum alone (with merge = "sum"); with "beaver" no party has first-layer weights either,
            with "permuted" none has any weight; with "pea" parties have rows of their own, and
            nobody sees a row, a gradient or a model but the last.
            In a file `model` may stand in its place: "network" is "none", and another model, such
            as "trees", is a whole of its own that takes the place of bottoms, cuts and top.
        dp: differential privacy of the models; None trains without.
        trace: what every party records when one process plays them all; in a federation each
            party's own file says it.
        middle: a third party without data that computes between bottoms and head; None without.
        tasks: further label parties, each with a task and a top of its own; None without.
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
        """Share of rows that every epoch ends with."""
        return self.data.validation

    @property
    def test(self) -> float:
        """Share of rows that a training ends with."""
        return self.data.test

    @property
    def missing_rows(self) -> MissingRows:
        """How the session treats rows that some feature party lacks."""
        return self.data.missing_rows

    @property
    def has_own_tables(self) -> bool:
        """Whether one process plays parties whose tables it names."""
        return any(party.source for party in self.parties.values())

    @property
    def own_sources(self) -> dict[str, str]:
        """Each party's table or party file; none where all columns are of one table."""
        found = {name: party.source for name, party in self.parties.items() if party.source}
        if found:
            found.setdefault(self.label.party, self.data.source)
            found |= {task.party: task.source or self.data.source for task in self.tasks or ()}
        return found

    @property
    def is_table(self) -> bool:
        """Whether rows come from files rather than from a bundled data set."""
        has_files = any(party.source for party in self.parties.values())
        return has_files or not is_named_set(self.data.source)

    def task_of(self, party: str) -> LabelSettings:
        """What a label party learns."""
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
    """The experiment with some settings changed, checked again as a whole.

    Raises:
        ConfigError: an override that is no setting, or a result that is not consistent.
    """
    content = override(experiment.model_dump(mode="json", exclude_none=True), overrides)
    return check(content, Experiment, where="the overrides")


def _located(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with paths that mean the same from every working directory."""
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
