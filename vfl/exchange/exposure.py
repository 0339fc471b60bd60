"""What a secure mode refuses: every setting through which it would tell what it is to hide."""

from __future__ import annotations

from typing import Protocol

from vfl import compression, defenses
from vfl.compression.none import Uncompressed
from vfl.compression.sparse_codec import SparseCodec
from vfl.defenses import Chain, Defense, uses
from vfl.errors import ExposedCutError
from vfl.exchange.shared_exposure import Shares, refuse_beside_shares
from vfl.mpc import secure
from vfl.mpc.masked_sum import Ring
from vfl.mpc.shared_layer import INPUT_BITS


class Agreed(Shares, Protocol):
    """What all parties were told: an experiment, or the terms of a session."""

    @property
    def secure(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def merge(self) -> str: ...


_FEWER = "codec = 'none'; secure = 'sum:bits=8' sends a quarter of the bytes"


def ring_of(agreed: Agreed) -> Ring | None:
    """The ring the feature parties' cuts are summed in; None where each cut is sent by itself.

    Raises:
        SpecError: the mode cannot be built.
        ExposedCutError: beside the other settings it would hide nothing, and why.
    """
    ring = secure.make(agreed.secure).ring(max(1, len(agreed.feature_parties)))
    if ring is not None:
        refuse_exposure(agreed)
    return ring


def shares_weights(agreed: Agreed) -> bool:
    """Whether the feature parties share each other's first layers, and none has its own.

    Raises:
        SpecError: the mode cannot be built.
    """
    return secure.make(agreed.secure).dealer(agreed.label_party) is not None


def third_party(agreed: Agreed) -> str | None:
    """Who deals and does nothing else; None where the label party deals, or nobody.

    Raises:
        SpecError: the mode cannot be built.
    """
    return secure.make(agreed.secure).third_party(agreed.label_party)


def what_is_told(agreed: Agreed) -> str:
    """Who learns what of the cuts, in a few words.

    Raises:
        SpecError, ExposedCutError: see `ring_of`.
    """
    ring, label_party = ring_of(agreed), agreed.label_party
    if ring is None:
        return f"{label_party} sees every cut"
    if shares_weights(agreed):
        rounded = f"inputs rounded to 2^-{INPUT_BITS + 1}, sums within {ring.reach / 2:.5g}"
        if dealer := third_party(agreed):
            one = len(agreed.feature_parties) == 1
            return (
                f"{label_party} learns {'the outputs' if one else 'the sum'} alone and no party "
                f"has first-layer weights, unless {dealer}, which deals, colludes with "
                f"{label_party} or a feature party; {rounded}"
            )
        return (
            f"{label_party} learns the sum alone and no party has first-layer weights, unless "
            f"{label_party}, which deals, colludes with a feature party; {rounded}"
        )
    return (
        f"{label_party} learns the sum alone, unless it colludes with all parties but one; "
        f"{ring.bits / 32:g} x the bytes of float32, exact to 2^-{ring.fraction + 1}, values "
        f"within {ring.reach:.5g}"
    )


def refuse_exposure(agreed: Agreed) -> None:
    """Refuse what cannot stand beside a secure mode that sums cuts.

    Raises:
        ExposedCutError: with the reason.
        SpecError: codec or defense cannot be built.
    """
    dealer = secure.make(agreed.secure).dealer(agreed.label_party)
    if len(agreed.feature_parties) < 2 and third_party(agreed) is None:
        raise _one_party(dealer)
    if agreed.merge != "sum":
        raise ExposedCutError(
            "cuts side by side are seen one by one",
            got=f"merge = '{agreed.merge}'",
            want="merge = 'sum'",
        )
    _check_codec(agreed.codec)
    if _reads_cuts(defenses.make(agreed.defense)):
        raise ExposedCutError(
            "this defense has a loss of each party's cut, which the label party would have to see",
            got=f"defense = '{agreed.defense}'",
            want="a defense of inputs, of a party's own cut, of gradients, labels or models",
        )
    if dealer is not None:
        refuse_beside_shares(agreed, dealer)


def _one_party(dealer: str | None) -> ExposedCutError:
    """Why one feature party alone is refused."""
    if dealer is None:
        return ExposedCutError(
            "the sum of one cut is that cut",
            got="1 feature party",
            want="2 feature parties or more",
            fix="secure = 'none', and the label party sees the cut",
        )
    return ExposedCutError(
        "one feature party has nobody to share its first layer with: the label party deals, and "
        "a dealer that also holds a share could undo every mask",
        got=f"1 feature party, dealer '{dealer}'",
        want="2 feature parties or more",
        fix="secure = 'beaver:dealer=NAME' with a third party that only deals; or secure = 'none'",
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
