"""A party's own file: its data, its secret, and what it consents to. It never leaves the party."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StringConstraints,
)

from vfl.config.experiment import (
    NETWORK,
    Memory,
    MissingRows,
    PartyName,
    TableSettings,
    TraceSettings,
)
from vfl.config.toml import (
    Host,
    Locations,
    OptionalHost,
    OptionalHostPort,
    ReachedAt,
    Settings,
    first_keys,
    read_toml,
    several,
)
from vfl.core.address import Address, parse_address
from vfl.core.errors import ConfigError
from vfl.core.storage import close_to_others, database_beside, is_database, sweep

MAX_RANKS = 64
#: Environment of a party's service: how many ranks its command asked for.
RANKS_VARIABLE = "VFL_RANKS"
_STORE_FOLDERS = ("sessions", "runs", "flower", "alignments", "clients")
#: All that vfl puts into a party's store.
STORE = frozenset({*_STORE_FOLDERS, "secret", "secret-for-trials"})


def _an_address(text: str) -> str:
    return str(ip_address(text))


def _a_network(text: str) -> str:
    return str(ip_network(text))


class OwnData(TableSettings):
    """The party's own table.

    Attributes:
        source: CSV or Parquet file, relative to the party file; a Parquet file in an object store,
            "s3://BUCKET/KEY"; a database, "duckdb:FILE" or the URL that SQLAlchemy knows it by; or
            a function "package.module:function" of one's own that gives a pandas or Arrow table.
        query, predict_query: what is asked of a database; None predicts the rows of `query`.
        predict: file with the rows to predict; None predicts those of `source`.
        id: column both sides name a row by; several joined with plus signs, with an alignment.
        columns: names or globs of feature columns; without them, all but id and label for a party
            that sends a cut.
        label: label column, at the label party.
        shape: one row as a picture (channels, height, width).
        memory: its rows lie on disk, in files without a name in the store, and handling them takes
            about so much memory, such as "1GiB"; None keeps them in memory.
    """

    source: str
    id: str
    predict: str | None = None
    query: str | None = None
    predict_query: str | None = None
    columns: tuple[str, ...] | None = None
    label: str | None = None
    shape: tuple[int, ...] | None = None
    memory: Memory | None = None


def _by_dotted_names(ranges: Any) -> Any:
    """Tables in tables, as TOML reads a dotted key without quotes, by the names in full."""
    if not isinstance(ranges, Mapping):
        return ranges
    found: dict[str, Any] = {}
    for name, value in ranges.items():
        inside = _by_dotted_names(value)
        more = {f"{name}.{key}": one for key, one in inside.items()} if inside is not value else {}
        found |= more or {name: value}
    return found


def _ascends(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError("a range is its least and its most number")
    return ends


Range = Annotated[tuple[float, float], AfterValidator(_ascends)]
RangeName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,127}$")]
Ranges = Annotated[dict[RangeName, Range], BeforeValidator(_by_dotted_names)]


class Consent(Settings):
    """The most a session may ask of this party; more is refused with the difference.

    Attributes:
        codecs, defenses, secure: accepted specs, as globs ("randtopk:*"). secure = ["sum*"]
            refuses every session in which the label party would see this party's cuts. A glob
            compares letters; `ranges` bounds the numbers of a spec.
        models: accepted models, as globs of specs: "network" is the split network of bottoms and a
            top. In another model, such as "trees:*", what crosses is of the cells themselves.
        ranges: least and most of a number of the terms ("train.learning_rate" = [0, 1]), or of a
            plug-in's option ("defense.clipped_noise.norm" = [0.5, 10]), where the party accepts
            another range than the usual one, which `vfl check` shows.
        min_parties: feature parties that a secure mode must have at least; not stated, 2, or 1
            where a third party deals.
        parties: names that must be among the feature parties of a secure mode; their keys are
            pinned, so nobody can play them.
        members: parties that a session may have beside this one, as globs of their names; with
            anybody else in it, it is refused. `vfl init` lists those of the project.
        purposes: accepted purposes of sessions, as globs; ["credit risk*"] refuses a session that
            names no purpose.
        modes: train, evaluate, predict, align; and serve, which a file has to name.
        max_width: values a row of the cut may have, before the codec and behind it.
        max_epochs: epochs of one training, those in which a defense makes the bottom included.
        max_bytes: bytes one session may send and receive, estimated before it starts.
        max_parameters: of the bottom a session names, with what defense and codec put around it;
            a bottom named in this file may have any.
        max_memory_bytes: that bottom, its optimiser, the activations of a batch, and what defense
            and codec need for it may take.
        max_parties: with columns, in one session.
        max_batch_size: rows of one training batch.
        max_rows: different rows of the table that a session may ask for.
        min_common: ids that all parties of an alignment must have; with fewer nobody is told more.
        min_ids: ids that every other party's set must have in an alignment.
        max_alignments: a day, under all names together; each may tell whether one more id is here.
        max_id_ratio: ids of other parties' sets in the alignments of a day, all sets together and
            padding included, for each id of this party's own: more could be a dictionary of ids.
        explains: feature parties that may learn from this party's labels, through what trees make
            of them, what each of their own columns adds to the answer of a row; see `--explain`.
        missing_rows: what may become of rows that some party lacks; with "token" the label party
            learns which of its rows this party has, those that others lack among them.
        max_rows_per_second: that may be asked in all sessions that serve; more is refused for the
            moment.
        max_queries: how often any one row may be asked in one session that serves; None sets no
            limit.
        max_epsilon: of one row's inputs, under all names of runs together; a session without an
            epsilon is refused then. None sets no limit.
        max_statistics: exact statistics of its rows, such as the bads of a cell or a correlation,
            that sessions under all names may show together, each number one; see `protect=shared`.
            None sets no limit.
        min_changed_rows: a session that would show such statistics is refused if its training rows
            differ in some, and in fewer than this, from those of an earlier one: the difference of
            both would tell of these rows. 1 takes any.
        min_dp_noise: a training without DP-SGD, or with less `dp.noise`, is refused.
        max_dp_epsilon: a training without DP-SGD is refused, and one whose models may cost one row
            more than this, or whose delta is not below one over the training rows.
        compile: whether a session may have `train.compile`, which runs a C++ compiler here.
        label_parties: further label parties that may take this party's cuts for their own tasks.
        middle: parties that may take this party's cuts in the label party's place, without labels.
        warm_starts: runs that a training may go on from with this party's weights, as globs of
            their names.
        versions: vfl versions the party agrees to run; empty means the installed one.
        bundles: Flower app bundles its SuperNode runs: "vfl" for the one with no code but the
            installed vfl's, or the SHA-256 of another.
    """

    codecs: tuple[str, ...] = ("*",)
    defenses: tuple[str, ...] = ("*",)
    secure: tuple[str, ...] = ("*",)
    models: tuple[str, ...] = (NETWORK,)
    ranges: Ranges = Field(default_factory=dict, max_length=256)
    min_parties: Annotated[int, Field(ge=1, le=64)] | None = None
    parties: tuple[PartyName, ...] = ()
    members: tuple[str, ...] = ("*",)
    purposes: tuple[str, ...] = ("*",)
    modes: tuple[str, ...] = ("train", "evaluate", "predict", "align")
    max_width: Annotated[int, Field(ge=1)] = 256
    max_epochs: Annotated[int, Field(ge=1)] = 100
    max_bytes: Annotated[int, Field(ge=1)] = 10_000_000_000
    max_parameters: Annotated[int, Field(ge=1)] = 20_000_000
    max_memory_bytes: Annotated[int, Field(ge=1)] = 4_000_000_000
    max_parties: Annotated[int, Field(ge=1)] = 64
    max_batch_size: Annotated[int, Field(ge=1)] = 65_536
    max_rows: Annotated[int, Field(ge=1)] = 100_000_000
    min_common: Annotated[int, Field(ge=1)] = 100
    min_ids: Annotated[int, Field(ge=1)] = 100
    max_alignments: Annotated[int, Field(ge=0)] = 10
    max_id_ratio: Annotated[float, Field(gt=0, le=1e9)] = 20.0
    explains: tuple[PartyName, ...] = ()
    missing_rows: tuple[MissingRows, ...] = ("intersection",)
    max_rows_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10_000.0
    max_queries: Annotated[int, Field(ge=1)] | None = None
    max_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_statistics: Annotated[int, Field(ge=0)] | None = None
    min_changed_rows: Annotated[int, Field(ge=1)] = 20
    min_dp_noise: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_dp_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    compile: bool = False
    label_parties: tuple[PartyName, ...] = ()
    middle: tuple[PartyName, ...] = ()
    warm_starts: tuple[str, ...] = ("*",)
    versions: tuple[str, ...] = ()
    bundles: tuple[Annotated[str, StringConstraints(pattern=r"^(vfl|[0-9a-f]{64})$")], ...] = (
        "vfl",
    )


class ServeSettings(Settings):
    """How the label party's service listens, and what one client may do.

    Attributes:
        host, port: where it listens; port 0 takes a free one. Beyond this machine with TLS only.
        token: file of the token that clients show, readable by its owner alone; made if missing.
        certificate, key: PEM files for TLS.
        client_ca: PEM file of the authority whose certificates clients must have (mutual TLS).
        wait_ms: how long a batch waits for more requests.
        timeout_s: most time for a request.
        max_ids: rows of one request; a query has no more.
        max_body_bytes: of one request.
        max_requests_per_second: of one token; a second's worth may come at once.
        max_rows_per_day: of one token, in a day of UTC; "off" is no limit.
        probability_decimals: to which probabilities and contributions are rounded; "off" tells them
            whole.
        trusted_proxy: addresses of proxies in front, whose last X-Forwarded-For says who asks.
        explain: whether contributions of parties are told; asks for 32 rows more, once.
        cache_rows: answers that are kept in memory; 0 keeps none.
        partial: whether boosted trees answer without a feature party that is away; a network that
            was trained with `data.missing_rows = "token"` always does.
    """

    host: Host = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    wait_ms: float = Field(default=0.0, ge=0, le=1000)
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    max_ids: int = Field(default=256, ge=1, le=1024)
    max_body_bytes: int = Field(default=1 << 20, ge=1, le=1 << 28)
    max_requests_per_second: float = Field(default=10_000.0, gt=0)
    max_rows_per_day: Annotated[int, Field(ge=1, lt=2**53)] | Literal["off"] = 100_000
    probability_decimals: Annotated[int, Field(ge=1, le=9)] | Literal["off"] = 3
    trusted_proxy: Annotated[
        tuple[Annotated[str, AfterValidator(_an_address)], ...], BeforeValidator(several)
    ] = ()
    explain: bool = False
    cache_rows: int = Field(default=0, ge=0)
    partial: bool = False


class MonitorSettings(Settings):
    """Where `vfl up` shows this party's own metrics, for Prometheus.

    Attributes:
        host, port: where it listens; port 0 takes a free one. Beyond this machine with TLS only.
        allow: addresses and networks that may read, such as "10.0.4.0/24".
        certificate, key: PEM files for TLS.
    """

    host: Host = "127.0.0.1"
    port: int = Field(default=9464, ge=0, le=65535)
    allow: Annotated[
        tuple[Annotated[str, AfterValidator(_a_network)], ...], BeforeValidator(several)
    ] = ("127.0.0.1/32", "::1/128")
    certificate: str | None = None
    key: str | None = None


class Node(Settings):
    """How this party's SuperNode reaches the SuperLink.

    Attributes:
        superlink: host:port of the SuperLink.
        ca: certificate of the authority that signed the SuperLink's.
        key: this node's private key, whose public part the label party has registered.
        api_port: local port the SuperNode gives to its own processes; one a SuperNode.
        ranks: processes that share every batch of a training at this party, each with its rows and
            model in memory; at a feature party the most of them.
        ranks_at: HOST:PORT at which rank 0 waits for ranks on other machines, an address of the
            party's own network, to which they come over TLS; empty where all are on one machine.
        ranks_key: the secret that all machines of the party have in common, 64 hexadecimal digits
            in a file that its owner alone can read. Who has it can be a rank, that is see the
            party's gradients and change its weights.
        rank_host: name or address at which feature parties reach a further rank of the label party
            on this machine; empty means the experiment's `stream_host`.
    """

    superlink: ReachedAt = "127.0.0.1:8000"
    ca: str = "ca.pem"
    key: str = "node.key"
    api_port: Annotated[int, Field(ge=1, le=65535)] = 9094
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    ranks_at: OptionalHostPort = ""
    ranks_key: str = "ranks.key"
    rank_host: OptionalHost = ""


class IdentityKeys(Settings):
    """Who this party is to the others, for a secure mode.

    Attributes:
        key: this party's private identity key.
        peers: folder with the public ones of the other feature parties, and of a third party that
            deals, each NAME.pub, given to this party by a way the label party does not control.
    """

    key: str = "identity.key"
    peers: str = "peers"


class OwnFile(Settings):
    """A file that one party keeps to itself; a subclass says what stands in it."""

    _path: Path | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it; relative paths in it start at its own folder.

        Raises:
            ConfigError: the file is missing, or holds mistakes (all are listed).
        """
        found = read_toml(path, cls)
        found._path = path.resolve()
        return found

    def beside(self, name: str) -> Path:
        """A path as the file means it: relative to its own folder."""
        return self._path.parent / name if self._path else Path(name)

    @property
    def path(self) -> Path:
        """The file itself."""
        assert self._path is not None, "it was read from a file"
        return self._path

    @property
    def sha256(self) -> str:
        """SHA-256 of the file as it is now; empty where it was not read from one."""
        return "" if self._path is None else hashlib.sha256(self._path.read_bytes()).hexdigest()

    @property
    def locations(self) -> Locations:
        """Where the settings stand in the file."""
        return Locations.of(self._path) if self._path else Locations()


class PartyFile(OwnFile):
    """Everything one party says about itself.

    Attributes:
        party: its name, as the experiment has it.
        role: "dealer" has no data and deals what shared first layers of others need; "middle" has
            none and computes between the bottoms of others and the label party's head.
        data: its table; only the role "data" has one.
        store: folder for this party's weights, secret and run records.
        bottom: a model of its own instead of the experiment's; "package.module:Class" is allowed.
        augment: what it does with its own rows each time that it trains on them, as specs joined
            with a plus; functions of tensors, "package.module:function", are allowed.
        device: where its models run, such as "cuda".
        trace: what this party records of its own side of a training; nobody else is told.
        serve: how a label party's own service listens, where no option of `vfl serve` says it.
        monitor: where `vfl up` shows metrics of this party; None shows none.
    """

    party: PartyName
    role: Literal["data", "dealer", "middle"] = "data"
    data: OwnData | None = None
    store: str = "store"
    bottom: str | None = None
    augment: str = "none"
    device: str = "cpu"
    consent: Consent = Consent()
    trace: TraceSettings = TraceSettings()
    serve: ServeSettings | None = None
    monitor: MonitorSettings | None = None
    node: Node = Node()
    identity: IdentityKeys = IdentityKeys()

    @property
    def table(self) -> OwnData:
        """What it says of its table; only a party with data is asked."""
        assert self.data is not None, "this party has no table"
        return self.data

    @property
    def ranks(self) -> int:
        """How many ranks it has in a training: its command's option, else `node.ranks`.

        Raises:
            ConfigError: the option is no number from 1 to 64.
        """
        asked = os.environ.get(RANKS_VARIABLE)
        if asked is None:
            return self.node.ranks
        if not asked.isdecimal() or not 1 <= int(asked) <= MAX_RANKS:
            raise ConfigError(
                "this is no number of ranks",
                where=f"the environment variable {RANKS_VARIABLE}",
                want=f"1 to {MAX_RANKS}",
            )
        return int(asked)

    @property
    def ranks_address(self) -> Address | None:
        """Host and port of `node.ranks_at`; None where all ranks are on one machine."""
        return parse_address(self.node.ranks_at) if self.node.ranks_at else None

    @property
    def source_path(self) -> Path | str:
        """The table's path, or its database."""
        return self._source(self.table.source)

    @property
    def predict_path(self) -> Path | str:
        """The table of rows to predict, or its database."""
        return self._source(self.table.predict or self.table.source)

    def _source(self, name: str) -> Path | str:
        folder = self._path.parent if self._path else Path()
        return database_beside(name, folder) if is_database(name) else self.beside(name)

    def run_path(self, run: str) -> Path:
        """Where this party keeps a run."""
        return self.store_path / "runs" / run

    @property
    def predicts_others(self) -> bool:
        """Whether the rows to predict are others than those of the table."""
        return self.table.predict is not None or self.table.predict_query is not None

    def alignment_path(self, name: str, *, of_predicted: bool = False) -> Path:
        """Where this party keeps the versions of an alignment: of its table, or of rows to predict.

        Those are the same where its file names no others.
        """
        rows = "predict" if of_predicted and self.predicts_others else "source"
        return self.store_path / "alignments" / name / rows

    @property
    def store_path(self) -> Path:
        """The store's path."""
        return self.beside(self.store)


def tidy_store(store: Path) -> None:
    """Remove what killed writes left in a party's store, and close its folders to others.

    A store that holds anything vfl did not make stays as open as it is; what vfl makes in it is
    closed all the same. Of such a store only vfl's own folders and files are swept.
    """
    close_to_others(store, STORE)
    sweep(store, STORE)
    for name in _STORE_FOLDERS:
        close_to_others(store / name)
        sweep(store / name)


def read_party_file(path: Path) -> PartyFile:
    """Read a party file; see `OwnFile.read`."""
    return PartyFile.read(path)


def is_party_file(path: Path) -> bool:
    """Whether a file says whose it is, as a party's own file does and an experiment does not."""
    return path.name == "party.toml" or "party" in first_keys(path)
