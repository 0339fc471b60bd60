"""All numbers that the five seed papers print, each compared with a stored result of vfl.

    python -m benchmarks.published            # writes docs/results/published.md
    python -m benchmarks.published --check    # fails where the page is stale

`published.csv` has a row for each printed number, with a link to vfl's result; `published_ours.csv`
has the results that no other file of `docs/results` contains. `benchmarks.pages` describes links.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from benchmarks import harness
from benchmarks.harness import markdown_table
from benchmarks.pages import FOLDER, Figure, filled, keep, read_figure, records
from vfl.core.errors import DataError

State = Literal["equal", "better", "worse", "other data", "not run"]
STATES: tuple[State, ...] = ("equal", "better", "worse", "other data", "not run")
#: Relative differences up to which two results count as equal: for times, because the machine is
#: shared; for bytes, because packet headers differ.
TIMES_WITHIN, BYTES_WITHIN = 0.05, 0.01
_TIMES, _BYTES = ("s", "ms"), ("MiB",)
_MODELLED, _MIB_BITS = "80mbps,40ms", 8 * 2.0**20
_SPEED = re.compile(r", (\d+) ([MG])bit/s, (\d+) ms$")


@dataclass(frozen=True, slots=True)
class Printed:
    """A number that a paper prints.

    Attributes:
        paper: short name of the paper.
        source: table, figure or section.
        what, setting: meaning of the number, and conditions under which vfl's result was measured.
        unit: unit of the number.
        better: "higher" or "lower" if values above or below the printed value are better; "near" if
            only values near the printed value are good.
        printed: the number as the paper prints it.
        spread: standard deviation that the paper prints for the number; "" if there is none.
        within: largest difference at which two numbers count as equal; if "", the unit determines
            it.
        ours: link to vfl's result for this number; "" if none is stored.
        also: link to a second result of vfl, measured in another form or with another model.
        data: data set of vfl's result if it differs from the paper's; otherwise "".
        why: reason why no run of vfl gives this number, or why the printed number is wrong.
    """

    paper: str
    source: str
    what: str
    setting: str
    unit: str
    better: str
    printed: str
    spread: str
    within: str
    ours: str
    also: str
    data: str
    why: str

    @property
    def value(self) -> float:
        """Return the printed number."""
        return float(self.printed)


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A printed number, compared with vfl's stored result.

    Attributes:
        printed: the number that the paper prints.
        ours, also: vfl's results; None if no result is stored.
        state: verdict of the comparison.
    """

    printed: Printed
    ours: Figure | None
    also: Figure | None
    state: State

    @property
    def ratio(self) -> float | None:
        """Ratio of vfl's number to the printed number; None if either is missing or zero."""
        if self.ours is None or not self.printed.value:
            return None
        return self.ours.value / self.printed.value


def state_of(printed: Printed, ours: Figure | None) -> State:
    """Return the verdict on vfl's result, compared with a printed number.

    Two numbers count as equal if they differ by at most half of the last printed digit plus the
    noise of both. The noise is the intervals over seeds, plus the difference in `within`, 5 % of a
    time, or 1 % of bytes.

    >>> one = Printed("a", "b", "c", "d", "%", "higher", "90.0", "", "", "", "", "", "")
    >>> state_of(one, Figure(91.0, noise=1.2)), state_of(one, Figure(89.0))
    ('equal', 'worse')

    Args:
        printed: number that the paper prints.
        ours: the stored result of vfl.
    """
    if ours is None:
        return "not run"
    if printed.data:
        return "other data"
    gap = ours.value - printed.value
    if abs(gap) <= _tolerance(printed, ours) + 1e-9:
        return "equal"
    if printed.better == "near":
        return "worse"
    return "better" if (gap > 0) == (printed.better == "higher") else "worse"


def _tolerance(printed: Printed, ours: Figure) -> float:
    _, _, decimals = printed.printed.partition(".")
    digit = 0.5 * 10.0 ** -len(decimals)
    relative = {**dict.fromkeys(_TIMES, TIMES_WITHIN), **dict.fromkeys(_BYTES, BYTES_WITHIN)}
    allowed = float(printed.within or relative.get(printed.unit, 0.0) * abs(printed.value))
    # The papers average five runs or more.
    theirs = 2 * float(printed.spread or 0) / math.sqrt(5)
    return digit + allowed + math.hypot(ours.noise, theirs)


def joined(folder: Path = FOLDER) -> list[PublishedRow]:
    """Return all printed numbers, each with vfl's result.

    Args:
        folder: folder of `published.csv` and the stored results.

    Raises:
        DataError: a link does not lead to a result, or a row has neither a link nor a reason in
            `why`.
    """
    rows = []
    for record in records(folder / "published.csv"):
        printed = Printed(**record)
        if not printed.ours and not printed.why.startswith("not run: "):
            raise DataError(
                "a printed number has neither a result nor a reason",
                where=f"published.csv, {printed.source}",
                got=f"{printed.what}, {printed.setting}",
                want="a link in 'ours', or a 'why' that begins with 'not run: '",
            )
        ours, also = (
            read_figure(link, folder) if link else None for link in (printed.ours, printed.also)
        )
        rows.append(PublishedRow(printed, ours, also, state_of(printed, ours)))
    return rows


def _number(figure: Figure | None, like: str) -> str:
    """Format a value and its interval, with about as many digits as the printed number."""
    if figure is None:
        return ""
    decimals = max(len(like.partition(".")[2]), 0 if abs(figure.value) >= 20 else 1)
    if 0 < abs(figure.value) < 1:
        decimals = max(decimals, 1 - math.floor(math.log10(abs(figure.value))))
    noise = f" ± {figure.noise:.{decimals}f}" if figure.noise else ""
    return f"{figure.value:,.{decimals}f}{noise}"


def _file(link: str) -> str:
    """Return the file of vfl's result, as a Markdown link."""
    if link.startswith("codec:"):
        return "formula"
    found = re.search(r"[\w]+\.(?:csv|jsonl)", link)
    name = found[0] if found else "published_ours.csv" if link else ""
    return f"[{name.partition('.')[0]}]({name})" if name else ""


def _cells(row: PublishedRow) -> list[str]:
    it = row.printed
    state = row.state if row.state != "not run" else it.why
    state += f": {it.data}" if it.data else ""
    state += f" ({it.why})" if it.why and row.ours else ""
    return [
        it.source,
        it.what,
        it.setting,
        f"{it.printed}{f' ± {it.spread}' if it.spread else ''}",
        _number(row.ours, it.printed),
        _number(row.also, it.printed),
        it.unit,
        "" if row.ratio is None else f"{row.ratio:.3g}",
        state,
        _file(it.ours),
    ]


def _summary(rows: Sequence[PublishedRow]) -> str:
    papers = dict.fromkeys(row.printed.paper for row in rows)
    counted = {
        name: Counter(row.state for row in rows if row.printed.paper == name) for name in papers
    }
    lines = [
        [f"[{name}](#{name.lower()})", str(of.total()), *(str(of[state]) for state in STATES)]
        for name, of in counted.items()
    ]
    of = Counter(row.state for row in rows)
    lines.append(["all", str(of.total()), *(str(of[state]) for state in STATES)])
    return markdown_table(["paper", "printed numbers", *STATES], lines)


@dataclass(frozen=True, slots=True)
class LineRow:
    """A time that the thesis prints in chapters 5 and 6, and the least time on its link.

    Times are in seconds.

    Attributes:
        what: workload and network link.
        printed: time that the thesis prints.
        sent: time to send the printed number of bytes over one link of the printed bandwidth,
            without delay.
        latency: time of the sequential messages, half a round trip for each.
        computed: computed time of vfl with the protocol as printed: the time of bytes and messages,
            without computation.
        measured: measured time of vfl with the protocol as printed.
    """

    what: str
    printed: float
    sent: float
    latency: float
    computed: float
    measured: float


def line_rows(rows: Sequence[PublishedRow], folder: Path = FOLDER) -> list[LineRow]:
    """Return times of the methods in Tables 5.2 to 6.2, and what their network links allow.

    Args:
        rows: rows of `joined`.
        folder: folder of the stored results.
    """
    sent = {
        (it.source, _SPEED.sub("", it.setting)): it.value * _MIB_BITS
        for it in (row.printed for row in rows)
        if it.what == "bytes" and it.unit == "MiB"
    }
    found = []
    for row in rows:
        it = row.printed
        line = _SPEED.search(it.setting)
        if it.what != "time" or line is None or row.ours is None:
            continue
        bits_a_second = float(line[1]) * {"M": 1e6, "G": 1e9}[line[2]]
        one_way_s = float(line[3]) / 2000
        stored = it.ours.partition("#")[0]
        if "workload=" in stored:
            stored = stored.replace(f"line={_MODELLED}&", "line=model&")
            hops = read_figure(f"{stored}#hops", folder).value
            computed = read_figure(f"{stored}#milliseconds/1000", folder).value
        else:
            hops = read_figure(f"{stored}#messages", folder).value
            own = read_figure(f"{stored}#online_mib", folder).value * _MIB_BITS
            computed = own / bits_a_second + hops * one_way_s
        alone = sent[it.source, _SPEED.sub("", it.setting)] / bits_a_second
        latency = hops * one_way_s
        found.append(LineRow(it.setting, it.value, alone, latency, computed, row.ours.value))
    return found


def _line_table(found: Sequence[LineRow]) -> str:
    heads = [
        "what",
        "printed",
        "printed bytes over the link",
        "messages, half a round trip each",
        "vfl, computed",
        "vfl, measured",
    ]
    figures = [(it.printed, it.sent, it.latency, it.computed, it.measured) for it in found]
    return markdown_table(
        heads,
        ([it.what, *(f"{each:.3f}" for each in of)] for it, of in zip(found, figures, strict=True)),
    )


def _line_words(found: Sequence[LineRow]) -> str:
    alone = sum(it.printed < it.sent for it in found)
    both = sum(it.printed < it.sent + it.latency for it in found)
    return (
        f"Of {len(found)} printed times, {alone} are shorter than the time of the printed bytes on "
        f"a link of the printed bandwidth, and {both} are shorter than bytes and messages together."
    )


def _simulated(folder: Path) -> str:
    """Return the page's table of figure 5.2: distance correlations by distribution and width."""
    rows = records(folder / "published_correlation.csv")
    widths = list(dict.fromkeys(row["width"] for row in rows))
    ways = {"projected": "Y = A X", "estimated": "eq 5-19", "permuted": "Y permuted"}
    lines = []
    for name in dict.fromkeys(row["distribution"] for row in rows):
        own = {row["width"]: row for row in rows if row["distribution"] == name}
        lines += [
            [name if way == "projected" else "", said, *(own[width][way] for width in widths)]
            for way, said in ways.items()
        ]
    return markdown_table(["distribution", "with X", *widths], lines)


def _simulated_words(folder: Path) -> str:
    rows = records(folder / "published_correlation.csv")
    single = {row["distribution"]: row["projected"] for row in rows if row["width"] == "1"}
    # A cut of width 1 has only one order of its units, so `wide` leaves it out.
    wide = [row for row in rows if row["width"] != "1"]
    below = sum(float(row["permuted"]) < float(single[row["distribution"]]) for row in wide)
    off = max(abs(float(row["estimated"]) - float(row["projected"])) for row in rows)
    return (
        f"In {below} of {len(wide)} cells, the permuted vector has a smaller correlation than a "
        f"projection to one number, as the source says; eq 5-19 errs by {off:.3f} at most."
    )


def _usage(folder: Path) -> str:
    """Return the page's table of figure 3.8: how evenly each codec selects the units of a cut."""
    rows = records(folder / "published_usage.csv")
    columns = ["never", "least", "quarter", "median", "three_quarters", "most"]
    lines = []
    for variant, codec in dict.fromkeys((row["variant"], row["codec"]) for row in rows):
        own = [row for row in rows if (row["variant"], row["codec"]) == (variant, codec)]
        means = {name: fmean(float(row[name]) for row in own) for name in columns}
        shares = [f"{100 * means[name]:.2f} %" for name in columns[1:]]
        never = f"{means['never']:.1f} of {own[0]['units']}"
        lines.append([variant.replace("_", " "), f"`{codec}`", str(len(own)), never, *shares])
    heads = ["before the cut", "codec", "seeds", "units never chosen"]
    return markdown_table([*heads, "least", "quarter", "median", "three quarters", "most"], lines)


def _widths(folder: Path) -> str:
    """Return the page's table of figure 5.3: time and bytes by hidden width, in both forms."""
    rows = records(folder / "published_widths.csv")
    lines = []
    for width in dict.fromkeys(row["width"] for row in rows):
        cells = [width]
        for form in ("thesis", "fast"):
            (own,) = [row for row in rows if (row["width"], row["form"]) == (width, form)]
            sent = float(own["mib_online"]) + float(own["mib_offline"])
            cells += [f"{float(own['seconds']):.3f}", f"{sent:.2f}", own["mib_offline"]]
        lines.append(cells)
    heads = ["units"]
    for form in ("thesis' form", "fast"):
        heads += [f"{form}, s", "MiB", "of which P2 deals"]
    return markdown_table(heads, lines)


def page_of(rows: Sequence[PublishedRow], folder: Path = FOLDER) -> str:
    """Return the page: its introduction, the summary of verdicts, and a table for each paper.

    Args:
        rows: rows of `joined`.
        folder: folder of the stored results.
    """
    found = line_rows(rows, folder)
    heads = [
        "source",
        "what",
        "setting",
        "printed",
        "ours",
        "also",
        "unit",
        "ratio",
        "state",
        "stored in",
    ]
    of = Counter(row.state for row in rows)
    total = of.total()
    fields = {
        "summary": _summary(rows),
        "line": _line_table(found),
        "line-words": _line_words(found),
        "simulated": _simulated(folder),
        "simulated-words": _simulated_words(folder),
        "usage": _usage(folder),
        "widths": _widths(folder),
        "total": str(total),
        "run": f"{100 * (1 - of['not run'] / total):.0f}",
        "held": f"{100 * (of['equal'] + of['better']) / total:.0f}",
    }
    for name in dict.fromkeys(row.printed.paper for row in rows):
        fields[name] = markdown_table(
            heads, [_cells(row) for row in rows if row.printed.paper == name]
        )
    return filled("published", fields.__getitem__)


def bench_published(check: bool = False, folder: Path = FOLDER) -> list[PublishedRow]:
    """Compare the printed numbers of the seed papers with vfl's results, and write the page.

    Args:
        check: only compare the page with the stored results, and fail if it differs.
        folder: folder of the stored results and of the page.

    Raises:
        VFLError: the page does not match the stored results.
    """
    rows = joined(folder)
    keep(folder / "published.md", page_of(rows, folder), check)
    return rows


def shown(rows: Sequence[PublishedRow]) -> str:
    """Return the number of rows with each verdict."""
    return _summary(rows)


main = harness.command(bench_published, shown)


if __name__ == "__main__":
    main()
