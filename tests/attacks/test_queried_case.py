"""Cases of whoever asks for predictions, and of a label party that is after an attribute."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vfl.attacks import make
from vfl.attacks.cases import (
    Queried,
    TrainedParts,
    attribute_case,
    decoded,
    queried_case,
    received_case,
)
from vfl.attacks.scoring import Case, attempt_all
from vfl.config import Experiment
from vfl.core.errors import NotGrantedError, TooFewRowsError
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.models import JointBottom, make_merger
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

WIDTH = 12


def experiment(**changes):
    bottom = {"width": WIDTH, "bottom": "mlp:hidden=64"}
    settings = {
        "parties": {"bank": bottom, "shop": bottom},
        "label": {"party": "lender", "top": "linear"},
        "train": {"epochs": 60, "batch_size": 20, "learning_rate": 0.01},
    }
    return Experiment.model_validate(settings | changes)


@pytest.fixture(scope="module")
def data():
    """Few training rows, a third of whose labels are wrong, so that they are learned by heart."""
    found = load_bundled(
        "digits", ["bank", "shop"], "lender", Dealing(0, validation=0.4, limit=400)
    )
    label = found["lender"]
    wrong = torch.rand(len(label.labels), generator=generator(0)) < 1 / 3
    labels = torch.where(wrong, (label.labels + 1) % 10, label.labels)
    split = replace(label.split, train=label.split.train[:80], test=label.split.test)
    return {
        name: replace(own, split=split, labels=labels if name == "lender" else None)
        for name, own in found.items()
    }


@pytest.fixture(scope="module")
def session(data):
    trace = Trace()
    trained = LocalSession(experiment(), data, outputs=10, observers=[trace]).run()
    return trained, list(decoded(trace, trained.terms, data["lender"].split))


@pytest.fixture(scope="module")
def queried(data, session):
    split = data["lender"].split
    rows = Queried(*map(torch.from_numpy, (split.train, split.test, split.validation)))
    asked = {
        name: replace(own, split=replace(split, test=rows.targets.numpy()))
        for name, own in data.items()
    }
    answers = LocalSession(
        experiment(), asked, mode="predict", outputs=10, weights=session[0].weights()
    ).run()
    return queried_case(experiment(), data, rows, answers.outputs())


@pytest.mark.parametrize("spec", ["membership", "likelihood_ratio:shadows=4,steps=40"])
def test_rows_that_were_learned_by_heart_are_known(spec, queried):
    scores = {one.measure: one for one in attempt_all(queried, make(spec), generator(0))}
    assert scores["auc"].value > 0.75
    assert scores["auc"].guess == 0.5
    assert scores["tpr_at_1_fpr"].guess == 0.01


def test_members_come_first_and_have_labels(queried, data):
    split = data["lender"].split
    assert queried.positive.tolist() == [True] * len(split.train) + [False] * len(split.test)
    rows = np.concatenate([split.train, split.test])
    assert queried.view.targets.labels.tolist() == data["lender"].labels[rows].tolist()
    assert queried.view.leaked.rows == len(split.validation)
    with pytest.raises(NotGrantedError):
        _ = queried.view.targets.cuts


def test_shadows_without_rows_of_their_own_are_told_what_to_set(queried, data):
    split = data["lender"].split
    rows = torch.from_numpy(split.train[:10]), torch.from_numpy(split.test[:10])
    alone = Queried(*rows, own=torch.empty(0, dtype=torch.int64))
    case = queried_case(experiment(), data, alone, queried.view.targets.outputs[:20])
    with pytest.raises(TooFewRowsError, match="shadow networks") as problem:
        attempt_all(case, make("likelihood_ratio"), generator(0))
    assert (problem.value.where, problem.value.got) == ("data.validation", "0 rows")
    assert attempt_all(case, make("membership"), generator(0))[0].measure == "auc"


@pytest.mark.parametrize("merge", ["concat", "sum"])
def test_bottoms_together_are_those_apart(merge):
    apart = [torch.nn.Flatten(), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 6))]
    one, other = torch.randn(5, 6), torch.randn(5, 1, 2, 3)
    joint = JointBottom(apart, [(6,), (1, 2, 3)], make_merger(merge).build([6, 6]))
    cuts = apart[0](one), apart[1](other)
    wanted = cuts[0] + cuts[1] if merge == "sum" else torch.cat(cuts, 1)
    assert torch.allclose(joint(torch.cat([one, other.flatten(1)], 1)), wanted, atol=1e-6)


def received(data, session) -> Case:
    trained, frames = session
    parts = TrainedParts(experiment(), data, trained.weights())
    return received_case(parts, frames, "bank", 120, generator(0, "leak"))


def test_a_column_is_read_from_the_cut(data, session):
    train = data["bank"].inputs[torch.from_numpy(data["bank"].split.train)]
    case = attribute_case(received(data, session), train)
    share = float(case.labels.double().mean())
    assert 0.35 < share < 0.65
    score, *_ = attempt_all(case, make("attribute"), generator(0))
    assert score.value > score.guess + 0.1
    with pytest.raises(NotGrantedError):
        _ = case.view.leaked.inputs
