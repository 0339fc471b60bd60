"""Text of others on one line, and cells that no spreadsheet computes."""

import csv
import io
import unicodedata
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfl.core.errors import ConsentError, ProtocolError, VFLError, read_record
from vfl.core.text import as_written, csv_text, formula_free, printable, printable_lines

HOSTILE = {
    "colours": ("a\x1b[31mb", "a?[31mb"),
    "title": ("\x1b]0;gone\x07x", "?]0;gone?x"),
    "eight-bit control sequence": ("\x9b2Jx", "?2Jx"),
    "carriage return": ("all well\rfailed", "all well failed"),
    "lines": ("a\nb\r\nc\u2028d\u2029e\x85f\vg\fh", "a b  c d e f g h"),
    "right to left": ("\u202egnp.exe", "?gnp.exe"),
    "isolates": ("a\u2066b\u2069", "a?b?"),
    "zero width": ("ba\u200bnk\u200d\ufeff", "ba?nk??"),
    "invisible letters": ("bank\u3164\u115f\u2800", "bank???"),
    "variation selectors": ("a\ufe0f\U000e0101", "a??"),
    "tags": ("a\U000e0041", "a?"),
    "surrogate": ("a\ud800", "a?"),
    "piled up": ("a" + "\u0301" * 6, "a" + "\u0301" * 3 + "???"),
    "spaces": ("a\xa0b\u3000c", "a b c"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_steers_or_hides_is_replaced(name):
    text, shown = HOSTILE[name]
    assert printable(text) == shown
    assert printable_lines(text).replace("\n", " ") == shown


@pytest.mark.parametrize("text", ["", "bank", "Zürich 銀行 बैंक", "a  b", "0,5 ± 2 %", "😀"])
def test_ordinary_text_stays(text):
    assert printable(text) == text


ANYTHING = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\n\r\t\u202e\u200b\u2028\u0301\u3164\ud800 ab")
)


@given(ANYTHING, st.integers(3, 40))
def test_one_short_visible_line_whatever_comes(text, limit):
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert shown.splitlines() in ([], [shown])
    assert not {unicodedata.category(one) for one in shown} & {"Cc", "Cf", "Cs", "Co", "Cn"}
    shown.encode()  # no lone surrogates
    assert printable(shown, limit) == shown


@given(ANYTHING)
def test_no_error_shows_more_than_its_own_lines(text):
    error = ConsentError("refused", where=text, got=text, want=text, fix=text)
    for told in (str(error), *filter(None, error.record().values())):
        categories = {unicodedata.category(one) for one in told if one != "\n"}
        assert not categories & {"Cc", "Cf", "Cs", "Co", "Cn"}


def test_ten_megabytes_become_a_line():
    assert len(printable("x\n" * 5_000_000)) == 2000


@given(st.dictionaries(st.sampled_from(["code", "what", "got", "exit"]), st.none() | ANYTHING))
def test_a_record_is_read_or_refused(record):
    with suppress(ProtocolError):
        told = read_record(record, "the reply of party 'bank'")
        assert {"code", "what"} <= set(told) <= {"code", "what", "where", "got", "want", "fix"}


@pytest.mark.parametrize("error", [VFLError("no"), ConsentError("no", got="a", fix="b")])
def test_a_record_that_was_told_is_read(error):
    set_ = {key: text for key, text in error.record().items() if text is not None}
    assert read_record(error.record(), "there") == set_


FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "'=1", '"=1', "\t1"]
FORMULAS += ["' =1", "\ufeff=1", "\uff1d1", "=HYPERLINK(1)", "--1", "+", "-", "-5;x", "+49 170"]
PLAIN = ["", "1", "-5", "+5", "-1.5e-3", "-.5", "007", "r001", "o'neill", "'t is", "a=b", "Ann-Lee"]


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_cell_cannot_become_a_formula(cell):
    assert formula_free(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", PLAIN)
def test_an_ordinary_cell_stays_byte_for_byte(cell):
    assert formula_free(cell) == cell == as_written(cell)


@given(st.text(st.characters() | st.sampled_from("'\"=+-@\t\r\n 15.e\ufeff\uff1d")))
def test_what_was_changed_comes_back(cell):
    safe = formula_free(cell)
    assert as_written(safe) == cell
    assert safe[:1] not in tuple("=+-@\t\r") or float(safe) == float(cell)


def test_a_table_of_hostile_names_and_cells():
    told = csv_text(["=head", "n"], [{"=head": "=cmd", "n": -5}, {"n": 1.5}, {"=head": 'a,"b"'}])
    assert list(csv.reader(io.StringIO(told))) == [
        ["'=head", "n"],
        ["'=cmd", "-5"],
        ["", "1.5"],
        ['a,"b"', ""],
    ]
