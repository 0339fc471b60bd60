"""The part of a study's page about figures of rows or code that are no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vfl.experiments.cells import GridFolder
from vfl.experiments.pages.sections import Content, Section
from vfl.experiments.records import TEST, Record
from vfl.experiments.staleness import put_aside
from vfl.experiments.tables import SHARES, Table, number_text, percent_text

_TITLE = "Stale: of rows or code that are no more"
_BELOW = (
    "No table, mean, rank or verdict above counts these. The command below trains them anew and "
    "puts what lies there aside, under stale/. A report compares the code of trainings and attacks "
    "with what is loaded here; rows only where another training of the folder was given newer ones."
)


def beside_stale(page: Content, folder: GridFolder, records: Sequence[Record]) -> Content:
    """The page with its stale figures marked, each with the reason, and what was put aside."""
    stale, aside = [one for one in records if one.stale], put_aside(folder)
    notes = list(page.notes)
    json = {"stale": [one.as_json() for one in stale], "put_aside": [
        str(path.relative_to(folder.path)) for path in aside]}  # fmt: skip
    sections, tables = list(page.sections), list(page.tables)
    if aside:
        earlier = "1 earlier training" if len(aside) == 1 else f"{len(aside)} earlier trainings"
        notes.append(f"{earlier} of other rows or code kept under stale/")
    if stale:
        cells = len({one.cell for one in stale})
        notes.append(
            f"figures of {cells} of {len(folder.cells())} cells are stale and stand apart: "
            f"{'; '.join(sorted({one.stale for one in stale}))}"
        )
        table = stale_table(folder, stale)
        tables.append(table)
        sections.append(Section(title=_TITLE, table=table, below=_BELOW))
    return replace(page, notes=notes, sections=sections, tables=tables, json={**page.json, **json})


def stale_table(folder: GridFolder, stale: Sequence[Record]) -> Table:
    """One line a figure of the test rows or of an attack, with the reason."""
    titles = {cell.name: cell.title for cell in folder.cells()}
    lines = []
    for one in stale:
        if one.subject == TEST or one.evaluator == "attack":
            text = percent_text(one.value) if one.measure in SHARES else number_text(one.value)
            about = one.attacker if one.evaluator == "attack" else one.subject
            what = f"{about}, k = {one.k}, draw {one.draw}" if one.k else about
            lines.append([titles[one.cell], what, one.measure.replace("_", " "), text, one.stale])
    return Table(["stale", "of", "measure", "was", "why"], lines, words=3)
