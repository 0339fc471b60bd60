"""`vfl llm` as three real processes: who is killed in the middle is named, and goes on later."""

import json
import os
import signal
import subprocess
from contextlib import ExitStack, suppress

import pytest
import tomli_w
from llm_parties import LlmParties, small_model
from real_deployment import Command

from benchmarks.emulation import Wan
from vfl.llm.product import LLM_FILE

pytestmark = pytest.mark.net
QUESTION, TOKENS = "a film", 12
SLOW = Wan.parse("20mbps,60ms")


class Real:
    """A project whose parties are commands; the user's streams are slow lines that are watched."""

    def __init__(self, folder, held):
        self.parties = LlmParties(folder, model=small_model(vocabulary=256, width=64))
        self.model, self.folder, self.held = self.parties.model, folder, held
        self.commands = []
        self.lines = {
            name: held.enter_context(self.parties.line(name, SLOW)) for name in ("owner", "dealer")
        }
        for name in ("owner", "user", "dealer"):
            changes = {"rejoin_s": 2.0, "patience_s": 30.0}
            if name == "user":
                changes |= {peer: f"127.0.0.1:{line.port}" for peer, line in self.lines.items()}
            file = self.parties.file(name, **changes)
            text = tomli_w.dumps(file.model_dump(mode="json", exclude_none=True))
            (self.parties.folder / name / LLM_FILE).write_text(text)

    def run(self, name, *arguments):
        """A command of a party."""
        number = len(self.commands)
        command = Command(self.folder, f"{number}-{name}", "llm", *arguments)
        self.commands.append(command)
        self.held.callback(command.stop)
        return command

    def stand(self, name):
        """A party's own command, once it listens."""
        verb = {"owner": "serve", "dealer": "deal"}[name]
        command = self.run(name, verb, self.parties.folder / name)
        command.wait_for("listens on", 60)
        return command

    def ask(self, *options):
        return self.run(
            "user", "ask", self.parties.folder / "user", QUESTION, "--max-tokens", TOKENS, *options
        )

    def answer(self):
        """Of a new question, as JSON."""
        command = self.ask("--json")
        assert command.wait(120) == 0, command.said()
        return json.loads(command.said()[command.said().index("{") :])

    def used(self, name):
        """How much material a party has marked as used."""
        return len(list((self.parties.folder / name / "store").glob("material-*/*.used")))


@pytest.fixture
def real(tmp_path):
    with ExitStack() as held:
        yield Real(tmp_path, held)


@pytest.fixture
def wanted(real):
    return real.model.generate(list(QUESTION.encode()), TOKENS)


def kill(command):
    os.kill(command.pid, signal.SIGKILL)
    command.wait(10)


def deal_ahead(real, questions, left=True):
    length = len(QUESTION)
    sizes = ["--prompt-tokens", length, "--max-tokens", TOKENS, "--questions", questions]
    command = real.run("user", "deal", real.parties.folder / "user", *sizes)
    assert command.wait(120) == 0, command.said()
    assert left is None or (
        f"questions of {length} tokens, answers of up to {TOKENS}: {questions} left"
        in command.said()
    )


def test_a_user_killed_in_the_middle_asks_again_and_its_material_never_returns(real, wanted):
    owner, _ = real.stand("owner"), real.stand("dealer")
    deal_ahead(real, 2)
    asking = real.ask()
    while real.used("dealer") == 0:  # which is the last to mark it
        assert asking.poll() is None, asking.said()
    kill(asking)
    assert real.answer()["tokens"] == wanted
    owner.wait_for("party 'user' disconnected and did not reconnect", 30)
    assert real.used("user") == real.used("owner") == 2


def test_a_dealing_killed_while_questions_are_answered_leaves_nothing_to_be_used_twice(
    real, wanted
):
    """Questions are answered before, while and after it is killed; each has material of its own."""
    real.stand("owner"), real.stand("dealer")
    deal_ahead(real, 3)
    sizes = ["--prompt-tokens", len(QUESTION), "--max-tokens", TOKENS, "--questions", 9]
    dealing = real.run("user", "deal", real.parties.folder / "user", *sizes)
    dealing.wait_for("dealt 1 of 9", 60)
    asking = real.ask("--json")
    while real.used("dealer") == 0:  # the last to mark it
        assert asking.poll() is None, asking.said()
    kill(dealing)
    assert asking.wait(120) == 0, asking.said()
    assert json.loads(asking.said()[asking.said().index("{") :])["tokens"] == wanted
    asking = real.ask()
    while real.used("dealer") == 1:
        assert asking.poll() is None, asking.said()
    kill(asking)
    assert real.answer()["tokens"] == wanted
    deal_ahead(real, 1, left=None)  # what only one party has of a killed dealing is removed
    assert real.answer()["tokens"] == wanted
    names = {
        name: {path.name for path in (real.parties.folder / name / "store").glob("*/*.used")}
        for name in ("owner", "user", "dealer")
    }
    assert len(names["user"]) == 4
    assert names["user"] == names["dealer"] <= names["owner"]


def test_an_owner_killed_in_the_middle_is_named_and_answers_after_its_restart(real, wanted):
    owner, dealer = real.stand("owner"), real.stand("dealer")
    deal_ahead(real, 2)
    asking = real.ask()
    while real.used("dealer") == 0:
        assert asking.poll() is None, asking.said()
    kill(owner)
    assert asking.wait(60) == 3
    assert "error[V405]: the model owner cannot be reached" in asking.said()
    assert "see the output of the model owner's command" in asking.said()
    assert f"where 127.0.0.1:{real.lines['owner'].port}" in asking.said()
    assert real.used("owner") == 1
    owner = real.stand("owner")
    assert real.answer()["tokens"] == wanted  # with what was dealt before
    dealer.stop()
    asking = real.ask()
    assert asking.wait(60) == 3
    assert "the dealer cannot be reached" in asking.said()


def test_a_dealer_killed_while_it_deals_is_named_and_deals_after_its_restart(real, wanted):
    real.stand("owner")
    dealer = real.stand("dealer")
    asking = real.ask()
    while real.lines["dealer"].connections == 0:
        assert asking.poll() is None, asking.said()
    kill(dealer)
    assert asking.wait(60) == 3
    assert "dealer" in asking.said()
    assert real.used("user") == real.used("owner") == 0
    real.stand("dealer")
    assert real.answer()["tokens"] == wanted


def test_a_line_cut_again_and_again_and_slow_gives_the_same_answer(real, wanted):
    real.stand("owner")
    real.stand("dealer")
    deal_ahead(real, 1)
    asking = real.ask("--json")
    while real.used("user") == 0:
        assert asking.poll() is None, asking.said()
    for _ in range(3):
        real.lines["owner"].cut()
        with suppress(subprocess.TimeoutExpired):
            asking.wait(0.7)
    assert asking.wait(60) == 0, asking.said()
    assert json.loads(asking.said()[asking.said().index("{") :])["tokens"] == wanted
