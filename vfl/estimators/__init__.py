"""scikit-learn's door: fit and predict on tables whose columns belong to several parties."""

from __future__ import annotations

from vfl.estimators.classifier import VFLClassifier
from vfl.estimators.regressor import VFLRegressor

__all__ = ["VFLClassifier", "VFLRegressor"]
