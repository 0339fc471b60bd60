"""The training cuts of a trace, and codecs measured on the cuts of a real training."""

import pytest
import torch

from vfl.compression import make
from vfl.compression.measure import measure_codec
from vfl.errors import DataError, UserError
from vfl.exchange import Adversary
from vfl.trace import training_cuts

#: 210 training rows in three frames of 70 an epoch, so that no frame is shorter.
WHOLE = {"epochs": 2, "batch_rows": 70}


class Keeper(Adversary):
    """Keeps the cuts that its party gives its codec in training; it changes nothing."""

    def __init__(self):
        self.cuts = []

    def cut(self, cut, moment):
        if moment.training:
            self.cuts.append(cut.clone())
        return cut


def sent(session, party):
    """What the ledger counted of a party's training cuts."""
    (row,) = (
        row
        for row in session.ledger.rows()
        if (row.party, row.direction, row.phase) == (party, "up", "train")
    )
    return row.wire_bytes


def test_cuts_are_those_of_the_training_in_their_order(training):
    keeper = Keeper()
    training.session(codec="none", adversaries={"bank": keeper}).run()
    expected = torch.cat(keeper.cuts)
    assert torch.equal(training_cuts(training.read("bank")), expected)
    assert torch.equal(training_cuts(training.read("lender"), "bank"), expected)
    assert torch.equal(training_cuts(training.read("bank"), "bank"), expected)


@pytest.mark.parametrize(
    "codec",
    [
        "randtopk:k=3,alpha=0.3,values=8",
        "topk:k=3,values=4,packer=range",
        "quantise:values=3,packer=range",
        "relu:values=4",
        "rate",
    ],
)
def test_measured_bytes_are_those_the_ledger_counted(training, codec):
    """Adaptive packers too: both ends learn in a measurement what they learn in a training."""
    keeper = Keeper()
    session = training.session(codec=codec, adversaries={"bank": keeper}, train=WHOLE).run()
    cut = torch.cat(keeper.cuts)
    measured = measure_codec(make(codec), cut, width=8, batch_rows=70)
    assert measured.wire_bytes == sent(session, "bank")


def test_another_codec_on_a_trace_takes_what_it_would_have_taken(training, training_in, tmp_path):
    training.session(codec="none", train=WHOLE).run()
    cut = training_cuts(training.read("lender"), "shop")
    other = training_in(tmp_path / "other")
    session = other.session(codec="topk:k=2,values=8", train=WHOLE).run()
    measured = measure_codec(make("topk:k=2,values=8"), cut, width=6, batch_rows=70)
    assert measured.wire_bytes == sent(session, "shop")


def test_several_parties_to_choose_from(training):
    training.session().run()
    with pytest.raises(UserError, match="several parties") as caught:
        training_cuts(training.read("lender"))
    assert (caught.value.got, caught.value.fix) == ("bank, shop", "--party bank")
    with pytest.raises(UserError, match="no cuts of 'shopp'") as caught:
        training_cuts(training.read("lender"), "shopp")
    assert caught.value.fix == "did you mean 'shop'?"
    with pytest.raises(UserError, match="no cuts of 'shop'"):
        training_cuts(training.read("bank"), "shop")


def test_a_trace_without_training_frames(training):
    training.session(trace={"phases": ["test"]}).run()
    with pytest.raises(DataError, match="no training cuts") as caught:
        training_cuts(training.read("bank"))
    assert caught.value.got == "phases test"
