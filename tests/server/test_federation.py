"""Finding the parties with a stand-in for Flower: who is told, who is told again, what ends it."""

import json
import warnings
from types import SimpleNamespace

import pytest

from vfl.config import Experiment
from vfl.core.errors import (
    AuthenticationError,
    DisagreementError,
    MissingPartyError,
    PeerFailedError,
    ProtocolError,
)
from vfl.datasets import Dealing, load_bundled
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
    return load_bundled("digits", ["bank"], "label", Dealing(0, limit=100))


class Flower:
    """A grid of one node: gives each message to `at_node` and keeps what that answers."""

    def __init__(self, at_node, nodes=(NODE,)):
        self.at_node, self.nodes = at_node, nodes
        self.told = []
        self.online = True
        self._replies = []

    def get_nodes(self):
        online, self.online = self.online, True
        return list(self.nodes) if online else []

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


def flower_error(code, reason=""):
    return lambda identifier: SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identifier),
        has_error=lambda: True,
        error=SimpleNamespace(code=code, reason=reason),
    )


def own_failure(code):
    return reply({"session": {"failure": json.dumps({"code": code, "what": "it is so"})}})


def reply(content):
    return lambda identifier: SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identifier),
        has_error=lambda: False,
        content=content,
    )


@pytest.fixture
def attach(data):
    """Opens the stream as the ClientApp would; links are closed afterwards."""
    links = []

    def make(told, party="bank"):
        about = Introduction.of(data["bank"], TERMS, told.session).model_dump() | {"party": party}
        hello = Hello(told.session, told.node, told.token, about)
        link = TcpLink.connect(told.host, told.port, hello, told.ca_pem.encode(), FAST)
        links.append(link)

    yield make
    for link in links:
        link.close()


def join(flower, data, patience_s=10.0, **more):
    said = []
    with Federation(
        flower, TERMS, EXPERIMENT.federation, data["label"], patience_s, said.append, **more
    ) as federation:
        assert list(federation.join([])) == ["bank"]
    return said


def test_a_party_is_told_once(data, attach):
    flower = Flower(lambda grid, told: attach(told))
    assert sorted(join(flower, data)) == [
        "invited bank to the session",
        "party bank is here: 100 rows, same order",
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
    assert f"party bank is absent ({why}); it is invited again when its SuperNode is back" in said
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


@pytest.mark.parametrize(
    ("reason", "got"),
    [
        ("<class 'vfl.core.errors.ConfigError'>:<'anything'>", "Flower error 2 (ConfigError)"),
        ("<class 'vfl.core.errors.Strange'>:<'anything'>", "Flower error 2"),
        ("<class 'OSError'>:<'anything'>", "Flower error 2"),
    ],
)
def test_a_node_that_fails_before_its_session_names_the_class(data, reason, got):
    """The text of a foreign node is not trusted; the name of one of vfl's own classes is."""
    with pytest.raises(PeerFailedError) as caught:
        join(Flower(lambda grid, message: flower_error(2, reason)), data)
    assert caught.value.got == got
    assert "vfl doctor party.toml" in str(caught.value)


def node(number, name):
    return SimpleNamespace(node_id=number, name=name)


@pytest.mark.parametrize("name", ["node-7", "", "Bank", "shop"])
def test_a_node_is_the_party_it_is_registered_as(data, attach, name):
    """Whatever it is called, or says of itself: nobody asks it, so it gets no token."""
    flower = Flower(lambda grid, told: attach(told), [node(1, name)])
    with pytest.raises(MissingPartyError, match="no SuperNode of bank") as caught:
        join(flower, data, patience_s=0.3)
    assert flower.told == []
    assert caught.value.got == "1 SuperNode: none belongs to an expected party"


def test_nameless_nodes_do_not_count_beside_a_party(data, attach):
    nodes = [node(1, ""), NODE, node(9, "node-x")]
    flower = Flower(lambda grid, told: attach(told), nodes)
    join(flower, data)
    assert [told.node for told in flower.told] == ["7"]


def test_two_nodes_of_one_name_are_refused(data):
    flower = Flower(lambda grid, told: None, [NODE, node(8, "bank")])
    with pytest.raises(DisagreementError, match="two SuperNodes") as caught:
        join(flower, data)
    assert caught.value.got == "2 of 'bank'"
    assert flower.told == []


@pytest.mark.parametrize("said", ["shop", "label", "bank\n", "\x1b[2J", "b" * 40])
def test_a_party_that_introduces_itself_under_another_name_is_refused(data, attach, said):
    def at_node(grid, told):
        with pytest.raises((DisagreementError, PeerFailedError)):
            attach(told, party=said)

    with pytest.raises((DisagreementError, ProtocolError)) as caught:
        join(Flower(at_node), data)
    assert said not in ("\x1b[2J", "bank\n") or said not in str(caught.value)


def test_positions_name_the_parties_in_a_simulation_alone(data, attach):
    nodes = [node(1, ""), node(2, "")]
    flower = Flower(lambda grid, told: attach(told), nodes)
    assert "invited node 1 to the session" in join(flower, data, simulation=True)


MALFORMED = {
    "no session": {},
    "no text": {"session": {"failure": 3}},
    "no JSON": {"session": {"failure": "{"}},
    "deep": {"session": {"failure": "[" * 60_000}},
    "10 MB": {"session": {"failure": json.dumps({"code": "V403", "what": "x" * 10_000_000})}},
    "no code": {"session": {"failure": '{"what": "no"}'}},
    "odd code": {"session": {"failure": '{"code": "V403\\n", "what": "no"}'}},
    "odd types": {"session": {"failure": '{"code": "V403", "what": "no", "got": 1}'}},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_reply_of_another_form_names_its_party(data, name):
    with pytest.raises(ProtocolError) as caught:
        join(Flower(lambda grid, told: reply(MALFORMED[name])), data)
    assert caught.value.where == "the reply of party 'bank'"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("code", ["V403", "V405"])
def test_a_hostile_reply_steers_no_terminal(data, code):
    evil = {"code": code, "what": "\x1b[2Jall well\nerror[V000]: \u202e", "got": "\x9b" * 9000}
    content = {"session": {"failure": json.dumps(evil)}}
    said = []
    with (
        pytest.raises((PeerFailedError, MissingPartyError)) as caught,
        Federation(
            Flower(lambda grid, told: reply(content)),
            TERMS,
            EXPERIMENT.federation,
            data["label"],
            0.5,
            said.append,
        ) as federation,
    ):
        federation.join([])
    for line in (*said, *str(caught.value).split("\n")):
        assert line.isprintable()
        assert len(line) < 2100
