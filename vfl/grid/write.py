"""The files of results in a grid's folder."""

from __future__ import annotations

from typing import Any

from vfl.grid.cells import GridFolder, settings_of
from vfl.grid.groups import grouped
from vfl.grid.results import read_results
from vfl.grid.table import markdown, tables, to_csv, to_json, unfinished
from vfl.storage import stamp, write_json, write_text


def write_results(folder: GridFolder) -> tuple[str, dict[str, Any]]:
    """Write `results.csv`, `results.json` and `table.md` from what the cells hold.

    Returns:
        The tables in Markdown with what they leave out, and the content of the JSON file.

    Raises:
        RunFolderError: there is no grid, or a file of it is damaged.
    """
    settings = settings_of(folder.experiment())
    results = read_results(folder)
    groups = grouped(results, settings.reference)
    below = [*folder.words("notes"), *unfinished(results)]
    parts = [markdown(columns, groups) for columns in tables(settings, groups)]
    table = "\n".join([*parts, *(f"{line}\n" for line in below)])
    content = stamp() | to_json(results, groups, settings)
    write_text(folder.path / "results.csv", to_csv(results, settings))
    write_json(folder.path / "results.json", content)
    write_text(folder.path / "table.md", table)
    return table, content
