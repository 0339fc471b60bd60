"""Files without some rows: nothing else in them changes. Places that leave an alignment."""

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from vfl.config import PartyFile, read_party_file
from vfl.core.errors import DataError, MisalignedError, MissingDataError, UserError
from vfl.core.frame import HANDSHAKE_LIMIT_BYTES
from vfl.datasets.alignment.positions import Agreed, Alignment
from vfl.models.features import features_folder
from vfl.models.pretrained import ENVIRONMENT
from vfl.session import SessionMessage
from vfl.session.handshake import MESSAGE_LIMIT_BYTES, MOST_TOLD, Introduction, Withdrawn
from vfl.session.store.erasure import forget, read_list

AGREED = Agreed("alignment", ("bank", "lender"), "plain", "ecdh")
KEY = "ab" * 32


def alignment_of(positions, complete=None, held=None, key=KEY, ids=100):
    positions = np.array(positions, dtype=np.int64)
    more = (complete, {} if held is None else {n: np.array(h) for n, h in held.items()})
    return Alignment("bank", AGREED, 1, key, "cd" * 32, ids, positions, *more)


@pytest.fixture
def party(tmp_path):
    def make(source="bank.csv", **data):
        lines = "".join(f"{name} = {value!r}\n" for name, value in data.items())
        text = f'party = "bank"\n[data]\nsource = "{source}"\nid = "key"\n{lines}'
        (tmp_path / "party.toml").write_text(text)
        return read_party_file(tmp_path / "party.toml")

    return make


CSV = 'key,note\r\na,"two\r\nlines"\r\n\r\nb,"say ""b"""\r\nc,plain\r\nd,"a"'


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("a", 'key,note\r\n\r\nb,"say ""b"""\r\nc,plain\r\nd,"a"'),
        ("b", 'key,note\r\na,"two\r\nlines"\r\n\r\nc,plain\r\nd,"a"'),
        ("d", 'key,note\r\na,"two\r\nlines"\r\n\r\nb,"say ""b"""\r\nc,plain\r\n'),
        ("nobody", CSV),
    ],
)
def test_all_other_bytes_of_a_csv_stay(party, tmp_path, gone, left):
    (tmp_path / "bank.csv").write_bytes(CSV.encode())
    (tmp_path / "bank.csv").chmod(0o640)
    done = forget(party(), [gone], rewrite=True)
    assert (tmp_path / "bank.csv").read_bytes() == left.encode()
    assert (tmp_path / "bank.csv").stat().st_mode & 0o777 == 0o640
    assert done.found == (gone != "nobody")


def test_another_separator_and_encoding(party, tmp_path):
    (tmp_path / "bank.csv").write_text("key;note\nä;1,5\nb;2\n", encoding="latin-1")
    forget(party(separator=";", encoding="latin-1", decimal=","), ["ä"], rewrite=True)
    assert (tmp_path / "bank.csv").read_text(encoding="latin-1") == "key;note\nb;2\n"


def test_a_parquet_file_keeps_its_groups_types_and_other_rows(party, tmp_path):
    frame = pd.DataFrame({"key": [f"k{n}" for n in range(10)], "x": np.arange(10, dtype="int16")})
    frame.to_parquet(tmp_path / "bank.parquet", row_group_size=4, index=False)
    schema = pq.read_schema(tmp_path / "bank.parquet")
    forget(party("bank.parquet"), ["k0", "k5"], rewrite=True)
    left = pd.read_parquet(tmp_path / "bank.parquet")
    pd.testing.assert_frame_equal(left, frame.drop([0, 5]).reset_index(drop=True))
    assert pq.read_schema(tmp_path / "bank.parquet").equals(schema)


def test_a_database_is_left_to_its_owner(party, tmp_path):
    import duckdb

    with duckdb.connect(str(tmp_path / "bank.db")) as base:
        base.execute("CREATE TABLE rows AS SELECT 'k' || range AS key FROM range(5)")
    file = party("duckdb:bank.db", query="SELECT * FROM rows")
    with pytest.raises(UserError, match="cannot change this kind of table"):
        forget(file, ["k1"], rewrite=True)
    assert forget(file, ["k1"]).in_table == 1


def test_no_id_is_shown(party, tmp_path):
    (tmp_path / "bank.csv").write_text("key,x\nsecret-id,1\nother,2\n")
    done = forget(party(), ["secret-id", "not-there"])
    assert (done.asked, done.found) == (2, 1)
    assert "secret-id" not in f"{done} {done.remains()}"


def test_features_cached_on_disk_are_named_as_what_remains(party, tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "models"))
    (tmp_path / "bank.csv").write_text("key,x\na,1\n")
    assert "keep=disk" not in " ".join(forget(party(), ["a"]).remains())
    features_folder().mkdir(parents=True)
    assert str(features_folder()) in " ".join(forget(party(), ["a"]).remains())


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00a"])
def test_a_list_that_names_nobody_is_refused(tmp_path, content):
    (tmp_path / "ids.txt").write_bytes(content)
    with pytest.raises(DataError):
        read_list(tmp_path / "ids.txt")
    with pytest.raises(MissingDataError):
        read_list(tmp_path / "no.txt")


def test_a_list_has_an_id_a_line(tmp_path):
    (tmp_path / "ids.txt").write_text("\ufeffa\n b \n\na\nlast\tborn\n", encoding="utf-8")
    assert read_list(tmp_path / "ids.txt") == ["a", "b", "last\x1fborn"]


# --- places ---------------------------------------------------------------------------------------


def test_places_leave_in_whatever_order_they_are_named():
    whole = alignment_of([5, 3, -1, 7, 1])
    one = whole.without([1]).without([3])
    assert one.positions.tolist() == whole.without([3, 1]).positions.tolist() == [5, -1, 1]
    assert one.withdrawn == whole.without([1, 3]).withdrawn == (1, 3)
    assert one.digest == whole.without([3, 1]).digest != whole.digest
    assert one.without([1]).digest == one.digest


def test_places_count_as_they_were_aligned():
    whole = alignment_of([5, 3, 9, 7, 1])
    shorter = whole.without([0])
    assert shorter.places_of(np.array([7, 1])) == [3, 4]
    assert shorter.without(shorter.places_of(np.array([7]))).positions.tolist() == [3, 9, 1]


def test_those_that_everybody_has_come_first_afterwards_too():
    held = {"bank": [True, True, True, False], "shop": [True, True, False, True]}
    left = alignment_of([4, 2, 6, -1], 2, held).without([0, 2])
    assert (left.complete, left.positions.tolist()) == (1, [2, -1])
    assert {name: each.tolist() for name, each in left.held.items()} == {
        "bank": [True, False],
        "shop": [True, True],
    }


@pytest.mark.parametrize("held", [None, {"bank": [True, True, True]}])
def test_what_left_is_kept(tmp_path, held):
    left = alignment_of([4, 2, 6, 0], None if held is None else 4, held and {
        "bank": [True] * 4}).without([1])  # fmt: skip
    left.keep(tmp_path)
    read = Alignment.newest(tmp_path, "bank")
    assert (read.withdrawn, read.positions.tolist(), read.digest) == ((1,), [4, 6, 0], left.digest)
    assert {name: each.tolist() for name, each in read.held.items()} == (held or {})


def test_positions_of_a_shorter_table():
    shorter = alignment_of([5, 3, -1, 7], ids=8).without([0])
    moved = shorter.of_shorter_table(np.array([2, 5]), "ef" * 32)
    assert (moved.positions.tolist(), moved.ids, moved.table) == ([2, -1, 5], 6, "ef" * 32)


@pytest.mark.parametrize("place", [-1, 4, 2**31])
def test_a_place_that_nobody_has_is_refused(place):
    with pytest.raises(MisalignedError, match="does not have"):
        alignment_of([5, 3, 2, 7]).without([place])


def test_places_of_another_alignment_mean_nothing():
    mine, theirs = alignment_of([1, 2, 3]), alignment_of([1, 2, 3], key="ef" * 32).without([0])
    told = Withdrawn.of(theirs, "s" * 32)
    assert told.beyond(mine, "s" * 32) == []
    assert told.beyond(theirs.without([]), "s" * 32) == []
    assert told.beyond(alignment_of([1, 2, 3], key="ef" * 32), "s" * 32) == [0]
    assert told.beyond(alignment_of([1, 2, 3], key="ef" * 32), "t" * 32) == [], "another session"
    assert Withdrawn.of(None, "s") is None
    assert Withdrawn.of(mine, "s") is None


def test_the_largest_messages_fit(terms, data):
    whole = alignment_of(np.arange(2**13), ids=2**13)
    told = Withdrawn.of(whole.without(range(MOST_TOLD)), "s" * 32)
    largest = told.model_copy(update={"places": (2**32 - 1,) * MOST_TOLD})
    message = SessionMessage(
        session="a" * 32, token="t" * 43, node="n" * 20, host="127.0.0.1", port=1, rows=1,
        ca_pem="-----BEGIN CERTIFICATE-----\n" + "A" * 4000, idle_timeout_s=1, rejoin_window_s=1,
        withdrawn=largest, terms=terms,
    )  # fmt: skip
    assert len(message.model_dump_json()) < MESSAGE_LIMIT_BYTES
    said = Introduction.of(data["bank"], terms, "a" * 32, withdrawn=largest)
    assert len(said.model_dump_json()) < HANDSHAKE_LIMIT_BYTES - 512
    with pytest.raises(MisalignedError, match="more than 4096 rows"):
        Withdrawn.of(whole.without(range(MOST_TOLD + 1)), "s" * 32)
    with pytest.raises(ValidationError):
        Withdrawn(order="a" * 64, places=(0,) * (MOST_TOLD + 1))


def test_a_file_without_a_folder_has_no_digest():
    assert PartyFile(party="bank", role="dealer").sha256 == ""
