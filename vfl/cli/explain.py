"""``vfl explain``: the page behind an error code."""

from __future__ import annotations

from typing import Annotated

import typer

from vfl.cli.output import Json, emit


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="Such as V104; in any error's first line.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="All codes, one line each.")] = False,
    json: Json = False,
) -> None:
    """Explain an error code: what causes it, how it happens, how to mend it.

    Without CODE, or with --list, all codes are listed.
    """
    from vfl import explain as pages

    if code is None or listed:
        titles = {one: pages.title_of(one) for one in pages.codes()}
        if json:
            emit(titles)
        else:
            print("\n".join(f"{one}  {title}" for one, title in titles.items()))
        return
    page = pages.page_of(code)
    if json:
        emit({"code": code.strip().upper(), "title": pages.title_of(code), "page": page})
    else:
        print(page, end="")
