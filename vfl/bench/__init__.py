"""Benchmarks: what splitting a network costs beside training it in one piece."""

from __future__ import annotations

from vfl.bench.step import StepRow, bench_step, format_table

__all__ = ["StepRow", "bench_step", "format_table"]
