"""The ledger of sessions: a name is bound once, and nothing that protects is drawn twice."""

import multiprocessing
import stat

import pytest

from vfl.config import Experiment
from vfl.core.errors import DisagreementError, RunFolderError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.session import Exchange, Terms
from vfl.session.ledger import Meter, SessionLedger

CONTENT = {"parties": {name: {"width": 4} for name in ("bank", "shop", "club")}, "merge": "sum"}
WEIGHTS = "a" * 64


def terms_of(mode="train", run="one", **changes):
    return Terms.of(Experiment.model_validate(CONTENT | changes), mode, run)


@pytest.fixture
def ledger(tmp_path):
    return SessionLedger(tmp_path / "sessions", "bank")


CHANGES = {
    "defense": {"defense": "clipped_noise:norm=1.0,sigma=2.0"},
    "codec": {"codec": "topk:k=2"},
    "secure": {"secure": "sum"},
    "parties": {"parties": {name: {"width": 4} for name in ("bank", "shop")}},
    "width": {"parties": {name: {"width": 5} for name in ("bank", "shop", "club")}},
    "seed": {"seed": 1},
    "merge": {"merge": "concat"},
    "epochs": {"train": {"epochs": 11}},
    "label party": {"label": {"party": "lender"}},
}


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_name_is_bound_once(ledger, mode, change):
    ledger.begin(terms_of())
    ledger.end("one", WEIGHTS)
    before = ledger.entries()
    with pytest.raises(DisagreementError, match="stands for another session") as caught:
        ledger.begin(terms_of(mode, **change))
    assert caught.value.got != caught.value.want
    assert ledger.entries() == before


def test_a_resume_finds_the_same_nonce_and_another_name_another(ledger):
    first = ledger.begin(terms_of())
    assert ledger.begin(terms_of()).nonce == first.nonce
    assert ledger.begin(terms_of(run="two")).nonce != first.nonce


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
def test_only_a_training_that_has_ended_answers(ledger, mode):
    with pytest.raises(DisagreementError, match="has ended no training"):
        ledger.begin(terms_of(mode))
    assert ledger.entries() == []
    ledger.begin(terms_of())
    with pytest.raises(DisagreementError, match="has ended no training"):
        ledger.begin(terms_of(mode))
    ledger.end("one", WEIGHTS)
    assert ledger.begin(terms_of(mode)).state == "ended"


def test_an_ended_training_keeps_its_weights(ledger):
    ledger.begin(terms_of())
    ledger.end("one", WEIGHTS)
    ledger.begin(terms_of())  # the label party had not heard of the end
    ledger.end("one", WEIGHTS)
    with pytest.raises(DisagreementError, match="with other weights"):
        ledger.end("one", "b" * 64)
    assert ledger.entries()[0].weights == WEIGHTS


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_keys_differ_with_everything_a_name_stands_for(tmp_path, change):
    """Even at a party that has lost its ledger and got the same nonce again."""
    secret = Secret.fresh()
    first = SessionLedger(tmp_path / "first", "bank").begin(terms_of())
    other = SessionLedger(tmp_path / "other", "bank").begin(terms_of(**change))
    other = other.model_copy(update={"nonce": first.nonce})
    assert other.secret_from(secret) != first.secret_from(secret)
    assert first.secret_from(secret) == first.secret_from(secret)


def test_keys_differ_with_the_nonce_alone(tmp_path):
    secret = Secret.fresh()
    entries = [SessionLedger(tmp_path / name, "bank").begin(terms_of()) for name in ("a", "b")]
    first, other = (entry.secret_from(secret) for entry in entries)
    assert first != other


def test_the_nonce_is_the_owners_alone(ledger):
    entry = ledger.begin(terms_of())
    (file,) = ledger.folder.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(ledger.folder.stat().st_mode) == 0o700
    assert entry.nonce not in repr(entry)


def test_every_byte_of_an_entry_counts(ledger):
    ledger.begin(terms_of())
    (file,) = ledger.folder.glob("*.json")
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(RunFolderError):
            ledger.begin(terms_of())
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(RunFolderError):
            ledger.begin(terms_of())


def test_an_entry_of_another_party_or_name_is_refused(ledger, tmp_path):
    SessionLedger(ledger.folder, "shop").begin(terms_of())
    with pytest.raises(RunFolderError, match="belongs to something else"):
        ledger.begin(terms_of())
    ledger.begin(terms_of(run="two"))
    (ledger.folder / "two.json").rename(ledger.folder / "three.json")
    with pytest.raises(RunFolderError, match="belongs to something else"):
        ledger.begin(terms_of(run="three"))


def _bind(folder, number, answers):
    terms = terms_of(seed=number)
    try:
        SessionLedger(folder, "bank").begin(terms)
    except DisagreementError:
        answers.put(None)
    else:
        answers.put(number)


def test_of_many_processes_one_binds_a_name(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=_bind, args=(tmp_path / "sessions", number, answers))
        for number in range(20)
    ]
    for process in processes:
        process.start()
    won = [answer for answer in (answers.get(timeout=60) for _ in processes) if answer is not None]
    for process in processes:
        process.join(timeout=60)
    assert len(won) == 1


def exchange(step, phase, epoch, rows):
    import numpy as np

    return Exchange(step, phase, epoch, np.arange(rows), last=True)


def test_what_was_spent_is_added_up(ledger):
    defense = {"defense": "clipped_noise:norm=1.0,sigma=4.0"}
    with ledger.session(terms_of(**defense)) as (_, meter):
        meter("bank", "up", Frame(Kind.CUT, payload=b"four"))
        meter("bank", "down", Frame(Kind.GRAD, payload=b"fourfour"))
        schedule = [exchange(0, "train", 1, 5), exchange(1, "train", 1, 5)]
        schedule += [exchange(2, "train", 2, 5)]
        assert list(meter.through(schedule)) == schedule
    ledger.end("one", WEIGHTS)
    with ledger.session(terms_of("evaluate", **defense)) as (_, meter):
        list(meter.through([exchange(0, "test", 0, 7)]))
    (entry,) = ledger.entries()
    train, evaluate = entry.spent["train"], entry.spent["evaluate"]
    assert (train.rows, train.passes, train.bytes_up, train.bytes_down) == (15, 2, 20, 24)
    assert (evaluate.rows, evaluate.passes, evaluate.sessions) == (7, 1, 1)
    assert entry.passes == 3
    assert entry.spent_epsilon == pytest.approx(3 * entry.epsilon)


def test_what_a_session_took_is_kept_when_it_fails(ledger):
    def fail():
        with ledger.session(terms_of()) as (_, meter):
            for one in meter.through([exchange(0, "train", 1, 5), exchange(1, "train", 1, 5)]):
                _ = 1 // (1 - one.step)

    with pytest.raises(ZeroDivisionError):
        fail()
    (entry,) = ledger.entries()
    assert entry.state == "open"
    assert entry.spent["train"].rows == 10


def test_a_meter_starts_at_nothing():
    assert Meter() == Meter(rows=0, passes=0, bytes={"up": 0, "down": 0})
