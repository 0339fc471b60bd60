"""Draw the diagrams of docs/design.md from their text descriptions.

    python scripts/draw_design.py            # docs/drawings/*.txt to *.svg beside them
    python scripts/draw_design.py --check    # exit code 1 if an image differs from its text

A description has a title, a line with the names of two lanes, and a line for each step. In a step,
`LEFT | RIGHT` are texts in the two lanes, of which one may be empty; `--> WORDS` and `<-- WORDS`
are messages from one lane to the other.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
_WIDTH, _LANE, _GAP, _PAD = 800, 330, 16, 10
_LINE, _LETTERS = 19, 42
_LEFTS = (20, _WIDTH - 20 - _LANE)
_STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1c2733; }
.title { font-weight: 600; font-size: 16px; } .lane { font-weight: 600; fill: #fff; }
.head { fill: #24527a; } .step { fill: #eef3f8; stroke: #b9c9d9; }
.life { stroke: #b9c9d9; stroke-dasharray: 4 4; }
.message { stroke: #a5480c; stroke-width: 2; fill: none; } .point { fill: #a5480c; }
.word { text-anchor: middle; fill: #a5480c; }"""


def draw(text: str) -> str:
    """Return the diagram that a text description defines, as SVG.

    Raises:
        ValueError: the description has no title, or not exactly two lanes.
    """
    title, lanes, *steps = (line.rstrip("\n") for line in text.strip().split("\n"))
    heads = [name.strip() for name in lanes.split("|")]
    if len(heads) != 2 or not all(heads):
        raise ValueError("the second line has two lanes: LEFT | RIGHT")
    top = 40
    shapes, y = list[str](), top + 34 + _GAP
    for step in steps:
        drawn, height = _row(step, y)
        shapes += drawn
        y += height + _GAP
    middles = [left + _LANE // 2 for left in _LEFTS]
    lives = (f'<path class="life" d="M{x} {top}V{y}"/>' for x in middles)
    boxes = (
        f'<rect class="head" x="{left}" y="{top}" width="{_LANE}" height="34" rx="6"/>'
        f'<text class="lane" x="{x}" y="{top + 22}" text-anchor="middle">{escape(head)}</text>'
        for left, x, head in zip(_LEFTS, middles, heads, strict=True)
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {y}">',
        f"<title>{escape(title)}</title><desc>{escape('; '.join(steps))}</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{y}" rx="10" fill="#fff"/>',
        f'<text class="title" x="20" y="26">{escape(title)}</text>',
        *lives, *boxes, *shapes, "</svg>",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(step: str, y: int) -> tuple[list[str], int]:
    """Return the shapes for one line of the description, and the height of these shapes."""
    for arrow, ends in (("-->", (0, 1)), ("<--", (1, 0))):
        if step.startswith(arrow):
            return list(_message(step.removeprefix(arrow).strip(), ends, y)), 2 * _LINE
    sides = [side.strip() for side in step.split("|")]
    wrapped = [textwrap.wrap(side, _LETTERS) for side in sides]
    height = _LINE * max(map(len, wrapped)) + _PAD
    return [shape for left, lines in zip(_LEFTS, wrapped, strict=True) if lines
            for shape in _box(lines, left, y, height)], height  # fmt: skip


def _message(words: str, ends: tuple[int, int], y: int) -> Iterator[str]:
    start, end = (_LEFTS[one] + _LANE // 2 for one in ends)
    line, back = y + _LINE + 8, 9 if end < start else -9
    yield (
        f'<text class="word" x="{_WIDTH // 2}" y="{y + _LINE - 4}">{escape(words)}</text>'
        f'<path class="message" d="M{start} {line}H{end + back}"/>'
        f'<path class="point" d="M{end} {line}l{back} -5v10z"/>'
    )


def _box(lines: list[str], left: int, y: int, height: int) -> Iterator[str]:
    yield (f'<rect class="step" x="{left}" y="{y}" width="{_LANE}" height="{height}" rx="6"/>')
    for number, line in enumerate(lines):
        below = y + _PAD // 2 + _LINE * (number + 1) - 5
        yield f'<text x="{left + 12}" y="{below}">{escape(line)}</text>'


def main() -> int:
    """Write all diagrams, or compare them with the stored ones; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check, different = parser.parse_args().check, 0
    for source in sorted(FOLDER.glob("*.txt")):
        image, found = source.with_suffix(".svg"), draw(source.read_text(encoding="utf-8"))
        if check and (not image.exists() or image.read_text(encoding="utf-8") != found):
            print(f"{image} differs from {source.name}: python scripts/draw_design.py")
            different = 1
        elif not check:
            image.write_text(found, encoding="utf-8")
    return different


if __name__ == "__main__":
    raise SystemExit(main())
