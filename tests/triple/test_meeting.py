"""What the parties compare before they begin: terms, rows, versions; and who learns of rows."""

import numpy as np
import pytest
import torch

from vfl.core.errors import BadOptionError, DisagreementError, MisalignedError, ProtocolError
from vfl.datasets import PartyData, Split
from vfl.datasets.party import digest_of
from vfl.mpc.rules import Rules
from vfl.mpc.trio import Trio
from vfl.triple.meeting import meet
from vfl.triple.plan import Facts, Plan, Terms


def data_of(role, terms, rows=20, ids=None, train=16):
    """The rows of a party; P0 has 3 columns and P1 2."""
    if role == 2 and terms.label_role != 2:
        return None
    labels = torch.arange(rows) % 2 if role == terms.label_role else None
    order = np.arange(rows)
    return PartyData(
        name=terms.parties[role],
        inputs=torch.zeros(rows, 3 - role) if role < 2 else None,
        labels=labels,
        classes=None if labels is None else ("no", "yes"),
        split=Split(order[:train], order[:0], order[train:]),
        ids_digest=digest_of(order if ids is None else ids),
    )


def meeting(terms, data=data_of):
    """The plans of three parties, each with its own terms."""
    with Trio(Rules("fast"), timeout_s=5, agreed=False) as trio:
        return trio.run(lambda party: meet(party, *given(party.role, terms, data)))


def given(role, terms, data):
    own = terms if isinstance(terms, Terms) else terms[role]
    return own, data(role, own)


@pytest.mark.parametrize("label", ["lender", "shop"])
def test_all_three_come_to_one_plan(experiment, label):
    terms = Terms.of(experiment(label=label, batch_rows=8), Rules("fast"), (4,))
    plans = meeting(terms)
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0].columns, plans[0].widths) == ((3, 2), (5, 4, 1))
    assert (plans[0].train_rows, plans[0].test_rows, plans[0].classes) == (16, 4, 2)
    assert len(plans[0].training) == 64
    assert meeting(terms)[0].training != plans[0].training


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.25),
        ("least_permuted", 64),
        ("flips", False),
        ("hidden", (5,)),
        ("test_every_epoch", True),
    ],
)
def test_another_setting_is_named_with_both_values(experiment, odd, field, value):
    terms = Terms.of(experiment(batch_rows=8), Rules("fast"), (4,))
    other = terms.model_copy(update={field: value})
    with pytest.raises(DisagreementError, match="other settings") as caught:
        meeting([other if role == odd else terms for role in range(3)])
    assert caught.value.where == field
    assert {caught.value.got, caught.value.want} == {str(value), str(getattr(terms, field))}


def test_another_training_is_named(experiment):
    terms = Terms.of(experiment(batch_rows=8), Rules("fast"))
    asked = [terms.model_copy(update={"task": "infer", "training": digit * 64}) for digit in "001"]
    with pytest.raises(DisagreementError, match="another training's network") as caught:
        meeting(asked)
    assert {caught.value.got[9:13], caught.value.want[9:13]} == {"0000", "1111"}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "train", "shift", "told"),
    [(21, 16, 0, "other rows"), (20, 15, 0, "other rows"), (20, 16, 1, "different ids|hold")],
)
def test_other_rows(experiment, odd, rows, train, shift, told):
    terms = Terms.of(experiment(batch_rows=8), Rules("fast"))

    def data(role, own):
        if role != odd:
            return data_of(role, own)
        return data_of(role, own, rows, np.arange(rows) + shift, train)

    with pytest.raises(MisalignedError, match=told):
        meeting(terms, data)


def test_a_helper_is_told_of_no_ids(experiment):
    """Only numbers of rows and columns: with a digest it could confirm a guess of all ids."""
    terms = Terms.of(experiment(label="bank", batch_rows=8), Rules("fast"))
    with Trio(Rules("fast"), timeout_s=5, agreed=False) as trio:
        heard = []
        for channel in trio.parties[2].channels.values():
            receive = channel.receive_bytes

            def hear(*arguments, receive=receive):
                heard.append(bytes(receive(*arguments)))
                return memoryview(heard[-1])

            channel.receive_bytes = hear
        trio.run(lambda party: meet(party, *given(party.role, terms, data_of)))
    facts = [Facts.model_validate_json(each) for each in heard[:2]]
    assert {each.columns for each in facts} == {3, 2}
    assert [len(each) for each in heard[2:]] == [64, 64]  # keys and the digest of the plan


def test_a_batch_that_is_too_large(experiment):
    with pytest.raises(BadOptionError, match="batch"):
        meeting(Terms.of(experiment(batch_rows=17), Rules("fast")))


@pytest.mark.parametrize("said", [b"{}", b"no json", b'{"version": 3}'])
def test_who_introduces_itself_in_another_form(experiment, said):
    terms = Terms.of(experiment(batch_rows=8), Rules("fast"))

    def program(party):
        if party.role != 1:
            return meet(party, *given(party.role, terms, data_of))
        for channel in party.channels.values():
            channel.send_bytes(said, 0, "setup")

    with (
        Trio(Rules("fast"), timeout_s=5, agreed=False) as trio,
        pytest.raises(ProtocolError, match="P1 introduced itself"),
    ):
        trio.run(program)


@pytest.mark.parametrize("mode", ["thesis", "fast"])
@pytest.mark.parametrize("label", ["lender", "bank"])
@pytest.mark.parametrize("hidden", [(), (4,), (4, 4)])
@pytest.mark.parametrize(
    ("liar", "said"), [("shop", "columns"), ("bank", "columns"), ("label", "classes")]
)
def test_sizes_that_nobody_could_have_are_refused_before_room_is_made(
    experiment, mode, label, hidden, liar, said
):
    rules = Rules(mode)
    terms = Terms.of(experiment(label=label, batch_rows=8), rules, hidden)
    odd = terms.label_role if liar == "label" else terms.parties.index(liar)
    facts = [
        Facts.of(terms, data_of(role, terms), str(role) * 64).model_copy(
            update={said: 2**39} if role == odd else {}
        )
        for role in range(3)
    ]
    with pytest.raises(ProtocolError, match=f"{2**39} {said} of P{odd}") as caught:
        Plan.of_facts(facts)
    assert caught.value.where == f"layer {len(hidden) if said == 'classes' else 0}"


def test_honest_parties_end_typed_where_one_lies_about_its_size(experiment):
    terms = Terms.of(experiment(batch_rows=8), Rules("fast"), (4,))
    found = {}

    def program(party):
        if party.role == 1:
            said = Facts.of(terms, data_of(1, terms), "0" * 64)
            lie = said.model_copy(update={"columns": 2**39}).model_dump_json().encode()
            for channel in party.channels.values():
                channel.send_bytes(lie, 0, "setup")
                channel.receive_bytes(0, 2, 1 << 14)
            return
        try:
            meet(party, *given(party.role, terms, data_of))
        except ProtocolError as error:
            found[party.role] = error.what

    with Trio(Rules("fast"), timeout_s=5, agreed=False) as trio:
        trio.run(program)
    assert set(found) == {0, 2}
    assert all("columns of P1" in what for what in found.values())


def test_another_version(experiment):
    terms = Terms.of(experiment(batch_rows=8), Rules("fast"))

    def program(party):
        if party.role != 1:
            return meet(party, *given(party.role, terms, data_of))
        said = Facts.of(terms, None, "0" * 64).model_copy(update={"version": "9.1.0"})
        for channel in party.channels.values():
            channel.send_bytes(said.model_dump_json().encode(), 0, "setup")

    with (
        Trio(Rules("fast"), timeout_s=5, agreed=False) as trio,
        pytest.raises(DisagreementError, match="P1 runs another version"),
    ):
        trio.run(program)
