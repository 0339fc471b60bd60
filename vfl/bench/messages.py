"""What the benchmark's processes tell each other: one line of JSON each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vfl.bench.network import LOOPBACK, Network
from vfl.bench.patterns import Send
from vfl.config import Experiment
from vfl.config.toml import Settings

#: The monolith, all parties in one process, the same on computed lines, the label party of a
#: stream, or a party that joins it.
Role = Literal["monolith", "inprocess", "model", "host", "join"]


class Door(Settings):
    """Where a stream listens; without a CA it has no TLS."""

    host: str
    port: int
    ca_pem: str = ""

    def seen(self, network: Network, source: str, target: str) -> Door:
        """The same door, as `source` finds it at `target`."""
        return self.model_copy(update=network.reach(source, target, self.port)._asdict())


class Job(Settings):
    """One measurement, or one process's part in it.

    Attributes:
        workload: its name.
        warmup_steps: steps before the clock starts.
        steps: timed steps.
        secure: the secure mode.
        session: name of the stream's session.
        tokens: what each party shows at the door; a party that joins gets its own only.
        tls: whether the host opens its stream with TLS.
        host: address the host listens at.
        door: where the party that joins finds it.
        wan: what the parties' lines do, where that is computed.
    """

    role: Role
    workload: str
    seed: int
    warmup_steps: int
    steps: int
    secure: str = "none"
    session: str = ""
    tokens: dict[str, str] = Field(default_factory=dict, repr=False)
    tls: bool = False
    host: str = LOOPBACK
    door: Door | None = None
    wan: str = ""


class Measurement(Settings):
    """What one process measured over the timed steps.

    Attributes:
        cpu_ms: user and system time of all its threads, a step.
        wall_ms: median duration of a step.
        final_loss: mean training loss over the steps of the last epoch; None without labels.
    """

    cpu_ms: float
    wall_ms: float
    final_loss: float | None = None


class WanJob(Settings):
    """One party's part in a training over a slow link.

    Attributes:
        party: whom this process plays.
        experiment: what is trained; its data set is cut into strips, one a feature party.
        tests: how often an epoch the test rows are asked.
        rows: use only so many rows of the data set.
        session: name of the stream's session.
        tokens: what each party shows at the door; a feature party gets its own only.
        host: address the label party listens at.
        door: where a feature party finds the stream.
        wan: what the parties' lines do, where that is computed: one process plays all of them.
    """

    party: str
    experiment: Experiment
    tests: int
    rows: int | None = None
    session: str = ""
    tokens: dict[str, str] = Field(default_factory=dict, repr=False)
    host: str = LOOPBACK
    door: Door | None = None
    wan: str = ""


class Mark(Settings):
    """How far a training has come.

    Attributes:
        exchanges: batches trained.
        seconds: time of training so far, at the label party; tests do not count.
        accuracy: share of the test rows that are classified right.
    """

    exchanges: int
    seconds: float
    accuracy: float


class Marks(Settings):
    """What a training over a slow link led to; a feature party has nothing to tell."""

    marks: tuple[Mark, ...] = ()


class LinesJob(Settings):
    """Whom a process plays that tries a network, and where it listens."""

    party: str
    host: str


class Play(Settings):
    """Messages to exchange: rounds of (from, to, bytes); see `vfl.bench.patterns`."""

    rounds: tuple[tuple[Send, ...], ...]


class Played(Settings):
    """When a party began to send and had received everything, on the machine's clock."""

    began: float | None = None
    ended: float | None = None


class CodecJob(Settings):
    """Cuts to send in every way there is.

    Attributes:
        width: of the cut.
        k: values of each row that are kept by whatever keeps some.
        rounds: turns of each way.
        seed: of the batches.
    """

    width: int
    k: int
    rounds: int
    seed: int


class CodecRow(Settings):
    """What one way to send a cut costs.

    Attributes:
        width, k: see `CodecJob`.
        name: a codec's spec, or what else was measured.
        compiled: whether loops ran as machine code.
        rounds: how often it was measured.
        encode_us, decode_us: medians in microseconds, header and checksum of a frame included.
        encode_ratio, decode_ratio: the same in times of torch.topk.
        wire_bytes: median of the bytes that travel; 0 where none do.
        wire_ratio: the same in sizes of the dense float32 cut.
    """

    width: int
    k: int
    name: str
    compiled: bool
    rounds: int
    encode_us: float
    decode_us: float
    encode_ratio: float
    decode_ratio: float
    wire_bytes: float
    wire_ratio: float


class CodecRows(Settings):
    """All ways to send cuts of one width."""

    rows: tuple[CodecRow, ...]
