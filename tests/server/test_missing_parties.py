"""Who is waited for, and what is said when they do not come; real nodes are in tests/federation."""

import warnings
from types import SimpleNamespace

import pytest

from vfl.config import Experiment
from vfl.core.errors import MissingPartyError
from vfl.datasets import Dealing, load_bundled
from vfl.session import Terms

with warnings.catch_warnings():  # importing typer, as Flower does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.server import federation

PATIENCE_S = 0.02


class Nodes:
    """A control plane with nodes of these names, none of which ever answers."""

    def __init__(self, *names):
        self.nodes = [SimpleNamespace(node_id=n, name=name) for n, name in enumerate(names)]

    def get_nodes(self):
        return self.nodes

    def push_messages(self, messages):
        return ["id"]

    def pull_messages(self, identifiers):
        return []


@pytest.fixture
def join():
    """What joining says when nobody else comes."""
    experiment = Experiment.model_validate(
        {
            "parties": {"bank": {}, "shop": {}},
            "label": {"party": "lender"},
            "federation": {"superlink": "lender.example:8000"},
        }
    )
    terms = Terms.of(experiment, "train", "trial")
    own = load_bundled("digits", ["bank", "shop"], "lender", Dealing(0, limit=40), flatten=True)[
        "lender"
    ]

    def joined(*names):
        session = federation.Federation(
            Nodes(*names), terms, experiment.federation, own, PATIENCE_S
        )
        with pytest.raises(MissingPartyError) as caught, session:
            session.join([])
        return caught.value

    return joined


@pytest.mark.parametrize(
    ("names", "missing", "got"),
    [
        ((), "bank, shop", "0 SuperNodes"),
        (("bank",), "shop", "1 SuperNode: bank"),
        (("stranger",), "bank, shop", "1 SuperNode: none belongs to an expected party"),
        (("bank", "stranger"), "shop", "2 SuperNodes: bank"),
    ],
)
def test_a_party_without_a_node(join, names, missing, got):
    error = join(*names)
    assert error.what == f"no SuperNode of {missing} after 0.02 s"
    assert error.where == "the SuperLink at lender.example:8000"
    assert (error.got, error.want) == (got, "a SuperNode for each of bank, shop")
    assert "vfl doctor" in error.fix


def test_nodes_that_open_no_stream(join, monkeypatch):
    monkeypatch.setattr(federation, "Message", lambda *content, **about: None)  # Flower's own
    error = join("bank", "shop")
    assert error.what == "no stream from bank, shop within 0.02 s"
    assert error.where.startswith("the stream at 127.0.0.1:")
    assert error.got == "no party"
