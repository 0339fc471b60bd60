"""A party's own file: its data, its secret, and its consent. It never leaves the party."""

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
from vfl.core.address import Address, parse_address
from vfl.core.errors import ConfigError
from vfl.core.storage import close_to_others, database_beside, is_database, sweep

MAX_RANKS = 64
ThreadCount = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]
#: Environment variable of a party's service with the number of ranks from its command.
RANKS_VARIABLE = "VFL_RANKS"
_STORE_FOLDERS = ("sessions", "runs", "flower", "alignments", "clients")
#: Names of all files that vfl puts into a party's store.
STORE = frozenset({*_STORE_FOLDERS, "secret", "secret-for-trials"})


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
        raise ValueError("a password does not belong in a URL; a proxy in front can add it")
    if url.scheme == "http" and host != "localhost" and not _is_loopback(host):
        raise ValueError("an address outside this machine requires https")
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class OwnData(TableSettings):
    """The party's own table.

    Attributes:
        source: CSV or Parquet file, relative to the party file; a Parquet file in an object store,
            "s3://BUCKET/KEY"; a database, "duckdb:FILE" or SQLAlchemy's URL; or a function of one's
            own, "package.module:function", that returns a pandas or Arrow table.
        query, predict_query: queries to a database; without `predict_query`, the rows of `query`
            are predicted.
        predict: file with the rows to predict; None predicts those of `source`.
        id: column that identifies a row for all parties; several joined with plus signs, with an
            alignment.
        columns: names or globs of feature columns; by default all but id and label, for a party
            that sends a cut.
        label: label column, at the label party.
        shape: one row as a picture (channels, height, width).
        memory: approximate memory for its rows, which are on disk, in unnamed files in the store,
            such as "1GiB"; None keeps them in memory.
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
    """Flatten nested tables, as TOML parses a dotted key without quotes, to full names."""
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

    A session beyond them is refused, and the error states the difference.

    Attributes:
        codecs, defenses, secure: accepted specs, as globs ("randtopk:*"). secure = ["sum*"] refuses
            every session in which the label party would see this party's cuts. A glob compares
            text; `ranges` limits the numbers of a spec.
        models: accepted models, as globs of specs: "network" is the split network of bottoms and a
            top. With another model, such as "trees:*", messages contain data about the cells
            themselves.
        ranges: least and greatest value of a number of the terms ("train.learning_rate" = [0, 1]),
            or of an option of a plug-in ("defense.clipped_noise.norm" = [0.5, 10]). Where this
            field has no entry, the usual range applies; `vfl check` shows all ranges.
        min_parties: least number of feature parties in a secure mode; by default 2, or 1 with a
            dealer.
        parties: names that must be among the feature parties of a secure mode; their keys are
            pinned, so that no other party can impersonate them.
        members: other parties that a session may have, as globs of their names; a session with any
            other party is refused. `vfl init` lists those of the project.
        purposes: accepted purposes of sessions, as globs; ["credit risk*"] refuses a session
            without a purpose.
        modes: accepted modes: train, evaluate, predict, align; and serve, which is not accepted by
            default.
        max_width: values of a row of the cut, before and after the codec.
        max_epochs: epochs of one training, including those in which a defense prepares the bottom.
        max_bytes: bytes that one session may send and receive, estimated before it starts.
        max_parameters: parameters of the bottom in a session's terms, with those of defense and
            codec; a bottom from this file has no limit.
        max_memory_bytes: memory of that bottom, its optimiser, the activations of a batch, and of
            defense and codec.
        max_parties: parties with columns in one session.
        max_batch_size: rows of one training batch.
        max_rows: different rows of the table in one session.
        min_common: least number of ids that all parties of an alignment have; a smaller number is
            not disclosed.
        min_ids: least number of ids in every other party's set in an alignment.
        max_alignments: alignments a day, under all names together; each may disclose whether one
            more id is in this party's table.
        max_id_ratio: ids in other parties' sets in the alignments of a day, all sets together and
            padding included, for each id of this party: a larger number could be a dictionary of
            ids.
        reuse_alignment_keys: whether alignments with `ecdh:reuse=true` may keep this party's keys
            for later ones; the other party then sees which of its ids recur, or how many are new.
        explains: feature parties that may learn the contribution of each of their own columns to
            the answer of a row, which depends on this party's labels through the trees; see
            `--explain`.
        missing_rows: accepted treatments of rows that some party lacks; with "token" the label
            party learns which of its rows this party has, including rows that others lack.
        max_rows_per_second: rows a second that all serving sessions may query; further rows are
            refused temporarily.
        max_queries: queries of any single row in one serving session; None sets no limit.
        max_epsilon: epsilon of one row's inputs, under all names of runs together; a session
            without an epsilon is then refused. None sets no limit.
        max_statistics: exact statistics of its rows, such as the bads of a cell or a correlation,
            that sessions under all names may disclose together; each number counts as one; see
            `protect=shared`. None sets no limit.
        min_changed_rows: a session with such statistics is refused if its training rows differ from
            those of an earlier one in some rows, but in fewer than this number: the difference of
            the statistics would disclose these rows. 1 accepts any difference.
        min_dp_noise: least `dp.noise`; a training without DP-SGD, or with less noise, is refused.
        max_dp_epsilon: largest epsilon of one row from a training's models; a training without
            DP-SGD is refused, and one whose delta is not below one over the number of training
            rows.
        compile: whether a session may use `train.compile`, which runs a C++ compiler here.
        label_parties: further label parties that may receive this party's cuts for their own tasks.
        middle: parties that may receive this party's cuts in place of the label party, without
            labels.
        warm_starts: runs from whose weights at this party a training may start, as globs of their
            names.
        versions: vfl versions that the party accepts; empty means the installed one.
        bundles: Flower app bundles that its SuperNode runs: "vfl" for the one whose only code is
            the installed vfl's, or the SHA-256 of another.
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
    """Address of the label party's service, and limits of one client.

    Attributes:
        host, port: address; port 0 takes a free one. Outside this machine with TLS only.
        token: file with the clients' token, readable by its owner only; made if missing.
        certificate, key: PEM files for TLS.
        client_ca: PEM file of the authority that must have signed clients' certificates (mutual
            TLS).
        wait_ms: time that a batch waits for further requests, in milliseconds.
        timeout_s: time limit of a request.
        max_ids: rows of one request; a query has no more rows.
        max_body_bytes: size of one request's body.
        max_requests_per_second: requests of one token; the burst is that of one second.
        max_rows_per_day: rows of one token, in a day of UTC; "off" is no limit.
        probability_decimals: decimals to which probabilities and contributions are rounded; "off"
            does not round.
        trusted_proxy: addresses of proxies in front, whose last X-Forwarded-For identifies the
            client.
        explain: whether answers contain contributions of parties, which needs a single query of 32
            more rows.
        cache_rows: number of answers cached in memory; 0 disables the cache.
        partial: whether boosted trees answer without an absent feature party; a network trained
            with `data.missing_rows = "token"` always does.
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
        host, port: address; port 0 takes a free one. Outside this machine with TLS only.
        allow: addresses and networks of allowed readers, such as "10.0.4.0/24".
        certificate, key: PEM files for TLS.
        spans: URL of a collector of OpenTelemetry (OTLP over HTTP) that receives a span for each
            session, such as "http://127.0.0.1:4318/v1/traces"; outside this machine with https
            only. None sends nothing. It needs the extra `otel`.
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
    """Connection of this party's SuperNode to the SuperLink, and its ranks.

    Attributes:
        superlink: host:port of the SuperLink.
        ca: certificate of the authority that signed the SuperLink's.
        key: this node's private key; the label party has registered its public part.
        api_port: local port of the SuperNode for its own processes; each SuperNode needs another
            one.
        ranks: number of processes that share every batch of a training at this party, each with
            rows and model in memory; at a feature party, the largest number.
        ranks_at: HOST:PORT at which rank 0 waits for ranks on other machines, in the party's own
            network, over TLS; empty if all are on one machine.
        ranks_key: secret shared by all machines of the party, 64 hexadecimal digits in a file that
            only its owner can read. Anyone with it can act as a rank, which sees the party's
            gradients and can change its weights.
        rank_host: name or address of a further rank of the label party on this machine, for feature
            parties; empty means the experiment's `stream_host`.
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
    """Identity keys of this party and of its peers, for a secure mode.

    Attributes:
        key: this party's private identity key.
        peers: folder with the public keys of the other feature parties, and of a dealer, each
            NAME.pub, received by a channel that the label party does not control.
    """

    key: str = "identity.key"
    peers: str = "peers"


class OwnFile(Settings):
    """A file that one party keeps private; a subclass defines its settings."""

    _path: Path | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; relative paths in it start at its own folder.

        Raises:
            ConfigError: the file is missing, or contains mistakes (all are listed).
        """
        found = read_toml(path, cls)
        found._path = path.resolve()
        return found

    def beside(self, name: str) -> Path:
        """Resolve a path in the file, relative to the file's folder."""
        return self._path.parent / name if self._path else Path(name)

    @property
    def path(self) -> Path:
        """Path of the file itself."""
        assert self._path is not None, "it was read from a file"
        return self._path

    @property
    def sha256(self) -> str:
        """SHA-256 of the present file; empty if the settings were not read from a file."""
        return "" if self._path is None else hashlib.sha256(self._path.read_bytes()).hexdigest()

    @property
    def locations(self) -> Locations:
        """Lines of the settings in the file."""
        return Locations.of(self._path) if self._path else Locations()


class PartyFile(OwnFile):
    """All of one party's own settings.

    Attributes:
        party: name of the party, as in the experiment.
        role: "dealer" has no data and is the dealer of others' shared first layers; "middle" has
            none and computes between the bottoms of others and the label party's head.
        data: settings of the party's table; only the role "data" has a table.
        store: folder for this party's weights, secret and run records.
        bottom: a bottom instead of the experiment's; "package.module:Class" is allowed.
        augment: augmentations of its own rows in each training step, as specs joined with a plus;
            functions of tensors, "package.module:function", are allowed.
        device: device of the party's models, such as "cuda".
        threads: torch's threads in a training of one rank. With 1, weights are the same bit for bit
            on every machine; with more they may differ by rounding. "auto" times its own model with
            1, 2, 4, ... threads at the start of the training, and uses more only if each doubling
            makes a step at least 1.2 times faster.
        trace: recording of this party's own end of a training; it is not announced to other
            parties.
        serve: settings of a label party's own service, unless options of `vfl serve` override them.
        monitor: address at which `vfl up` serves metrics of this party; None serves none.
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
        """Settings of the party's table, if the party has data."""
        assert self.data is not None, "this party has no table"
        return self.data

    @property
    def ranks(self) -> int:
        """Number of its ranks in a training: its command's option, else `node.ranks`.

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
        """Host and port of `node.ranks_at`; None where all ranks are on one machine."""
        return parse_address(self.node.ranks_at) if self.node.ranks_at else None

    @property
    def source_path(self) -> Path | str:
        """Path of the table, or its database."""
        return self._source(self.table.source)

    @property
    def predict_path(self) -> Path | str:
        """Path of the table of rows to predict, or its database."""
        return self._source(self.table.predict or self.table.source)

    def _source(self, name: str) -> Path | str:
        folder = self._path.parent if self._path else Path()
        return database_beside(name, folder) if is_database(name) else self.beside(name)

    def run_path(self, run: str) -> Path:
        """Folder of a run at this party."""
        return self.store_path / "runs" / run

    @property
    def predicts_others(self) -> bool:
        """Return whether the rows to predict differ from those of the table."""
        return self.table.predict is not None or self.table.predict_query is not None

    def alignment_path(self, name: str, *, of_predicted: bool = False) -> Path:
        """Folder of an alignment's versions at this party: for its table, or for rows to predict.

        Both are the same if the party's file names no other rows to predict.
        """
        rows = "predict" if of_predicted and self.predicts_others else "source"
        return self.store_path / "alignments" / name / rows

    @property
    def store_path(self) -> Path:
        """Path of the store."""
        return self.beside(self.store)


def tidy_store(store: Path) -> None:
    """Remove the remains of killed writes in a party's store, and make its folders private.

    The mode of a store with other files stays unchanged, but vfl's own folders in it are made
    private. In such a store, only vfl's own folders and files are cleaned.
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
    """Return whether the file names its party, which only a party's own file does."""
    return path.name == "party.toml" or "party" in first_keys(path)
