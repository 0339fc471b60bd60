"""Boosted trees, scorecards and regressions over columns of several organisations.

mode:        `model = "trees"`: its terms, refusals and guarantees cells:       common part of the
sessions of all three models: cells, bins, messages of bins ends:        both parties' parts of a
session: a feature party's bins and splits, the label party's forest shared:      the parties' parts
if gradients are shared with a helper estimators:  VFLBoostingClassifier, VFLBoostingRegressor:
scikit-learn, all parties in a process boosting:    the loop over trees, and forests as tensors
explanation: margins if some splits have no answer, Shapley values, importance export:      a forest
as JSON that XGBoost reads command:     `vfl importance` grow:        growth of one tree from
histograms, like XGBoost's `hist` histograms:  sums of gradients if all bins are in one place bins:
a party's columns as bins; randomised response on them scorecard:   `model = "scorecard"`: bins,
weights of evidence, points objectives:  losses, their derivatives, and conversion of margins to
outputs

regression:      `model = "regression"`: its terms, refusals and guarantees regression_ends: the
parties' parts of its sessions, and each party's saved part sums:            sums over rows on
shares, with a helper summing_end:     common part of trainings on these sums, of a regression and
of a card newton:          regressions with inference, from sums over rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.trees.estimators import VFLBoostingClassifier, VFLBoostingRegressor

__all__ = ["VFLBoostingClassifier", "VFLBoostingRegressor"]

__getattr__ = lazy_names(__name__)
