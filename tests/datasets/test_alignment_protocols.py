"""Private set intersection: against sets, what crosses, and who is told what."""

import hashlib
import secrets
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl.core.errors import BadOptionError, ConsentError, ProtocolError, RunFolderError
from vfl.datasets.alignment import ristretto
from vfl.datasets.alignment.ids import DiskIds
from vfl.datasets.alignment.protocols import (
    HELPER,
    PROTOCOLS,
    Bounds,
    Own,
    Receive,
    Send,
    play,
)
from vfl.datasets.alignment.reused import Keys
from vfl.datasets.alignment.tags import common_rows, count_repeated, tags_of
from vfl.datasets.on_disk import OnDisk, bucket_count, scratch

ANY = Bounds(0, 2**28, 0)
SPECS = ["server_aided", "server_aided:pad=70", "ecdh", "ecdh:pad=70"]
NAMES = ["bank", "shop", "label", "post"]
#: RFC 9496, appendix A.3: hash of 64 bytes to a point.
VECTOR = (
    "5d1be09e3d0c82fc538112490e35701979d99e06ca3e2b5b54bffe8b4dc772c1"
    "4d98b696a1bbfb5ca32c436cc61c16563790306c79eaca7705668b47dffe5bb6",
    "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46",
)


def owns(*sets, bounds=None):
    return [
        Own(name, [b"id %d" % each for each in own], bounds or ANY)
        for name, own in zip(NAMES, sets, strict=False)
    ]


def label_of(parties):
    return "label" if len(parties) > 2 else parties[-1].party


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15, deadline=None)
@given(
    sets=st.lists(st.lists(st.integers(0, 40), unique=True, max_size=30), min_size=2, max_size=4)
)
def test_positions_are_those_of_the_common_ids_in_one_order(spec, sets):
    brought = owns(*sets)
    found, traffic = play(spec, brought, label_of(brought))
    orders = [[own.ids[row] for row in found[own.party]] for own in brought]
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == sorted(set.intersection(*(set(own.ids) for own in brought)))
    assert (HELPER in {each for pair in traffic.messages for each in pair}) == spec.startswith("s")


@pytest.mark.parametrize("spec", SPECS)
def test_no_id_crosses_and_nothing_repeats_in_a_second_run(spec):
    marker = b"planted marker of a person"
    parties = [Own(name, [marker, b"other", *(b"%d" % n for n in range(60))]) for name in NAMES]
    wires = []
    for _ in range(2):
        wire = []
        play(
            spec,
            parties,
            "label",
            lambda sender, to, payload, wire=wire: wire.append(bytes(payload)),
        )
        assert marker not in b"".join(wire)
        plain = {hashlib.new(name, marker).digest() for name in ("sha256", "sha512", "blake2b")}
        assert not any(digest[:16] in b"".join(wire) for digest in plain)
        assert ristretto.points_of([marker]) not in b"".join(wire)
        wires.append({payload[i : i + 16] for payload in wire for i in range(0, len(payload), 16)})
    assert not {piece for piece in wires[0] & wires[1] if len(piece) == 16 and any(piece[1:])}


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_and_messages_are_what_the_docstring_says(spec):
    padded = 70 if "pad" in spec else 60
    common = 40
    left, right = owns(range(60), range(20, 80))
    _, traffic = play(spec, [left, right], "shop")
    sent = traffic.payload_bytes
    if spec.startswith("server"):
        assert sent == {
            ("shop", "bank"): 16,
            **{(name, HELPER): 8 + 16 * padded + 1 for name in ("bank", "shop")},
            **{(HELPER, name): 1 + -(-padded // 8) + 1 for name in ("bank", "shop")},
        }
    else:
        assert sent["shop", "bank"] == 32 * padded + 16 * padded + 1
        assert sent["bank", "shop"] == 32 * padded + 1 + 4 * common + 1


def test_padded_sets_of_other_sizes_look_alike():
    shapes = set()
    for spec in ("server_aided:pad=50", "ecdh:pad=50"):
        for size in (20, 45):
            _, traffic = play(spec, owns(range(size), range(10, 20)), "shop")
            shapes.add((spec, tuple(sorted(traffic.payload_bytes.items()))))
    assert len(shapes) == 2


@pytest.mark.parametrize("spec", ["server_aided", "ecdh"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_label_party_that_asks_for_one_id_is_refused_and_learns_nothing(spec, count):
    """Its set is made of ids that nobody has, and the one it asks about."""
    told = []
    asked = [5, *range(10_000, 10_100)]
    parties = owns(*[range(100)] * (count - 1), bounds=Bounds(50, 10**6, 10))
    names = [*(own.party for own in parties), "lender"]
    lender = Own("lender", [b"id %d" % each for each in asked], ANY)
    with pytest.raises(ConsentError) as caught:
        play(spec, [*parties, lender], "lender", lambda *message: told.append(message))
    assert "1 ids in common, of 100 of its own" in str(caught.value)
    last = [bytes(payload) for _, to, payload in told if to == "lender"][-1]
    assert last == b"\0"
    without = []
    asked[0] = 9_999
    lender = Own("lender", [b"id %d" % each for each in asked], ANY)
    with pytest.raises(ConsentError):
        play(spec, [*parties, lender], "lender", lambda *message: without.append(message))
    assert shapes_to("lender", told) == shapes_to("lender", without)
    assert names[-1] == "lender"


def shapes_to(party, messages):
    return [(sender, len(payload)) for sender, to, payload in messages if to == party]


def test_a_set_that_is_too_small_is_refused_before_it_is_used():
    sent = []
    parties = owns(range(100), range(3), bounds=Bounds(50))
    with pytest.raises(ConsentError, match="so small a set") as caught:
        play("ecdh", parties, "shop", lambda *message: sent.append(message))
    assert caught.value.got == "3 ids of 'shop'"
    assert [(sender, to) for sender, to, _ in sent if sender == "bank"] == [("bank", "shop")]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("limit", [{"max_ids": 69}, {"max_asked": 69}])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_set_that_could_be_a_dictionary_is_refused_before_it_is_used(spec, limit, victim):
    """Sets count as they are sent: of 60 ids that are padded to 70, one accepts no 69."""
    own, most, told = range(50), 60 if "pad" in spec else 70, []
    sets = [range(most)] * 3
    sets[victim] = own
    parties = owns(*sets)
    parties[victim] = replace(parties[victim], bounds=replace(ANY, **limit))
    with pytest.raises(ConsentError, match=r"so large a set|so few ids"):
        play(spec, parties, "label", lambda *message: told.append(message))
    answers = {bytes(payload[:1]) for sender, _, payload in told if sender == HELPER}
    assert answers <= {b"\0"}
    if spec.startswith("ecdh"):  # its own points alone, under its own scalar
        name = parties[victim].party
        sizes = [len(payload) // 32 for sender, _, payload in told if sender == name]
        assert sizes == [70 if "pad" in spec else len(own)]


@pytest.mark.parametrize("spec", ["ecdh", "ecdh:pad=70"])
def test_every_set_is_counted_with_its_padding(spec):
    parties, counted = owns(range(50), range(60), range(55)), []

    def noting(name):
        return lambda *pair: counted.append((name, *pair))

    play(spec, [replace(own, count=noting(own.party)) for own in parties], "label")
    sizes = {own.party: 70 if "pad" in spec else len(own.ids) for own in parties}
    assert sorted(counted) == sorted(
        (one, other, sizes[other]) for one in sizes for other in sizes if one != other
    )


def driven(role, *answers):
    """What a role sends when it hears these answers."""
    sent, step, heard = [], next(role), list(answers)
    while True:
        if isinstance(step, Send):
            sent.append(step)
            step = next(role)
        else:
            assert isinstance(step, Receive)
            if not heard:
                return sent
            step = role.send(heard.pop(0))


@pytest.mark.parametrize(
    "answers",
    [
        (b"k" * 15,),
        (b"k" * 16, b""),
        (b"k" * 16, b"\x01"),
        (b"k" * 16, b"\x02\xff"),
        (b"k" * 16, b"\x01\xff\xff"),
    ],
)
def test_a_party_refuses_what_a_helper_cannot_have_said(answers):
    own = Own("bank", [b"1", b"2"])
    with pytest.raises(ProtocolError):
        driven(PROTOCOLS.make("server_aided").role(own, ["bank", "label"], "label"), *answers)


def test_a_random_tag_that_is_called_common_is_refused():
    own = Own("bank", [b"1", b"2"])
    role = PROTOCOLS.make("server_aided:pad=8").role(own, ["bank", "label"], "label")
    with pytest.raises(ProtocolError, match="random tag"):
        driven(role, b"k" * 16, b"\x01\xff")


@pytest.mark.parametrize("tags", [b"x", b"b" * 16 + b"a" * 16, b"a" * 32])
def test_a_helper_refuses_tags_that_are_no_set(tags):
    helper = PROTOCOLS.make("server_aided").helping(["bank", "label"], "label")
    with pytest.raises(ProtocolError):
        driven(helper, bytes(8) + tags, bytes(8) + b"a" * 16)


@pytest.mark.parametrize("bounds", [Bounds(50), Bounds(0, 2)])
def test_a_helper_compares_no_set_of_a_size_that_somebody_refuses(bounds):
    told = []
    parties = owns(range(100), range(3), range(40), bounds=ANY)
    parties[0] = Own("bank", parties[0].ids, bounds)
    with pytest.raises(ConsentError):
        play("server_aided", parties, "label", lambda *message: told.append(message))
    assert {bytes(payload) for sender, _, payload in told if sender == HELPER} == {b"\0"}


def test_an_id_that_is_sent_twice_does_not_count_twice():
    """The label party repeats the one id it asks about, to seem to have many in common."""
    one = Own("label", [b"id 5"] * 100, ANY)
    with pytest.raises(ProtocolError, match="twice"):
        play("ecdh", [*owns(range(100), bounds=Bounds(50, 10**6, 10)), one], "label")


@pytest.mark.parametrize("guessed", [False, True])
def test_one_id_under_many_scalars_counts_as_many_only_to_who_guesses_its_point(guessed):
    """What docs/alignment.md says is left: the count is the other side's own, of what it is sent.

    The label party sends one id's point under a scalar for each of the other's points, and returns
    the point that it takes for that id's under these scalars, in place of all the others.
    """
    asked, ids = b"id 5", [b"id %d" % each for each in range(20)]
    judge = PROTOCOLS.make("ecdh").role(
        Own("bank", ids, Bounds(10, 10**6, 10)), ["bank", "label"], "label"
    )
    sent = bytes(next(judge).payload)
    scalars = [ristretto.fresh_scalar() for _ in ids]
    step = next(judge)
    assert isinstance(step, Receive)
    point = ristretto.points_of([asked])
    step = judge.send(b"".join(ristretto.multiply(point, one) for one in scalars))
    while isinstance(step, Send):
        step = next(judge)
    shuffled = [sent[at : at + 32] for at in range(0, len(sent), 32)]
    secret = judge.gi_frame.f_locals["scalar"]
    its = ristretto.multiply(point, secret)
    taken = its if guessed else next(one for one in shuffled if one != its)
    back = b"".join(ristretto.multiply(taken, one)[8:24] for one in scalars)
    answer = judge.send(back)
    assert isinstance(answer, Send)
    assert len(answer.payload) == (1 + 4 * len(ids) if guessed else 1)
    if not guessed:
        with pytest.raises(ConsentError, match="common"):
            next(judge)


@pytest.mark.parametrize("points", [b"\xff" * 32, bytes(32), b"\x01" * 32, b"x" * 31])
def test_what_is_no_point_is_refused(points):
    own = Own("bank", [b"1", b"2"], ANY)
    with pytest.raises(ProtocolError, match="no points"):
        driven(PROTOCOLS.make("ecdh").role(own, ["bank", "label"], "label"), points)


@pytest.mark.parametrize("answer", [b"", b"\x01\0\0", b"\x01" + bytes(8), b"\x01\x07\0\0\0", b"\2"])
def test_a_label_party_refuses_positions_that_cannot_be(answer):
    own = Own("label", [b"1", b"2"])
    point = ristretto.random_points(1)
    with pytest.raises(ProtocolError):
        driven(PROTOCOLS.make("ecdh").role(own, ["bank", "label"], "label"), point, answer)


def test_points_are_those_of_the_standard():
    given, wanted = map(bytes.fromhex, VECTOR)
    from_hash, _ = ristretto._functions()
    found = ristretto._mapped(1, lambda row, out: from_hash(out, given))
    assert found == wanted


def test_multiplications_commute_and_are_those_of_the_group():
    points, two = ristretto.points_of([b"a", b"b"]), (2).to_bytes(32, "little")
    left, right = ristretto.fresh_scalar(), ristretto.fresh_scalar()
    both = ristretto.multiply(ristretto.multiply(points, left), right)
    assert both == ristretto.multiply(ristretto.multiply(points, right), left)
    product = int.from_bytes(left, "little") * int.from_bytes(right, "little") % ristretto._ORDER
    assert both == ristretto.multiply(points, product.to_bytes(32, "little"))
    assert ristretto.multiply(points, two) != points
    with pytest.raises(ProtocolError):
        ristretto.multiply(bytes(32), left)


def test_tags_are_keyed_blake2b():
    key = secrets.token_bytes(16)
    (tag,) = tags_of([b"7"], key)
    assert bytes(tag) == hashlib.blake2b(b"7", digest_size=16, key=key).digest()


@given(
    st.lists(st.sets(st.integers(0, 30), max_size=20), min_size=1, max_size=3), st.integers(0, 8)
)
def test_tags_that_begin_alike_are_told_apart(sets, shared):
    """Tags that share their first bytes, up to all that are compared at first."""
    tags = [
        np.array(
            [[7] * shared + [n] + [0] * (15 - shared) for n in sorted(own, reverse=True)], np.uint8
        ).reshape(-1, 16)
        for own in sets
    ]
    common = sorted(set.intersection(*sets))
    found = common_rows([[own] for own in tags], list(map(len, tags)), scratch())
    for own, rows in zip(tags, (column[:] for column in found), strict=True):
        assert [int(own[row, shared]) for row in rows] == common


@pytest.mark.parametrize("spec", ["ecdh:pad=5", "server_aided:pad=5"])
def test_a_padding_that_hides_too_little_is_refused(spec):
    with pytest.raises(BadOptionError, match="more ids than the padding hides"):
        play(spec, owns(range(6), range(2)), "shop")


@pytest.mark.parametrize("spec", ["ecdh:pad=-1", "server_aided:pad=1000000000"])
def test_a_padding_that_cannot_be_is_refused(spec):
    with pytest.raises(BadOptionError):
        PROTOCOLS.make(spec)


@pytest.fixture
def small(tmp_path):
    """So little memory that sets of thousands fall into several buckets."""
    return OnDisk(tmp_path, 1 << 18)


@pytest.mark.parametrize("spec", ["server_aided", "server_aided:pad=9000", "ecdh", "ecdh:pad=4000"])
def test_sets_of_many_buckets_and_blocks_are_compared_alike(spec, small, monkeypatch):
    for room in ("tags", "protocols"):
        monkeypatch.setattr(f"vfl.datasets.alignment.{room}.BLOCK_TAGS", 512)
    monkeypatch.setattr("vfl.datasets.alignment.protocols.scratch", lambda: small)
    size = 8000 if spec.startswith("s") else 3000
    brought = [replace(own, place=small) for own in owns(range(size), range(size // 4, 2 * size))]
    if "pad" in spec:
        brought[1] = replace(brought[1], ids=brought[1].ids[:size])
    assert bucket_count(small, 24 * 2 * size) > 1
    found, _ = play(spec, brought, "shop")
    orders = [[own.ids[row] for row in found[own.party]] for own in brought]
    assert orders[0] == orders[1]
    assert set(orders[0]) == set(brought[0].ids) & set(brought[1].ids)
    assert not list(small.folder.iterdir())


def test_the_memory_of_a_set_is_that_of_the_setting(small, monkeypatch):
    """Each of both parties has 200,000 ids, which lie on disk already: 3.2 MB of tags."""
    monkeypatch.setattr("vfl.datasets.alignment.protocols.scratch", lambda: small)
    brought = []
    for name, first in (("bank", 0), ("label", 100_000)):
        ids = DiskIds(small)
        for start in range(first, first + 200_000, 10_000):
            ids.add([b"person-%09d" % number for number in range(start, start + 10_000)])
        brought.append(Own(name, ids, place=small))
    tracemalloc.start()
    try:
        found, _ = play("server_aided", brought, "label")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found["bank"]) == 100_000
    assert peak < 12e6  # of which a block of ids takes 7; all in memory it was 50


def test_tags_that_want_all_memory_are_refused(small):
    """Whoever sends tags of one beginning would have them all compared at once."""
    tags = np.zeros((20_000, 16), np.uint8)
    tags[:, 8:] = np.arange(20_000, dtype=">u8")[:, None].view(np.uint8)
    with pytest.raises(ProtocolError, match="one prefix"):
        common_rows([[tags], [tags]], [len(tags)] * 2, small)


def test_where_common_points_stand_does_not_tell_how_many_are_padding():
    """The party that compares sees which places of the other's set are common."""
    answers = []
    play(
        "ecdh:pad=400",
        owns(range(20), range(20)),
        "shop",
        lambda sender, to, payload: answers.append(bytes(payload)) if sender == "bank" else None,
    )
    places = np.frombuffer(next(one for one in answers if len(one) == 81), "<u4", offset=1)
    assert places.max() > 40  # all below 40 by chance: once in 10^20


@pytest.mark.parametrize("most", [1, 2, 30_000])
def test_repeated_ids_are_counted_in_little_memory(most, small):
    ids = [b"%d" % (number // most) for number in range(60_000)]
    blocks = (ids[start : start + 1000] for start in range(0, len(ids), 1000))
    assert count_repeated(blocks, len(ids), small) == len(ids) - len(set(ids))


# --- keys that are reused -------------------------------------------------------------------------


class Stores:
    """Two parties with a store each, which align again and again."""

    def __init__(self, folder):
        self.folder, self.place, self.terms = folder, OnDisk(folder, 1 << 20), "terms"
        self.wire = []

    def path(self, party):
        return self.folder / f"{party}.reused"

    def align(self, bank, label, bounds=ANY, keep=True, spec="ecdh:reuse=true"):
        """Positions of both parties as ids; `wire` then has the messages."""
        brought, used, self.wire = [], {}, []
        for own in owns(bank, label, bounds=bounds):
            party = "label" if own.party == "shop" else own.party

            def kept(peer, party=party):
                used[party] = Keys.kept(self.path(party), self.terms, self.place)
                return used[party]

            brought.append(replace(own, party=party, place=self.place, keys=kept))
        found, self.traffic = play(
            spec, brought, "label", lambda *message: self.wire.append(message)
        )
        for party, keys in used.items() if keep else ():
            keys.stage(self.path(party), party)
            Keys.commit(self.path(party))
        return [[own.ids[row] for row in found[own.party]] for own in brought]

    def pieces(self):
        """All parts of points and tags in the messages; positions, mostly zeros, may recur."""
        sent = [bytes(payload) for *_, payload in self.wire if len(payload) > 32]
        parts = {each[at : at + 16] for each in sent for at in range(len(each) - 15)}
        return {part for part in parts if part.count(0) < 6}

    def points(self, sender, to):
        """Bytes of one direction, without the messages that do not depend on a set."""
        return self.traffic.payload_bytes[sender, to]


@pytest.fixture
def stores(tmp_path):
    return Stores(tmp_path)


ROUNDS = [
    (range(60), range(40, 90)),
    (range(60), range(40, 90)),
    (range(10, 75), range(30, 95)),
    (range(5), range(200, 240)),
    ([*range(80, 20, -1)], [70, 300, 25]),
]


def test_reused_keys_find_what_fresh_ones_find(stores):
    for bank, label in ROUNDS:
        first, second = stores.align(bank, label)
        assert first == second
        assert set(first) == {b"id %d" % each for each in {*bank} & {*label}}


@pytest.mark.parametrize("large", ["bank", "label"])
def test_a_set_that_was_sent_before_costs_only_its_new_ids(stores, large, monkeypatch):
    """200 ids at one party and 10 others at each alignment: 10 points go each way."""
    multiplied, multiply = [], ristretto.multiply
    monkeypatch.setattr(
        ristretto,
        "multiply",
        lambda points, *rest: multiplied.append(len(points) // 32) or multiply(points, *rest),
    )
    for number in range(3):
        small = range(190 + 10 * number, 200 + 10 * number)
        sets = (range(200), small) if large == "bank" else (small, range(200))
        multiplied.clear()
        first, _ = stores.align(*sets)
        assert len(first) == (10 if number == 0 else 0)
        assert sum(multiplied) == (2 * 210 if number == 0 else 2 * 10)
    assert sum(stores.traffic.payload_bytes.values()) < 32 * 30


def test_other_terms_never_meet_the_same_keys(stores):
    stores.align(range(30), range(30))
    before = stores.pieces()
    stores.align(range(30), range(25, 60), keep=False)
    assert before & stores.pieces() == set()  # recurring ids are one bit each
    stores.terms = "others"
    stores.align(range(30), range(30))
    assert before & stores.pieces() == set()
    assert stores.points("bank", "label") > 32 * 30


@pytest.mark.parametrize("party", ["bank", "label"])
@pytest.mark.parametrize("loss", ["gone", "older"])
def test_parties_whose_kept_sets_differ_draw_fresh_keys(stores, party, loss):
    stores.align(range(30), range(20, 50))
    old = stores.path(party).read_bytes()
    stores.align(range(35), range(20, 55))
    before = stores.pieces()
    if loss == "gone":
        stores.path(party).unlink()
    else:
        stores.path(party).write_bytes(old)
    first, second = stores.align(range(40), range(20, 60))
    assert first == second
    assert len(first) == 20
    assert before & stores.pieces() == set()
    assert stores.points("bank", "label") > 32 * 40


def test_limits_count_all_ids_that_were_ever_sent_under_the_keys(stores):
    """A dictionary in parts would meet every later table too."""
    stores.align(range(60), range(50))
    for victim in ("bank", "label"):
        sets = (range(60), range(100, 120)) if victim == "bank" else (range(100, 120), range(50))
        with pytest.raises(ConsentError, match="so large a set"):
            stores.align(*sets, bounds=replace(ANY, max_asked=65))
    with pytest.raises(ConsentError, match="so small an intersection"):
        stores.align(range(60), range(100, 120), bounds=replace(ANY, min_common=5))


def test_a_refused_alignment_keeps_nothing(stores):
    with pytest.raises(ConsentError):
        stores.align(range(60), range(55, 100), bounds=replace(ANY, min_common=10))
    assert not list(stores.folder.iterdir())


def test_a_file_of_reused_keys_has_no_id_and_is_refused_if_damaged(stores):
    stores.align(range(60), range(50))
    for party in ("bank", "label"):
        content = stores.path(party).read_bytes()
        assert b"id 7" not in content
        stores.path(party).write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        with pytest.raises(RunFolderError, match="not as it was written"):
            stores.align(range(60), range(50))
        stores.path(party).write_bytes(content)


def test_two_alignments_at_once_leave_no_set_that_belongs_to_no_other(stores):
    """The bank keeps the result of the first, the label party that of the second."""
    stores.align(range(30), range(20, 50))
    before = {party: stores.path(party).read_bytes() for party in ("bank", "label")}
    stores.align(range(35), range(20, 55))
    first = stores.path("bank").read_bytes()
    for party, content in before.items():
        stores.path(party).write_bytes(content)
    stores.align(range(35), range(20, 55))
    stores.path("bank").write_bytes(first)
    bank, label = stores.align(range(35), range(20, 55))
    assert bank == label
    assert set(bank) == {b"id %d" % each for each in range(20, 35)}


@pytest.mark.parametrize("name", [b"", bytes(16), b"\x02" + bytes(16)])
def test_a_name_of_keys_that_cannot_be_is_refused(stores, name):
    own = replace(*owns(range(3)), keys=lambda peer: Keys(stores.place))
    role = PROTOCOLS.make("ecdh:reuse=true").role(own, ["bank", "label"], "label")
    with pytest.raises(ProtocolError):
        driven(role, name)


def test_what_cannot_reuse_keys_says_so(stores):
    with pytest.raises(BadOptionError, match="padding hides"):
        PROTOCOLS.make("ecdh:pad=5,reuse=true")
    with pytest.raises(BadOptionError, match="two parties of a federation") as caught:
        play("ecdh:reuse=true", owns(range(5), range(5)), "shop")
    assert caught.value.got == "parties without a store"
    three = [replace(own, keys=lambda peer: Keys(stores.place)) for own in owns(*[range(5)] * 3)]
    with pytest.raises(BadOptionError, match="two parties of a federation") as caught:
        play("ecdh:reuse=true", three, "label")
    assert caught.value.got == "3 parties"
