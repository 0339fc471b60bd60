"""`scripts/sentences`: findings in prose, and few false ones."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def loaded():
    loader = SourceFileLoader("sentences", str(ROOT / "scripts" / "sentences"))
    module = sys.modules["sentences"] = module_from_spec(spec_from_loader("sentences", loader))
    loader.exec_module(module)
    return module


sentences = loaded()
LONG = "word " * 31


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('"""Those of the test rows."""\n', ["begins with 'Those', without its noun"]),
        ('"""Test metrics of the run.\n\n    Of all rows.\n"""\n', []),
        ("# It is told to nobody.\nx = 1\n", ["'told'", "'nobody'"]),
        ("#: What each limit counts.\nx = 1\n", ["begins with 'What', without its noun"]),
        ("# What follows is fast.\nx = 1\n", []),
        ("# Classes are told apart.\n", []),
        ("# One line\n# of a sentence that\n# somebody reads.\n", ["'somebody'"]),
        (f'"""Sum.\n\n    Args:\n        x: {LONG}\n"""\n', ["31 words in a sentence"]),
        (
            '"""Sum.\n\n    Args:\n        x: of Adam.\n        y: steps of Adam.\n"""\n',
            ["begins with 'of', without its noun"],
        ),
        (f'"""Sum.\n\n    >>> {LONG}\n"""\n', []),
        ('raise ValueError(f"party {name} was told twice")\n', ["'told'"]),
        ('print("it was told twice here")\n', ["'told'"]),
        ('print("told twice")\n', []),  # too short for a sentence
        ("x = '# told'\n", []),
        (f"x = 1  # {'word ' * 20}\ny = 2  # {'word ' * 20}\n", []),
        (f'"""A folder:\n\n    name  told {LONG}\n\nEnd.\n"""\n', []),
    ],
)
def test_code(tmp_path, content, found):
    file = tmp_path / "module.py"
    file.write_text(content)
    texts = list(sentences.texts_of(file))
    assert [what for text in texts for what in sentences.findings(text)] == found


def test_pages_without_their_tables_code_and_links(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Told\n\nA party reads `told`, and [a page](told.md).\n\n| told |\n| --- |\n\n"
        "```\ntold\n```\n\n- One point.\n- Another is told.\n\n"
        f"1. {'word ' * 20}\n2. {'word ' * 20}\n"
    )
    found = [
        (text.line, what) for text in sentences.texts_of(page) for what in sentences.findings(text)
    ]
    assert found == [(13, "'told'")]


def test_a_drawn_sentence_stands_in_its_lines(tmp_path, capsys):
    file = tmp_path / "module.py"
    file.write_text('x = 1\n\n\ndef f():\n    """Return the sum of all numbers."""\n    return x\n')
    (text,) = sentences.texts_of(file)
    sentences.show(text, 1)
    assert capsys.readouterr().out.splitlines() == [
        "    | def f():",
        '    |     """Return the sum of all numbers."""',
        "    |     return x",
    ]
    sentences.show(text, 0)
    assert not capsys.readouterr().out
