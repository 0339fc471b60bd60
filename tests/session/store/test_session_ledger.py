"""The ledger of sessions: a name is bound once, and nothing that protects is drawn twice."""

import multiprocessing
import os
import signal
import stat
import time

import numpy as np
import pytest

from vfl.config import Experiment
from vfl.core.errors import ConsentError, DisagreementError, RunFolderError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.core.storage import Seal, write_sealed_json
from vfl.session import Exchange, Terms
from vfl.session.store.session_ledger import SessionLedger, Spent, notes, total_epsilon

CONTENT = {"parties": {name: {"width": 4} for name in ("bank", "shop", "club")}, "merge": "sum"}
WEIGHTS = "a" * 64
NOISE = "clipped_noise:norm=1.0,sigma=4.0"


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
    "purpose": {"purpose": "marketing"},
}


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_name_is_bound_once(ledger, mode, change):
    ledger.begin(terms_of())
    ledger.end("one", WEIGHTS)
    before = ledger.entries()
    with pytest.raises(DisagreementError, match="is bound to another session") as caught:
        ledger.begin(terms_of(mode, **change))
    assert caught.value.got != caught.value.want
    assert ledger.entries() == before


def test_an_error_names_only_the_settings_that_a_name_is_bound_to(ledger):
    ledger.begin(terms_of())
    ledger.end("one", WEIGHTS)
    compared = {"beside": ("two",)}
    ledger.begin(terms_of("evaluate").model_copy(update=compared))
    with pytest.raises(DisagreementError) as caught:
        ledger.begin(terms_of("evaluate", seed=1).model_copy(update=compared))
    assert (caught.value.got, caught.value.want) == ("seed 1", "seed 0")


def test_a_resume_finds_the_same_nonce_and_another_name_another(ledger):
    first = ledger.begin(terms_of())
    assert ledger.begin(terms_of()).nonce == first.nonce
    assert ledger.begin(terms_of(run="two")).nonce != first.nonce


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
def test_only_a_training_that_has_ended_answers(ledger, mode):
    with pytest.raises(DisagreementError, match="no training of the name"):
        ledger.begin(terms_of(mode))
    assert ledger.entries() == []
    ledger.begin(terms_of())
    with pytest.raises(DisagreementError, match="no training of the name"):
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


def test_an_entry_of_another_party_or_name_is_refused(ledger, tmp_path):
    SessionLedger(ledger.folder, "shop").begin(terms_of())
    with pytest.raises(RunFolderError, match="another kind, party or run"):
        ledger.begin(terms_of())
    ledger.begin(terms_of(run="two"))
    (ledger.folder / "two.json").rename(ledger.folder / "three.json")
    with pytest.raises(RunFolderError, match="another kind, party or run"):
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
        for number in range(8)
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
    with ledger.session(terms_of(**defense)) as (_, meter, _):
        meter("bank", "up", Frame(Kind.CUT, payload=b"four"))
        meter("bank", "down", Frame(Kind.GRAD, payload=b"fourfour"))
        schedule = [exchange(0, "train", 1, 5), exchange(1, "train", 1, 5)]
        schedule += [exchange(2, "train", 2, 5)]
        assert list(meter.through(schedule)) == schedule
    ledger.end("one", WEIGHTS)
    with ledger.session(terms_of("evaluate", **defense)) as (_, meter, _):
        list(meter.through([exchange(0, "test", 0, 7)]))
    (entry,) = ledger.entries()
    train, evaluate = entry.spent["train"], entry.spent["evaluate"]
    assert (train.rows, train.passes, train.bytes_up, train.bytes_down) == (15, 2, 20, 24)
    assert (evaluate.rows, evaluate.passes, evaluate.sessions) == (7, 1, 1)
    assert entry.passes == 3
    assert entry.spent_epsilon == pytest.approx(3 * entry.epsilon)


def take_until_killed(folder, terms, epochs, most):
    """A process that is killed in the last epoch, before anybody corrects a figure."""

    def work():
        with SessionLedger(folder, "bank").session(terms) as (_, meter, sent):
            meter.most = most
            schedule = [exchange(step, "train", step // 2 + 1, 5) for step in range(2 * epochs)]
            for one in meter.through(schedule):
                frame = Frame(Kind.CUT, one.step, b"%4d" % one.step)
                if sent is not None:
                    sent.admit(one.step, frame.payload)
                meter("bank", "up", frame)
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


MOST = Spent(rows=10, bytes_up=40)


@pytest.mark.parametrize("defense", ["none", NOISE])
def test_a_kill_loses_nothing_of_what_was_spent(ledger, defense):
    take_until_killed(ledger.folder, terms_of(defense=defense), 50, MOST)
    (entry,) = ledger.entries()
    train = entry.spent["train"]
    assert 500 <= train.rows <= 510
    assert train.passes == 50
    assert 2000 <= train.bytes_up <= 2040
    assert entry.spent_epsilon == (None if defense == "none" else 50 * entry.epsilon)


def test_what_is_sent_again_after_a_kill_is_counted_once(ledger):
    terms = terms_of(defense=NOISE)
    for epochs in (3, 5, 4):
        take_until_killed(ledger.folder, terms, epochs, MOST)
    (entry,) = ledger.entries()
    assert entry.spent["train"].passes == 5
    take_until_killed(ledger.folder, terms_of(run="plain"), 3, MOST)
    take_until_killed(ledger.folder, terms_of(run="plain"), 3, MOST)
    assert ledger.entries()[-1].spent["train"].passes == 6  # it may have been something else


def test_records_that_were_counted_are_not_lost_in_silence(ledger):
    take_until_killed(ledger.folder, terms_of(defense=NOISE), 5, MOST)
    (file,) = ledger.folder.glob("*.sent")
    whole = file.read_bytes()
    for kept in (0, 8, 40, 41, 200):
        file.write_bytes(whole[:kept])
        with pytest.raises(RunFolderError), ledger.session(terms_of(defense=NOISE)):
            pass
    file.unlink()
    with (
        pytest.raises(RunFolderError, match="messages sent in this training is missing"),
        ledger.session(terms_of(defense=NOISE)),
    ):
        pass


@pytest.mark.parametrize("defense", ["none", NOISE])
def test_a_training_that_has_ended_does_not_begin_again(ledger, defense):
    terms = terms_of(defense=defense)
    ledger.begin(terms, 0)
    ledger.end("one", WEIGHTS)
    with pytest.raises(DisagreementError, match="has already ended at party 'bank'"):
        ledger.begin(terms, 0)
    assert ledger.begin(terms, 5).state == "ended"


def test_an_ended_training_sends_only_what_it_has_sent(ledger):
    terms = terms_of(defense=NOISE)
    with ledger.session(terms, 0) as (_, _, sent):
        sent.admit(0, b"cut")
    ledger.end("one", WEIGHTS)
    with ledger.session(terms, 5) as (_, _, sent):
        sent.admit(0, b"cut")
        with pytest.raises(DisagreementError, match="different contents than before"):
            sent.admit(1, b"cut")


NOTED = {
    "none": ({}, False, False),
    "noise on cuts": ({"defense": NOISE}, True, False),
    "noise on gradients": ({"defense": "gradient_noise"}, False, True),
    "both": ({"defense": f"{NOISE}+gradient_noise:norm=inf"}, True, True),
    "labels": ({"defense": "label_dp:epsilon=1.0"}, False, True),
    "a drawn choice": ({"codec": "randtopk:k=2,alpha=0.1"}, True, False),
    "a choice that is not drawn": ({"codec": "topk:k=2"}, False, False),
    "masks alone": ({"secure": "sum"}, False, False),
    "noise under masks": ({"secure": "sum", "defense": NOISE}, True, False),
    "layer norm": ({"defense": "layer_norm"}, False, False),
}


@pytest.mark.parametrize(("changes", "feature", "label"), NOTED.values(), ids=NOTED)
def test_who_notes_what_it_sends(changes, feature, label):
    terms = terms_of(**changes)
    assert notes(terms, "bank") is feature
    assert notes(terms, terms.label_party) is label
    assert not notes(terms_of("evaluate", **changes), "bank")


def spend(ledger, run, epochs, mode="train", **changes):
    """Take part in a session, which is to be within the limit."""
    changes = {"defense": NOISE, "train": {"epochs": epochs}} | changes
    with ledger.session(terms_of(mode, run, **changes)) as (entry, meter, _):
        first = 0 if mode != "train" else 1
        list(meter.through([exchange(at, mode, at + first, 5) for at in range(epochs)]))
    if mode == "train":
        ledger.end(run, WEIGHTS)
    return entry.epsilon


def test_all_names_together_keep_to_the_limit(tmp_path):
    one = spend(SessionLedger(tmp_path / "first", "bank"), "any", 1)
    ledger = SessionLedger(tmp_path / "sessions", "bank", max_epsilon=10 * one)
    spend(ledger, "one", 4)
    spend(ledger, "two", 5)
    with pytest.raises(ConsentError, match="does not consent to spend more") as caught:
        ledger.begin(terms_of(run="three", defense=NOISE, train={"epochs": 2}))
    assert (
        caught.value.got == f"epsilon {9 * one:.4g} spent under all names, and a session "
        f"{2 * one:.4g} planned"
    )
    assert [entry.run for entry in ledger.entries()] == ["one", "two"]
    spend(ledger, "one", 1, "evaluate", train={"epochs": 4})
    with pytest.raises(ConsentError):
        ledger.begin(terms_of("evaluate", "two", defense=NOISE, train={"epochs": 5}))
    assert ledger.begin(terms_of("train", "two", defense=NOISE, train={"epochs": 5}), 5)
    assert total_epsilon(ledger.entries()) == pytest.approx(10 * one)


def test_an_interrupted_training_goes_on_within_the_limit(tmp_path):
    one = spend(SessionLedger(tmp_path / "first", "bank"), "any", 1)
    ledger = SessionLedger(tmp_path / "sessions", "bank", max_epsilon=10 * one)
    terms = terms_of(defense=NOISE, train={"epochs": 10})
    take_until_killed(ledger.folder, terms, 8, MOST)
    ledger.begin(terms, 0)


def test_a_session_without_an_epsilon_is_beyond_every_limit(tmp_path):
    ledger = SessionLedger(tmp_path / "sessions", "bank", max_epsilon=1e9)
    with pytest.raises(ConsentError, match="does not consent"):
        ledger.begin(terms_of())
    training_only = NOISE + ",queries=false"
    with pytest.raises(ConsentError) as caught:  # its validation rows would go without noise
        ledger.begin(terms_of(defense=training_only))
    assert "without an epsilon" in caught.value.got
    assert "remove max_epsilon" in caught.value.fix, "no larger limit would allow it"
    data = {"validation": 0.0, "test": 0.0}
    ledger.begin(terms_of(defense=training_only, data=data))
    ledger.end("one", WEIGHTS)
    with pytest.raises(ConsentError):
        ledger.begin(terms_of("evaluate", defense=training_only, data=data))


def test_two_sessions_at_once_keep_to_the_limit(tmp_path):
    """Each alone is within it; the one that comes too late ends before its epoch begins."""
    one = spend(SessionLedger(tmp_path / "first", "bank"), "any", 1)
    ledger = SessionLedger(tmp_path / "sessions", "bank", max_epsilon=5 * one)

    def terms(run):
        return terms_of(run=run, defense=NOISE, train={"epochs": 4})

    def epochs():
        return [exchange(at, "train", at + 1, 5) for at in range(4)]

    def late(begun):
        with ledger.session(terms("two")) as (_, second, _):
            assert len(list(begun)) == 3
            for one in second.through(epochs()):
                sent.append(one.epoch)

    sent = []
    with ledger.session(terms("one")) as (_, first, _):
        begun = first.through(epochs())
        next(begun)
        with pytest.raises(ConsentError, match="does not consent to spend more"):
            late(begun)
    assert sent == [1]
    assert total_epsilon(ledger.entries()) == pytest.approx(5 * one)


def test_statistics_of_almost_the_same_rows_are_refused(tmp_path):
    ledger = SessionLedger(tmp_path / "sessions", "bank", min_changed_rows=5)
    rows = np.arange(200, dtype=np.uint64) * 7

    def show(run, trained, of=ledger):
        with of.session(terms_of(run=run)) as (_, meter, _):
            meter.trained = lambda: trained
            meter.show(3)
            meter.show(3)

    show("one", rows[:100])
    show("same", rows[99::-1])
    show("more", rows[:105])
    for near in (rows[:99], rows[2:102], rows[:104]):
        with pytest.raises(ConsentError, match="almost the same rows") as refusal:
            show("near", near)
        assert refusal.value.got == "fewer than 5 rows differ"
    assert ledger.spent_statistics() == 18
    show("near", rows[100:])  # under the name of what was refused
    ledger.forget_shown(rows[:1])
    with pytest.raises(ConsentError):
        show("erased", rows[1:100])
    show("erased", rows[1:100], SessionLedger(tmp_path / "sessions", "bank"))


def test_exact_statistics_of_all_names_have_one_limit(tmp_path):
    limited = SessionLedger(tmp_path / "sessions", "bank", max_statistics=100)
    with limited.session(terms_of()) as (_, meter, _):
        meter.show(60)
        assert limited.entries()[0].statistics == 60, "on the disk before they are shown"
    with limited.session(terms_of(run="two")) as (_, meter, _):
        meter.show(30)
        with pytest.raises(ConsentError, match="exact statistics") as refusal:
            meter.show(11)
    assert "90 disclosed" in refusal.value.got
    assert limited.spent_statistics() == 90, "what was refused was not shown"
    with limited.session(terms_of(run="three")) as (_, meter, _):
        meter.show(10)
    again = SessionLedger(tmp_path / "sessions", "bank", max_statistics=150)
    again.restored()
    assert again.spent_statistics() == 150, "a copy may have forgotten all the rest"
    with pytest.raises(ConsentError), again.session(terms_of(run="four")) as (_, meter, _):
        meter.show(1)


def test_a_days_counts_of_an_earlier_version_still_count(ledger, tmp_path):
    now = time.time()
    record = {"begun": [[now - 90_000], [now - 60]], "asked": [[now - 90_000, 7], [now - 60, 5]]}
    (tmp_path / "alignments").mkdir()
    seal = Seal("alignments and ids of a day", "bank", "")
    write_sealed_json(tmp_path / "alignments" / "_asked.json", record, seal)
    with ledger.day() as day:
        assert (day.alignments, day.ids) == (1, 5)
        day.begin()
        day.ask(3)
    (tmp_path / "alignments" / "_asked.json").unlink()
    with ledger.day() as day:
        assert (day.alignments, day.ids) == (2, 8)


def test_under_a_clock_that_was_set_back_a_days_counts_do_not_end_sooner(ledger, monkeypatch):
    now = time.time()
    for hour in (0, -23):
        monkeypatch.setattr(time, "time", lambda hour=hour: now + 3600 * hour)
        with ledger.day() as day:
            day.begin()
            day.ask(3)
    monkeypatch.setattr(time, "time", lambda: now + 3600 * 2)
    with ledger.day() as day:
        assert (day.alignments, day.ids) == (2, 6)
