"""openmined-psi as a plug-in: against sets, what crosses, and who is told what."""

import pytest

from benchmarks.peers import openmined_alignment as openmined
from vfl.core.errors import ConfigError, ConsentError, MissingPackageError
from vfl.datasets.alignment.protocols import NO, Bounds, Own, play

ANY = Bounds(0, 2**28, 0)
NAMES = ["bank", "shop", "label"]


def is_installed():
    try:
        return openmined._library() is not None
    except MissingPackageError:
        return False


needs_openmined = pytest.mark.skipif(not is_installed(), reason="openmined-psi is not installed")


def owns(*sets, bounds=ANY):
    return [
        Own(name, [b"id %d" % each for each in own], bounds)
        for name, own in zip(NAMES, sets, strict=False)
    ]


def found(spec, *sets):
    """The common ids, once for each party, in the order that it found."""
    brought = owns(*sets)
    rows, traffic = play(spec, brought, brought[-1].party)
    return [[own.ids[row] for row in rows[own.party]] for own in brought], traffic


CASES = [
    (range(60), range(20, 90)),
    (range(30), range(30, 60)),
    ([7], range(20)),
    ([], range(5)),
    (range(40), range(39, -1, -1)),
]


@pytest.mark.parametrize("sets", CASES, ids=range(len(CASES)))
@needs_openmined
@pytest.mark.parametrize("spec", ["openmined", "openmined:pad=100"])
def test_two_parties_find_what_sets_have_in_common(spec, sets):
    orders, _ = found(spec, *sets)
    assert orders[0] == orders[1]
    assert set(orders[0]) == {b"id %d" % each for each in set(sets[0]) & set(sets[1])}
    assert len(set(orders[0])) == len(orders[0])


@needs_openmined
def test_messages_of_openmined_show_no_id_and_their_size_only_the_padding():
    sizes = set()
    for left in (range(20), range(45)):
        wire = []
        play(
            "openmined:pad=50",
            owns(left, range(50)),
            "shop",
            lambda *sent, to=wire: to.append(sent),
        )
        sizes.add(str([(sender, to, len(payload)) for sender, to, payload in wire]))
        joined = b"".join(payload for _, _, payload in wire)
        assert b"id 1" not in joined
        assert b"id 1".hex().encode() not in joined
    assert len(sizes) == 1


@needs_openmined
@pytest.mark.parametrize("there", [True, False])
def test_a_label_party_that_asks_for_one_id_is_refused_and_learns_nothing(there):
    told, asked = [], [5 if there else 9_999, *range(10_000, 10_100)]
    (bank,) = owns(range(100), bounds=Bounds(50, 10**6, 10))
    lender = Own("lender", [b"id %d" % each for each in asked], ANY)
    with pytest.raises(ConsentError) as caught:
        play("openmined", [bank, lender], "lender", lambda *sent: told.append(sent))
    assert f"{int(there)} ids in common, of 100 of its own" in str(caught.value)
    to_lender = [payload for _, to, payload in told if to == "lender"]
    assert len(to_lender) == 2  # the bank's question, and that it refuses
    assert to_lender[-1] == NO


def test_three_parties_are_refused(monkeypatch):
    monkeypatch.setattr(openmined, "_library", lambda: None)
    with pytest.raises(ConfigError, match="of two parties"):
        play("openmined", owns(range(5), range(5), range(5)), "label")


def test_without_the_other_system_the_cure_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "private_set_intersection.python", None)
    with pytest.raises(MissingPackageError, match="openmined"):
        play("openmined", owns(range(5), range(5)), "shop")
