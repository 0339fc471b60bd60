"""Who shares a first layer with whom, and what the feature parties say to each other about it.

A party's partner is the next one in merge order, so every party holds a share of two layers: its
own, and that of the party before it. What they say travels sealed, through the label party.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from vfl.mpc.pairwise import PairwiseMasks
from vfl.mpc.sealing import Sealing
from vfl.mpc.shared_traffic import LayerAxes, OwnerAxes, SharedAxes


def partner_of(party: str, order: Sequence[str]) -> str:
    """Who holds the other share of a party's layer: the next in merge order.

    >>> partner_of("shop", ("bank", "shop"))
    'bank'
    """
    return order[(order.index(party) + 1) % len(order)]


def owner_of(party: str, order: Sequence[str]) -> str:
    """Whose layer a party holds the other share of.

    >>> owner_of("bank", ("bank", "shop", "clinic"))
    'clinic'
    """
    return order[order.index(party) - 1]


def axes_of(
    columns: Mapping[str, int], width: int, third_deals: bool = False
) -> Mapping[str, LayerAxes]:
    """What each feature party has shares of.

    Args:
        columns: of every party's inputs, in merge order.
        width: of all their outputs.
        third_deals: whether a third party deals, and the label party is everybody's partner.
    """
    ones, order = 1, tuple(columns)
    if third_deals:
        return {name: OwnerAxes(own + ones, width) for name, own in columns.items()}
    return {
        name: SharedAxes(own + ones, columns[owner_of(name, order)] + ones, width)
        for name, own in columns.items()
    }


class Neighbours:
    """What one attempt's keys are good for at one party.

    Args:
        party: whose.
        order: all feature parties, in merge order.
        keys: of each pair it is in.
    """

    def __init__(self, party: str, order: Sequence[str], keys: Mapping[str, bytes]) -> None:
        after, before = partner_of(party, order), owner_of(party, order)
        there = {other: Sealing(keys[other], party, other) for other in (after, before)}
        back = {other: Sealing(keys[other], other, party) for other in (after, before)}
        # With two parties the other is both: one way there and one back carry everything, in turn.
        self.to_partner, self.to_owner = there[after], there[before]
        self.from_partner, self.from_owner = back[after], back[before]
        self._masks = PairwiseMasks(party, order, keys)

    def mask(self, words: Tensor, purpose: str, step: int) -> None:
        """Add this party's masks of all pairs to ring numbers, in place.

        Raises:
            ReusedPadError: this step, or a later one, was masked.
        """
        add_masks(self._masks, words, purpose, step)


def add_masks(masks: PairwiseMasks, words: Tensor, purpose: str, step: int) -> None:
    """Add a party's masks of all its pairs to ring numbers, in place.

    Args:
        masks: the party's.
        words: int64, contiguous, of any shape.
        purpose: what they are for.
        step: number of the exchange.

    Raises:
        ReusedPadError: this step, or a later one, was masked.
    """
    flat = words.view(-1).numpy().view("<u8")
    flat += masks.words(len(flat), flat.dtype, purpose, step)
