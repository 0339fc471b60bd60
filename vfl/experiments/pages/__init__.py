"""HTML pages of runs, grids, comparisons and values; pages are static and load no file.

Each kind of page has a file `*_page.py`, which yields the page's sections (`sections`); `build`
renders the sections as HTML.
"""

from __future__ import annotations

from vfl.experiments.pages.build import PAGE, build_index, build_report, glance, write_results

__all__ = ["PAGE", "build_index", "build_report", "glance", "write_results"]
