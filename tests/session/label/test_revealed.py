"""The card's secure part: what a run says of who learned what, recounted from its frames."""

import pytest
from shared_layers import DEALER, LABEL, experiment

from vfl.core.frame import Kind
from vfl.datasets import Dealing, load_bundled
from vfl.session.label.summary import summarise
from vfl.session.trace import Trace
from vfl.training.local import LocalSession

WIDTH = 12
#: A trained exchange's and a query's kind, by phase of the card.
KINDS = {"train": Kind.CUT, "evaluate": Kind.QUERY}


def ran(secure, parties, mode="train", weights=None, **changes):
    data = load_bundled("digits", parties, LABEL, Dealing(0, limit=300))
    asked = experiment(secure, parties, WIDTH, **changes)
    trace = Trace(Kind)
    session = LocalSession(asked, data, outputs=10, mode=mode, weights=weights, observers=[trace])
    return session.run(), trace


def card(session):
    return summarise(session.label, session.weights_digest(), "run")


def by_phase(told, observer, what, of):
    """Times and values of a line of the card, by phase."""
    return {
        one["phase"]: (one["times"], one["values"])
        for one in told["revealed"]
        if (one["observer"], one["what"], one["of"]) == (observer, what, of)
    }


def counted(trace, party, word_bytes):
    """The same of a party's own frames, from what they held."""
    sizes = {
        phase: [len(one.payload) for one in trace if (one.party, one.kind) == (party, kind)]
        for phase, kind in KINDS.items()
    }
    return {phase: (len(each), sum(each) // word_bytes) for phase, each in sizes.items()}


@pytest.mark.parametrize(
    ("secure", "word_bytes", "what"),
    [
        ("sum", 4, "sum of the cuts"),
        ("sum:bits=8", 1, "sum of the cuts"),
        ("beaver", 8, "sum of the outputs of the first layers"),
        (f"beaver:dealer={DEALER}", 8, "sum of the outputs of the first layers"),
    ],
)
def test_the_label_party_is_told_of_the_sum_and_how_much_of_it(secure, word_bytes, what):
    session, trace = ran(secure, ("bank", "shop"))
    told = card(session)
    assert told["secure"] == secure
    assert told["trust"].startswith(f"{LABEL} learns the sum alone")
    assert by_phase(told, LABEL, what, "all") == counted(trace, "bank", word_bytes)
    of_cuts = [one for one in told["revealed"] if one["what"].startswith("cut")]
    assert not of_cuts


def test_every_cut_is_listed_where_none_is_hidden():
    session, trace = ran("none", ("bank", "shop"))
    told = card(session)
    assert told["trust"] == f"{LABEL} sees every cut"
    for name in ("bank", "shop"):
        assert by_phase(told, LABEL, "cut", name) == counted(trace, name, 4)
        gradients = [one for one in trace if (one.party, one.kind) == (name, Kind.GRAD)]
        values = sum(len(one.payload) for one in gradients) // 4
        told_of = by_phase(told, name, "gradient of its cut", LABEL)
        assert told_of == {"train": (len(gradients), values)}


def test_gradients_are_told_under_sum_and_not_under_shares():
    found = {
        secure: {one["observer"] for one in card(ran(secure, ("bank", "shop"))[0])["revealed"]
                 if one["what"] == "gradient of the sum"}
        for secure in ("sum", "beaver")
    }  # fmt: skip
    assert found == {"sum": {"bank", "shop"}, "beaver": set()}


def test_sizes_are_told_to_who_holds_shares_and_to_who_deals():
    def observers(secure, parties):
        told = card(ran(secure, parties)[0])["revealed"]
        return {(one["observer"], one["of"]) for one in told if one["phase"] == "setup"}

    both = {(LABEL, "bank"), (LABEL, "shop")}
    assert observers("beaver", ("bank", "shop")) == both | {("shop", "bank"), ("bank", "shop")}
    dealt = observers(f"beaver:dealer={DEALER}", ("bank",))
    assert dealt == {(LABEL, "bank"), (DEALER, "bank")}


def test_a_third_party_learns_how_many_rows_exchanges_have():
    session, trace = ran(f"beaver:dealer={DEALER}", ("bank",))
    asked = {phase: times for phase, (times, _) in counted(trace, "bank", 8).items()}
    told = by_phase(card(session), DEALER, "rows of an exchange", "all")
    assert told == {phase: (times, times) for phase, times in asked.items()}
    assert by_phase(card(session), LABEL, "outputs of the first layers", "bank")


def test_an_evaluation_has_a_card_of_its_own():
    trained, _ = ran("sum", ("bank", "shop"))
    asked, trace = ran("sum", ("bank", "shop"), "evaluate", trained.weights())
    (line,) = card(asked)["revealed"]
    assert (line["observer"], line["phase"]) == (LABEL, "evaluate")
    assert (line["times"], line["values"]) == counted(trace, "bank", 4)["evaluate"]
