"""Pages of runs, grids, comparisons and values: static HTML files that load nothing.

Each kind has a file `*_page.py` that yields its sections (`sections`); `build` renders them.
"""

from __future__ import annotations

from vfl.experiments.pages.build import PAGE, build_index, build_report, glance, write_results

__all__ = ["PAGE", "build_index", "build_report", "glance", "write_results"]
