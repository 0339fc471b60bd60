"""The result page of a run: one static HTML file, no script, nothing fetched."""

from __future__ import annotations

from vfl.report.build import build_report

__all__ = ["build_report"]
