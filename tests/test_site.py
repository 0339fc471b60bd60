"""The site: its reference comes from the code, its links lead somewhere, its formats are true."""

import io
import posixpath
import re
import struct
import sys
import warnings
import zlib
from collections import deque
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from vfl.attacks import Grant
from vfl.config import Experiment, PartyFile
from vfl.core.errors import codes
from vfl.core.frame import Frame, Kind, pack_header, to_bytes
from vfl.core.traffic import Traffic
from vfl.experiments.notebook import train
from vfl.experiments.scenarios import SCENARIOS
from vfl.models.optimizers import TorchRegistry

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.cli.reference import registries

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Pages of questions, one list entry a question, with links to its answer.
QUESTION_PAGES = ("engineer.md", "operator.md", "researcher.md")
CLICKS = 2
#: More entries under one heading cannot be scanned.
MOST_OF_A_GROUP = 10


@pytest.fixture(scope="module")
def reference():
    sys.path.insert(0, str(DOCS))
    try:
        import reference

        yield reference
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def site(reference):
    """The text of every page of the site by its name, as written and as generated."""
    written = [*DOCS.glob("*.md"), *DOCS.glob("results/*.md")]
    pages = {
        path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in written
    }
    return pages | {f"reference/{name}.md": text for name, text in reference.pages().items()}


def slugs(text):
    """The anchors of a page's headings, as GitHub and the site make them."""
    found, seen = set(), {}
    for line in BLOCK.sub("", text).splitlines():
        if head := re.fullmatch(r"#+ (.*)", line):
            plain = re.sub(r"[^\w\- ]", "", head[1].strip().lower()).replace(" ", "-")
            count = seen[plain] = seen.get(plain, -1) + 1
            found.add(f"{plain}-{count}" if count else plain)
    return found


def navigation(text):
    """The pages that the navigation of a page lists; a pattern stands for the pages it finds."""
    for body in TREE.findall(text):
        for name in re.findall(r"^\w.*", body, re.M):
            found = DOCS.glob(f"{name}.md") if "*" in name else [DOCS / f"{name}.md"]
            yield from sorted(path.relative_to(DOCS).as_posix() for path in found)


def links(text, page):
    """The pages of the site, with anchors, that a page leads to."""
    for target in [*LINK.findall(BLOCK.sub("", text)), *navigation(text)]:
        if "://" not in target:
            name, _, anchor = target.partition("#")
            whole = (
                page
                if not name
                else posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
            )
            yield whole, anchor


def test_every_link_leads_to_a_heading(site):
    broken = [
        f"{page}: {name}#{anchor}"
        for page, text in [*site.items(), ("../README.md", (ROOT / "README.md").read_text())]
        for name, anchor in links(text, page)
        for known in [site.get(name.removeprefix("../docs/"))]
        if anchor and (known is None or anchor not in slugs(known))
    ]
    assert broken == []


def test_every_page_is_in_the_navigation_once(site):
    listed = [*navigation(site["index.md"]), *navigation(site["reference.md"])]
    assert sorted(listed) == sorted(set(site) - {"index.md"})
    captions = re.findall(r":caption: (.*)", site["index.md"])
    assert captions == ["Tutorials", "How to", "Reference", "Explanation", "Results", "中文"]


def clicks_from_index(site):
    """How many links lead from the index to each page and heading, at least."""
    clicks, ahead = {("index.md", ""): 0}, deque([("index.md", "")])
    while ahead:
        here = ahead.popleft()
        for target in links(site[here[0]], here[0]):
            if target[0] in site and target not in clicks:
                clicks[target] = clicks[here] + 1
                ahead.append(target)
    return clicks


@pytest.mark.parametrize("page", QUESTION_PAGES)
def test_questions_of_the_first_week_are_answered_within_two_clicks(site, page):
    clicks = clicks_from_index(site)
    rows = re.findall(r"^- .*(?:\n  .*)*", site[page], re.M)
    groups = re.split(r"^## ", site[page], flags=re.M)[1:]
    assert len(rows) > 10
    assert all(one.count("\n- ") <= MOST_OF_A_GROUP for one in groups)
    for row in rows:
        answers = [*links(row, page)]
        assert answers, row
        for name, anchor in answers:
            assert not anchor or anchor in slugs(site[name]), row
            assert clicks[name, anchor] <= CLICKS, row


def test_every_setting_has_a_type_and_a_meaning(reference):
    shown = reference.settings_page()
    assert set(reference.models_of_files()) == set(reference.FILES)
    for model in reference.models_of_files().values():
        for path, table in reference.tables_of(model):
            for name, kind, default, meaning in reference.rows_of(table):
                assert kind, f"{path}.{name}"
                assert default, f"{path}.{name}"
                assert meaning, f"{path}.{name} has no meaning in {table.__name__}'s docstring"
                assert f"| {name} | {kind} | {default} | {meaning} |" in shown
    paths = {path for path, _ in reference.tables_of(Experiment)}
    assert {"data", "parties.NAME", "label", "train", "federation", "trace"} <= paths
    assert {"data", "consent", "node"} <= {path for path, _ in reference.tables_of(PartyFile)}


def test_every_command_code_and_plugin_is_in_the_reference(site, reference):
    heads = {name: re.findall(r"^#+ (.*)", text, re.M) for name, text in site.items()}
    names = [name for name, _ in reference.commands()]
    assert {"vfl train", "vfl llm demo", "vfl list"} <= set(names)
    assert set(names) <= set(heads["reference/commands.md"])
    told = " ".join(heads["reference/errors.md"])
    assert [code for code in codes() if f"{code}: " not in told] == []
    for family, registry in registries().items():
        assert set(registry.names()) <= set(heads["reference/plugins.md"]), family


def test_every_option_of_a_plugin_has_a_meaning(reference):
    missing = [
        f"{name}:{option}"
        for registry in registries().values()
        if not isinstance(registry, TorchRegistry)
        for name in registry.names()
        for option in registry.options(name)
        if not reference.meanings_of(registry.member(name)).get(option)
    ]
    assert missing == []
    kept = reference.meanings_of(registries()["codecs"].member("topk"))
    assert kept["k"] == "number of values to send per row."  # of the class above


def test_every_attacker_of_a_grid_is_in_the_reference(site, reference):
    text = site["reference/plugins.md"]
    for goals, grants, who, reads in reference.attackers():
        assert grants
        assert who
        assert reads
        assert f"| {goals} | {grants} | {who} | {reads} |" in text
    assert len(list(reference.attackers())) == len(SCENARIOS)
    assert all(f"`{grant.name}`" in text for grant in Grant)
    assert all(
        f"`{name}" in site["attacking.md"] for name in ("averaging", "pooled", "subtraction")
    )


@pytest.fixture(scope="module")
def formats(reference):
    return reference.formats_page()


def table_below(formats, heading):
    """The rows of the first table below a heading of the page on formats."""
    text = formats.partition(f"\n## {heading}\n")[2]
    table = re.search(r"(^\|.*\n)+", text, re.M)[0].splitlines()
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in table[2:]]


#: How types of the page are read without vfl.
STRUCT = {"u8": "B", "u16": "H", "u32": "I"}


@pytest.mark.parametrize("payload", [b"", b"\x00\x80\x3f" * 7])
@pytest.mark.parametrize("checked", [True, False])
def test_a_frame_is_read_by_the_page_alone(formats, payload, checked):
    """As a reader in another language would: the page's table, `struct` and nothing of ours."""
    frame = Frame(Kind.GRAD, 70_001, payload, 513)
    raw = to_bytes(frame) if checked else pack_header(frame, payload_checked=False) + payload
    found = {}
    for offset, size, kind, field, _ in table_below(formats, "The frame"):
        assert struct.calcsize(f"<{STRUCT[kind]}") == int(size)
        (found[field],) = struct.unpack_from(f"<{STRUCT[kind]}", raw, int(offset))
    assert len(raw) == 16 + found["body_bytes"]
    assert found["version"] == 0x51
    assert (found["peer"], found["step"]) == (513, 70_001)
    covered = raw[:12] + (raw[16:] if checked else b"")
    assert found["crc32"] == zlib.crc32(covered)
    kinds = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", formats, re.M))
    assert kinds == {str(int(kind)): kind.name for kind in Kind}
    assert kinds[str(found["kind"])] == "GRAD"


def test_the_arrays_of_a_trace_are_those_of_the_page(formats):
    from vfl.session.schedule import Exchange
    from vfl.session.trace.store import SentFrame, pack

    text = formats.partition("Arrays in the file `frames-N")[2]
    told = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.M))
    rows = np.array([4, 2])
    exchange = Exchange(3, "train", 1, rows, last=True)
    known, _ = pack([SentFrame(exchange, "bank", Kind.CUT, True, b"1234")])
    kinds = {"int64": "int64", "uint8": "u8", "bool": "bool"}
    with np.load(io.BytesIO(known), allow_pickle=False) as file:
        assert {name: kinds.get(str(file[name].dtype), "text") for name in file.files} == told


def test_the_files_of_a_run_are_those_of_the_page(formats, tmp_path):
    told = {row[0]: row[2] for row in table_below(formats, "The run folder")}
    columns = re.findall(r"\w+", told["traffic.csv"].partition(":")[2])
    assert columns == [one.name for one in fields(Traffic)]
    example = ROOT / "examples" / "breast_cancer.toml"
    run = train(example, "train.epochs=1", runs=tmp_path, progress=False)
    made = {path.name for path in run.path.iterdir()} - {"parties"}
    assert {"run.json", "config.toml", "traffic.csv", "summary.json"} <= made <= set(told)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    if find_spec("sphinx") is None or find_spec("furo") is None or find_spec("myst_parser") is None:
        pytest.skip("the site needs vfl[docs]")
    import subprocess

    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    fetched = re.compile(r"<(?:script|img|iframe|source)[^>]*src=\"(?:https?:)?//")
    linked = re.compile(r"<link[^>]*href=\"(?:https?:)?//")
    sheets = re.compile(r"url\(['\"]?(?:https?:)?//|@import")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not fetched.search(text), page.name
        assert not linked.search(text), page.name
    for sheet in (tmp_path / "site" / "_static").rglob("*.css"):
        assert not sheets.search(sheet.read_text(encoding="utf-8")), sheet.name
