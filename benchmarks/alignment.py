"""Memory and processor time of each party that aligns its own table.

    python -m benchmarks.alignment --ids 1000000 --ids 10000000 --protocol server_aided
    python -m benchmarks.alignment --ids 10000000 --small 1000 --protocol ecdh:reuse=true --times 3

Each party, and the helper if the protocol has one, runs in its own process. The process reads its
ids from a Parquet file. The process runs its role over the loopback interface, sends messages in
the same pieces as a session, and writes the positions of the common ids. Half of the ids of the
smaller set are common. With --times above 1, the smaller set has new ids in each alignment. Memory
is the peak minus the memory right after the imports.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import harness
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.config import memory_bytes
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError
from vfl.core.frame import from_bytes, to_bytes
from vfl.datasets import TableFormat
from vfl.datasets.alignment.gaps import Found, FoundRole, role_of
from vfl.datasets.alignment.ids import OwnIds
from vfl.datasets.alignment.positions import Agreed, Alignment
from vfl.datasets.alignment.protocols import HELPER, PROTOCOLS, Message, Own, Protocol
from vfl.datasets.alignment.reused import Keys
from vfl.datasets.on_disk import OnDisk
from vfl.session.alignment import Player, Post

PARTIES = ("bank", "label")
_BLOCK_ROWS = 1 << 16
_MOST_BYTES = 1 << 40


class AlignmentJob(Settings):
    """One role of one alignment, as a job for a process.

    Attributes:
        role: name of a party, or "helper".
        protocol: spec of the protocol.
        table: Parquet file of the party's ids; for the helper, a folder for its files.
        memory: memory limit, such as "256MiB".
    """

    role: str
    protocol: str
    table: str
    memory: str


class Ports(Settings):
    """Ports on which the roles listen, by name."""

    ports: dict[str, int]


class AlignmentRow(Settings):
    """Cost of one role in one alignment.

    Attributes:
        role, protocol, memory: see `AlignmentJob`.
        ids: number of ids of the role's party; for the helper, of the party with more ids.
        turn: number of the alignment, from 1 on.
        sent_mb: payload that the role sent, in units of 10^6 bytes.
        peak_mb: peak resident memory minus the memory after the imports, in units of 10^6 bytes.
        cpu_s: processor seconds.
        common: number of common ids that the role found; None for the helper.
        expected: number of ids that are in both tables.
    """

    role: str
    protocol: str
    memory: str
    ids: int = 0
    turn: int = 1
    expected: int = 0
    sent_mb: float
    peak_mb: float
    cpu_s: float
    common: int | None = None

    @property
    def right(self) -> bool:
        """Return whether the right number of common ids was found."""
        return self.common in (None, self.expected)


def bench_alignment(
    ids: Sequence[int] = (1_000_000,),
    protocol: str = "server_aided",
    memory: str = "256MiB",
    small: int | None = None,
    small_at: str = "label",
    times: int = 1,
) -> list[AlignmentRow]:
    """Measure memory and processor time of each party of an alignment.

    Args:
        ids: number of ids of each party in each alignment; half of them are common.
        protocol: server_aided, or ecdh.
        memory: memory limit of each role.
        small: number of ids of the party `small_at`, instead of `ids`.
        small_at: party with fewer ids, label or bank.
        times: number of alignments one after another; all of them share the keys that
            `ecdh:reuse=true` stores.

    Raises:
        BadOptionError: the larger set has too few ids for new common ids in each alignment.
        LostPeerError: a role ended early; its standard error says why.
    """
    rows, by_party = [], {} if small is None else {small_at: small}
    every = [dict.fromkeys(PARTIES, count) | by_party for count in ids]
    for sizes in every:
        most = max(sizes.values()) // max(min(sizes.values()) // 2, 1)
        if times > most:
            raise BadOptionError(
                "the larger set has too few ids for new common ids in each alignment",
                got=f"--times {times}",
                want=f"at most {most}, or a lower --small",
            )
    for sizes in every:
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(1, times + 1):
                harness.say(f"{protocol}: {sizes} ids, {memory}, alignment {turn}")
                rows += _aligned(Path(folder), sizes, protocol, memory, turn)
    return rows


def _aligned(
    folder: Path, sizes: Mapping[str, int], protocol: str, memory: str, turn: int
) -> list[AlignmentRow]:
    roles = [*PARTIES, *([HELPER] if PROTOCOLS.make(protocol).helper else [])]
    tables = {name: folder / name / "ids.parquet" for name in PARTIES}
    small, large = sorted(PARTIES, key=lambda name: (sizes[name], name == "bank"))
    if turn == 1:
        write_ids(tables[large], np.arange(sizes[large]))
    shared, half = sizes[large] - turn * (sizes[small] // 2), sizes[small] // 2
    others = sizes[large] + (turn - 1) * (sizes[small] - half) + np.arange(sizes[small] - half)
    write_ids(tables[small], np.concatenate([shared + np.arange(half), others]))
    with ExitStack() as until_done:
        workers = {name: until_done.enter_context(BenchmarkWorker("alignment")) for name in roles}
        ports = dict[str, int]()
        for name, worker in workers.items():
            table = str(tables.get(name, folder / name))
            worker.put(AlignmentJob(role=name, protocol=protocol, table=table, memory=memory))
            ports |= worker.get(Ports).ports
        for worker in workers.values():
            worker.put(Ports(ports=ports))
        found = [worker.get(AlignmentRow) for worker in workers.values()]
    facts = {"turn": turn, "expected": half}
    return [
        row.model_copy(update=facts | {"ids": sizes.get(row.role, sizes[large])}) for row in found
    ]


def write_ids(path: Path, numbers: np.ndarray) -> None:
    """Write a party's ids in an order that discloses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(len(numbers)).permutation(numbers)
    with pq.ParquetWriter(path, pa.schema([("id", pa.string())])) as writer:
        for start in range(0, len(order), _BLOCK_ROWS):
            own = [f"person-{number:09d}" for number in order[start : start + _BLOCK_ROWS]]
            writer.write_table(pa.table({"id": own}))


class Mesh:
    """Messages between the roles, which are processes; a thread per connection receives.

    Args:
        name: name of this role.
        listener: socket for connections from roles that connect later.
        ports: ports of all roles.
        place: folder for received messages.
    """

    def __init__(self, name: str, listener: Listener, ports: Ports, place: OnDisk) -> None:
        roles, self._place, self._roles = list(ports.ports), place, list(ports.ports)
        self._came: queue.Queue[tuple[str, Message]] = queue.Queue()
        self.sent_bytes = 0
        self._links: dict[str, Connection] = {}
        for other in roles[: roles.index(name)]:
            self._links[other] = Client(("127.0.0.1", ports.ports[other]))
            self._links[other].send_bytes(name.encode())
        for _ in roles[roles.index(name) + 1 :]:
            link = listener.accept()
            self._links[link.recv_bytes().decode()] = link
        for other in self._links:
            threading.Thread(target=self._receive, args=(other,), daemon=True).start()

    def _post(self) -> Post:
        return Post(self._roles, _MOST_BYTES, self._place)

    def send(self, to: str, payload: Message) -> None:
        """Send a message in pieces."""
        post = self._post()
        post.put(to, payload)
        self.sent_bytes += len(payload)
        while post.waiting:
            self._links[to].send_bytes(to_bytes(post.frame()))

    def receive(self) -> tuple[str, Message]:
        """Return the next message from any role."""
        return self._came.get()

    def _receive(self, sender: str) -> None:
        post = self._post()
        while True:
            try:
                frame = from_bytes(self._links[sender].recv_bytes())
            except EOFError:
                return
            if (got := post.take(frame)) is not None:
                self._came.put((sender, got[1]))


def work(parent: Parent) -> None:
    """Run one role in a separate process, because only a new process has its own memory peak."""
    job = parent.get(AlignmentJob)
    folder = Path(job.table) if job.role == HELPER else Path(job.table).parent
    place = OnDisk(folder, memory_bytes(job.memory))
    protocol = PROTOCOLS.make(job.protocol)
    with Listener(("127.0.0.1", 0)) as listener:
        parent.put(Ports(ports={job.role: listener.address[1]}))
        mesh = Mesh(job.role, listener, parent.get(Ports), place)
    with harness.measured() as cost:
        common = _played(job, protocol, mesh, place, folder)
    parent.put(
        AlignmentRow(
            role=job.role,
            protocol=job.protocol,
            memory=job.memory,
            sent_mb=mesh.sent_bytes / 1e6,
            peak_mb=cost.peak_bytes / 1e6,
            cpu_s=cost.cpu_s,
            common=common,
        )
    )


def _played(
    job: AlignmentJob, protocol: Protocol, mesh: Mesh, place: OnDisk, folder: Path
) -> int | None:
    """Run the role and store its result; return the number of common ids, None for the helper."""
    ids, used = None, dict[Path, Keys]()

    def keys(peer: str) -> Keys:
        path = folder / f"{peer}.reused"
        return used.setdefault(path, Keys.kept(path, job.protocol, place))

    if job.role == HELPER:
        player = Player(_helping(protocol, place))
    else:
        form = TableFormat()
        ids = OwnIds.read(Path(job.table), "id", form, f"party '{job.role}'", "plain", place)
        own = Own(job.role, ids.keys, place=place, keys=keys)
        player = Player(role_of(protocol, own, PARTIES, "label", "intersection"))
    while player.found is None:
        for sent in player.advance():
            mesh.send(sent.to, sent.payload)
        if player.found is None:
            player.give(*mesh.receive())
    common = None
    if ids is not None:
        agreed = Agreed("alignment", PARTIES, "plain", job.protocol)
        made = Alignment.of(job.role, agreed, 1, "session", ids, player.found)
        made.keep(folder / "kept")
        common = made.common
    for path, kept in used.items():
        kept.stage(path, job.role)
        Keys.commit(path)
    return common


def _helping(protocol: Protocol, place: OnDisk) -> FoundRole:
    return Found((yield from protocol.helping(PARTIES, "label", place)))


def _mark(row: AlignmentRow) -> str:
    return "" if row.right else f"  WRONG: {row.common} common, of {row.expected}"


TABLE = harness.table(
    ("protocol", "<16", "protocol"),
    ("ids", ">11", "ids"),
    ("setting", ">9", "memory"),
    ("", "<2", lambda row: ""),
    ("role", "<8", "role"),
    ("turn", ">4", "turn"),
    ("sent MB", ">9.3f", "sent_mb"),
    ("peak MB", ">9.0f", "peak_mb"),
    ("CPU s", ">9.1f", "cpu_s"),
    ("", "<0", _mark),
)


main = harness.command(bench_alignment, TABLE, lambda row: row.right)


if __name__ == "__main__":
    main()
