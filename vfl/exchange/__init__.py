"""One half of a round at one party: defense, codec and frames over a link, in both directions."""

from __future__ import annotations

from vfl.exchange.adversary import Adversary
from vfl.exchange.compute import Compute
from vfl.exchange.dealer_half import DealerHalf
from vfl.exchange.dealer_line import DealerLine
from vfl.exchange.feature_half import FeatureHalf
from vfl.exchange.label_half import LabelHalf
from vfl.exchange.masked import MaskedCut, MaskedHalves
from vfl.exchange.optimizers import OptimizerFactory, drop_gradients, optimizer_factory
from vfl.exchange.owner_half import OwnerHalf
from vfl.exchange.partner_label import PartnerHalves, PartnerShare
from vfl.exchange.share_holder import ShareHolder
from vfl.exchange.shared_half import SharedHalf
from vfl.exchange.shared_label import SharedGradient, SharedHalves

__all__ = [
    "Adversary",
    "Compute",
    "DealerHalf",
    "DealerLine",
    "FeatureHalf",
    "LabelHalf",
    "MaskedCut",
    "MaskedHalves",
    "OptimizerFactory",
    "OwnerHalf",
    "PartnerHalves",
    "PartnerShare",
    "ShareHolder",
    "SharedGradient",
    "SharedHalf",
    "SharedHalves",
    "drop_gradients",
    "optimizer_factory",
]
