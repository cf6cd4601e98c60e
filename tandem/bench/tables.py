"""A report for people: tables, what to be careful about, and where the figures are from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.bench.report import Report, provenance
from tandem.bench.statistics import MIN_UNITS, Ratio, Spread
from tandem.bench.summary import ALL, Line

_MAX_LISTED = 10  # failures on the terminal; the JSON has all
_NOTHING = "-"
_MIB = 2.0**20
_WIDTH = 120  # of the widest table


def print_report(report: Report, console: Console) -> None:
    """On a narrow terminal or into a pipe nothing is cut off."""
    if not console.is_terminal or console.width < _WIDTH:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    console.print(render(report))


def render(report: Report) -> RenderableType:
    """All of it."""
    lines = report.lines
    # The last category of a level is all together, or the only one there is.
    whole = [line for line in lines if line.category == ALL or len(report.workload.categories) == 1]
    views = (_load, _latency, _acceptance, _stages, _processes)
    tables = [_speed(lines), *(view(whole) for view in views)] if lines else []

    warnings = [Text(f"! {warning}", "bold yellow") for warning in report.warnings()]
    notes = [Text(line, "dim") for line in provenance(report)]
    return Group(*map(_explained, tables), *_failures(report), *warnings, *notes)


def _speed(lines: Sequence[Line]) -> Table:
    table = _table(
        "Speed over plain decoding (off): median of pairs [95 % interval]",
        ("at once", "category", "arm"),
        ("requests", "decoding", "end to end", "tokens/s", "tokens a call"),
        caption=(
            "decoding: tokens per second after the first; end to end: of the whole answer; tokens/s: all requests "
            f"together; tokens a call: of the target, draft included. Fewer than {MIN_UNITS} pairs have no interval."
        ),
    )
    for line, cells in _grouped(lines):
        table.add_row(
            *cells,
            line.arm,
            str(line.num_requests),
            *((_ratio(line.ratios.decode_speed), _ratio(line.ratios.request_speed)) if line.ratios else ("1", "1")),
            _figure(line.total_tokens_per_second, ".1f"),
            _figure(line.acceptance.length, ".2f"),
            end_section=_ends_section(line, lines),
        )
    return table


def _load(lines: Sequence[Line]) -> Table:
    table = _table(
        "All requests together, against plain decoding [95 % interval]",
        ("at once", "arm"),
        ("tokens/s", "ratio", "time to first token, ratio"),
        caption="Above 1 is faster on the left, later on the right.",
    )
    for line, (level, _) in _grouped(lines):
        table.add_row(
            level,
            line.arm,
            _figure(line.total_tokens_per_second, ".1f"),
            *((_ratio(line.ratios.throughput), _ratio(line.ratios.first_token)) if line.ratios else ("1", "1")),
        )
    return table


def _latency(lines: Sequence[Line]) -> Table:
    table = _table(
        "Latency: median (quartiles) 95th percentile",
        ("at once", "arm"),
        ("first token, ms", "each token after it, ms", "chunk gap, ms", "tokens/s of a request"),
    )
    for line, (level, _) in _grouped(lines):
        table.add_row(
            level,
            line.arm,
            _spread(line.first_token_seconds, scale=1e3),
            _spread(line.seconds_per_token, scale=1e3),
            _spread(line.gap_seconds, scale=1e3),
            _spread(line.tokens_per_second, scale=1.0),
        )
    return table


def _acceptance(lines: Sequence[Line]) -> Table:
    table = _table(
        "Acceptance",
        ("at once", "arm"),
        ("rate", "tokens a call", "calls", "draftless", "bytes a round"),
        last="accepted by position",
    )
    for line, (level, _) in _grouped(lines):
        taken = line.acceptance
        table.add_row(
            level,
            line.arm,
            _figure(taken.rate, ".3f"),
            _figure(taken.length, ".2f"),
            str(taken.rounds),
            str(taken.draftless_rounds),
            _figure(line.bytes_per_round, ".0f"),
            " ".join(f"{rate:.2f}" for rate in taken.rate_by_position) or _NOTHING,
        )
    return table


def _stages(lines: Sequence[Line]) -> Table:
    table = _table(
        "Time by stage, ms a token, prefill included",
        ("at once", "arm"),
        ("draft", "verify", "network", "rest", "sum"),
        caption="draft, verify: inside these services; network: between them; rest: gateway, HTTP, this client, queue",
    )
    for line, (level, _) in _grouped(lines):
        if (stages := line.stages) is not None:
            parts = (stages.draft, stages.verify, stages.network, stages.rest)
            table.add_row(level, line.arm, *(f"{1e3 * part:.2f}" for part in (*parts, sum(parts))))
    return table


def _processes(lines: Sequence[Line]) -> Table:
    names = dict.fromkeys(name for line in lines for name in line.cpu_seconds_per_1000_tokens)
    memory = dict.fromkeys(name for line in lines for name in line.resident_bytes)
    table = _table(
        "Processes: CPU seconds for 1,000 tokens, and the most memory",
        ("at once", "arm"),
        (*(f"{name} CPU s" for name in names), *(f"{name} MiB" for name in memory)),
    )
    for line, (level, _) in _grouped(lines):
        table.add_row(
            level,
            line.arm,
            *(_figure(line.cpu_seconds_per_1000_tokens.get(name), ".2f") for name in names),
            *(_figure(line.resident_bytes.get(name), ".0f", scale=1.0 / _MIB) for name in memory),
        )
    return table


def _failures(report: Report) -> list[Text]:
    failures = report.records.failures
    if not failures:
        return []
    words = [
        Text(f"FAILED {each.prompt}, {each.arm}, {each.concurrency} at once: {each.message}", "red")
        for each in failures[:_MAX_LISTED]
    ]
    return [Text(f"{len(failures)} requests failed; their pairs do not count:", "bold red"), *words]


def _table(title: str, names: Iterable[str], figures: Iterable[str], *, caption: str = "", last: str = "") -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, caption=caption)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    if last:
        table.add_column(last)
    return table


def _explained(table: Table) -> RenderableType:
    """The table with title and caption at full width: its own are broken at the table's."""
    title, caption = str(table.title), str(table.caption or "")
    table.title = table.caption = None
    return Group(Text(title, "bold"), table, *([Text(caption, "dim"), Text()] if caption else []))


def _grouped(lines: Sequence[Line]) -> Iterable[tuple[Line, tuple[str, str]]]:
    """Lines with the words for their level and category, each only where it is new."""
    level, category = -1, ""
    for line in lines:
        new_level = line.concurrency != level
        new_category = new_level or line.category != category
        yield line, (str(line.concurrency) if new_level else "", line.category if new_category else "")
        level, category = line.concurrency, line.category


def _ends_section(line: Line, lines: Sequence[Line]) -> bool:
    """Whether it is the last of its level."""
    return line is [each for each in lines if each.concurrency == line.concurrency][-1]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return _NOTHING
    interval = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.estimate:.2f}{interval}"


def _spread(values: Spread | None, *, scale: float) -> str:
    if values is None:
        return _NOTHING
    median, low, high, p95 = (
        scale * value for value in (values.median, values.lower_quartile, values.upper_quartile, values.p95)
    )
    return f"{_short(median)} ({_short(low)}-{_short(high)}) {_short(p95)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100.0 else f"{value:.1f}"


def _figure(value: float | None, format: str, *, scale: float = 1.0) -> str:
    return _NOTHING if value is None else f"{value * scale:{format}}"
