"""A session that aligns over real streams; only Flower's part is played by a stand-in."""

import copy
import shutil
import subprocess
import threading
import time
import warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest
from cryptography.exceptions import InvalidTag
from cut_tables import TABLES, cut, real_table
from ports import free_ports
from stand_in_flower import Envelope, Flower

from benchmarks.emulation import TcpProxy
from vfl.config import Experiment, read_party_file
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    ConfigError,
    DisagreementError,
    LostPeerError,
    MissingDataError,
    PeerFailedError,
    ProtocolError,
    StorageError,
    VFLError,
)
from vfl.core.storage import read_json
from vfl.datasets.alignment import ristretto
from vfl.datasets.alignment.positions import Alignment, last_version
from vfl.datasets.on_disk import DiskBytes, OnDisk
from vfl.serving.front import Rows
from vfl.session import PartyFolder, Terms
from vfl.session.alignment import Post
from vfl.session.relay import PairSeals, _Seal
from vfl.session.store.erasure import KEPT, forget, holds
from vfl.session.store.identity import Identity
from vfl.session.store.party_folder import own_data, own_ledger
from vfl.session.store.session_log import verified
from vfl.session.terms import AlignTerms
from vfl.training.status import run_status

with warnings.catch_warnings():  # importing Flower uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.server.session import run_session

PARTIES = ("bank", "shop")
PARTY = """\
party = "{name}"
[data]
source = "{name}.csv"
{predict}
id = "key"
{label}
[consent]
{consent}
"""


class Played:
    """A federation over files that lie in one folder."""

    def __init__(self, folder, parties, label, flower):
        self.folder, self.parties, self.label, self.flower = folder, parties, label, flower
        self.runs, self.patience, self.stream = 0, 60.0, {}
        self.write()

    def write(self, predict="", **consents):
        for name in (*self.parties, "label"):
            text = PARTY.format(
                name=name,
                predict=predict.format(name=name),
                label=f'label = "{self.label}"' if name == "label" else "",
                consent=consents.get(name, ""),
            )
            own = self.folder / f"own-{name}"
            own.mkdir(exist_ok=True)
            (own / "party.toml").write_text(text.replace('"' + name + ".csv", f'"../{name}.csv'))
            self.flower.files[name] = read_party_file(own / "party.toml")
            identity = Identity.fresh()
            identity.keep_at(own / "identity.key")
            for other in self.parties:
                identity.public.keep_at(self.folder / f"own-{other}" / "peers" / f"{name}.pub")

    def copied_to(self, folder):
        """The same parties, and all that they keep, in another folder."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        other = copy.copy(self)
        other.folder, other.flower = folder, Flower(self.parties, tells=True)
        for name in self.flower.files:
            other.flower.files[name] = read_party_file(folder / f"own-{name}" / "party.toml")
        return other

    def experiment(self, alignment=None, **align):
        return Experiment.model_validate(
            {
                "data": {"id_rules": "decimal+zeros", "alignment": alignment},
                "align": align,
                "parties": {name: {"width": 4} for name in self.parties},
                "label": {"party": "label", "top": "linear"},
                "train": {"epochs": 1, "batch_size": 64},
                "federation": {
                    "join_timeout_s": 60.0,
                    "rejoin_window_s": 1.0,
                    "step_timeout_s": self.patience,
                    **self.stream,
                },
            }
        )

    def run(self, mode, run=None, **align):
        self.runs += 1
        experiment, run = self.experiment(**align), run or f"run-{self.runs}"
        if mode == "align":
            terms = AlignTerms.asked(experiment, run)
        else:
            terms = Terms.of(experiment, mode, run)
        try:
            run_session(self.flower, experiment, self.flower.files["label"], terms)
        finally:
            for thread in self.flower.threads:
                thread.join(timeout=60)
        return self.flower.files["label"].run_path(run)

    def kept(self, name):
        folder = self.flower.files[name].alignment_path("alignment")
        return Alignment.newest(folder, name)

    def order(self, name):
        keys = pd.read_csv(self.folder / f"{name}.csv", dtype=str)["key"]
        return [int(float(keys[row])) for row in self.kept(name).positions]


def stand_in(monkeypatch):
    for room in ("session", "alignment"):
        monkeypatch.setattr(f"vfl.server.{room}._COLLECT_S", 0.0)
    monkeypatch.setattr("vfl.server.federation.Message", Envelope)
    monkeypatch.setattr("vfl.transport.hub._TICK_S", 0.005)  # parties connect in milliseconds


def played(folder, data_root, name="bank", parties=PARTIES, overlap=0.8, rows=700):
    frame, label = real_table(data_root, name)
    common = cut(frame, label, folder, overlap=overlap, rows=rows)
    if parties == ("bank",):
        keys = [pd.read_csv(folder / f"{one}.csv", dtype=str)["key"] for one in ("bank", "label")]
        common = set.intersection(*({int(key) for key in each} for each in keys))
    return Played(folder, parties, label, Flower(parties, tells=True)), common


@pytest.fixture
def make(tmp_path, data_root, monkeypatch):
    stand_in(monkeypatch)
    return partial(played, tmp_path, data_root)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_three_parties_find_the_same_people(make, name):
    federation, common = make(name, overlap=0.6)
    run = federation.run("align")
    orders = [federation.order(party) for party in (*PARTIES, "label")]
    assert orders[0] == orders[1] == orders[2]
    assert set(orders[0]) == common
    facts = read_json(run / "alignment.json")
    assert facts["common"] == len(common)
    assert all(count > 32 * 2 * 300 for count in facts["bytes"].values())


def test_two_parties_then_train_and_predict_on_what_was_found(make):
    federation, common = make(parties=("bank",))
    with pytest.raises(VFLError):
        federation.run("train")
    federation.run("align")
    federation.run("train", "trained", alignment="alignment")
    run = federation.run("predict", "trained", alignment="alignment")
    predicted = pd.read_csv(run / "predictions.csv", dtype=str)
    assert set(map(int, predicted["id"])) == common
    served = Terms.of(federation.experiment("alignment"), "serve", "trained")
    asked = Rows(own_data(federation.flower.files["label"], served))
    assert len(asked.positions([int(key) for key in predicted["id"]])) == len(common)


def test_rows_to_predict_have_positions_of_their_own(make):
    federation, common = make(parties=("bank",))
    federation.run("align")
    federation.run("train", "trained", alignment="alignment")
    for name in ("bank", "label"):
        table = pd.read_csv(federation.folder / f"{name}.csv", dtype=str)
        table[::-3].to_csv(federation.folder / f"{name}-later.csv", index=False)
    loose = "min_common = 10\nmin_ids = 10"
    federation.write('predict = "../{name}-later.csv"', bank=loose, label=loose)
    with pytest.raises(MissingDataError, match="has no alignment"):
        federation.run("predict", "trained", alignment="alignment")
    federation.run("align", table="predict", protocol="ecdh:pad=900")
    run = federation.run("predict", "trained", alignment="alignment")
    predicted = set(map(int, pd.read_csv(run / "predictions.csv", dtype=str)["id"]))
    assert predicted
    assert predicted < common


def test_nothing_planted_crosses_or_is_written_elsewhere(make, tmp_path, monkeypatch, capfd):
    federation, common = make()
    for name in (*PARTIES, "label"):
        cells = pd.read_csv(tmp_path / f"{name}.csv", dtype=str)
        cells["key"] = "planted-marker-" + cells["key"].map(lambda key: str(int(float(key))))
        cells.to_csv(tmp_path / f"{name}.csv", index=False)
    wire, frame = [], Post.frame

    def recorded(self, **options):
        made = frame(self, **options)
        wire.append(bytes(made.payload))
        return made

    monkeypatch.setattr(Post, "frame", recorded)
    run = federation.run("align")
    assert read_json(run / "alignment.json")["common"] == len(common)
    assert len(b"".join(wire)) > 32 * 3 * 400
    assert b"planted-marker" not in b"".join(wire)
    written = [path for path in tmp_path.rglob("own-*/**/*") if path.is_file()]
    assert len([path for path in written if path.suffix == ".positions"]) == 3
    assert not [path for path in written if b"planted-marker" in path.read_bytes()]
    assert "planted-marker" not in "".join(capfd.readouterr()) + "".join(federation.flower.said)


@pytest.fixture
def relayed(monkeypatch):
    """What the label party carries from one feature party to the other."""
    found, take = [], Post.take

    def recorded(self, frame):
        got = take(self, frame)
        if got is not None and threading.current_thread() is threading.main_thread():
            found.append(got)
        return got

    monkeypatch.setattr(Post, "take", recorded)
    return lambda: [payload for to, payload in found if to != "label"]


def test_the_label_party_reads_nothing_that_it_carries(make, relayed):
    """It would see its own ids and the shop's under the shop's scalar alone."""
    federation, _ = make()
    federation.run("align")
    large = [payload for payload in relayed() if len(payload) > 32 * 300]
    assert large
    for payload in large:
        with pytest.raises(ProtocolError):
            ristretto.multiply(payload[: len(payload) // 32 * 32], ristretto.fresh_scalar())


def test_the_label_party_cannot_put_its_own_keys_between(make, monkeypatch):
    federation, _ = make()
    agree = PairSeals._agree
    forged = PairSeals(
        federation.flower.files["bank"], AlignTerms.asked(federation.experiment(), "x"), "x" * 32
    )._offer
    monkeypatch.setattr(
        PairSeals, "_agree", lambda self, sender, offer: agree(self, sender, forged)
    )
    with pytest.raises(VFLError):
        federation.run("align")
    assert any("was not sealed by party" in str(error) for error in federation.flower.failures)


@pytest.mark.parametrize("there", [True, False])
def test_a_label_party_that_asks_for_one_id_hears_no_count(make, tmp_path, there):
    """Its file holds ids it made up, and the one it wonders about."""
    federation, common = make()
    asked = [min(common) if there else 9_999, *range(100_000, 100_300)]
    pd.DataFrame({"key": asked, federation.label: 0}).to_csv(tmp_path / "label.csv", index=False)
    federation.write(bank="min_common = 50", shop="min_common = 50")
    with pytest.raises(PeerFailedError) as caught:
        federation.run("align")
    told = str(caught.value)
    assert "does not consent to this alignment" in told
    assert "common" not in told
    assert any(f"{int(there)} ids in common" in line for line in federation.flower.said)
    assert not any("in common" in str(error) for error in federation.flower.failures)
    for name in (*PARTIES, "label"):
        assert not list((tmp_path / f"own-{name}").rglob("*.positions"))


@pytest.mark.parametrize(
    ("consent", "said"),
    [
        ("min_ids = 5000", "so small a set"),
        ("max_id_ratio = 0.5", "so large a set"),
        ('modes = ["train"]', ""),
        ("max_alignments = 0", ""),
    ],
)
def test_what_a_party_does_not_allow_is_refused(make, consent, said):
    federation, _ = make()
    federation.write(bank=consent)
    with pytest.raises(VFLError) as caught:
        federation.run("align")
    assert "consent" in str(caught.value)
    assert not said or any(said in line for line in federation.flower.said)


@pytest.mark.parametrize("consent", ["min_common = 100000", "max_id_ratio = 0.5"])
def test_a_label_party_that_refuses_tells_no_count(make, consent):
    federation, _ = make(parties=("bank",))
    federation.write(label=consent)
    with pytest.raises(VFLError, match="does not consent to this alignment"):
        federation.run("align")
    told = "\n".join(map(str, federation.flower.failures))
    assert "does not consent to this alignment" in told
    assert "got" not in told


def test_alignments_of_a_day_are_counted_before_they_begin(make):
    federation, _ = make(parties=("bank",))
    federation.write(bank="max_alignments = 2\nmin_common = 100000")
    for _ in range(2):
        with pytest.raises(VFLError, match="does not consent to this alignment"):
            federation.run("align")
    with pytest.raises(VFLError, match="does not consent to another alignment"):
        federation.run("align")


def restored(store, copy):
    shutil.rmtree(store)
    shutil.copytree(copy, store)


def test_a_copy_of_alignments_sets_no_count_of_the_day_back(make, tmp_path):
    federation, _ = make(parties=("bank",))
    federation.write(bank="max_alignments = 2")
    federation.run("align")
    alignments = own(federation, "bank").store_path / "alignments"
    shutil.copytree(alignments, tmp_path / "copy")
    federation.run("align")
    restored(alignments, tmp_path / "copy")
    with pytest.raises(VFLError, match="does not consent to another alignment"):
        federation.run("align")


@pytest.mark.parametrize("name", ["bank", "label"])
def test_an_alignment_notices_a_copy_of_the_ledger(make, tmp_path, name):
    federation, _ = make(parties=("bank",))
    sessions = own(federation, name).store_path / "sessions"
    federation.run("align")
    shutil.copytree(sessions, tmp_path / "copy")
    federation.run("align")
    restored(sessions, tmp_path / "copy")
    with pytest.raises(VFLError, match="restored from an earlier copy"):
        federation.run("align")
    own_ledger(own(federation, name)).restored()
    with pytest.raises(VFLError, match="does not consent to another alignment"):
        federation.run("align")
    federation.write(**{name: "max_alignments = 20"})
    federation.run("align")


def test_what_only_one_process_can_play_is_refused(make):
    federation, _ = make()
    with pytest.raises(ConfigError, match="needs a helper"):
        federation.run("align", protocol="server_aided")


REUSE = {"protocol": "ecdh:reuse=true"}


def test_reused_keys_need_consent_and_later_send_only_new_ids(make):
    federation, common = make(parties=("bank",))
    with pytest.raises(VFLError, match="reuse_alignment_keys = false"):
        federation.run("align", **REUSE)
    federation.write(bank="reuse_alignment_keys = true")
    sent = []
    for _ in range(2):
        run = federation.run("align", **REUSE)
        sent.append(read_json(run / "alignment.json")["bytes"]["bank"])
        assert set(federation.order("bank")) == set(federation.order("label")) == common
    assert sent[1] < sent[0] / 10
    federation.run("train", "trained", alignment="alignment")
    for name in ("bank", "label"):
        (kept,) = federation.folder.glob(f"own-{name}/**/*.reused")
        assert kept.stat().st_mode & 0o777 == 0o600
        assert holds(
            federation.folder / f"own-{name}", own(federation, name).store_path, kept
        ).forget
        forget(own(federation, name), [str(min(common))], rewrite=True)
        assert not kept.exists()


def test_reused_keys_of_each_pair_where_rows_are_lacking(make, monkeypatch):
    federation, _ = make()
    consent = 'reuse_alignment_keys = true\nmissing_rows = ["intersection", "token"]'
    federation.write(bank=consent, shop=consent)
    plain = federation.experiment

    def lacking(alignment=None, **align):
        made = plain(alignment, **align)
        return made.model_copy(
            update={"data": made.data.model_copy(update={"missing_rows": "token"})}
        )

    monkeypatch.setattr(federation, "experiment", lacking)
    sent = []
    for _ in range(2):
        facts = read_json(federation.run("align", **REUSE) / "alignment.json")
        sent.append(sum(facts.pop("bytes").values()))
    assert sent[1] < sent[0] / 3
    names = {path.name for path in federation.folder.glob("own-label/**/*.reused")}
    assert names == {"bank.reused", "shop.reused"}


def test_a_message_of_a_training_is_no_alignment(make):
    federation, _ = make()
    terms = Terms.of(federation.experiment(), "align", "x")
    with pytest.raises((DisagreementError, VFLError)):
        run_session(
            federation.flower, federation.experiment(), federation.flower.files["label"], terms
        )


@pytest.fixture
def held(monkeypatch):
    """Lets a feature party stand still once its role has begun, for so many seconds."""
    frame, waits = Post.frame, []

    def slow(self, **options):
        mine = threading.current_thread() is not threading.main_thread()
        if mine and self._count == 3 and waits:
            time.sleep(waits.pop())
        return frame(self, **options)

    monkeypatch.setattr(Post, "frame", slow)
    return waits.append


def test_a_party_that_stands_still_for_a_while_is_waited_for(make, held):
    federation, common = make(parties=("bank",))
    held(2.0)
    federation.run("align")
    assert set(federation.order("bank")) == common


def versions(federation):
    files = federation.flower.files
    return {
        name: last_version(files[name].alignment_path("alignment"))
        for name in (*federation.parties, "label")
    }


def nothing_is_left(federation):
    return not [path for path in federation.folder.rglob("*") if path.name == "staged"]


@pytest.mark.slow
def test_a_party_that_stands_still_for_long_ends_the_alignment(make, held):
    federation, common = make()
    federation.patience = 1.0
    held(4.0)
    with pytest.raises(LostPeerError):
        federation.run("align")
    assert versions(federation) == {"bank": 0, "shop": 0, "label": 0}
    assert nothing_is_left(federation)
    federation.run("align")
    assert set(federation.order("shop")) == common


@pytest.fixture
def gate(monkeypatch):
    """A proxy before the stream, and what cuts it when the label party has sent two frames."""
    (port,) = free_ports(1)
    frame, cuts = Post.frame, []
    with TcpProxy(("127.0.0.2", port), listen=("127.0.0.1", port)) as proxy:

        def counted(self, **options):
            if self._count == 2 and cuts and threading.current_thread() is threading.main_thread():
                proxy.shut()
                if (back_s := cuts.pop()) is not None:
                    threading.Timer(back_s, proxy.restore).start()
            return frame(self, **options)

        monkeypatch.setattr(Post, "frame", counted)
        yield port, cuts.append, proxy.restore


@pytest.mark.parametrize("back_s", [0.5, pytest.param(None, marks=pytest.mark.slow)])
def test_a_line_that_is_cut_while_aligning(make, gate, back_s):
    port, cut, restore = gate
    federation, common = make(parties=("bank",))
    federation.stream = {"stream_port": port, "bind_host": "127.0.0.2", "rejoin_window_s": 3.0}
    cut(back_s)
    if back_s is None:
        with pytest.raises(LostPeerError):
            federation.run("align")
        assert versions(federation) == {"bank": 0, "label": 0}
        assert nothing_is_left(federation)
        restore()
    federation.run("align")
    assert set(federation.order("bank")) == set(federation.order("label")) == common


@pytest.mark.parametrize("name", ["bank", "label"])
def test_a_disk_that_is_full_keeps_no_version_anywhere(make, name):
    """Really full: a file system of one page, which another file takes."""
    federation, common = make()
    federation.run("align")
    folder = federation.flower.files[name].store_path / "alignments"
    shutil.rmtree(folder)
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    (folder / "other").write_bytes(bytes(4096))
    try:
        with pytest.raises((StorageError, PeerFailedError)) as caught:
            federation.run("align")
        assert "No space left" in str(caught.value)
        assert str(folder) not in str(caught.value) or name == "label"
        kept = dict.fromkeys((*PARTIES, "label"), 1)
        assert versions(federation) == kept | {name: 0}
        assert nothing_is_left(federation)
        subprocess.run([*mount[:3], "-o", "remount,size=1m", *mount[5:]], check=True)
        federation.run("align")
        assert set(federation.order(name)) == common
    finally:
        subprocess.run(["umount", folder], check=True)


def in_file(content, folder):
    found = DiskBytes(OnDisk(folder, 1 << 20))
    found.write(content)
    return found


@pytest.mark.parametrize("size", [0, 1, 997, 998, 999, 5000])
def test_a_message_in_a_file_crosses_as_the_same_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr("vfl.session.alignment.PIECE_LIMIT_BYTES", 1000)
    content, place = bytes(range(251)) * 20, OnDisk(tmp_path, 1 << 20)
    wires = []
    for payload in (content[:size], in_file(content[:size], tmp_path)):
        post, other = (Post(["bank", "label"], 5000, place) for _ in range(2))
        post.put("bank", payload)
        wires.append([])
        while post.waiting:
            wires[-1].append(post.frame())
            got = other.take(wires[-1][-1])
        assert got is not None
        assert (got[0], bytes(got[1])) == ("bank", content[:size])
    assert [bytes(frame.payload) for frame in wires[0]] == [
        bytes(frame.payload) for frame in wires[1]
    ]
    assert not list(tmp_path.iterdir())


def test_a_message_that_grows_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vfl.session.alignment.PIECE_LIMIT_BYTES", 1000)
    place = OnDisk(tmp_path, 1 << 20)
    post, other = Post(["bank"], 9000, place), Post(["bank"], 3000, place)
    post.put("bank", bytes(4000))
    for _ in range(3):
        assert other.take(post.frame()) is None
    with pytest.raises(ProtocolError, match="too long"):
        other.take(post.frame())


@pytest.mark.parametrize("size", [0, 40, 3_000_000])
def test_a_message_in_a_file_is_sealed_like_one_in_memory(tmp_path, size):
    content, nonce = b"x" * size, bytes(12)
    seal = _Seal(bytes(32))
    whole = seal.encrypt(nonce, content, b"about")
    sealed = seal.encrypt(nonce, in_file(content, tmp_path), b"about")
    assert bytes(sealed) == whole
    assert (
        bytes(seal.decrypt(nonce, sealed, b"about"))
        == seal.decrypt(nonce, whole, b"about")
        == content
    )
    changed = in_file(whole[:-1] + bytes([whole[-1] ^ 1]), tmp_path)
    with pytest.raises(InvalidTag):
        seal.decrypt(nonce, changed, b"about")
    with pytest.raises(InvalidTag):
        seal.decrypt(nonce, in_file(whole[:8], tmp_path), b"about")


# --- erasure --------------------------------------------------------------------------------------


def planted(federation, common, count):
    """Some common people, each party's ids of them written so that a search finds them."""
    chosen = sorted(common)[:: max(1, len(common) // count)][:count]
    for name in (*federation.parties, "label"):
        path = federation.folder / f"{name}.csv"
        cells = pd.read_csv(path, dtype=str)
        cells["key"] = "marker" + cells["key"].map(lambda key: f"{int(float(key)):07d}")
        cells.to_csv(path, index=False)
    return [f"marker{key:07d}" for key in chosen]


def predictions(run):
    return pd.read_csv(run / "predictions.csv", dtype=str).set_index("id").sort_index()


def found_in(folder, ids):
    """Files below a folder that hold one of the ids, or a digest by which a run knows it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = [each.encode() for each in ids]
    for part in folder.glob("store/runs/*/parties/*"):
        if (part / "party.json").exists():
            digests = PartyFolder(part).digests_of(ids)
            texts += [np.array([one], dtype="<u8").tobytes() for one in digests]
    return [str(path.relative_to(folder)) for path in files
            if any(text in path.read_bytes() for text in texts)]  # fmt: skip


@pytest.fixture(scope="module")
def predicted_once(tmp_path_factory, data_root):
    """Two feature parties and a label party, after a training that is traced and a prediction."""
    with pytest.MonkeyPatch.context() as patched:
        stand_in(patched)
        federation, common = played(tmp_path_factory.mktemp("once"), data_root, overlap=0.9)
        for name in (*PARTIES, "label"):
            file = federation.folder / f"own-{name}" / "party.toml"
            with file.open("a") as text:
                text.write('[trace]\nphases = ["train"]\n')
            federation.flower.files[name] = read_party_file(file)
        ids = planted(federation, common, 5)
        federation.run("align")
        federation.run("train", "trained", alignment="alignment")
        before = predictions(federation.run("predict", "trained", alignment="alignment"))
    return federation, ids, before


@pytest.fixture
def erasing(tmp_path, monkeypatch, predicted_once):
    """A copy of all three; five ids, and what was predicted."""
    stand_in(monkeypatch)
    federation, ids, before = predicted_once
    return federation.copied_to(tmp_path), ids, before


def own(federation, name):
    return federation.flower.files[name]


@pytest.mark.parametrize("owner", ["bank", "label"])
def test_other_rows_go_on_without_a_new_alignment(erasing, owner):
    federation, ids, before = erasing
    versions = {name: federation.kept(name) for name in (*PARTIES, "label")}
    done = forget(own(federation, owner), ids, rewrite=True)
    assert (done.asked, done.found, done.in_table) == (5, 5, 0)
    assert done.alignments == {"alignment, source": 5}
    assert sum(done.runs["trained"].values()) == 5
    assert done.traces == ["trained"]
    after = predictions(federation.run("predict", "trained", alignment="alignment"))
    assert set(before.index) - set(after.index) == set(ids)
    pd.testing.assert_frame_equal(after, before.loc[after.index])
    for name, each in versions.items():
        now = federation.kept(name)
        assert (now.version, now.key) == (each.version, each.key)
        assert len(now.positions) == len(each.positions) - 5 == len(after)
    for other in {*PARTIES, "label"} - {owner}:
        events = verified(own_ledger(own(federation, other)).log.path, []).lines
        (line,) = [line for line in events if line.event == "withdrawn"]
        assert line.rows == 5
        part = PartyFolder(own(federation, other).run_path("trained") / "parties" / other)
        assert part.forgotten() == done.runs["trained"]
    run = run_status(own(federation, "label").run_path("trained"))
    assert run.erased == {part: count for part, count in done.runs["trained"].items() if count}


def test_an_evaluation_and_a_new_training_do_without_them(erasing):
    federation, ids, before = erasing
    done = forget(own(federation, "bank"), ids, rewrite=True)
    run = federation.run("evaluate", "trained", alignment="alignment")
    (figures,) = RunFolder(run).evaluations()
    part = PartyFolder(own(federation, "label").run_path("trained") / "parties" / "label")
    tested = part.card()["data"]["rows"]["test"] - done.runs["trained"]["test"]
    assert figures["rows"]["test"] == tested
    federation.run("train", "anew", alignment="alignment")
    part = PartyFolder(own(federation, "bank").run_path("anew") / "parties" / "bank")
    assert sum(part.card()["data"]["rows"].values()) == len(before) - 5


def test_nothing_of_an_erased_row_is_left_at_its_owner(erasing):
    federation, ids, _ = erasing
    for name in ("bank", "label"):
        folder = federation.folder / f"own-{name}"
        held = {str(holds(folder, folder / "store", folder / path).files)
                for path in found_in(folder, ids)}  # fmt: skip
        assert "store/runs/*/parties/*/rows.sealed" in held, "or the search finds nothing"
        assert all(one.forget for one in KEPT if one.files in held)
        forget(own(federation, name), ids, rewrite=True)
        assert found_in(folder, ids) == []
        table = (federation.folder / f"{name}.csv").read_text()
        assert not any(each in table for each in ids)


def test_every_file_of_a_party_is_in_the_list(erasing):
    federation, ids, _ = erasing
    federation.run("evaluate", "trained", alignment="alignment")
    forget(own(federation, "label"), ids[:1], rewrite=True)
    for name in (*PARTIES, "label"):
        folder = federation.folder / f"own-{name}"
        for path in folder.rglob("*"):
            if path.is_file() and path.name != ".lock":
                assert holds(folder, folder / "store", path), path


def test_without_table_its_owner_deletes_the_rows_and_sessions_wait_for_that(erasing):
    federation, ids, _ = erasing
    path = federation.folder / "bank.csv"
    content = path.read_bytes()
    done = forget(own(federation, "bank"), ids)
    assert path.read_bytes() == content
    assert done.in_table == 5
    with pytest.raises(VFLError):
        federation.run("predict", "trained", alignment="alignment")
    path.write_text("".join(line for line in content.decode().splitlines(keepends=True)
                            if not any(each in line for each in ids)))  # fmt: skip
    federation.run("predict", "trained", alignment="alignment")


def test_a_party_that_would_be_left_with_few_rows_refuses(erasing):
    federation, ids, before = erasing
    federation.write(shop=f"min_common = {len(before) - 2}")
    forget(own(federation, "bank"), ids, rewrite=True)
    with pytest.raises(PeerFailedError, match="requires more common rows"):
        federation.run("predict", "trained", alignment="alignment")
    assert len(federation.kept("shop").positions) == len(before)


def test_more_rows_than_one_introduction_names_take_several_beginnings(erasing, monkeypatch):
    federation, ids, before = erasing
    monkeypatch.setattr("vfl.session.handshake._MOST_AT_ONCE", 2)
    forget(own(federation, "bank"), ids, rewrite=True)
    after = predictions(federation.run("predict", "trained", alignment="alignment"))
    assert len(after) == len(before) - 5
    assert federation.kept("shop").withdrawn == federation.kept("bank").withdrawn


def test_a_run_is_marked_and_says_what_it_had(erasing):
    federation, ids, _ = erasing
    done = forget(own(federation, "bank"), ids[:3], rewrite=True)
    again = forget(own(federation, "bank"), ids, rewrite=True)
    part = PartyFolder(own(federation, "bank").run_path("trained") / "parties" / "bank")
    assert sum(part.forgotten().values()) == 5
    assert sum(done.runs["trained"].values()) == 3
    assert (again.found, sum(again.runs["trained"].values())) == (2, 2)
    assert all(each not in " ".join(done.remains()) for each in ids)
