"""Split learning and vertical federated learning on Flower.

Organisations that hold different columns about the same people train one network together: feature
parties run bottom models, the label party runs the top, and only cuts and their gradients travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfl.version import VERSION as __version__

if TYPE_CHECKING:
    from vfl.estimators import VFLClassifier, VFLRegressor
    from vfl.split import SplitModule

__all__ = ["SplitModule", "VFLClassifier", "VFLRegressor", "__version__"]

_HOMES = {
    "SplitModule": "vfl.split",
    "VFLClassifier": "vfl.estimators",
    "VFLRegressor": "vfl.estimators",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vfl' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
