"""What every party of a training over slow lines starts from, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator

from vfl.bench.messages import WanJob
from vfl.core.seeds import Secret
from vfl.datasets import PartyData, load_bundled
from vfl.session import Exchange, Terms
from vfl.session.schedule import queries, steps_per_epoch, training


def short_epochs(terms: Terms, data: PartyData, tests: int) -> Iterator[Exchange]:
    """The exchanges of a training, in `tests` parts an epoch with all test rows after each.

    The parts are told apart as epochs are, so what is in flight drains before each test.
    """
    split, train = data.split, terms.train
    none = split.train[:0]
    steps = steps_per_epoch(len(split.train), train.batch_rows)
    part_steps = -(-steps // tests)
    part, step, done = 1, 0, 0
    for exchange in training(terms.seed, train.epochs, train.batch_rows, split.train, none, none):
        done += 1
        last = exchange.last or done == part_steps
        yield Exchange(step, "train", part, exchange.rows, last)
        step += 1
        if last:
            asked = queries(split.test)
            for index, rows in enumerate(asked):
                yield Exchange(step, "test", part, rows, index == len(asked) - 1)
                step += 1
            part, done = part + 1, 0


class Setup:
    """Rows, terms and secret of one job."""

    def __init__(self, job: WanJob) -> None:
        experiment = job.experiment
        self.job = job
        self.terms = Terms.of(experiment, "train", experiment.name)
        parties = load_bundled(
            experiment.data.source,
            self.terms.feature_parties,
            experiment.seed,
            self.terms.label_party,
            experiment.data.validation,
            flatten=True,
            limit=job.rows,
        )
        self.parties, self.data = parties, parties[job.party]
        # Nothing here needs protection, and every depth is to start from the same weights.
        self.secret = Secret.of_simulation(experiment.seed, job.party)

    @property
    def outputs(self) -> int:
        """Classes of the data set."""
        classes = self.parties[self.terms.label_party].classes
        assert classes is not None, "accuracy is about classes"
        return len(classes)

    def schedule(self) -> Iterator[Exchange]:
        """The exchanges of the whole training."""
        return short_epochs(self.terms, self.data, self.job.tests)
