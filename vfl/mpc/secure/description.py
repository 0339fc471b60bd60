"""What the parties agree on of a network that nobody holds, before the first share.

The label party stands in the middle and describes the network; the others compare what it says
with what they have, and all three compare the whole of it over links that it cannot read.
Positions of rows are those inside a phase's own rows, so that a dealer without rows follows too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field, ValidationError

from vfl.config.toml import Settings
from vfl.core.errors import DisagreementError, ProtocolError
from vfl.core.frame import Frame, Kind, Link
from vfl.mpc.network import Layer
from vfl.mpc.permuted import FUNCTIONS
from vfl.mpc.three_party import HOLDERS, Rows, require_frames

#: Most bytes of what the label party describes.
FACTS_BYTES = 1 << 14
COLUMNS_BYTES = 4
_STEP = 1
_Size = Annotated[int, Field(ge=0, lt=2**32)]


class Facts(Settings):
    """What all three must know alike beside the terms of the session.

    Attributes:
        columns: of P0 and P1.
        rows: how many of each phase are shared in this session.
        classes: how many the labels have; 0 for numbers.
        layers: of the network.
    """

    columns: tuple[_Size, _Size]
    rows: dict[Rows, _Size]
    classes: int = Field(ge=0, lt=2**32)
    layers: tuple[Layer, ...] = Field(min_length=1, max_length=64)

    @property
    def parameters(self) -> int:
        """How many weights the network has."""
        return sum((one.inputs + one.bias) * one.outputs for one in self.layers)

    def check(self, own: tuple[int, Mapping[Rows, int]] | None, role: int) -> None:
        """Compare what the label party says with what a party has.

        Args:
            own: columns, and rows of each phase, at P0 and P1; None at a dealer.
            role: the party's.

        Raises:
            DisagreementError: it has other columns or rows.
            ProtocolError: the layers are no network of these columns.
        """
        if own is not None and (self.columns[role], self.rows) != (own[0], dict(own[1])):
            raise DisagreementError(
                "the label party describes other rows than this party has",
                got=f"{self.columns[role]} columns, rows {_counts(self.rows)}",
                want=f"{own[0]} columns, rows {_counts(own[1])}",
                fix="keep only the ids all parties share, with one split at all of them",
            )
        widths = [sum(self.columns), *(one.outputs for one in self.layers)]
        fit = all(one.inputs == width for one, width in zip(self.layers, widths, strict=False))
        if not fit or not {one.function for one in self.layers} <= {"", *FUNCTIONS}:
            raise ProtocolError(
                "the label party describes layers that are no network of these columns",
                got=", ".join(f"{one.inputs}-{one.outputs}" for one in self.layers),
                want=f"layers that follow one another from {widths[0]} columns, with a function of "
                + ", ".join(sorted(FUNCTIONS)),
            )


def describe(
    links: Mapping[int, Link], own_columns: int | None, facts: Callable[[tuple[int, int]], Facts]
) -> Facts:
    """At the label party: wait for the others' columns, and tell both what follows from them.

    Args:
        links: to the others, by role.
        own_columns: None where it has none and is P2.
        facts: of columns of P0 and P1.

    Raises:
        ProtocolError: somebody sent something else.
        ProtocolError: a layer fits no frame; see `require_frames`.
    """
    columns = {}
    for role in HOLDERS:
        if role not in links:
            assert own_columns is not None, "a holder has columns"
            columns[role] = own_columns
        else:
            told = _take(links[role], COLUMNS_BYTES, f"P{role}")
            columns[role] = int.from_bytes(told, "little")
    found = facts((columns[0], columns[1]))
    label_role = next(role for role in range(3) if role not in links)
    require_frames(found.layers, found.columns, found.classes, label_role)
    for link in links.values():
        link.send(Frame(Kind.PROTOCOL, _STEP, found.model_dump_json().encode()))
    return found


def take_description(link: Link, own_columns: int | None) -> Facts:
    """At another party: tell the own columns, if there are any, and wait for the description.

    Args:
        link: to the label party.
        own_columns: None at a dealer.

    Raises:
        ProtocolError: it sent something else.
    """
    if own_columns is not None:
        link.send(Frame(Kind.PROTOCOL, _STEP, own_columns.to_bytes(COLUMNS_BYTES, "little")))
    raw = _take(link, FACTS_BYTES, "the label party")
    try:
        return Facts.model_validate_json(raw)
    except ValidationError:
        raise ProtocolError(
            "the label party describes the network in another form than this version reads",
            fix="install the same vfl version at every party",
        ) from None


def _take(link: Link, most: int, sender: str) -> bytes:
    frame = link.receive()
    if frame.kind is not Kind.PROTOCOL or frame.step != _STEP or len(frame.payload) > most:
        raise ProtocolError(
            f"a message out of turn from {sender}",
            got=f"{frame.kind.name} of step {frame.step}, {len(frame.payload)} bytes",
            want=f"PROTOCOL of step {_STEP}, at most {most} bytes",
        )
    return bytes(frame.payload)


def _counts(rows: Mapping[Rows, int]) -> str:
    return ", ".join(f"{phase} {count}" for phase, count in rows.items())
