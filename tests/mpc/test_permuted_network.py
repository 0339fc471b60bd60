"""Three parties of a session whose network nobody holds, over two streams and along a schedule."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.mpc.test_relay import Session
from vfl.core.errors import DisagreementError, ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.mpc.secure.ends import Outer
from vfl.mpc.secure.permuted import Facts, Permuted
from vfl.mpc.three_party.network import Layer
from vfl.mpc.three_party.training import ThreePartyNetwork, first_weights, targets_of, whole_network
from vfl.session.schedule import training

COLUMNS, COUNTS = (3, 2), {"train": 96, "validation": 8, "test": 20}
SOURCE = torch.Generator().manual_seed(0)
X = {phase: torch.randn(count, 5, generator=SOURCE).double() for phase, count in COUNTS.items()}
LABELS = {phase: (rows[:, 0] - rows[:, 4] > 0).long() for phase, rows in X.items()}


def play(mode, label_role, change=lambda facts: facts, timeout_s=5):
    """A training of three epochs; what each party has in the end, by role."""

    def program(party):
        role, holds = party.role, party.role < 2
        top = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
        found = facts_of(COLUMNS, whole_network(COLUMNS, None, top, 2))
        found = found if role == label_role else change(found)
        party.agree({"facts": found.model_dump(mode="json")}, "session")
        ours = ThreePartyNetwork(party, found.layers, found.columns, label_role)
        secret = Secret.of_simulation(0, f"P{role}")
        ours.share_weights(first_weights(found.layers, secret) if holds else None)
        for phase, count in found.rows.items():
            columns = X[phase].split(COLUMNS, 1)[role] if holds else None
            ours.share_rows(phase, count, columns, phase)
        targets = targets_of(LABELS["train"], 2) if role == label_role else None
        ours.share_targets(COUNTS["train"], targets)
        answers = {}
        for exchange in training(7, 3, 16, *(np.arange(count) for count in COUNTS.values())):
            index = torch.from_numpy(exchange.rows)
            if exchange.trains:
                ours.train_step(index, 0.5)
            else:
                answers[exchange.phase] = ours.outputs(exchange.phase, index, "outputs")
        return answers, ours.weights(), sum(each.sent.total() for each in party.channels.values())

    star = Session(label_role, timeout_s=timeout_s)
    return star.run(program, mode)[1]


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize("label_role", [0, 1, 2])
def test_the_label_party_learns_the_outputs_along_the_schedule(mode, label_role):
    found = play(mode, label_role)
    for role, (answers, weights, sent) in enumerate(found):
        assert [each is not None for each in answers.values()] == [role == label_role] * 2
        assert bool(weights) == (role < 2)
        assert sent > 0
    answers = found[label_role][0]
    right = (answers["test"].argmax(1) == LABELS["test"]).double().mean()
    assert right > 0.8


@pytest.mark.parametrize("label_role", [0, 2])
def test_parties_that_were_told_different_facts_go_no_further(label_role):
    told = []

    def change(facts):
        told.append(facts)
        return facts if len(told) == 1 else facts.model_copy(update={"classes": 3})

    with pytest.raises(DisagreementError):
        play("fast", label_role, change, timeout_s=0.5)


def facts_of(columns=COLUMNS, layers=None, rows=COUNTS):
    layers = layers or [Layer(5, 1, "sigmoid")]
    return Facts(columns=columns, rows=rows, classes=2, layers=tuple(layers))


@pytest.mark.parametrize(
    ("facts", "own", "error"),
    [
        (facts_of(columns=(2, 3)), (3, COUNTS), DisagreementError),
        (facts_of(rows=COUNTS | {"test": 21}), (3, COUNTS), DisagreementError),
        (facts_of(layers=[Layer(5, 4, "relu"), Layer(3, 1)]), (3, COUNTS), ProtocolError),
        (facts_of(layers=[Layer(4, 1)]), None, ProtocolError),
        (facts_of(layers=[Layer(5, 1, "system")]), None, ProtocolError),
    ],
)
def test_what_the_label_party_describes_is_compared(facts, own, error):
    with pytest.raises(error):
        facts.check(own, 0)
    facts_of().check((3, COUNTS), 0)


class Answering:
    """A link on which one frame comes, and a party that announces nothing."""

    def __init__(self, frame):
        self.receive = lambda: frame
        self.announced = lambda: None


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.PROTOCOL, 1, b"{}"),
        Frame(Kind.PROTOCOL, 1, b" " * (1 << 15)),
        Frame(Kind.PROTOCOL, 2, facts_of().model_dump_json().encode()),
        Frame(Kind.CUT, 1, facts_of().model_dump_json().encode()),
        *(
            Frame(Kind.PROTOCOL, 1, facts_of(layers=[layer]).model_dump_json().encode())
            for layer in (Layer(0, 1), Layer(5, 2**32), Layer(5, 1, "relu" * 9))
        ),
        Frame(Kind.PROTOCOL, 1, facts_of().model_dump_json().replace("bias", "bios").encode()),
    ],
)
def test_another_form_of_description_is_refused(frame):
    with pytest.raises(ProtocolError):
        described(frame)


def test_a_description_is_read():
    told = facts_of()
    assert described(Frame(Kind.PROTOCOL, 1, told.model_dump_json().encode())) == told


def described(frame):
    """What an outer party makes of what the label party sends it."""
    about = SimpleNamespace(label_party="lender", binding=SimpleNamespace(session="", attempt=0))
    outer = Outer(Permuted(), "bank", about, about, None)
    outer.direct = {"lender": Answering(frame)}
    return outer.describe(Answering(frame))
