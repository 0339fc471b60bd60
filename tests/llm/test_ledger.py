"""What a model owner has answered, on its disk."""

import json
import time

import pytest

from vfl.config import read_party_file
from vfl.core.errors import ConsentError, ReusedPadError
from vfl.llm.file import LlmLimits
from vfl.llm.ledger import QuestionLedger
from vfl.llm.material import MaterialStore
from vfl.session.store.party_folder import own_ledger

ONE, OTHER = "1" * 64, "2" * 64
LIMITS = LlmLimits(max_questions=5, questions_per_hour=3)


@pytest.fixture
def ledger(tmp_path):
    return QuestionLedger(tmp_path / "questions", "owner", tmp_path)


def test_questions_are_counted_by_weights_and_by_hour(ledger, monkeypatch):
    ledger.require(ONE, 3, LIMITS)
    ledger.count(ONE, 3)
    with pytest.raises(ConsentError, match="within an hour"):
        ledger.require(ONE, 1, LIMITS)
    ledger.require(OTHER, 3, LIMITS)
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    ledger.require(ONE, 2, LIMITS)
    with pytest.raises(ConsentError, match="fewer questions") as refused:
        ledger.require(ONE, 3, LIMITS)
    assert (refused.value.got, refused.value.want) == ("6", "at most 5")
    ledger.count(ONE, 2)
    (entry,) = ledger.entries()
    assert (entry.texts, [count for _, count in entry.recent]) == (5, [2])


def test_answers_that_an_earlier_vfl_noted_count(ledger, tmp_path):
    now = time.time()
    lines = [
        {"at": now - 9000, "weights": ONE, "prompt_tokens": 4, "count": 1},
        {"at": now - 10, "weights": ONE, "prompt_tokens": 4, "count": 1, "texts": 2},
        {"at": now - 10, "weights": OTHER, "prompt_tokens": 4, "count": 1, "texts": 3},
    ]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(ConsentError, match="within an hour"):
        ledger.require(ONE, 2, LIMITS)
    ledger.require(ONE, 1, LIMITS)
    ledger.count(ONE, 1)
    (entry,) = ledger.entries()
    assert entry.texts == 4  # and they are counted once
    with pytest.raises(ConsentError, match="within an hour"):
        ledger.require(ONE, 1, LIMITS)


def test_the_ledger_of_a_party_has_its_questions(tmp_path):
    """`vfl sessions --restored` gives them up with all else in the store."""
    (tmp_path / "party.toml").write_text('party = "bank"\n[data]\nsource = "d.csv"\nid = "id"\n')
    ledger = own_ledger(read_party_file(tmp_path / "party.toml"))
    (questions,) = [one for one in ledger.others if isinstance(one, QuestionLedger)]
    questions.count(ONE, 1)
    ledger.restored()
    with pytest.raises(ConsentError, match="fewer questions"):
        questions.require(ONE, 1, LlmLimits())


def test_material_that_an_earlier_vfl_marked_stays_used(tmp_path):
    store = MaterialStore(tmp_path, "owner", "setup")
    store.put("a", [])
    (tmp_path / "a.used").write_text("")
    with pytest.raises(ReusedPadError, match="used before"):
        store.take("a")
    assert [entry.run for entry in store.entries()] == ["a"]
