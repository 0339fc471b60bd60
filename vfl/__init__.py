"""Split learning and vertical federated learning on Flower.

Organisations that hold different columns about the same people train one network together: feature
parties run bottom models, the label party runs the top model, and they exchange cuts and gradients
instead of columns and labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names
from vfl.core.version import VERSION as __version__

if TYPE_CHECKING:
    from vfl.core.errors import VFLError
    from vfl.estimators import VFLClassifier, VFLRegressor
    from vfl.experiments.notebook import Run, attack, compare, grid, train, value
    from vfl.experiments.study import Results
    from vfl.session import trace
    from vfl.training.cutting import split
    from vfl.training.fitting import fit
    from vfl.training.recorder import record
    from vfl.training.split import SplitModule

__all__ = [
    "Results",
    "Run",
    "SplitModule",
    "VFLClassifier",
    "VFLError",
    "VFLRegressor",
    "__version__",
    "attack",
    "compare",
    "fit",
    "grid",
    "record",
    "split",
    "trace",
    "train",
    "value",
]

__getattr__ = lazy_names(__name__)
