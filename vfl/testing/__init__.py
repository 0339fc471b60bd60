"""Contract tests for authors of plug-ins: subclass a contract, list specs, and run pytest.

>>> from vfl.testing import CodecContract
>>> class TestMine(CodecContract):
...     specs = ["topk:k=3"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.experiments.study import add_attack
    from vfl.testing.accountant import AccountantContract
    from vfl.testing.adversary import AdversaryContract
    from vfl.testing.attack import AttackContract, GradientAttackContract, InputAttackContract
    from vfl.testing.augmentation import AugmentationContract
    from vfl.testing.codec import CodecContract
    from vfl.testing.defense import DefenseContract
    from vfl.testing.holders import HolderContract, Protocol
    from vfl.testing.link import LinkContract
    from vfl.testing.loss import LossContract
    from vfl.testing.merger import MergerContract
    from vfl.testing.model import BottomContract, TopContract
    from vfl.testing.optimizer import OptimizerContract
    from vfl.testing.schedule import ScheduleContract
    from vfl.testing.source import SourceContract
    from vfl.testing.writer import RunWriterContract

__all__ = [
    "AccountantContract",
    "AdversaryContract",
    "AttackContract",
    "AugmentationContract",
    "BottomContract",
    "CodecContract",
    "DefenseContract",
    "GradientAttackContract",
    "HolderContract",
    "InputAttackContract",
    "LinkContract",
    "LossContract",
    "MergerContract",
    "OptimizerContract",
    "Protocol",
    "RunWriterContract",
    "ScheduleContract",
    "SourceContract",
    "TopContract",
    "add_attack",
]


__getattr__ = lazy_names(__name__)
