"""How large a frame of a session may be, by kind and direction, from its terms alone.

Both ends compute the same: the codec, the width and the most rows of an exchange say how many bytes
a cut, its gradient or a secure mode's message can take. A larger frame is refused by its header,
before anything is allocated for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from vfl import compression
from vfl.datasets import Split
from vfl.frame import LIMIT_BYTES, Kind
from vfl.mpc import secure
from vfl.mpc.agreement import OFFER_BYTES
from vfl.mpc.shared_traffic import (
    COLUMNS_BYTES,
    ROWS_BYTES,
    LayerAxes,
    products_bytes,
    updates_bytes,
)
from vfl.mpc.stream import KEY_BYTES
from vfl.session.report import REPORT_LIMIT_BYTES
from vfl.session.schedule import QUERY_ROWS
from vfl.session.terms import Terms
from vfl.transport.base import LinkLimits
from vfl.transport.messages import ANSWER_LIMIT_BYTES

#: What the label party answers a query with, of which at most one byte an epoch says something.
_ANSWER_BYTES = 1
_Limits = dict[Kind, int]


def most_rows(terms: Terms, split: Split | None) -> dict[Kind, int]:
    """Rows of the largest exchange: of a training batch (CUT), and of a query (QUERY).

    Args:
        terms: what was agreed.
        split: of the rows; None for a third party that deals and has none.
    """
    train, asked = terms.train.batch_rows, QUERY_ROWS
    if split is not None:
        train = min(train, len(split.train))
        asked = min(asked, max(len(split.validation), len(split.test)))
    return {Kind.CUT: train if terms.mode == "train" else 0, Kind.QUERY: asked}


def frame_limits(
    terms: Terms,
    party: str,
    split: Split | None,
    layers: Mapping[str, LayerAxes] | None = None,
) -> LinkLimits:
    """The largest payloads on the stream between the label party and another one.

    Args:
        terms: what was agreed.
        party: the other one: a feature party, or a third party that deals.
        split: of the rows; None at a third party, which is told no rows.
        layers: what each party has shares of, where first layers are shared; a feature party knows
            its own entry alone. Until it is told, only what is said before it is let through.
    """
    rows = most_rows(terms, split)
    if party == terms.dealer:
        up, down = _dealing(terms, rows, layers)
    elif secure.make(terms.secure).dealer(terms.label_party) is not None:
        up, down = _sharing(terms, rows, None if layers is None else layers[party])
    else:
        up, down = _sending(terms, party, rows)
    up |= {Kind.DONE: REPORT_LIMIT_BYTES, Kind.ERROR: ANSWER_LIMIT_BYTES}
    down |= {Kind.DONE: 0, Kind.ERROR: ANSWER_LIMIT_BYTES}
    if party != terms.dealer:
        down[Kind.ACK] = _ANSWER_BYTES
    return LinkLimits(_at_most_a_frame(up), _at_most_a_frame(down))


def _sending(terms: Terms, party: str, rows: Mapping[Kind, int]) -> tuple[_Limits, _Limits]:
    """A party with a bottom of its own: cuts of the agreed codec, or words of a masked sum."""
    codec, width = compression.make(terms.codec), terms.parties[party].width
    wire_width = codec.wire_width(width)
    ring = secure.make(terms.secure).ring(max(1, len(terms.feature_parties)))
    down = {Kind.GRAD: codec.payload_limit(rows[Kind.CUT], wire_width)}
    if ring is None:
        up = {kind: codec.payload_limit(count, wire_width) for kind, count in rows.items()}
        return up, down
    up = {kind: count * width * ring.dtype.itemsize for kind, count in rows.items()}
    up[Kind.PROTOCOL] = OFFER_BYTES
    return up, down | {Kind.PROTOCOL: _offers_bytes(terms)}


def _sharing(
    terms: Terms, rows: Mapping[Kind, int], axes: LayerAxes | None
) -> tuple[_Limits, _Limits]:
    """A party that has shares of a first layer: keys and columns first, then openings."""
    up = {Kind.PROTOCOL: max(OFFER_BYTES, COLUMNS_BYTES)}
    down = {Kind.PROTOCOL: max(_offers_bytes(terms), KEY_BYTES + COLUMNS_BYTES)}
    if axes is None:
        return up, down
    for opening, kind in ((Kind.OPENING, Kind.CUT), (Kind.QUERY_OPENING, Kind.QUERY)):
        up[opening] = axes.opened_bytes(rows[kind])
        up[kind] = products_bytes([axes.width], rows[kind])
        down[opening] = axes.relayed_bytes(rows[kind])
    return up, down | {Kind.GRAD: axes.gradient_bytes(rows[Kind.CUT])}


def _dealing(
    terms: Terms, rows: Mapping[Kind, int], layers: Mapping[str, LayerAxes] | None
) -> tuple[_Limits, _Limits]:
    """A third party that deals: it is asked for rows, and answers with products and updates."""
    owners = terms.feature_parties
    down = {
        Kind.PROTOCOL: max(_offers_bytes(terms), COLUMNS_BYTES * len(owners)),
        Kind.OPENING: ROWS_BYTES,
        Kind.QUERY_OPENING: ROWS_BYTES,
    }
    up = {Kind.PROTOCOL: max(OFFER_BYTES, KEY_BYTES * len(owners))}
    if layers is None:
        return up, down
    widths = [terms.parties[name].width for name in owners]
    up |= {
        Kind.OPENING: products_bytes(widths, rows[Kind.CUT]),
        Kind.QUERY_OPENING: products_bytes(widths, rows[Kind.QUERY]),
        Kind.GRAD: updates_bytes(list(layers.values())),
    }
    return up, down


def _offers_bytes(terms: Terms) -> int:
    """Everybody's offers of keys, that of a third party included."""
    return OFFER_BYTES * len(terms.peers)


def _at_most_a_frame(limits: Mapping[Kind, int]) -> _Limits:
    return {kind: min(most, LIMIT_BYTES) for kind, most in limits.items()}
