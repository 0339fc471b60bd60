"""What is taken from recordings, against the session that was recorded."""

import pytest
import torch

from vfl.attacks.cases import decoded, last_cuts, recorded_exchanges
from vfl.config import Experiment
from vfl.core.errors import DataError
from vfl.datasets import Dealing, load_bundled
from vfl.session import Adversary, rules
from vfl.session.trace import TRACE, TRAINING, Trace, read
from vfl.training.local import LocalSession


class Listener(Adversary):
    """Keeps what an honest party sends and receives."""

    def __init__(self):
        self.cuts, self.gradients, self.answers = {}, {}, []

    def cut(self, cut, context):
        if context.training:
            self.cuts[context.step] = cut.clone()
        else:
            self.answers.append(cut.clone())
        return cut

    def received(self, party, values, context):
        self.gradients[context.step] = values.clone()


class Recordings:
    """One session, recorded in memory, on disk and by a listener at the bank."""

    def __init__(self, folder, **changes):
        data = load_bundled(
            "digits", ["bank", "shop"], "lender", Dealing(0, limit=200), flatten=True
        )
        experiment = Experiment.model_validate(
            {
                "parties": {"bank": {"width": 5}, "shop": {"width": 4}},
                "label": {"party": "lender"},
                "train": {"epochs": 2, "batch_size": 30},
                "trace": {"phases": ["train", "validation", "test"]},
            }
            | changes
        )
        self.trace, self.bank = Trace(), Listener()
        self.session = LocalSession(
            experiment, data, outputs=10, checkpoints=folder, observers=[self.trace],
            adversaries={"bank": self.bank},
        ).run()  # fmt: skip
        self.folder = folder
        self.split = data["lender"].split

    def memory(self):
        return decoded(self.trace, self.session.terms, self.split)

    def disk(self, party):
        return read(self.folder / party / TRACE).decoded()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return Recordings(tmp_path_factory.mktemp("run"))


def test_an_exchange_is_what_the_party_sent_and_received(recordings):
    train = torch.from_numpy(recordings.split.train)
    found = recorded_exchanges(recordings.memory(), "bank", train)
    assert [one.step for one in found] == list(recordings.bank.gradients)
    assert {one.epoch for one in found} == {1, 2}
    exchanges = {
        one.step: one for one in rules.schedule(recordings.session.terms, recordings.split)
    }
    for one in found:
        assert torch.equal(one.cuts(), recordings.bank.cuts[one.step])
        assert torch.equal(one.gradients, recordings.bank.gradients[one.step])
        assert train[one.rows].tolist() == exchanges[one.step].rows.tolist()


@pytest.mark.parametrize(
    ("party", "codec"), [("bank", "randtopk:k=2,alpha=0.3,values=8"), ("lender", "none")]
)
def test_memory_and_both_ends_on_disk_say_the_same(party, codec, tmp_path):
    recordings = Recordings(tmp_path, codec=codec)
    rows = torch.from_numpy(recordings.split.train)[::3]
    one, other = (
        recorded_exchanges(frames, "bank", rows)
        for frames in (recordings.memory(), recordings.disk(party))
    )
    assert len(one) == len(other) > 0
    for here, there in zip(one, other, strict=True):
        assert here.step == there.step
        assert torch.equal(here.cuts(), there.cuts())
        for name in ("rows", "gradients"):
            assert torch.equal(getattr(here, name), getattr(there, name))


def test_the_last_cuts_are_those_of_the_last_answer(recordings):
    test = torch.from_numpy(recordings.split.test)
    found = last_cuts(recordings.disk("lender"), "bank", test.flip(0))
    assert torch.equal(found.flip(0), recordings.bank.answers[-1])


def test_a_row_without_a_cut_is_said(recordings):
    frames = decoded(
        [one for one in recordings.trace if one.kind in TRAINING],
        recordings.session.terms,
        recordings.split,
    )
    rows = torch.from_numpy(recordings.split.test)
    with pytest.raises(DataError, match="not every row has a recorded cut") as problem:
        last_cuts(frames, "bank", rows)
    assert problem.value.got == f"no cut of {len(rows)} of {len(rows)} rows"
