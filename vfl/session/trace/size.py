"""How large a trace will be, told before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vfl import compression
from vfl.config import TraceSettings
from vfl.core.errors import ConfigError
from vfl.core.ledger import size
from vfl.core.storage import Seal, pack_weights
from vfl.datasets import Split
from vfl.session import Exchange, Terms
from vfl.session.trace.store import (
    ENTRY_BYTES,
    EXCHANGE_BYTES,
    FILE_BYTES,
    FRAME_BYTES,
    PARTY_BYTES,
    ROW_BYTES,
    TraceHeader,
)

#: Frames of about so many bytes are held in memory before they become a file.
HELD_BYTES = 16 * 2**20


def is_recorded(settings: TraceSettings, exchange: Exchange) -> bool:
    """Whether the frames of an exchange are asked for; the test comes once, after every epoch."""
    chosen = exchange.phase == "test" or not settings.epochs or exchange.epoch in settings.epochs
    return chosen and exchange.phase in settings.phases


def links_of(terms: Terms, party: str) -> list[str]:
    """The feature parties whose links a party has an end of."""
    return terms.feature_parties if party == terms.label_party else [party]


def expected_bytes(
    settings: TraceSettings,
    terms: Terms,
    party: str,
    split: Split,
    weights: Mapping[str, Tensor],
    start: int = 0,
) -> int:
    """The most bytes one party's trace of a training can take, from exchange `start` on.

    Args:
        settings: what the party records.
        terms: what was agreed.
        party: whose trace it is.
        split: the aligned rows.
        weights: the party's own, for the size of a snapshot.
        start: where a resumed training goes on.
    """
    codec = compression.make(terms.codec)
    links = links_of(terms, party)
    widths = [codec.wire_width(terms.parties[name].width) for name in links]
    frames_bytes = files = epoch = 0
    unwritten = False
    for exchange in terms.schedule(split, start):
        if exchange.epoch != epoch or exchange.step % terms.train.checkpoint_every == 0:
            files, unwritten = files + unwritten, False
        epoch = exchange.epoch
        if is_recorded(settings, exchange):
            rows = len(exchange.rows)
            each_way = sum(codec.payload_limit(rows, width) + FRAME_BYTES for width in widths)
            frames_bytes += each_way * (2 if exchange.trains else 1)
            frames_bytes += EXCHANGE_BYTES + ROW_BYTES * rows
            unwritten = True
    files += unwritten + frames_bytes // HELD_BYTES
    files_bytes = files * (FILE_BYTES + PARTY_BYTES * len(links) + ENTRY_BYTES)
    about_bytes = len(TraceHeader.of(party, settings, terms).model_dump_json())
    # Before the first step, every so many epochs, and at the end.
    every = settings.snapshots
    snapshots = 1 + -(-terms.train.epochs // every) if every else 0
    snapshots_bytes = snapshots * (
        len(pack_weights(weights, Seal("snapshot", party, terms.run, 10**6))) + ENTRY_BYTES
    )
    return about_bytes + frames_bytes + files_bytes + snapshots_bytes


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse a trace that the disk has no room for.

    Raises:
        ConfigError: with both sizes.
    """
    existing = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            "the disk has no room for the trace",
            where=str(existing),
            got=f"{size(free_bytes)} free",
            want=f"up to {size(needed_bytes)}",
            fix="fewer 'phases' or 'epochs' or rarer 'snapshots' in [trace], or a larger disk",
        )
