"""Rounds, bytes and errors of operations on shared tensors, compared with CrypTen.

Two holders and a dealer run one program (`vfl.tensors.Party`) as threads of this process; the
benchmark counts their messages. With `--write`, the benchmark writes all result rows to
docs/results/tensor_operations.csv, and some of them to docs/results/tensors.md.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks import harness
from vfl import tensors
from vfl.config.toml import Settings
from vfl.core.frame import HEADER_BYTES
from vfl.core.seeds import use_one_thread
from vfl.core.text import csv_text
from vfl.mpc.many.members import LocalMembers, Member
from vfl.mpc.rules import name_of

PAGE = Path(__file__).parents[1] / "docs" / "results" / "tensors.md"
FILE = PAGE.with_name("tensor_operations.csv")
#: Operations that the page shows.
ON_PAGE = ("x * y", "x < y", "relu", "max_pool2d", "exp", "x / y", "sigmoid", "softmax of 10")
_BEGIN, _END = "<!-- operations -->\n\n", "\n<!-- end -->"
_PEER = Path(__file__).parent / "peers" / "crypten_operations.py"
COUNT = 1000
_TABLE, _IMAGES, _FILTERS = (10, COUNT // 10), (1, 10, 10, 10), (1, 10, 3, 3)

#: Operations as functions of x and of a second tensor; the second is used where an argument must be
#: positive, or where there are two arguments.
OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "x * y": lambda x, y: x * y,
    "x ** 2": lambda x, y: x**2,
    "x < y": lambda x, y: x < y,
    "x == y": lambda x, y: x == y,
    "x @ y": lambda x, y: x.reshape(_TABLE[::-1]) @ y.reshape(_TABLE),
    "conv2d": lambda x, y: functional.conv2d(x.reshape(_IMAGES), x[:90].reshape(_FILTERS)),
    "relu": lambda x, y: torch.relu(x),
    "abs": lambda x, y: torch.abs(x),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "clamp": lambda x, y: x.clamp(-1, 1),
    "max of 10": lambda x, y: x.reshape(-1, 10).amax(1),
    "argmax of 10": lambda x, y: x.reshape(-1, 10).argmax(1),
    "max_pool2d": lambda x, y: functional.max_pool2d(x.reshape(_IMAGES), 2),
    "avg_pool2d": lambda x, y: functional.avg_pool2d(x.reshape(_IMAGES), 2),
    "exp": lambda x, y: torch.exp(x),
    "log": lambda x, y: torch.log(y),
    "reciprocal": lambda x, y: torch.reciprocal(y),
    "x / y": lambda x, y: x / y,
    "sqrt": lambda x, y: torch.sqrt(y),
    "rsqrt": lambda x, y: torch.rsqrt(y),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "tanh": lambda x, y: torch.tanh(x),
    "gelu": lambda x, y: functional.gelu(x),
    "softmax of 10": lambda x, y: torch.softmax(x.reshape(-1, 10), 1),
    "log_softmax of 10": lambda x, y: torch.log_softmax(x.reshape(-1, 10), 1),
    "layer_norm of 10": lambda x, y: functional.layer_norm(x.reshape(-1, 10), (10,)),
    "batch_norm": lambda x, y: functional.batch_norm(x.reshape(_IMAGES), None, None, training=True),
    "cross_entropy of 10": lambda x, y: functional.cross_entropy(
        x.reshape(-1, 10), torch.arange(COUNT // 10) % 10
    ),
}


class OperationRow(Settings):
    """One operation.

    Attributes:
        name: name in `OPERATIONS`.
        rounds: number of sequential messages.
        holder_bytes: payload bytes per element that both holders send together.
        dealer_bytes: payload bytes per element that the dealer sends.
        error: largest error, compared with torch in float32.
        peer_rounds, peer_bytes, peer_error: the same values for CrypTen; None if it was not run or
            does not report them.
    """

    name: str
    rounds: int
    holder_bytes: float
    dealer_bytes: float
    error: float
    peer_rounds: int | None = None
    peer_bytes: float | None = None
    peer_error: float | None = None


def bench_tensor_operations(*, crypten: str = "", write: bool = False) -> list[OperationRow]:
    """Measure operations on shares of two holders: rounds, bytes and errors.

    Args:
        crypten: a Python interpreter that has CrypTen; without it, CrypTen is not measured.
        write: whether to write all rows to FILE, and the rows of ON_PAGE to PAGE.
    """
    use_one_thread()
    beside = _peer(crypten) if crypten else {}
    with LocalMembers(2) as members:
        rows = [measured(members, name, beside.get(name, {})) for name in OPERATIONS]
    if write:
        lines = stored(rows)
        FILE.write_text(csv_text(list(lines[0]), lines), encoding="utf-8")
        text = PAGE.read_text()
        head, _, rest = text.partition(_BEGIN)
        PAGE.write_text(f"{head}{_BEGIN}{markdown(lines)}{_END}{rest.partition(_END)[2]}")
    return rows


def measured(members: LocalMembers, name: str, beside: Mapping[str, Any]) -> OperationRow:
    """Measure one operation, run by three parties.

    Args:
        members: two holders and a dealer.
        name: name of the operation.
        beside: CrypTen's values for this operation.
    """
    operation = OPERATIONS[name]
    plain = torch.linspace(-4, 4, COUNT), torch.linspace(0.05, 20, COUNT)

    def shared(member: Member) -> list[Any]:
        party = tensors.Party(member)
        return [party.share(0, (COUNT,), each if member.role == 0 else None) for each in plain]

    operands = members.run(shared)
    before = _sent(members)
    members.hops()
    with torch.no_grad():
        found = members.run(lambda member: operation(*operands[member.role]))
    rounds, after = members.hops(), _sent(members)
    values = members.run(lambda member: found[member.role].get().float_precision())[0]
    holders, dealer = ((after[at] - before[at]) / COUNT for at in (0, 1))
    return OperationRow(
        name=name,
        rounds=rounds,
        holder_bytes=holders,
        dealer_bytes=dealer,
        error=float((values - operation(*plain).float()).abs().max()),
        peer_rounds=beside.get("rounds"),
        peer_bytes=beside.get("bytes"),
        peer_error=beside.get("error"),
    )


def _sent(members: LocalMembers) -> tuple[int, int]:
    """Return the payload bytes that the holders sent, and that the dealer sent."""
    dealer = name_of(members.parties[0].dealer)
    totals = {True: 0, False: 0}
    for each in members.traffic():
        totals[each.sender == dealer] += each.wire_bytes - each.frames * HEADER_BYTES
    return totals[False], totals[True]


def _peer(python: str) -> dict[str, dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
    started = [
        subprocess.Popen([python, "-I", str(_PEER), rank, port], stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    said, _ = started[0].communicate(timeout=600)
    started[1].communicate(timeout=60)
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


def stored(rows: list[OperationRow]) -> list[dict[str, str]]:
    """Return the rows in the form in which FILE stores them."""

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        {
            "operation": row.name,
            "rounds": str(row.rounds),
            "crypten_rounds": text(row.peer_rounds, "d"),
            "holder_bytes": text(row.holder_bytes, ".0f"),
            "crypten_bytes": text(row.peer_bytes, ".0f"),
            "dealer_bytes": text(row.dealer_bytes, ".0f"),
            "error": text(row.error, ".1e"),
            "crypten_error": text(row.peer_error, ".1e"),
        }
        for row in rows
    ]


def markdown(rows: list[dict[str, str]]) -> str:
    """Return the table of PAGE, made from stored rows."""

    def beside(row: dict[str, str], ours: str, theirs: str) -> str:
        return row[ours] + (f" ({row[theirs]})" if row[theirs] else "")

    lines = ["| operation | rounds | holders, bytes | dealer, bytes | error |", "| --- " * 5 + "|"]
    for row in rows:
        if row["operation"] in ON_PAGE:
            rounds = beside(row, "rounds", "crypten_rounds")
            sent = beside(row, "holder_bytes", "crypten_bytes")
            error = beside(row, "error", "crypten_error")
            cells = (f"`{row['operation']}`", rounds, sent, row["dealer_bytes"], error)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


TABLE = harness.table(
    ("operation", "<20", "name"),
    ("rounds", ">6", "rounds"),
    ("holders", ">8.1f", "holder_bytes"),
    ("dealer", ">8.1f", "dealer_bytes"),
    ("error", ">9.1e", "error"),
    ("CrypTen", ">7", "peer_rounds"),
    ("bytes", ">8.1f", "peer_bytes"),
    ("error", ">9.1e", "peer_error"),
)


main = harness.command(bench_tensor_operations, TABLE)


if __name__ == "__main__":
    main()
