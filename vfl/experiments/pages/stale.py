"""Section of a page about stale results: their data or code have changed since the measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.results import TEST, LoadedGrid, Record
from vfl.experiments.staleness import put_aside
from vfl.experiments.tables import SHARES, Table, number_text, percent_text

_TITLE = "Stale results, whose rows or code have changed since"
_BELOW = (
    "No table, mean, rank or verdict above uses these results. The command below trains these "
    "cells again and moves the old results to stale/. A report compares the code of trainings and "
    "attacks with the code that is loaded now. It detects changed data only if another training of "
    "the folder had newer data."
)
_OF_RUN = (
    "No table and no card above uses these results; vfl attack repeats them. A report compares the "
    "code of attacks with the code that is loaded now."
)


def beside_stale(page: Content, grid: LoadedGrid) -> Content:
    """Return the page with stale results marked, each with a reason; list old runs in stale/."""
    stale, aside = [one for one in grid.records if one.stale], put_aside(grid.folder)
    notes = list(page.notes)
    json = {"stale": [one.as_json() for one in stale], "put_aside": [
        str(path.relative_to(grid.path)) for path in aside]}  # fmt: skip
    sections, tables = list(page.sections), list(page.tables)
    if aside:
        earlier = "1 earlier training" if len(aside) == 1 else f"{len(aside)} earlier trainings"
        notes.append(f"{earlier}, with other rows or other code, are kept in stale/")
    if stale:
        cells = len({one.cell for one in stale})
        notes.append(
            f"figures of {cells} of {len(grid.cells)} cells are stale and listed separately: "
            f"{'; '.join(sorted({one.stale for one in stale}))}"
        )
        section = stale_section(stale, {cell.name: cell.title for cell in grid.cells})
        tables += section.tables
        sections.append(section)
    return replace(page, notes=notes, sections=sections, tables=tables, json={**page.json, **json})


def stale_section(stale: Iterable[Record], titles: Mapping[str, str] | None = None) -> Section:
    """Return a table with one line per stale result, with the reason.

    Args:
        stale: the figures.
        titles: titles of a grid's cells, by name; None for a single run.
    """
    lines = []
    for one in stale:
        if one.subject == TEST or one.evaluator == "attack":
            text = percent_text(one.value) if one.measure in SHARES else number_text(one.value)
            about = one.attacker if one.evaluator == "attack" else one.subject
            what = f"{about}, k = {one.k}, draw {one.draw}" if one.k else about
            title = titles[one.cell] if titles else one.cell
            lines.append([title, what, one.measure.replace("_", " "), text, one.stale])
    table = Table(["stale", "of", "measure", "was", "why"], lines, words=3)
    return Section(title=_TITLE, tables=[table], below=_BELOW if titles else _OF_RUN)
