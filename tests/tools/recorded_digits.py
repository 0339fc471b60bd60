"""Digits trained in one process, with all that was sent and every bottom that one party had."""

from vfl.attacks import make
from vfl.attacks.cases import TrainedParts, Victim, decoded, recalled_case, received_case
from vfl.attacks.scoring import attempt
from vfl.config import Experiment
from vfl.core.seeds import generator
from vfl.datasets import Dealing, load_bundled
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

#: Number of times that a label party asks for the same rows.
TIMES = 16


class Recorded:
    """A training of some feature parties, the first of which is looked at.

    Args:
        defense: spec of the defense.
        parties: names of the feature parties.
        seed: seed of the training.
        limit: rows; None takes all of them.
        changes: settings of the experiment.
    """

    def __init__(self, defense="none", parties=("bank",), seed=0, limit=None, **changes):
        self.data = load_bundled(
            "digits",
            list(parties),
            "lender",
            Dealing(seed, validation=0.2, limit=limit),
            flatten=True,
        )
        settings = {
            "seed": seed,
            "defense": defense,
            "parties": {name: {"width": 16, "bottom": "mlp:hidden=64"} for name in parties},
            "label": {"party": "lender", "top": "linear"},
            "train": {"epochs": 20, "batch_size": 32, "learning_rate": 0.002},
        }
        self.experiment = Experiment.model_validate(settings | changes)
        self.seed, self.party = seed, parties[0]
        self.kept, trace = [], Trace()
        session = LocalSession(
            self.experiment, self.data, outputs=10,
            observers=[trace] if self.experiment.secure == "none" else [],
            on_epoch=lambda record: self.kept.append(copied(session.weights()[self.party])),
        )  # fmt: skip
        session.run()
        self.frames = list(decoded(trace, session.terms, self.data["lender"].split))
        self.weights, self.accuracy = session.weights(), session.label.history[-1]["test_accuracy"]
        self.victims = [
            Victim(self.experiment, self.data, name, self.weights[name]) for name in parties
        ]

    def leak(self):
        return generator(self.seed, "leak")

    def of(self, build, *more):
        return build(self.experiment, self.data, self.frames, self.party, *more)

    def trained(self):
        return TrainedParts(self.experiment, self.data, self.weights)

    def recalled(self):
        return recalled_case(self.trained(), self.frames, self.party, 100, self.leak())

    def received(self):
        return received_case(self.trained(), self.frames, self.party, 100, self.leak(), self.again)

    def again(self, rows):
        return self.victims[0].asked_again(rows, TIMES, generator(self.seed, "again"))


def copied(weights):
    return {name: value.clone() for name, value in weights.items()}


def left(case, spec):
    """Share of the mean row's squared error that an attack on columns leaves."""
    score = attempt(case, make(spec), generator(0))
    return score.value / score.guess
