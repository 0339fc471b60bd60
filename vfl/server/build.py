"""A label party from the terms of a session: top, own bottom, and a half for every party."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.compression import Codec
from vfl.datasets import PartyData
from vfl.defenses import Defense, LabelKind
from vfl.errors import DataError, SpecError
from vfl.exchange import (
    Adversary,
    Compute,
    DealerLine,
    LabelHalf,
    MaskedHalves,
    PartnerHalves,
    PartnerShare,
    SharedGradient,
    SharedHalves,
    optimizer_factory,
)
from vfl.exchange.adversary import HONEST
from vfl.exchange.exposure import ring_of, shares_weights
from vfl.ledger import Ledger
from vfl.link import Link
from vfl.seeds import Secret, scoped
from vfl.server.label_party import LabelParty
from vfl.server.progress import EpochRecord
from vfl.server.task import make_task
from vfl.session import Checkpoints, Terms


def build_label_party(
    data: PartyData,
    terms: Terms,
    links: Mapping[str, Link],
    secret: Secret,
    *,
    top: str | nn.Module,
    task: str,
    outputs: int,
    class_weight: str = "none",
    hits: int = 0,
    own_bottom: nn.Module | None = None,
    ledger: Ledger | None = None,
    weights: Mapping[str, Tensor] | None = None,
    checkpoints: Checkpoints | None = None,
    adversary: Adversary = HONEST,
    device: str = "cpu",
    on_epoch: Callable[[EpochRecord], None] = lambda record: None,
) -> LabelParty:
    """A label party ready for a session.

    Args:
        data: labels (none needed to predict) and own columns, aligned with everybody's rows.
        terms: the session's terms.
        links: the stream to each feature party, and to a third party that deals.
        secret: the party's own; the first weights of the top follow from it.
        top: a spec, or a module from the merged width to `outputs`.
        task: "classification" or "regression".
        outputs: number of classes, or 1.
        class_weight: "none" or "balanced".
        hits: a hit rate at so many classes is measured; 0 measures none.
        own_bottom: a module for the own columns instead of the one the terms name.
        ledger: where the links count.
        weights: trained weights, for evaluation and prediction.
        checkpoints: where it saves while it trains.
        adversary: tampering on this side.
        device: where its models run.
        on_epoch: told one record an epoch.

    Raises:
        SpecError: a plug-in does not fit, or the defense means nothing for such labels.
        ExposedCutError: a secure sum would hide nothing.
    """
    weighted = class_weight != "none" or data.row_weights is not None
    kind = LabelKind(outputs if task == "classification" else None, weighted, terms.train.epochs)
    defense = _defense(terms, kind)
    compute = Compute(device, terms.train.precision)
    with scoped(secret.number("init")):
        if not isinstance(top, nn.Module):
            top = models.make_top(top).build(terms.merged_width, outputs)
        top = defense.wrap_top(top, terms.merged_width)
        own = _own_bottom(data, terms, own_bottom)
        halves = _halves(terms, links, defense, secret, adversary, compute)
    party = LabelParty(
        data,
        terms,
        top,
        own,
        halves,
        defense,
        make_task(task, outputs, hits),
        secret,
        optimizer_factory(terms.train) if terms.mode == "train" else None,
        ledger or Ledger(),
        on_epoch,
        checkpoints,
        adversary,
        compute,
        class_weight,
        _joint(terms, halves, links),
    )
    if weights is not None:
        party.load_weights(weights)
    return party


def _halves(
    terms: Terms,
    links: Mapping[str, Link],
    defense: Defense,
    secret: Secret,
    adversary: Adversary,
    compute: Compute,
) -> dict[str, LabelHalf]:
    """The label party's half of the exchange with every feature party."""
    return {
        name: LabelHalf(
            name,
            terms.parties[name].width,
            _codec(name, terms, secret),
            defense,
            links[name],
            secret,
            adversary,
            terms.train.in_flight,
            compute,
        )
        for name in terms.feature_parties
    }


def _codec(party: str, terms: Terms, secret: Secret) -> Codec:
    if terms.dealer is not None:
        return PartnerShare(party, terms.train.learning_rate, secret)
    if shares_weights(terms):
        return SharedGradient(party, terms.train.learning_rate)
    return compression.make(terms.codec)


def _joint(
    terms: Terms, halves: Mapping[str, LabelHalf], links: Mapping[str, Link]
) -> MaskedHalves | None:
    """What takes the cuts of all feature parties as one sum; None sees each."""
    ring = ring_of(terms)
    if ring is None:
        return None
    if terms.dealer is not None:
        return PartnerHalves(halves, DealerLine(terms.dealer, links[terms.dealer]), ring)
    return SharedHalves(halves, ring) if shares_weights(terms) else MaskedHalves(halves, ring)


def _defense(terms: Terms, kind: LabelKind) -> Defense:
    """The label party's instance, told what its labels are."""
    defense = defenses.make(terms.defense)
    try:
        defense.prepare(kind)
    except SpecError as error:
        error.where = error.where or "defense"
        raise
    return defense


def _own_bottom(data: PartyData, terms: Terms, given: nn.Module | None) -> nn.Module | None:
    if data.name not in terms.parties:
        return None
    if data.inputs is None:
        raise DataError(
            f"the label party '{data.name}' is listed with columns but has none",
            fix="remove it from [parties], or give it columns",
        )
    asked = terms.parties[data.name]
    shape = tuple(data.inputs.shape[1:])
    return given or models.make_bottom(asked.bottom).build(shape, asked.width)
