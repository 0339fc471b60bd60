"""The page behind every error code, shipped with the package and printed by ``vfl explain``.

A page is Markdown: a title ``# V104: what it is``, what causes it, ``## How it happens``,
``## How to mend it`` and ``## Example``. Tests hold that every error class has one, and that its
example is what vfl really says.
"""

from __future__ import annotations

from importlib import resources

from vfl.errors import UnknownNameError, nearest


def codes() -> list[str]:
    """Every code that has a page, in order."""
    pages = resources.files("vfl") / "explanations"
    return sorted(page.name.removesuffix(".md") for page in pages.iterdir())


def page_of(code: str) -> str:
    """The page of one code, as Markdown.

    Raises:
        UnknownNameError: there is no such code, with the nearest one.
    """
    wanted, known = code.strip().upper(), codes()
    if wanted not in known:
        raise UnknownNameError(
            f"no error has the code '{code}'",
            want=f"{known[0]} to {known[-1]}",
            fix=nearest(wanted, known) or "vfl explain --list shows all of them",
        )
    return (resources.files("vfl") / "explanations" / f"{wanted}.md").read_text(encoding="utf-8")


def title_of(code: str) -> str:
    """What a code means, in one line.

    >>> title_of("V104")
    'a plug-in does not fit the width of the cut'
    """
    return page_of(code).split("\n")[0].partition(": ")[2]
