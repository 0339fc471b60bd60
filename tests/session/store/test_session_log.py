"""The log of sessions: what an attacker on it can do, and who notices."""

import json
import multiprocessing
import re
import shutil

import pytest

from vfl.config import Experiment
from vfl.core.errors import ConsentError, DataError, StorageError
from vfl.core.frame import Frame, Kind
from vfl.session import Terms
from vfl.session.store.identity import Identity
from vfl.session.store.session_ledger import SessionLedger
from vfl.session.store.session_log import Consented, Head, SessionLog, verified

CONTENT = {"parties": {name: {"width": 4} for name in ("bank", "shop")}}
NOISE = "clipped_noise:norm=1.0,sigma=4.0"
BANK, LENDER, STRANGER = Identity.fresh(), Identity.fresh(), Identity.fresh()


def terms_of(run="one", mode="train", **changes):
    content = CONTENT | {"label": {"party": "lender"}, "defense": NOISE} | changes
    return Terms.of(Experiment.model_validate(content), mode, run)


def ledger_of(folder, party="bank", identity=BANK, consent="a" * 64, **more):
    log = SessionLog(folder, party, identity, Consented(consent, {"max_epochs": 7}))
    return SessionLedger(folder, party, log=log, **more)


def train(folder, lender=None, run="one", frames=3):
    """A session at the bank; the lender's end meets it if there is one."""
    ends = {"bank": ledger_of(folder / "bank")}
    if lender is not None:
        ends["lender"] = ledger_of(lender, "lender", LENDER)
    with ends["bank"].session(terms_of(run)) as (_, meter, _):
        if lender is None:
            meter.passes, meter.rows = 2, 50
            for step in range(frames):
                meter("bank", "up", Frame(Kind.CUT, step, bytes(100)))
            return
        with ends["lender"].session(terms_of(run)) as (_, other, _):
            announced = meter.standing.announce("lender")
            other.standing.admit("bank", announced)
            meter.standing.admit("lender", other.standing.answer())


def log_of(folder):
    return folder / "bank" / "log.jsonl"


def check(folder, keys=(BANK,), peers=()):
    return verified(log_of(folder), [key.public for key in keys], peers)


def test_a_session_leaves_what_it_asked_and_took(tmp_path):
    train(tmp_path)
    found = check(tmp_path)
    assert found.holds, found.problems
    consent, begun, ended = found.lines
    assert consent.event == "consent"
    assert consent.settings == {"max_epochs": 7}
    assert (begun.event, begun.run, begun.mode, begun.asked_by) == (
        "begun", "one", "train", "lender")  # fmt: skip
    assert begun.parties == ("bank", "shop", "lender")
    assert begun.terms == terms_of().digest()
    assert begun.consent == "a" * 64
    (entry,) = ledger_of(tmp_path / "bank").entries()
    assert (ended.outcome, ended.rows, ended.passes) == ("well", 50, 2)
    assert (
        ended.bytes_up
        == entry.spent["train"].bytes_up
        == 3 * Frame(Kind.CUT, payload=bytes(100)).wire_bytes
    )
    assert ended.epsilon == pytest.approx(2 * entry.epsilon) == entry.spent_epsilon
    assert found.open == 0


def test_no_nonce_and_no_secret_is_in_it(tmp_path):
    train(tmp_path)
    (entry,) = ledger_of(tmp_path / "bank").entries()
    assert entry.nonce not in log_of(tmp_path).read_text()


def test_a_changed_consent_is_written_once(tmp_path):
    for consent in ("a" * 64, "a" * 64, "b" * 64, "b" * 64):
        ledger_of(tmp_path / "bank", consent=consent).note("restored")
    events = [line.event for line in check(tmp_path).lines]
    assert events == ["consent", "restored", "restored", "consent", "restored", "restored"]


def test_a_refusal_is_written_with_its_reason(tmp_path):
    ledger = ledger_of(tmp_path / "bank", max_epsilon=0.001)
    with pytest.raises(ConsentError), ledger.session(terms_of()):
        pass
    *_, refused = check(tmp_path).lines
    assert refused.event == "refused"
    assert refused.outcome.startswith("V403: party 'bank' does not")
    assert ledger.entries() == []


def test_an_unforeseen_error_shows_its_type_alone(tmp_path):
    ledger = ledger_of(tmp_path / "bank")
    with pytest.raises(ValueError, match="cell"), ledger.session(terms_of()):
        raise ValueError("cell 41.7 of customer 0815")
    assert check(tmp_path).lines[-1].outcome == "ValueError"


# --- attacks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    folder = tmp_path_factory.mktemp("met")
    for run in ("one", "two", "three"):
        train(folder, folder / "lender", run)
    found = check(folder, peers=[folder / "lender" / "log.jsonl"])
    assert found.holds
    assert found.anchored == found.head.number - 1
    return folder


@pytest.fixture
def three(met, tmp_path):
    """A log of three sessions with the lender, whose own log is beside it."""
    shutil.copytree(met, tmp_path, dirs_exist_ok=True)
    return tmp_path


def lines_of(folder):
    return log_of(folder).read_bytes().splitlines(keepends=True)


def rewritten(folder, edit, identity=BANK):
    """The whole log written anew, chained and signed; `edit` changes facts of each line."""
    old = [json.loads(text)["line"] for text in lines_of(folder)]
    log_of(folder).unlink()
    log = SessionLog(folder / "bank", "bank", identity)
    for facts in old:
        kept = {name: value for name, value in edit(facts).items()
                if name not in ("number", "at", "party", "before", "key", "consent")}  # fmt: skip
        log.append(**kept)


def swap(lines):
    lines[1], lines[2] = lines[2], lines[1]


ATTACKS = {
    "change": lambda lines: lines.__setitem__(3, lines[3].replace(b'"well"', b'"fine"')
                                              .replace(b'"two"', b'"six"')),
    "swap": swap,
    "remove": lambda lines: lines.pop(3),
    "remove the first": lambda lines: lines.pop(0),
    "repeat": lambda lines: lines.insert(3, lines[2]),
    "insert": lambda lines: lines.insert(3, b"{}\n"),
    "tear": lambda lines: lines.append(lines[-1][:40]),
    "unsign": lambda lines: lines.__setitem__(
        3, re.sub(rb'"signature": "[0-9a-f]+"', b'"signature": ""', lines[3])),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_who_has_no_key_cannot_change_a_log(three, attack):
    lines = lines_of(three)
    attack(lines)
    assert b"".join(lines) != log_of(three).read_bytes()
    log_of(three).write_bytes(b"".join(lines))
    assert not check(three).holds


@pytest.mark.parametrize("flipped", range(0, 1200, 37))
def test_no_flipped_bit_passes(three, flipped):
    content = bytearray(log_of(three).read_bytes())
    content[flipped] ^= 1
    log_of(three).write_bytes(bytes(content))
    assert not check(three).holds


def test_a_log_signed_anew_by_a_stranger_does_not_hold(three):
    rewritten(three, lambda facts: facts, STRANGER)
    found = check(three)
    assert not found.holds
    assert found.strange == found.head.number


@pytest.mark.parametrize("left", [1, 3, 5])
def test_an_end_that_is_cut_off_is_noticed_with_a_peer_and_not_without(three, left):
    peer = [three / "lender" / "log.jsonl"]
    log_of(three).write_bytes(b"".join(lines_of(three)[:left]))
    assert check(three).holds, "nothing inside a chain shows that its end is gone"
    (problem, *_) = check(three, peers=peer).problems
    assert f"this log ends at {left}" in problem


def test_the_last_line_may_be_cut_off_and_its_session_stays_open(three):
    """The limit of the anchors: no peer has met the end of the last session."""
    log_of(three).write_bytes(b"".join(lines_of(three)[:-1]))
    found = check(three, peers=[three / "lender" / "log.jsonl"])
    assert found.holds
    assert found.open == 1


def test_an_owner_who_writes_it_anew_is_noticed_with_a_peer_and_not_without(three):
    peer = [three / "lender" / "log.jsonl"]

    def nicer(facts):
        return facts | {"rows": 1} if facts["event"] == "ended" else facts

    rewritten(three, nicer)
    assert check(three).holds, "its owner has the key"
    found = check(three, peers=peer)
    assert not found.holds
    assert any("rewritten afterwards" in problem for problem in found.problems)


def test_a_head_kept_of_another_party_says_nothing_of_this_one(three, tmp_path):
    assert check(three, peers=[log_of(three)]).anchored == 0


def test_after_a_restore_the_log_contradicts_what_peers_met(three):
    """A log that was put back from a copy goes on; its peers' heads show the fork."""
    peer = three / "lender" / "log.jsonl"
    log_of(three).write_bytes(b"".join(lines_of(three)[:4]))
    ledger_of(three / "bank").restored()
    for run in ("four", "five"):
        train(three, three / "lender", run)
    found = check(three, peers=[peer])
    assert "restored" in [line.event for line in found.lines]
    assert not found.holds
    assert any("rewritten afterwards" in one for one in found.problems)


def test_a_torn_last_line_is_written_over(tmp_path):
    train(tmp_path)
    whole = log_of(tmp_path).read_bytes()
    log_of(tmp_path).write_bytes(whole + whole[:50])
    assert not check(tmp_path).holds
    ledger_of(tmp_path / "bank").note("restored")
    assert check(tmp_path).holds
    assert log_of(tmp_path).read_bytes().startswith(whole)


def test_without_a_key_lines_are_chained_and_nobody_is_bound(tmp_path):
    ledger_of(tmp_path / "bank", identity=None).note("restored")
    found = check(tmp_path)
    assert not found.holds
    assert found.unsigned == 2
    assert not found.problems


def test_lines_of_an_earlier_key_need_that_key(tmp_path):
    ledger_of(tmp_path / "bank").note("restored")
    ledger_of(tmp_path / "bank", identity=STRANGER).note("restored")
    assert check(tmp_path, [STRANGER]).strange == 2
    assert check(tmp_path, [STRANGER, BANK]).holds


def _note(folder, times):
    ledger = ledger_of(folder / "bank")
    for _ in range(times):
        ledger.note("restored")


def test_several_processes_append_to_one_chain(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_note, args=(tmp_path, 5)) for _ in range(3)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(60)
    found = check(tmp_path)
    assert found.holds
    assert found.head.number == 1 + 3 * 5


def test_what_is_no_log_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="not a log"):
        verified(tmp_path / "other.csv", [])


def test_a_session_does_not_begin_where_its_line_cannot_be_written(tmp_path, monkeypatch):
    ledger = ledger_of(tmp_path / "bank")

    def full(*_, **__):
        raise StorageError("a file cannot be written")

    monkeypatch.setattr(ledger.log, "append", full)
    with pytest.raises(StorageError), ledger.session(terms_of()):
        raise AssertionError("it began")


def test_an_announced_head_is_that_of_the_log(tmp_path):
    ledger = ledger_of(tmp_path / "bank")
    assert ledger.log.head() == Head()
    with ledger.session(terms_of()) as (_, meter, _):
        announced = meter.standing.announce("lender")
        assert announced.head == ledger.log.head() == check(tmp_path).head
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "bank", copy / "bank")
    assert check(copy).head.number == announced.head.number + 1
