import json

from vfl.core.errors import codes, page_of, title_of


def test_the_page_of_a_code(vfl):
    done = vfl("explain", "V402")
    assert (done.code, done.out, done.err) == (0, page_of("V402"), "")
    told = json.loads(vfl("explain", "v402", "--json").out)
    assert told == {"code": "V402", "title": title_of("V402"), "page": page_of("V402")}


def test_all_codes(vfl):
    lines = vfl("explain", "--list").out.splitlines()
    assert lines == [f"{code}  {title_of(code)}" for code in codes()]
    assert vfl("explain").out.splitlines() == lines
    assert json.loads(vfl("explain", "--list", "--json").out) == {c: title_of(c) for c in codes()}


def test_a_code_that_is_none(vfl):
    done = vfl("explain", "VV402")
    assert (done.code, done.out) == (2, "")
    assert "did you mean 'V402'?" in done.err
    assert "vfl explain --list" in vfl("explain", "zzz").err
