"""A dictionary of all possible ids, put into private alignments in place of a party's own ids."""

import warnings
from collections import deque

import pytest
from promise import BrokenPromiseError
from stand_in_flower import Envelope, Flower

from vfl.config import Consent, Experiment, read_party_file
from vfl.core.errors import ConsentError, VFLError
from vfl.datasets.alignment import ristretto
from vfl.session.alignment import OwnAlignment
from vfl.session.terms import AlignTerms

with warnings.catch_warnings():  # importing Flower uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.server.session import run_session

pytestmark = pytest.mark.skipif(not ristretto.available(), reason="libsodium is not installed")

#: What the attacker's own file says; earlier versions have no such setting, and need none.
WIDE = "max_id_ratio = 1000" if "max_id_ratio" in Consent.model_fields else ""


def dictionary(possible, own):
    """Every possible id, and every id of a table, which has `own` of them."""
    ids = [f"{10**6 + number}" for number in range(possible)]
    return ids, ids[:: possible // own]


def party(folder, name, ids, consent=""):
    """A party whose own file says nothing of alignments, beside what `consent` says."""
    own = folder / name
    own.mkdir(parents=True)
    label = 'label = "y"' if name == "lender" else ""
    rows = [f"{each},1,0" for each in ids]
    (own / "table.csv").write_text("\n".join(["id,x,y", *rows]) + "\n")
    text = f'party = "{name}"\n[data]\nsource = "table.csv"\nid = "id"\n{label}\n'
    (own / "party.toml").write_text(f"{text}[consent]\n{consent}\n")
    return read_party_file(own / "party.toml")


def experiment(protocol="ecdh", name="alignment"):
    """What the label party asks for."""
    content = {
        "parties": {"bank": {}},
        "label": {"party": "lender"},
        "align": {"protocol": protocol},
        "data": {"alignment": name},
    }
    return Experiment.model_validate(content)


def align(bank, lender, **how):
    """Play a session's two roles in this process; how many ids each learns to be common."""
    terms = AlignTerms.asked(experiment(**how), "run")
    players = {one.party: OwnAlignment(one, terms).player for one in (bank, lender)}
    waiting = deque(players)
    while any(player.found is None for player in players.values()):
        me = waiting.popleft()
        waiting.append(me)
        for sent in players[me].advance():
            players[sent.to].give(me, sent.payload)
    return {name: len(player.found.positions) for name, player in players.items()}


def attack(bank, lender, attacker, **how):
    """How many ids of the other's the attacker learns to be common; 0 where that one refuses."""
    try:
        return align(bank, lender, **how)[attacker]
    except ConsentError:
        return 0


@pytest.mark.parametrize("protocol", ["ecdh", "ecdh:pad=6000"])
@pytest.mark.parametrize("attacker", ["bank", "lender"])
def test_a_dictionary_is_refused(tmp_path, attacker, protocol):
    """Nobody learns a table's ids by asking about all possible ones in its place."""
    possible, ids = dictionary(6000, own=150)
    parties = {
        name: party(tmp_path, name, *((possible, WIDE) if name == attacker else (ids, "")))
        for name in ("bank", "lender")
    }
    if count := attack(**parties, attacker=attacker, protocol=protocol):
        raise BrokenPromiseError(
            f"{len(possible)} possible ids told the {attacker} {count} of the {len(ids)} ids of a "
            "party whose file says nothing"
        )


def test_parts_of_a_dictionary_are_counted_together(tmp_path):
    """A day's alignments ask about no more ids under several names than under one."""
    possible, ids = dictionary(9000, own=300)
    bank, found, asked = party(tmp_path, "bank", ids), 0, 0
    for part in range(3):
        lender = party(tmp_path / f"{part}", "lender", possible[3000 * part :][:3000], WIDE)
        if count := attack(bank, lender, "lender", name=f"name-{part}"):
            found, asked = found + count, asked + 3000
    if asked > 20 * len(ids):
        raise BrokenPromiseError(
            f"{asked} possible ids under 3 names told {found} of a bank's {len(ids)} ids in a day"
        )


def test_alignments_of_a_day_are_counted_under_all_names(tmp_path):
    """A party takes part in no more alignments a day under several names than under one."""
    _, ids = dictionary(150, own=150)
    bank = party(tmp_path, "bank", ids)
    lender = party(tmp_path, "lender", ids, f"max_alignments = 100\n{WIDE}")
    done = sum(attack(bank, lender, "lender", name=f"name-{each}") > 0 for each in range(12))
    if done > 10:
        raise BrokenPromiseError(f"{done} alignments in a day, and a file that says nothing has 10")


def test_a_label_party_that_refuses_tells_no_count(tmp_path, monkeypatch):
    """Who is refused an alignment hears no count of ids."""
    monkeypatch.setattr("vfl.server.federation.Message", Envelope)
    _, ids = dictionary(200, own=200)
    flower = Flower(["bank"], tells=True)
    flower.files["bank"] = party(tmp_path, "bank", ids[:150])
    lender, asked = party(tmp_path, "lender", ids[:170], "min_common = 160"), experiment()
    with pytest.raises(VFLError, match="does not consent"):
        run_session(flower, asked, lender, AlignTerms.asked(asked, "run"))
    for thread in flower.threads:
        thread.join(timeout=60)
    (heard,) = flower.failures
    if "150" in str(heard) or "170" in str(heard):
        raise BrokenPromiseError(
            f"a bank whose alignment is refused hears: {heard.record()['got']}"
        )
