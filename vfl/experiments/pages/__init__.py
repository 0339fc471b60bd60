"""The page of a run or a grid: one static HTML file that fetches nothing."""

from __future__ import annotations

from vfl.experiments.pages.build import PAGE, build_index, build_report, glance, write_results

__all__ = ["PAGE", "build_index", "build_report", "glance", "write_results"]
