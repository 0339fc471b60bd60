"""Memory of a party that describes its table, loads the table and yields batches.

Each measurement runs in its own process; the measured memory is the peak of this process minus its
memory right after the imports. Loading a table should need at most 1.5 times the bytes of the
party's float32 inputs plus 64 MB. Describing a table, which makes no inputs, should need at most 24
bytes per row for the ids, plus 160 MB. With `--memory`, the rows stay on disk, and a whole epoch of
batches is read in the order of `train.shuffle = "blocks"`. The limit is then the value of that
option, plus one byte per row, 1.5 MB per column for the pages of Parquet, and 64 MB.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv  # pa.csv
import pyarrow.parquet  # pa.parquet
import torch

from benchmarks import harness
from benchmarks.worker import BenchmarkWorker, Parent
from vfl.config import Experiment, PartyFile, memory_bytes
from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError, UserError
from vfl.datasets import PartyData
from vfl.datasets.describe import describe
from vfl.session import Terms, rules
from vfl.session.store.party_folder import own_data

ROWS, COLUMNS = 1_000_000, 20
BLOCK_ROWS = 50_000
BESIDE_BYTES = 64_000_000
PAGE_BYTES = 1_500_000  # bytes for a column of a Parquet file while it is read


IdKind = Literal["text", "number"]
Role = Literal["feature", "label", "mixed", "describe"]
CASES: tuple[tuple[Role, IdKind], ...] = (
    ("feature", "text"),
    ("feature", "number"),
    ("label", "text"),
    ("label", "number"),
    ("mixed", "number"),
    ("describe", "number"),
)
TOWNS, DATE_INPUTS = 20, 5
DESCRIBED_BYTES, DESCRIBED_BYTES_A_ROW = 160_000_000, 24
BATCHES = 100
BATCH_ROWS = 256


class Asked(Settings):
    """Job of one process: the measurement to make.

    Attributes:
        party: name of the party that has the table.
        describes: whether to only describe the table, as `vfl init` does, without loading it.
        reads_epoch: whether to read all batches of an epoch in blocks, instead of only the first
            batch.
    """

    party: PartyFile
    describes: bool = False
    reads_epoch: bool = False


class Peak(Settings):
    """Result of one measurement in a process.

    Attributes:
        peak_bytes: peak resident memory minus the memory after the imports, in bytes.
        load_s: seconds until the data were loaded.
        load_cpu_s: processor seconds until the data were loaded.
        rows_per_cpu_s: number of rows whose inputs were selected per processor second; 0 if not
            measured.
    """

    peak_bytes: int
    load_s: float
    load_cpu_s: float = 0.0
    rows_per_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One measurement.

    Attributes:
        role: role of the party: a feature party, a label party with inputs of its own, or a label
            party that only describes its table; "mixed" is a feature party whose columns include a
            date and a category with gaps.
        ids: content of the id column: text or numbers.
        peak_mb, limit_mb: peak and its limit, in megabytes (10^6 bytes) above the memory after the
            imports.
        load_s: seconds until the data were loaded.
        load_cpu_s, rows_per_cpu_s: see `Peak`.
    """

    role: Role
    ids: IdKind
    peak_mb: float
    limit_mb: float
    load_s: float
    load_cpu_s: float = 0.0
    rows_per_cpu_s: float = 0.0

    @property
    def kept(self) -> bool:
        """Return whether the peak is at most the limit."""
        return self.peak_mb <= self.limit_mb


def bench_memory(
    rows: int = ROWS,
    columns: int = COLUMNS,
    format: Literal["csv", "parquet"] = "csv",
    memory: str | None = None,
    ids: IdKind | None = None,
    role: Role | None = None,
) -> list[MemoryRow]:
    """Measure the peak memory of a party that loads its table, and compare it with the limit.

    Args:
        rows: number of rows of the table, at least 10.
        columns: number of numeric input columns; ids, a label, a category and a date are added to
            them.
        format: file format of the table.
        memory: value of data.memory of the party, such as 1GiB; its rows then stay on disk.
        ids: measure only this content of the id column, text or number.
        role: measure only this role; a party that describes its table makes no inputs and has no
            memory option.

    Raises:
        BadOptionError: there are too few rows, or there is no such role.
        UserError: the operating system does not report the peak memory of a process.
        LostPeerError: a measurement ended early; its standard error says why.
    """
    cases = [
        (one, kind)
        for one, kind in CASES
        if role in (None, one) and ids in (None, kind) and (memory is None or one != "describe")
    ]
    if rows < 10 or not cases:
        got = f"{rows} rows, {role}, {ids} ids"
        raise BadOptionError("nothing to measure", got=got, want="10 rows, and a case of CASES")
    if not sys.platform.startswith("linux"):
        raise UserError(
            "the peak memory of a process can be read only under Linux", got=sys.platform
        )
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / f"table.{format}"
        harness.say(f"writing {table.name}: {rows} rows, {columns} columns")
        write_table(table, rows, columns)
        found = []
        for one, kind in cases:
            harness.say(f"{one} party, {kind} ids")
            asked = Asked(
                party=_party(table, one, kind, memory),
                describes=one == "describe",
                reads_epoch=memory is not None,
            )
            peak = _measure(asked)
            limit = _limit_bytes(one, rows, columns, memory)
            sizes = (peak.peak_bytes / 1e6, limit / 1e6)
            took = (peak.load_s, peak.load_cpu_s, peak.rows_per_cpu_s)
            found.append(MemoryRow(one, kind, *sizes, *took))
    return found


def _limit_bytes(role: Role, rows: int, columns: int, memory: str | None) -> float:
    if memory is not None:
        return memory_bytes(memory) + rows + columns * PAGE_BYTES + BESIDE_BYTES
    if role == "describe":
        return DESCRIBED_BYTES + DESCRIBED_BYTES_A_ROW * rows
    width = columns + (TOWNS + 1 + DATE_INPUTS if role == "mixed" else 0)
    return 1.5 * 4 * rows * width + BESIDE_BYTES


def write_table(path: Path, rows: int, columns: int) -> None:
    """Write random numbers, ids of both kinds in random order, and a label, block by block.

    A tenth of the cells of the column "town" is missing.
    """
    draw = np.random.default_rng(0)
    numbers = draw.permutation(rows)
    writer = None
    for start in range(0, rows, BLOCK_ROWS):
        own = numbers[start : start + BLOCK_ROWS]
        block = {f"x{n}": draw.normal(3, 7, len(own)).round(4) for n in range(columns)}
        texts = pc.utf8_lpad(pa.array(own).cast(pa.string()), width=7, padding="0")
        texts = pc.binary_join_element_wise("c", texts, "")
        paid = draw.integers(0, 2, len(own))
        codes = draw.integers(0, TOWNS, len(own))
        code = pa.array(codes, mask=draw.random(len(own)) < 0.1)
        town = pa.array([f"town {code}" for code in range(TOWNS)]).take(code)
        day = pa.array(draw.integers(15_000, 19_000, len(own)), pa.int32()).cast(pa.date32())
        others = {"paid": paid, "town": town, "day": day}
        table = pa.table({"text": texts, "number": own, **block, **others})
        writer = writer or _writer(path, table.schema)
        writer.write_table(table)
    assert writer is not None, "there are rows"
    writer.close()


def _writer(path: Path, schema: pa.Schema) -> pa.csv.CSVWriter | pa.parquet.ParquetWriter:
    if path.suffix == ".parquet":
        return pa.parquet.ParquetWriter(path, schema)
    return pa.csv.CSVWriter(path, schema)


def _party(table: Path, role: Role, ids: IdKind, memory: str | None) -> PartyFile:
    data: dict[str, Any] = {"source": str(table), "id": ids, "columns": ["x*"], "memory": memory}
    data["id_type"] = ids
    if role in ("label", "describe"):
        data["label"] = "paid"
    if role == "mixed":
        data["columns"] += ["town", "day"]
        data |= {} if table.suffix == ".parquet" else {"dates": {"day": "%Y-%m-%d"}}
    content = {"party": "bank", "data": data, "store": str(table.parent / "store")}
    return PartyFile.model_validate(content)


def _measure(asked: Asked) -> Peak:
    with BenchmarkWorker("memory") as worker:
        worker.put(asked)
        return worker.get(Peak)


TABLE = harness.table(
    ("party", "<9", "role"),
    ("ids", "<8", "ids"),
    ("peak MB", ">9.1f", "peak_mb"),
    ("limit MB", ">10.1f", "limit_mb"),
    ("load s", ">8.1f", "load_s"),
    ("CPU s", ">8.1f", "load_cpu_s"),
    ("rows / CPU s", ">14.0f", "rows_per_cpu_s"),
    ("", "<0", lambda row: "" if row.kept else "  over the limit"),
)


def measure(asked: Asked) -> Peak:
    """Load a party's data and take batches, or describe its table."""
    party = asked.party
    if asked.describes:
        with harness.measured() as load:
            describe(party.source_path, None, None, party.table.label)
        return Peak(peak_bytes=load.peak_bytes, load_s=load.wall_s)
    train = {"shuffle": "blocks" if asked.reads_epoch else "full", "batch_size": BATCH_ROWS}
    content = {"parties": {party.party: {}}, "train": train | {"epochs": 1}}
    # The split has few test rows, because an evaluation stores the scores of its rows.
    if asked.reads_epoch:
        content["data"] = {"validation": 0.0, "test": 0.01}
    terms = Terms.of(Experiment.model_validate(content), "train", "memory")
    with harness.measured() as whole:
        with harness.measured() as load:
            data = own_data(party, terms, "classification")
        with harness.measured() as reading:
            taken = _batches_taken(terms, data, asked.reads_epoch)
    return Peak(
        peak_bytes=whole.peak_bytes,
        load_s=load.wall_s,
        load_cpu_s=load.cpu_s,
        rows_per_cpu_s=taken / reading.cpu_s if asked.reads_epoch else 0.0,
    )


def _batches_taken(terms: Terms, data: PartyData, whole_epoch: bool) -> int:
    """Take the batches of an epoch, or the first `BATCHES`; return the number of their rows."""
    assert data.inputs is not None, "the party has columns"
    taken = 0
    for exchange in rules.schedule(terms, data.split):
        if not exchange.trains or (not whole_epoch and exchange.step == BATCHES):
            break
        for own in (data.inputs, data.labels):
            if own is not None:
                own.index_select(0, torch.from_numpy(exchange.rows))
        taken += len(exchange.rows)
    return taken


def work(parent: Parent) -> None:
    """Measure once and end, because only a new process has its own memory peak."""
    parent.put(measure(parent.get(Asked)))


main = harness.command(bench_memory, TABLE, lambda row: row.kept)


if __name__ == "__main__":
    main()
