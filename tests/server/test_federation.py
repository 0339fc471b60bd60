"""Finding the parties with a stand-in for Flower: who is told, who is told again, what ends it."""

import json
import warnings
from types import SimpleNamespace

import pytest

from vfl.config import Experiment
from vfl.datasets import load_bundled
from vfl.errors import AuthenticationError, MissingPartyError, PeerFailedError
from vfl.session import Introduction, SessionMessage, Terms
from vfl.transport import Hello, TcpLink, Timeouts

with warnings.catch_warnings():  # Flower imports typer, which uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.server import federation as room
    from vfl.server.federation import Federation

EXPERIMENT = Experiment.model_validate({"parties": {"bank": {"width": 4}}})
TERMS = Terms.of(EXPERIMENT, "train", "run")
NODE = SimpleNamespace(node_id=7, name="bank")
FAST = Timeouts(rejoin_window_s=0.3, retry_s=0.02)


@pytest.fixture(autouse=True)
def message(monkeypatch):
    """Flower's own message can only be made inside a run of Flower."""
    monkeypatch.setattr(room, "Message", lambda content, **about: SimpleNamespace(content=content))


@pytest.fixture(scope="module")
def data():
    return load_bundled("digits", ["bank"], 0, "label", limit=100)


class Flower:
    """A grid of one node: gives each message to `at_node` and keeps what that answers."""

    def __init__(self, at_node):
        self.at_node = at_node
        self.told = []
        self.online = True
        self._replies = []

    def get_nodes(self):
        online, self.online = self.online, True
        return [NODE] if online else []

    def push_messages(self, messages):
        (message,) = messages
        self.told.append(SessionMessage.parse(str(message.content["session"]["message"])))
        answer = self.at_node(self, self.told[-1])
        if answer is not None:
            self._replies.append(answer(str(len(self.told))))
        return [str(len(self.told))]

    def pull_messages(self, identifiers):
        given, self._replies = self._replies, []
        return given


def flower_error(code):
    return lambda identifier: SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identifier),
        has_error=lambda: True,
        error=SimpleNamespace(code=code),
    )


def own_failure(code):
    record = {"failure": json.dumps({"code": code, "what": "it is so"})}
    return lambda identifier: SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identifier),
        has_error=lambda: False,
        content={"session": record},
    )


@pytest.fixture
def attach(data):
    """Opens the stream as the ClientApp would; links are closed afterwards."""
    links = []

    def make(told):
        about = Introduction.of(data["bank"], TERMS, told.session).model_dump()
        hello = Hello(told.session, told.node, told.token, about)
        link = TcpLink.connect(told.host, told.port, hello, told.ca_pem.encode(), FAST)
        links.append(link)

    yield make
    for link in links:
        link.close()


def join(flower, data, patience_s=10.0):
    said = []
    with Federation(
        flower, TERMS, EXPERIMENT.federation, data["label"], patience_s, said.append
    ) as federation:
        assert list(federation.join([])) == ["bank"]
    return said


def test_a_party_is_told_once(data, attach):
    flower = Flower(lambda grid, told: attach(told))
    assert sorted(join(flower, data)) == [
        "party bank is here: 100 rows, same order",
        "told bank about the session",
    ]
    assert len(flower.told) == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (flower_error(5), "its SuperNode is not online"),
        (flower_error(8), "its process stopped responding"),
        (own_failure("V405"), "it is so"),
    ],
    ids=["offline", "silent", "lost"],
)
def test_a_party_that_was_away_is_told_again_with_a_new_token(data, attach, answer, why):
    def at_node(grid, told):
        if len(grid.told) == 1:
            grid.online = False
            return answer
        return attach(told)

    flower = Flower(at_node)
    said = join(flower, data)
    assert f"party bank is not here ({why}); it is told again when it is back" in said
    first, second = flower.told
    assert first.session == second.session
    assert first.token != second.token


def test_the_token_of_the_first_message_is_worth_nothing_then(data, attach):
    def at_node(grid, told):
        if len(grid.told) == 1:
            return flower_error(5)
        with pytest.raises(AuthenticationError):
            attach(grid.told[0])
        return attach(told)

    join(Flower(at_node), data)


@pytest.mark.parametrize(
    ("answer", "told"),
    [(flower_error(2), "party 'bank' stopped"), (own_failure("V403"), "stopped with V403")],
    ids=["an exception", "a refusal"],
)
def test_any_other_failure_ends_the_session(data, answer, told):
    with pytest.raises(PeerFailedError, match=told):
        join(Flower(lambda grid, message: answer), data)


def test_patience_ends(data):
    with pytest.raises(MissingPartyError, match="no stream from bank"):
        join(Flower(lambda grid, told: None), data, patience_s=0.3)
