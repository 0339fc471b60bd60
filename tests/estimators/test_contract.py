"""scikit-learn's own checks of both estimators."""

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from vfl import VFLClassifier, VFLRegressor

#: Checks that cannot hold, with the reason.
IMPOSSIBLE = {
    "check_sample_weight_equivalence_on_dense_data": (
        "copies of a row change the batches, and the scales of columns at parties that know no "
        "weights; tests/session/label/test_task.py holds the equivalence for the loss of a batch"
    )
}
#: Few steps suffice for all that is not about how well the defaults learn.
QUICK = {"epochs": 8, "learning_rate": 0.01}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [VFLClassifier(**QUICK), VFLRegressor(**QUICK)],
    expected_failed_checks=lambda estimator: IMPOSSIBLE,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def of_what_is_learnt():
    """The checks that train an estimator with its defaults and ask how well it answers."""
    for estimator in (VFLClassifier(), VFLRegressor()):
        for _, check in estimator_checks_generator(estimator):
            if check.func.__name__.endswith(("_train", "_classes", "_one_label", "_int")):
                yield pytest.param(estimator, check, id=f"{estimator}-{check.func.__name__}")


@pytest.mark.parametrize(("estimator", "check"), [*of_what_is_learnt()])
def test_scikit_learns_checks_of_what_the_defaults_learn(estimator, check):
    check(estimator)
