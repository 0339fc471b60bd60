"""Boosted trees, scorecards and regressions over columns of several organisations.

Boosted trees:

    mode:        `model = "trees"`: options, refused settings and privacy guarantees
    cells:       common code of all models of this package: cells, bins, messages of bins
    ends:        the feature party's bins and splits, and the label party's forest
    shared:      the same parties' code if gradients are additive shares, and the helper's
    estimators:  VFLBoostingClassifier, VFLBoostingRegressor: scikit-learn, in one process
    boosting:    the loop over trees, and forests as tensors
    grow:        growth of one tree from histograms, like XGBoost's `hist`
    histograms:  sums of gradients if one party has all bins
    bins:        conversion of a party's columns to bins; randomised response on bins
    objectives:  losses, their derivatives, and conversion of margins to outputs
    explanation: margins if some splits have no answer, Shapley values, importance
    export:      a forest as JSON that XGBoost reads
    command:     `vfl importance`

Scorecards and regressions:

    scorecard:       `model = "scorecard"`: bins, weights of evidence, points
    regression:      `model = "regression"`: options, refused settings and privacy guarantees
    regression_ends: each party's code in sessions of a regression, and its saved part
    sums:            sums over rows on additive shares, with a helper
    summing_end:     common code of trainings on these sums
    newton:          regressions with inference, from sums over rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.trees.estimators import VFLBoostingClassifier, VFLBoostingRegressor

__all__ = ["VFLBoostingClassifier", "VFLBoostingRegressor"]

__getattr__ = lazy_names(__name__)
