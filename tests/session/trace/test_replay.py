"""A trace read back: what it decodes to, and its training cuts as one."""

from collections import defaultdict

import pytest
import torch

from vfl.compression import CODECS
from vfl.core.errors import DataError, RunFolderError, SpecError, UserError
from vfl.core.registry import parse
from vfl.session import Adversary
from vfl.session.trace import read, training_cuts

CODEC_SPECS = [
    "none",
    "topk:k=3",
    "randtopk:k=3,alpha=0.5,values=8",
    "topk:k=3,values=4,packer=range,grad=4",
    "quantise:values=3",
    "relu:values=4",
    "l1:target=3,grad=bf16",
    "size:k=3",
    "sign",
    "rate",
    "error_feedback:k=2",
    "aqsgd",
    "c3sl:rows=3",
    "splitfc:keep=0.5",
    "bottlenet:k=3",
    "fedlite:pieces=2,clusters=4",
]


class Spy(Adversary):
    """Keeps what its party received, decoded; it changes nothing."""

    def __init__(self):
        self.seen = defaultdict(list)

    def received(self, party, values, context):
        self.seen[party].append((context.step, values.detach().clone()))


def same(found, seen):
    pairs = list(zip(found, seen, strict=True))
    assert pairs
    for (frame, values), (step, expected) in pairs:
        assert frame.step == step
        assert len(frame.rows) == len(values)
        assert values.dtype == expected.dtype
        assert values.numpy().tobytes() == expected.numpy().tobytes()


def test_every_registered_codec_is_replayed():
    assert {parse(spec)[0] for spec in CODEC_SPECS} == set(CODECS.names())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, training_in):
    """One training, which is only read."""
    made = training_in(tmp_path_factory.mktemp("recorded"))
    made.session().run()
    return made


@pytest.mark.parametrize("codec", CODEC_SPECS)
def test_each_party_decodes_what_it_saw(training, codec):
    spies = {name: Spy() for name in ("bank", "shop", "lender")}
    training.session(codec=codec, adversaries=spies).run()
    label = training.read("lender")
    for name in ("bank", "shop"):
        own = training.read(name)
        cuts, gradients = spies["lender"].seen[name], spies[name].seen[name]
        same(label.decoded(party=name, direction="up"), cuts)
        same(own.decoded(direction="up"), cuts)
        same(label.decoded(party=name, direction="down"), gradients)
        same(own.decoded(direction="down"), gradients)


def test_a_recording_knows_the_terms(recorded):
    assert recorded.read("shop").terms == recorded.session().terms
    assert recorded.read("shop").settings.snapshots == 2


def test_frames_are_chosen(recorded):
    label = recorded.read("lender")
    everything = list(label.frames())
    for chosen in (
        {"phase": "validation"},
        {"party": "shop"},
        {"direction": "down"},
        {"phase": "train", "party": "bank", "direction": "up"},
    ):
        expected = [
            one for one in everything if all(getattr(one, k) == v for k, v in chosen.items())
        ]
        assert list(label.frames(**chosen)) == expected
        assert 0 < len(expected) < len(everything)


def test_a_codec_that_learns_is_replayed_with_several_in_flight(training):
    spy = Spy()
    deep = {"epochs": 3, "batch_size": 40, "in_flight": 3}
    training.session(codec="relu:values=4", adversaries={"lender": spy}, train=deep).run()
    same(training.read("lender").decoded(party="bank", direction="up"), spy.seen["bank"])
    tests = list(training.read("bank").decoded(phase="test"))
    assert {frame.phase for frame, _ in tests} == {"test"}


@pytest.mark.parametrize("some", [{"phases": ["train"], "epochs": [2]}, {"phases": ["test"]}])
def test_a_codec_that_learns_needs_every_epoch(training, some):
    training.session(codec="relu:values=4", trace=some).run()
    assert training.frames("bank")
    with pytest.raises(SpecError, match="needs all frames before"):
        next(training.read("bank").decoded())


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(RunFolderError, match="contains no trace"):
        read(tmp_path)


class Keeper(Adversary):
    """Keeps the cuts that its party gives its codec in training; it changes nothing."""

    def __init__(self):
        self.cuts = []

    def cut(self, cut, context):
        if context.training:
            self.cuts.append(cut.clone())
        return cut


def test_cuts_are_those_of_the_training_in_their_order(training):
    keeper = Keeper()
    training.session(codec="none", adversaries={"bank": keeper}).run()
    expected = torch.cat(keeper.cuts)
    assert torch.equal(training_cuts(training.read("bank")), expected)
    assert torch.equal(training_cuts(training.read("lender"), "bank"), expected)
    assert torch.equal(training_cuts(training.read("bank"), "bank"), expected)


def test_several_parties_to_choose_from(recorded):
    with pytest.raises(UserError, match="several parties") as caught:
        training_cuts(recorded.read("lender"))
    assert (caught.value.got, caught.value.fix) == ("bank, shop", "--party bank")
    with pytest.raises(UserError, match="no cuts of 'shopp'") as caught:
        training_cuts(recorded.read("lender"), "shopp")
    assert caught.value.fix == "did you mean 'shop'?"
    with pytest.raises(UserError, match="no cuts of 'shop'"):
        training_cuts(recorded.read("bank"), "shop")


def test_a_trace_without_training_frames(training):
    training.session(trace={"phases": ["test"]}).run()
    with pytest.raises(DataError, match="no training cuts") as caught:
        training_cuts(training.read("bank"))
    assert caught.value.got == "phases test"
