"""Pages of runs, grids, comparisons and values: each is one static HTML file that fetches nothing.

Each kind has a file `*_page.py` that yields its sections (`sections`); `build` prints them.
"""

from __future__ import annotations

from vfl.experiments.pages.build import PAGE, build_index, build_report, glance, write_results

__all__ = ["PAGE", "build_index", "build_report", "glance", "write_results"]
