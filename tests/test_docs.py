"""The documentation says what is true: its code runs, its files exist, its commands are there."""

import csv
import doctest
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from functools import cache
from importlib import import_module
from itertools import chain, takewhile
from pathlib import Path
from threading import Thread

import pytest

from vfl import tensors
from vfl.config import PartyFile
from vfl.config.toml import check
from vfl.training.specs import checked, read_checked

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

    from vfl.cli import app
    from vfl.cli.reference import registries

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(RESULTS.glob("*.md")),
]
FOLDERS = ("vfl/", "tests/", "docs/", "examples/", "scripts/", "benchmarks/", "deploy/")
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")
MOST_LINES = 15
MAKE_TARGETS = re.findall(r"\n[\w-]+:", (ROOT / "Makefile").read_text(encoding="utf-8"))


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    return [body for kind, body in BLOCK.findall(text_of(page)) if kind == language]


def shell_blocks(page):
    """Blocks of commands, each command in one line; a block of their output is `text`."""
    found = [body for kind in ("", "sh", "bash") for body in blocks(page, kind)]
    return [body.replace("\\\n", "") for body in found]


def snippets(page):
    """Everything a page shows as code: within lines, and lines of indented and shell blocks."""
    outside = BLOCK.sub("", text_of(page))
    lines = chain.from_iterable(body.splitlines() for body in shell_blocks(page))
    return [*CODE.findall(outside), *re.findall(r"^    (vfl .*)$", outside, re.MULTILINE), *lines]


def name_of(page):
    return str(page.relative_to(ROOT))


#: What the Python blocks of each page print; they run in their order, in one module.
PRINTED = {
    "README": r"accuracy 0\.9\d+\n([2-9]|\d\d)\.\d times fewer bytes than float32\n",
    "attacking": r"",
    "howto": r"rmse [56]\d\.\d+\nmae [45]\d\.\d+\nr2 0\.[2-7]\d+\n",  # a deviation of 77
    "mpc": r"",
    "own_models": r"\['0\.0\.weight', '0\.0\.bias'\] \{'feature': 4544\}\n",
    "pretrained": r"\[\d+(, \d+){4}\] [1-9]\d+\n",
    "secure_dpsgd": r"records against .*: epsilon 3\.\d+, delta 1e-05 .*\n",
    "tensors": r"(?P<sum>tensor.*)<fixed precision 2x2, .*>\n(?P=sum)",
    "tutorial_codec": r"",
    "wan": r"91\.2 ms, 2 hops, 256000 bytes\n",
}
#: Tests that run the blocks of a page with what its other blocks need, by page.
ELSEWHERE = {
    "trees": "trees/test_export.py",
    "tutorial": "federation/test_tutorial.py",
    "tutorial_trees": "trees/test_scorecard.py",
}


def sessions(page):
    """Blocks with prompts and answers."""
    return [body for body in blocks(page, "python") if body.startswith(">>>")]


WITH_PYTHON = [
    page
    for page in PAGES
    if len(blocks(page, "python")) > len(sessions(page)) and page.stem not in ELSEWHERE
]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    samples = blocks(page, "python")
    for sample in samples:
        assert sum(bool(line.strip()) for line in sample.splitlines()) <= MOST_LINES
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(tensors.Pool, "write_tickets", handed_over)
    (tmp_path / "sample.py").write_text("\n".join(samples))
    runpy.run_path(str(tmp_path / "sample.py"), {"folder": tmp_path})
    assert re.fullmatch(PRINTED[page.stem], capsys.readouterr().out, re.DOTALL)


def handed_over(pool, folder):
    """Starts the worker of each ticket, in place of people who carry tickets to their machines."""
    for name, ticket in pool.tickets.items():
        Thread(target=tensors.serve, args=(tensors.Worker(name), ticket), daemon=True).start()


@pytest.mark.parametrize("page", [*filter(sessions, PAGES)], ids=name_of)
def test_sessions_print_what_is_shown(page):
    for body in sessions(page):
        shown = doctest.DocTestParser().get_doctest(body, {}, page.name, None, 0)
        assert doctest.DocTestRunner().run(shown).failed == 0


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_blocks_that_another_test_runs_are_read_there(page, test):
    assert f'"{page}.md"' in text_of(ROOT / "tests" / test)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    targets = [page.parent / link for link in LINK.findall(text_of(page)) if "://" not in link]
    words = chain.from_iterable(code.split() for code in snippets(page))
    named = [word.strip(",.:;") for word in words]
    targets += [ROOT / name for name in named if name.startswith(FOLDERS)]
    missing = [str(path) for path in targets if not path.exists()]
    assert missing == []


def test_every_promise_has_files_and_tests_that_exist():
    with (RESULTS / "security_promises.csv").open(encoding="utf-8", newline="") as file:
        promises = list(csv.DictReader(file))
    assert len(promises) > 80
    for promise in promises:
        kept, attacked = (promise[name].split(", ") for name in ("kept in", "attacked by"))
        assert all((ROOT / path).exists() for path in [*kept, *attacked]), promise
        assert any(path.startswith(("tests/", "scripts/")) for path in attacked), promise
    shown = text_of(RESULTS / "security.md").replace("`", "")
    named = re.findall(r"^\| (.+?) \| (?:vfl|scripts)/", shown, re.M)
    assert len(named) > 5
    assert set(named) <= {promise["promise"].replace("`", "") for promise in promises}


MOST_WORDS = 25_000
#: A list with a row for every number that the seed papers print, made from a CSV file.
LISTS = {"published.md"}


def test_pages_outside_results_are_short():
    """A fact stands on one page, and others link to it; what a command prints stands on none."""
    words = {page.name: len(text_of(page).split()) for page in ROOT.glob("docs/*.md")}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda one: -one[1])[:10]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_whole(page):
    """Each table has a head and a rule; an empty line within it would end it."""
    lines = BLOCK.sub("", text_of(page)).splitlines()
    starts = [
        at
        for at, line in enumerate(lines)
        if line.startswith("|") and (not at or not lines[at - 1].startswith("|"))
    ]
    broken = [lines[at] for at in starts if not re.fullmatch(r"\|([ :]*-+[ :]*\|)+", lines[at + 1])]
    assert broken == []


def test_results_are_short_and_begin_with_the_answer():
    """At most five sentences stand before the first table of a page."""
    pages = [page for page in sorted(RESULTS.glob("*.md")) if page.name not in LISTS]
    assert sum(len(text_of(page).split()) for page in pages) <= MOST_WORDS
    for page in pages:
        head = text_of(page).split("\n|", 1)[0]
        paragraphs = [one for one in head.split("\n\n") if not one.startswith(("#", "20"))]
        sentences = re.split(r"[.?!:][*)\"]*\s+(?=[A-Z*`\[])", " ".join(paragraphs).strip())
        assert len(sentences) <= 6, (page.name, sentences)


def test_pages_are_linked():
    linked = {link for page in PAGES for link in LINK.findall(text_of(page))}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages - {Path(link).name for link in linked} == set()


#: Programs of the blocks of commands.
PROGRAMS = {"vfl", "flwr", "make", "pip", "uv", "python", "docker", "podman", "curl", "gzip"}
PROGRAMS |= {"cp", "install", "useradd", "systemctl", "export", "deploy/install"}
PROGRAMS |= {"deploy/wheelhouse", "."}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_commands_are_shell_code_of_known_programs(page):
    for body in shell_blocks(page):
        assert subprocess.run(["bash", "-n"], input=body, text=True, check=False).returncode == 0
        for line in body.splitlines():
            first, *words = shlex.split(line, comments=True)
            assert first in PROGRAMS or re.match(r"[A-Z]+=", first), line
            if first == "vfl":
                assert_parses(list(takewhile(lambda word: word not in (">", "&"), words)))
            if first == "make":
                assert {f"\n{word}:" for word in words} <= set(MAKE_TARGETS), line
            if first == "python" and words[0] != "-m":
                known = text_of(ROOT / words[0])
                options = [word for word in words if word.startswith("--")]
                assert [one for one in options if one not in known] == [], line


def assert_parses(words):
    """That the command takes these arguments and values, and an example file these settings."""
    command, rest = command_named(words)
    with command.make_context("vfl", list(rest)) as context:
        changes = context.params.get("settings") or ()
    for word in rest:
        if word.startswith("examples/") and word.endswith(".toml") and "horizontal" not in word:
            read_checked(ROOT / word, changes)


def commands_of(page):
    """The `vfl ...` commands of a page, in lines and in blocks, as lists of words."""
    found = [code for code in snippets(page) if code.strip().startswith("vfl ")]
    return [shlex.split(code, comments=True)[1:] for code in found]


@cache
def whole_command():
    return typer.main.get_command(app)


def command_named(words):
    """The command that some words call, and the words that are left."""
    command = whole_command()
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_named_exist_with_their_options(page):
    for words in commands_of(page):
        assert_known(words)


def assert_known(words):
    """That a command and its options exist."""
    command, rest = command_named(words)
    options = [(*one.opts, *one.secondary_opts) for one in command.params]
    known = {option for each in options for option in each}
    asked = {word.partition("=")[0] for word in rest if word.startswith("-")}
    assert asked <= known | {"--help"}, f"vfl {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_benchmarks_that_are_named_exist_with_their_options(page, capsys, monkeypatch):
    start = "python -m benchmarks."
    found = [code for code in snippets(page) if code.startswith(start)]
    for _, _, name, *options in (shlex.split(code, comments=True) for code in found):
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit):
            import_module(name).main()
        known = capsys.readouterr().out
        assert [word for word in options if word.startswith("--") and word not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_are_shown_are_settings(page):
    for body in blocks(page, "toml"):
        content = tomllib.loads(body)
        if "project" in content:  # of a package that adds members
            groups = {registry.group for registry in registries().values()}
            assert set(content["project"]["entry-points"]) <= groups
        elif "party" in content or content.keys() == {"data"}:
            needed = {"party": "bank", "data": {"source": "loans.csv", "id": "id"}}
            content["data"] = needed.pop("data") | content.get("data", {})
            check(needed | content, PartyFile, where=page.name)
        else:
            checked(content, page.name)


def features():
    """The rows of the file that leads from papers to code."""
    with (ROOT / "docs" / "features.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", features(), ids=lambda row: row["method"])
def test_a_feature_names_its_command_file_and_test(row):
    assert all(row.values())
    files, tests = (row[key].split(", ") for key in ("files", "tests"))
    assert [path for path in (*files, *tests) if not (ROOT / path).exists()] == []
    assert not any(path.startswith("tests/") for path in files)
    assert all(path.startswith("tests/") for path in tests)
    assert CODE.findall(row["command"])
    for code in CODE.findall(row["command"]):
        if code.startswith("vfl "):
            assert_known(shlex.split(code)[1:])
