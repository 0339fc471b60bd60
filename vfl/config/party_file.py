"""A party's own file, with its data, secret and consent; the file never leaves the party."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

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
from vfl.core.address import Address, is_loopback, parse_address
from vfl.core.errors import ConfigError
from vfl.core.sources import database_beside, is_database
from vfl.core.storage import close_to_others, sweep

MAX_RANKS = 64
ThreadCount = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]
#: Environment variable by which a party's command passes the requested number of ranks to the
#: party's service.
RANKS_VARIABLE = "VFL_RANKS"
_STORE_FOLDERS = ("sessions", "runs", "flower", "alignments", "clients")
#: Names of all files and folders that vfl writes into a party's store.
STORE = frozenset({*_STORE_FOLDERS, "secret", "secret-for-trials", "row-rate"})


def _an_address(text: str) -> str:
    return str(ip_address(text))


def _a_network(text: str) -> str:
    return str(ip_network(text))


def _a_collector(text: str) -> str:
    url = urlsplit(text)
    host = url.hostname or ""
    if url.scheme not in ("http", "https") or not host:
        raise ValueError("want a URL such as http://127.0.0.1:4318/v1/traces")
    if url.username is not None or url.password is not None:
        raise ValueError(
            "a URL with a user name or password; a proxy between vfl and the collector can add them"
        )
    if url.scheme == "http" and not is_loopback(host):
        raise ValueError("an address outside this machine requires https")
    return text


class OwnData(TableSettings):
    """Settings of the party's own table.

    Attributes:
        source: CSV or Parquet file, relative to the party file. Alternatives: a Parquet file in an
            object store, "s3://BUCKET/KEY"; a database, "duckdb:FILE" or an SQLAlchemy URL; or a
            function, "package.module:function", that returns a pandas or Arrow table.
        query, predict_query: SQL queries to a database, for the rows of the table and for the rows
            to predict; without `predict_query`, the rows of `query` are predicted.
        predict: file with the rows to predict; None predicts the rows of `source`.
        id: column that identifies a row at all parties; with an alignment, several columns may be
            joined with plus signs.
        columns: names or globs of feature columns; by default all columns but id and label, at a
            party that sends a cut.
        label: label column, at the label party.
        shape: axes of one row as an image (channels, height, width).
        memory: approximate memory, such as "1GiB", for rows that are stored on disk in unnamed
            files in the store; None keeps the rows in memory.
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
    """Flatten nested tables to dotted names; TOML parses an unquoted dotted key as tables."""
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
        raise ValueError("a range is a list of its minimum and its maximum")
    return ends


Range = Annotated[tuple[float, float], AfterValidator(_ascends)]
RangeName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,127}$")]
Ranges = Annotated[dict[RangeName, Range], BeforeValidator(_by_dotted_names)]


class Consent(Settings):
    """Limits of this party's consent to sessions.

    A session that exceeds the limits is refused, and the error names the exceeded limits.

    Attributes:
        codecs, defenses, secure: globs of accepted specs ("randtopk:*"). With secure = ["sum*"],
            every session in which the label party would see this party's cuts is refused. A glob
            compares only text; `ranges` limits the numbers in a spec.
        models: globs of specs of accepted models; "network" is the split neural network with
            bottoms and a top. With another model, such as "trees:*", messages contain data about
            single values of this party's table.
        ranges: smallest and largest accepted value of a number in the session's terms
            ("train.learning_rate" = [0, 1]), or of a plug-in's option ("defense.clipped_noise.norm"
            = [0.5, 10]). If this field has no entry for a number, the default range applies; `vfl
            check` shows all ranges.
        min_parties: smallest number of feature parties in a secure mode; by default 2, or 1 with a
            dealer.
        parties: names of parties that must be among the feature parties of a secure mode; their
            keys are pinned, so that no other party can impersonate them.
        members: globs of names of the other parties that a session may have; a session with any
            other party is refused. `vfl init` lists the parties of the project.
        purposes: globs of accepted purposes of sessions; ["credit risk*"] also refuses a session
            without a purpose.
        modes: accepted modes: train, evaluate, predict, align, and serve; serve is not accepted by
            default.
        max_width: largest number of values per row of the cut, before and after the codec.
        max_epochs: largest number of epochs of one training, including epochs in which a defense
            prepares the bottom model.
        max_bytes: largest number of bytes that one session may send and receive: estimated before
            it starts, or counted while it runs (dealers, services, networks on shares).
        max_parameters: largest number of parameters of a bottom model that the session's terms
            define, with defense and codec; a bottom model from this file has no limit.
        max_memory_bytes: largest memory in bytes for a bottom model that the session's terms
            define, with its optimiser, the activations of a batch, defense and codec.
        max_parties: largest number of parties with columns in one session.
        max_batch_size: largest accepted `train.batch_size`; with the Poisson sampling of [dp],
            single batches have more rows.
        max_rows: largest number of different rows of the table in one session.
        min_common: smallest number of common ids of all parties in an alignment; a smaller number
            is not disclosed.
        min_ids: smallest number of ids in each other party's set in an alignment.
        max_alignments: largest number of alignments per day, alignments of all names counted
            together; each alignment may disclose whether one more id is in this party's table.
        max_id_ratio: largest ratio of the number of ids in other parties' sets (over all alignments
            of a day, padding included) to the number of this party's ids; with a larger ratio, a
            set could be a dictionary of all possible ids.
        reuse_alignment_keys: whether alignments with `ecdh:reuse=true` may use this party's keys
            again later; the other party then sees which ids recur, or how many ids are new.
        explains: feature parties that may learn the Shapley value of each of their own columns for
            the prediction of a row; this value depends, through the trees, on this party's labels;
            see `--explain`.
        missing_rows: accepted treatments of rows that some party lacks; with "token", the label
            party learns which of its rows this party has, including rows that other parties lack.
        max_rows_per_second: largest number of rows per second that all serving sessions together
            may query; further rows are refused temporarily.
        max_queries: largest number of queries for any single row in one serving session; None sets
            no limit.
        max_epsilon: largest total epsilon for one row's inputs, over runs of all names; a session
            without an epsilon is then refused. None sets no limit.
        max_statistics: largest number of exact statistics of this party's rows that all sessions
            together may disclose, whatever the sessions' names; such a statistic is the number of
            bad rows in a bin or a correlation; see `protect=shared`. None sets no limit.
        min_changed_rows: smallest number of training rows in which a session with exact statistics
            must differ from each earlier session that had other training rows. With fewer changed
            rows, the difference of both sessions' statistics would disclose these rows, so the
            session is refused. 1 accepts any difference.
        min_dp_noise: smallest accepted `dp.noise`; a training without DP-SGD, or with less noise,
            is refused.
        max_dp_epsilon: largest epsilon of one row for the models of a training. A training is
            refused if it does not use DP-SGD, or if its delta is not below 1 over the number of
            training rows.
        compile: whether a session may use `train.compile`, which runs a C++ compiler on this host.
        label_parties: additional label parties that may receive this party's cuts for their own
            tasks.
        middle: parties without labels that may receive this party's cuts in place of the label
            party.
        warm_starts: globs of names of runs; a training may start from this party's weights in these
            runs.
        versions: vfl versions that the party accepts; an empty list accepts only the installed
            version.
        bundles: Flower app bundles that the party's SuperNode runs: "vfl" for the bundle whose only
            code is the code of the installed vfl, or the SHA-256 of another bundle.
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
    reuse_alignment_keys: bool = False
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
    """Address of the label party's service, and limits for each client.

    Attributes:
        host, port: address of the service; port 0 takes a free port. An address outside this
            machine needs TLS.
        token: file with the clients' tokens, one per line, readable only by its owner; if it is
            missing, it is created with one token.
        certificate, key: PEM files for TLS.
        client_ca: PEM file of the authority that must have signed the clients' certificates (mutual
            TLS).
        wait_ms: time in milliseconds that a batch waits for further requests.
        timeout_s: time limit of a request in seconds.
        max_ids: largest number of rows in one request; a query to the feature parties joins
            requests that wait, and has at most 1,024 rows.
        max_body_bytes: largest size in bytes of a request's body.
        max_requests_per_second: largest number of requests per second with one token; the requests
            of one second may arrive at once.
        max_rows_per_day: largest number of rows per UTC day with one token; "off" sets no limit.
        probability_decimals: number of decimals to which probabilities and contributions are
            rounded; "off" does not round.
        trusted_proxy: addresses of trusted proxies; their last X-Forwarded-For entry identifies the
            client.
        explain: whether a client may request each party's contribution to a prediction; for a
            network, the first such request queries up to 32 further rows.
        cache_rows: number of answers that the service keeps in memory; 0 turns the cache off.
        partial: whether boosted trees answer if a feature party is absent; a network that was
            trained with `data.missing_rows = "token"` always answers.
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
    """Address at which `vfl up` serves this party's own metrics for Prometheus.

    Attributes:
        host, port: address of the metrics; port 0 takes a free port. An address outside this
            machine needs TLS.
        allow: addresses and networks that may read the metrics, such as "10.0.4.0/24".
        certificate, key: PEM files for TLS.
        spans: URL of an OpenTelemetry collector (OTLP over HTTP) that receives one trace span for
            each session, such as "http://127.0.0.1:4318/v1/traces"; an address outside this machine
            needs https. None sends no trace spans. This setting needs the extra `otel`.
    """

    host: Host = "127.0.0.1"
    port: int = Field(default=9464, ge=0, le=65535)
    allow: Annotated[
        tuple[Annotated[str, AfterValidator(_a_network)], ...], BeforeValidator(several)
    ] = ("127.0.0.1/32", "::1/128")
    certificate: str | None = None
    key: str | None = None
    spans: Annotated[str, AfterValidator(_a_collector)] | None = None


class Node(Settings):
    """Connection of this party's SuperNode to the SuperLink, and the party's ranks.

    Attributes:
        superlink: host:port of the SuperLink.
        ca: certificate of the authority that signed the SuperLink's certificate.
        key: this node's private key; the label party has registered the public key.
        api_port: local port of the SuperNode for its own processes; each SuperNode on a machine
            needs its own port.
        ranks: number of processes of this party that share the computation of every batch of a
            training; each process has all rows and the model in memory. At a feature party, this is
            the largest number of processes that the party accepts.
        ranks_at: HOST:PORT in the party's own network at which rank 0 waits over TLS for ranks on
            other machines; empty if all ranks are on one machine.
        ranks_key: file, readable only by its owner, with a secret of 64 hexadecimal digits that all
            machines of the party share. Anyone with this secret can act as a rank, which sees the
            party's gradients and can change its weights.
        rank_host: host name or address at which feature parties reach a further rank of the label
            party on this machine; empty means the experiment's `stream_host`.
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
    """Identity keys of this party and of the other parties.

    Attributes:
        key: this party's private identity key, which signs messages to other parties in a secure
            mode, and the party's session log.
        peers: folder with the public keys of other parties, in files NAME.pub; the party received
            these keys by a channel that the label party does not control.
    """

    key: str = "identity.key"
    peers: str = "peers"


class OwnFile(Settings):
    """Base class for a file that one party keeps private; a subclass defines its settings."""

    _path: Path | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; relative paths in it are relative to the file's folder.

        Raises:
            ConfigError: the file is missing or contains mistakes; the error lists all mistakes.
        """
        found = read_toml(path, cls)
        found._path = path.resolve()
        return found

    def beside(self, name: str) -> Path:
        """Return a path that is a setting of the file, resolved relative to the file's folder."""
        return self._path.parent / name if self._path else Path(name)

    @property
    def path(self) -> Path:
        """Path of the file."""
        assert self._path is not None, "the settings were read from a file"
        return self._path

    @property
    def sha256(self) -> str:
        """SHA-256 of the file as it is now; empty if the settings were not read from a file."""
        return "" if self._path is None else hashlib.sha256(self._path.read_bytes()).hexdigest()

    @property
    def locations(self) -> Locations:
        """Line numbers of the settings in the file."""
        return Locations.of(self._path) if self._path else Locations()


class PartyFile(OwnFile):
    """All settings of one party's own file.

    Attributes:
        party: name of the party, as in the experiment.
        role: "data" for a party with a table. "dealer" has no data and deals randomness for other
            parties' shared first layers. "middle" has no data and computes between the feature
            parties' bottom models and the label party's head.
        data: settings of the party's table; only the role "data" has a table.
        store: folder for this party's weights, its secret and the records of its runs.
        bottom: bottom model that replaces the experiment's; "package.module:Class" is allowed.
        augment: augmentations of the party's rows in each training step, as specs joined with a
            plus; functions of tensors, "package.module:function", are allowed.
        device: device of the party's models, such as "cuda".
        threads: number of torch threads in a training with one rank. With 1, weights are bitwise
            the same on every machine; with more they may differ by rounding. "auto" measures the
            party's own model with 1, 2, 4, ... threads at the start of the training, and doubles
            the number only while a step becomes at least 1.2 times faster.
        trace: recording of this party's own messages in a training; other parties do not learn of
            it.
        serve: settings of the prediction service, which a label party runs; options of `vfl serve`
            override them.
        monitor: address at which `vfl up` serves this party's metrics; None serves no metrics.
    """

    party: PartyName
    role: Literal["data", "dealer", "middle"] = "data"
    data: OwnData | None = None
    store: str = "store"
    bottom: str | None = None
    augment: str = "none"
    device: str = "cpu"
    threads: ThreadCount = 1
    consent: Consent = Consent()
    trace: TraceSettings = TraceSettings()
    serve: ServeSettings | None = None
    monitor: MonitorSettings | None = None
    node: Node = Node()
    identity: IdentityKeys = IdentityKeys()

    @property
    def table(self) -> OwnData:
        """Settings of the party's table; only for a party with data."""
        assert self.data is not None, "this party has no table"
        return self.data

    @property
    def ranks(self) -> int:
        """Number of this party's ranks in a training: its command's option or `node.ranks`.

        Raises:
            ConfigError: the option is not an integer from 1 to 64.
        """
        asked = os.environ.get(RANKS_VARIABLE)
        if asked is None:
            return self.node.ranks
        if not asked.isdecimal() or not 1 <= int(asked) <= MAX_RANKS:
            raise ConfigError(
                "this is not a number of ranks",
                where=f"the environment variable {RANKS_VARIABLE}",
                want=f"1 to {MAX_RANKS}",
            )
        return int(asked)

    @property
    def ranks_address(self) -> Address | None:
        """Host and port of `node.ranks_at`; None if all ranks are on one machine."""
        return parse_address(self.node.ranks_at) if self.node.ranks_at else None

    @property
    def source_path(self) -> Path | str:
        """Path of the party's table, or address of its database."""
        return self._source(self.table.source)

    @property
    def predict_path(self) -> Path | str:
        """Path of the table of rows to predict, or address of its database."""
        return self._source(self.table.predict or self.table.source)

    def _source(self, name: str) -> Path | str:
        folder = self._path.parent if self._path else Path()
        return database_beside(name, folder) if is_database(name) else self.beside(name)

    def run_path(self, run: str) -> Path:
        """Return the folder of a run's files in this party's store."""
        return self.store_path / "runs" / run

    @property
    def predicts_others(self) -> bool:
        """Return whether the rows to predict are in another table than the training rows."""
        return self.table.predict is not None or self.table.predict_query is not None

    def alignment_path(self, name: str, *, of_predicted: bool = False) -> Path:
        """Return the folder of this party's versions of an alignment, in the party's store.

        An alignment of the table and an alignment of the rows to predict have the same folder if
        the party file sets no separate table of rows to predict.
        """
        rows = "predict" if of_predicted and self.predicts_others else "source"
        return self.store_path / "alignments" / name / rows

    @property
    def store_path(self) -> Path:
        """Path of the party's store."""
        return self.beside(self.store)


def tidy_store(store: Path) -> None:
    """Delete files of interrupted writes in a party's store; make the store's folders private.

    If the store folder also contains files that vfl did not write, the folder's mode stays
    unchanged, but vfl's own folders in it are made private. In such a store, only vfl's own folders
    and files are cleaned.
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
    """Return whether a TOML file is a party file: by its name, or by its setting `party`."""
    return path.name == "party.toml" or "party" in first_keys(path)
