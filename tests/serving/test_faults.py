"""What callers meet, and what is counted, when streams are cut, parties stop and disks are full."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from served import PARTIES, passes_of, predicted, same, start

from vfl.clients.serving import ServedParty
from vfl.core.errors import LostPeerError, MissingPartyError, PeerFailedError, StorageError
from vfl.serving.service import Service, Unavailable
from vfl.session.store.party_folder import own_ledger

IDS = [f"Zq8id{row:03}" for row in range(90)]
#: A busy machine takes its time to mend a stream.
PATIENT = {"step_timeout_s": 30.0, "rejoin_window_s": 20.0}


def answer_of(client, each):
    """What an id is answered, once it is; meanwhile nothing but a 503 that names a party."""
    deadline = time.monotonic() + 120
    while True:
        status, told = client.predict(each)
        if status == 200:
            return told["predictions"][0]
        assert (status, set(told["party"].split(", ")) <= set(PARTIES)) == (503, True), told
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("ends", [False, True], ids=["a moment", "until the session is lost"])
def test_a_party_that_stops_is_named_and_answers_right_when_it_goes_on(trained, monkeypatch, ends):
    expected, goes_on, real = predicted(trained.run), threading.Event(), ServedParty.answer
    goes_on.set()

    def answer(self):
        if self._feature.name == "shop":
            goes_on.wait(120)
        return real(self)

    monkeypatch.setattr(ServedParty, "answer", answer)
    waits = PATIENT | ({"step_timeout_s": 1.5, "rejoin_window_s": 1.0} if ends else {})
    serving = start(trained, 0.5, federation=waits)
    client = serving.client
    try:
        client.wait_ready()
        answer_of(client, IDS[0])
        goes_on.clear()
        client.predict(IDS[1])  # it may have been waiting for this one already
        for each in IDS[2:5]:
            status, told = client.predict(each)
            assert (status, told["party"]) == (503, "shop")
        assert client.ask("/health")[0] == 200
        if ends:
            client.wait_ready(ready=False)
        goes_on.set()
        client.wait_ready()
        for each in IDS[5:14]:
            assert same(answer_of(client, each), expected[each])
        lost = "vfl_sessions_lost_total" in client.ask("/metrics")[1]
        assert lost is ends
    finally:
        goes_on.set()
        serving.stop()


def test_whoever_was_lost_is_named_until_another_does_not_come_in_time():
    """Everybody comes anew after a loss, and those who went nowhere are not blamed for it."""
    service, loop = Service("lender"), asyncio.new_event_loop()
    service.loop = loop
    service.show(None, ["bank", "shop"])
    service.waits_for(["bank"])
    assert service.missing == "bank"

    def streams():
        raise LostPeerError("party 'shop' went away")

    label = SimpleNamespace(remark_bytes=0)
    serving = SimpleNamespace(label=label, absent=[], waits_for="shop", streams=streams)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with pytest.raises(LostPeerError) as loss:
            service.play(serving)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert service.lost(loss.value)
    for waited in (["bank", "shop"], ["bank"]):
        service.waits_for(waited)
        assert service.missing == "shop"
    assert service.lost(MissingPartyError("no SuperNode of bank"))
    service.waits_for(["bank"])
    assert service.missing == "bank"


def test_the_label_party_is_named_while_its_new_table_is_not_aligned():
    service = Service("lender")
    service.show(None, ["bank", "shop"])
    service.waits_for_alignment()
    with pytest.raises(Unavailable, match="newer than their alignment; run vfl align") as refused:
        service._check_here(0.0)
    assert (refused.value.party, refused.value.status) == ("lender", 503)
    service.waits_for(["bank"])
    with pytest.raises(Unavailable, match="it is absent") as refused:
        service._check_here(0.0)
    assert refused.value.party == "bank"


def test_a_party_that_comes_back_with_the_tables_of_a_new_month(trained, monkeypatch):
    """Its session reads them, and the label party's then does too; nobody starts the service."""
    dying, real = threading.Event(), ServedParty.answer

    def answer(self):
        if dying.is_set() and self._feature.name == "shop":
            dying.clear()
            raise SystemExit
        return real(self)

    monkeypatch.setattr(ServedParty, "answer", answer)
    expected, seen = predicted(trained.run), []
    with start(trained, 5.0) as client:
        assert same(answer_of(client, IDS[0]), expected[IDS[0]])
        for name in (*PARTIES, "lender"):
            table = trained.folder / name / "data.csv"
            head, first, *others = table.read_text().splitlines(keepends=True)
            assert first.startswith(IDS[0])
            table.write_text("".join([head, *others]))
        dying.set()
        client.predict(IDS[1])
        while (status := (found := client.predict(IDS[2]))[0]) != 200:
            seen.append((status, found[1]["party"]))
            time.sleep(0.05)
        for each in IDS[1:5]:
            assert same(answer_of(client, each), expected[each])
        assert client.predict(IDS[0])[0] == 404
    assert set(seen) <= {(503, "shop")}
    notes = (trained.run / "notes.txt").read_text()
    assert notes.count("the service continues with the rows of the present tables") == 1


@pytest.mark.parametrize("disk", ["shop"], indirect=True)
def test_a_party_whose_disk_is_full_sends_nothing_that_it_cannot_count(disk, trained, monkeypatch):
    monkeypatch.setattr("vfl.session.serving._BLOCK_PASSES", 1)  # every pass is written
    trained.flower.tells = True
    expected = predicted(trained.run)
    answered = 1
    with start(trained, 30.0) as client:
        answer_of(client, IDS[0])
        disk.fill()
        seen = [client.predict(IDS[0]) for _ in range(3)]
        assert {(status, told["party"]) for status, told in seen} == {(503, "shop")}
        assert passes_of(trained, "shop")[1] >= answered
        disk.free()
        client.wait_ready()
        for each in (IDS[0], IDS[7]):
            assert same(answer_of(client, each), expected[each])
            answered += each == IDS[0]
        assert passes_of(trained, "shop")[1] >= answered
    codes = [error.code for error in trained.flower.failures]
    assert StorageError.code in codes
    notes = (trained.run / "notes.txt").read_text().splitlines()
    assert sum("the service continues" in line for line in notes) <= 2  # not one an attempt


@pytest.mark.parametrize("disk", ["lender"], indirect=True)
def test_a_label_party_whose_disk_is_full_goes_on_answering(disk, trained, monkeypatch):
    """Nor does a party that goes away meanwhile, and comes back, end the service."""
    dying, real = threading.Event(), ServedParty.answer

    def answer(self):
        if dying.is_set() and self._feature.name == "shop":
            dying.clear()
            raise SystemExit
        return real(self)

    monkeypatch.setattr(ServedParty, "answer", answer)
    expected = predicted(trained.run)
    serving = start(trained, 10.0)
    client = serving.client
    try:
        client.wait_ready()
        said = trained.run / "notes.txt"
        said.write_text(said.read_text().ljust(4095) + "\n")  # whose page has no room either
        disk.fill()
        with pytest.raises(OSError, match="No space"):
            (disk.folder / "more").write_bytes(b"0")
        assert same(answer_of(client, IDS[0]), expected[IDS[0]])
        dying.set()
        client.predict(IDS[1])
        client.wait_ready()
        for each in IDS[2:5]:
            assert same(answer_of(client, each), expected[each])
        assert "vfl_sessions_lost_total 1" in client.ask("/metrics")[1]
        disk.free()
        assert same(answer_of(client, IDS[6]), expected[IDS[6]])
    finally:
        disk.free()
        serving.stop()
    (entry,) = own_ledger(trained.flower.files["lender"]).entries()
    assert entry.spent["serve"].rows in (5, 6)  # the one that was asked when it died may be there


@pytest.mark.parametrize("disk", ["shop", "lender"], indirect=True)
def test_a_disk_that_is_full_ends_a_prediction_which_is_made_again(disk, trained):
    owner = disk.folder.parent.name
    trained.flower.tells = True
    expected = predicted(trained.run)
    (trained.run / "predictions.csv").unlink()
    disk.fill()
    with pytest.raises(StorageError if owner == "lender" else PeerFailedError) as failure:
        trained.play("predict")
    assert "V008" in str(failure.value)
    assert "No space left" in str(failure.value)
    assert not (trained.run / "predictions.csv").exists()
    disk.free()
    trained.play("predict")
    assert predicted(trained.run) == expected
