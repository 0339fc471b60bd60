"""One of vfl's three parties in a private workload: it prepares once, then runs on a signal.

`modelled` runs all three parties in one process, over computed network links: it returns exact
bytes, the number of sequential messages, and the least time that these bytes and messages allow.
All compared systems exchange the same control messages. The adapter of another system takes the
definition of these messages from `benchmarks/peers/talk.py`, because the adapter imports no part of
vfl.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor

from benchmarks import harness
from benchmarks.emulation import LinkModel, Wan
from benchmarks.mpc_workloads import (
    LEARNING_RATE,
    Example,
    Workload,
    image_scores,
    workload_named,
)
from benchmarks.worker import Parent
from vfl import tensors
from vfl.config.toml import Settings
from vfl.core.errors import ConfigError
from vfl.mpc import Rules, Trio, make_party
from vfl.mpc.channel import bytes_by_phase
from vfl.mpc.engine import traffic
from vfl.mpc.many.members import LocalMembers, Member
from vfl.mpc.permuted import function
from vfl.mpc.ring import matmul
from vfl.mpc.rules import NAMES, P0, P1, P2, Mode
from vfl.mpc.secure_dpsgd import inverse_root
from vfl.mpc.shares import SharedTensor
from vfl.mpc.three_party.network import Network
from vfl.mpc.three_party.party import Party
from vfl.transport import Admission, Credential, Hello, TcpHub, TcpLink, TransportLink

#: For each party, the parties whose connections it accepts, and the parties to which it connects.
LISTENS = {P0: (P1,), P1: (), P2: (P0, P1)}
CALLS = {P0: (P2,), P1: (P0, P2), P2: ()}
_JOIN_S = 60.0
_TRIES = 3


class Assignment(Settings):
    """The role of a process.

    Attributes:
        rank: number of the party: 0, 1 or 2.
        parties: number of parties.
        system: name of the compared system, such as "spu-semi2k".
        host: address at which the process listens.
        device: name of the network device with this address.
        session: name of the session.
        token: token with which vfl's parties are admitted.
    """

    rank: int
    parties: int
    system: str
    host: str
    device: str
    session: str = ""
    token: str = Field(default="", repr=False)


class Port(Settings):
    """Port on which a process listens; 0 if no other party connects to it."""

    port: int


class Endpoints(Settings):
    """Host and port of every party, by rank, as one party reaches them."""

    endpoints: tuple[tuple[str, int], ...]


class DecoderStep(Settings):
    """A decoder's work for one token: logits after the last token, and the largest one's index.

    All fields of this message are public. The decoder has rotary positions, RMSNorm and gated SiLU.
    The decoder's weights are those of `vfl.llm.private_decoder.linear_layers`, in which the factors
    of norms are part of the following layers.

    Attributes:
        layers, heads: their numbers.
        epsilon: constant epsilon of the norms.
        cos, sin: cosines and sines of the rotations at the new tokens' positions; axes (steps, head
            width).
        past: number of tokens whose keys and values are cached, in arrays "0.keys", "0.values",
            "1.keys" ...
    """

    layers: int
    heads: int
    epsilon: float
    cos: list[list[float]]
    sin: list[list[float]]
    past: int


class Task(Settings):
    """One run.

    Attributes:
        system: name of the system, such as "fast"; vfl's party processes run every system of vfl.
        workload: its name.
        session: name of the session of this run, for which new keys are agreed.
        rows, widths, training, function: see `benchmarks.mpc_workloads.Workload`.
        rate: factor by which a training step multiplies the gradient, which is a sum over the rows.
        fresh: whether inputs are opened within the run, not before.
        ahead: whether dealing takes place before the measured time; otherwise the dealer deals
            within the measured time, when the other parties ask for material.
        arrays: npz file with inputs, weights, targets and expected results; "" for vfl's parties,
            which draw these from the same seed.
        decoder: the step of a decoder, if the task is not a network or function; only for other
            systems.
    """

    system: str
    workload: str
    session: str
    rows: int
    widths: tuple[int, ...]
    training: bool
    function: str
    rate: float
    fresh: bool = False
    ahead: bool = False
    arrays: str = ""
    decoder: DecoderStep | None = None


class Ready(Settings):
    """Report that preparation is done; the second such report says that the run ended."""


class Go(Settings):
    """Signal to all parties to start at one time, or, after the run, to reveal the results.

    Attributes:
        at: time of the start on the machine's clock, in seconds.
    """

    at: float


class Turn(Settings):
    """Measurements of one process in one turn, from the turn's start to the turn's end.

    Attributes:
        began, ended: times at which the turn started and ended, on the machine's clock, in seconds.
        cpu_ms: user and system time of all threads of the process between these two times.
        offline_ms: time of the work before the start that every turn repeats; 0 if there is none.
        bytes_setup, bytes_offline, bytes_online: bytes that this party sent; None if the party does
            not count them.
        max_error: largest error compared with float64 in plaintext, at the party that has the
            result.
        wrong_tokens: number of tokens that a decoder chose differently from plaintext, at the same
            party.
    """

    began: float
    ended: float
    cpu_ms: float
    offline_ms: float = 0.0
    bytes_setup: int | None = None
    bytes_offline: int | None = None
    bytes_online: int | None = None
    max_error: float | None = None
    wrong_tokens: int | None = None


class Part:
    """The program of one party in a workload.

    Args:
        party: this party, with keys that all parties agreed on.
        workload: the workload, equal at all parties.
        example: inputs at P0 and P1, with weights and targets; None at P2.
    """

    def __init__(self, party: Party, workload: Workload, example: Example | None) -> None:
        self._party = party
        self._workload = workload
        self._example = example
        self._network: Network | None = None

    def prepare(self, *, fresh: bool = False) -> None:
        """Share all values, and open those that are opened before a run; this counts as setup.

        Args:
            fresh: whether inputs are opened within the run, and therefore not in this method.
        """
        party, workload, example = self._party, self._workload, self._example
        inputs = example.inputs if example else None
        if workload.function:
            self._inputs = self._owned(P0, (workload.rows,), inputs, "inputs")
            return
        self._inputs = self._columns(inputs)
        weights = example.weights if example and party.role == P1 else None
        self._network = Network.share(party, workload.layers, P1, weights)
        targets = example.targets if example else None
        bits = party.rules.delta_bits
        self._targets = self._owned(P1, (workload.rows, 1), targets, "targets", bits)
        if not fresh:
            (self._inputs,) = party.open(self._inputs, phase="setup")

    def deal_ahead(self) -> None:
        """Let P2 deal everything that `execute` will need, if the mode allows it."""

        def follow(party: Party) -> None:
            self._copy_for(party).execute()

        self._party.deal(follow)

    def execute(self) -> SharedTensor | None:
        """Run the workload; return the outputs as shares, or None after a training step."""
        party, workload = self._party, self._workload
        if workload.function:
            asked = function(workload.function)
            return party.apply(self._inputs, asked, workload.name, value=True, slope=False)[0]
        assert self._network is not None, "prepared before"
        if not workload.training:
            return self._network.infer(party, self._inputs)
        self._network.train_step(party, self._inputs, self._targets, "cross_entropy", LEARNING_RATE)
        return None

    def results(self, outputs: SharedTensor | None) -> dict[str, Tensor]:
        """Reveal the results to P1, for the comparison with plaintext."""
        if outputs is None:
            assert self._network is not None, "a network was trained"
            return self._network.reveal(self._party, P1)
        found = self._party.reveal(outputs, "outputs", P1)
        return {} if found is None else {"": found}

    def _columns(self, inputs: Tensor | None) -> SharedTensor:
        """Share half of the columns from P0 and half from P1, as in a vertical federation."""
        rows, width = self._workload.rows, self._workload.widths[0]
        half = -(-width // 2)
        left = self._owned(P0, (rows, half), None if inputs is None else inputs[:, :half], "inputs")
        rest = None if inputs is None else inputs[:, half:]
        return left.beside(self._owned(P1, (rows, width - half), rest, "inputs"))

    def _owned(
        self, owner: int, shape: Sequence[int], values: Tensor | None, where: str, bits: int = -1
    ) -> SharedTensor:
        own = values if self._party.role == owner else None
        return self._party.share(owner, shape, own, where, bits)

    def _copy_for(self, party: Party) -> Part:
        part = Part(party, self._workload, None)
        part._inputs = self._inputs
        if self._network is not None:
            part._targets = self._targets
            part._network = Network(self._network.layers, self._network.weights)
        return part


class RootPart:
    """The program of one party for 1/sqrt on shares of two holders; the dealer sees no value.

    Args:
        member: one of the two holders, or the dealer, with keys that all parties agreed on.
        workload: the workload, equal at all parties.
        example: values at the holders; None at the dealer.
    """

    def __init__(self, member: Member, workload: Workload, example: Example | None) -> None:
        self._member, self._workload, self._example = member, workload, example

    def prepare(self, *, fresh: bool = False) -> None:
        """Share all values."""
        own = self._example.inputs if self._example and self._member.role == P0 else None
        self._inputs = self._member.share(P0, (self._workload.rows,), own, "inputs")

    def deal_ahead(self) -> None:
        """Do nothing: the dealer waits for no message, so its work is within the measured time."""

    def execute(self) -> SharedTensor | None:
        """Run the workload."""
        return inverse_root(self._member, self._inputs)

    def results(self, outputs: SharedTensor | None) -> dict[str, Tensor]:
        """Reveal the results to P1, for the comparison with plaintext."""
        assert outputs is not None, "a function has outputs"
        found = self._member.reveal(outputs, "outputs", P1)
        return {} if found is None else {"": found}


class ImagePart:
    """The program of one party for a network of images on shares, written with `vfl.tensors`.

    Args:
        member, workload, example: see `RootPart`; P0 has the images, and P1 has the weights.
    """

    def __init__(self, member: Member, workload: Workload, example: Example | None) -> None:
        self._party, self._workload, self._example = tensors.Party(member), workload, example
        self._role = member.role

    def prepare(self, *, fresh: bool = False) -> None:
        """Share all values."""
        example = self._example or Example.of(self._workload)  # the dealer needs the shape only
        self._images = self._party.share(P0, example.inputs.shape, self._own(example.inputs))
        self._weights = {
            name: self._party.share(P1, each.shape, self._own(each))
            for name, each in example.weights.items()
        }

    def deal_ahead(self) -> None:
        """Do nothing: the dealer waits for no message, so its work is within the measured time."""

    def execute(self) -> Any:
        """Run the network, and return the scores as shares."""
        with torch.no_grad():
            return image_scores(self._images, self._weights)

    def results(self, outputs: Any) -> dict[str, Tensor]:
        """Reveal the scores to both holders."""
        found = outputs.get().float_precision().double()
        return {} if self._example is None else {"": found}

    def _own(self, values: Tensor) -> Tensor | None:
        return None if self._example is None else values


@dataclass(frozen=True, slots=True)
class Modelled:
    """Result of one workload in one mode on computed network links, without computation time.

    Attributes:
        seconds: latest time on the parties' clocks, in seconds.
        limit_s: least time of any protocol with these bytes and sequential messages.
        hops: number of sequential messages.
        bytes_setup, bytes_offline, bytes_online: bytes that all parties sent, frame headers
            included.
        max_error: largest error, compared with float64 in plaintext.
    """

    seconds: float
    limit_s: float
    hops: int
    bytes_setup: int
    bytes_offline: int
    bytes_online: int
    max_error: float


#: Systems of vfl: the modes of three parties, and shares of two holders (`RootPart`, `ImagePart`).
SYSTEMS = ("thesis", "fast", "holders", "shares")


def rules_of(workload: Workload, system: str) -> Rules | None:
    """Return a mode's rules; for 1/sqrt, which is steep near 0, both modes use thesis mode's bits.

    Returns:
        None for holders, whose shares have no modes.

    Raises:
        ConfigError: the system does not support the workload.
    """
    if (system == "shares") != (workload.function == "cnn"):
        raise ConfigError(
            "networks of images run in mode shares, and nothing else does",
            got=f"{workload.name}, {system}",
            want="--mode shares with cnn-b1-inference or cnn-b16-inference",
        )
    if system == "shares":
        return None
    if system == "holders":
        if workload.function != "rsqrt":
            raise ConfigError(
                "mode holders runs only 1/sqrt",
                got=workload.name,
                want="rsqrt-1, rsqrt-16, rsqrt-128",
            )
        return None
    mode: Mode = "thesis" if system == "thesis" else "fast"
    return Rules(mode, bits=23 if workload.function == "rsqrt" else 0)


def modelled(
    workload: Workload, rules: Rules | None, wan: Wan, *, fresh: bool = False, ahead: bool = True
) -> Modelled:
    """Run the workload in this process; the network links are computed after the preparation.

    Args:
        workload: workload to run.
        rules: protocol rules, which include the mode; None for holders.
        wan: network link of every party.
        fresh: whether inputs are opened within the run, not before.
        ahead: whether P2 deals before the clocks start; only for fast mode.
    """
    example = Example.of(workload)
    terms = {"workload": workload.name}
    parties: Trio | LocalMembers = Trio(rules, terms) if rules else LocalMembers(2, terms=terms)
    with parties as trio:
        parts = [_part(one, workload, None if one.role == P2 else example) for one in trio.parties]
        trio.run(lambda party: parts[party.role].prepare(fresh=fresh))
        before = bytes_by_phase(trio.traffic())
        if ahead:
            trio.run(lambda party: parts[party.role].deal_ahead())
        model = _lines(trio, wan)
        outputs = trio.run(lambda party: parts[party.role].execute())
        seconds, hops, most = model.seconds, model.hops, max(model.bytes_sent().values())
        after = bytes_by_phase(trio.traffic())
        found = trio.run(lambda party: parts[party.role].results(outputs[party.role]))[P1]
    return Modelled(
        seconds,
        wan.limit_s(most, hops),
        hops,
        before["setup"],
        after["offline"] - before["offline"],
        after["online"] - before["online"],
        max(float((found[key] - value).abs().max()) for key, value in example.wanted.items()),
    )


def _part(
    party: Party | Member, workload: Workload, example: Example | None
) -> Part | RootPart | ImagePart:
    if isinstance(party, Member) and workload.function == "cnn":
        return ImagePart(party, workload, example)
    if isinstance(party, Member):
        return RootPart(party, workload, example)
    return Part(party, workload, example)


def products(workload: Workload, mode: str) -> list[tuple[int, int, int]]:
    """Return the shapes of a holder's matrix products: rows, inner width, columns.

    On shares, a product is two ring products at each holder, e (d + v) + u d. If fast mode leaves
    the inputs with their owner, it is one ring product: half of X_i (W_i + D), and half of E V.
    """
    forward = [(workload.rows, one.inputs, one.outputs) for one in workload.layers]
    first, rest = forward[:1], forward[1:]
    if workload.training:
        first += [(inner, rows, columns) for rows, inner, columns in first]
        rest += [(inner, rows, columns) for rows, inner, columns in rest]
        rest += [(rows, columns, inner) for rows, inner, columns in forward[1:]]
    return first * (1 if mode == "fast" else 2) + rest * 2


def matmul_ms(shapes: Sequence[tuple[int, int, int]]) -> float:
    """Return the time of the ring products alone on one thread; the fastest of three runs."""
    pairs = [
        (torch.ones(rows, inner, dtype=torch.int64), torch.ones(inner, columns, dtype=torch.int64))
        for rows, inner, columns in shapes
    ]

    def multiply() -> None:
        for left, right in pairs:
            matmul(left, right)

    return 1000 * min(harness.timed(multiply, time.perf_counter) for _ in range(_TRIES))


def _lines(trio: Trio | LocalMembers, wan: Wan) -> LinkModel:
    """Put computed network links into all channels; no frame may be in transit."""
    model = LinkModel(NAMES, wan)
    for one, other in combinations(trio.parties, 2):
        there, back = one.channels[other.role], other.channels[one.role]
        # The links of a `Trio` are those of `vfl.mpc.in_process`, which report why they stop.
        ends = cast("tuple[TransportLink, TransportLink]", (there.link, back.link))
        there.link, back.link = model.between(NAMES[one.role], NAMES[other.role], ends)
    return model


class Links:
    """This party's two connections, without TLS, as in the compared systems.

    Args:
        assignment: role of the process.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._hub: TcpHub | None = None
        self._links: dict[int, TransportLink] = {}
        if callers := LISTENS[assignment.rank]:
            known = {NAMES[each]: Credential(NAMES[each], assignment.token) for each in callers}
            admission = Admission(assignment.session, known)
            self._hub = TcpHub(assignment.host, 0, admission, plaintext=True)
        self.port = self._hub.port if self._hub else 0

    def connect(self, endpoints: Endpoints) -> dict[int, TransportLink]:
        """Return the links to the two other parties, by role."""
        assignment, callers = self._assignment, LISTENS[self._assignment.rank]
        hello = Hello(assignment.session, NAMES[assignment.rank], assignment.token)
        for role in CALLS[assignment.rank]:
            self._links[role] = TcpLink.connect(
                *endpoints.endpoints[role], hello, None, plaintext=True
            )
        if self._hub is not None:
            self._hub.wait_all([NAMES[each] for each in callers], _JOIN_S)
            self._links |= {each: self._hub.link(NAMES[each]) for each in callers}
        return self._links

    def close(self) -> None:
        """Close the links and the listening port."""
        for link in self._links.values():
            link.close()
        if self._hub is not None:
            self._hub.close()


@lru_cache(maxsize=1)
def _example(name: str) -> Example:
    return Example.of(workload_named(name))


def play(rank: int, links: dict[int, TransportLink], task: Task, parent: Parent) -> Turn:
    """Prepare a run, wait for the signal to start, and run."""
    workload = workload_named(task.workload)
    rules = rules_of(workload, task.system)
    party = make_party(rank, links, rules) if rules else Member(rank, links, holders=2)
    party.agree({"workload": task.workload, "fresh": task.fresh}, task.session)
    example = None if rank == P2 else _example(task.workload)
    part = _part(party, workload, example)
    part.prepare(fresh=task.fresh)
    before = bytes_by_phase(traffic(party))
    offline_ms = 1000 * harness.timed(part.deal_ahead, time.monotonic) if task.ahead else 0.0
    parent.put(Ready())
    begin_at = parent.get(Go).at
    time.sleep(max(0.0, begin_at - time.monotonic()))
    began, busy = time.monotonic(), time.process_time()
    outputs = part.execute()
    ended, cpu_ms = time.monotonic(), 1000 * (time.process_time() - busy)
    after = bytes_by_phase(traffic(party))
    parent.put(Ready())
    parent.get(Go)  # no party reveals its result before all bytes were counted
    found = part.results(outputs)
    error = None
    if found and example is not None:
        error = max(float((found[key] - want).abs().max()) for key, want in example.wanted.items())
    return Turn(
        began=began,
        ended=ended,
        cpu_ms=cpu_ms,
        offline_ms=offline_ms,
        bytes_setup=before["setup"],
        bytes_offline=after["offline"] - before["offline"],
        bytes_online=after["online"] - before["online"],
        max_error=error,
    )


def work(parent: Parent) -> None:
    """Run workloads until the standard input ends."""
    assignment = parent.get(Assignment)
    links = Links(assignment)
    parent.put(Port(port=links.port))
    try:
        connected = links.connect(parent.get(Endpoints))
        parent.put(Ready())
        for task in parent.each(Task):
            parent.put(play(assignment.rank, connected, task, parent))
    finally:
        links.close()
