"""scikit-learn: fit and predict on tables whose columns belong to several parties."""

from __future__ import annotations

from vfl.estimators.predictors import VFLClassifier, VFLRegressor

__all__ = ["VFLClassifier", "VFLRegressor"]
