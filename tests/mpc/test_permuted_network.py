"""Three parties of a session whose network nobody holds, over two streams and along a schedule."""

from types import SimpleNamespace

import pytest

from vfl.core.errors import DisagreementError, ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.mpc.secure.ends import Outer
from vfl.mpc.secure.permuted import Facts, Permuted
from vfl.mpc.three_party.network import Layer

COLUMNS, COUNTS = (3, 2), {"train": 96, "validation": 8, "test": 20}


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
