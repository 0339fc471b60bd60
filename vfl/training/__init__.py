"""Complete trainings: in one process, as a torch module, or over a federation.

A run is one training with its folder: `train` trains a model and stores the run; `evaluate` and
`predict` use a stored run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.training.local import LocalSession
    from vfl.training.run import evaluate, load_data, predict, train
    from vfl.training.specs import check_specs
    from vfl.training.split import SplitModule

__all__ = [
    "LocalSession",
    "SplitModule",
    "check_specs",
    "evaluate",
    "load_data",
    "predict",
    "train",
]

__getattr__ = lazy_names(__name__)
