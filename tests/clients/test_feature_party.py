import dataclasses

import pytest
import torch
from torch import nn

from vfl.clients import FeatureParty
from vfl.clients.feature_party import own_bottom
from vfl.config import Experiment
from vfl.core.errors import DataError, SpecError, UnknownNameError, WidthError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.core.storage import weights_digest
from vfl.datasets import Dealing, load_bundled
from vfl.models.bring import BroughtBottom
from vfl.models.mlp import MLPBottom
from vfl.session import Terms, rules
from vfl.session.exchange import Own
from vfl.transport.link import local_pair

SECRET = Secret.of_simulation(0, "bank")


@pytest.fixture(scope="module")
def bank():
    return load_bundled("digits", ["bank"], "lender", Dealing(0, limit=50), flatten=True)["bank"]


def terms_of(mode="train", **party):
    settings = {"width": 4, "bottom": "mlp:hidden=5"} | party
    experiment = Experiment.model_validate(
        {"parties": {"bank": settings}, "train": {"batch_size": 16, "epochs": 1}}
    )
    return Terms.of(experiment, mode, "r")


def build(bank, terms=None, secret=SECRET, **options):
    label, feature = local_pair()
    party = FeatureParty(bank, terms or terms_of(), feature, Own(secret), **options)
    return party, label


def test_first_weights_follow_from_the_partys_secret_alone(bank):
    before = torch.random.get_rng_state()
    first, same = build(bank)[0], build(bank)[0]
    other = build(bank, secret=Secret.of_simulation(1, "bank"))[0]
    assert first.weights_digest() == same.weights_digest() != other.weights_digest()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.name == "bank"


def test_it_plays_a_whole_session(bank):
    party, label = build(bank)
    exchanges = list(rules.schedule(terms_of(), bank.split))
    for exchange in exchanges:
        answer = Frame(Kind.GRAD, exchange.step, bytes(16 * len(exchange.rows)))
        label.send(answer if exchange.trains else Frame(Kind.ACK, exchange.step))
    before = party.weights_digest()
    party.run(exchanges)
    assert party.weights_digest() == before  # every gradient was zero
    sent = [label.receive() for _ in exchanges]
    assert [frame.step for frame in sent] == [exchange.step for exchange in exchanges]
    assert {frame.kind for frame in sent} == {Kind.CUT, Kind.QUERY}
    cut = torch.frombuffer(bytearray(sent[-1].payload), dtype=torch.float32)
    with torch.no_grad():
        expected = party.end.model["bottom"](bank.inputs[exchanges[-1].rows])
    torch.testing.assert_close(cut.view(-1, 4), expected)


def test_weights_are_taken_up_again(bank):
    first = build(bank, secret=Secret.of_simulation(1, "bank"))[0]
    again = build(bank, terms_of("predict"), weights=first.weights())[0]
    assert again.weights_digest() == first.weights_digest() == weights_digest(first.weights())


def test_a_party_without_columns_has_nothing_to_send(bank):
    empty = dataclasses.replace(bank, inputs=None)
    with pytest.raises(DataError, match="party 'bank' has no columns"):
        build(empty)


def test_a_party_may_bring_a_bottom_of_its_own(bank):
    module = nn.Linear(64, 4)
    assert build(bank, bottom=module)[0].end.model["bottom"] is module
    linear = build(bank, bottom="mlp:hidden=none")[0]
    assert sum(weights.numel() for weights in linear.weights().values()) == 65 * 4


def test_only_a_partys_own_file_may_name_code():
    assert isinstance(own_bottom("torch.nn:Linear"), BroughtBottom)
    assert isinstance(own_bottom("mlp:hidden=3"), MLPBottom)
    assert isinstance(own_bottom("mlp"), MLPBottom)


def test_the_terms_never_name_code(bank):
    with pytest.raises(UnknownNameError):
        build(bank, terms_of(bottom="torch.nn"))
    with pytest.raises(SpecError, match="a spec is name:key=value"):
        build(bank, terms_of(bottom="torch.nn:Linear"))


def test_a_width_the_codec_cannot_carry(bank):
    terms = terms_of().model_copy(update={"codec": "topk:k=9"})
    with pytest.raises(WidthError, match="4 wide"):
        build(bank, terms)
