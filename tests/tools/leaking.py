"""What a feature party's gradients tell of the labels of two classes, in a real training."""

import numpy as np
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score

from vfl.config import Experiment
from vfl.datasets import split_rows
from vfl.datasets.party import AlignedRows, Inputs
from vfl.session import Adversary, rules
from vfl.training.local import LocalSession


class Spy(Adversary):
    """A curious feature party: it keeps every gradient it gets, by step."""

    def __init__(self):
        self.gradients = {}

    def received(self, party, values, context):
        if context.training:
            self.gradients[context.step] = values.clone().double().numpy()


def rare_class(share=0.05, rows=8000):
    """Made-up rows of 20 columns in two halves; one in twenty is of class 1, and hard to tell."""
    columns, labels = make_classification(
        rows, 20, n_informative=10, weights=[1 - share], class_sep=0.8, random_state=0
    )
    left, right = np.split(columns.astype(np.float32), 2, axis=1)
    aligned = AlignedRows.of(rows, split_rows(rows, 0, 0.1, 0.2))
    inputs = {"left": Inputs(left.copy()), "right": Inputs(right.copy())}
    return aligned.parties(inputs, "label", labels.astype(np.int64), (0, 1))


def trained(data, defense, epochs=5, seed=0, rate=0.005, **options):
    """A session on these terms that has run."""
    parties = {name: {"width": 16, "bottom": "mlp:hidden=32"} for name in data if name != "label"}
    experiment = Experiment.model_validate(
        {
            "name": "leaking",
            "seed": seed,
            "defense": defense,
            "parties": parties,
            "label": {"party": "label", "top": "mlp:hidden=32"},
            "train": {"epochs": epochs, "batch_size": 64, "learning_rate": rate},
        }
    )
    classes = len(data["label"].classes)
    return LocalSession(experiment, data, outputs=classes, **options).run()


def leaks(data, session, spy, first):
    """Mean over the batches of the first epochs: AUC of norms, and of cosines to one positive row.

    Norms tell most then, before the top is sure of the frequent class.
    """
    label = data["label"]
    norms, cosines = [], []
    for exchange in rules.schedule(session.terms, label.split):
        if not exchange.trains or exchange.epoch > first:
            continue
        truth, grad = label.labels.numpy()[exchange.rows], spy.gradients[exchange.step]
        if len(np.unique(truth)) < 2 or truth.sum() < 2:
            continue
        sizes = np.linalg.norm(grad, axis=1)
        clue = np.flatnonzero(truth)[0]
        towards = grad @ grad[clue] / np.maximum(sizes * sizes[clue], 1e-300)
        others = np.arange(len(truth)) != clue
        norms.append(roc_auc_score(truth, sizes))
        cosines.append(roc_auc_score(truth[others], towards[others]))
    return float(np.mean(norms)), float(np.mean(cosines))


def figures(defense, first=100, **options):
    """Both leak AUCs, and the AUC of the task on the test rows."""
    data, spy = rare_class(), Spy()
    session = trained(data, defense, adversaries={"left": spy}, **options)
    return (*leaks(data, session, spy, first), session.label.history[-1]["test_auc"])
