"""The report on a terminal: the advice first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.advise.study import ALL, Study
from tandem.advise.verdict import headline, paragraph
from tandem.bench.statistics import Ratio

_WIDTH = 120  # of the widest table
_MAX_LISTED = 10  # failures on the terminal; the JSON has all
_NOTHING = "-"


def print_study(study: Study, console: Console) -> None:
    """On a narrow terminal or into a pipe nothing is cut off."""
    if not console.is_terminal or console.width < _WIDTH:
        console = Console(file=console.file, highlight=False, width=_WIDTH)
    console.print(render(study))


def render(study: Study) -> RenderableType:
    """All of it."""
    failures = [
        Text(f"FAILED {each.prompt}, {each.arm}, {each.concurrency} at once: {each.message}", "red")
        for each in study.failures[:_MAX_LISTED]
    ]
    return Group(
        Text(headline(study), "bold"),
        Text(paragraph(study)),
        Text(),
        *_titled("By drafter and category, one request at a time: best k, speed-up over plain decoding", _best(study)),
        *_titled("Predicted and measured: speed-up, and tokens a round", _checks(study)),
        *_titled(f"All prompts, drafter {study.best.drafter}: every k", _lengths(study)),
        *_titled("By load: plain decoding, and the best k", _loads(study)),
        *failures,
    )


def _best(study: Study) -> Table:
    table = _table(
        ("drafter", "category"), ("accepted", "draft cost", "k", "tokens a round", "predicted", "bytes a round")
    )
    for profile in study.profiles:
        best = max(study.curve(profile.drafter, profile.category), key=lambda each: each.expected.estimate)
        table.add_row(
            profile.drafter,
            profile.category,
            _figure(profile.rate, ".2f"),
            f"{profile.draft_cost:.3f}",
            str(best.k),
            f"{best.tokens_per_round:.2f}",
            _ratio(best.expected),
            f"{profile.bytes_per_round:.0f}",
            end_section=profile.category == ALL,
        )
    return table


def _checks(study: Study) -> Table:
    table = _table(
        ("at once", "category", "drafter"), ("k", "predicted", "measured", "error", "tokens a round", "measured")
    )
    for check in study.checks:
        table.add_row(
            str(check.concurrency),
            check.category,
            check.drafter,
            "auto" if check.k is None else str(check.k),
            _ratio(check.predicted),
            _ratio(check.measured),
            _NOTHING if check.error is None else f"{round(100.0 * check.error):+d} %",
            f"{_figure(check.predicted_tokens, '.2f')} / {check.measured_tokens:.2f}",
            end_section=check.category == ALL and check.k is None,  # the last of its load
        )
    return table


def _lengths(study: Study) -> Table:
    table = _table(
        ("k",),
        (
            "tokens a round",
            "verify ms",
            "draft ms",
            "network ms",
            "rest ms",
            "serial",
            "expected",
            "always prepared",
            "tokens/s",
        ),
    )
    for each in study.curve(study.best.drafter, ALL):
        stages = each.stages
        table.add_row(
            str(each.k),
            f"{each.tokens_per_round:.2f}",
            *(f"{1e3 * value:.2f}" for value in (stages.verify, stages.draft, stages.wait, stages.rest)),
            *(f"{ratio.estimate:.2f}" for ratio in (each.serial, each.expected, each.overlapped)),
            f"{each.tokens_per_second:.1f}",
        )
    return table


def _loads(study: Study) -> Table:
    table = _table(
        ("at once",), ("plain tokens/s, one", "all together", "best k", "predicted", "measured", "speculate")
    )
    for load, choice in zip(study.loads, study.choices, strict=True):
        table.add_row(
            str(load.concurrency),
            f"{load.tokens_per_second:.1f}",
            f"{load.total_tokens_per_second:.1f}",
            str(choice.prediction.k),
            _ratio(choice.prediction.expected),
            _ratio(choice.measured),
            "yes" if choice.worth else "no",
        )
    return table


def _table(names: Iterable[str], figures: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _titled(title: str, table: Table) -> list[RenderableType]:
    return [Text(title, "bold"), table] if table.row_count else []


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return _NOTHING
    interval = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.estimate:.2f}{interval}"


def _figure(value: float | None, format: str) -> str:
    return _NOTHING if value is None else f"{value:{format}}"
