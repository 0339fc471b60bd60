"""The rows of ``vfl bench mpc`` as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from vfl.bench.mpc import MpcRow


def format_mpc(rows: Sequence[MpcRow]) -> str:
    """One line a row; "-" where nothing was counted or there is nothing to compare with."""
    head = (
        f"{'workload':<23}{'system':<11}{'network':<9}{'ms':>9}{'fastest':>9}{'CPU':>8}{'online':>11}"
        f"{'offline':>10}{'setup':>10}{'hops':>5}{'error':>9}{'limit ms':>9}{'ratio':>6}"
        f"{'matmul':>8}{'ratio':>7}{'rival':>7}"
    )
    return "\n".join([head, *(_line(row) for row in rows)])


def _line(row: MpcRow) -> str:
    return (
        f"{row.workload:<23}{row.system:<11}{row.network:<9}{row.milliseconds:>9.1f}"
        f"{row.fastest_ms:>9.1f}{_figure(row.cpu_ms, 1):>8}{_count(row.bytes_online):>11}"
        f"{_count(row.bytes_offline):>10}{_count(row.bytes_setup):>10}{_count(row.hops):>5}{row.max_error:>9.1e}"
        f"{_figure(row.limit_ms, 1):>9}{_figure(row.limit_ratio, 2):>6}"
        f"{_figure(row.matmul_ms, 2):>8}{_figure(row.matmul_ratio, 1):>7}"
        f"{_figure(row.rival_ratio, 1):>7}"
    )


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
