"""A decoder asked over TLS streams: answers, limits, what is refused, and what no wire carries."""

import contextlib
import json
import shutil
import stat
import threading
import time

import numpy as np
import pytest
import torch
from llm_parties import LlmParties, small_model
from model_folders import write_model

from vfl.core.errors import (
    AuthenticationError,
    ConfigError,
    ConsentError,
    DataError,
    DisagreementError,
    LostPeerError,
    MissingDataError,
    PeerFailedError,
    ReusedPadError,
    RingRangeError,
    RunFolderError,
    VFLError,
)
from vfl.core.frame import HEADER_BYTES
from vfl.llm import command
from vfl.llm import parties as llm
from vfl.llm.file import LlmLimits
from vfl.llm.ledger import questions_of
from vfl.llm.material import MaterialStore
from vfl.llm.private_decoder import greedy
from vfl.llm.text import BytePairs, Streamed, read_tokenizer
from vfl.llm.two_party import Form
from vfl.models.pretrained import load_pretrained, save_decoder
from vfl.mpc import private
from vfl.mpc.channel import bytes_by_phase
from vfl.session.store.identity import Identity
from vfl.session.store.witness import BLOCK

PROMPT = [7, 3, 9, 41]


@pytest.fixture
def parties(tmp_path):
    """Makes a project; whoever stands is let go afterwards."""
    made = []

    def make(*names, **options):
        made.append(LlmParties(tmp_path, **options))
        return made[-1].start(*names)

    yield make
    for one in made:
        one.end()


@pytest.fixture
def project(parties):
    return parties("owner", "dealer")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """A refusal is believed after a second: no test here has killed a process of a party."""
    monkeypatch.setattr(llm, "_GRACE_S", 0.0)


def test_the_answer_is_that_of_plain_torch_and_comes_token_by_token(project):
    heard = []
    reply = project.user().ask(PROMPT, 6, on_token=lambda token: heard.append(token))
    assert reply.tokens == heard == project.model.generate(PROMPT, 6)
    assert len(set(reply.tokens)) > 2


def test_several_questions_are_answered_side_by_side_in_the_messages_of_one(project):
    prompts, heard = [PROMPT, PROMPT[::-1], [5, 60, 12, 33]], []

    def on_token(text, token):
        heard.append(text)
        return text == 1 and heard.count(1) == 2  # this one ends early

    user = project.user()
    reply = user.ask_all(prompts, 4, on_token=on_token)
    wanted = [project.model.generate(prompt, 4) for prompt in prompts]
    wanted[1] = wanted[1][:2]
    assert reply.answers == wanted
    alone = user.ask(PROMPT, 4)
    assert alone.tokens == wanted[0]
    assert reply.phases["online"]["messages"] == alone.phases["online"]["messages"]
    assert user.left() == {}


def test_a_question_is_answered_while_material_is_dealt(project, monkeypatch):
    """The dealing waits in the middle until the answer is there, at all three parties."""
    putting, reached, go_on = MaterialStore.putting, threading.Event(), threading.Event()

    @contextlib.contextmanager
    def waiting(self, name):
        with putting(self, name) as keep:
            if self.party == "user":
                reached.set()
                assert go_on.wait(60)
            yield keep

    user = project.user()
    user.deal(4, 1, questions=2)
    monkeypatch.setattr(MaterialStore, "putting", waiting)
    dealing = threading.Thread(target=project.user().deal, args=(4, 1))
    dealing.start()
    assert reached.wait(60)
    for _ in range(2):
        assert project.user().ask(PROMPT, 1).tokens == project.model.generate(PROMPT, 1)
    assert dealing.is_alive()
    go_on.set()
    dealing.join()
    assert user.left() == {"4-1": 1}
    assert user.ask(PROMPT, 1).tokens == project.model.generate(PROMPT, 1)


def test_material_is_dealt_while_a_question_is_answered(project):
    user, dealt = project.user(), []

    def on_token(token):
        if not dealt:
            dealt.append(project.user().deal(4, 3))
        return False

    user.deal(4, 3)
    assert user.ask(PROMPT, 3, on_token=on_token).tokens == project.model.generate(PROMPT, 3)
    assert user.left() == {"4-3": 1}


def test_a_question_that_needs_material_is_dealt_for_before_all_of_a_command_is(
    project, monkeypatch
):
    lines = []
    monkeypatch.setattr(command, "say", lines.append)
    dealing = threading.Thread(target=command.deal, args=(project.folder / "user", 4, 1, 20, 1))
    dealing.start()
    while not lines:  # the first of twenty is dealt
        time.sleep(0.01)
    user = project.user()
    assert user.ask(PROMPT[:3], 1).tokens == project.model.generate(PROMPT[:3], 1)
    before = len([line for line in lines if line.startswith("dealt")])
    dealing.join()
    assert before < 20
    assert user.left() == {"4-1": 20}


def test_handshakes_of_questions_and_dealings_have_one_order_at_all_parties(project):
    """Counters of stores only grow, so a handshake that overtakes another one would be refused."""
    project.user().deal(4, 1, questions=3)
    asked, failed = [], []

    def repeat(task):
        try:
            for _ in range(3):
                task()
        except VFLError as error:
            failed.append(error)

    tasks = (
        lambda: asked.append(project.user().ask(PROMPT, 1).tokens),
        lambda: project.user().deal(5, 1),
    )
    threads = [threading.Thread(target=repeat, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert asked == [project.model.generate(PROMPT, 1)] * 3
    counts = {
        name: questions_of(project.file(name)).witness.read()
        for name in ("owner", "user", "dealer")
    }
    for name, own in counts.items():
        for other in counts.keys() - {name}:
            assert counts[other].peers[name] == own.count - BLOCK
    used = {
        name: {path.name for path in (project.folder / name / "store").glob("material-*/*.used")}
        for name in counts
    }
    assert used["owner"] == used["user"] == used["dealer"]
    assert len(used["user"]) == 3


def test_more_material_than_the_owner_lets_wait_is_refused_before_any_is_dealt(parties):
    project = parties("owner", "dealer", limits={"max_dealt": 2})
    with pytest.raises(ConsentError, match="max_dealt"):
        command.deal(project.folder / "user", 4, 1, 3, 1)
    assert project.user().left() == {}


def test_questions_side_by_side_count_each(parties):
    project = parties("owner", "dealer", limits={"max_questions": 3})
    user = project.user()
    assert len(user.ask_all([PROMPT, PROMPT], 1).answers) == 2
    user.deal(len(PROMPT), 1, texts=2)
    assert user.left() == {"4-1x2": 1}
    with pytest.raises(PeerFailedError, match="fewer questions"):
        user.ask_all([PROMPT, PROMPT], 1)
    assert user.ask(PROMPT, 1).tokens == project.model.generate(PROMPT, 1)


@pytest.mark.parametrize("bits", [8, 13])
def test_a_model_of_larger_values_is_answered_with_more_integer_bits(parties, bits):
    model = small_model()
    model.tokens.weight.data.mul_(150)
    user = parties("owner", "dealer", model=model, integer_bits=bits).user()
    if bits == 13:
        assert user.ask(PROMPT, 4).tokens == model.generate(PROMPT, 4)
        return
    with pytest.raises(RingRangeError) as caught:
        user.ask(PROMPT, 4)
    assert "--integer-bits" in caught.value.fix


def test_a_classifier_gives_the_logits_of_plain_torch(parties, tmp_path):
    write_model(tmp_path / "hf", "bert")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    project = parties("owner", "dealer", folder=tmp_path / "hf")
    user = project.user()
    assert user.classifies
    assert list(user.terms.labels) == ["no", "maybe", "yes"]
    reply = user.ask_all([PROMPT])
    with torch.no_grad():
        wanted = project.model(torch.tensor([PROMPT]))[0].tolist()
    assert reply.answers == []
    assert reply.logits == pytest.approx(wanted, abs=0.02)
    with pytest.raises(DataError, match="one text at a time"):
        user.ask_all([PROMPT, PROMPT])
    with pytest.raises(DataError, match="context"):
        user.ask_all([[1] * 33])


def test_without_a_dealer_that_counts_what_was_dealt_ahead_needs_none(parties):
    project = parties("owner", "dealer", dealer_counts=False)
    user = project.user()
    user.deal(len(PROMPT), 3, questions=2)
    assert user.left() == {"4-3": 2}
    project.end("dealer")
    wanted = project.model.generate(PROMPT, 3)
    assert [project.user().ask(PROMPT, 3).tokens for _ in range(2)] == [wanted, wanted]
    assert user.left() == {}
    with pytest.raises(PeerFailedError, match="the dealer cannot be reached"):
        project.user().ask(PROMPT, 3)


@pytest.mark.parametrize("taker", ["user", pytest.param("owner", marks=pytest.mark.slow)])
def test_used_material_never_returns_whoever_was_killed_after_taking_it(project, taker):
    """Killed before a word: the material is marked, so neither end uses its half again."""
    user = project.user()
    user.deal(len(PROMPT), 2)
    party = (
        user if taker == "user" else llm.Owner(project.file("owner"), lambda: project.model, print)
    )
    setup = user.setup()["setup"]
    (name,) = user.store(setup).names()
    party.store(setup).take(name)
    project.end("dealer")
    with pytest.raises(PeerFailedError, match="the dealer cannot be reached"):
        project.user().ask(PROMPT, 2)
    with pytest.raises(ReusedPadError):
        party.store(setup).take(name)


@pytest.mark.parametrize("party", ["user", "owner"])
def test_damaged_material_is_given_up_and_the_next_is_taken(parties, party):
    project = parties("owner", "dealer")
    user = project.user()
    user.deal(len(PROMPT), 2, questions=2)
    first = min((project.folder / party / "store").glob("material-*/*.material"))
    whole = bytearray(first.read_bytes())
    whole[-5] ^= 1
    first.write_bytes(whole)
    with pytest.raises((RunFolderError, PeerFailedError), match="not as it was written") as caught:
        project.user().ask(PROMPT, 2)
    assert "ask again" in str(caught.value)
    assert project.user().ask(PROMPT, 2).tokens == project.model.generate(PROMPT, 2)
    assert not first.exists()


@pytest.mark.slow
def test_other_weights_are_shared_anew_and_old_material_is_gone(project):
    project.user().deal(len(PROMPT), 2)
    project.end("owner")
    other = small_model()
    other.head.weight.data.neg_()
    save_decoder(project.folder.parent / "model", other)
    project.start("owner")
    assert project.user().ask(PROMPT, 2).tokens == other.generate(PROMPT, 2)
    for name in ("owner", "user"):
        assert len(list((project.folder / name / "store").glob("material-*"))) == 1


def test_a_stop_ends_the_answer_at_both_ends(project):
    heard = []

    def told(token):
        heard.append(token)
        return len(heard) == 3

    user = project.user()
    assert user.ask(PROMPT, 5, on_token=told).tokens == project.model.generate(PROMPT, 3)
    assert user.ask(PROMPT, 2).tokens == project.model.generate(PROMPT, 2)  # the owner goes on


@pytest.mark.parametrize(
    "terms",
    [
        {"mode": "fast"},
        {"protect": "scores"},
        pytest.param({"mode": "thesis"}, marks=pytest.mark.slow),
    ],
)
def test_bytes_on_the_wire_are_the_model_and_told_framing(parties, terms):
    """Frames are those of the three in one process; TLS adds what its records and greeting take."""
    project = parties("owner", "dealer", **terms)
    with private(project.model, form=Form(**terms)) as hidden:
        hidden.generate(PROMPT, 4)
        told = bytes_by_phase(hidden.traffic())
    project.user().deal(len(PROMPT), 4)
    with project.line("owner") as line:
        reply = project.user(owner=f"127.0.0.1:{line.port}").ask(PROMPT, 4)
        real = line.sent_bytes
    phases = {name: row["bytes"] for name, row in reply.phases.items()}
    assert phases["online"] == told["online"]
    assert phases["offline"] == told["offline"]
    layers = llm.layer_shapes(project.model.shape, project.file("user").terms.form)
    weights = sum(-(-one.shape[0] * one.shape[1] * one.ring // 8) for one in layers)
    assert phases["setup"] == weights + 2 * len(layers) * HEADER_BYTES  # the dealer is told
    # A record of TLS 1.3 adds header, type and tag; greetings of TLS and ours come once.
    records = 22 * (reply.phases["online"]["messages"] + reply.phases["control"]["messages"])
    words = reply.phases["control"]["between"]["owner and user"]
    assert 0 < real - phases["online"] - words - records < 2000
    assert sum(reply.phases["online"]["between"].values()) == phases["online"]


def test_a_cut_within_an_answer_changes_nothing(project):
    with project.line("owner") as line:
        reply = project.user(owner=f"127.0.0.1:{line.port}").ask(
            PROMPT, 6, on_token=lambda token: line.cut()
        )
        assert line.connections > 3
    assert reply.tokens == project.model.generate(PROMPT, 6)


@pytest.mark.parametrize("setting", ["max_questions", "questions_per_hour"])
def test_more_than_the_owner_consents_to_is_refused_by_name(parties, setting):
    project = parties("owner", "dealer", limits={setting: 1})
    user = project.user()
    user.ask(PROMPT, 1)
    project.end("owner")
    project.start("owner")  # what was counted is on the disk
    with pytest.raises((ConsentError, PeerFailedError), match="the terms allow fewer") as refusal:
        user.ask(PROMPT, 1)
    assert refusal.value.where == f"terms.limits.{setting}"


def test_material_that_waits_is_counted_by_its_questions(parties):
    """Three asked side by side are three, those that wait already and those that are asked for."""
    user = parties("owner", "dealer", limits={"max_dealt": 5}).user()
    user.deal(len(PROMPT), 1, texts=3)
    for more in ({"texts": 3}, {"questions": 3}):
        with pytest.raises((ConsentError, PeerFailedError)) as refusal:
            user.deal(len(PROMPT), 1, **more)
        assert refusal.value.where == "terms.limits.max_dealt"
    user.deal(len(PROMPT), 1, questions=2)
    assert sum(user.left().values()) == 3


def test_tokens_are_counted_of_all_texts_asked_side_by_side(parties):
    """Nobody stands: what is too much is refused before a stream is opened."""
    user = parties(limits={"max_tokens": 12}).user()
    user.require_askable(4, 2, texts=2)
    with pytest.raises(ConsentError) as refusal:
        user.require_askable(4, 2, texts=3)
    assert refusal.value.where == "terms.limits.max_tokens"
    assert "18" in refusal.value.got
    with pytest.raises(ConsentError):
        user.require_askable(4, 9)
    for call in (lambda: user.deal(4, 2, texts=3), lambda: user.ask_all([PROMPT] * 3, 2)):
        with pytest.raises(ConsentError) as refusal:
            call()
        assert refusal.value.where == "terms.limits.max_tokens"


@pytest.mark.parametrize("other", [{"limits": LlmLimits(max_tokens=200)}, {"protect": "scores"}])
def test_limits_and_protection_are_part_of_the_terms(project, other):
    terms = project.file("user").terms.model_copy(update=other)
    with pytest.raises((DisagreementError, PeerFailedError), match="other terms"):
        project.user(terms=terms).ask(PROMPT, 2)


@pytest.mark.parametrize(
    "who", ["user", *(pytest.param(who, marks=pytest.mark.slow) for who in ("owner", "dealer"))]
)
def test_a_party_with_another_identity_is_nobody(parties, who):
    project = parties()
    Identity.fresh().keep_at(project.folder / who / "identity.key")
    project.start("owner", "dealer")
    with pytest.raises((AuthenticationError, PeerFailedError), match=r"V404|not its own"):
        project.user().ask(PROMPT, 2)


@pytest.mark.parametrize("what", ["owner.token", "owner.pem"])
def test_a_wrong_token_and_a_wrong_certificate_open_no_stream(project, what):
    other = {"owner.token": b"0" * 64, "owner.pem": None}[what]
    peers = project.folder / "user" / "peers"
    (peers / what).write_bytes(other or (peers / "dealer.pem").read_bytes())
    with pytest.raises(AuthenticationError) as refused:
        project.user().ask(PROMPT, 2)
    if what == "owner.token":
        assert refused.value.where == project.owner
        assert "peers/owner.token of the user" in refused.value.fix


def test_who_is_not_there_is_named(parties):
    project = parties("dealer")
    with pytest.raises(LostPeerError, match="the model owner cannot be reached"):
        project.user(rejoin_s=0.5).ask(PROMPT, 2)


@pytest.mark.parametrize("prompt", [[], [64], [-1]])
def test_a_token_that_the_model_lacks_is_refused_before_anything_is_sent(parties, prompt):
    with pytest.raises(DataError, match="tokens that the model knows"):
        parties().user().ask(prompt, 2)


@pytest.mark.parametrize("later", ["x" * 40, ""])
def test_questions_of_several_lengths_are_all_checked_before_one_is_asked(parties, later):
    user = parties().user(rejoin_s=0.5)  # nobody stands: what is asked ends in V405
    with pytest.raises(DataError, match=r"context|tokens that the model knows"):
        command._asked(user, ["abcd", later], 2, [], greedy, quiet=True)


def test_what_was_answered_is_shown_when_a_later_question_is_not(parties, capsys):
    project = parties(
        "owner", "dealer", model=small_model(vocabulary=256), limits={"max_questions": 1}
    )
    user = project.user()
    with pytest.raises(PeerFailedError, match="fewer questions"):
        command._asked(user, ["abcdef", "abcd"], 2, [], greedy, quiet=False)
    assert "abcd: " in capsys.readouterr().out


def test_requests_of_no_form_end_a_session_and_not_the_owner(project, monkeypatch):
    for payload in (b"{", b"[]", b'{"task": "dance"}', b"\xff" * 5000):
        with contextlib.ExitStack() as streams:
            wire = project.user()._open(streams, "owner", llm.Account(), "ask")
            wire.send(llm.Frame(llm.Kind.ASK, payload=payload))
            with pytest.raises(PeerFailedError, match="a request of an unknown form"):
                wire.receive()
    assert project.user().ask(PROMPT, 2).tokens == project.model.generate(PROMPT, 2)


@pytest.mark.slow
def test_a_bug_ends_a_session_and_not_the_owner(project, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.Owner, "_answer", lambda *given: 1 / 0)
        with pytest.raises(PeerFailedError, match="broke off"):
            project.user().ask(PROMPT, 2)
    assert project.user().ask(PROMPT, 2).tokens == project.model.generate(PROMPT, 2)
    assert any("ZeroDivisionError" in line for line in project.said["owner"])


def encodings(values):
    """A row of numbers as it could stand in a frame or a file."""
    exact = np.asarray(values, dtype=np.float64)
    yield from (exact.tobytes(), exact.astype(np.float32).tobytes())
    for bits in range(8, 33):  # whatever scale a layer has
        whole = np.rint(exact * 2.0**bits).astype("<i8")
        yield from (whole.tobytes(), whole.astype("<i4").tobytes())


def test_text_and_weights_are_on_no_wire_in_no_other_folder_and_in_no_log(parties, monkeypatch):
    """Planted: a text, its token ids, and two rows of weights."""
    carried = []
    send = llm.Wire.send

    def kept(self, frame):
        carried.append(bytes(frame.payload))
        send(self, frame)

    monkeypatch.setattr(llm.Wire, "send", kept)
    model = small_model(vocabulary=256)
    rows = [model.layers[0].mlp_in.weight.detach()[5, 3:9], model.tokens.weight.detach()[91, 3:9]]
    rows += [model.layers[0].mlp_in.weight.detach().t()[5, 3:9]]
    project = parties("owner", "dealer", model=model)
    text = b"Zq8 text"
    reply = project.user().ask(list(text), 8)
    answer = bytes(reply.tokens)
    project.end()
    # Whatever is packed how: a one-hot, an order or a value that no mask hides has few of its bits.
    bits = [np.unpackbits(np.frombuffer(one, np.uint8)) for one in carried if len(one) > 1000]
    assert len(bits) > 50
    assert all(0.45 < one.mean() < 0.55 for one in bits)
    ids = [np.array(list(each), dtype=kind).tobytes()
           for each in (text, answer) for kind in ("<i8", "<i4", "<u2")]  # fmt: skip
    words = [text, answer, str(list(text)).encode()[1:-1], *ids]
    secret = [raw for row in rows for raw in encodings(row)]
    assert not [raw for raw in (*words, *secret) for one in carried if raw in one]

    def files(name):
        paths = [path for path in (project.folder / name).rglob("*") if path.is_file()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} <= {0o600}
        return [path.read_bytes() for path in paths]

    for name in ("owner", "dealer"):
        assert not [raw for raw in words for one in files(name) if raw in one]
    for name in ("user", "dealer"):
        assert not [raw for raw in secret for one in files(name) if raw in one]
    said = json.dumps(project.said).encode()
    assert not [raw for raw in (*words, *secret) if raw in said]
    owner = [raw for raw in secret for one in files("owner") if raw in one]
    assert owner  # so the encodings are those that would be found


def test_a_model_of_another_shape_and_a_missing_key_are_found_at_the_start(parties):
    project = parties()
    with pytest.raises(ConfigError, match="another shape"):
        llm.Owner(project.file("owner"), lambda: small_model(layers=2), print)
    (project.folder / "dealer" / "peers" / "owner.pub").unlink()
    with pytest.raises(MissingDataError):
        llm.Dealer(project.file("dealer"), print)


def test_byte_pairs_come_back_as_text(tmp_path):
    pairs = BytePairs([(ord("a"), ord("b")), (256, ord("c")), (32, 257)])
    for text in ("abc abcab", "é ab\n\n x", ""):
        assert pairs.decode(pairs.encode(text)) == text
    assert pairs.encode("abc abc") == [257, 258]
    pairs.save(tmp_path)
    assert read_tokenizer(tmp_path).encode("abc abc") == [257, 258]
    assert read_tokenizer(tmp_path / "none").encode("ab") == [97, 98]
    for text in ('{"merges": [[1]]}', "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError):
            read_tokenizer(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, value):
    model = small_model()
    model.head.weight.data[3, 2] = value
    save_decoder(tmp_path, model)
    with pytest.raises(DataError, match=r"head\.weight"):
        load_pretrained(tmp_path)


def test_a_character_in_pieces_is_shown_when_it_is_whole():
    ended = Streamed(BytePairs(), end_tokens=[0])
    assert [ended.add(token) for token in b"a\0"] == [("a", False), ("", True)]
    assert ended.text == "a"
    answer = Streamed(BytePairs(), ["stop", ""])
    shown = [answer.add(token) for token in "né!".encode()]
    assert [text for text, _ in shown] == ["n", "", "é", "!"]
    assert llm.Reply([[1]], [], {}).tokens == [1]
    shown = [answer.add(token) for token in b" stop"]
    assert shown == [(" ", False), *[("", False)] * 3, ("", True)]
    assert answer.text == "né! "


def test_what_may_begin_a_stop_word_is_shown_when_it_is_none_or_the_answer_is_over():
    answer = Streamed(BytePairs(), ["\n\n", "aab"])
    assert "".join(answer.add(token)[0] for token in b"x aa") == "x "
    assert answer.add(ord("a")) == ("a", False)  # "aab" may still come
    assert answer.add(ord("c")) == ("aac", False)
    assert answer.add(ord("\n")) == ("", False)
    assert answer.finish() == "\n"
    assert answer.finish() == ""


@pytest.mark.parametrize("name", ["user", "dealer", "owner"])
def test_a_party_goes_on_after_its_newest_store_is_lost(parties, tmp_path, vfl, name):
    """What was dealt is not used again, and an owner answers no more than its limits allow."""
    project = parties("owner", "dealer")
    project.user().deal(4, 1, questions=2)
    store, copy = project.folder / name / "store", tmp_path / "copy"
    shutil.copytree(store, copy)
    project.user().deal(4, 1, questions=2)
    project.user().ask(PROMPT, 1)
    if name != "user":
        project.end(name)
    shutil.rmtree(store)
    shutil.copytree(copy, store)
    if name != "user":
        project.start(name)
    with pytest.raises(VFLError, match="vfl llm restored FOLDER"):  # whoever notices
        project.user().deal(4, 1)
    if name != "user":
        project.end(name)
    done = vfl("llm", "restored", project.folder / name)
    assert done.code == 0, done.err
    assert not [path for path in store.iterdir() if path.name.startswith("material-")]
    if name != "user":
        project.start(name)
    project.user().deal(4, 1)
    assert sum(project.user().left().values()) == 1  # of another sharing of the weights
    if name == "owner":
        with pytest.raises(PeerFailedError, match="V403: the terms allow fewer questions"):
            project.user().ask(PROMPT, 1)
    else:
        assert project.user().ask(PROMPT, 1).tokens == project.model.generate(PROMPT, 1)
