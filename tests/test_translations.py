"""The Chinese pages say what the English ones do: the same headings, commands and links."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+(?= )", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)]+)\)")
#: Links to the page in the other language, and to the other translated page.
OF_LANGUAGES = {"README.md", "README.zh.md", "../README.zh.md", "zh.md", "docs/zh.md"}


def parts(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    plain = BLOCK.sub("", text)
    return {
        "blocks": [one for one in BLOCK.findall(text) if "{toctree}" not in one],
        "code": Counter(CODE.findall(plain)),
        "links": Counter(link for link in LINK.findall(plain) if link not in OF_LANGUAGES),
    }


@pytest.mark.parametrize(
    ("english", "chinese"), [("README.md", "README.zh.md"), ("docs/index.md", "docs/zh.md")]
)
def test_a_translation_has_the_same_commands_and_links(english, chinese):
    assert parts(chinese) == parts(english)


def test_the_translated_readme_has_the_same_headings():
    found = [
        HEADING.findall(BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8")))
        for page in ("README.md", "README.zh.md")
    ]
    assert found[0] == found[1]
