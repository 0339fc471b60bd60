"""scikit-learn's own checks of both estimators."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from vfl import VFLClassifier, VFLRegressor

#: Checks that cannot hold, with the reason.
IMPOSSIBLE = {
    "check_sample_weight_equivalence_on_dense_data": (
        "copies of a row change the batches, and the scales of columns at parties that know no "
        "weights; tests/session/label/test_task.py holds the equivalence for the loss of a batch"
    )
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        VFLClassifier(1, epochs=8, learning_rate=0.01),
        VFLRegressor(1, epochs=8, learning_rate=0.01),
        VFLClassifier(),
        VFLRegressor(),
    ],
    expected_failed_checks=lambda estimator: IMPOSSIBLE,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)
