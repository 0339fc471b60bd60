"""What a secure sum refuses: every setting through which a single cut would still be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vfl import compression, defenses
from vfl.compression.none import Uncompressed
from vfl.compression.sparse_codec import SparseCodec
from vfl.defenses import Chain, Defense, uses
from vfl.errors import ExposedCutError
from vfl.mpc import secure
from vfl.mpc.masked_sum import Ring


class Agreed(Protocol):
    """What all parties were told: an experiment, or the terms of a session."""

    @property
    def secure(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def defense(self) -> str: ...
    @property
    def merge(self) -> str: ...
    @property
    def feature_parties(self) -> list[str]: ...


_FEWER = "codec = 'none'; secure = 'sum:bits=8' sends a quarter of the bytes"


def ring_of(agreed: Agreed) -> Ring | None:
    """The ring the feature parties' cuts are summed in; None where each cut is sent by itself.

    Raises:
        SpecError: the mode cannot be built.
        ExposedCutError: beside the other settings it would hide nothing, and why.
    """
    ring = secure.make(agreed.secure).ring(max(1, len(agreed.feature_parties)))
    if ring is not None:
        refuse_exposure(agreed.codec, agreed.defense, agreed.merge, agreed.feature_parties)
    return ring


def what_is_told(agreed: Agreed, label_party: str) -> str:
    """Who learns what of the cuts, in a few words.

    Raises:
        SpecError, ExposedCutError: see `ring_of`.
    """
    ring = ring_of(agreed)
    if ring is None:
        return f"{label_party} sees every cut"
    return (
        f"{label_party} learns the sum alone, unless it colludes with all parties but one; "
        f"{ring.bits / 32:g} x the bytes of float32, exact to 2^-{ring.fraction + 1}, values "
        f"within {ring.reach:.5g}"
    )


def refuse_exposure(codec: str, defense: str, merge: str, feature_parties: Sequence[str]) -> None:
    """Refuse what cannot stand beside a secure sum.

    Args:
        codec: its spec.
        defense: its spec.
        merge: "concat" or "sum".
        feature_parties: those that send cuts.

    Raises:
        ExposedCutError: with the reason.
        SpecError: codec or defense cannot be built.
    """
    if len(feature_parties) < 2:
        raise ExposedCutError(
            "the sum of one cut is that cut",
            got="1 feature party",
            want="2 feature parties or more",
            fix="secure = 'none', and the label party sees the cut",
        )
    if merge != "sum":
        raise ExposedCutError(
            "cuts side by side are seen one by one",
            got=f"merge = '{merge}'",
            want="merge = 'sum'",
        )
    _check_codec(codec)
    if _reads_cuts(defenses.make(defense)):
        raise ExposedCutError(
            "this defense has a loss of each party's cut, which the label party would have to see",
            got=f"defense = '{defense}'",
            want="a defense of inputs, of a party's own cut, of gradients, labels or models",
        )


def _reads_cuts(defense: Defense) -> bool:
    members = defense.members if isinstance(defense, Chain) else (defense,)
    return any(member.reads_cuts and uses(member, "loss") for member in members)


def _check_codec(spec: str) -> None:
    codec = compression.make(spec)
    if isinstance(codec, SparseCodec):
        raise ExposedCutError(
            "which values a party sends would tell of its cut, and masks must cover all of them",
            got=f"codec = '{spec}'",
            want=_FEWER,
        )
    if type(codec) is not Uncompressed:
        raise ExposedCutError(
            "masked payloads add up only as numbers of the ring, not as a codec writes them",
            got=f"codec = '{spec}'",
            want=_FEWER,
        )
